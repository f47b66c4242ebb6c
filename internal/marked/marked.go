// Package marked has the scripts that end commands from outside, with all that they started. They find processes
// by a mark, which is a variable of the environment, or by a tag, which is kept when the environment is dropped. They need a
// POSIX shell with cat, grep, tr and awk, and /proc.
package marked

import (
	"crypto/sha256"
	"encoding/binary"
	"strconv"
)

// Tagging is text for a shell that gives the shell, and everything that it starts, a tag that is visible from
// outside: a limit on locks of files, which Linux stopped enforcing long ago. It is kept when a process
// leaves its session, drops its environment and loses its parent.
func Tagging(tag string) string {
	return "[ ! -e /proc/self/limits ] || ulimit -w " + tag + " 2>/dev/null || ulimit -x " + tag + " 2>/dev/null || :\n" // in dash and BusyBox, in bash
}

// Tag is the tag for a name: a number, the same for the same name.
func Tag(name string) string {
	sum := sha256.Sum256([]byte(name))
	return strconv.FormatUint(binary.BigEndian.Uint64(sum[:8])>>2|1<<61, 10) // a limit, and not the absence of one
}

// each calls act with the PID of every process that has $1, NAME=value, in its environment or
// among its arguments, or the tag $2.
const each = `
has() { cat "/proc/$2/environ" "/proc/$2/cmdline" 2>/dev/null | tr '\0' '\n' | grep -qxF "$1"; }
# A grep that takes a NUL for the end sees only the first variable: then all are looked at.
if printf 'a\0b\n' | grep -qF b; then some=1; else some=; fi
each() {
	m=$1 t=$2
	set -- /proc/[0-9]*/environ /proc/[0-9]*/cmdline # here, where no grep is among them yet
	if [ -n "$some" ]; then f=$(grep -lsF "$m" "$@" 2>/dev/null); else f=$(echo /proc/[0-9]*/environ); fi
	[ -z "$t" ] || t=$(grep -ls "^Max file locks .* $t " /proc/[0-9]*/limits 2>/dev/null)
	for p in $t - $f; do
		[ "$p" != - ] || { t=; continue; }
		p=${p#/proc/} p=${p%/*}
		[ -n "$t" ] || has "$m" "$p" || continue
		act "$p"
	done
}
`

// Ending kills everything that has $1, NAME=value, in its environment or among its arguments, or the
// tag $3, and before that the process group $2 if there is one and its leader has it too. It looks
// again until three looks find nothing, for processes that were started meanwhile and for those that could
// not be seen: in the middle of an execve a process has neither environment nor
// arguments. It waits for such a process, and a look during which a process went through an
// execve proves nothing. 3: some of it would not end.
const Ending = each + `
nap() { sleep 0.0$1 2>/dev/null || sleep 1; }
nl='
'
# Which processes are in the middle of an execve, in $mid, and which went through one since the last call, in $past: the kernel
# says that the environment of the former ends at 0, and that of the latter somewhere else than before.
execs() {
	was=$({ printf '%s\n' "$was" -; cat /proc/[0-9]*/stat 2>/dev/null; } | awk '
		!now { if ($0 == "-") now = 1; else was[$1] = $2; next }
		{ p = $1; sub(/.*\) /, "") }
		NF >= 49 && $21 > 0 {
			line[++n] = p " " $49
			if ($49 == 0) mid = mid " " p
			else if (p in was && was[p] != $49) past = past " " p
		}
		END { print mid; print past; for (i = 1; i <= n; i++) print line[i] }' 2>/dev/null)
	mid=${was%%"$nl"*} was=${was#*"$nl"}
	past=${was%%"$nl"*} was=${was#*"$nl"}
}
# Whether one of these may be looked into.
visible() {
	for p in $1; do
		[ -r "/proc/$p/environ" ] && { true <"/proc/$p/environ"; } 2>/dev/null && return
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
i=0 none=0 sure=0 naps=0 was=
execs
while [ $((i += 1)) -le 13 ]; do
	n=
	each "$1" "$3"
	execs
	none=$((none + 1))
	if [ -n "$n" ]; then
		none=0 sure=0
		[ $i -lt 3 ] || nap 9
	elif visible "$mid"; then
		[ $naps -ge 9 ] || : $((naps += 1))
		nap $naps
	elif ! visible "$mid $past"; then
		[ $((sure += 1)) -lt 3 ] || exit 0
	fi
done
# Somebody here is always in the middle of an execve: as far as can be seen.
[ $none -lt 3 ] || exit 0
exit 3`

// These scripts run inside a container, which has none of our programs. They look for
// processes with a mark; their arguments are its name, its value and its tag, or "". They need
// a POSIX shell with cat, grep and tr, and find nothing without /proc.
const (
	// Kill ends such processes, as Ending does, and exits with 3 if some of them would not end.
	Kill = unmarked + Ending
	// Look exits with 4 if there are some.
	Look = unmarked + each + `
act() {
	case $(cat "/proc/$1/stat" 2>/dev/null) in *") Z "*|*") X "*|"") return;; esac
	exit 4
}
each "$1" "$3"
each "$1" "$3"
exit 0`
	// Signal sends the signal whose number is the further argument to those of them that
	// have no parent inside.
	Signal = unmarked + each + `
sig=$4
act() { grep -qs '^PPid:[^0-9]*0$' "/proc/$1/status" && kill "-$sig" "$1"; }
each "$1" "$3"
exit 0`
	// unmarked puts the mark together, so that no argument of the script's own shell contains it.
	unmarked = `
m=$1=$2; shift 2; set -- "$m" "" "$@"`
)
