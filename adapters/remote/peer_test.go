package remote

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"encoding/pem"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
	"github.com/sand-boxer/sandboxer/internal/manager"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/server"
)

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 3 && os.Args[1] == "echo":
		panic(extensiontest.Echo(os.Args[2]))
	case len(os.Args) > 1 && os.Args[1] == "init":
		os.Exit(agent.Main(os.Args[1:]))
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) { buildtest.Remove(); os.Exit(code) }))
}

// far is another installation: the real server, manager and store, and ext.fake.
type far struct {
	*edgetest.Broker
	*edgetest.Server
	client *api.Client // an administrator's
	key    string      // of a tenant, not an administrator's
}

// published is the fake with sandboxes that have a URL, which leads to its own machine.
type published struct{ *fake.Extension }

func (e published) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	r, err := e.Extension.WaitReady(ctx, h)
	r.URL = "http://127.0.0.1:1/sandbox?token=canary"
	return r, err
}

// newFar starts one that lives as long as the test.
func newFar(t testing.TB, drop ...sandboxer.Capability) *far {
	t.Helper()
	log := new(edgetest.Log).Logger()
	f := &far{Broker: edgetest.NewBroker(t, edgetest.BrokerOptions{
		Backend: backend.Options{Inputs: fake.Adapter.Inputs},
		Extend:  func(e *fake.Extension) sandboxer.Extension { return published{e} },
		Fake:    fake.Config{Images: []string{"demo"}, PerHour: sandboxer.Credit, Agent: self(t), Drop: drop},
		Profiles: []sandboxer.Profile{
			{ID: "profile.far", Extension: "ext.fake", Image: "demo", TTL: time.Hour, MaxTTL: 100 * time.Hour, Isolation: sandboxer.IsolationProcess, Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}},
			{ID: "profile.open", Extension: "ext.fake", Image: "demo", TTL: time.Hour, Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}},
		},
		Manager: manager.Options{Log: log},
	})}
	e := edge.New(f.Manager, edge.Options{Log: log})
	e.Mount(server.New(f.Manager, server.Options{Version: "test", Metrics: server.NewMetrics()}).Door())
	f.Server = edgetest.Serve(t, edgetest.Listen{Unix: edge.ListenUnix, TCP: edge.ListenTCP, TLS: edge.ListenTLS}, log, e.Serve)
	f.admit(t)
	return f
}

// config is that of an extension with its sandboxes there.
func (f *far) config() map[string]any {
	return map[string]any{"kind": "sandboxer", "url": "http://" + f.TCP, "token": f.key, "profile": "far", "profiles": []string{"profile.open"}}
}

// object is what the world behind it calls a sandbox of ours.
func (f *far) object(t testing.TB, h sandboxer.Handle) string {
	t.Helper()
	sb, err := f.client.Get(t.Context(), "ours/"+h.Ref)
	if err != nil {
		t.Fatal(err)
	}
	return cmp.Or(sb.ObjectID, sb.ID)
}

// knows waits until it knows that a sandbox of ours has ended.
func (f *far) knows(t testing.TB, h sandboxer.Handle) {
	t.Helper()
	edgetest.Poll(t, "the end of "+h.Ref, func() bool {
		_, _ = f.client.Sweep(t.Context())
		sb, err := f.client.Get(t.Context(), "ours/"+h.Ref)
		return err == nil && sb.State == sandboxer.Terminated
	})
}

// opens is the extension of a configuration; with the same dir it is another process of one installation.
func opens(ctx context.Context, owner, dir string, config map[string]any) (sandboxer.Extension, error) {
	return opensAs(ctx, "ext.remote", owner, dir, config)
}

func opensAs(ctx context.Context, extension, owner, dir string, config map[string]any) (sandboxer.Extension, error) {
	return Adapter.Open(ctx, sandboxer.Env{Extension: extension, Owner: owner, Dir: dir, Notes: notes.New(dir, extension, []byte(owner)), Decode: func(v any) error {
		data, err := json.Marshal(config)
		if err != nil {
			return err
		}
		d := json.NewDecoder(bytes.NewReader(data))
		d.DisallowUnknownFields()
		return d.Decode(v)
	}})
}

