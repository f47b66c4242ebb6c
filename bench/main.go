//go:build linux

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/measure"
)

type options struct {
	bin     string
	before  string // the same of an older tree; "" leaves the comparison out
	runsc   string
	rounds  int
	within  time.Duration // of the rounds of one step; 0 is any time
	quick   bool
	once    bool // every part once and as small as it can be: what it finds is no figure
	out     string
	against string // a file that out was in another run
	dir     string
	only    []string // steps; nil means all
}

// The steps that can be asked for alone.
const (
	prepareStep    = "preparing"
	startStep      = "starting what is measured while it runs"
	beforeStep     = "next to an older build"
	checkpointStep = "checkpoints"
	snapshotStep   = "snapshots with memory"
	idleStep       = "a hundred idle sandboxes"
	burstStep      = "bursts"
	poolStep       = "the warm pool"
	networkStep    = "the network of sandboxes"
	sshStep        = "what goes over ssh"
	composeStep    = "compose projects over ssh"
)

func main() {
	// The server is told to end when this thread does: it is the main one for that.
	runtime.LockOSThread()
	var o options
	flag.StringVar(&o.bin, "bin", "bin", "directory with sandboxer, sandboxer-runner and sandboxer-agent")
	flag.StringVar(&o.before, "before", "", "directory with the same programs of an older build; each sample measures both")
	flag.StringVar(&o.runsc, "runsc", "", "gVisor's command line; empty means runsc in -bin, or a fresh build; none leaves it out")
	flag.IntVar(&o.rounds, "n", 50, "rounds")
	flag.DurationVar(&o.within, "within", 0, "begin no further round of a step after this time; 0 means -n rounds however long they take")
	flag.BoolVar(&o.quick, "quick", false, "five rounds, without the slow parts")
	flag.StringVar(&o.out, "o", "", "also write the results to this file, as JSON")
	flag.StringVar(&o.against, "against", "", "also compare with the results in this file, which -o wrote in another run")
	flag.StringVar(&o.dir, "dir", os.TempDir(), "where to work; gVisor's sockets need a short path")
	for _, alone := range []struct {
		name, help string
		steps      []string
	}{
		{"ssh", "only what goes over ssh", []string{sshStep}},
		{"pool", "only the warm pool", []string{prepareStep, poolStep}},
		{"checkpoints", "only portable checkpoints", []string{checkpointStep}},
		{"compose", "only compose projects over ssh", []string{prepareStep, composeStep}},
		{"containers", "only containers of an engine", []string{prepareStep, containersStep}},
		{"deerflow", "only deer-flow's door", []string{deerflowStep}},
		{"routes", "only routes and usage rows", []string{routesStep}},
		{"builds", "only the comparison with the build of -before", []string{beforeStep}},
		{"density", "only snapshots with memory, a hundred sandboxes, bursts and the network",
			[]string{prepareStep, snapshotStep, idleStep, burstStep, poolStep, networkStep}},
	} {
		flag.BoolFunc(alone.name, alone.help, func(v string) error {
			on, err := strconv.ParseBool(v)
			if on {
				o.only = alone.steps
			}
			return err
		})
	}
	flag.Parse()
	if flag.NArg() > 0 || o.rounds < 1 || o.rounds > measure.MaxRounds || o.within < 0 {
		fmt.Fprintf(os.Stderr, "bench: no arguments are taken, 1 to %d rounds, and no time below 0\n", measure.MaxRounds)
		os.Exit(2)
	}
	if o.before == "" && slices.Contains(o.only, beforeStep) {
		fmt.Fprintln(os.Stderr, "bench: -builds compares with an older build: name the directory of its programs with -before")
		os.Exit(2)
	}
	if o.quick {
		o.rounds = min(o.rounds, 5)
	}
	// Opening ext.local in this process takes the standard streams from it.
	stdout, stderr := os.Stdout, os.Stderr
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	former, err := readReport(o.against)
	var r *report
	if err == nil {
		r, err = run(ctx, o, func(s string) { fmt.Fprintln(stderr, "bench: "+s) })
	}
	stop()
	if r != nil {
		if former != nil {
			r.compare(former, o.against)
		}
		err = errors.Join(err, r.print(stdout), r.write(o.out))
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		os.Exit(1)
	}
}

