//go:build linux

package local

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// cgroups places sandboxes into control groups of their own: version 1 hierarchies
// one by one, or the unified version 2. It does not use gVisor's cgroup code, which
// attaches to every hierarchy, at twice the cost of the few that limit something,
// and whose removal races with dying processes.
type cgroups struct {
	v2    bool
	roots map[string]string // controller → directory of this installation's groups
	why   string            // why limits cannot be enforced; empty when they can
}

const cgroupMount = "/sys/fs/cgroup"

// v1 controllers; cpuacct only measures.
var v1Controllers = []string{"memory", "cpu", "cpuacct", "pids"}

// findCgroups finds which controllers this machine offers for the installation named
// owner.
func findCgroups(owner string) *cgroups {
	c := &cgroups{roots: map[string]string{}}
	if os.Geteuid() != 0 {
		c.why = "limits on CPU, memory and processes need root (control groups)"
		return c
	}
	group := "sandboxer-" + owner
	if data, err := os.ReadFile(filepath.Join(cgroupMount, "cgroup.controllers")); err == nil {
		have := strings.Fields(string(data))
		for _, need := range []string{"memory", "cpu", "pids"} {
			if !slices.Contains(have, need) {
				c.why = fmt.Sprintf("the %s controller is not available in control groups v2", need)
				return c
			}
		}
		c.v2 = true
		root := filepath.Join(cgroupMount, group)
		err := os.WriteFile(filepath.Join(cgroupMount, "cgroup.subtree_control"), []byte("+memory +cpu +pids"), 0)
		if err == nil {
			err = os.MkdirAll(root, 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+memory +cpu +pids"), 0)
		}
		if err != nil {
			c.why = fmt.Sprintf("control groups v2 cannot be set up: %v", err)
			return c
		}
		c.roots["all"] = root
		return c
	}
	for _, ctrl := range v1Controllers {
		dir := filepath.Join(cgroupMount, ctrl)
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err != nil {
			if ctrl == "cpuacct" {
				continue
			}
			c.why = fmt.Sprintf("the %s controller is not mounted at %s", ctrl, dir)
			return c
		}
		if err := unix.Access(dir, unix.W_OK); err != nil {
			c.why = fmt.Sprintf("control groups are not writable at %s: %v", dir, err)
			return c
		}
		c.roots[ctrl] = filepath.Join(dir, group)
	}
	return c
}

// check refuses limits that cannot be enforced.
func (c *cgroups) check(l sandboxer.Limits) error {
	if l.GPUs != 0 {
		return sandboxer.E(sandboxer.Unsupported, nil, "gVisor on this machine does not support GPUs")
	}
	if c.why != "" && (l.MilliCPU != 0 || l.MemoryBytes != 0 || l.PIDs != 0) {
		how := "run sandboxer as root"
		if os.Geteuid() == 0 {
			how = "make them writable, for a container with: " + containerSwitches
		}
		return sandboxer.E(sandboxer.Unsupported, nil, "limits cannot be enforced here: %s", c.why).
			WithHint("%s; or use a profile without cpus, memory and pids limits", how)
	}
	return nil
}

func (c *cgroups) usable() bool { return c.why == "" }

// path returns the sandbox's group for a controller, or "".
func (c *cgroups) path(ctrl, name string) string {
	if c.v2 {
		ctrl = "all"
	}
	root, ok := c.roots[ctrl]
	if !ok {
		return ""
	}
	return filepath.Join(root, name)
}

// make creates the sandbox's groups with their limits.
func (c *cgroups) make(name string, l sandboxer.Limits) error {
	if !c.usable() {
		return nil
	}
	for _, root := range c.roots {
		if err := os.MkdirAll(filepath.Join(root, name), 0o755); err != nil {
			return fmt.Errorf("making the control group: %w", err)
		}
	}
	set := func(ctrl, file, value string) error {
		if err := os.WriteFile(filepath.Join(c.path(ctrl, name), file), []byte(value), 0); err != nil {
			return fmt.Errorf("setting %s of the control group: %w", file, err)
		}
		return nil
	}
	var errs []error
	if n := l.MemoryBytes; n > 0 {
		if c.v2 {
			errs = append(errs, set("memory", "memory.max", strconv.FormatInt(n, 10)))
		} else {
			errs = append(errs, set("memory", "memory.limit_in_bytes", strconv.FormatInt(n, 10)))
		}
	}
	if l.MilliCPU > 0 {
		quota, period := cpuQuota(l)
		if c.v2 {
			errs = append(errs, set("cpu", "cpu.max", fmt.Sprintf("%d %d", quota, period)))
		} else {
			errs = append(errs, set("cpu", "cpu.cfs_period_us", strconv.FormatUint(period, 10)), set("cpu", "cpu.cfs_quota_us", strconv.FormatInt(quota, 10)))
		}
	}
	// The guest's own count is kept by its kernel (RLIMIT_NPROC, see the spec). This
	// one is a backstop around that kernel, whose threads and address spaces are
	// processes here: too low a figure would kill it instead of refusing a fork.
	host := int64(4096)
	if l.PIDs > 0 {
		host = 2*l.PIDs + 512
	}
	errs = append(errs, set("pids", "pids.max", strconv.FormatInt(host, 10)))
	return errors.Join(errs...)
}

// cpuQuota is a limit of processors in the form of control groups: µs in each
// period.
func cpuQuota(l sandboxer.Limits) (quota int64, period uint64) {
	const µs = 100_000
	return l.MilliCPU * µs / 1000, µs
}

// attach moves processes, with all their threads, into the sandbox's groups.
func (c *cgroups) attach(name string, pids []int) error {
	if !c.usable() {
		return nil
	}
	for _, root := range c.roots {
		procs := filepath.Join(root, name, "cgroup.procs")
		for _, pid := range pids {
			if pid <= 0 { // a sandbox on an image has no gofer; and 0 would be ourselves
				continue
			}
			err := os.WriteFile(procs, []byte(strconv.Itoa(pid)), 0)
			if err != nil && !errors.Is(err, unix.ESRCH) { // it ended meanwhile
				return fmt.Errorf("moving process %d into the control group: %w", pid, err)
			}
		}
	}
	return nil
}

// remove deletes the sandbox's groups. A group stays busy for a moment after its
// last process was killed, so remove waits for that.
func (c *cgroups) remove(name string) (removed bool, err error) {
	for _, root := range c.roots {
		dir := filepath.Join(root, name)
		for try := 0; ; try++ {
			err := unix.Rmdir(dir)
			if err == nil {
				removed = true
				break
			}
			if errors.Is(err, unix.ENOENT) {
				break
			}
			if !errors.Is(err, unix.EBUSY) || try == 500 {
				return removed, fmt.Errorf("removing the control group %s: %w", dir, err)
			}
			time.Sleep(2 * time.Millisecond)
		}
	}
	return removed, nil
}

// removeRoots deletes the installation's empty parent groups.
func (c *cgroups) removeRoots() {
	for _, root := range c.roots {
		_ = unix.Rmdir(root) // busy while sandboxes live
	}
}

// names lists the sandboxes that have a group. Before the first sandbox there are no groups.
func (c *cgroups) names() ([]string, error) {
	var out []string
	for _, root := range c.roots {
		entries, err := os.ReadDir(root)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the control groups of sandboxes cannot be listed").
				WithHint("check that the account that runs sandboxer may read %s", root)
		}
		for _, e := range entries {
			if e.IsDir() && !slices.Contains(out, e.Name()) {
				out = append(out, e.Name())
			}
		}
	}
	return out, nil
}

