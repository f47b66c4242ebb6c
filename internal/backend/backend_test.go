package backend_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/procnet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// plain is an extension with nothing but the three verbs.
type plain struct {
	provision func(context.Context, sandboxer.Spec) (sandboxer.Handle, error)
	ready     func(context.Context) error
	teardown  func(context.Context, sandboxer.Handle) error
}

func (p *plain) Provision(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
	if p.provision == nil {
		return sandboxer.Handle{SandboxID: s.ID, Generation: s.Generation}, nil
	}
	return p.provision(ctx, s)
}

func (p *plain) WaitReady(ctx context.Context, h sandboxer.Handle) (r sandboxer.Reachability, err error) {
	if p.ready != nil {
		err = p.ready(ctx)
	}
	return r, err
}

func (p *plain) Teardown(ctx context.Context, h sandboxer.Handle) (r sandboxer.CleanupReport, err error) {
	if p.teardown != nil {
		err = p.teardown(ctx, h)
	}
	return r, err
}

// full has every capability, in the order of sandboxer.Capabilities. Each method
// calls do with the name the backend should report.
type full struct {
	plain
	do      func(ctx context.Context, op string) error
	without []sandboxer.Capability
	closed  int

	pid       int // what StartProcess says; 0 is 7
	processes []sandboxer.Process
	changes   []sandboxer.FileChange
	told      []string // by Notify
}

func (f *full) call(ctx context.Context, op string) error {
	if f.do == nil {
		return nil
	}
	return f.do(ctx, op)
}

func (f *full) Without() []sandboxer.Capability { return f.without }
func (f *full) Close() error                    { f.closed++; return nil }

func (f *full) Exec(ctx context.Context, _ sandboxer.Handle, _ sandboxer.Cmd) (sandboxer.Exit, error) {
	return sandboxer.Exit{}, f.call(ctx, "exec")
}

func (f *full) ReadFile(ctx context.Context, _ sandboxer.Handle, _ string) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader("")), f.call(ctx, "read_file")
}

func (f *full) WriteFile(ctx context.Context, _ sandboxer.Handle, _ string, _ fs.FileMode, _ io.Reader) error {
	return f.call(ctx, "write_file")
}

func (f *full) Checkpoint(ctx context.Context, _ sandboxer.Handle, begin func(sandboxer.Contents) io.Writer) error {
	begin(sandboxer.Contents{})
	return f.call(ctx, "checkpoint")
}

func (f *full) ProvisionFrom(ctx context.Context, s sandboxer.Spec, _ sandboxer.Contents, _ io.Reader) (sandboxer.Handle, error) {
	return sandboxer.Handle{SandboxID: s.ID, Generation: s.Generation}, f.call(ctx, "provision_from")
}

func (f *full) StatFile(ctx context.Context, _ sandboxer.Handle, _ string) (sandboxer.FileInfo, error) {
	return sandboxer.FileInfo{Path: "/f"}, f.call(ctx, "stat_file")
}

func (f *full) ListFiles(ctx context.Context, _ sandboxer.Handle, _, _ string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		if yield(sandboxer.FileInfo{Path: "/a"}, nil) {
			if err := f.call(ctx, "list_files"); err != nil {
				yield(sandboxer.FileInfo{}, err)
			}
		}
	}
}

func (f *full) MakeDir(ctx context.Context, _ sandboxer.Handle, _ string) error {
	return f.call(ctx, "make_dir")
}

func (f *full) MoveFile(ctx context.Context, _ sandboxer.Handle, _, _ string) error {
	return f.call(ctx, "move_file")
}

func (f *full) RemoveFile(ctx context.Context, _ sandboxer.Handle, _ string) error {
	return f.call(ctx, "remove_file")
}

func (f *full) Archive(ctx context.Context, _ sandboxer.Handle, _ string, _ io.Writer) error {
	return f.call(ctx, "archive")
}

func (f *full) Unarchive(ctx context.Context, _ sandboxer.Handle, _ string, _ io.Reader) error {
	return f.call(ctx, "unarchive")
}

func (f *full) SetNetwork(ctx context.Context, _ sandboxer.Handle, _ sandboxer.NetworkPolicy) error {
	return f.call(ctx, "set_network")
}

func (f *full) Basis(ctx context.Context, _ sandboxer.Spec) (string, error) {
	return "", f.call(ctx, "basis")
}

func (f *full) Claim(ctx context.Context, h sandboxer.Handle, _ sandboxer.Spec) (sandboxer.Handle, error) {
	return h, f.call(ctx, "claim")
}

func (f *full) Dial(ctx context.Context, _ sandboxer.Handle, _ int) (net.Conn, error) {
	return nil, f.call(ctx, "dial")
}

func (f *full) Expose(ctx context.Context, _ sandboxer.Handle, _ int) (sandboxer.Endpoint, error) {
	return sandboxer.Endpoint{Header: http.Header{}}, f.call(ctx, "expose")
}

func (f *full) IsAlive(ctx context.Context, _ sandboxer.Handle) (sandboxer.Liveness, error) {
	return sandboxer.Gone, f.call(ctx, "probe")
}

func (f *full) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	return sandboxer.Found{Handle: sandboxer.Handle{SandboxID: id, Generation: 1}}, f.call(ctx, "discover")
}

