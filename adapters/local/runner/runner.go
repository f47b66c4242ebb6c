//go:build linux

// Package runner is the program of gVisor's own child processes: the sentry ("boot"), the
// file server ("gofer") and the unmount helper. gVisor starts its children by
// re-executing a program; package local points it at sandboxer-runner, which contains
// this package and nothing else, so that the broker's other packages cost a sandbox
// nothing. The full sandboxer program also calls Main first, so that it works alone.
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
	keepNamed(os.Args)
	// gVisor's messages below warnings go nowhere, but formatting them takes a hundredth of a
	// short life. (--debug still has them all.)
	log.SetLevel(log.Warning)
	useGeneratedFilters(os.Args)
	if slices.Contains(os.Args, "boot") || slices.Contains(os.Args, "gofer") {
		keepBounds(os.Args)
	}
	if slices.Contains(os.Args, "boot") {
		withoutTracing()
		askProcessorOnce()
		collectLater()
		if err := prepare(); err != nil {
			fmt.Fprintln(os.Stderr, "the sandbox's spec cannot be applied:", err)
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

// prepare carries out the parts of the spec that gVisor alone would not.
func prepare() error {
	g, err := readGuest(os.Args)
	if err != nil {
		return err
	}
	g.limitTasks()
	freeLoopback()
	os.Args, err = g.nameItself(g.showLimits(os.Args))
	return err
}

// startTime is more than a sandbox needs to start.
const startTime = 3 * time.Second

// collectLater lets the sandbox's kernel start without garbage collection, which takes a
// fiftieth of the processor time of a short life and frees next to nothing. After the start
// it frees what that took (1.6 MB of an idle sandbox), and the collector works as usual.
// Little garbage may gather until then: it counts as the sandbox's memory.
func collectLater() {
	debug.SetGCPercent(300) // of at least 4 MiB
	time.AfterFunc(startTime, func() {
		debug.SetGCPercent(100)
		debug.FreeOSMemory()
	})
}

//go:linkname tracePoints gvisor.dev/gvisor/pkg/sentry/seccheck.initOnce
var tracePoints sync.Once

// withoutTracing makes the sandbox's kernel skip the description of its trace points (runsc
// trace), a thousand of them by name, which takes a thirtieth of the processor time of a
// short life. Only a trace session reads that, and we start none.
func withoutTracing() { tracePoints.Do(func() {}) }

//go:linkname sentryFilters gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var sentryFilters map[string]precompiledseccomp.Program

//go:linkname goferFilters gvisor.dev/gvisor/runsc/fsgofer/filter.precompiledPrograms
var goferFilters map[string]precompiledseccomp.Program

// useGeneratedFilters gives the child the seccomp programs generated at development time
// (seccomp_gen.go). Without them each start compiles and optimises its own filter, which
// is a third of a sandbox's start. If the key of a program does not match the child's
// options, gVisor compiles as usual.
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