func mustOpen(t testing.TB, owner, dir string, config map[string]any) sandboxer.Extension {
	t.Helper()
	e, err := opens(t.Context(), owner, dir, config)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func self(t testing.TB) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return exe
}

// TestConformance holds kind sandboxer to the contract, with a second installation that is the program itself, over HTTP.
func TestConformance(t *testing.T) {
	f := serveFar(t)
	dir := t.TempDir()
	exe := self(t)
	h := extensiontest.Harness{
		Inputs:   Adapter.Inputs,
		Open:     func(t *testing.T) sandboxer.Extension { return mustOpen(t, "conformance", dir, f.config()) },
		Stranger: func(t *testing.T) sandboxer.Extension { return mustOpen(t, "stranger", dir, f.config()) },
		Spec:     sandboxer.Spec{Owner: "conformance"},
		Want:     Adapter.Capabilities,
		Enforces: []extensiontest.Feature{extensiontest.Owned},
		Parallel: 3,
		Listen:   func(port int) []string { return []string{exe, "echo", "127.0.0.1:" + strconv.Itoa(port)} },
		Kill: func(t *testing.T, h sandboxer.Handle) {
			f.World.Kill(f.object(t, h))
			f.knows(t, h)
		},
		OutOfMemory: func(t *testing.T, h sandboxer.Handle) {
			if err := f.World.OOMKill(f.object(t, h)); err != nil {
				t.Fatal(err)
			}
			f.knows(t, h)
		},
	}
	if os.Getenv("SANDBOXER_TEST_WHOLE") == "" {
		// SANDBOXER_TEST_WHOLE=1 runs the rest: fuses, which are waited for.
		extensiontest.RunGroups(t, h, "core", "exec", "files", "archive", "dial", "probe", "discover", "list", "snapshot", "quote", "pause", "capacity", "stats", "network", "mounts", "meter", "agent", "processes", "watch", "notify")
	} else {
		extensiontest.Run(t, h)
	}
	for _, o := range f.World.Live() {
		t.Errorf("left over there: %+v", o)
	}
}

