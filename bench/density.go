//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/measure"
)

const (
	snapSmall   = "snapshot of a small sandbox"
	snapFirst   = "restore of a small sandbox: to first exec"
	snapRunsc   = "runsc run true, among snapshots"
	snapBig     = "snapshot of 200 MB"
	snapBigUp   = "restore of 200 MB"
	snapFill    = "filling a memfd of 200 MB"
	snapCold    = "create, among snapshots"
	forkTwenty  = "fork of 200 MB, 20 copies"
	forkPSS     = "fork of 200 MB: memory (PSS) of a copy"
	densityMem  = "100 idle sandboxes: MemAvailable each"
	densityCPU  = "100 idle sandboxes: CPU each"
	burstRate   = "burst of 50: lives"
	burstGood   = "burst of 50: lives that succeed"
	burstDocker = "burst of 50 docker run --rm true"
	claimFirst  = "claim of a warm sandbox: to first exec"
	claimExec   = "claim of a warm sandbox: first exec"
	claimRunsc  = "runsc run true, among claims"
	claimWarm   = "claims answered from the pool"
	netPush     = "network: through the policy, up"
	netPull     = "network: through the policy, down"
	netLink     = "network: set-up of a link"
	netPolicy   = "network: change of policy"
	netPlug     = "network: hot plug"
	netDial     = "network: port dial"
	netByte     = "network: port dial to first byte"
)

// forget destroys a sandbox whatever became of the context.
func (b *bench) forget(ctx context.Context, id string) {
	_, _ = b.broker.Destroy(context.WithoutCancel(ctx), id, true)
}

// sh runs a shell script in a sandbox.
func (b *bench) sh(ctx context.Context, id, script string) error {
	res, err := b.broker.Run(ctx, id, api.Exec{Args: []string{"sh", "-c", script}})
	if err == nil && res.Code != 0 {
		err = fmt.Errorf("%s exits with %d: %s", script, res.Code, res.Stderr)
	}
	return err
}

// holding is a script that leaves a process with n bytes of memory.
func holding(n int) string {
	return fmt.Sprintf("(head -c %d /dev/urandom | tail -c %d | (dd bs=1 count=1; touch /tmp/full; sleep 100000)) >/dev/null 2>&1 & until [ -e /tmp/full ]; do sleep 0.1; done", n, n)
}

