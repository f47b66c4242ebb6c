# make demo   the main job, end to end, on this machine
# make test   installs what the tests need, then runs all of them
# make test-long  the same in random order, with the race detector everywhere, and what takes too long for every change
# make bench  measures beside what else there is, in one run (BENCHFLAGS=-quick for a look;
#             BEFORE=DIR beside the programs of an older build, too)
# make lint   formatting, vet, static analysis, tidiness
# make fuzz   every fuzz target for a minute (FUZZTIME=10m, FUZZ=Untar for others)
# make sbom   the bill of materials, bin/sandboxer.cdx.json; make notices renews the licence texts
# make vulncheck   known vulnerabilities in what the programs link
# make changelog VERSION=0.2.0   moves changes/unreleased into a new section of CHANGELOG.md

GVISOR  := $(shell go list -m -f '{{.Version}}' gvisor.dev/gvisor)
# Without its version in it, gVisor would restore a checkpoint of any other build.
LDFLAGS := -s -w -X gvisor.dev/gvisor/runsc/version.version=$(GVISOR)
# gVisor's children start in an empty root, where a dynamic binary finds no libraries.
GOBUILD := CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)'

.PHONY: all build demo test test-long lint fuzz sbom notices vulncheck changelog bench clean

all: build

build:
	mkdir -p bin
	$(GOBUILD) -o bin/ ./cmd/...
# What is brought to hosts and into containers, which may be of another platform.
	for arch in amd64 arm64; do for p in egress agent; do GOOS=linux GOARCH=$$arch $(GOBUILD) -o bin/sandboxer-$$p-linux-$$arch ./cmd/sandboxer-$$p || exit; done; done

demo: build
	sh scripts/demo.sh

# The race detector would slow SQLite down by a multiple: its memory is not of Go, and so
# cannot be watched anyway. It takes cgo, which the caller's environment may have switched off.
RACE := -race -gcflags=modernc.org/sqlite/lib=-race=false

# These packages wait for engines, hosts and whole servers, link gVisor, or run the suite on broken fakes: the race detector
# slows them down (and the build, by all of gVisor once more) and sees little there. make test-long runs them with it. They
# are compiled as make build compiles, and so use what it left. go test begins with the first: the slowest are first, so that
# none runs on alone at the end.
ENGINES := adapters/composessh adapters/vmpacker adapters/local adapters/docker adapters/process extensiontest internal/cli \
	cmd/sandboxer docs internal/sshrun internal/usernet internal/egress/gateway internal/catalog registry \
	adapters adapters/local/runner adapters/local/runner/internal/genseccomp
SLOW := internal/manager adapters/remote
# These tests end the broker at every step, take a sandbox through every state, or compare with a model: the same code again
# and again. The race detector makes them four to ten times as long, and watches the other tests of their packages.
STORMS := ^(TestCrash|TestModel|TestModelCrashes|TestOutOfReachKillsNobody|TestOneAbsenceKillsNobody|TestNoStateOutlivesItsBackend|TestSettle|TestUnknownIsNotGone|TestTeardownIsRepeated|TestEndAnywhere|TestImportIsBounded)$$
STORMY := internal/manager internal/checkpoint
# These wait for nearly all of their time, too: for the minutes in which a cloud counts lifetimes, and for one that is silent.
# internal/hosted, which they share, is tested with the race detector.
CLOUDS := adapters/daytona adapters/modal adapters/e2b
# Without those that have no tests: go test would compile all of gVisor with the race detector for one of them.
RACED = $$(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./... | grep . | grep -vxF "$$(go list $(ENGINES:%=./%) $(CLOUDS:%=./%) $(SLOW:%=./%))")

# Three packages at a time: they wait for engines, machines and hosts for a third of their time, also on two processors.
# What vet finds is make lint's. The race detector need not wait a second at the end of every process.
# No flag here may switch go test's cache off (-shuffle does).
GOTEST := GORACE=atexit_sleep_ms=0 SANDBOXER_TEST_NPM=1 go test -vet=off -json -p 3
# Two rows of runs go side by side, because engines and clouds are waited for: ENGINES, and everything else. bench is a module
# of its own, so the go command tests it in a run of its own. The output of the second row goes to a file first: two programs
# that write into one pipe can break each other's lines.
BENCHTEST := $(subst go test,go -C bench test,$(GOTEST))
SECONDJSON := bin/second-test.json
MUSTRUN := CGO_ENABLED=0 go run -trimpath ./internal/mustrun scripts/must-run.txt

