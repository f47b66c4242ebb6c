//go:build linux

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
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
)

// clockTick is the unit of processor time in /proc/pid/stat: a hundredth of a second
// on every Linux.
const clockTick = 10 * time.Millisecond

type process struct {
	pid, parent int
	state       string
	cpu         time.Duration // its own and that of the children it has collected
}

// processes reads the process table.
func processes() map[int]process {
	out := map[int]process{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		data, err := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		i := bytes.LastIndexByte(data, ')')
		if err != nil || i < 0 {
			continue
		}
		f := strings.Fields(string(data[i+1:]))
		if len(f) < 15 {
			continue
		}
		p := process{pid: pid, state: f[0]}
		p.parent, _ = strconv.Atoi(f[1])
		for _, s := range f[11:15] {
			n, _ := strconv.ParseInt(s, 10, 64)
			p.cpu += time.Duration(n) * clockTick
		}
		out[pid] = p
	}
	return out
}

// below returns roots and all their descendants.
func below(all map[int]process, roots ...int) []process {
	var out []process
	for _, r := range roots {
		p, ok := all[r]
		if !ok {
			continue
		}
		out = append(out, p)
		for _, c := range all {
			if c.parent == r {
				out = append(out, below(all, c.pid)...)
			}
		}
	}
	return out
}

// treeCPU is the processor time of roots and what they started.
func treeCPU(roots ...int) time.Duration {
	var sum time.Duration
	for _, p := range below(processes(), roots...) {
		sum += p.cpu
	}
	return sum
}

// gvisor finds gVisor's processes with the state directory root, by sandbox.
func gvisor(root string) map[string][]int {
	out := map[string][]int{}
	for pid := range processes() {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || !bytes.HasPrefix(data, []byte("runsc-")) {
			continue
		}
		argv := strings.Split(strings.TrimRight(string(data), "\x00"), "\x00")
		if slices.Contains(argv, "--root="+root) {
			name := argv[len(argv)-1]
			out[name] = append(out[name], pid)
		}
	}
	return out
}

// memoryOf is the proportional share of memory, in bytes, of roots and what they
// started: pages that several processes share count in parts.
func memoryOf(roots []int) (pss int64) {
	for _, p := range below(processes(), roots...) {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", p.pid))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(data)) {
			if f := strings.Fields(line); len(f) > 1 && f[0] == "Pss:" {
				n, _ := strconv.ParseInt(f[1], 10, 64)
				pss += n << 10
			}
		}
	}
	return pss
}

// onCPU is the time that roots and what they started have spent on processors, to
// the nanosecond; threads that ended are not in it, so it is of use for idle
// processes only. ok is false where the kernel does not count.
func onCPU(roots []int) (sum time.Duration, ok bool) {
	for _, p := range below(processes(), roots...) {
		stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", p.pid))
		for _, s := range stats {
			data, err := os.ReadFile(s)
			if f := strings.Fields(string(data)); err == nil && len(f) > 0 {
				n, _ := strconv.ParseInt(f[0], 10, 64)
				sum += time.Duration(n)
				ok = true
			}
		}
	}
	return sum, ok
}

// rss is a process's resident memory in bytes.
func rss(pid int) int64 {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			return n << 10
		}
	}
	return -1
}

// leftovers counts what lives could leave behind.
type leftovers struct {
	Descriptors, Goroutines, Mounts, Zombies, Processes, Cgroups, Files int
}

// descriptors counts the server's descriptors by what they are of.
func (b *broker) descriptors() map[string]int {
	count := map[string]int{}
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", b.pid()))
	for _, fd := range fds {
		if name, err := os.Readlink(fd); err == nil {
			name, _, _ = strings.Cut(name, ":[") // the number of a socket or pipe
			count[filepath.Base(name)]++
		}
	}
	return count
}

func (b *broker) leftovers() (leftovers, error) {
	var l leftovers
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.pid()))
	if err != nil {
		return l, err
	}
	l.Descriptors = len(fds)
	measured, err := b.metrics()
	if err != nil {
		return l, err
	}
	l.Goroutines = int(measured["go_goroutines"])
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", b.pid()))
	if err != nil {
		return l, err
	}
	l.Mounts = bytes.Count(mounts, []byte("\n"))
	for _, p := range below(processes(), b.pid()) {
		if p.state == "Z" {
			l.Zombies++
		} else {
			l.Processes++
		}
	}
	for _, dir := range b.cgroups() {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			if e.IsDir() {
				l.Cgroups++
			}
		}
	}
	err = filepath.WalkDir(b.stateDir(), func(string, fs.DirEntry, error) error { l.Files++; return nil })
	return l, err
}

// cgroups are the control groups of the installation named owner.
func cgroups(owner string) []string {
	v1, _ := filepath.Glob("/sys/fs/cgroup/*/sandboxer-" + owner)
	v2, _ := filepath.Glob("/sys/fs/cgroup/sandboxer-" + owner)
	return append(v1, v2...)
}

// sweepUp removes dir, the state directory of gVisor sandboxes, and what is still
// there of them: processes, mounts, and the control groups of the installation owner
// ("" if there is none). After a clean end that is nothing.
func sweepUp(dir, owner string) error {
	for pid := range processes() {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && bytes.HasPrefix(data, []byte("runsc-")) && bytes.Contains(data, []byte("--root="+dir+"/")) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	if owner != "" {
		for _, root := range cgroups(owner) {
			entries, _ := os.ReadDir(root)
			for _, e := range entries {
				for range 100 { // busy until its processes are gone
					if unix.Rmdir(filepath.Join(root, e.Name())) != unix.EBUSY {
						break
					}
					time.Sleep(10 * time.Millisecond)
				}
			}
			_ = unix.Rmdir(root)
		}
	}
	roots := skeletons(dir)
	for _, mounted := range [][]string{mountsBelow(dir), mountsBelow(roots)} {
		for _, m := range mounted {
			_ = unix.Unmount(m, unix.MNT_DETACH)
		}
	}
	// Never remove through a mount: what is behind it is the machine's.
	if n := len(mountsBelow(dir)) + len(mountsBelow(roots)); n > 0 {
		return fmt.Errorf("%d mounts below %s and %s cannot be removed", n, dir, roots)
	}
	return errors.Join(os.RemoveAll(roots), os.RemoveAll(dir))
}

// skeletons is where ext.local mounts the roots of sandboxes without an image.
func skeletons(stateDir string) string {
	sum := sha256.Sum256([]byte(stateDir))
	return filepath.Join("/run/sandboxer-roots", hex.EncodeToString(sum[:])[:12])
}

// mountsBelow lists mount points, the innermost first.
func mountsBelow(dir string) []string {
	var out []string
	mounts, _ := os.ReadFile("/proc/self/mounts")
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 1 && strings.HasPrefix(f[1], dir+"/") {
			out = append(out, f[1])
		}
	}
	slices.Reverse(out)
	return out
}