// bench is one run with everything that takes part in it.
type bench struct {
	options
	say  func(string)
	r    *report
	to   *Set // the series of r
	base string

	image, archive, root string // of busybox; empty without one
	broker               *broker
	direct               *direct
	runsc                *runsc  // nil if left out
	docker               *docker // nil if left out

	plain, onImage string // running sandboxes
	handle         sandboxer.Handle
	echoes         map[string]*echo

	undo []func() error
}

// run measures what o asks for. A part that fails is in the report and in the error; what
// the others measured counts.
func run(ctx context.Context, o options, say func(string)) (_ *report, err error) {
	b := &bench{options: o, say: say, echoes: map[string]*echo{}}
	b.r = &report{Time: time.Now().UTC().Truncate(time.Second), Revision: revision(ctx, "."), Machine: thisMachine(), Rounds: o.rounds}
	b.to = &b.r.Metrics
	if b.bin, err = filepath.Abs(o.bin); err != nil {
		return nil, err
	}
	if b.before != "" {
		if b.before, err = filepath.Abs(o.before); err != nil {
			return nil, err
		}
	}
	if b.base, err = os.MkdirTemp(o.dir, "sb"); err != nil {
		return nil, err
	}
	b.undo = append(b.undo, func() error {
		if left := mountsBelow(b.base); len(left) > 0 {
			return fmt.Errorf("%s stays: %s is mounted there", b.base, left[0])
		}
		return os.RemoveAll(b.base)
	})
	defer func() {
		say("cleaning up")
		for i := len(b.undo) - 1; i >= 0; i-- {
			err = errors.Join(err, b.undo[i]())
		}
	}()
	steps := []struct {
		what string
		uses string // a step that has to have worked
		slow bool
		do   func(context.Context) error
	}{
		{prepareStep, "", false, b.prepare},
		{"measuring the idle server", prepareStep, false, b.idleServer},
		{startStep, prepareStep, false, b.startAll},
		{"rounds", startStep, false, b.engines},
		{"idle sandboxes", startStep, false, b.idle},
		{beforeStep, "", false, b.beside},
		{"lives that should leave nothing", prepareStep, true, b.cycles},
		{"the manager on the fake", "", true, b.manager},
		{routesStep, "", true, b.routes},
		{checkpointStep, "", true, b.checkpoints},
		{idleStep, prepareStep, true, b.density},
		{snapshotStep, prepareStep, true, b.snapshots},
		{burstStep, prepareStep, true, b.burst},
		{poolStep, prepareStep, true, b.pool},
		{networkStep, "", true, b.network},
		{sshStep, "", false, b.overSSH},
		{composeStep, prepareStep, true, b.composeProjects},
		{containersStep, prepareStep, true, b.containers},
		{deerflowStep, "", true, b.deerflow},
	}
	useless := map[string]bool{} // steps that failed, or were left out for that
	for _, s := range steps {
		if o.only != nil && !slices.Contains(o.only, s.what) || s.what == beforeStep && b.before == "" {
			continue
		}
		if s.slow && o.quick && !o.once {
			b.r.skip("%s (-quick)", s.what)
			continue
		}
		if useless[s.uses] {
			useless[s.what] = true
			b.r.skip("%s: %s failed", s.what, s.uses)
			continue
		}
		say(s.what)
		failed := s.do(ctx)
		if failed == nil {
			continue
		}
		useless[s.what] = true
		if ctx.Err() != nil {
			failed = errors.New("interrupted")
		} else if b.broker != nil && b.broker.said() != "" {
			say("the server said:\n" + b.broker.said())
		}
		failed = fmt.Errorf("%s: %w", s.what, failed)
		say("FAILED: " + failed.Error())
		b.r.Failed = append(b.r.Failed, failed.Error())
		err = errors.Join(err, failed)
		if ctx.Err() != nil {
			break
		}
	}
	b.bars()
	return b.r, err
}

// count is how many of something a part makes: full, or in a run of everything once a few.
func (b *bench) count(full, few int) int {
	if b.once {
		return few
	}
	return full
}

