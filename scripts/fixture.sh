#!/bin/sh
# Makes the fixtures of stored state: what the programs of one commit leave in a data
# directory, for the tests that hold today's programs to it (internal/compattest).
#
#   scripts/fixture.sh COMMIT      writes internal/compattest/testdata/<time>-<commit>.tar.gz
#
# Run as root on Linux with git history. The programs are built from a worktree of their own
# and driven by their command line, on a data directory that is removed again. The fixture has the
# database, the keys of that one installation, portable snapshots, and what ext.local writes
# down; nothing of memory, images or this machine's files.
set -eu

test $# = 1 || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
test "$(id -u)" = 0 || { echo "sandboxes with limits need root" >&2; exit 1; }
cd "$(git rev-parse --show-toplevel)"
commit=$(git rev-parse --verify --short=7 "$1^{commit}")
out=$PWD/internal/compattest/testdata
at=$(TZ=UTC git log -1 --format=%cd --date=format-local:%Y%m%d-%H%M "$commit")

work=$(mktemp -d /tmp/sbxf.XXXX)
server=
box() { "$work/bin/sandboxer" "$@"; }
start() {
	"$work/bin/sandboxer" serve >>"$work/log" 2>&1 &
	server=$!
	for i in $(seq 300); do
		test -S "$work/s" && return 0
		kill -0 "$server" || break
		sleep 0.1
	done
	echo "the server does not come up" >&2
	return 1
}
stop() {
	test -n "$server" || return 0
	kill "$server"
	wait "$server" || true
	server=
	rm -f "$work/s"
}
clean() {
	code=$?
	trap - EXIT
	if test -x "$work/bin/sandboxer" && test -d "$work/d"; then
		test -n "$server" || start || true
		for id in $(box ls -q || true); do box destroy "$id" >/dev/null || true; done
		stop
	fi
	test "$code" = 0 || cat "$work/log" >&2 || true
	git worktree remove --force "$work/src" || true
	# What its sandboxes ran on is left mounted for the next server.
	for root in $(awk -v w="$work/" 'index($4, w) == 1 || index($4 "/", w) > 0 { print $5 }' /proc/self/mountinfo); do
		umount -R "$root" && rmdir "$root" && rmdir "$(dirname "$root")" || true
	done
	if test -s "$work/d/owner"; then
		find /sys/fs/cgroup -depth -type d -path "*/sandboxer-$(cat "$work/d/owner")*" -exec rmdir {} + || true
	fi
	rm -rf --one-file-system "$work"
	exit "$code"
}
trap clean EXIT
trap 'exit 130' INT TERM

git worktree add --quiet --detach "$work/src" "$commit"
mkdir "$work/bin"
gvisor=$(cd "$work/src" && go list -m -f '{{.Version}}' gvisor.dev/gvisor)
(cd "$work/src" && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=$gvisor" -o "$work/bin/" ./cmd/...)

export HOME="$work" SANDBOXER_DATA_DIR="$work/d" SANDBOXER_SOCKET="$work/s"
export SANDBOXER_CONFIG_DIR="$work/c"
unset SANDBOXER_URL SANDBOXER_KEY SANDBOXER_PROFILE || true
# What is paused must not expire before the fixture is of no use any more.
mkdir -p "$work/c/profiles"
cat >"$work/c/profiles/profile.former.yaml" <<YAML
id: profile.former
extension: ext.local
requires: [exec, files]
network: none
limits: {disk: 8GiB}
ttl: 30m
max_ttl: 24h
YAML
if grep -rqs max_paused "$work/src/internal/catalog"; then
	echo 'max_paused: 36500d' >>"$work/c/profiles/profile.former.yaml"
fi
start

# make NAME: a sandbox with the same files in each fixture.
make() {
	box create --profile former --ttl 1h -q --name "$1" --env SECRET=of-the-fixture --label "is=$1" >/dev/null
	box exec "$1" -- sh -c 'cd /workspace && mkdir -p d/e "with space" && echo kept >f && for i in $(seq 40); do echo "part $i"; seq 1000; done >d/long && ln -s f link &&
		ln f d/e/hard && chmod 750 d/e && printf "#!/bin/sh\n" >d/run && chmod 755 d/run && : >"with space/empty"'
}

make runs
make ended
box destroy ended >/dev/null
box key create --name fixture --tenant default --scope read --ttl 24h -q >/dev/null
box credits grant acme 12.5 >/dev/null
snapshots='' paused=''
if box snapshot create --help 2>/dev/null | grep -q -e --portable; then
	box snapshot create runs --portable --name base -q >/dev/null
	box snapshot create runs --native --name memory -q >/dev/null
	snapshots='"base","memory"'
	make sleeps
	make rests
	box pause sleeps --depth disk >/dev/null
	box pause rests --depth files >/dev/null
	paused='"sleeps","rests"'
fi
box exec runs -- sh -c 'cd /workspace && find . -type f | sort | xargs -d "\n" sha256sum' >"$work/workspace.sha256"
stop

mkdir "$work/out"
cat >"$work/out/fixture.json" <<JSON
{"commit":"$commit","at":"$at","schema":$(ls "$work"/src/internal/sqlstore/migrations/sqlite | wc -l),"gvisor":"$gvisor","running":["runs"],"ended":["ended"],"snapshots":[$snapshots],"paused":[$paused]}
JSON
cp -R "$work/workspace.sha256" "$work/c" "$work/out/"
(cd "$work/d" && find . -xdev -type f \( -path './sandboxer.db*' -o -path ./owner -o -path ./key -o -path './snapshots/*' \
	-o -path './extensions/*/box/*/record.json' -o -path './extensions/*/snapshot/*/*.json' \) ! -name '*.lock' | sort) >"$work/list"
mkdir "$work/out/d"
tar -C "$work/d" -c -T "$work/list" | tar -C "$work/out/d" -x
mkdir -p "$out"
rm -f "$out"/*-"$commit".tar.gz
tar -C "$work/out" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct "$commit")" -c . | gzip -9n >"$out/$at-$commit.tar.gz"
ls -l "$out/$at-$commit.tar.gz"
