package agent

import (
	"math"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

func (s *server) serveStats(w http.ResponseWriter, r *http.Request) { writeJSON(w, s.measure()) }

// oomKills returns how many processes of our control group were killed for its memory limit; -1
// if unknown. Every command asks for it; it is cheap.
func oomKills() int64 {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return -1
	}
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) < 3 {
			continue
		}
		root, file := "", ""
		switch {
		case f[0] == "0" && f[1] == "":
			root, file = "/sys/fs/cgroup", "memory.events"
		case f[1] == "memory":
			root, file = "/sys/fs/cgroup/memory", "memory.oom_control"
		default:
			continue
		}
		for _, dir := range [...]string{filepath.Join(root, f[2]), root} {
			text, err := os.ReadFile(filepath.Join(dir, file))
			if err != nil {
				continue
			}
			for line := range strings.Lines(string(text)) {
				if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
					if n, err := strconv.ParseInt(strings.TrimSpace(n), 10, 64); err == nil {
						return n
					}
				}
			}
		}
	}
	return -1
}

// measure reads the consumption of the sandbox: of our control group if there is one,
// else of all visible processes.
func (s *server) measure() sandboxer.Stats {
	st := sandboxer.Stats{At: time.Now().UTC(), CPU: -1, MemoryBytes: -1, DiskBytes: -1, PIDs: -1, RxBytes: -1, TxBytes: -1}
	if g, ok := ownGroup(); ok {
		st.CPU, st.MemoryBytes, st.MemoryLimit, st.PIDs = g.cpu, g.memory, g.limit, g.pids
	}
	if st.CPU < 0 || st.MemoryBytes < 0 || st.PIDs < 0 {
		cpu, mem, n := sumProcesses()
		if st.CPU < 0 {
			st.CPU = cpu
		}
		if st.MemoryBytes < 0 {
			st.MemoryBytes = mem
		}
		if st.PIDs < 0 {
			st.PIDs = n
		}
	}
	st.CPU = s.cpu.rising(st.CPU)
	dir := s.settings().workdir
	if dir == "" {
		dir = "/"
	}
	if used, total, err := disk(dir); err == nil {
		st.DiskBytes, st.DiskLimit = used, total
	}
	if rx, tx, ok := network(); ok {
		st.RxBytes, st.TxBytes = rx, tx
	}
	return st
}

func disk(dir string) (used, total int64, err error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return 0, 0, err
	}
	clamp := func(blocks uint64) int64 {
		if fs.Bsize <= 0 || blocks > math.MaxInt64/uint64(fs.Bsize) {
			return 0
		}
		return int64(blocks) * int64(fs.Bsize)
	}
	return clamp(fs.Blocks - min(fs.Bfree, fs.Blocks)), clamp(fs.Blocks), nil
}

type groupStats struct {
	cpu                 time.Duration
	memory, limit, pids int64
}

// ownGroup reads our control group. The root group of a machine is not ours: it has no
// memory.current.
func ownGroup() (groupStats, bool) {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return groupStats{}, false
	}
	for line := range strings.Lines(string(b)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if !ok {
			continue
		}
		for _, dir := range [...]string{filepath.Join("/sys/fs/cgroup", path), "/sys/fs/cgroup"} {
			g := groupStats{cpu: -1, memory: readInt(dir + "/memory.current"), pids: readInt(dir + "/pids.current")}
			if g.memory < 0 {
				continue
			}
			g.limit = max(0, readInt(dir+"/memory.max"))
			if cpu, err := os.ReadFile(dir + "/cpu.stat"); err == nil {
				for line := range strings.Lines(string(cpu)) {
					if v, ok := strings.CutPrefix(line, "usage_usec "); ok {
						if n, err := strconv.ParseInt(strings.TrimSpace(v), 10, 64); err == nil {
							g.cpu = time.Duration(n) * time.Microsecond
						}
					}
				}
			}
			return g, true
		}
	}
	return groupStats{}, false
}

func readInt(file string) int64 {
	b, err := os.ReadFile(file)
	if err != nil {
		return -1
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return -1 // "max"
	}
	return n
}

// sumProcesses adds up the process list. The time of an ended process is in the account
// of its reaper, which in the end is this process.
func sumProcesses() (cpu time.Duration, memory, n int64) {
	const tick = time.Second / 100 // USER_HZ is 100 on every port of Linux
	var ticks int64
	all, _ := readProcesses() // processes that cannot be read count as nothing
	for _, p := range all {
		if p.dead {
			continue
		}
		n++
		ticks += p.ticks
		memory += p.pages * int64(os.Getpagesize())
	}
	var ended unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &ended); err == nil {
		cpu = time.Duration(ended.Utime.Nano() + ended.Stime.Nano())
	}
	return cpu + time.Duration(ticks)*tick, memory, n
}

// network adds up the traffic of all interfaces but the loopback.
func network() (rx, tx int64, ok bool) {
	b, err := os.ReadFile("/proc/net/dev")
	if err != nil {
		return 0, 0, false
	}
	for line := range strings.Lines(string(b)) {
		name, rest, found := strings.Cut(line, ":")
		f := strings.Fields(rest)
		if !found || strings.TrimSpace(name) == "lo" || len(f) < 9 {
			continue
		}
		r, err1 := strconv.ParseInt(f[0], 10, 64)
		t, err2 := strconv.ParseInt(f[8], 10, 64)
		if err1 == nil && err2 == nil {
			rx, tx = rx+r, tx+t
		}
	}
	return rx, tx, true
}

// A cpuMeter turns cumulative processor time into a share since its last call.
type cpuMeter struct {
	mu   sync.Mutex
	at   time.Time
	used time.Duration
	most time.Duration // that was measured
}

// rising returns used, or what was measured before if that is more: the sum over all processes falls when one ends that another
// process than ours reaps, and what it consumed stays consumed.
func (m *cpuMeter) rising(used time.Duration) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.most = max(m.most, used)
	return m.most
}

func (m *cpuMeter) share(now time.Time, used time.Duration) float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	last, before := m.at, m.used
	m.at, m.used = now, used
	if last.IsZero() || !now.After(last) {
		return 0
	}
	return math.Round(10000*float64(used-before)/float64(now.Sub(last))) / 100
}

// serveMetrics answers in the form that E2B clients know.
func (s *server) serveMetrics(w http.ResponseWriter, r *http.Request) {
	st := s.measure()
	total, cached := meminfo()
	if st.MemoryLimit > 0 {
		total = st.MemoryLimit
	}
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, map[string]any{
		"ts": st.At.Unix(), "cpu_count": runtime.NumCPU(), "cpu_used_pct": s.cpu.share(st.At, st.CPU),
		"mem_total": total, "mem_used": st.MemoryBytes, "mem_cache": cached,
		"mem_total_mib": total >> 20, "mem_used_mib": st.MemoryBytes >> 20,
		"disk_used": st.DiskBytes, "disk_total": st.DiskLimit,
	})
}

func meminfo() (total, cached int64) {
	b, _ := os.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		kib, _ := strconv.ParseInt(f[1], 10, 64)
		switch f[0] {
		case "MemTotal:":
			total = kib << 10
		case "Cached:":
			cached = kib << 10
		}
	}
	return total, cached
}
