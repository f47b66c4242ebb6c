#!/bin/sh
# Start or stop a private Docker engine below DIR: its own socket, data and pid file,
# no bridge, no firewall rules, and a runtime runsc for whoever puts that at DIR/runsc. It needs root and an installed dockerd, and touches no
# other engine of this machine.
#
#	scripts/dockerd.sh start DIR [OPTION...]    prints the DOCKER_HOST to use; options are dockerd's
#	scripts/dockerd.sh stop DIR     stops exactly that engine, and what is left of it if it was killed
#	scripts/dockerd.sh keep DIR [OPTION...]     starts it, and stops it at the end of the
#	                                input: whoever started it may die in any way
set -eu

usage() {
	echo "usage: scripts/dockerd.sh start|stop|keep DIR [OPTION...]" >&2
	exit 2
}
[ $# -ge 2 ] || usage
mkdir -p "$2"
dir=$(cd "$2" && pwd)
what=$1
shift 2
pidfile=$dir/pid

# running says whether the recorded process is still the engine started here.
running() {
	[ -s "$pidfile" ] && tr '\0' ' ' <"/proc/$(cat "$pidfile")/cmdline" 2>/dev/null | grep -q -- "--data-root $dir/data "
}

# own lists the processes that run the containers of an engine that was killed, those of its containers, and the IDs of these. An engine that
# uses this machine's containerd has none.
own() {
	set --
	for f in $(grep -lsF -- "$dir/exec/containerd/" /proc/[0-9]*/cmdline); do
		argv=$(tr "\0" " " 2>/dev/null <"$f") || continue
		case ${argv%% *} in containerd | */containerd | containerd-shim* | */containerd-shim*) ;; *) continue ;; esac
		f=${f#/proc/}
		set -- "$@" "${f%/*}"
		case $argv in *" -id "*) argv=${argv#* -id } && ids="$ids ${argv%% *}" ;; esac
	done
	[ $# -eq 0 ] || pids=$(ps -eo pid=,ppid= | awk -v own="$*" 'BEGIN { for (n = split(own, first, " "); n > 0; n--) on[first[n]] = 1 }
		{ of[$1] = $2 }
		END {
			do { more = 0; for (p in of) if (!(p in on) && of[p] in on) on[p] = more = 1 } while (more)
			for (p in on) print p
		}')
}

# lives says whether a process lives, which one that nobody has taken note of does not.
lives() { [ -n "$(tr -d '\0' 2>/dev/null <"/proc/$1/cmdline")" ]; } 2>/dev/null

case $what in
start)
	if running; then
		echo "unix://$dir/sock"
		exit 0
	fi
	[ "$(id -u)" -eq 0 ] || { echo "dockerd.sh: a Docker engine needs root" >&2; exit 1; }
	dockerd=$(PATH=$PATH:/usr/sbin:/sbin command -v dockerd) || { echo "dockerd.sh: no dockerd is installed" >&2; exit 1; }
	# A socket's path has room for 107 bytes, and containerd adds to this one.
	[ ${#dir} -le 60 ] || { echo "dockerd.sh: $dir is too long a path for the engine's sockets" >&2; exit 1; }
	rm -f "$pidfile"
	nohup "$dockerd" --data-root "$dir/data" --exec-root "$dir/exec" -H "unix://$dir/sock" --pidfile "$pidfile" \
		--add-runtime "runsc=$dir/runsc" --bridge=none --iptables=false --ip6tables=false "$@" >"$dir/log" 2>&1 </dev/null &
	pid=$!
	i=0
	until DOCKER_HOST=unix://$dir/sock docker version >/dev/null 2>&1; do
		i=$((i + 1))
		if [ $i -ge 300 ] || ! kill -0 $pid 2>/dev/null; then
			echo "dockerd.sh: the engine does not answer; its last words:" >&2
			tail -n 5 "$dir/log" >&2
			kill $pid 2>/dev/null || true
			exit 1
		fi
		sleep 0.1
	done
	echo "unix://$dir/sock"
	;;
stop)
	if running; then
		pid=$(cat "$pidfile")
		kill "$pid"
		kill -CONT "$pid" # it may have been stopped
		i=0
		while kill -0 "$pid" 2>/dev/null; do
			i=$((i + 1))
			[ $i -lt 300 ] || { echo "dockerd.sh: engine $pid does not stop" >&2; exit 1; }
			sleep 0.1
		done
	else
		pids='' ids=''
		own
		[ -z "$pids" ] || kill -KILL $pids 2>/dev/null || true
		for id in $ids; do # who is frozen dies when it is not
			find /sys/fs/cgroup -path "*$id*" -name freezer.state -exec sh -c 'echo THAWED >"$1"' sh {} \; 2>/dev/null || true
		done
		i=0
		for pid in $pids; do
			while lives "$pid"; do
				i=$((i + 1))
				[ $i -lt 300 ] || { echo "dockerd.sh: process $pid of the engine does not end" >&2; exit 1; }
				sleep 0.1
			done
		done
		for id in $ids; do
			find /sys/fs/cgroup -depth -type d -name "*$id*" -exec rmdir {} \; 2>/dev/null || true
		done
	fi
	# What the engine had mounted goes before its files.
	grep -F " $dir/" /proc/self/mounts | cut -d' ' -f2 | sort -r | while read -r m; do umount -l "$m" || true; done
	rm -rf "$dir/data" "$dir/exec" "$dir/sock" "$dir/log" "$dir/runsc" "$pidfile"
	rmdir "$dir" 2>/dev/null || true
	;;
keep)
	trap '' HUP INT TERM # of a terminal or a process group that its owner ends with
	trap 'sh "$0" stop "$dir"' EXIT
	sh "$0" start "$dir" "$@"
	exec >&- # who reads the address reads to the end
	cat >/dev/null
	;;
*) usage ;;
esac
