#!/bin/sh
# The main job from end to end, on a private data directory: a server, a sandbox with a
# copy of this repository, a command in it, its state and cost, its end, and the proof
# that nothing is left.
set -eu
cd "$(dirname "$0")/.."

dir=$(mktemp -d /tmp/sbxdemo.XXXXXX)
export SANDBOXER_DATA_DIR="$dir/data" SANDBOXER_URL="unix://$dir/api.sock" XDG_STATE_HOME="$dir/state" XDG_RUNTIME_DIR="$dir"
PATH="$PWD/bin:$PATH"
say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }
server=""
finish() {
	if [ -n "$server" ]; then
		sandboxer destroy --all --yes --quiet >/dev/null 2>&1 || true
		kill "$server" 2>/dev/null || true
		wait "$server" 2>/dev/null || true
	fi
	rm -rf "$dir"
}
trap finish EXIT
trap 'exit 130' INT TERM

sandboxer serve --socket "$dir/api.sock" 2>"$dir/serve.log" &
server=$!
tries=0
until sandboxer status >/dev/null 2>&1; do
	tries=$((tries + 1))
	[ "$tries" -lt 100 ] || { cat "$dir/serve.log" >&2; exit 1; }
	sleep 0.1
done

say sandboxer create --profile profile.local --input repo=. --name demo --ttl 10m
say sandboxer exec demo -- sh -c 'pwd; ls; go version'
say sandboxer exec demo -- go test ./internal/mustrun
say sandboxer get demo
say sandboxer stats demo
say sandboxer destroy demo
say sandboxer audit
say sandboxer ls
say sandboxer run --input repo=. -- sh -c 'grep -c func errors.go'

kill "$server"
wait "$server" || true
server=""
printf '\nWhat is left on this machine:\n'
left=0
check() { # WHAT COUNT
	printf '  %-34s %s\n' "$1" "$2"
	left=$((left + $2))
}
check "gVisor processes" "$(grep -lsa -- "--root[=]$dir/" /proc/[0-9]*/cmdline | wc -l)"
roots=$(printf %s "$dir/data/extensions/ext.local" | sha256sum | cut -c1-12)
check "mounts" "$(grep -c "$dir\|/sandboxer-roots/$roots" /proc/self/mountinfo || true)"
owner=$(cat "$dir/data/owner")
check "control groups" "$(find /sys/fs/cgroup -maxdepth 3 -type d -name "*sandboxer-$owner*" 2>/dev/null | wc -l)"
check "sandbox directories" "$(find "$dir/data/extensions" -path '*/box/*' -maxdepth 4 2>/dev/null | wc -l)"
if [ "$left" -ne 0 ]; then
	echo "something is left" >&2
	exit 1
fi
echo "nothing is left"
