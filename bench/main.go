//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
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
)

type options struct {
	bin    string
	runsc  string
	rounds int
	quick  bool
	out    string
	dir    string
	only   string
	dense  bool
}

// These need nothing of the others.
const (
	sshStep        = "what goes over ssh"
	checkpointStep = "checkpoints"
)

func main() {
	// The server is told to end when this thread does: it is the main one for that.
	runtime.LockOSThread()
	var o options
	flag.StringVar(&o.bin, "bin", "bin", "directory with sandboxer, sandboxer-runner and sandboxer-agent")
	flag.StringVar(&o.runsc, "runsc", "", "gVisor's command line; empty means runsc in -bin, or a fresh build; none leaves it out")
	flag.IntVar(&o.rounds, "n", 50, "rounds")
	flag.BoolVar(&o.quick, "quick", false, "five rounds, without the slow parts")
	flag.StringVar(&o.out, "o", "", "also write the results to this file, as JSON")
	flag.StringVar(&o.dir, "dir", os.TempDir(), "where to work; gVisor's sockets need a short path")
	ssh := flag.Bool("ssh", false, "only what goes over ssh")
	warm := flag.Bool("pool", false, "only the warm pool")
	ckpt := flag.Bool("checkpoints", false, "only portable checkpoints")
	projects := flag.Bool("compose", false, "only compose projects over ssh")
	flag.BoolVar(&o.dense, "density", false, "only snapshots with memory, a hundred sandboxes, bursts and the network")
	flag.Parse()
	if *ssh {
		o.only = sshStep
	} else if *warm {
		o.only = poolStep
	} else if *ckpt {
		o.only = checkpointStep
	} else if *projects {
		o.only = composeStep
	}
	if flag.NArg() > 0 || o.rounds < 1 {
		fmt.Fprintln(os.Stderr, "bench: no arguments are taken, and at least one round")
		os.Exit(2)
	}
	if o.quick {
		o.rounds = min(o.rounds, 5)
	}
	// Opening ext.local in this process takes the standard streams from it.
	stdout, stderr := os.Stdout, os.Stderr
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	r, err := measure(ctx, o, func(s string) { fmt.Fprintln(stderr, "bench: "+s) })
	stop()
	if err == nil {
		r.print(stdout)
		err = write(r, o.out)
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		os.Exit(1)
	}
}

func write(r *report, to string) error {
	if to == "" {
		return nil
	}
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(to, append(data, '\n'), 0o644)
}

// The steps of -density.
const (
	prepareStep  = "preparing"
	snapshotStep = "snapshots with memory"
	idleStep     = "a hundred idle sandboxes"
	burstStep    = "bursts"
	poolStep     = "the warm pool"
	networkStep  = "the network of sandboxes"
)