// certPEM is a certificate as files have it.
func certPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// TestPeer is what kind sandboxer owes beyond the contract.
func TestPeer(t *testing.T) {
	f := newFar(t, sandboxer.CanPause, sandboxer.CanStats)
	ctx := t.Context()
	b := opened(t, t.TempDir(), f.config())
	p := b // read as: the one with a key that is no administrator's
	make := func(t *testing.T, spec sandboxer.Spec) sandboxer.Handle {
		t.Helper()
		h, err := p.Provision(ctx, spec)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := p.Teardown(context.WithoutCancel(ctx), sandboxer.Handle{SandboxID: spec.ID}); err != nil {
				t.Error(err)
			}
		})
		return h
	}
	get := func(t *testing.T, h sandboxer.Handle) *api.Sandbox {
		t.Helper()
		sb, err := f.client.Get(ctx, "ours/"+h.Ref)
		if err != nil {
			t.Fatal(err)
		}
		return sb
	}

	t.Run("has what the extension there has", func(t *testing.T) {
		for _, c := range []sandboxer.Capability{sandboxer.CanPause, sandboxer.CanStats} {
			if p.Can(c) {
				t.Errorf("it has %s, which the extension there lacks", c)
			}
		}
		if !p.Can(sandboxer.CanExec) || !p.Can(sandboxer.CanSnapshot) {
			t.Errorf("it has %q alone", p.Capabilities())
		}
	})
	t.Run("labels", func(t *testing.T) {
		spec := order("labels", nil)
		spec.Labels = map[string]string{"a": "1", labelPrefix + "owner": "somebody"}
		h := make(t, spec)
		sb := get(t, h)
		if sb.Labels[labelPrefix+"owner"] != "test" || sb.Labels["a"] != "1" {
			t.Errorf("labels there: %q", sb.Labels)
		}
		if found, err := p.Discover(ctx, "labels"); err != nil || found.Handle.SandboxID != "labels" {
			t.Errorf("discovered %+v, %v", found, err)
		}
	})
	t.Run("a sandbox that is not ours", func(t *testing.T) {
		theirs := edgetest.Client(t, "http://"+f.TCP, api.Options{Token: sandboxer.Secret(f.key)})
		id := farID("test", "ext.remote", "taken", 1)
		_, err := theirs.Create(ctx, api.CreateSandbox{Profile: "far", Inputs: map[string]string{"sandbox_id": id}})
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.Provision(ctx, order("taken", nil))
		wantKind(t, "Provision", err, sandboxer.Conflict)
		if _, err := p.Teardown(ctx, sandboxer.Handle{SandboxID: "taken", Generation: 1, Ref: id}); err != nil {
			t.Error(err)
		}
		if sb, err := theirs.Destroy(ctx, id, true); err != nil || sb.Reason != sandboxer.ReasonRequested {
			t.Errorf("it was touched: %+v, %v", sb, err)
		}
	})
	t.Run("refusals keep their kind", func(t *testing.T) {
		vouched := func(change func(*sandboxer.Spec)) sandboxer.Spec {
			spec := order("refused", map[string]string{})
			spec.Vouched = []string{inputProfile, inputURL, "nonsense", sandboxer.RestrictedMounts}
			change(&spec)
			return spec
		}
		for what, tt := range map[string]struct {
			spec sandboxer.Spec
			kind sandboxer.Kind
		}{
			"isolation":               {vouched(func(s *sandboxer.Spec) { s.Profile.Isolation = sandboxer.IsolationGVisor }), sandboxer.Unsupported},
			"workspace":               {vouched(func(s *sandboxer.Spec) { s.Workspace = "/w" }), sandboxer.Unsupported},
			"mounts":                  {vouched(func(s *sandboxer.Spec) { s.Mounts = []sandboxer.Mount{{Source: "/tmp", Target: "/x"}} }), sandboxer.Unsupported},
			"an input of nobody":      {vouched(func(s *sandboxer.Spec) { s.Inputs["nonsense"] = "x" }), sandboxer.Invalid},
			"a URL":                   {vouched(func(s *sandboxer.Spec) { s.Inputs[inputURL] = "http://x" }), sandboxer.Invalid},
			"a profile of nobody":     {vouched(func(s *sandboxer.Spec) { s.Inputs[inputProfile] = "nowhere" }), sandboxer.NotFound},
			"too long a life":         {vouched(func(s *sandboxer.Spec) { s.Fuse = time.Now().Add(1000 * time.Hour) }), sandboxer.Invalid},
			"a profile of the caller": {order("refused", map[string]string{inputProfile: "elsewhere"}), sandboxer.Denied},
			"a directory there":       {order("refused", map[string]string{"repo": "/etc"}), sandboxer.Denied},
		} {
			_, err := p.Check(ctx, tt.spec)
			wantKind(t, what+", checked", err, tt.kind)
			if err != nil && strings.Contains(err.Error(), f.key) {
				t.Errorf("%s: the error has the key", what)
			}
			_, err = p.Provision(ctx, tt.spec)
			wantKind(t, what, err, tt.kind)
		}
		if _, err := p.Discover(ctx, "refused"); sandboxer.KindOf(err) != sandboxer.NotFound {
			t.Errorf("something is there: %v", err)
		}
	})
	t.Run("another profile, whose network is taken away", func(t *testing.T) {
		sb := get(t, make(t, order("open", map[string]string{inputProfile: "profile.open"})))
		if sb.Profile != "profile.open" || sb.Network.Mode != sandboxer.NetworkNone {
			t.Errorf("made from %s with the network %q", sb.Profile, sb.Network.Mode)
		}
	})
	t.Run("an administrator's key", func(t *testing.T) {
		admin := opened(t, t.TempDir(), map[string]any{"kind": "sandboxer", "url": "unix://" + f.Unix, "profile": "far", "profiles": []string{"profile.open"}})
		wantKind(t, "an input that is restricted there", refusal(ctx, admin, order("x", map[string]string{"repo": "/etc"})), sandboxer.Denied)
		wantKind(t, "one that is not", refusal(ctx, admin, order("x", map[string]string{"volume": "data"})), "")
		wantKind(t, "another profile", refusal(ctx, admin, order("x", map[string]string{inputProfile: "profile.open"})), "")
		wantKind(t, "one that is not of the profile's extension, for what is known", refusal(ctx, admin, order("x", map[string]string{inputProfile: "profile.open", "volume": "data"})), sandboxer.Denied)
		wantKind(t, "one that is not, with the profile named", refusal(ctx, admin, order("x", map[string]string{inputProfile: "far", "volume": "data"})), "")
		spec := order("x", nil)
		spec.Image = "demo"
		wantKind(t, "an image", refusal(ctx, admin, spec), sandboxer.Denied)
		spec.Vouched = []string{sandboxer.RestrictedImage}
		wantKind(t, "an image of an administrator of ours", refusal(ctx, admin, spec), "")
	})
	t.Run("its fuse", func(t *testing.T) {
		spec := order("fuse", nil)
		spec.Fuse = time.Now().Add(time.Hour)
		h := make(t, spec)
		if at := get(t, h).ExpiresAt; at.Sub(spec.Fuse).Abs() > time.Minute {
			t.Errorf("it ends there at %s; its fuse is %s", at, spec.Fuse)
		}
		until := spec.Fuse.Add(time.Hour)
		if err := p.Renew(ctx, h, until); err != nil {
			t.Fatal(err)
		}
		if at := get(t, h).ExpiresAt; at.Sub(until).Abs() > time.Minute {
			t.Errorf("renewed it ends there at %s; want %s", at, until)
		}
		if found, err := p.Discover(ctx, "fuse"); err != nil || found.Fuse.Sub(until).Abs() > time.Minute {
			t.Errorf("discovered it ends at %s, %v; want %s", found.Fuse, err, until)
		}
	})
	t.Run("its URL, which is the other installation's word", func(t *testing.T) {
		h := make(t, order("url", nil))
		r, err := p.WaitReady(ctx, h)
		if err != nil || !strings.HasPrefix(r.URL, "http://127.0.0.1:1/") {
			t.Fatalf("WaitReady = %+v, %v", r, err)
		}
		_, err = p.DialURL(ctx, h)
		wantKind(t, "DialURL to an address that is not public", err, sandboxer.Denied)
		if err == nil || strings.Contains(sandboxer.Message(err), "canary") {
			t.Errorf("it says %v", err)
		}
		_, err = p.DialURL(ctx, sandboxer.Handle{SandboxID: "nobody", Generation: 1})
		wantKind(t, "DialURL to nobody", err, sandboxer.NotFound)
	})
	t.Run("no proxy", func(t *testing.T) {
		direct, err := opens(ctx, "test", t.TempDir(), f.config())
		if err != nil {
			t.Fatal(err)
		}
		defer direct.(*peer).Close()
		if direct.(*peer).http.Proxy != nil {
			t.Error("a proxy of the environment would get the key")
		}
	})
	t.Run("what it costs", func(t *testing.T) {
		q, err := p.EstimateCost(ctx, order("x", nil), 2*time.Hour)
		if err != nil || q == nil || q.Amount != 2*sandboxer.Credit || q.Duration != 2*time.Hour {
			t.Errorf("quote: %+v, %v; want 2 credits", q, err)
		}
	})
	t.Run("a key of nobody", func(t *testing.T) {
		config := f.config()
		config["token"] = "sbx_key_canary"
		_, err := opens(ctx, "test", t.TempDir(), config)
		wantKind(t, "open", err, sandboxer.Unavailable)
		if err == nil || strings.Contains(err.Error(), "canary") || !strings.Contains(sandboxer.Message(err), "API key") {
			t.Errorf("it says %v", err)
		}
	})
	t.Run("away", func(t *testing.T) { // the last: it does not come back
		h, err := p.Provision(ctx, order("away", nil))
		if err != nil {
			t.Fatal(err)
		}
		f.Server.Stop()
		if l, err := p.IsAlive(ctx, h); l != sandboxer.Unknown || sandboxer.KindOf(err) != sandboxer.Unavailable {
			t.Errorf("IsAlive = %s, %v; want unknown", l, err)
		}
		_, err = p.Teardown(ctx, h)
		wantKind(t, "Teardown", err, sandboxer.Unavailable)
	})
}