func (f *full) ListRunning(ctx context.Context, _ string) iter.Seq2[sandboxer.Handle, error] {
	return func(yield func(sandboxer.Handle, error) bool) {
		_ = yield(sandboxer.Handle{SandboxID: "a"}, nil) && yield(sandboxer.Handle{}, f.call(ctx, "list"))
	}
}

func (f *full) Snapshot(ctx context.Context, _ sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
	return sandboxer.Snapshot{SnapshotID: id}, f.call(ctx, "snapshot")
}

func (f *full) RestoreFromSnapshot(ctx context.Context, s sandboxer.Spec, _ sandboxer.Snapshot) (sandboxer.Handle, error) {
	return sandboxer.Handle{SandboxID: s.ID, Generation: s.Generation}, f.call(ctx, "restore")
}

func (f *full) ListSnapshots(ctx context.Context, _ string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return func(yield func(sandboxer.FoundSnapshot, error) bool) {
		yield(sandboxer.FoundSnapshot{Snapshot: sandboxer.Snapshot{SnapshotID: "s"}}, f.call(ctx, "list_snapshots"))
	}
}

func (f *full) DropSnapshot(ctx context.Context, _ sandboxer.Snapshot) error {
	return f.call(ctx, "drop_snapshot")
}

func (f *full) EstimateCost(ctx context.Context, _ sandboxer.Spec, _ time.Duration) (*sandboxer.MeterQuote, error) {
	return nil, f.call(ctx, "quote")
}

func (f *full) MeterActual(ctx context.Context, _ sandboxer.Handle, _ time.Duration) (sandboxer.Usage, error) {
	return sandboxer.Usage{}, f.call(ctx, "meter")
}

func (f *full) Pause(ctx context.Context, _ sandboxer.Handle) error  { return f.call(ctx, "pause") }
func (f *full) Resume(ctx context.Context, _ sandboxer.Handle) error { return f.call(ctx, "resume") }

func (f *full) Renew(ctx context.Context, _ sandboxer.Handle, _ time.Time) error {
	return f.call(ctx, "renew")
}

func (f *full) Capacity(ctx context.Context, _ string) (sandboxer.HostCapacity, error) {
	return sandboxer.HostCapacity{}, f.call(ctx, "capacity")
}

func (f *full) Stats(ctx context.Context, _ sandboxer.Handle) (sandboxer.Stats, error) {
	return sandboxer.Stats{}, f.call(ctx, "stats")
}

func (f *full) DialAgent(ctx context.Context, _ sandboxer.Handle) (net.Conn, error) {
	return nil, f.call(ctx, "dial_agent")
}

func (f *full) StartProcess(ctx context.Context, _ sandboxer.Handle, _ sandboxer.ProcessSpec) (int, error) {
	return cmp.Or(f.pid, 7), f.call(ctx, "start_process")
}

func (f *full) AttachProcess(ctx context.Context, _ sandboxer.Handle, _ int, _ sandboxer.ProcessStreams) (sandboxer.Exit, error) {
	return sandboxer.Exit{}, f.call(ctx, "attach_process")
}

func (f *full) ListProcesses(ctx context.Context, _ sandboxer.Handle) ([]sandboxer.Process, error) {
	return f.processes, f.call(ctx, "list_processes")
}

func (f *full) SignalProcess(ctx context.Context, _ sandboxer.Handle, _, _ int) error {
	return f.call(ctx, "signal_process")
}

func (f *full) Notify(ctx context.Context, _ string) (iter.Seq2[string, error], error) {
	return func(yield func(string, error) bool) {
		for _, id := range f.told {
			if !yield(id, nil) {
				return
			}
		}
	}, f.call(ctx, "notify")
}

func (f *full) WatchFiles(ctx context.Context, _ sandboxer.Handle, _ string, _ bool) (iter.Seq2[sandboxer.FileChange, error], error) {
	return func(yield func(sandboxer.FileChange, error) bool) {
		for _, ch := range f.changes {
			if !yield(ch, nil) {
				return
			}
		}
	}, f.call(ctx, "watch_files")
}

// op is one method of Backend.
type op struct {
	name  string
	can   sandboxer.Capability // "" for the three verbs
	limit time.Duration        // default deadline; 0 means none
	call  func(context.Context, *backend.Backend) error
}

var (
	spec   = sandboxer.Spec{ID: "a", Generation: 1, Owner: "me"}
	handle = sandboxer.Handle{SandboxID: "a", Generation: 1}
)

func last[T any](seq iter.Seq2[T, error]) (err error) {
	for _, err = range seq {
	}
	return err
}

