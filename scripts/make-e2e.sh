#!/bin/sh
# make e2e in one step: a sandbox of the compose project in DIR, a command in it, and its
# end, whatever happened. Ends with the command's exit code.
#
#	scripts/make-e2e.sh DIR COMMAND [ARG...]
#
# PROFILE (profile.compose-e2e), SERVICE (the first of the file) and TTL (1h) of the
# environment change what is asked for.
set -eu
[ $# -ge 2 ] || { echo "usage: scripts/make-e2e.sh DIR COMMAND [ARG...]" >&2; exit 2; }
repo=$(cd "$1" && pwd)
shift

# By its label it is found also when create was interrupted and its ID is not known.
mark="make-e2e=$(date +%s)-$$"
id=""
finish() {
	code=$?
	trap - EXIT
	trap '' INT TERM HUP
	if [ -n "$id" ]; then set -- "$id"; else set -- --label "$mark"; fi
	sandboxer destroy "$@" --yes --quiet >&2 || echo "make-e2e: the sandbox ${id:-labelled $mark} could not be destroyed; it ends after its time to live" >&2
	exit $code
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

set -- -- "$@"
id=$(sandboxer create --quiet --profile "${PROFILE:-profile.compose-e2e}" --ttl "${TTL:-1h}" --label "$mark" --input "repo=$repo" ${SERVICE:+--input "service=$SERVICE"})
code=0
sandboxer exec "$id" "$@" || code=$?
exit $code