// oomKilled reports whether the kernel killed a process in the group for memory.
func (c *cgroups) oomKilled(name string) bool { return c.oomKills(name) > 0 }

// oomKills counts the processes in the group that the kernel killed for memory.
func (c *cgroups) oomKills(name string) int64 {
	if !c.usable() {
		return 0
	}
	file := "memory.oom_control"
	if c.v2 {
		file = "memory.events"
	}
	return max(0, c.number(c.path("memory", name), file, "oom_kill"))
}

// usage reads the group's consumption; -1 if it cannot be read.
func (c *cgroups) usage(name string) (cpu time.Duration, memory, limit int64) {
	cpu, memory = -1, -1
	if !c.usable() {
		return cpu, memory, 0
	}
	if c.v2 {
		if n := c.number(c.path("cpu", name), "cpu.stat", "usage_usec"); n >= 0 {
			cpu = time.Duration(n) * time.Microsecond
		}
		memory = c.number(c.path("memory", name), "memory.current", "")
		return cpu, memory, max(0, c.number(c.path("memory", name), "memory.max", ""))
	}
	if p := c.path("cpuacct", name); p != "" {
		cpu = time.Duration(c.number(p, "cpuacct.usage", ""))
	}
	memory = c.number(c.path("memory", name), "memory.usage_in_bytes", "")
	if limit = c.number(c.path("memory", name), "memory.limit_in_bytes", ""); limit >= 1<<62 {
		limit = 0
	}
	return cpu, memory, limit
}

// number reads a figure from a control file, after key if one is given; -1 if there
// is none.
func (c *cgroups) number(dir, file, key string) int64 {
	data, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return -1
	}
	for line := range bytes.Lines(data) {
		f := strings.Fields(string(line))
		if len(f) == 0 || key != "" && (len(f) < 2 || f[0] != key) {
			continue
		}
		if n, err := strconv.ParseInt(f[len(f)-1], 10, 64); err == nil {
			return n
		}
	}
	return -1
}

// processTree returns roots, which are alive, and all their descendants.
func processTree(roots ...int) ([]int, error) {
	// Children are younger than their parents, and have higher numbers unless
	// numbering has wrapped since: this skips most of the machine's processes.
	oldest := 0
	for _, r := range roots {
		if r > 0 && (oldest == 0 || r < oldest) {
			oldest = r
		}
	}
	if lastPID() < oldest {
		oldest = 0
	}
	kids := map[int][]int{}
	pids, err := procs.All()
	if err != nil {
		return nil, err
	}
	for _, pid := range pids {
		if pid < oldest {
			continue
		}
		f, err := procs.Stat(pid)
		if err != nil {
			return nil, err
		}
		if len(f) < 2 {
			continue // it ended
		}
		if ppid, err := strconv.Atoi(f[1]); err == nil {
			kids[ppid] = append(kids[ppid], pid)
		}
	}
	var out []int
	var walk func(int)
	walk = func(pid int) {
		out = append(out, pid)
		for _, k := range kids[pid] {
			walk(k)
		}
	}
	for _, r := range roots {
		if r > 0 {
			walk(r)
		}
	}
	return out, nil
}

// lastPID returns the PID of the youngest process; 0 if unknown.
func lastPID() int {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	f := strings.Fields(string(data))
	pid, _ := strconv.Atoi(f[len(f)-1])
	return pid
}