var ops = []op{
	{"provision", "", 10 * time.Minute, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.Provision(ctx, spec)
		return err
	}},
	{"wait_ready", "", 5 * time.Minute, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.WaitReady(ctx, handle)
		return err
	}},
	{"teardown", "", 5 * time.Minute, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.Teardown(ctx, handle)
		return err
	}},
	{"exec", sandboxer.CanExec, 0, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.Exec(ctx, handle, sandboxer.Cmd{Args: []string{"true"}})
		return err
	}},
	{"read_file", sandboxer.CanFiles, 0, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.ReadFile(ctx, handle, "/f")
		return err
	}},
	{"write_file", sandboxer.CanFiles, 0, func(ctx context.Context, b *backend.Backend) error {
		return b.WriteFile(ctx, handle, "/f", 0o644, strings.NewReader(""))
	}},
	{"stat_file", sandboxer.CanFiles, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.StatFile(ctx, handle, "/f")
		return err
	}},
	{"list_files", sandboxer.CanFiles, 0, func(ctx context.Context, b *backend.Backend) error {
		return last(b.ListFiles(ctx, handle, "/", ""))
	}},
	{"make_dir", sandboxer.CanFiles, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		return b.MakeDir(ctx, handle, "/d")
	}},
	{"move_file", sandboxer.CanFiles, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		return b.MoveFile(ctx, handle, "/f", "/g")
	}},
	{"remove_file", sandboxer.CanFiles, 0, func(ctx context.Context, b *backend.Backend) error {
		return b.RemoveFile(ctx, handle, "/f")
	}},
	{"archive", sandboxer.CanArchive, 30 * time.Minute, func(ctx context.Context, b *backend.Backend) error {
		return b.Archive(ctx, handle, "", io.Discard)
	}},
	{"unarchive", sandboxer.CanArchive, 30 * time.Minute, func(ctx context.Context, b *backend.Backend) error {
		return b.Unarchive(ctx, handle, "/d", strings.NewReader(""))
	}},
	{"dial", sandboxer.CanDial, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.Dial(ctx, handle, 80)
		return err
	}},
	{"expose", sandboxer.CanExpose, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.Expose(ctx, handle, 80)
		return err
	}},
	{"probe", sandboxer.CanProbe, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		l, err := b.IsAlive(ctx, handle)
		if (err != nil) != (l == sandboxer.Unknown) {
			return fmt.Errorf("liveness %s with error %w", l, err)
		}
		return err
	}},
	{"discover", sandboxer.CanDiscover, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.Discover(ctx, "a")
		return err
	}},
	{"list", sandboxer.CanList, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		return last(b.ListRunning(ctx, "me"))
	}},
	{"snapshot", sandboxer.CanSnapshot, 30 * time.Minute, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.Snapshot(ctx, handle, "s")
		return err
	}},
	{"restore", sandboxer.CanSnapshot, 30 * time.Minute, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.RestoreFromSnapshot(ctx, spec, sandboxer.Snapshot{SnapshotID: "s"})
		return err
	}},
	{"drop_snapshot", sandboxer.CanSnapshot, 5 * time.Minute, func(ctx context.Context, b *backend.Backend) error {
		return b.DropSnapshot(ctx, sandboxer.Snapshot{SnapshotID: "s"})
	}},
	{"list_snapshots", sandboxer.CanSnapshot, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		return last(b.ListSnapshots(ctx, "me"))
	}},
	{"quote", sandboxer.CanQuote, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.EstimateCost(ctx, spec, time.Hour)
		return err
	}},
	{"meter", sandboxer.CanMeter, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.MeterActual(ctx, handle, time.Hour)
		return err
	}},
	{"pause", sandboxer.CanPause, 30 * time.Minute, func(ctx context.Context, b *backend.Backend) error { return b.Pause(ctx, handle) }},
	{"resume", sandboxer.CanPause, 30 * time.Minute, func(ctx context.Context, b *backend.Backend) error { return b.Resume(ctx, handle) }},
	{"renew", sandboxer.CanRenew, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		return b.Renew(ctx, handle, time.Now())
	}},
	{"capacity", sandboxer.CanCapacity, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.Capacity(ctx, "")
		return err
	}},
	{"set_network", sandboxer.CanNetwork, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		return b.SetNetwork(ctx, handle, sandboxer.NetworkPolicy{})
	}},
	{"basis", sandboxer.CanPool, 10 * time.Minute, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.Basis(ctx, spec)
		return err
	}},
	{"claim", sandboxer.CanPool, 10 * time.Minute, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.Claim(ctx, handle, spec)
		return err
	}},
	{"checkpoint", sandboxer.CanCheckpoint, 30 * time.Minute, func(ctx context.Context, b *backend.Backend) error {
		return b.Checkpoint(ctx, handle, func(sandboxer.Contents) io.Writer { return io.Discard })
	}},
	{"provision_from", sandboxer.CanCheckpoint, 30 * time.Minute, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.ProvisionFrom(ctx, spec, sandboxer.Contents{}, strings.NewReader(""))
		return err
	}},
	{"stats", sandboxer.CanStats, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.Stats(ctx, handle)
		return err
	}},
	{"dial_agent", sandboxer.CanAgent, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.DialAgent(ctx, handle)
		return err
	}},
	{"start_process", sandboxer.CanProcesses, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.StartProcess(ctx, handle, sandboxer.ProcessSpec{Args: []string{"true"}})
		return err
	}},
	{"attach_process", sandboxer.CanProcesses, 0, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.AttachProcess(ctx, handle, 7, sandboxer.ProcessStreams{})
		return err
	}},
	{"list_processes", sandboxer.CanProcesses, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.ListProcesses(ctx, handle)
		return err
	}},
	{"signal_process", sandboxer.CanProcesses, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		return b.SignalProcess(ctx, handle, 7, 15)
	}},
	{"watch_files", sandboxer.CanWatch, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.WatchFiles(ctx, handle, "/dir", false)
		return err
	}},
	{"notify", sandboxer.CanNotify, 30 * time.Second, func(ctx context.Context, b *backend.Backend) error {
		_, err := b.Notify(ctx, "us")
		return err
	}},
}