// snapshots saves and restores sandboxes with their memory.
func (b *bench) snapshots(ctx context.Context) error {
	profile := plainProfile
	if b.image != "" {
		profile = imageProfile
	}
	id, err := b.broker.create(ctx, profile)
	if err != nil {
		return err
	}
	defer b.forget(ctx, id)
	// saveAndRestore saves the sandbox, makes a copy, and forgets both.
	saveAndRestore := func(ctx context.Context, to *Set, saved, restored string, exec bool) error {
		begin := time.Now()
		s, err := b.broker.Snapshot(ctx, id, api.CreateSnapshot{Kind: sandboxer.SnapshotNative})
		if err != nil {
			return err
		}
		to.Took(saved, time.Since(begin))
		begin = time.Now()
		sb, err := b.broker.Restore(ctx, s.ID, api.RestoreSnapshot{})
		if err != nil {
			return err
		}
		defer b.forget(ctx, sb.ID)
		if exec {
			err = b.broker.run(ctx, sb.ID)
		}
		to.Took(restored, time.Since(begin))
		_, derr := b.broker.DropSnapshot(ctx, s.ID)
		return errors.Join(err, derr)
	}
	arm := func(name string, sample func(ctx context.Context, to *Set) error) Arm {
		return Arm{Name: name, To: b.to, Sample: sample}
	}
	small := []Arm{arm(snapSmall, func(ctx context.Context, to *Set) error {
		return saveAndRestore(ctx, to, snapSmall, snapFirst, true)
	})}
	if b.runsc != nil {
		small = append(small, arm(snapRunsc, func(ctx context.Context, to *Set) error {
			took, _, err := b.runsc.run(ctx)
			to.Took(snapRunsc, took)
			return err
		}))
	}
	if _, err := interleave(ctx, measure.Plan{Rounds: b.count(10, 1), WarmUp: b.count(1, 0), Within: b.within, Each: turnTimeout}, small...); err != nil {
		return err
	}
	if err := b.sh(ctx, id, holding(b.count(200_000_000, 2_000_000))); err != nil {
		return err
	}
	_, err = interleave(ctx, measure.Plan{Rounds: b.count(5, 1), Within: b.within, Each: turnTimeout},
		arm(snapBig, func(ctx context.Context, to *Set) error {
			return saveAndRestore(ctx, to, snapBig, snapBigUp, false)
		}),
		arm(snapFill, func(_ context.Context, to *Set) error {
			took, err := fillMemory(b.count(200_000_000, 2_000_000))
			to.Took(snapFill, took)
			return err
		}),
		arm(snapCold, func(ctx context.Context, to *Set) error {
			begin := time.Now()
			cold, err := b.broker.create(ctx, profile)
			if err != nil {
				return err
			}
			to.Took(snapCold, time.Since(begin))
			b.forget(ctx, cold)
			return nil
		}))
	if err != nil {
		return err
	}
	begin := time.Now()
	forked, err := b.broker.Fork(ctx, id, api.ForkSandbox{Count: b.count(20, 2)})
	if err != nil {
		return err
	}
	b.to.Took(forkTwenty, time.Since(begin))
	for _, sb := range forked.Items {
		defer b.forget(ctx, sb.ID)
	}
	if err := b.rest(ctx, 2*time.Second); err != nil { // gVisor loads the last pages later
		return err
	}
	pids := gvisor(filepath.Join(b.broker.stateDir(), "run"))
	for _, sb := range forked.Items {
		b.to.Add(forkPSS, "MB", float64(memoryOf(pids[sb.ID+"-g1"]))/1e6)
	}
	return nil
}

// fillMemory is how long the machine takes to give out memory and to copy into it.
func fillMemory(n int) (time.Duration, error) {
	from := make([]byte, 1<<20)
	for i := range from {
		from[i] = byte(i)
	}
	begin := time.Now()
	fd, err := unix.MemfdCreate("bench", unix.MFD_CLOEXEC)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	for left := n; left > 0; {
		k, err := unix.Write(fd, from[:min(left, len(from))])
		if err != nil {
			return 0, err
		}
		left -= k
	}
	return time.Since(begin), nil
}

// density has a hundred sandboxes do nothing.
func (b *bench) density(ctx context.Context) error {
	n := b.count(100, 3)
	profile := plainProfile
	if b.image != "" {
		profile = imageProfile
	}
	before, err := b.settledMemory()
	if err != nil {
		return err
	}
	ids := make([]string, n)
	defer func() {
		for _, id := range ids {
			if id != "" {
				b.forget(ctx, id)
			}
		}
	}()
	begin := time.Now()
	for i := range n {
		if ids[i], err = b.broker.create(ctx, profile); err != nil {
			return fmt.Errorf("sandbox %d of %d: %w", i+1, n, err)
		}
	}
	b.r.fact("100 idle sandboxes", "made one after the other in %.1f s", time.Since(begin).Seconds())
	after, err := b.settledMemory()
	if err != nil {
		return err
	}
	b.to.Add(densityMem, "MB", float64(before-after)/float64(n)/1e6)
	all := gvisor(filepath.Join(b.broker.stateDir(), "run"))
	var pids []int
	for _, id := range ids {
		pids = append(pids, all[id+"-g1"]...)
	}
	if d, ok := onCPU(pids); ok {
		begin := time.Now()
		if err := b.rest(ctx, 10*time.Second); err != nil {
			return err
		}
		later, _ := onCPU(pids)
		b.to.Add(densityCPU, "%", 100*float64(later-d)/float64(time.Since(begin))/float64(n))
	}
	return ctx.Err()
}

