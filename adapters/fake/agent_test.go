package fake_test

import (
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/extensiontest"
)

// throughAgent is the fake without its own ways into a sandbox: what an adapter is that
// has the agent, and nothing better.
type throughAgent struct {
	agent.Capabilities
	sandboxer.Extension
	sandboxer.Placer
	sandboxer.Admitter
	sandboxer.Prober
	sandboxer.Lister
	sandboxer.Discoverer
}

type withoutDial struct{ throughAgent }

func (withoutDial) Without() []sandboxer.Capability { return []sandboxer.Capability{sandboxer.CanDial} }

func TestConformanceThroughTheAgent(t *testing.T) {
	w := fake.NewWorld()
	defer w.Close()
	h := harness(t, nil)
	open := func(owner string) func(*testing.T) sandboxer.Extension {
		return func(t *testing.T) sandboxer.Extension {
			e := fake.New(w, fake.Config{Owner: owner, Images: []string{"demo"}, Agent: self(t), Mounts: offered(h)})
			t.Cleanup(func() { e.Close() })
			// All sandboxes of the fake share the machine's ports.
			return withoutDial{throughAgent{e.Capabilities, e, e, e, e, e, e}}
		}
	}
	h.Open, h.Stranger = open("conformance"), open("stranger")
	h.Kill = func(_ *testing.T, h sandboxer.Handle) { w.Kill(h.SandboxID) }
	h.Want = []sandboxer.Capability{
		sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanStats, sandboxer.CanProbe, sandboxer.CanList, sandboxer.CanDiscover,
		sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch,
	}
	h.Hang = func(*testing.T, sandboxer.Handle) func() {
		w.Inject(fake.Fault{Verb: fake.VerbAny, Silent: true})
		return w.Forgive
	}
	extensiontest.RunWire(t, h)
}