// allOps returns an extension that does the same for every method, also the three
// verbs.
func allOps(do func(ctx context.Context, op string) error) *full {
	return &full{do: do, plain: plain{
		provision: func(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
			return sandboxer.Handle{SandboxID: s.ID, Generation: s.Generation}, do(ctx, "provision")
		},
		ready:    func(ctx context.Context) error { return do(ctx, "wait_ready") },
		teardown: func(ctx context.Context, _ sandboxer.Handle) error { return do(ctx, "teardown") },
	}}
}

func TestCapabilities(t *testing.T) {
	all := sandboxer.Capabilities()
	except := func(not ...sandboxer.Capability) []sandboxer.Capability {
		return slices.DeleteFunc(slices.Clone(all), func(c sandboxer.Capability) bool { return slices.Contains(not, c) })
	}
	for _, tt := range []struct {
		name string
		ext  sandboxer.Extension
		want []sandboxer.Capability
	}{
		{"nothing but the verbs", &plain{}, nil},
		{"everything", &full{}, all},
		{"disclaimed", &full{without: []sandboxer.Capability{sandboxer.CanSnapshot, sandboxer.CanDial}}, except(sandboxer.CanSnapshot, sandboxer.CanDial)},
		{"everything disclaimed", &full{without: all}, nil},
		{"files come with exec", &full{without: []sandboxer.Capability{sandboxer.CanFiles}}, all},
		{"and go with it", &full{without: []sandboxer.Capability{sandboxer.CanFiles, sandboxer.CanExec}}, except(sandboxer.CanFiles, sandboxer.CanExec)},
		{"so do archives", &full{without: []sandboxer.Capability{sandboxer.CanArchive}}, all},
		{"and go with exec", &full{without: []sandboxer.Capability{sandboxer.CanArchive, sandboxer.CanExec}}, except(sandboxer.CanArchive, sandboxer.CanExec)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := backend.New("ext.test", tt.ext, backend.Options{})
			if got := b.Capabilities(); !slices.Equal(got, tt.want) {
				t.Errorf("Capabilities() = %q; want %q", got, tt.want)
			}
			for _, c := range all {
				if got, want := b.Can(c), slices.Contains(tt.want, c); got != want {
					t.Errorf("Can(%s) = %t; want %t", c, got, want)
				}
			}
			for _, o := range ops {
				if o.can == "" || slices.Contains(tt.want, o.can) {
					continue
				}
				want := "ext.test does not support " + string(o.can)
				switch {
				case o.name == "restore":
					want = "ext.test does not support restore"
				case o.can == sandboxer.CanSnapshot:
					want = "ext.test does not support snapshots"
				}
				if err := o.call(t.Context(), b); sandboxer.KindOf(err) != sandboxer.Unsupported || sandboxer.Message(err) != want {
					t.Errorf("%s: %v; want %q", o.name, err, want)
				}
			}
		})
	}
}

// Changing what Capabilities returned must not change the backend.
func TestCapabilitiesIsACopy(t *testing.T) {
	b := backend.New("ext.test", &full{}, backend.Options{})
	b.Capabilities()[0] = "gone"
	if !b.Can(sandboxer.CanExec) {
		t.Error("the backend lost exec")
	}
}

func TestEveryCallReachesTheExtension(t *testing.T) {
	var called []string
	type seen struct {
		op   string
		kind sandboxer.Kind
	}
	var observed []seen
	b := backend.New("ext.test", allOps(func(_ context.Context, op string) error {
		called = append(called, op)
		return nil
	}), backend.Options{Observe: func(ext, op string, kind sandboxer.Kind, took time.Duration) {
		if ext != "ext.test" || took < 0 {
			t.Errorf("observed %s %s %s", ext, op, took)
		}
		observed = append(observed, seen{op, kind})
	}})
	for _, o := range ops {
		called, observed = nil, nil
		if err := o.call(t.Context(), b); err != nil {
			t.Errorf("%s: %v", o.name, err)
		}
		if !slices.Equal(called, []string{o.name}) || !slices.Equal(observed, []seen{{o.name, ""}}) {
			t.Errorf("%s called %q and was observed as %v", o.name, called, observed)
		}
	}
}

func TestErrorKinds(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  error
		want sandboxer.Kind
	}{
		{"of its own", sandboxer.E(sandboxer.Exhausted, nil, "full"), sandboxer.Exhausted},
		{"wrapped", fmt.Errorf("while creating: %w", sandboxer.E(sandboxer.Failed, nil, "no image")), sandboxer.Failed},
		{"none", errors.New("what the backend said"), sandboxer.Internal},
		{"canceled", fmt.Errorf("dial: %w", context.Canceled), sandboxer.Canceled},
		{"a deadline of the extension's own", context.DeadlineExceeded, sandboxer.Timeout},
		{"a bare kind", sandboxer.NotFound, sandboxer.NotFound},
	} {
		var observed sandboxer.Kind
		b := backend.New("ext.test", allOps(func(context.Context, string) error { return tt.err }),
			backend.Options{Observe: func(_, _ string, kind sandboxer.Kind, _ time.Duration) { observed = kind }})
		for _, o := range ops {
			err := o.call(t.Context(), b)
			if sandboxer.KindOf(err) != tt.want || !errors.Is(err, tt.err) || observed != tt.want {
				t.Errorf("%s, %s: %v (%s), observed %q; want %s", tt.name, o.name, err, sandboxer.KindOf(err), observed, tt.want)
			}
			var e *sandboxer.Error
			if !errors.As(err, &e) || e.Msg == "" {
				t.Errorf("%s, %s: %v has no message for people", tt.name, o.name, err)
			}
			if tt.want == sandboxer.Internal && strings.Contains(sandboxer.Message(err), "what the backend said") {
				t.Errorf("%s: the message shows what was not written for strangers: %q", o.name, sandboxer.Message(err))
			}
		}
	}
}

