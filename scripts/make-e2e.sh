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

id=""
finish() {
	code=$?
	trap - EXIT INT TERM HUP
	[ -z "$id" ] || sandboxer destroy "$id" --yes --quiet >&2 || echo "make-e2e: sandbox $id could not be destroyed; it ends after its time to live" >&2
	exit $code
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

set -- -- "$@"
id=$(sandboxer create --quiet --profile "${PROFILE:-profile.compose-e2e}" --ttl "${TTL:-1h}" --input "repo=$repo" ${SERVICE:+--input "service=$SERVICE"})
code=0
sandboxer exec "$id" "$@" || code=$?
exit $code
