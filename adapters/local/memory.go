//go:build linux

package local

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// memory decides whether there is room for one more sandbox. Limits do not decide it:
// most sandboxes use a small part of theirs, and the sum of limits may well exceed the
// machine. What counts is the machine's available memory, less what starting sandboxes
// will still use.
type memory struct {
	available func() int64 // bytes that programs can have without swapping; -1 if unknown
	used      func(name string) int64
	reserve   int64

	mu     sync.Mutex
	coming map[string]coming // by sandbox
}

// coming is a sandbox that does not yet use its expected memory.
type coming struct {
	bytes int64
	until time.Time // by then it uses it
}

const (
	leastMemory = 24 << 20 // of a machine for an idle sandbox, with its agent awake
	settleTime  = time.Minute
)

func (e *extension) newMemory() *memory {
	total, _ := meminfo("MemTotal:")
	return &memory{
		available: func() int64 {
			n, ok := meminfo("MemAvailable:")
			if !ok {
				return -1
			}
			return n
		},
		used: func(name string) int64 {
			_, n, _ := e.cgroups.usage(name)
			return n
		},
		reserve: min(total/20, 1<<30), // for the machine's other programs, and for sandboxes that grow
		coming:  map[string]coming{},
	}
}

// meminfo reads a value of /proc/meminfo, in bytes.
func meminfo(key string) (int64, bool) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == key {
			n, err := strconv.ParseInt(f[1], 10, 64)
			return n << 10, err == nil
		}
	}
	return 0, false
}

// room is the memory for further sandboxes; -1 if unknown.
func (m *memory) room() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.roomLocked()
}

func (m *memory) roomLocked() int64 {
	left := m.available()
	if left < 0 {
		return -1
	}
	left -= m.reserve
	for name, c := range m.coming {
		if time.Now().After(c.until) {
			delete(m.coming, name)
			continue
		}
		left -= max(0, c.bytes-max(0, m.used(name)))
	}
	return max(0, left)
}

// admit counts a new sandbox with this many bytes. Kinds: Exhausted when there is no
// room for it.
func (m *memory) admit(name string, bytes int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if left := m.roomLocked(); left >= 0 && left < bytes {
		return sandboxer.E(sandboxer.Exhausted, nil, "this machine has %d MiB of memory left for sandboxes, and another one needs about %d MiB", left>>20, bytes>>20).
			WithHint("destroy or pause other sandboxes to disk first")
	}
	m.coming[name] = coming{bytes, time.Now().Add(settleTime)}
	return nil
}

// forget removes a sandbox that did not start, or is gone, from the count.
func (m *memory) forget(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.coming, name)
}

// size is the expected memory of a further sandbox: the average of the running ones,
// and at least that of an idle one.
func (m *memory) size(names []string) int64 {
	var sum, n int64
	for _, name := range names {
		if u := m.used(name); u > 0 {
			sum, n = sum+u, n+1
		}
	}
	if n == 0 {
		return leastMemory
	}
	return max(leastMemory, sum/n)
}

// savedBytes is the memory of a saved sandbox: the size of its files.
func savedBytes(dir string) int64 {
	var sum int64
	entries, _ := os.ReadDir(dir)
	for _, d := range entries {
		if fi, err := os.Stat(filepath.Join(dir, d.Name())); err == nil {
			sum += fi.Size()
		}
	}
	return sum
}
