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
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
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
	save := func(series string) (*api.Snapshot, error) {
		begin := time.Now()
		s, err := b.broker.Snapshot(ctx, id, api.CreateSnapshot{Kind: sandboxer.SnapshotNative})
		if series != "" && err == nil {
			b.r.took(series, time.Since(begin))
		}
		return s, err
	}
	restore := func(s *api.Snapshot, series string, exec bool) error {
		begin := time.Now()
		sb, err := b.broker.Restore(ctx, s.ID, api.RestoreSnapshot{})
		if err != nil {
			return err
		}
		defer b.forget(ctx, sb.ID)
		if exec {
			err = b.broker.run(ctx, sb.ID)
		}
		if series != "" && err == nil {
			b.r.took(series, time.Since(begin))
		}
		return err
	}
	for i := range 11 {
		small, first := snapSmall, snapFirst
		if i == 0 { // to warm up
			small, first = "", ""
		}
		s, err := save(small)
		if err == nil {
			err = restore(s, first, true)
		}
		if err == nil {
			_, err = b.broker.DropSnapshot(ctx, s.ID)
		}
		if err == nil && b.runsc != nil {
			var took time.Duration
			if took, _, err = b.runsc.run(ctx); i > 0 {
				b.r.took(snapRunsc, took)
			}
		}
		if err != nil {
			return err
		}
	}
	if err := b.sh(ctx, id, holding(200_000_000)); err != nil {
		return err
	}
	for range 5 {
		s, err := save(snapBig)
		if err == nil {
			err = restore(s, snapBigUp, false)
		}
		if err == nil {
			_, err = b.broker.DropSnapshot(ctx, s.ID)
		}
		if err != nil {
			return err
		}
		took, err := fillMemory(200_000_000)
		if err != nil {
			return err
		}
		b.r.took(snapFill, took)
		begin := time.Now()
		cold, err := b.broker.create(ctx, profile)
		if err != nil {
			return err
		}
		b.r.took(snapCold, time.Since(begin))
		b.forget(ctx, cold)
	}
	begin := time.Now()
	forked, err := b.broker.Fork(ctx, id, api.ForkSandbox{Count: 20})
	if err != nil {
		return err
	}
	b.r.took(forkTwenty, time.Since(begin))
	for _, sb := range forked.Items {
		defer b.forget(ctx, sb.ID)
	}
	time.Sleep(2 * time.Second) // gVisor loads the last pages behind
	pids := gvisor(filepath.Join(b.broker.stateDir(), "run"))
	for _, sb := range forked.Items {
		m := b.r.metric(forkPSS, "MB")
		m.samples = append(m.samples, float64(memoryOf(pids[sb.ID+"-g1"]))/1e6)
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
	const n = 100
	profile := plainProfile
	if b.image != "" {
		profile = imageProfile
	}
	before, err := settled()
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
	after, err := settled()
	if err != nil {
		return err
	}
	b.r.metric(densityMem, "MB").samples = []float64{float64(before-after) / n / 1e6}
	all := gvisor(filepath.Join(b.broker.stateDir(), "run"))
	var pids []int
	for _, id := range ids {
		pids = append(pids, all[id+"-g1"]...)
	}
	if d, ok := onCPU(pids); ok {
		begin := time.Now()
		time.Sleep(10 * time.Second)
		later, _ := onCPU(pids)
		b.r.metric(densityCPU, "%").samples = []float64{100 * float64(later-d) / float64(time.Since(begin)) / n}
	}
	return ctx.Err()
}

