package engine

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// oomKillCount prints how many processes of the container $2 were killed for memory so far.
const oomKillCount = `
p=$("$1" inspect --format '{{.State.Pid}}' "$2") && [ "$p" -gt 0 ] || exit 0
while IFS=: read -r n c g; do
	case ,$c, in
	,,) sed -n 's/^oom_kill //p' "/sys/fs/cgroup$g/memory.events" 2>/dev/null;;
	*,memory,*) sed -n 's/^oom_kill //p' "/sys/fs/cgroup/memory$g/memory.oom_control" 2>/dev/null;;
	esac
done <"/proc/$p/cgroup"
exit 0`

// KilledForMemory reports whether more processes of a container were killed for memory
// than at the last call.
func (en *Engine) KilledForMemory(ctx context.Context, id string) bool {
	out, err := en.Script(ctx, nil, nil, oomKillCount, en.Program, id)
	if err != nil {
		return false
	}
	n := 0
	for f := range strings.FieldsSeq(out) {
		if k, err := strconv.Atoi(f); err == nil {
			n += k
		}
	}
	en.mu.Lock()
	defer en.mu.Unlock()
	if en.oomKills == nil {
		en.oomKills = map[string]int{}
	}
	more := n > en.oomKills[id]
	en.oomKills[id] = n
	return more
}

// measure prints, for every named process, the values of its control groups: cpu
// (nanoseconds), memory, pids, and the octets of its network. $1: directory to size, or "".
const measure = `
[ -z "$1" ] || echo "disk $(du -sk -- "$1" 2>/dev/null | cut -f1)"; shift
for p; do
	v1=
	while IFS=: read -r n c g; do
		case ,$c, in
		,,) [ -d "/sys/fs/cgroup$g" ] && d=/sys/fs/cgroup$g || { [ -d "/sys/fs/cgroup/unified$g" ] && d=/sys/fs/cgroup/unified$g || continue; }
			# Where both are mounted, which lists this one last, the old one has the controllers.
			[ -z "$v1" ] && [ -e "$d/cpu.stat" ] && sed -n 's/^usage_usec /cpu_us /p' "$d/cpu.stat"
			[ -e "$d/memory.current" ] && echo "mem $(cat "$d/memory.current")"
			[ -e "$d/pids.current" ] && echo "pids $(cat "$d/pids.current")";;
		*,cpuacct,*) for d in /sys/fs/cgroup/cpuacct /sys/fs/cgroup/cpu,cpuacct /sys/fs/cgroup/cpu; do [ ! -e "$d$g/cpuacct.usage" ] || { echo "cpu $(cat "$d$g/cpuacct.usage")"; v1=1; break; }; done;;
		*,memory,*) [ ! -e "/sys/fs/cgroup/memory$g/memory.usage_in_bytes" ] || echo "mem $(cat "/sys/fs/cgroup/memory$g/memory.usage_in_bytes")";;
		*,pids,*) [ ! -e "/sys/fs/cgroup/pids$g/pids.current" ] || echo "pids $(cat "/sys/fs/cgroup/pids$g/pids.current")";;
		esac
	done <"/proc/$p/cgroup"
	sed -n 's/^ *\([a-z][a-z]*[0-9]*\): */net \1 /p' "/proc/$p/net/dev" 2>/dev/null
done
exit 0`

// Stats returns what containers use together, and the size of the directory dir of the host;
// "" is none. Values that a host does not report are negative.
func (en *Engine) Stats(ctx context.Context, list []Container, dir string) (st sandboxer.Stats, err error) {
	args := []string{dir}
	for _, c := range list {
		if c.State.Pid > 0 {
			args = append(args, strconv.Itoa(c.State.Pid))
		}
		st.MemoryLimit += c.HostConfig.Memory
	}
	if slices.ContainsFunc(list, func(c Container) bool { return c.HostConfig.Memory == 0 }) {
		st.MemoryLimit = 0
	}
	out, err := en.HostScript(ctx, nil, nil, measure, args...)
	if err != nil {
		return st, err
	}
	st.At = time.Now()
	st.CPU, st.MemoryBytes, st.PIDs, st.DiskBytes, st.RxBytes, st.TxBytes = -1, -1, -1, -1, -1, -1
	add := func(to *int64, n int64) { *to = max(*to, 0) + n }
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		n, _ := strconv.ParseInt(f[1], 10, 64)
		switch f[0] {
		case "disk":
			st.DiskBytes = n * 1024
		case "cpu":
			add((*int64)(&st.CPU), n)
		case "cpu_us":
			add((*int64)(&st.CPU), n*1000)
		case "mem":
			add(&st.MemoryBytes, n)
		case "pids":
			add(&st.PIDs, n)
		case "net":
			if len(f) > 10 && f[1] != "lo" {
				rx, _ := strconv.ParseInt(f[2], 10, 64)
				tx, _ := strconv.ParseInt(f[10], 10, 64)
				add(&st.RxBytes, rx)
				add(&st.TxBytes, tx)
			}
		}
	}
	return st, nil
}