// settledMemory returns available when it no longer changes: the memory of what was measured before may not be free yet.
func (b *bench) settledMemory() (int64, error) {
	last, err := available()
	for range b.count(30, 0) {
		if err != nil {
			break
		}
		time.Sleep(time.Second)
		var n int64
		n, err = available()
		if still := max(n, last)-min(n, last) < 8<<20; err == nil && still {
			return n, nil
		}
		last = n
	}
	return last, err
}

// available is the machine's memory that programs can have, in bytes.
func available() (int64, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "MemAvailable:" {
			n, err := strconv.ParseInt(f[1], 10, 64)
			return n << 10, err
		}
	}
	return 0, errors.New("the kernel does not tell the available memory")
}

// burst asks for fifty lives at the same moment.
func (b *bench) burst(ctx context.Context) error {
	n := b.count(50, 4)
	profile := plainProfile
	if b.image != "" {
		profile = imageProfile
	}
	all := func(do func() error) (good int, took time.Duration) {
		took, failed := measure.Load{Count: n}.Run(ctx, func(int) error { return do() })
		for _, err := range failed {
			b.say(err.Error())
		}
		return n - len(failed), took
	}
	for range b.count(3, 1) {
		good, took := all(func() error {
			id, err := b.broker.create(ctx, profile)
			if err != nil {
				return err
			}
			err = b.broker.run(ctx, id)
			_, derr := b.broker.Destroy(context.WithoutCancel(ctx), id, true)
			return errors.Join(err, derr)
		})
		if good < n {
			b.say("the server of the failed lives said:\n" + b.broker.said())
		}
		b.to.Rate(burstRate, "1/s", float64(good)/took.Seconds())
		b.to.Rate(burstGood, "%", 100*float64(good)/float64(n))
		if b.docker != nil {
			good, took := all(func() error { _, err := b.docker.run(ctx); return err })
			b.to.Rate(burstDocker, "1/s", float64(good)/took.Seconds())
			b.r.fact("burst of 50 docker run --rm true", "%d succeed", good)
		}
	}
	return ctx.Err()
}

// pooled is a profile of which so many sandboxes are kept warm.
func (b *bench) pooled(size int) string {
	more := fmt.Sprintf("pool:\n  size: %d", size)
	if b.image != "" {
		more += "\nimage: tar:" + b.image
	}
	return like(poolProfile, more)
}

