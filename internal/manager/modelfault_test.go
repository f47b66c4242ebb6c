package manager

import (
	"maps"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

func (m *model) doFault(t *rapid.T) {
	f := fake.Fault{
		Verb: rapid.SampledFrom([]fake.Verb{fake.VerbProvision, fake.VerbWaitReady, fake.VerbTeardown, fake.VerbProbe, fake.VerbList, fake.VerbRenew,
			fake.VerbSnapshot, fake.VerbRestore, fake.VerbDropSnapshot, fake.VerbPause, fake.VerbResume, fake.VerbMeter, fake.VerbClaim, fake.VerbArchive,
			fake.VerbCheckpoint, fake.VerbProvisionFrom, fake.VerbNetwork}).Draw(t, "verb"),
		Times: rapid.IntRange(1, 3).Draw(t, "times"),
	}
	switch rapid.IntRange(0, 4).Draw(t, "manner") {
	case 0:
		f.Kind = rapid.SampledFrom([]sandboxer.Kind{sandboxer.Unavailable, sandboxer.Exhausted, sandboxer.Failed, sandboxer.NotFound, sandboxer.Internal}).Draw(t, "kind")
		f.Untouched = rapid.Bool().Draw(t, "untouched")
	case 1:
		f.Lost = true
	case 2:
		f.Hang = true
	case 3:
		f.Hang, f.Lost = true, true
	case 4:
		f.Delay = 10 * time.Second
		if f.Verb == fake.VerbTeardown || f.Verb == fake.VerbList || f.Verb == fake.VerbPause {
			f.Lie, m.lied = true, true
		}
	}
	m.world.Inject(f)
	m.faulty, m.calm = true, time.Time{}
}

// doReach puts the backend out of reach, has it hang, or brings it back.
func (m *model) doReach(t *rapid.T) {
	m.world.Forgive()
	m.bringBack()
	m.faulty, m.calm = true, time.Time{}
	switch reach := rapid.SampledFrom([]string{"back", "away", "hung", "left", "right"}).Draw(t, "reach"); reach {
	case "left", "right": // this host alone
		m.world.SetAway(reach, true)
	case "back":
		m.calm = time.Now()
	case "away":
		m.world.Inject(fake.Fault{Verb: fake.VerbAny, Kind: sandboxer.Unavailable})
	case "hung":
		m.world.Inject(fake.Fault{Verb: fake.VerbAny, Hang: true})
	}
}

// bringBack has every host be in reach.
func (m *model) bringBack() {
	m.world.SetAway("left", false)
	m.world.SetAway("right", false)
}

// doDie has the object of a sandbox die in the middle of something that hangs, fails slowly
// or takes its time, or of nothing.
func (m *model) doDie(t *rapid.T) {
	m.settle()
	id := chosenID(t)
	verbs := map[string][]fake.Verb{
		"nothing": nil, "create": {fake.VerbProvision, fake.VerbWaitReady}, "freeze": {fake.VerbPause}, "save": {fake.VerbSnapshot}, "destroy": {fake.VerbTeardown},
		"pause": {fake.VerbPause, fake.VerbSnapshot, fake.VerbTeardown}, "resume": {fake.VerbResume, fake.VerbRestore, fake.VerbWaitReady},
	}
	amid := rapid.SampledFrom(slices.Sorted(maps.Keys(verbs))).Draw(t, "amid")
	if of := verbs[amid]; of != nil {
		f := fake.Fault{Verb: rapid.SampledFrom(of).Draw(t, "verb"), Times: 1, Delay: 10 * time.Second, Hang: rapid.Bool().Draw(t, "hang"), Lost: rapid.Bool().Draw(t, "lost")}
		m.world.Inject(f)
	}
	m.faulty = true
	over := make(chan struct{})
	go func() {
		defer close(over)
		switch amid {
		case "create":
			_, _ = m.Create(acme, sandboxer.CreateRequest{Profile: "test", TTL: time.Hour, Inputs: map[string]string{"sandbox_id": id}})
		case "freeze":
			_, _ = m.Pause(acme, id, PauseRequest{Depth: sandboxer.PauseFreeze})
		case "pause":
			_, _ = m.Pause(acme, id, PauseRequest{Depth: sandboxer.PauseFiles})
		case "resume":
			_, _ = m.Resume(acme, id, ResumeRequest{})
		case "save":
			_, _ = m.Snapshot(acme, id, SnapshotRequest{TTL: time.Hour})
		case "destroy":
			_, _ = m.Destroy(acme, id)
		}
	}()
	time.Sleep(5 * time.Second)
	m.world.Kill(id)
	if rapid.Bool().Draw(t, "forgiven") {
		m.world.Forgive()
		m.bringBack()
		m.calm = time.Now()
	}
	<-over
	m.settle()
	delete(m.live, id) // whatever is known of it
	if sb, err := m.store.Sandbox(admin, id); err == nil && sb.State == sandboxer.Terminated {
		m.ends[id] = max(m.ends[id], sb.Generation)
	}
}

// doUnlucky has the calls of an action meet faults.
func (m *model) doUnlucky(t *rapid.T) {
	what := rapid.SampledFrom([]struct {
		do    func(*rapid.T)
		verbs []fake.Verb
	}{
		{m.doCreate, []fake.Verb{fake.VerbProvision}}, // more often than the others: these go on elsewhere
		{m.doCreate, []fake.Verb{fake.VerbProvision, fake.VerbTeardown}},
		{m.doCreate, []fake.Verb{fake.VerbProvision, fake.VerbWaitReady, fake.VerbTeardown}},
		{m.doClaim, []fake.Verb{fake.VerbClaim}},
		{m.doClaim, []fake.Verb{fake.VerbClaim, fake.VerbProvision, fake.VerbTeardown}},
		{m.doPause, []fake.Verb{fake.VerbSnapshot, fake.VerbPause, fake.VerbTeardown}},
		{m.doResume, []fake.Verb{fake.VerbRestore, fake.VerbResume, fake.VerbWaitReady}},
		{m.doRestore, []fake.Verb{fake.VerbRestore, fake.VerbProvisionFrom, fake.VerbTeardown}},
		{m.doDestroy, []fake.Verb{fake.VerbTeardown, fake.VerbMeter}},
	}).Draw(t, "what")
	m.faulty, m.calm = true, time.Time{}
	for range rapid.IntRange(1, 2).Draw(t, "faults") {
		m.world.Inject(fake.Fault{
			Verb: rapid.SampledFrom(what.verbs).Draw(t, "verb"), Times: rapid.IntRange(1, 4).Draw(t, "times"),
			Kind: rapid.SampledFrom([]sandboxer.Kind{sandboxer.Unavailable, sandboxer.Exhausted}).Draw(t, "kind"),
			Lost: rapid.Bool().Draw(t, "lost"), Untouched: rapid.Bool().Draw(t, "untouched"), Hang: rapid.IntRange(0, 3).Draw(t, "hang") == 0,
		})
	}
	what.do(t)
}

// doStray has a backend make an object of a sandbox that has ended, as one does that is asked to make it and takes very long.
func (m *model) doStray(t *rapid.T) {
	id := chosenID(t)
	if m.ends[id] == 0 {
		t.Skip("it has not ended yet")
	}
	if m.settle(); m.died(t, id) {
		return
	}
	sb, err := m.store.SandboxGeneration(admin, id, m.ends[id])
	if err != nil {
		t.Fatal(err)
	}
	cfg := fake.Config{Owner: m.opts.Owner, Hosts: m.setup.fake.Hosts, Faults: []fake.Fault{{Verb: fake.VerbProvision, Late: time.Second}}}
	if _, err := fake.New(m.world, cfg).Provision(admin, sandboxer.Spec{ID: id, Generation: lifecycle.ObjectGeneration(sb), Owner: m.opts.Owner}); err == nil {
		t.Fatal("it is not late")
	}
	time.Sleep(2 * time.Second)
}