// bench is one run with everything that takes part in it.
type bench struct {
	options
	say  func(string)
	r    *report
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

func measure(ctx context.Context, o options, say func(string)) (_ *report, err error) {
	b := &bench{options: o, say: say, echoes: map[string]*echo{}}
	b.r = &report{Time: time.Now().UTC().Truncate(time.Second), Revision: revision(ctx), Machine: thisMachine(), Rounds: o.rounds}
	if b.bin, err = filepath.Abs(o.bin); err != nil {
		return nil, err
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
		slow bool
		do   func(context.Context) error
	}{
		{prepareStep, false, b.prepare},
		{"measuring the idle server", false, b.idleServer},
		{"starting what is measured while it runs", false, b.startAll},
		{"rounds", false, b.compare},
		{"idle sandboxes", false, b.idle},
		{"lives that should leave nothing", true, b.cycles},
		{"the manager on the fake", true, b.manager},
		{checkpointStep, true, b.checkpoints},
		{idleStep, true, b.density},
		{snapshotStep, true, b.snapshots},
		{burstStep, true, b.burst},
		{poolStep, true, b.pool},
		{networkStep, true, b.network},
		{sshStep, false, b.overSSH},
		{composeStep, true, b.overCompose},
	}
	for _, s := range steps {
		if o.only != "" && s.what != o.only && (s.what != prepareStep || o.only != poolStep && o.only != composeStep) || o.dense && !slices.Contains([]string{prepareStep, snapshotStep, idleStep, burstStep, poolStep, networkStep}, s.what) {
			continue
		}
		if s.slow && o.quick {
			b.r.skip("%s (-quick)", s.what)
			continue
		}
		say(s.what)
		if err := s.do(ctx); err != nil {
			if b.broker != nil && b.broker.said() != "" {
				say("the server said:\n" + b.broker.said())
			}
			if ctx.Err() != nil {
				err = errors.New("interrupted")
			}
			return nil, fmt.Errorf("%s: %w", s.what, err)
		}
	}
	b.r.finish()
	b.bars()
	return b.r, nil
}

func revision(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty").Output()
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

// prepare starts the broker and finds the other engines.
func (b *bench) prepare(ctx context.Context) error {
	for _, name := range []string{"sandboxer", "sandboxer-runner", "sandboxer-agent"} {
		fi, err := os.Stat(filepath.Join(b.bin, name))
		if err != nil {
			return fmt.Errorf("%w (build it, or name its directory with -bin)", err)
		}
		b.r.fact("size of "+name, "%.1f MB", float64(fi.Size())/1e6)
	}
	box, err := findBusybox()
	if err != nil {
		b.r.skip("the image and the other engines: %v", err)
	} else {
		b.image, b.archive, b.root = b.path("image.tar"), b.path("root.tar"), b.path("root")
		if err := buildRoot(box, b.root, b.image, b.archive); err != nil {
			return fmt.Errorf("making the image: %w", err)
		}
	}
	profiles := map[string]string{}
	if b.image != "" {
		profiles[imageProfile] = "image: tar:" + b.image
	}
	b.broker, err = startBroker(ctx, b.bin, b.path("b"), profiles)
	if b.broker != nil && b.broker.cmd.Process != nil {
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
	if b.root == "" {
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
			if err := buildRunsc(ctx, bin); err != nil {
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
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(2 * time.Second):
	}
	b.r.metric("idle server: resident", "MB").samples = []float64{float64(rss(b.broker.pid())) / 1e6}
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
	b.echo("api", func(cmd sandboxer.Cmd) error { return b.apiExec(ctx, cmd) })
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

// apiExec runs a command with its streams through the API.
func (b *bench) apiExec(ctx context.Context, cmd sandboxer.Cmd) error {
	x, err := b.broker.Exec(ctx, b.plain, cmd)
	if err == nil && x.Code != 0 {
		err = fmt.Errorf("%s exits with %d", cmd.Args[0], x.Code)
	}
	return err
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
)

// compare does everything that is compared once per round.
func (b *bench) compare(ctx context.Context) error {
	noop := sandboxer.Cmd{Args: []string{"true"}}
	server := func() time.Duration { return treeCPU(b.broker.pid()) }
	ops := []func() error{
		func() error { return b.broker.life(ctx, b.r, plainProfile, viaAPI) },
		func() error { return b.direct.life(ctx, b.r, "", belowAPI) },
		func() error {
			cpu, begin := server(), time.Now()
			err := b.broker.run(ctx, b.plain)
			b.r.took(apiRun, time.Since(begin))
			b.r.spent(apiRun, server()-cpu)
			return err
		},
		func() error {
			cpu, begin := server(), time.Now()
			err := b.apiExec(ctx, noop)
			b.r.took(apiStream, time.Since(begin))
			b.r.spent(apiStream, server()-cpu)
			return err
		},
		func() error {
			begin := time.Now()
			err := b.direct.exec(ctx, b.handle, noop)
			b.r.took(directExec, time.Since(begin))
			return err
		},
		func() error {
			return b.parallel(sixteen+apiRun, 96, func() error { return b.broker.run(ctx, b.plain) })
		},
		func() error {
			return b.parallel(sixteen+apiStream, 96, func() error { return b.apiExec(ctx, noop) })
		},
		func() error { return b.trips("api", "echo of a byte") },
		func() error { return b.trips("below", "below the API, echo of a byte") },
		func() error {
			return b.stream("output", 128, func(c sandboxer.Cmd) error { return b.apiExec(ctx, c) })
		},
		func() error {
			return b.stream("below the API, output", 512, func(c sandboxer.Cmd) error { return b.direct.exec(ctx, b.handle, c) })
		},
	}
	if b.image != "" {
		ops = append(ops,
			func() error { return b.broker.life(ctx, b.r, imageProfile, viaAPIImage) },
			func() error { return b.direct.life(ctx, b.r, b.image, belowImage) },
			func() error {
				cpu, begin := server(), time.Now()
				err := b.broker.run(ctx, b.onImage)
				b.r.took(apiImageRun, time.Since(begin))
				b.r.spent(apiImageRun, server()-cpu)
				return err
			},
			func() error {
				return b.parallel(sixteen+apiImageRun, 96, func() error { return b.broker.run(ctx, b.onImage) })
			})
	}
	if b.runsc != nil {
		ops = append(ops, func() error {
			took, cpu, err := b.runsc.run(ctx)
			b.r.took(runscRun, took)
			b.r.spent(runscRun, cpu)
			return err
		}, func() error {
			pids := gvisor(b.runsc.state())[b.runsc.running]
			before := treeCPU(pids...)
			took, cpu, err := b.runsc.exec(ctx)
			b.r.took(runscExec, took)
			b.r.spent(runscExec, cpu+treeCPU(pids...)-before)
			return err
		}, func() error {
			return b.parallel(sixteen+runscExec, 32, func() error { _, _, err := b.runsc.exec(ctx); return err })
		})
	}
	if b.docker != nil {
		ops = append(ops, func() error {
			took, err := b.docker.run(ctx)
			b.r.took(dockerRun, took)
			return err
		}, func() error {
			took, err := b.docker.exec(ctx)
			b.r.took(dockerExec, took)
			return err
		})
	}
	// One round to warm up: what is made once (the image, the wires to the agent) is
	// not what is measured.
	kept := b.r
	var calls map[string]float64
	for i := range b.rounds + 1 {
		if i == 0 {
			b.r = &report{}
		}
		for _, k := range rand.Perm(len(ops)) {
			if err := errors.Join(ops[k](), ctx.Err()); err != nil {
				return err
			}
		}
		if i == 0 {
			b.r = kept
			var err error
			if calls, err = b.broker.metrics(); err != nil {
				return err
			}
		}
		if i > 0 && i%10 == 0 {
			b.say(fmt.Sprintf("round %d of %d", i, b.rounds))
		}
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
		for _, m := range b.r.Metrics {
			if m.Name == viaAPI+": "+what || m.Name == viaAPIImage+": "+what {
				for _, v := range m.samples {
					sum, n = sum+v, n+1
				}
			}
		}
		return sum / float64(n)
	}
	b.r.fact("mean create", "%.1f ms, thereof the extension's provision %.1f ms and wait_ready %.1f ms", whole("create"), mean("provision"), mean("wait_ready"))
	b.r.fact("mean destroy", "%.1f ms, thereof the extension's teardown %.1f ms", whole("destroy"), mean("teardown"))
	return nil
}

func (b *bench) trips(which, name string) error {
	for range 20 {
		took, err := b.echoes[which].trip()
		if err != nil {
			return err
		}
		b.r.took(name, took)
	}
	return nil
}

func (b *bench) stream(name string, mib int, exec func(sandboxer.Cmd) error) error {
	v, err := stream(mib, exec)
	b.r.rate(name, "MB/s", v)
	return err
}

// parallel does n operations, 16 at a time.
func (b *bench) parallel(name string, n int, do func() error) error {
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		errs []error
		work = make(chan struct{}, n)
	)
	for range n {
		work <- struct{}{}
	}
	close(work)
	begin := time.Now()
	for range 16 {
		wg.Go(func() {
			for range work {
				if err := do(); err != nil {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	b.r.rate(name, "1/s", float64(n)/time.Since(begin).Seconds())
	return errors.Join(errs...)
}

// idle looks at sandboxes that do nothing, and at the programs themselves.
func (b *bench) idle(ctx context.Context) error {
	// Many, because they share their program: what one more costs is what counts.
	each := 10
	if b.quick {
		each = 3
	}
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
	root := filepath.Join(b.broker.stateDir(), "run")
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
			g.pids = append(g.pids, gvisor(root)[id+"-g1"])
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
	wait := func(d time.Duration) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(d):
			return nil
		}
	}
	// For what their start left to do: it gives back what it took, after three seconds.
	if err := wait(5 * time.Second); err != nil {
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
	if err := wait(span); err != nil {
		return err
	}
	for _, g := range groups {
		for i, pids := range g.pids {
			d, ok := onCPU(pids)
			if ok {
				m := b.r.metric(g.name+": CPU", "%")
				m.samples = append(m.samples, 100*float64(d-before[g][i])/float64(time.Since(begin)))
			}
			m := b.r.metric(g.name+": memory (PSS)", "MB")
			m.samples = append(m.samples, float64(memoryOf(pids))/1e6)
		}
	}
	for _, w := range awake {
		if _, err := b.broker.StatFile(ctx, w.id, "/"); err != nil {
			return err
		}
	}
	if err := wait(2 * time.Second); err != nil {
		return err
	}
	for _, w := range awake {
		m := b.r.metric(w.name+": memory (PSS), its agent awake", "MB")
		m.samples = append(m.samples, float64(memoryOf(w.pids))/1e6)
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
		m := b.r.metric("child init", "ms")
		m.samples = append(m.samples, total)
		m = b.r.metric("child init: packages", "")
		m.samples = append(m.samples, float64(n))
	}
	return nil
}

// cycles lives 200 lives and looks at what they leave.
func (b *bench) cycles(ctx context.Context) error {
	const lives, warm = 200, 16
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
	before, err := b.settled(leftovers{}, false)
	if err != nil {
		return err
	}
	begin := time.Now()
	if err := live(lives); err != nil {
		return err
	}
	b.r.fact("200 lives, one after the other", "%.1f a second", lives/time.Since(begin).Seconds())
	after, err := b.settled(before, true)
	if err != nil {
		return err
	}
	b.r.fact("left behind before", "%+v", before)
	b.r.fact("left behind after", "%+v", after)
	more := 0
	for _, d := range []int{after.Descriptors - before.Descriptors, after.Goroutines - before.Goroutines, after.Mounts - before.Mounts,
		after.Zombies - before.Zombies, after.Processes - before.Processes, after.Cgroups - before.Cgroups, after.Files - before.Files} {
		more += max(0, d)
	}
	m := b.r.metric("left behind by 200 lives", "")
	m.samples = []float64{float64(more)}
	return nil
}

// settled counts when nothing is under way any more: connections that go idle and
// processes that end take a moment. With a goal it waits until that is reached, for
// a few seconds.
func (b *bench) settled(goal leftovers, to bool) (leftovers, error) {
	var l leftovers
	for range 10 {
		b.broker.Client.Close() // idle connections
		time.Sleep(300 * time.Millisecond)
		var err error
		if l, err = b.broker.leftovers(); err != nil || to && l == goal {
			return l, err
		}
	}
	return l, nil
}

// manager runs the manager's own benchmarks, which have a store that makes every
// commit durable and a backend in memory.
func (b *bench) manager(ctx context.Context) error {
	test := b.path("manager.test")
	if _, _, _, err := command(ctx, nil, "go", "test", "-c", "-o", test, "./internal/manager"); err != nil {
		return err
	}
	const lives = "BenchmarkCreateDestroy"
	for range 3 {
		out, _, err := benchmark(ctx, test, b.base, lives, "1000x")
		if err != nil {
			return err
		}
		for name, figures := range out {
			if v, ok := figures["lives/s"]; ok {
				b.r.rate("manager on the fake, "+strings.TrimPrefix(trimCPUs(name), lives+"/")+": lives", "1/s", v)
			}
		}
	}
	out, peak, err := benchmark(ctx, test, b.base, "BenchmarkSweep", "5x")
	if err != nil {
		return err
	}
	for _, figures := range out {
		b.r.metric("sweep over 10,000 records", "ms").samples = []float64{figures["ns/op"] / 1e6}
		b.r.metric("sweep over 10,000 records: heap at its peak", "MB").samples = []float64{figures["peak-MiB"] * (1 << 20) / 1e6}
		b.r.metric("sweep over 10,000 records: resident at its peak, fake and its filling included", "MB").samples = []float64{float64(peak) / 1e6}
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
func benchmark(ctx context.Context, test, dir, pattern, times string, env ...string) (map[string]map[string]float64, int64, error) {
	cmd := exec.CommandContext(ctx, test, "-test.run=^$", "-test.bench=^"+pattern+"$", "-test.benchtime="+times)
	cmd.Dir = dir
	cmd.Env = append(append(os.Environ(), "TMPDIR="+dir), env...)
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
	b.checkpointBars()
	b.densityBars()
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
		r.most("idle "+x+": memory (PSS)", m("idle "+x+": memory (PSS)"), 14, "MB")
		r.most("idle "+x+": CPU", m("idle "+x+": CPU"), 0.02, "%")
	}
	r.most("child init", m("child init"), 7, "ms")
	r.most("child init: packages", m("child init: packages"), 330, "")
	r.most("left behind by 200 lives", m("left behind by 200 lives"), 0, "")
	r.least("manager on the fake, 16 clients", m("manager on the fake, clients=16: lives"), 300, "1/s")
	r.most("sweep over 10,000 records", m("sweep over 10,000 records"), 1000, "ms")
	r.most("sweep over 10,000 records: heap at its peak", m("sweep over 10,000 records: heap at its peak"), 200, "MB")
	r.most("idle server: resident", m("idle server: resident"), 60, "MB")
}