func TestDeadlines(t *testing.T) {
	for _, o := range ops {
		t.Run(o.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := backend.New("ext.test", allOps(func(ctx context.Context, _ string) error {
					<-ctx.Done()
					return ctx.Err()
				}), backend.Options{})
				ctx, cancel := context.WithTimeout(t.Context(), 24*time.Hour)
				defer cancel()
				want := o.limit
				if want == 0 {
					want = 24 * time.Hour
				}
				start := time.Now()
				err := o.call(ctx, b)
				if took := time.Since(start); took != want {
					t.Errorf("ended after %s; want %s", took, want)
				}
				if sandboxer.KindOf(err) != sandboxer.Timeout {
					t.Errorf("error %v; want a timeout", err)
				}
				if o.limit > 0 && !strings.Contains(err.Error(), o.limit.String()) {
					t.Errorf("the error does not name the deadline %s: %v", o.limit, err)
				}
			})
		})
	}
}

func TestDeadlineOptions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := backend.New("ext.test", allOps(func(ctx context.Context, _ string) error {
			<-ctx.Done()
			return ctx.Err()
		}), backend.Options{Provision: time.Second, Ready: 2 * time.Second, Teardown: 3 * time.Second, Save: 4 * time.Second, Short: 5 * time.Second})
		want := map[string]time.Duration{"provision": 1, "basis": 1, "claim": 1, "wait_ready": 2, "teardown": 3, "drop_snapshot": 3, "snapshot": 4, "restore": 4, "archive": 4, "unarchive": 4, "checkpoint": 4, "provision_from": 4, "pause": 4, "resume": 4}
		for _, o := range ops {
			if o.limit == 0 {
				continue
			}
			d, ok := want[o.name]
			if !ok {
				d = 5
			}
			start := time.Now()
			o.call(t.Context(), b)
			if took := time.Since(start); took != d*time.Second {
				t.Errorf("%s ended after %s; want %ds", o.name, took, d)
			}
		}
	})
}

// The caller's own deadline is distinguished from the backend's.
func TestCallerLeaves(t *testing.T) {
	for _, o := range ops {
		synctest.Test(t, func(t *testing.T) {
			b := backend.New("ext.test", allOps(func(ctx context.Context, _ string) error {
				<-ctx.Done()
				return ctx.Err()
			}), backend.Options{})
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Second, cancel)
			if err := o.call(ctx, b); sandboxer.KindOf(err) != sandboxer.Canceled {
				t.Errorf("%s: %v; want canceled", o.name, err)
			}
		})
	}
}