// A restored sandbox is what its record here says, or is not made.
func TestRestoreIsWhatWasAskedFor(t *testing.T) {
	ctx := t.Context()
	f := newFar(t)
	p := opened(t, t.TempDir(), f.config())
	make := func(t *testing.T, spec sandboxer.Spec, snap *sandboxer.Snapshot) (h sandboxer.Handle, err error) {
		t.Helper()
		if snap == nil {
			h, err = p.Provision(ctx, spec)
		} else {
			h, err = p.RestoreFromSnapshot(ctx, spec, *snap)
		}
		t.Cleanup(func() {
			if _, err := p.Teardown(context.WithoutCancel(ctx), sandboxer.Handle{SandboxID: spec.ID}); err != nil {
				t.Error(err)
			}
		})
		return h, err
	}
	public := sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}
	source := order("source", nil)
	source.Network, source.Image, source.Vouched = public, "demo", []string{sandboxer.RestrictedImage}
	h, err := make(t, source, nil)
	if err != nil {
		t.Fatal(err)
	}
	saved := func(t *testing.T, id string) sandboxer.Snapshot {
		t.Helper()
		snap, err := p.Snapshot(ctx, h, id)
		if err != nil {
			t.Fatal(err)
		}
		return snap
	}
	snap := saved(t, "snap-a")
	if again := saved(t, "snap-a"); !maps.Equal(again.Meta, snap.Meta) {
		t.Errorf("the receipt is %v, and again %v", snap.Meta, again.Meta)
	}
	forgetful := snap
	forgetful.Meta = nil
	like := func(id string, change func(*sandboxer.Spec)) sandboxer.Spec {
		spec := source
		spec.ID = id
		change(&spec)
		return spec
	}
	for what, tt := range map[string]struct {
		change  func(*sandboxer.Spec)
		refused bool
	}{
		"as its source":     {func(*sandboxer.Spec) {}, false},
		"without a network": {func(s *sandboxer.Spec) { s.Network = sandboxer.NetworkPolicy{} }, true},
		"with less of a network": {func(s *sandboxer.Spec) {
			s.Network = sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"x.example"}}
		}, true},
		"with limits":          {func(s *sandboxer.Spec) { s.Limits.PIDs = 40 }, true},
		"without an image":     {func(s *sandboxer.Spec) { s.Image = "" }, true},
		"with another image":   {func(s *sandboxer.Spec) { s.Image = "other" }, true},
		"with another command": {func(s *sandboxer.Spec) { s.Command = []string{"x"} }, true},
		"as another user":      {func(s *sandboxer.Spec) { s.User = "ci" }, true},
		"on another profile":   {func(s *sandboxer.Spec) { s.Inputs = map[string]string{inputProfile: "profile.open"} }, false},
		"there, without a network": {func(s *sandboxer.Spec) {
			s.Inputs, s.Network = map[string]string{inputProfile: "profile.open"}, sandboxer.NetworkPolicy{}
		}, true},
		"there, with limits": {func(s *sandboxer.Spec) {
			s.Inputs, s.Limits.PIDs = map[string]string{inputProfile: "profile.open"}, 40
		}, true},
	} {
		for known, from := range map[bool]sandboxer.Snapshot{true: snap, false: forgetful} {
			spec := like("copy-"+sandboxer.NewID(), tt.change)
			h, err := make(t, spec, &from)
			if tt.refused {
				wantKind(t, what, err, sandboxer.Unsupported)
				if _, err := p.Discover(ctx, spec.ID); sandboxer.KindOf(err) != sandboxer.NotFound {
					t.Errorf("%s: something is there: %v", what, err)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s (%t): %v", what, known, err)
				continue
			}
			sb, err := f.client.Get(ctx, "ours/"+h.Ref)
			if err != nil {
				t.Fatal(err)
			}
			profile := cmp.Or(spec.Inputs[inputProfile], "profile.far")
			if sb.Network.Mode != spec.Network.Mode || sb.Profile != profile {
				t.Errorf("%s it has %s, %+v", what, sb.Profile, sb.Network)
			}
		}
	}

	// What counts is what the source had when it was saved.
	if err := p.SetNetwork(ctx, h, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkNone}); err != nil {
		t.Fatal(err)
	}
	_, err = make(t, like("former", func(s *sandboxer.Spec) { s.Network = sandboxer.NetworkPolicy{} }), &snap)
	wantKind(t, "a network that the source had", err, sandboxer.Unsupported)
	later := saved(t, "snap-b")
	if _, err = make(t, like("later", func(s *sandboxer.Spec) { s.Network = sandboxer.NetworkPolicy{} }), &later); err != nil {
		t.Error(err)
	}
}

