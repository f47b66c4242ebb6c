//go:build linux

// Package runner is what gVisor's own child processes run: the sentry ("boot"), the
// file server ("gofer") and the unmount helper. gVisor starts its children by
// re-executing a program; package local points it at sandboxer-runner, which
// contains this package and nothing else, so that what the broker links costs a
// sandbox nothing. The full sandboxer program calls Main first thing too, so that
// it works alone.
package runner

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	sentryfilter "gvisor.dev/gvisor/runsc/boot/filter"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
	goferfilter "gvisor.dev/gvisor/runsc/fsgofer/filter"
)

//go:generate go run ./internal/genseccomp seccomp_gen.go

// IsChild reports whether this process was started by gVisor as one of its
// children. They carry "runsc-…" as argv[0]; the unmount helper carries the path
// it was started by, /proc/self/exe.
func IsChild() bool {
	name := filepath.Base(os.Args[0])
	return strings.HasPrefix(name, "runsc-") || name == "exe"
}

// Main runs the gVisor child that os.Args names. It does not return.
func Main() {
	// What gVisor says beyond warnings goes nowhere, but takes a hundredth of a short life to
	// be put into words. (--debug still has everything said.)
	log.SetLevel(log.Warning)
	useGeneratedFilters(os.Args)
	if slices.Contains(os.Args, "boot") || slices.Contains(os.Args, "gofer") {
		keepBounds(os.Args)
	}
	if slices.Contains(os.Args, "boot") {
		withoutTracing()
		askProcessorOnce()
		collectLater()
		if err := limitTasks(os.Args); err != nil {
			fmt.Fprintln(os.Stderr, "the limit of processes cannot be read:", err)
			os.Exit(1)
		}
		keepDescendants()
		useSmallUmounter(os.Args)
	}
	cli.Run(nil, map[util.SubCommand]string{
		new(sentrycmd.Boot):   "internal",
		new(sentrycmd.Umount): "internal",
		new(cmd.Gofer):        "internal",
	}, nil)
	os.Exit(0)
}

// startTime is by when a sandbox has long been started.
const startTime = 3 * time.Second

// collectLater has the sandbox's kernel start without collecting garbage, which takes a
// fiftieth of the processor time of a short life and frees next to nothing. When all is
// up, what the start took is given back (1.6 MB of an idle sandbox), and the collector
// works as ever. Not much garbage may gather till then: it counts as the sandbox's memory.
func collectLater() {
	debug.SetGCPercent(300) // of at least 4 MiB
	time.AfterFunc(startTime, func() {
		debug.SetGCPercent(100)
		debug.FreeOSMemory()
	})
}

//go:linkname tracePoints gvisor.dev/gvisor/pkg/sentry/seccheck.initOnce
var tracePoints sync.Once

// withoutTracing has the sandbox's kernel believe that it has described its trace points
// (runsc trace), a thousand of them by name, which takes a thirtieth of the processor time
// of a short life. Nothing but a trace session reads that, and nobody here starts one.
func withoutTracing() { tracePoints.Do(func() {}) }

//go:linkname sentryFilters gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var sentryFilters map[string]precompiledseccomp.Program

//go:linkname goferFilters gvisor.dev/gvisor/runsc/fsgofer/filter.precompiledPrograms
var goferFilters map[string]precompiledseccomp.Program

// useGeneratedFilters hands the child the seccomp programs generated at development
// time (seccomp_gen.go). Without them each start compiles and optimises its filter
// anew, which is a third of a sandbox's start. A program whose key does not match
// the child's options is not used: gVisor then compiles, as it always would.
func useGeneratedFilters(args []string) {
	for _, a := range args {
		switch a {
		case "boot":
			sentryfilter.ListPrecompiled() // runs gVisor's own registration, which would replace ours
			sentryFilters = sentryPrograms()
			return
		case "gofer":
			goferfilter.ListPrecompiled()
			goferFilters = goferPrograms()
			return
		case "umount":
			return
		}
	}
}