func TestDoneContextNeverReachesTheExtension(t *testing.T) {
	b := backend.New("ext.test", allOps(func(_ context.Context, op string) error {
		t.Errorf("%s was called", op)
		return nil
	}), backend.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, o := range ops {
		if err := o.call(ctx, b); sandboxer.KindOf(err) != sandboxer.Canceled {
			t.Errorf("%s: %v; want canceled", o.name, err)
		}
	}
}

func TestArguments(t *testing.T) {
	ext := allOps(func(_ context.Context, op string) error { t.Errorf("%s was called", op); return nil })
	b := backend.New("ext.test", ext, backend.Options{})
	provision := func(change func(*sandboxer.Spec)) func() error {
		return func() error {
			s := spec
			change(&s)
			_, err1 := b.Provision(t.Context(), s)
			_, err2 := b.RestoreFromSnapshot(t.Context(), s, sandboxer.Snapshot{})
			if (err1 == nil) != (err2 == nil) {
				return fmt.Errorf("Provision says %v, RestoreFromSnapshot %w", err1, err2)
			}
			return err1
		}
	}
	exec := func(c sandboxer.Cmd) func() error {
		return func() error { _, err := b.Exec(t.Context(), handle, c); return err }
	}
	for _, tt := range []struct {
		name string
		call func() error
		says string
	}{
		{"no ID", provision(func(s *sandboxer.Spec) { s.ID = "" }), "not a sandbox ID"},
		{"an ID in upper case", provision(func(s *sandboxer.Spec) { s.ID = "A" }), `"A"`},
		{"an ID that is too long", provision(func(s *sandboxer.Spec) { s.ID = strings.Repeat("a", 49) }), "48"},
		{"an ID that leaves its directory", provision(func(s *sandboxer.Spec) { s.ID = "../a" }), "../a"},
		{"no generation", provision(func(s *sandboxer.Spec) { s.Generation = 0 }), "generation 0"},
		{"no owner", provision(func(s *sandboxer.Spec) { s.Owner = "" }), "owner"},
		{"a variable without name", provision(func(s *sandboxer.Spec) { s.Env = map[string]string{"": "x"} }), "variable"},
		{"a variable with =", provision(func(s *sandboxer.Spec) { s.Env = map[string]string{"A=B": "x"} }), "A=B"},
		{"a value with NUL", provision(func(s *sandboxer.Spec) { s.Env = map[string]string{"A": "x\x00"} }), "NUL"},
		{"port 0", provision(func(s *sandboxer.Spec) { s.Ports = []int{80, 0} }), "0 is not a port"},
		{"teardown without ID", func() error { _, err := b.Teardown(t.Context(), sandboxer.Handle{}); return err }, "not a sandbox ID"},
		{"discover of a bad ID", func() error { _, err := b.Discover(t.Context(), "a/b"); return err }, "a/b"},
		{"no command", exec(sandboxer.Cmd{}), "no command"},
		{"an empty command", exec(sandboxer.Cmd{Args: []string{""}}), "no command"},
		{"an argument with NUL", exec(sandboxer.Cmd{Args: []string{"a", "b\x00"}}), "NUL"},
		{"a command's variable", exec(sandboxer.Cmd{Args: []string{"a"}, Env: map[string]string{"=": ""}}), "variable"},
		{"a relative directory", exec(sandboxer.Cmd{Args: []string{"a"}, Dir: "src"}), `"src"`},
		{"a terminal without room", exec(sandboxer.Cmd{Args: []string{"a"}, TTY: &sandboxer.WinSize{Cols: 80}}), "80x0"},
		{"a relative file", func() error { return b.MakeDir(t.Context(), handle, "d") }, `"d"`},
		{"an unclean file", func() error { return b.RemoveFile(t.Context(), handle, "/a/../b") }, "/a/../b"},
		{"the second file", func() error { return b.MoveFile(t.Context(), handle, "/a", "b") }, `"b"`},
		{"a file with NUL", func() error { _, err := b.ReadFile(t.Context(), handle, "/a\x00"); return err }, "clean"},
		{"a directory to list", func() error { return last(b.ListFiles(t.Context(), handle, "", "")) }, `""`},
		{"dial of port -1", func() error { _, err := b.Dial(t.Context(), handle, -1); return err }, "-1 is not a port"},
		{"expose of port 65536", func() error { _, err := b.Expose(t.Context(), handle, 65536); return err }, "65536 is not a port"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.call()
			if sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(sandboxer.Message(err), tt.says) {
				t.Errorf("got %v (%s); want invalid with %q", err, sandboxer.KindOf(err), tt.says)
			}
		})
	}
}

// A value of a variable may be a secret; the message about it is not the place.
func TestArgumentErrorsKeepSecrets(t *testing.T) {
	b := backend.New("ext.test", &full{}, backend.Options{})
	s := spec
	s.Env = map[string]string{"TOKEN": "canary\x00"}
	_, err1 := b.Provision(t.Context(), s)
	_, err2 := b.Exec(t.Context(), handle, sandboxer.Cmd{Args: []string{"a"}, Env: s.Env})
	for _, err := range []error{err1, err2} {
		if err == nil || strings.Contains(err.Error(), "canary") {
			t.Errorf("got %v", err)
		}
	}
}

func TestHandles(t *testing.T) {
	for _, tt := range []struct {
		name string
		h    sandboxer.Handle
		says string // of the error; "" for none
	}{
		{"right", sandboxer.Handle{SandboxID: "a", Generation: 1, Ref: "r", Data: json.RawMessage(`{"v":1}`)}, ""},
		{"of another sandbox", sandboxer.Handle{SandboxID: "b", Generation: 1}, "b/1 for a/1"},
		{"of another generation", sandboxer.Handle{SandboxID: "a", Generation: 2}, "a/2 for a/1"},
		{"empty", sandboxer.Handle{}, "for a/1"},
		{"too large", sandboxer.Handle{SandboxID: "a", Generation: 1, Ref: strings.Repeat("x", sandboxer.MaxHandleBytes)}, "bytes"},
		{"of no JSON", sandboxer.Handle{SandboxID: "a", Generation: 1, Data: json.RawMessage(`{`)}, "encode"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := backend.New("ext.test", &plain{provision: func(context.Context, sandboxer.Spec) (sandboxer.Handle, error) { return tt.h, nil }}, backend.Options{})
			h, err := b.Provision(t.Context(), spec)
			if tt.says == "" {
				if err != nil || !reflect.DeepEqual(h, tt.h) {
					t.Errorf("Provision = %+v, %v", h, err)
				}
				return
			}
			if sandboxer.KindOf(err) != sandboxer.Internal || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("Provision: %v; want internal with %q", err, tt.says)
			}
		})
	}
}

// Breaking out of a list stops the extension's iteration and is no error.
func TestListsCanBeBrokenOff(t *testing.T) {
	b := backend.New("ext.test", allOps(func(_ context.Context, op string) error { t.Errorf("%s went on", op); return nil }), backend.Options{})
	for h, err := range b.ListRunning(t.Context(), "me") {
		if h.SandboxID != "a" || err != nil {
			t.Errorf("first: %+v, %v", h, err)
		}
		break
	}
	for fi, err := range b.ListFiles(t.Context(), handle, "/", "") {
		if fi.Path != "/a" || err != nil {
			t.Errorf("first: %+v, %v", fi, err)
		}
		break
	}
}