// settled is available once that stands still: what was measured before may still be on
// its way out.
func settled() (int64, error) {
	last, err := available()
	for range 30 {
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
	const n = 50
	profile := plainProfile
	if b.image != "" {
		profile = imageProfile
	}
	all := func(do func() error) (good int, took time.Duration) {
		var mu sync.Mutex
		var wg sync.WaitGroup
		begin := time.Now()
		for range n {
			wg.Go(func() {
				if err := do(); err != nil {
					b.say(err.Error())
					return
				}
				mu.Lock()
				good++
				mu.Unlock()
			})
		}
		wg.Wait()
		return good, time.Since(begin)
	}
	for range 3 {
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
		b.r.rate(burstRate, "1/s", float64(good)/took.Seconds())
		b.r.rate(burstGood, "%", 100*float64(good)/n)
		if b.docker != nil {
			good, took := all(func() error { _, err := b.docker.run(ctx); return err })
			b.r.rate(burstDocker, "1/s", float64(good)/took.Seconds())
			b.r.fact("burst of 50 docker run --rm true", "%d succeed", good)
		}
	}
	return ctx.Err()
}

// pool claims warm sandboxes, one a second, of a server of its own: what fills the pool
// again is not to be in the way of anything else.
func (b *bench) pool(ctx context.Context) (err error) {
	const size = 4
	more := fmt.Sprintf("pool:\n  size: %d", size)
	if b.image != "" {
		more += "\nimage: tar:" + b.image
	}
	br, err := startBroker(ctx, b.bin, b.path("p"), map[string]string{poolProfile: more})
	if br != nil && br.cmd.Process != nil {
		defer func() { err = errors.Join(err, br.close()) }()
	}
	if err != nil {
		return err
	}
	full := func() error {
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
			l, err := br.List(ctx, api.SandboxQuery{Profile: poolProfile, States: []sandboxer.State{sandboxer.Warm}})
			if err != nil || len(l.Items) == size {
				return err
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("the pool has %d of %d: %s", len(l.Items), size, br.said())
			}
		}
	}
	if err := full(); err != nil {
		return err
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for range b.rounds {
		begin := time.Now()
		id, err := br.create(ctx, poolProfile)
		claimed := time.Now()
		if err == nil {
			err = br.run(ctx, id)
		}
		if err != nil {
			return err
		}
		b.r.took(claimFirst, time.Since(begin))
		b.r.took(claimExec, time.Since(claimed))
		if _, err := br.Destroy(ctx, id, true); err != nil {
			return err
		}
		if b.runsc != nil {
			if err := full(); err != nil { // and nothing is made at the same time
				return err
			}
			took, _, err := b.runsc.run(ctx)
			if err != nil {
				return err
			}
			b.r.took(claimRunsc, took)
		}
		<-tick.C
	}
	all, err := br.metrics()
	if err != nil {
		return err
	}
	warm := all[fmt.Sprintf(`sandboxer_pool_creates_total{from="pool",profile="%s"}`, poolProfile)]
	b.r.rate(claimWarm, "%", 100*warm/float64(b.rounds))
	return nil
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
	if _, _, _, err := command(ctx, nil, "go", "test", "-c", "-o", test, "./adapters/local"); err != nil {
		return err
	}
	const module = "github.com/sand-boxer/sandboxer/"
	if _, _, _, err := command(ctx, []string{"CGO_ENABLED=0"}, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", helpers+"/",
		module+"cmd/sandboxer-runner", module+"cmd/sandboxer-agent", module+"adapters/local/testdata/tool"); err != nil {
		return err
	}
	for range 3 {
		out, _, err := benchmark(ctx, test, b.base, "BenchmarkNetwork", "10x", "SANDBOXER_TEST_HELPERS="+helpers)
		if err != nil {
			return err
		}
		for name, figures := range out {
			ms := time.Duration(figures["ns/op"])
			switch strings.TrimPrefix(trimCPUs(name), "BenchmarkNetwork/") {
			case "push":
				b.r.rate(netPush, "MB/s", figures["MB/s"])
			case "pull":
				b.r.rate(netPull, "MB/s", figures["MB/s"])
			case "link":
				b.r.took(netLink, ms)
			case "policy":
				b.r.took(netPolicy, ms)
			case "plug":
				b.r.took(netPlug, ms)
			case "dial":
				b.r.took(netDial, time.Duration(figures["dial-ns"]))
				b.r.took(netByte, time.Duration(figures["answer-ns"]))
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
	r.most(claimFirst+", 99th percentile", r.quantile(claimFirst, 0.99), 50, "ms")
	r.least(claimWarm, m(claimWarm), 100, "%")
	r.least(burstGood, m(burstGood), 100, "%")
	r.least(burstRate, m(burstRate), 20, "1/s")
	r.least(netPush, m(netPush), 400, "MB/s")
	r.least(netPull, m(netPull), 150, "MB/s")
	r.most(netLink, m(netLink), 2, "ms")
	r.most(netDial, m(netDial), 3, "ms")
}
