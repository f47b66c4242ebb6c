// Package marked has the scripts by which commands are ended from outside, with all that they started: what
// carries a mark, as a variable of its environment, or a tag, which goes along where that is dropped. They need a
// POSIX shell with cat, grep, tr and awk, and /proc.
package marked

import (
	"crypto/sha256"
	"encoding/binary"
	"strconv"
)

// Tagging is text for a shell that has it, and everything that it starts, carry tag where it is seen from
// outside: as a limit that Linux has long stopped to heed, on locks of files. It goes along where a process
// leaves its session, drops its environment and loses its parent.
func Tagging(tag string) string {
	return "[ ! -e /proc/self/limits ] || ulimit -w " + tag + " 2>/dev/null || ulimit -x " + tag + " 2>/dev/null || :\n" // in dash and BusyBox, in bash
}

// Tag is the tag of what is known by name: a number, the same for the same name.
func Tag(name string) string {
	sum := sha256.Sum256([]byte(name))
	return strconv.FormatUint(binary.BigEndian.Uint64(sum[:8])>>2|1<<61, 10) // a limit, and not the absence of one
}

// TaggingOnce is Tagging where nothing is tagged yet: who has tagged what all of it runs in ends it, too.
func TaggingOnce(tag string) string {
	return "if [ \"$(ulimit -S -w 2>/dev/null || ulimit -S -x 2>/dev/null)\" = unlimited ]; then\n" + Tagging(tag) + "fi\n"
}

// each calls act with the PID of every process that carries $1, NAME=value, in its environment or
// among its arguments, or the tag $2.
const each = `
has() { cat "/proc/$2/environ" "/proc/$2/cmdline" 2>/dev/null | tr '\0' '\n' | grep -qxF "$1"; }
# A grep that takes a NUL for the end sees only the first variable: then all are looked at.
if printf 'a\0b\n' | grep -qF b; then some=1; else some=; fi
each() {
	if [ -n "$some" ]; then f=$(grep -lsF "$1" /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null); else f=$(echo /proc/[0-9]*/environ); fi
	t=
	[ -z "$2" ] || t=$(grep -ls "^Max file locks .* $2 " /proc/[0-9]*/limits 2>/dev/null)
	for p in $t - $f; do
		[ "$p" != - ] || { t=; continue; }
		p=${p#/proc/} p=${p%/*}
		[ -n "$t" ] || has "$1" "$p" || continue
		act "$p"
	done
}
`

// Ending kills everything that carries $1, NAME=value, in its environment or among its arguments, or the
// tag $3, and before that the process group $2 if there is one and its leader carries it too. It looks
// again until three looks find nothing, for what was started meanwhile and for what could
// not be seen: in the middle of an execve a process has neither environment nor
// arguments. Such a one is waited for, and a look during which a process went through an
// execve says nothing. 3: some of it would not end.
const Ending = each + `
nap() { sleep 0.0$1 2>/dev/null || sleep 1; }
# Where the environment of each process ends, as the kernel numbers the fields: at 0 in the
# middle of an execve, and somewhere else after it.
ends() { cat /proc/[0-9]*/stat 2>/dev/null | awk '{ p = $1; sub(/.*\) /, "") } NF >= 49 && $21 > 0 { print p, $49 }' 2>/dev/null; }
# Whether a process that may be looked into was in the middle of an execve from $1 to $2.
amid() {
	for p in $(printf '%s\n' "$1" - "$2" | awk '$1 == "-" { now = 1; next } !now { was[$1] = $2; next } $2 == 0 || $1 in was && $2 != was[$1] { print $1 }' 2>/dev/null); do
		[ -r "/proc/$p/environ" ] && (: <"/proc/$p/environ") 2>/dev/null && return
	done
	return 1
}
act() {
	case $(cat "/proc/$1/stat" 2>/dev/null) in *") Z "*|*") X "*|"") return;; esac
	n=1
	kill -KILL "$1" 2>/dev/null
}
[ -z "$2" ] || { [ -r "/proc/$2/cmdline" ] && ! has "$1" "$2"; } || kill -KILL "-$2" 2>/dev/null
[ -r /proc/self/environ ] || exit 0
i=0 none=0 sure=0 naps=0 was=$(ends)
while [ $((i += 1)) -le 13 ]; do
	n=
	each "$1" "$3"
	now=$(ends) none=$((none + 1))
	if [ -n "$n" ]; then
		none=0 sure=0
		[ $i -lt 3 ] || nap 9
	elif amid "$now" "$now"; then
		[ $naps -ge 9 ] || : $((naps += 1))
		nap $naps
	elif ! amid "$was" "$now"; then
		[ $((sure += 1)) -lt 3 ] || exit 0
	fi
	was=$now
done
# Somebody here is always in the middle of an execve: as far as can be seen.
[ $none -lt 3 ] || exit 0
exit 3`

// These scripts are for the inside of a container, where there is nothing of ours. They look for
// what carries a mark; their arguments are its name, its value and its tag, or "". They need
// a POSIX shell with cat, grep and tr, and find nothing without /proc.
const (
	// Kill ends it, as Ending does, and exits with 3 if some of it would not end.
	Kill = unmarked + Ending
	// Look exits with 4 if there is some of it.
	Look = unmarked + each + `
act() {
	case $(cat "/proc/$1/stat" 2>/dev/null) in *") Z "*|*") X "*|"") return;; esac
	exit 4
}
each "$1" "$3"
each "$1" "$3"
exit 0`
	// Signal sends the signal whose number is the further argument to that of it which
	// has no parent inside.
	Signal = unmarked + each + `
sig=$4
act() { grep -qs '^PPid:[^0-9]*0$' "/proc/$1/status" && kill "-$sig" "$1"; }
each "$1" "$3"
exit 0`
	// unmarked puts the mark together. The script's own shell so has no argument that is one.
	unmarked = `
m=$1=$2; shift 2; set -- "$m" "" "$@"`
)