// rest waits for what was started to come to rest. A run of everything once does not wait: nobody reads its figures.
func (b *bench) rest(ctx context.Context, d time.Duration) error {
	if b.once {
		return ctx.Err()
	}
	return measure.Sleep(ctx, d)
}

// revision is that of the tree that dir is in, "" if it is in none.
func revision(ctx context.Context, dir string) string {
	out, err := exec.CommandContext(ctx, "git", "-C", dir, "describe", "--always", "--dirty").Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

func thisMachine() machine {
	m := machine{CPUs: runtime.NumCPU(), Go: runtime.Version()}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if data, err := os.ReadFile("/proc/loadavg"); err == nil {
		m.Load = strings.Join(strings.Fields(string(data))[:3], " ")
	}
	return m
}

func (b *bench) path(elem ...string) string {
	return filepath.Join(append([]string{b.base}, elem...)...)
}

// programs are what a build has in its directory.
var programs = []string{"sandboxer", "sandboxer-runner", "sandboxer-agent"}

// prepare starts the broker and finds the other engines.
func (b *bench) prepare(ctx context.Context) error {
	if err := checkPrograms(b.bin); err != nil {
		return err
	}
	for _, name := range programs {
		if fi, err := os.Stat(filepath.Join(b.bin, name)); err == nil {
			b.r.fact(sizeOf+name, "%.1f MB", float64(fi.Size())/1e6)
		}
	}
	if err := b.findImage(); err != nil {
		return err
	}
	profiles := map[string]string{}
	if b.image != "" {
		profiles[imageProfile] = like(imageProfile, "image: tar:"+b.image)
	}
	var err error
	b.broker, err = startBroker(ctx, b.bin, b.path("b"), profiles)
	if b.broker.started() {
		b.undo = append(b.undo, b.broker.close)
	}
	if err != nil {
		return err
	}
	b.direct, err = openDirect(ctx, b.bin, b.path("d"))
	b.undo = append(b.undo, b.direct.close)
	if err != nil {
		return err
	}
	switch {
	case b.root == "":
	case b.options.runsc == "none":
		b.r.skip("runsc: left out (-runsc none)")
	case os.Geteuid() != 0:
		b.r.skip("runsc: gVisor's command line needs root")
	default:
		if err := b.findRunsc(ctx); err != nil {
			return err
		}
	}
	return b.findDocker(ctx)
}

// findImage makes the image, once, where there is a busybox.
func (b *bench) findImage() error {
	if b.image != "" {
		return nil
	}
	box, err := findBusybox()
	if err != nil {
		b.r.skip("the image and the other engines: %v", err)
		return nil
	}
	b.image, b.archive, b.root = b.path("image.tar"), b.path("root.tar"), b.path("root")
	if err := buildRoot(box, b.root, b.image, b.archive); err != nil {
		return fmt.Errorf("making the image: %w", err)
	}
	return nil
}

// findDocker brings the image to a Docker engine, once, where one answers.
func (b *bench) findDocker(ctx context.Context) error {
	if b.root == "" || b.docker != nil {
		return nil
	}
	version, err := findDocker(ctx)
	if err != nil {
		b.r.skip("docker: %v", err)
		return nil
	}
	b.r.fact("docker engine", "%s", version)
	b.docker, err = newDocker(ctx, b.archive)
	b.undo = append(b.undo, b.docker.close)
	return err
}

func (b *bench) findRunsc(ctx context.Context) error {
	bin := b.options.runsc
	if bin == "" {
		bin = filepath.Join(b.bin, "runsc")
		if _, err := os.Stat(bin); err != nil {
			bin = b.path("runsc-bin")
			// Of the version in sandboxer's go.mod.
			if err := compile(ctx, "build", "-o", bin, "gvisor.dev/gvisor/runsc"); err != nil {
				return fmt.Errorf("building runsc: %w", err)
			}
		}
	}
	var err error
	if b.runsc, err = newRunsc(bin, b.path("r"), b.root); err == nil {
		b.undo = append(b.undo, b.runsc.close)
	}
	return err
}

func (b *bench) idleServer(ctx context.Context) error {
	if err := b.rest(ctx, 2*time.Second); err != nil {
		return err
	}
	b.to.Add(idleServer, "MB", float64(rss(b.broker.pid()))/1e6)
	return nil
}

func (b *bench) startAll(ctx context.Context) (err error) {
	if b.plain, err = b.broker.create(ctx, plainProfile); err != nil {
		return err
	}
	if b.image != "" {
		if b.onImage, err = b.broker.create(ctx, imageProfile); err != nil {
			return err
		}
	}
	if b.handle, err = b.direct.ext.Provision(ctx, b.direct.spec("")); err != nil {
		return err
	}
	b.echo("api", func(cmd sandboxer.Cmd) error { return b.broker.exec(ctx, b.plain, cmd) })
	b.echo("below", func(cmd sandboxer.Cmd) error { return b.direct.exec(ctx, b.handle, cmd) })
	if b.runsc != nil {
		if err := b.runsc.start(ctx); err != nil {
			return err
		}
	}
	if b.docker != nil {
		return b.docker.start(ctx)
	}
	return nil
}

func (b *bench) echo(name string, exec func(sandboxer.Cmd) error) {
	e := startEcho(exec)
	b.echoes[name] = e
	b.undo = append(b.undo, func() error { _ = e.close(); return nil })
}

// The names of the series.
const (
	viaAPI      = "local"
	viaAPIImage = "local on EROFS"
	belowAPI    = "below the API, local"
	belowImage  = "below the API, EROFS"
	runscRun    = "runsc run true"
	runscExec   = "runsc exec true"
	dockerRun   = "docker run --rm true"
	dockerExec  = "docker exec true"
	apiRun      = "exec true, one request"
	apiStream   = "exec true, with streams"
	apiImageRun = "exec true on EROFS, one request"
	directExec  = "below the API, exec true"
	sixteen     = "16-way "
	idleServer  = "idle server: resident"
	idleMemory  = ": memory (PSS)" // after "idle local"
)

// turnTimeout bounds one turn of anything that takes turns.
const turnTimeout = 5 * time.Minute

// plan is what has everything take turns: one round to warm up, for what is made once (the
// image, the wires to the agent) is not what is measured.
func (b *bench) plan(rounds int) measure.Plan {
	rounds = min(rounds, measure.MaxRounds)
	return measure.Plan{Rounds: rounds, WarmUp: b.count(1, 0), Within: b.within, Each: turnTimeout, Round: func(n int) error {
		if n%max(10, rounds/5) == 0 {
			b.say(fmt.Sprintf("round %d of %d", n, rounds))
		}
		return nil
	}}
}

// engines does everything that is compared once per round.
func (b *bench) engines(ctx context.Context) error {
	noop := sandboxer.Cmd{Args: []string{"true"}}
	var arms []Arm
	arm := func(name string, sample func(ctx context.Context, to *Set) error) {
		arms = append(arms, Arm{Name: name, To: b.to, Sample: sample})
	}
	// timed is an arm of one operation, with the processor time of who serves it.
	timed := func(name string, server func() time.Duration, do func(ctx context.Context) error) {
		arm(name, func(ctx context.Context, to *Set) error {
			cpu, begin := server(), time.Now()
			err := do(ctx)
			to.Took(name, time.Since(begin))
			if cpu >= 0 {
				to.Spent(name, server()-cpu)
			}
			return err
		})
	}
	server := func() time.Duration { return treeCPU(b.broker.pid()) }
	nobody := func() time.Duration { return -1 } // whose time is not watched
	many := func(name string, n int, do func(ctx context.Context) error) {
		arm(sixteen+name, func(ctx context.Context, to *Set) error {
			took, failed := measure.Load{Count: n, Width: 16}.Run(ctx, func(int) error { return do(ctx) })
			to.Rate(sixteen+name, "1/s", float64(n)/took.Seconds())
			return errors.Join(append(failed, ctx.Err())...)
		})
	}
	apiExec := func(ctx context.Context) error { return b.broker.exec(ctx, b.plain, noop) }
	apiOnce := func(ctx context.Context) error { return b.broker.run(ctx, b.plain) }

	arm(viaAPI, func(ctx context.Context, to *Set) error { return b.broker.life(ctx, to, plainProfile, viaAPI) })
	arm(belowAPI, func(ctx context.Context, to *Set) error { return b.direct.life(ctx, to, "", belowAPI) })
	timed(apiRun, server, apiOnce)
	timed(apiStream, server, apiExec)
	timed(directExec, nobody, func(ctx context.Context) error { return b.direct.exec(ctx, b.handle, noop) })
	many(apiRun, 96, apiOnce)
	many(apiStream, 96, apiExec)
	trips := func(which, name string) {
		arm(name, func(_ context.Context, to *Set) error {
			for range 20 {
				took, err := b.echoes[which].trip()
				if err != nil {
					return err
				}
				to.Took(name, took)
			}
			return nil
		})
	}
	trips("api", "echo of a byte")
	trips("below", "below the API, echo of a byte")
	output := func(name string, mib int, exec func(context.Context, sandboxer.Cmd) error) {
		arm(name, func(ctx context.Context, to *Set) error {
			v, err := stream(mib, func(c sandboxer.Cmd) error { return exec(ctx, c) })
			to.Rate(name, "MB/s", v)
			return err
		})
	}
	output("output", 128, func(ctx context.Context, c sandboxer.Cmd) error { return b.broker.exec(ctx, b.plain, c) })
	output("below the API, output", 512, func(ctx context.Context, c sandboxer.Cmd) error { return b.direct.exec(ctx, b.handle, c) })
	if b.image != "" {
		once := func(ctx context.Context) error { return b.broker.run(ctx, b.onImage) }
		arm(viaAPIImage, func(ctx context.Context, to *Set) error {
			return b.broker.life(ctx, to, imageProfile, viaAPIImage)
		})
		arm(belowImage, func(ctx context.Context, to *Set) error { return b.direct.life(ctx, to, b.image, belowImage) })
		timed(apiImageRun, server, once)
		many(apiImageRun, 96, once)
	}
	if b.runsc != nil {
		arm(runscRun, func(ctx context.Context, to *Set) error {
			took, cpu, err := b.runsc.run(ctx)
			to.Took(runscRun, took)
			to.Spent(runscRun, cpu)
			return err
		})
		arm(runscExec, func(ctx context.Context, to *Set) error {
			pids := gvisor(b.runsc.state())[b.runsc.running]
			before := treeCPU(pids...)
			took, cpu, err := b.runsc.exec(ctx)
			to.Took(runscExec, took)
			to.Spent(runscExec, cpu+treeCPU(pids...)-before)
			return err
		})
		many(runscExec, 32, func(ctx context.Context) error { _, _, err := b.runsc.exec(ctx); return err })
	}
	if b.docker != nil {
		timed(dockerRun, nobody, func(ctx context.Context) error { _, err := b.docker.run(ctx); return err })
		timed(dockerExec, nobody, func(ctx context.Context) error { _, err := b.docker.exec(ctx); return err })
	}
	var calls map[string]float64
	p := b.plan(b.rounds)
	say := p.Round
	p.Round = func(n int) (err error) {
		if n == 1 { // only what counts is in the shares
			calls, err = b.broker.metrics()
		}
		return errors.Join(err, say(n))
	}
	if _, err := interleave(ctx, p, arms...); err != nil {
		return err
	}
	return b.shares(calls)
}

// shares tells how much of the broker's creates and destroys were the extension's
// part, since before.
func (b *bench) shares(before map[string]float64) error {
	after, err := b.broker.metrics()
	if err != nil {
		return err
	}
	mean := func(op string) float64 {
		const series = "sandboxer_backend_call_duration_seconds"
		labels := fmt.Sprintf(`{extension="ext.local",kind="ok",op=%q}`, op)
		diff := func(what string) float64 { return after[series+what+labels] - before[series+what+labels] }
		return 1000 * diff("_sum") / diff("_count")
	}
	whole := func(what string) float64 {
		sum, n := 0.0, 0
		for _, name := range []string{viaAPI, viaAPIImage} {
			for _, v := range b.to.Series(name+": "+what, "ms").Samples {
				sum, n = sum+v, n+1
			}
		}
		return sum / float64(n)
	}
	b.r.fact("mean create", "%.1f ms, thereof the extension's provision %.1f ms and wait_ready %.1f ms", whole("create"), mean("provision"), mean("wait_ready"))
	b.r.fact("mean destroy", "%.1f ms, thereof the extension's teardown %.1f ms", whole("destroy"), mean("teardown"))
	return nil
}

// settleTime is for what the start of sandboxes left to do: it gives back what it took, after
// three seconds.
const settleTime = 5 * time.Second

// each is how many idle sandboxes of a kind are looked at: many, because they share their
// program, and what one more costs is what counts.
func (b *bench) each() int {
	if b.quick {
		return 3
	}
	return 10
}

// idle looks at sandboxes that do nothing, and at the programs themselves.
func (b *bench) idle(ctx context.Context) error {
	each := b.each()
	type group struct {
		name string
		pids [][]int // by sandbox
	}
	type waking struct {
		id, name string
		pids     []int
	}
	var groups []*group
	var awake []waking
	for _, p := range []struct{ profile, name string }{{plainProfile, "idle " + viaAPI}, {imageProfile, "idle " + viaAPIImage}} {
		if p.profile == imageProfile && b.image == "" {
			continue
		}
		g := &group{name: p.name}
		for range each {
			id, err := b.broker.create(ctx, p.profile)
			if err != nil {
				return err
			}
			defer func() { _, _ = b.broker.Destroy(context.WithoutCancel(ctx), id, true) }()
			g.pids = append(g.pids, b.broker.sandboxPIDs(id))
			awake = append(awake, waking{id, g.name, g.pids[len(g.pids)-1]})
		}
		groups = append(groups, g)
	}
	if b.runsc != nil {
		groups = append(groups, &group{"idle runsc run sleep", [][]int{gvisor(b.runsc.state())[b.runsc.running]}})
	}
	span := 10 * time.Second
	if b.quick {
		span = 2 * time.Second
	}
	if err := b.rest(ctx, settleTime); err != nil {
		return err
	}
	before := map[*group][]time.Duration{}
	for _, g := range groups {
		for _, pids := range g.pids {
			if len(pids) == 0 {
				return fmt.Errorf("%s: its processes are not to be found", g.name)
			}
			d, ok := onCPU(pids)
			if !ok {
				b.r.skip("idle CPU: this kernel does not count it")
			}
			before[g] = append(before[g], d)
		}
	}
	begin := time.Now()
	if err := b.rest(ctx, span); err != nil {
		return err
	}
	for _, g := range groups {
		for i, pids := range g.pids {
			d, ok := onCPU(pids)
			if ok {
				b.to.Add(g.name+": CPU", "%", 100*float64(d-before[g][i])/float64(time.Since(begin)))
			}
			b.to.Add(g.name+idleMemory, "MB", float64(memoryOf(pids))/1e6)
		}
	}
	for _, w := range awake {
		if _, err := b.broker.StatFile(ctx, w.id, "/"); err != nil {
			return err
		}
	}
	if err := b.rest(ctx, 2*time.Second); err != nil {
		return err
	}
	for _, w := range awake {
		b.to.Add(w.name+idleMemory+", its agent awake", "MB", float64(memoryOf(w.pids))/1e6)
	}
	if res, err := b.broker.Run(ctx, b.plain, api.Exec{Args: []string{"cat", "/proc/1/status"}}); err == nil {
		for line := range strings.Lines(res.Stdout) {
			if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
				b.r.fact("agent, resident as its kernel counts", "%s kB", f[1])
			}
		}
	}
	b.r.fact("server after the run, resident", "%.1f MB", float64(rss(b.broker.pid()))/1e6)
	return b.childInit()
}

