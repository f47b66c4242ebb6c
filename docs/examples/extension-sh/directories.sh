#!/usr/bin/env -S sandboxer extension serve-script /bin/sh
# Sandboxes that are directories: an extension as a script, which is started for each call. The method
# is the argument, the plain parts of the request are variables, the answer is lines.
set -eu
root=${SANDBOXER_CONFIG_ROOT:?the configuration needs root}/$SANDBOXER_OWNER
d=$root/${SANDBOXER_ID:-.}
now=$(cat "$d/.generation" 2>/dev/null || echo 0) # the generation that is there, 0 for none
asked=${SANDBOXER_GENERATION:-0}                  # and that which is meant, 0 for any

fail() { # KIND MESSAGE
	printf 'kind=%s\nmessage=%s\n' "$1" "$2"
	exit 1
}
there() { [ "$now" != 0 ] && { [ "$asked" = 0 ] || [ "$asked" = "$now" ]; }; }

case $1 in
describe)
	echo title=Directories
	echo isolation_levels=process
	echo pricing_models=self-hosted
	echo capabilities=check,probe,discover,list
	echo input.motd=text of the file MOTD
	;;
check | provision)
	case ${SANDBOXER_ASKS:-} in
	"" | env) ;; # no command runs in a directory
	*) fail unsupported "directories have no $SANDBOXER_ASKS" ;;
	esac
	[ "$1" = provision ] || exit 0
	[ "$now" -le "$asked" ] || fail conflict "sandbox $SANDBOXER_ID has a newer generation"
	[ "$now" = "$asked" ] || rm -rf "$d" # of a former generation
	mkdir -p "$d"
	echo "${SANDBOXER_INPUT_MOTD:-}" >"$d/MOTD"
	echo "$asked" >"$d/.new" && mv "$d/.new" "$d/.generation" # whole or not there
	;;
wait_ready)
	there || fail not_found "sandbox $SANDBOXER_ID is not there"
	echo "remote_dir=$d"
	;;
teardown)
	[ "$asked" = 0 ] || [ "$now" -le "$asked" ] || exit 0 # a newer one is not meant
	[ ! -e "$d" ] || { rm -rf "$d" && echo "removed=$d"; }
	;;
is_alive) if there; then echo liveness=alive; else echo liveness=gone; fi ;;
discover)
	there || fail not_found "sandbox $SANDBOXER_ID is not there"
	echo "generation=$now"
	;;
list_running)
	for g in "$root"/*/.generation; do
		[ ! -e "$g" ] || echo "handle=$(basename "$(dirname "$g")") $(cat "$g") localhost"
	done
	;;
*) exit 64 ;; # not a method of this extension
esac
