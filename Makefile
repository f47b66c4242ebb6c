# make demo   the main job, end to end, on this machine
# make test   installs what the tests need, then runs all of them
# make bench  measures beside what else there is, in one run (BENCHFLAGS=-quick for a look;
#             BEFORE=DIR beside the programs of an older build, too)
# make lint   formatting, vet, static analysis, tidiness
# make fuzz   every fuzz target for a minute (FUZZTIME=10m, FUZZ=Untar for others)
# make sbom   the bill of materials, bin/sandboxer.cdx.json; make notices renews the licence texts
# make vulncheck   known vulnerabilities in what the programs link

GVISOR  := $(shell go list -m -f '{{.Version}}' gvisor.dev/gvisor)
# Without its version in it, gVisor would restore a checkpoint of any other build.
LDFLAGS := -s -w -X gvisor.dev/gvisor/runsc/version.version=$(GVISOR)
# gVisor's children start in an empty root, where a dynamic binary finds no libraries.
GOBUILD := CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)'

.PHONY: all build demo test lint fuzz sbom notices vulncheck bench clean

all: build

build:
	mkdir -p bin
	$(GOBUILD) -o bin/ ./cmd/...
# What is brought to hosts and into containers, which may be of another platform.
	for arch in amd64 arm64; do for p in egress agent; do GOOS=linux GOARCH=$$arch $(GOBUILD) -o bin/sandboxer-$$p-linux-$$arch ./cmd/sandboxer-$$p || exit; done; done

demo: build
	sh scripts/demo.sh

# The race detector would slow SQLite down by a multiple: its memory is not of Go, and so
# cannot be watched anyway.
RACE := -race -gcflags=modernc.org/sqlite/lib=-race=false

# Three packages at a time: they wait for engines, machines and hosts for a third of their time, also on two processors.
# What vet finds is make lint's. The race detector need not wait a second at the end of every process.
test:
	sh scripts/setup.sh
	go build ./...
	GORACE=atexit_sleep_ms=0 SANDBOXER_TEST_NPM=1 SANDBOXER_TEST_DEBIAN=1 go test -vet=off -json $(RACE) -shuffle=on -p 3 -timeout 60m ./... | go run ./internal/mustrun scripts/must-run.txt

# The engines measured beside it: gVisor's own command line, and Docker where dockerd is
# installed (scripts/dockerd.sh starts a private one and stops exactly that).
bench: build
	CGO_ENABLED=0 go build -o bin/runsc gvisor.dev/gvisor/runsc
	CGO_ENABLED=0 go build -o bin/bench ./bench
	d=$$(mktemp -d /tmp/sbd.XXXX); host=$$(sh scripts/dockerd.sh start $$d) || host=unix://$$d/none.sock; \
	trap "sh scripts/dockerd.sh stop $$d; rm -rf $$d" EXIT; trap "exit 130" INT TERM; \
	DOCKER_HOST=$$host bin/bench -bin bin -o bin/bench.json $(if $(BEFORE),-before '$(BEFORE)') $(BENCHFLAGS)

lint:
	test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); exit 1; }
	go vet ./...
# -e: pprof, which only a test of a dependency's test needs, cannot always be had from the
# module proxy, and go.sum says more where it can.
	! go mod tidy -e -diff 2>/dev/null | grep '^[-+][^-+]' | grep -v '^.github.com/google/pprof '
	go run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...

FUZZTIME := 1m
FUZZ := .

fuzz:
	sh scripts/fuzz.sh $(FUZZTIME) '$(FUZZ)'

bin/sbom: scripts/sbom/main.go scripts/sbom/go.sum
	cd scripts/sbom && go build -trimpath -o ../../bin/sbom .

sbom: bin/sbom
	bin/sbom -version "$$(git describe --tags --always --dirty)" -o bin/sandboxer.cdx.json

notices: bin/sbom
	bin/sbom -notices THIRD_PARTY_NOTICES

vulncheck:
	sh scripts/vulncheck.sh

clean:
	rm -rf bin