func TestClose(t *testing.T) {
	ext := &full{}
	if err := backend.New("ext.test", ext, backend.Options{}).Close(); err != nil || ext.closed != 1 {
		t.Errorf("Close: %v, %d calls", err, ext.closed)
	}
	if err := backend.New("ext.test", &plain{}, backend.Options{}).Close(); err != nil {
		t.Errorf("Close of what needs none: %v", err)
	}
}

// shell is an Execer that answers every command alike.
type shell struct {
	plain
	exec func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error)
}

func (s *shell) Exec(ctx context.Context, _ sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	return s.exec(ctx, cmd)
}

// What the tools inside say becomes a kind, and never part of the message.
func TestFilesFromExecErrors(t *testing.T) {
	for _, tt := range []struct {
		name   string
		exit   sandboxer.Exit
		stderr string
		err    error
		want   sandboxer.Kind
	}{
		{"no shell", sandboxer.Exit{Code: 127}, "sh: not found", nil, sandboxer.Unsupported},
		{"no tools", sandboxer.Exit{Code: 48}, "", nil, sandboxer.Unsupported},
		{"missing", sandboxer.Exit{Code: 44}, "", nil, sandboxer.NotFound},
		{"disk full", sandboxer.Exit{Code: 1}, "cat: write error: No space left on device", nil, sandboxer.Exhausted},
		{"read-only", sandboxer.Exit{Code: 1}, "mkdir: can't create directory 'x': Read-only file system", nil, sandboxer.Denied},
		{"below a file", sandboxer.Exit{Code: 1}, "mkdir: cannot create directory 'x': Not a directory", nil, sandboxer.Invalid},
		{"something else", sandboxer.Exit{Code: 3}, "secret of the guest", nil, sandboxer.Failed},
		{"sandbox gone", sandboxer.Exit{}, "", sandboxer.E(sandboxer.NotFound, nil, "no sandbox"), sandboxer.NotFound},
		{"killed", sandboxer.Exit{Code: 137, Signal: "KILL"}, "", nil, sandboxer.Failed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := backend.New("ext.test", &shell{exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
				io.WriteString(cmd.Stderr, tt.stderr)
				return tt.exit, tt.err
			}}, backend.Options{})
			for _, o := range ops {
				if o.can != sandboxer.CanFiles {
					continue
				}
				err := o.call(t.Context(), b)
				if sandboxer.KindOf(err) != tt.want || strings.Contains(sandboxer.Message(err), "secret of the guest") {
					t.Errorf("%s: %v (%s); want %s", o.name, err, sandboxer.KindOf(err), tt.want)
				}
			}
		})
	}
}

// A shell that says yes to everything and does nothing must not pass for success.
func TestFilesFromExecWantProof(t *testing.T) {
	b := backend.New("ext.test", &shell{exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		return sandboxer.Exit{}, nil
	}}, backend.Options{})
	if err := b.WriteFile(t.Context(), handle, "/f", 0o644, strings.NewReader("x")); err == nil {
		t.Error("WriteFile succeeded")
	}
	if r, err := b.ReadFile(t.Context(), handle, "/f"); err == nil {
		t.Errorf("ReadFile = %v", r)
	}
	if fi, err := b.StatFile(t.Context(), handle, "/f"); err == nil {
		t.Errorf("StatFile = %+v", fi)
	}
	if err := last(b.ListFiles(t.Context(), handle, "/", "")); err == nil {
		t.Error("ListFiles succeeded")
	}
}

// Names are arguments; the script is the same for all.
func TestFilesFromExecNeverSplice(t *testing.T) {
	scripts := map[string]bool{}
	b := backend.New("ext.test", &shell{exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		if len(cmd.Args) < 5 || cmd.Args[0] != "sh" || cmd.Args[1] != "-c" || cmd.Args[3] != "sh" {
			t.Errorf("command %q", cmd.Args)
			return sandboxer.Exit{Code: 1}, nil
		}
		scripts[cmd.Args[2]] = true
		return sandboxer.Exit{Code: 44}, nil
	}}, backend.Options{})
	for _, name := range []string{"/plain", "/$(touch x)", "/'; rm -rf /; '", "/`id`", "/a b\nc"} {
		r, err := b.ReadFile(t.Context(), handle, name)
		if err == nil {
			r.Close()
		}
		b.WriteFile(t.Context(), handle, name, 0o644, &bytes.Buffer{})
		b.StatFile(t.Context(), handle, name)
		last(b.ListFiles(t.Context(), handle, name, ""))
		b.MakeDir(t.Context(), handle, name)
		b.MoveFile(t.Context(), handle, name, name+"2")
		b.RemoveFile(t.Context(), handle, name)
	}
	if len(scripts) != 8 { // one more removes the draft of a write that failed
		t.Errorf("%d scripts for seven operations and a draft", len(scripts))
	}
}