test:
	sh scripts/setup.sh
	mkdir -p bin
	CGO_ENABLED=0 go build -trimpath ./...
	{ { CGO_ENABLED=0 $(BENCHTEST) -trimpath -timeout 60m ./...; \
	CGO_ENABLED=0 $(GOTEST) -trimpath -timeout 60m $(CLOUDS:%=./%); \
	CGO_ENABLED=0 $(GOTEST) -trimpath -timeout 60m -run '$(STORMS)' $(STORMY:%=./%); \
	CGO_ENABLED=1 $(GOTEST) -timeout 60m $(RACE) -skip '$(STORMS)' $(SLOW:%=./%) $(RACED); \
	} >$(SECONDJSON) & \
	CGO_ENABLED=0 $(GOTEST) -trimpath -timeout 60m $(ENGINES:%=./%); \
	wait; cat $(SECONDJSON); } | $(MUSTRUN)

# All of make test in another order and with the race detector, and what takes long: kill storms, all groups of
# the conformance suite on Podman, a Debian that boots in an emulated machine.
test-long:
	sh scripts/setup.sh
	mkdir -p bin
	{ CGO_ENABLED=1 SANDBOXER_TEST_WHOLE=1 $(BENCHTEST) -timeout 120m $(RACE) -shuffle=on -count=1 ./... >$(SECONDJSON) & \
	CGO_ENABLED=1 SANDBOXER_TEST_WHOLE=1 $(GOTEST) -timeout 120m $(RACE) -shuffle=on -count=1 ./...; \
	wait; cat $(SECONDJSON); } | $(MUSTRUN) scripts/must-run-long.txt

# The engines measured beside it: gVisor's own command line, and Docker where dockerd is
# installed (scripts/dockerd.sh starts a private one and stops exactly that).
bench: build
	CGO_ENABLED=0 go build -o bin/runsc gvisor.dev/gvisor/runsc
	CGO_ENABLED=0 go -C bench build -o ../bin/bench .
	d=$$(mktemp -d /tmp/sbd.XXXX); host=$$(sh scripts/dockerd.sh start $$d) || host=unix://$$d/none.sock; \
	trap "sh scripts/dockerd.sh stop $$d; rm -rf $$d" EXIT; trap "exit 130" INT TERM; \
	DOCKER_HOST=$$host bin/bench -bin bin -o bin/bench.json $(if $(BEFORE),-before '$(BEFORE)') $(BENCHFLAGS)

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

# As make build compiles, so that gVisor is not compiled once more for it.
lint: export CGO_ENABLED = 0
lint: export GOFLAGS := $(shell go env GOFLAGS) -trimpath
lint:
	test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); exit 1; }
	go vet ./...
	go -C bench vet ./...
# -e: pprof, which only a test of a dependency's test needs, cannot always be had from the
# module proxy, and go.sum says more where it can.
	! go mod tidy -e -diff 2>/dev/null | grep '^[-+][^-+]' | grep -v '^.github.com/google/pprof '
	go -C bench mod tidy -diff
	go run $(STATICCHECK) ./...
	go -C bench run $(STATICCHECK) ./...

FUZZTIME := 1m
FUZZ := .

fuzz:
	sh scripts/fuzz.sh $(FUZZTIME) '$(FUZZ)'

bin/sbom: scripts/sbom/main.go scripts/sbom/go.sum
	cd scripts/sbom && CGO_ENABLED=0 go build -trimpath -o ../../bin/sbom .

sbom: bin/sbom
	bin/sbom -version "$$(git describe --tags --always --dirty)" -o bin/sandboxer.cdx.json

notices: bin/sbom
	bin/sbom -notices THIRD_PARTY_NOTICES

vulncheck:
	sh scripts/vulncheck.sh

changelog:
	sh scripts/changelog.sh '$(VERSION)'

clean:
	rm -rf bin
