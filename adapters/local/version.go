//go:build linux

package local

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"gvisor.dev/gvisor/runsc/version"

	"github.com/sand-boxer/sandboxer"
)

// firstGVisor is the version of sandboxes from builds that did not record it.
const firstGVisor = "v0.0.0-20260905035102-160fafc42237"

// noGVisor is the version of a program that was linked without one.
const noGVisor = "VERSION_MISSING"

// gvisor returns the version of gVisor that runs the sandbox of r.
func (r record) gvisor() string {
	if r.GVisor == "" && version.Version() == noGVisor {
		return noGVisor
	}
	return cmp.Or(r.GVisor, firstGVisor)
}

// savable refuses to save the memory of a sandbox that another version of gVisor runs: this
// program cannot restore what that kernel writes. Kinds: Unsupported.
func (r record) savable() error {
	if v := r.gvisor(); v != version.Version() {
		return sandboxer.E(sandboxer.Unsupported, nil, "sandbox %s runs on another version of gVisor (%s; this program has %s), and nothing could restore its memory", r.SandboxID, v, version.Version()).
			WithHint("it continues to run; save its files (sandboxer snapshot create --portable ID), or freeze it (sandboxer pause --depth freeze ID)")
	}
	return nil
}

func runtimeVersion() string { return version.Version() }

// noticesFor is how long a result of otherVersions is used.
const noticesFor = 5 * time.Second

// Notices implements sandboxer.Noticer.
func (e *extension) Notices(context.Context) []string {
	e.noticing.Lock()
	defer e.noticing.Unlock()
	if time.Since(e.noticed) > noticesFor {
		e.notices, e.noticed = e.otherVersions(), time.Now()
	}
	return e.notices
}

// otherVersions reports snapshots that this program cannot restore, while the program that
// can may still be available, and running sandboxes that cannot be saved.
func (e *extension) otherVersions() (notices []string) {
	saved, running := map[string]int{}, map[string]int{}
	for _, d := range entriesOf(e.dir("snapshot")) {
		if r, err := readReceipt(e.dir("snapshot", d.Name())); err == nil && r.Snapshot.Meta["gvisor"] != version.Version() {
			saved[r.Snapshot.Meta["gvisor"]]++
		}
	}
	for _, d := range entriesOf(e.dir("box")) {
		if r, err := e.record(d.Name()); err == nil && r.gvisor() != version.Version() {
			running[r.gvisor()]++
		}
	}
	for _, v := range slices.Sorted(maps.Keys(saved)) {
		notices = append(notices, fmt.Sprintf("snapshots and pauses to disk that gVisor %s saved, and that this program cannot restore, which has %s: %d; "+
			"to keep them, stop the server, start the program that saved them, resume or restore them there, and save their files (sandboxer snapshot create --portable ID), which any version restores",
			v, version.Version(), saved[v]))
	}
	for _, v := range slices.Sorted(maps.Keys(running)) {
		notices = append(notices, fmt.Sprintf("sandboxes that gVisor %s runs, and whose memory this program cannot save, which has %s: %d; "+
			"they continue to run; save their files (sandboxer snapshot create --portable ID), or pause them to the depth freeze", v, version.Version(), running[v]))
	}
	return notices
}

func entriesOf(dir string) []os.DirEntry {
	entries, _ := os.ReadDir(dir) // without the directory there is nothing
	return entries
}