// childInit is what each start of a gVisor child pays before its main function.
func (b *bench) childInit() error {
	for range b.rounds {
		cmd := exec.Command(filepath.Join(b.bin, "sandboxer-runner"))
		cmd.Env = append(os.Environ(), "GODEBUG=inittrace=1")
		trace, err := cmd.CombinedOutput()
		var total float64
		n := 0
		for line := range strings.Lines(string(trace)) {
			var pkg string
			var at, took float64
			if k, _ := fmt.Sscanf(line, "init %s @%f ms, %f ms clock", &pkg, &at, &took); k == 3 {
				total += took
				n++
			}
		}
		if n == 0 { // it refuses to run by hand, which is no error here
			return fmt.Errorf("sandboxer-runner tells nothing of its initialisation: %w", err)
		}
		b.to.Add("child init", "ms", total)
		b.to.Add("child init: packages", "", float64(n))
	}
	return nil
}

// cycles lives 200 lives and looks at what they leave.
func (b *bench) cycles(ctx context.Context) error {
	lives, warm := b.count(200, 2), b.count(16, 2)
	live := func(n int) error {
		for i := range n {
			profile := plainProfile
			if i%2 == 1 && b.image != "" {
				profile = imageProfile
			}
			id, err := b.broker.create(ctx, profile)
			if err == nil {
				err = b.broker.run(ctx, id)
			}
			if err == nil {
				_, err = b.broker.Destroy(ctx, id, true)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	if err := live(warm); err != nil {
		return err
	}
	// The server's connections to its database open files when several questions first come at once, and stay open.
	var asking sync.WaitGroup
	for range 64 {
		asking.Go(func() { _, _ = b.broker.List(ctx, api.SandboxQuery{}) })
	}
	asking.Wait()
	before, err := b.settled(leftovers{}, false)
	if err != nil {
		return err
	}
	open := b.broker.descriptors()
	begin := time.Now()
	if err := live(lives); err != nil {
		return err
	}
	b.r.fact("200 lives, one after the other", "%.1f a second", float64(lives)/time.Since(begin).Seconds())
	after, err := b.settled(before, true)
	if err != nil {
		return err
	}
	b.r.fact("left behind before", "%+v", before)
	b.r.fact("left behind after", "%+v", after)
	for name, n := range b.broker.descriptors() {
		if more := n - open[name]; more > 0 {
			b.r.fact("left open: "+name, "%d more", more)
		}
	}
	more := 0
	for _, d := range []int{after.Descriptors - before.Descriptors, after.Goroutines - before.Goroutines, after.Mounts - before.Mounts,
		after.Zombies - before.Zombies, after.Processes - before.Processes, after.Cgroups - before.Cgroups, after.Files - before.Files} {
		more += max(0, d)
	}
	b.to.Add("left behind by 200 lives", "", float64(more))
	return nil
}

// settled counts when nothing is under way any more: connections that go idle and
// processes that end take a moment. The lowest number of goroutines counts, because the question
// itself has a few that come and go. With a goal it waits until that is reached, for a few seconds.
func (b *bench) settled(goal leftovers, to bool) (leftovers, error) {
	var l leftovers
	fewest := math.MaxInt
	for range b.count(10, 1) {
		b.broker.Client.Close() // idle connections
		time.Sleep(300 * time.Millisecond)
		var err error
		if l, err = b.broker.leftovers(); err != nil {
			return l, err
		}
		fewest = min(fewest, l.Goroutines)
		if l.Goroutines = fewest; to && l == goal {
			break
		}
	}
	return l, nil
}

// module has the packages with benchmarks of their own.
const module = "github.com/sand-boxer/sandboxer"

// manager runs the manager's own benchmarks, which have a store that makes every
// commit durable and a backend in memory.
func (b *bench) manager(ctx context.Context) error {
	test := b.path("manager.test")
	if err := compile(ctx, "test", "-c", "-vet=off", "-trimpath", "-o", test, module+"/internal/manager"); err != nil {
		return err
	}
	const lives = "BenchmarkCreateDestroy"
	for range b.count(3, 1) {
		out, _, err := b.benchmark(ctx, test, lives, fmt.Sprint(b.count(1000, 20), "x"))
		if err != nil {
			return err
		}
		for name, figures := range out {
			if v, ok := figures["lives/s"]; ok {
				b.to.Rate("manager on the fake, "+strings.TrimPrefix(trimCPUs(name), lives+"/")+": lives", "1/s", v)
			}
		}
	}
	out, peak, err := b.benchmark(ctx, test, "BenchmarkSweep", fmt.Sprint(b.count(5, 1), "x"))
	if err != nil {
		return err
	}
	for _, figures := range out {
		b.to.Add("sweep over 10,000 records", "ms", figures["ns/op"]/1e6)
		b.to.Add("sweep over 10,000 records: heap at its peak", "MB", figures["peak-MiB"]*(1<<20)/1e6)
		b.to.Add("sweep over 10,000 records: resident at its peak, fake and its filling included", "MB", float64(peak)/1e6)
	}
	return nil
}

// trimCPUs removes the number of processors from a benchmark's name.
func trimCPUs(name string) string {
	if i := strings.LastIndexByte(name, '-'); i > 0 {
		return name[:i]
	}
	return name
}

// benchmark runs Go benchmarks and returns their figures by unit, and the most
// memory the process had, in bytes.
func (b *bench) benchmark(ctx context.Context, test, pattern, times string, env ...string) (map[string]map[string]float64, int64, error) {
	cmd := exec.CommandContext(ctx, test, "-test.run=^$", "-test.bench=^"+pattern+"$", "-test.benchtime="+times, fmt.Sprintf("-test.short=%t", b.once))
	cmd.Dir = b.base
	cmd.Env = append(append(os.Environ(), "TMPDIR="+b.base), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, 0, fmt.Errorf("%s: %w: %s", pattern, err, out)
	}
	all := map[string]map[string]float64{}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		figures := map[string]float64{}
		for i := 2; i+1 < len(f); i += 2 {
			if v, err := strconv.ParseFloat(f[i], 64); err == nil {
				figures[f[i+1]] = v
			}
		}
		all[f[0]] = figures
	}
	if len(all) == 0 {
		return nil, 0, fmt.Errorf("%s: no figures in: %s", pattern, out)
	}
	usage, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	if !ok {
		return nil, 0, errors.New("the system does not tell a process's memory")
	}
	return all, usage.Maxrss << 10, nil
}

// bars compares with the targets.
func (b *bench) bars() {
	b.sshBars()
	b.composeBars()
	b.containerBars()
	b.deerflowBars()
	b.checkpointBars()
	b.routeBars()
	b.densityBars()
	b.besideBars()
	r := b.r
	m := r.median
	for _, x := range []string{viaAPI, viaAPIImage} {
		first := m(x + ": create to first exec")
		r.most(x+": create to first exec / "+runscRun, first/m(runscRun), 0.80, "x")
		r.most(x+": create to first exec / "+dockerRun, first/m(dockerRun), 0.35, "x")
	}
	for _, x := range []string{apiRun, apiStream, apiImageRun} {
		r.most(x+" / "+runscExec, m(x)/m(runscExec), 0.6, "x")
		r.most(x+" / "+dockerExec, m(x)/m(dockerExec), 0.2, "x")
		r.least(sixteen+x, m(sixteen+x), 250, "1/s")
	}
	r.least("below the API, output", m("below the API, output"), 1000, "MB/s")
	r.least("output", m("output"), 300, "MB/s")
	r.most("echo of a byte", m("echo of a byte"), 0.5, "ms")
	for _, x := range []string{viaAPI, viaAPIImage} {
		r.most(x+": destroy", m(x+": destroy"), 15, "ms")
	}
	for _, x := range []string{viaAPI, viaAPIImage} {
		r.most("idle "+x+idleMemory, m("idle "+x+idleMemory), 14, "MB")
		r.most("idle "+x+": CPU", m("idle "+x+": CPU"), 0.02, "%")
	}
	r.most("child init", m("child init"), 7, "ms")
	r.most("child init: packages", m("child init: packages"), 330, "")
	r.most("left behind by 200 lives", m("left behind by 200 lives"), 0, "")
	r.least("manager on the fake, 16 clients", m("manager on the fake, clients=16: lives"), 300, "1/s")
	r.most("sweep over 10,000 records", m("sweep over 10,000 records"), 1000, "ms")
	r.most("sweep over 10,000 records: heap at its peak", m("sweep over 10,000 records: heap at its peak"), 200, "MB")
	r.most(idleServer, m(idleServer), 60, "MB")
}