// fill waits until the pool of profile is full.
func (b *broker) fill(ctx context.Context, profile string, size int) error {
	for deadline := time.Now().Add(time.Minute); ; {
		l, err := b.List(ctx, api.SandboxQuery{Profile: profile, States: []sandboxer.State{sandboxer.Warm}})
		if err != nil || len(l.Items) == size {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the pool has %d of %d: %s", len(l.Items), size, b.said())
		}
		if err := measure.Sleep(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// claim measures a warm sandbox until its first command has ended, and returns when the pool
// is full again, and so nothing is made any more.
func (b *broker) claim(ctx context.Context, to *Set, size int) error {
	begin := time.Now()
	id, err := b.create(ctx, poolProfile)
	claimed := time.Now()
	if err == nil {
		err = b.run(ctx, id)
	}
	if err != nil {
		return err
	}
	to.Took(claimFirst, time.Since(begin))
	to.Took(claimExec, time.Since(claimed))
	if _, err := b.Destroy(ctx, id, true); err != nil {
		return err
	}
	return b.fill(ctx, poolProfile, size)
}

// pool claims warm sandboxes, one a second, of a server of its own: what fills the pool
// again is not to be in the way of anything else.
func (b *bench) pool(ctx context.Context) error {
	size := b.count(4, 1)
	return b.withServer(ctx, b.bin, "p", map[string]string{poolProfile: b.pooled(size)}, func(br *broker) error {
		if err := br.fill(ctx, poolProfile, size); err != nil {
			return err
		}
		arms := []Arm{{Name: claimFirst, To: b.to, Sample: func(ctx context.Context, to *Set) error { return br.claim(ctx, to, size) }}}
		if b.runsc != nil {
			arms = append(arms, Arm{Name: claimRunsc, To: b.to, Sample: func(ctx context.Context, to *Set) error {
				took, _, err := b.runsc.run(ctx)
				to.Took(claimRunsc, took)
				return err
			}})
		}
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		p := b.plan(b.rounds)
		p.WarmUp = 0 // all count, for the share that is claimed
		say := p.Round
		p.Round = func(n int) error {
			if n > 1 {
				<-tick.C
			}
			return say(n)
		}
		rounds, err := interleave(ctx, p, arms...)
		if err != nil {
			return err
		}
		all, err := br.metrics()
		if err != nil {
			return err
		}
		warm := all[fmt.Sprintf(`sandboxer_pool_creates_total{from="pool",profile="%s"}`, poolProfile)]
		b.to.Rate(claimWarm, "%", 100*warm/float64(rounds))
		return nil
	})
}

// network runs ext.local's own benchmark of its network, which has a network namespace
// for an outside.
func (b *bench) network(ctx context.Context) error {
	if os.Geteuid() != 0 {
		b.r.skip("network: an outside to measure with needs root")
		return nil
	}
	test, helpers := b.path("local.test"), b.path("helpers")
	if err := os.MkdirAll(helpers, 0o755); err != nil {
		return err
	}
	if err := compile(ctx, "test", "-c", "-vet=off", "-trimpath", "-o", test, module+"/adapters/local"); err != nil {
		return err
	}
	if err := compile(ctx, "build", "-trimpath", "-ldflags=-s -w", "-o", helpers+"/",
		module+"/cmd/sandboxer-runner", module+"/cmd/sandboxer-agent", module+"/adapters/local/testdata/tool"); err != nil {
		return err
	}
	for range b.count(3, 1) {
		out, _, err := b.benchmark(ctx, test, "BenchmarkNetwork", fmt.Sprint(b.count(10, 1), "x"), "SANDBOXER_TEST_HELPERS="+helpers)
		if err != nil {
			return err
		}
		for name, figures := range out {
			ms := time.Duration(figures["ns/op"])
			switch strings.TrimPrefix(trimCPUs(name), "BenchmarkNetwork/") {
			case "push":
				b.to.Rate(netPush, "MB/s", figures["MB/s"])
			case "pull":
				b.to.Rate(netPull, "MB/s", figures["MB/s"])
			case "link":
				b.to.Took(netLink, ms)
			case "policy":
				b.to.Took(netPolicy, ms)
			case "plug":
				b.to.Took(netPlug, ms)
			case "dial":
				b.to.Took(netDial, time.Duration(figures["dial-ns"]))
				b.to.Took(netByte, time.Duration(figures["answer-ns"]))
			}
		}
	}
	return nil
}

func (b *bench) densityBars() {
	r := b.r
	m := r.median
	r.most(snapSmall+" / "+snapRunsc, m(snapSmall)/m(snapRunsc), 0.5, "x")
	r.most(snapFirst+" / "+snapRunsc, m(snapFirst)/m(snapRunsc), 1, "x")
	r.most(snapBigUp+" / filling a memfd and a create", m(snapBigUp)/(m(snapFill)+m(snapCold)), 2.5, "x")
	r.most(claimFirst+" / "+claimRunsc, m(claimFirst)/m(claimRunsc), 0.2, "x")
	r.most(claimFirst, m(claimFirst), 15, "ms")
	r.most(claimFirst+", 99th percentile", r.percentile(claimFirst, 99), 50, "ms")
	r.least(claimWarm, m(claimWarm), 100, "%")
	r.least(burstGood, m(burstGood), 100, "%")
	r.least(burstRate, m(burstRate), 20, "1/s")
	r.least(netPush, m(netPush), 400, "MB/s")
	r.least(netPull, m(netPull), 150, "MB/s")
	r.most(netLink, m(netLink), 2, "ms")
	r.most(netDial, m(netDial), 3, "ms")
}