// TestProgressMovesTheDeadline: a call that makes progress may take long; one that stalls,
// or only repeats the same report, may not.
func TestProgressMovesTheDeadline(t *testing.T) {
	for _, moves := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			heard := 0
			b := backend.New("ext.test", &plain{provision: func(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
				for i := range int64(10) {
					p := sandboxer.Progress{Step: "pulling", Done: i, Total: 10}
					if !moves {
						p.Done = 0
					}
					sandboxer.ReportProgress(ctx, p)
					select {
					case <-time.After(40 * time.Second):
					case <-ctx.Done():
						return sandboxer.Handle{}, ctx.Err()
					}
				}
				return sandboxer.Handle{SandboxID: s.ID, Generation: s.Generation}, nil
			}}, backend.Options{Provision: time.Minute})
			ctx := sandboxer.WithProgress(t.Context(), func(sandboxer.Progress) { heard++ })
			_, err := b.Provision(ctx, sandboxer.Spec{ID: "x", Generation: 1, Owner: "test"})
			switch {
			case moves && (err != nil || heard != 10):
				t.Errorf("%v after %d reports", err, heard)
			case !moves && sandboxer.KindOf(err) != sandboxer.Timeout:
				t.Errorf("standing still: %v", err)
			}
		})
	}
}

// TestArchivesFromExecWhereAnotherWayCannot: an Archiver that cannot for a sandbox is stood in
// for, unless it has begun.
func TestArchivesFromExecWhereAnotherWayCannot(t *testing.T) {
	unsupported := sandboxer.E(sandboxer.Unsupported, nil, "no agent in it")
	ran := 0
	sh := &shell{exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		ran++
		if cmd.Stdin != nil {
			b, err := io.ReadAll(cmd.Stdin)
			if string(b) != "an archive" {
				t.Errorf("it was given %q", b)
			}
			return sandboxer.Exit{}, err
		}
		_, err := io.WriteString(cmd.Stdout, "an archive")
		return sandboxer.Exit{}, err
	}}
	for _, tt := range []struct {
		name  string
		err   error
		begun bool
		want  sandboxer.Kind
		ran   int
	}{
		{"cannot", unsupported, false, "", 2},
		{"cannot go on", unsupported, true, sandboxer.Unsupported, 0},
		{"failed", sandboxer.E(sandboxer.Failed, nil, "broken"), false, sandboxer.Failed, 0},
		{"can", nil, true, "", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ran = 0
			b := backend.New("ext.test", struct {
				*shell
				archiver
			}{sh, archiver{tt.err, tt.begun}}, backend.Options{})
			var out bytes.Buffer
			if err := b.Archive(t.Context(), handle, "/d", &out); sandboxer.KindOf(err) != tt.want || err == nil && out.Len() == 0 {
				t.Errorf("Archive: %q, %v; want %s", out.String(), err, tt.want)
			}
			if err := b.Unarchive(t.Context(), handle, "/d", strings.NewReader("an archive")); sandboxer.KindOf(err) != tt.want {
				t.Errorf("Unarchive: %v; want %s", err, tt.want)
			}
			if ran != tt.ran {
				t.Errorf("%d commands ran; want %d", ran, tt.ran)
			}
		})
	}
}

// An archiver answers with an error, perhaps after it has begun.
type archiver struct {
	err   error
	begun bool
}

func (a archiver) Archive(_ context.Context, _ sandboxer.Handle, _ string, w io.Writer) error {
	if a.begun {
		_, _ = io.WriteString(w, "x")
	}
	return a.err
}

func (a archiver) Unarchive(_ context.Context, _ sandboxer.Handle, _ string, r io.Reader) error {
	if a.begun {
		_, _ = r.Read(make([]byte, 1))
	}
	return a.err
}

// A printer has commands that print what a file of /proc has.
type printer struct {
	plain
	files map[string]string
}

func (p printer) Exec(_ context.Context, _ sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	text, ok := p.files[cmd.Args[1]]
	if cmd.Args[0] != "cat" || !ok {
		return sandboxer.Exit{Code: 1}, nil
	}
	_, err := io.WriteString(cmd.Stdout, text)
	return sandboxer.Exit{}, err
}

// Many connections over IPv4 hide no listener of IPv6.
func TestPortsAmongConnections(t *testing.T) {
	const title, row = "  sl  local_address rem_address   st\n", "   1: 0100007F:1F91 0100007F:0050 01\n"
	files := map[string]string{
		"/proc/net/tcp":  title + "   0: 0100007F:1F90 00000000:0000 0A\n" + strings.Repeat(row, procnet.MaxBytes/len(row)),
		"/proc/net/tcp6": title + "   0: 00000000000000000000000001000000:0BB9 00000000000000000000000000000000:0000 0A\n",
	}
	b := backend.New("ext.test", &printer{files: files}, backend.Options{})
	if ports, err := b.ListPorts(t.Context(), handle); err != nil || !slices.Equal(ports, []int{3001, 8080}) {
		t.Errorf("ListPorts = %v, %v; want 3001 and 8080", ports, err)
	}
	delete(files, "/proc/net/tcp6") // without IPv6
	if ports, err := b.ListPorts(t.Context(), handle); err != nil || !slices.Equal(ports, []int{8080}) {
		t.Errorf("ListPorts = %v, %v; want 8080", ports, err)
	}
	delete(files, "/proc/net/tcp")
	if ports, err := b.ListPorts(t.Context(), handle); sandboxer.KindOf(err) != sandboxer.Unsupported {
		t.Errorf("ListPorts = %v, %v; want unsupported", ports, err)
	}
}
