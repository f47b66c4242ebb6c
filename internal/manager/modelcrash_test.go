package manager

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/sand-boxer/sandboxer"
)

// deaths ends lives of the broker of a model, at points that the model draws, and counts them over all runs. TestCrash kills real
// processes at chosen points; here a life ends at any point of anything, and for everybody else that looks the same: nothing
// that it does afterwards has an effect.
type deaths struct {
	operations int // of all runs

	mu    sync.Mutex
	where map[point]int
	armed bool
	next  map[point]bool // the life ends when it comes to one of these
	in    int            // or when it has come to so many points; 0: does not count
	at    point          // where it ended; empty while it goes on
	sever func()         // ends it
}

// pass is called at every point.
func (d *deaths) pass(p point) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.armed || d.at != "" {
		return
	}
	if d.in--; d.in == 0 || d.next[p] {
		delete(d.next, p)
		d.at = p
		d.where[p]++
		d.sever()
	}
}

// begin begins a life, or goes on with the present one. It may end now, and does in so many points if in is not 0.
func (d *deaths) begin(in int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.armed, d.in, d.at = true, in, ""
}

// spare lets the life go on.
func (d *deaths) spare() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.armed = false
}

// over reports whether the life has ended.
func (d *deaths) over() bool {
	if d == nil {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.at != ""
}

// TestModelCrashes plays the model while the broker dies again and again: in the middle of most operations, and of the recovery
// after that. With SANDBOXER_TEST_WHOLE=1 these are 10,000 operations. -rapid.seed repeats a run.
func TestModelCrashes(t *testing.T) {
	want := 600
	if os.Getenv("SANDBOXER_TEST_WHOLE") != "" {
		want = 10_000
	}
	setRapid(t, "checks", "5")
	setRapid(t, "steps", "80")
	setRapid(t, "seed", fmt.Sprint(time.Now().UnixNano()))
	f := flag.Lookup("rapid.seed")
	first, began := f.Value.String(), time.Now()
	seed, err := strconv.ParseUint(first, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	d := &deaths{where: map[point]int{}}
	defer func() {
		f.Value.Set(first)
		n, at := 0, ""
		for _, p := range points {
			n += d.where[p+".before"] + d.where[p+".after"]
			at += fmt.Sprintf(" %s %d+%d", p, d.where[p+".before"], d.where[p+".after"])
		}
		t.Logf("-rapid.seed=%s: %d operations in %s; %d lives ended, before and after%s", first, d.operations, time.Since(began).Round(time.Second), n, at)
	}()
	for ; d.operations < want; seed += 1000 { // the runs of one check take the next numbers
		f.Value.Set(fmt.Sprint(seed))
		checkModel(t, d)
	}
}

// dieIn has lives end in the middle of the actions.
func (m *model) dieIn(t *rapid.T, actions map[string]func(*rapid.T)) {
	m.deaths.sever = m.sever
	m.deaths.next = map[point]bool{}
	for range 40 {
		p := rapid.SampledFrom(points).Draw(t, "dies at") + rapid.SampledFrom([]point{".before", ".after"}).Draw(t, "side")
		m.deaths.next[p] = true
	}
	for name, do := range actions {
		if name == "" || name == "restart" {
			continue
		}
		actions[name] = func(t *rapid.T) {
			m.deaths.begin(max(0, rapid.IntRange(-12, 12).Draw(t, "dies in")))
			defer m.deaths.spare() // also if the action is skipped, which it is before it does anything
			do(t)
			synctest.Wait()
			m.died(t, "")
			m.deaths.operations++
		}
	}
}

// died reports whether the present life ended; it begins the next one then, and forgets what was believed of the sandbox that was
// worked on. Where no fault was injected, that work is finished now.
func (m *model) died(t *rapid.T, id string) bool {
	if !m.deaths.over() {
		return false
	}
	for tries := 3; m.deaths.over(); tries = max(0, tries-1) {
		<-m.gone
		m.deaths.begin(rapid.IntRange(0, 3*tries).Draw(t, "dies again in"))
		if err := m.open(); err != nil && !m.deaths.over() {
			t.Fatal(err)
		}
		synctest.Wait()
	}
	m.deaths.spare()
	m.zeros(t)
	m.settle()
	for tries := 0; !m.faulty && m.busy(t); tries++ {
		if tries == 10 {
			t.Fatal("the work that was cut short is not finished")
		}
		time.Sleep(15 * time.Second)
		m.settle()
	}
	m.learn(t, id)
	return true
}

// learn believes what the record of id says, and takes over what the broker made under other IDs.
func (m *model) learn(t *rapid.T, id string) {
	if m.settle(); m.died(t, id) {
		return
	}
	delete(m.live, id)
	if sb, err := m.store.Sandbox(admin, id); err == nil && sb.State == sandboxer.Terminated {
		m.ends[id] = max(m.ends[id], sb.Generation)
	}
	err := m.records(admin, sandboxer.Query{Tenant: sandboxer.DefaultTenant, States: liveStates}, func(sb *sandboxer.Sandbox) {
		known := slices.Contains(chosen, sb.ID) || slices.Contains(m.made, sb.ID)
		if !known {
			m.made = append(m.made, sb.ID)
		}
		if !known || sb.ID == id {
			m.believe(sb)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// busy reports whether a sandbox is on its way to another state.
func (m *model) busy(t *rapid.T) (busy bool) {
	err := m.records(admin, sandboxer.Query{States: []sandboxer.State{sandboxer.Creating, sandboxer.Pausing, sandboxer.Terminating}},
		func(sb *sandboxer.Sandbox) { busy = true })
	if err != nil {
		t.Fatal(err)
	}
	return busy
}

// learnKey takes over what was made under a key, if that ran. Until then, which open reports, it is not known what a request gets
// under the key: it may be used again if the sandbox never runs.
func (m *model) learnKey(t *rapid.T, key string) (open bool) {
	if key == "" || m.deaths.over() { // then the request gets no answer
		return false
	}
	k, err := m.store.IdempotencyKey(admin, sandboxer.DefaultTenant, key)
	was, known := m.keys[key]
	if isKind(err, sandboxer.NotFound) && !known {
		return false
	}
	now := fmt.Sprint(k.SandboxID, "/", k.Generation)
	if err != nil || known && now != was {
		t.Fatalf("key %s gave %q, and now it is that of %s, %v", key, was, now, err)
	}
	sb, err := m.store.SandboxGeneration(admin, k.SandboxID, k.Generation)
	if err != nil {
		t.Fatal(err)
	}
	if !sb.ReadyAt.IsZero() {
		m.keys[key] = now
	}
	return sb.ReadyAt.IsZero()
}