// Judging a request changes nothing that another request is judged by.
func TestAdmitAtOnce(t *testing.T) {
	names := append(make([]string, 0, 8), "profile.open") // with room behind
	p := &peer{cfg: Config{Profile: "far", Profiles: names}}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for _, name := range []string{"far", "profile.open"} {
				if err := p.Admit(order("x", map[string]string{inputProfile: name}), inputProfile); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if beyond := names[:2][1]; beyond != "" {
		t.Errorf("%q was written behind the profiles", beyond)
	}
	wantKind(t, "a profile of nobody", p.Admit(order("x", map[string]string{inputProfile: "x"}), inputProfile), sandboxer.Denied)
}

// Two extensions with their sandboxes in one tenant do not see each other's, also not those of one ID.
func TestTwoExtensions(t *testing.T) {
	ctx := t.Context()
	f := newFar(t)
	var both []*backend.Backend
	for _, id := range []string{"ext.remote", "ext.other"} {
		e, err := opensAs(ctx, id, "test", t.TempDir(), f.config())
		if err != nil {
			t.Fatal(err)
		}
		b := backend.New(id, e, backend.Options{Inputs: Adapter.Inputs})
		defer b.Close()
		both = append(both, b)
	}
	a, b := both[0], both[1]
	h, err := a.Provision(ctx, order("x", nil))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Snapshot(ctx, h, "snap-x"); err != nil {
		t.Fatal(err)
	}
	_, err = b.Discover(ctx, "x")
	wantKind(t, "the other's", err, sandboxer.NotFound)
	if l, err := b.IsAlive(ctx, sandboxer.Handle{SandboxID: "x", Generation: 1, Ref: h.Ref}); err != nil || l != sandboxer.Gone {
		t.Errorf("the other's is %s, %v; want gone", l, err)
	}
	for h, err := range b.ListRunning(ctx, "test") {
		t.Errorf("listed: %+v, %v", h, err)
	}
	for s, err := range b.ListSnapshots(ctx, "test") {
		t.Errorf("listed: %+v, %v", s, err)
	}
	if err := b.DropSnapshot(ctx, sandboxer.Snapshot{SnapshotID: "snap-x"}); err != nil {
		t.Error(err)
	}
	if _, err := b.Provision(ctx, order("x", nil)); err != nil {
		t.Errorf("one of the same ID: %v", err)
	}
	if _, err := b.Teardown(ctx, sandboxer.Handle{SandboxID: "x"}); err != nil {
		t.Error(err)
	}
	if l, err := a.IsAlive(ctx, h); err != nil || l != sandboxer.Alive {
		t.Errorf("afterwards it is %s, %v; want alive", l, err)
	}
	n := 0
	for s, err := range a.ListSnapshots(ctx, "test") {
		if n++; err != nil || s.SandboxID != "x" {
			t.Errorf("listed: %+v, %v", s, err)
		}
	}
	if n != 1 {
		t.Errorf("%d snapshots are listed; want one", n)
	}
	if _, err := a.Teardown(ctx, h); err != nil {
		t.Error(err)
	}
}

// A paused sandbox there is kept for as long as a pause of ours lasts, and goes on with the deadline that it was given meanwhile, not with
// what was left of the one before.
func TestDeadlineOverPause(t *testing.T) {
	ctx := t.Context()
	f := newFar(t)
	p := opened(t, t.TempDir(), f.config())
	spec := order("still", nil)
	spec.Fuse = time.Now().Add(10 * time.Minute)
	h, err := p.Provision(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Teardown(ctx, h)
	long := time.Now().Add(sandboxer.DefaultMaxPaused + 2*time.Minute)
	wantKind(t, "Renew of what runs beyond its max_ttl", p.Renew(ctx, h, long), sandboxer.Invalid)
	if err := p.Pause(ctx, h); err != nil {
		t.Fatal(err)
	}
	if err := p.Renew(ctx, h, long); err != nil {
		t.Fatalf("of what stands still: %v", err)
	}
	wantKind(t, "Renew beyond its max_paused", p.Renew(ctx, h, long.Add(time.Hour)), sandboxer.Invalid)
	until := time.Now().Add(5 * time.Hour)
	if err := p.Renew(ctx, h, until); err != nil {
		t.Fatal(err)
	}
	if err := p.Resume(ctx, h); err != nil {
		t.Fatal(err)
	}
	if sb, err := f.client.Get(ctx, "ours/"+h.Ref); err != nil || sb.State != sandboxer.Running || sb.ExpiresAt.Sub(until).Abs() > 10*time.Minute {
		t.Errorf("resumed it is %+v, %v; want it running until %s", sb, err, until)
	}
}

// A frozen sandbox that goes on after it was saved is an error, and nothing is kept: a pause would lose what it does.
func TestSnapshotOfFrozen(t *testing.T) {
	ctx := t.Context()
	f := newFar(t)
	p := opened(t, t.TempDir(), f.config())
	h, err := p.Provision(ctx, order("frozen", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Teardown(ctx, h)
	if err := p.Pause(ctx, h); err != nil {
		t.Fatal(err)
	}
	f.World.Inject(fake.Fault{Verb: fake.VerbPause, Times: 1, Kind: sandboxer.Failed})
	_, err = p.Snapshot(ctx, h, "snap-a")
	wantKind(t, "Snapshot of what runs on", err, sandboxer.Failed)
	for s, err := range p.ListSnapshots(ctx, "test") {
		t.Errorf("it is kept: %+v, %v", s, err)
	}
	if err := p.Pause(ctx, h); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Snapshot(ctx, h, "snap-a"); err != nil {
		t.Error(err)
	}
	if sb, err := f.client.Get(ctx, "ours/"+h.Ref); err != nil || sb.State != sandboxer.Paused {
		t.Errorf("afterwards it is %+v, %v; want it paused", sb, err)
	}
}

// An answer that does not end is cut off, whatever it says that it is and by whatever way it comes.
func TestBoundedAnswer(t *testing.T) {
	endless := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/octet-stream")
		_, _ = io.WriteString(w, `{"tenant":"`)
		for chunk := bytes.Repeat([]byte("x"), 1<<20); ; {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	})
	tcp := httptest.NewServer(endless)
	defer tcp.Close()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	local := httptest.NewUnstartedServer(endless)
	local.Listener.Close()
	local.Listener = l
	local.Start()
	defer local.Close()
	for _, url := range []string{tcp.URL, "unix://" + socket} {
		// With less than the bound it is: to read all of that takes a busy machine longer than an extension may take to open.
		_, err := openPeer(t.Context(), sandboxer.Env{Extension: "ext.remote", Owner: "test"}, Config{Kind: kindSandboxer, URL: url, Profile: "far"}, 1<<20)
		wantKind(t, url, err, sandboxer.Unavailable)
		if err == nil || !strings.Contains(err.Error(), "too long") {
			t.Errorf("%s: it ended otherwise: %v", url, err)
		}
	}
}

// The groups of the contract that a URL can be held to, which has nothing inside.
func TestURLConformance(t *testing.T) {
	for _, kind := range []string{kindURL, kindAIO} {
		t.Run(kind, func(t *testing.T) { conformURL(t, kind) })
	}
}

func conformURL(t *testing.T, kind string) {
	urls, _ := existing(t, 1, http.StatusOK)
	bases := map[string]string{}
	for i := range 8 {
		bases["b"+strconv.Itoa(i)] = urls[0] + "/" + strconv.Itoa(i)
	}
	dir := t.TempDir()
	config := map[string]any{"kind": kind, "bases": bases}
	extensiontest.RunGroups(t, extensiontest.Harness{
		Inputs: Adapter.Inputs,
		Open:   func(t *testing.T) sandboxer.Extension { return mustOpen(t, "conformance", dir, config) },
		Want:   []sandboxer.Capability{sandboxer.CanProbe, sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanCapacity},
	}, "probe", "discover", "list", "capacity")
}

// A sandbox that is a URL has no commands and no files here. The refusal says what to use instead.
func TestURLHasNothingInside(t *testing.T) {
	urls, _ := existing(t, 1, http.StatusOK)
	for _, kind := range []string{kindURL, kindAIO} {
		b := opened(t, t.TempDir(), map[string]any{"kind": kind, "bases": map[string]string{"a": urls[0]}})
		ctx := t.Context()
		h, err := b.Provision(ctx, order("x", nil))
		if err != nil {
			t.Fatal(err)
		}
		_, execErr := b.Exec(ctx, h, sandboxer.Cmd{Args: []string{"true"}})
		_, readErr := b.ReadFile(ctx, h, "/etc/passwd")
		_, statErr := b.StatFile(ctx, h, "/etc/passwd")
		var listErr error
		for _, err := range b.ListFiles(ctx, h, "/", "") {
			listErr = err
		}
		for what, err := range map[string]error{
			"exec": execErr, "read": readErr, "stat": statErr, "list": listErr, "write": b.WriteFile(ctx, h, "/x", 0o644, strings.NewReader("x")),
			"archive": b.Archive(ctx, h, "/", io.Discard), "unarchive": b.Unarchive(ctx, h, "/x", strings.NewReader("")),
		} {
			wantKind(t, kind+" "+what, err, sandboxer.Unsupported)
			if hint := sandboxer.HintOf(err); !strings.Contains(hint, "URL") || !strings.Contains(hint, "kind sandboxer") {
				t.Errorf("%s %s: the hint is %q", kind, what, hint)
			}
		}
	}
}

func FuzzLabels(f *testing.F) {
	f.Add("o", "ext.remote", "x", "1", "1700000000")
	f.Add("", "", "x", "-1", "x")
	f.Fuzz(func(t *testing.T, owner, extension, id, generation, fuse string) {
		sb := &api.Sandbox{Labels: map[string]string{labelPrefix + "owner": owner, labelPrefix + "extension": extension, labelPrefix + "id": id, labelPrefix + "generation": generation, labelFuse: fuse}}
		s, ok := originOf(sb)
		if !ok {
			return
		}
		if s.Owner == "" || s.Extension == "" || s.Generation < 1 || sandboxer.CheckID(s.ID) != nil {
			t.Errorf("%q is believed: %+v", sb.Labels, s)
		}
		if far := farID(s.Owner, s.Extension, s.ID, s.Generation); sandboxer.CheckID(far) != nil || sandboxer.IsDerivedID(far) {
			t.Errorf("%q is no ID that can be chosen", far)
		}
	})
}
