package extensiontest_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"iter"
	"maps"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// The suite is only worth something if it fails on what is wrong. Each mutant is a
// sound extension with one fault that real adapters had or could have; the subtest
// that specifies the behaviour must fail on it.

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "echo" {
		panic(extensiontest.Echo(os.Args[2]))
	}
	if len(os.Args) > 1 && os.Args[1] == "init" {
		os.Exit(agent.Main(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// heard is whether somebody listens already, in a process with one mutant.
var heard atomic.Bool

// broken is the fake, except for the methods that are set.
type broken struct {
	*fake.Extension
	place     func(context.Context, sandboxer.Spec, []string) (string, error)
	provision func(context.Context, sandboxer.Spec) (sandboxer.Handle, error)
	waitReady func(context.Context, sandboxer.Handle) (sandboxer.Reachability, error)
	teardown  func(context.Context, sandboxer.Handle) (sandboxer.CleanupReport, error)
	exec      func(context.Context, sandboxer.Handle, sandboxer.Cmd) (sandboxer.Exit, error)
	read      func(context.Context, sandboxer.Handle, string) (io.ReadCloser, error)
	write     func(context.Context, sandboxer.Handle, string, fs.FileMode, io.Reader) error
	stat      func(context.Context, sandboxer.Handle, string) (sandboxer.FileInfo, error)
	admit     func(sandboxer.Spec, string) error
	listFiles func(context.Context, sandboxer.Handle, string, string) iter.Seq2[sandboxer.FileInfo, error]
	makeDir   func(context.Context, sandboxer.Handle, string) error
	remove    func(context.Context, sandboxer.Handle, string) error
	dial      func(context.Context, sandboxer.Handle, int) (net.Conn, error)
	isAlive   func(context.Context, sandboxer.Handle) (sandboxer.Liveness, error)
	discover  func(context.Context, string) (sandboxer.Found, error)
	list      func(context.Context, string) iter.Seq2[sandboxer.Handle, error]
	snapshot  func(context.Context, sandboxer.Handle, string) (sandboxer.Snapshot, error)
	restore   func(context.Context, sandboxer.Spec, sandboxer.Snapshot) (sandboxer.Handle, error)
	drop      func(context.Context, sandboxer.Snapshot) error
	archive   func(context.Context, sandboxer.Handle, string, io.Writer) error
	unarchive func(context.Context, sandboxer.Handle, string, io.Reader) error
	resume    func(context.Context, sandboxer.Handle) error
	quote     func(context.Context, sandboxer.Spec, time.Duration) (*sandboxer.MeterQuote, error)
	meter     func(context.Context, sandboxer.Handle, time.Duration) (sandboxer.Usage, error)
	pause     func(context.Context, sandboxer.Handle) error
	renew     func(context.Context, sandboxer.Handle, time.Time) error
	capacity  func(context.Context, string) (sandboxer.HostCapacity, error)
	stats     func(context.Context, sandboxer.Handle) (sandboxer.Stats, error)
	network   func(context.Context, sandboxer.Handle, sandboxer.NetworkPolicy) error
	basis     func(context.Context, sandboxer.Spec) (string, error)
	claim     func(context.Context, sandboxer.Handle, sandboxer.Spec) (sandboxer.Handle, error)
	save      func(context.Context, sandboxer.Handle, func(sandboxer.Contents) io.Writer) error
	from      func(context.Context, sandboxer.Spec, sandboxer.Contents, io.Reader) (sandboxer.Handle, error)
	dialAgent func(context.Context, sandboxer.Handle) (net.Conn, error)
	start     func(context.Context, sandboxer.Handle, sandboxer.ProcessSpec) (int, error)
	attach    func(context.Context, sandboxer.Handle, int, sandboxer.ProcessStreams) (sandboxer.Exit, error)
	processes func(context.Context, sandboxer.Handle) ([]sandboxer.Process, error)
	signal    func(context.Context, sandboxer.Handle, int, int) error
	watch     func(context.Context, sandboxer.Handle, string, bool) (iter.Seq2[sandboxer.FileChange, error], error)
	notify    func(context.Context, string) (iter.Seq2[string, error], error)
}

// or returns the broken method or the sound one.
func or[F any](isSet bool, broken, sound F) F {
	if isSet {
		return broken
	}
	return sound
}

func (b *broken) Place(ctx context.Context, s sandboxer.Spec, avoid []string) (string, error) {
	return or(b.place != nil, b.place, b.Extension.Place)(ctx, s, avoid)
}

func (b *broken) Provision(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
	return or(b.provision != nil, b.provision, b.Extension.Provision)(ctx, s)
}

func (b *broken) Admit(s sandboxer.Spec, name string) error {
	return or(b.admit != nil, b.admit, b.Extension.Admit)(s, name)
}

func (b *broken) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	return or(b.waitReady != nil, b.waitReady, b.Extension.WaitReady)(ctx, h)
}

func (b *broken) Teardown(ctx context.Context, h sandboxer.Handle) (sandboxer.CleanupReport, error) {
	return or(b.teardown != nil, b.teardown, b.Extension.Teardown)(ctx, h)
}

func (b *broken) Exec(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
	return or(b.exec != nil, b.exec, b.Extension.Exec)(ctx, h, c)
}

// Services makes the broken ones Serviced: the backend leaves commands with a service to
// them.
func (b *broken) Services(context.Context, sandboxer.Handle) ([]string, error) {
	return []string{"main"}, nil
}

func (b *broken) ReadFile(ctx context.Context, h sandboxer.Handle, name string) (io.ReadCloser, error) {
	return or(b.read != nil, b.read, b.Extension.ReadFile)(ctx, h, name)
}

func (b *broken) WriteFile(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
	return or(b.write != nil, b.write, b.Extension.WriteFile)(ctx, h, name, mode, r)
}

func (b *broken) StatFile(ctx context.Context, h sandboxer.Handle, name string) (sandboxer.FileInfo, error) {
	return or(b.stat != nil, b.stat, b.Extension.StatFile)(ctx, h, name)
}

func (b *broken) ListFiles(ctx context.Context, h sandboxer.Handle, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return or(b.listFiles != nil, b.listFiles, b.Extension.ListFiles)(ctx, h, dir, after)
}

func (b *broken) MakeDir(ctx context.Context, h sandboxer.Handle, dir string) error {
	return or(b.makeDir != nil, b.makeDir, b.Extension.MakeDir)(ctx, h, dir)
}

func (b *broken) RemoveFile(ctx context.Context, h sandboxer.Handle, name string) error {
	return or(b.remove != nil, b.remove, b.Extension.RemoveFile)(ctx, h, name)
}

func (b *broken) Dial(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
	return or(b.dial != nil, b.dial, b.Extension.Dial)(ctx, h, port)
}

func (b *broken) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	return or(b.isAlive != nil, b.isAlive, b.Extension.IsAlive)(ctx, h)
}

func (b *broken) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	return or(b.discover != nil, b.discover, b.Extension.Discover)(ctx, id)
}

func (b *broken) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return or(b.list != nil, b.list, b.Extension.ListRunning)(ctx, owner)
}

func (b *broken) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
	return or(b.snapshot != nil, b.snapshot, b.Extension.Snapshot)(ctx, h, id)
}

func (b *broken) RestoreFromSnapshot(ctx context.Context, s sandboxer.Spec, snap sandboxer.Snapshot) (sandboxer.Handle, error) {
	return or(b.restore != nil, b.restore, b.Extension.RestoreFromSnapshot)(ctx, s, snap)
}

func (b *broken) DropSnapshot(ctx context.Context, s sandboxer.Snapshot) error {
	return or(b.drop != nil, b.drop, b.Extension.DropSnapshot)(ctx, s)
}

func (b *broken) Archive(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
	return or(b.archive != nil, b.archive, b.Extension.Archive)(ctx, h, dir, w)
}

func (b *broken) Unarchive(ctx context.Context, h sandboxer.Handle, dir string, r io.Reader) error {
	return or(b.unarchive != nil, b.unarchive, b.Extension.Unarchive)(ctx, h, dir, r)
}

func (b *broken) Resume(ctx context.Context, h sandboxer.Handle) error {
	return or(b.resume != nil, b.resume, b.Extension.Resume)(ctx, h)
}

func (b *broken) EstimateCost(ctx context.Context, s sandboxer.Spec, d time.Duration) (*sandboxer.MeterQuote, error) {
	return or(b.quote != nil, b.quote, b.Extension.EstimateCost)(ctx, s, d)
}

func (b *broken) MeterActual(ctx context.Context, h sandboxer.Handle, d time.Duration) (sandboxer.Usage, error) {
	return or(b.meter != nil, b.meter, b.Extension.MeterActual)(ctx, h, d)
}

func (b *broken) Pause(ctx context.Context, h sandboxer.Handle) error {
	return or(b.pause != nil, b.pause, b.Extension.Pause)(ctx, h)
}

func (b *broken) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	return or(b.renew != nil, b.renew, b.Extension.Renew)(ctx, h, until)
}

func (b *broken) Capacity(ctx context.Context, host string) (sandboxer.HostCapacity, error) {
	return or(b.capacity != nil, b.capacity, b.Extension.Capacity)(ctx, host)
}

func (b *broken) SetNetwork(ctx context.Context, h sandboxer.Handle, p sandboxer.NetworkPolicy) error {
	return or(b.network != nil, b.network, b.Extension.SetNetwork)(ctx, h, p)
}

func (b *broken) Basis(ctx context.Context, s sandboxer.Spec) (string, error) {
	return or(b.basis != nil, b.basis, b.Extension.Basis)(ctx, s)
}

func (b *broken) Claim(ctx context.Context, h sandboxer.Handle, s sandboxer.Spec) (sandboxer.Handle, error) {
	return or(b.claim != nil, b.claim, b.Extension.Claim)(ctx, h, s)
}

func (b *broken) Checkpoint(ctx context.Context, h sandboxer.Handle, begin func(sandboxer.Contents) io.Writer) error {
	return or(b.save != nil, b.save, b.Extension.Checkpoint)(ctx, h, begin)
}

func (b *broken) ProvisionFrom(ctx context.Context, s sandboxer.Spec, c sandboxer.Contents, r io.Reader) (sandboxer.Handle, error) {
	return or(b.from != nil, b.from, b.Extension.ProvisionFrom)(ctx, s, c, r)
}

func (b *broken) Stats(ctx context.Context, h sandboxer.Handle) (sandboxer.Stats, error) {
	return or(b.stats != nil, b.stats, b.Extension.Stats)(ctx, h)
}

func (b *broken) DialAgent(ctx context.Context, h sandboxer.Handle) (net.Conn, error) {
	return or(b.dialAgent != nil, b.dialAgent, b.Extension.DialAgent)(ctx, h)
}

func (b *broken) StartProcess(ctx context.Context, h sandboxer.Handle, p sandboxer.ProcessSpec) (int, error) {
	return or(b.start != nil, b.start, b.Extension.StartProcess)(ctx, h, p)
}

func (b *broken) AttachProcess(ctx context.Context, h sandboxer.Handle, pid int, s sandboxer.ProcessStreams) (sandboxer.Exit, error) {
	return or(b.attach != nil, b.attach, b.Extension.AttachProcess)(ctx, h, pid, s)
}

func (b *broken) ListProcesses(ctx context.Context, h sandboxer.Handle) ([]sandboxer.Process, error) {
	return or(b.processes != nil, b.processes, b.Extension.ListProcesses)(ctx, h)
}

func (b *broken) SignalProcess(ctx context.Context, h sandboxer.Handle, pid, signal int) error {
	return or(b.signal != nil, b.signal, b.Extension.SignalProcess)(ctx, h, pid, signal)
}

func (b *broken) WatchFiles(ctx context.Context, h sandboxer.Handle, dir string, recursive bool) (iter.Seq2[sandboxer.FileChange, error], error) {
	return or(b.watch != nil, b.watch, b.Extension.WatchFiles)(ctx, h, dir, recursive)
}

func (b *broken) Notify(ctx context.Context, owner string) (iter.Seq2[string, error], error) {
	return or(b.notify != nil, b.notify, b.Extension.Notify)(ctx, owner)
}

// attachAs and startAs break one aspect of a process.
func attachAs(b *broken, change func(*sandboxer.ProcessStreams)) {
	b.attach = func(ctx context.Context, h sandboxer.Handle, pid int, s sandboxer.ProcessStreams) (sandboxer.Exit, error) {
		change(&s)
		return b.Extension.AttachProcess(ctx, h, pid, s)
	}
}

func startAs(b *broken, change func(*sandboxer.ProcessSpec)) {
	b.start = func(ctx context.Context, h sandboxer.Handle, p sandboxer.ProcessSpec) (int, error) {
		change(&p)
		return b.Extension.StartProcess(ctx, h, p)
	}
}

// watchAs breaks what a watch tells.
func watchAs(b *broken, change func(*sandboxer.FileChange)) {
	b.watch = func(ctx context.Context, h sandboxer.Handle, dir string, recursive bool) (iter.Seq2[sandboxer.FileChange, error], error) {
		seq, err := b.Extension.WatchFiles(ctx, h, dir, recursive)
		return func(yield func(sandboxer.FileChange, error) bool) {
			for ch, err := range seq {
				change(&ch)
				if !yield(ch, err) {
					return
				}
			}
		}, err
	}
}

// execAs and provisionAs break one aspect of the spec.
func execAs(b *broken, change func(*sandboxer.Cmd)) {
	b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
		change(&c)
		return b.Extension.Exec(ctx, h, c)
	}
}

func provisionAs(b *broken, change func(*sandboxer.Spec)) {
	b.provision = func(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
		change(&s)
		return b.Extension.Provision(ctx, s)
	}
}

func handleAs(b *broken, change func(sandboxer.Spec, *sandboxer.Handle)) {
	b.provision = func(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
		h, err := b.Extension.Provision(ctx, s)
		change(s, &h)
		return h, err
	}
}

// mountAs breaks one aspect of each mount that there is to be; one without a source is left out.
func mountAs(b *broken, change func(sandboxer.Spec, *sandboxer.Mount)) {
	provisionAs(b, func(s *sandboxer.Spec) {
		list := slices.Clone(s.Mounts)
		for i := range list {
			change(*s, &list[i])
		}
		s.Mounts = slices.DeleteFunc(list, func(m sandboxer.Mount) bool { return m.Source == "" })
	})
}

// asOperator makes mounts as change says, whoever the caller is.
func asOperator(b *broken, change func(sandboxer.Spec, *sandboxer.Mount)) {
	b.admit = func(sandboxer.Spec, string) error { return nil }
	mountAs(b, change)
	changed := b.provision
	b.provision = func(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
		s.Vouched = append(slices.Clone(s.Vouched), sandboxer.RestrictedMounts)
		return changed(ctx, s)
	}
}

// followed is where the source of a mount leads.
func followed(m *sandboxer.Mount) {
	if real, err := filepath.EvalSymlinks(m.Source); err == nil {
		m.Source = real
	}
}

var mutants = []struct {
	name   string
	fails  string // the subtest that must fail
	mutate func(*broken, *fake.World)
}{
	{"one agent for all", "agent/in this sandbox and no other", func(b *broken, w *fake.World) {
		b.dialAgent = func(ctx context.Context, h sandboxer.Handle) (net.Conn, error) {
			if all := w.Live(); len(all) > 0 {
				h.SandboxID, h.Generation = all[0].Spec.ID, all[0].Spec.Generation
			}
			return b.Extension.DialAgent(ctx, h)
		}
	}},
	{"a connection that ends with its call", "agent/survives the context of the call", func(b *broken, _ *fake.World) {
		b.dialAgent = func(ctx context.Context, h sandboxer.Handle) (net.Conn, error) {
			c, err := b.Extension.DialAgent(ctx, h)
			if err != nil {
				return nil, err
			}
			return endsWith{c, ctx}, nil
		}
	}},
	{"another wire", "agent/its wire, without a token", func(b *broken, _ *fake.World) {
		b.dialAgent = func(context.Context, sandboxer.Handle) (net.Conn, error) {
			ours, theirs := net.Pipe()
			go func() { io.WriteString(theirs, "SSH-2.0-none\r\n"); theirs.Close() }()
			return ours, nil
		}
	}},
	{"what was missed is lost", "processes/start, and what was missed", func(b *broken, _ *fake.World) {
		attachAs(b, func(s *sandboxer.ProcessStreams) { s.Replay = false })
	}},
	{"everything is told again", "processes/start, and what was missed", func(b *broken, _ *fake.World) {
		attachAs(b, func(s *sandboxer.ProcessStreams) { s.Replay = true })
	}},
	{"who leaves ends the process", "processes/who leaves leaves it running", func(b *broken, _ *fake.World) {
		b.attach = func(ctx context.Context, h sandboxer.Handle, pid int, s sandboxer.ProcessStreams) (sandboxer.Exit, error) {
			x, err := b.Extension.AttachProcess(ctx, h, pid, s)
			if ctx.Err() != nil {
				_ = b.Extension.SignalProcess(context.WithoutCancel(ctx), h, pid, 9)
			}
			return x, err
		}
	}},
	{"processes are known in memory", "processes/found by another broker", func(b *broken, _ *fake.World) {
		var mu sync.Mutex
		mine := map[int]bool{}
		b.start = func(ctx context.Context, h sandboxer.Handle, p sandboxer.ProcessSpec) (int, error) {
			pid, err := b.Extension.StartProcess(ctx, h, p)
			mu.Lock()
			defer mu.Unlock()
			mine[pid] = true
			return pid, err
		}
		b.processes = func(ctx context.Context, h sandboxer.Handle) ([]sandboxer.Process, error) {
			ps, err := b.Extension.ListProcesses(ctx, h)
			mu.Lock()
			defer mu.Unlock()
			return slices.DeleteFunc(ps, func(p sandboxer.Process) bool { return !mine[p.PID] }), err
		}
	}},
	{"tags are dropped", "processes/listed by pid and tag until it ends", func(b *broken, _ *fake.World) {
		startAs(b, func(p *sandboxer.ProcessSpec) { p.Tag = "" })
	}},
	{"signals of who follows are dropped", "processes/signals of who follows", func(b *broken, _ *fake.World) {
		attachAs(b, func(s *sandboxer.ProcessStreams) { s.Signals = nil })
	}},
	{"a terminal keeps its size", "processes/a terminal and its size", func(b *broken, _ *fake.World) {
		attachAs(b, func(s *sandboxer.ProcessStreams) { s.Resize = nil })
	}},
	{"the end of the input is kept back", "processes/input, and its end", func(b *broken, _ *fake.World) {
		attachAs(b, func(s *sandboxer.ProcessStreams) {
			if s.Stdin != nil {
				never, _ := io.Pipe()
				s.Stdin = io.MultiReader(s.Stdin, never)
			}
		})
	}},
	{"processes start at the root", "processes/environment, directory, default directory", func(b *broken, _ *fake.World) {
		startAs(b, func(p *sandboxer.ProcessSpec) { p.Dir = cmp.Or(p.Dir, "/") })
	}},
	{"an input that nobody asked for", "processes/no input is the end of it", func(b *broken, _ *fake.World) {
		startAs(b, func(p *sandboxer.ProcessSpec) { p.Input = true })
	}},
	{"a signal for the wrong process is passed over", "processes/a process that is not there", func(b *broken, _ *fake.World) {
		b.signal = func(ctx context.Context, h sandboxer.Handle, pid, signal int) error {
			_ = b.Extension.SignalProcess(ctx, h, pid, signal)
			return nil
		}
	}},
	{"a death is not told", "notify/tells of a death", func(b *broken, _ *fake.World) {
		b.notify = func(ctx context.Context, _ string) (iter.Seq2[string, error], error) {
			return func(yield func(string, error) bool) { <-ctx.Done(); yield("", ctx.Err()) }, nil
		}
	}},
	{"mounts are left out", "mounts/are refused", func(b *broken, _ *fake.World) {
		mountAs(b, func(_ sandboxer.Spec, m *sandboxer.Mount) { m.Source = "" })
	}},
	{"mounts are copies", "mounts/are seen from both sides", func(b *broken, w *fake.World) {
		mountAs(b, func(_ sandboxer.Spec, m *sandboxer.Mount) {
			if dir, err := os.MkdirTemp(filepath.Dir(m.Source), "copy"); err == nil && os.CopyFS(dir, os.DirFS(m.Source)) == nil {
				m.Source = dir
			}
		})
	}},
	{"a teardown takes what was mounted along", "mounts/are seen from both sides", func(b *broken, _ *fake.World) {
		var source string
		mountAs(b, func(_ sandboxer.Spec, m *sandboxer.Mount) { source = m.Source })
		b.teardown = func(ctx context.Context, h sandboxer.Handle) (sandboxer.CleanupReport, error) {
			_ = os.RemoveAll(filepath.Join(source, "g"))
			return b.Extension.Teardown(ctx, h)
		}
	}},
	{"mounts belong to root", "mounts/belong to the user", func(b *broken, _ *fake.World) {
		provisionAs(b, func(s *sandboxer.Spec) { s.User = "0" })
		execAs(b, func(c *sandboxer.Cmd) { c.User = cmp.Or(c.User, "nobody") })
	}},
	{"read-only is left out", "mounts/read-only", func(b *broken, _ *fake.World) {
		mountAs(b, func(_ sandboxer.Spec, m *sandboxer.Mount) { m.ReadOnly = false })
	}},
	{"a file brings what lies beside it", "mounts/a single file", func(b *broken, _ *fake.World) {
		mountAs(b, func(_ sandboxer.Spec, m *sandboxer.Mount) {
			if m.Target == "/mnt/two/conf" {
				m.Source, m.Target = filepath.Dir(m.Source), "/mnt/two"
			}
		})
	}},
	{"what lies in another mount is left out", "mounts/one below another", func(b *broken, _ *fake.World) {
		mountAs(b, func(s sandboxer.Spec, m *sandboxer.Mount) {
			if slices.ContainsFunc(s.Mounts, func(o sandboxer.Mount) bool { return strings.HasPrefix(m.Target, o.Target+"/") }) {
				m.Source = ""
			}
		})
	}},
	{"what another is to lie in is made writable", "mounts/one below another/with nowhere to be", func(b *broken, _ *fake.World) {
		mountAs(b, func(s sandboxer.Spec, m *sandboxer.Mount) {
			if slices.ContainsFunc(s.Mounts, func(o sandboxer.Mount) bool { return strings.HasPrefix(o.Target, m.Target+"/") }) {
				m.ReadOnly = false
			}
		})
	}},
	{"a target is led elsewhere by a link", "mounts/one below another/through a link", func(b *broken, _ *fake.World) {
		mountAs(b, func(_ sandboxer.Spec, m *sandboxer.Mount) {
			m.Target = strings.Replace(m.Target, "/mnt/up/link/", "/usr/", 1)
		})
	}},
	{"a target that is something else is passed over", "mounts/impossible targets/a directory at a file", func(b *broken, _ *fake.World) {
		mountAs(b, func(_ sandboxer.Spec, m *sandboxer.Mount) {
			if fi, err := os.Stat(m.Target); err == nil && !fi.IsDir() {
				m.Source = ""
			}
		})
	}},
	{"missing sources are made", "mounts/impossible sources/missing", func(b *broken, _ *fake.World) {
		mountAs(b, func(_ sandboxer.Spec, m *sandboxer.Mount) { _ = os.MkdirAll(m.Source, 0o755) })
	}},
	{"a source that is a link is followed", "mounts/impossible sources/a link", func(b *broken, _ *fake.World) {
		mountAs(b, func(_ sandboxer.Spec, m *sandboxer.Mount) { followed(m) })
	}},
	{"links on the way to a source are followed", "mounts/impossible sources/through a link", func(b *broken, _ *fake.World) {
		mountAs(b, func(_ sandboxer.Spec, m *sandboxer.Mount) { followed(m) })
	}},
	{"a source that is a pipe is passed over", "mounts/impossible sources/a named pipe", func(b *broken, _ *fake.World) {
		mountAs(b, func(_ sandboxer.Spec, m *sandboxer.Mount) {
			if fi, err := os.Lstat(m.Source); err == nil && fi.Mode().Type() == fs.ModeNamedPipe {
				m.Source = ""
			}
		})
	}},
	{"a copy mounts nothing", "mounts/snapshots hold none", func(b *broken, _ *fake.World) {
		b.restore = func(ctx context.Context, s sandboxer.Spec, snap sandboxer.Snapshot) (sandboxer.Handle, error) {
			s.Mounts = nil
			return b.Extension.RestoreFromSnapshot(ctx, s, snap)
		}
	}},
	{"archives hold what is mounted", "mounts/snapshots hold none", func(b *broken, _ *fake.World) {
		b.archive = func(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
			return b.Extension.Archive(ctx, h, cmp.Or(dir, "/"), w)
		}
	}},
	{"only operators mount", "mounts/in a root", func(b *broken, _ *fake.World) {
		b.admit = func(_ sandboxer.Spec, name string) error { return sandboxer.E(sandboxer.Denied, nil, "no %s", name) }
	}},
	{"anybody mounts anything", "mounts/out of the roots", func(b *broken, _ *fake.World) {
		asOperator(b, func(sandboxer.Spec, *sandboxer.Mount) {})
	}},
	{"read-only roots are as others", "mounts/to write in a read-only root", func(b *broken, _ *fake.World) {
		asOperator(b, func(sandboxer.Spec, *sandboxer.Mount) {})
	}},
	{"links lead out of the roots", "mounts/led out by a link", func(b *broken, _ *fake.World) {
		asOperator(b, func(_ sandboxer.Spec, m *sandboxer.Mount) { followed(m) })
	}},
	{"sources are opened by name after the check", "mounts/led out by a link after the check", func(b *broken, _ *fake.World) {
		asOperator(b, func(_ sandboxer.Spec, m *sandboxer.Mount) { followed(m) })
	}},
	{"sources are opened by name at the worst time", "mounts/led out by a link at any time", func(b *broken, _ *fake.World) {
		asOperator(b, func(_ sandboxer.Spec, m *sandboxer.Mount) {
			for end := time.Now().Add(time.Minute); time.Now().Before(end); {
				if to, err := os.Readlink(m.Source); err == nil {
					m.Source = to
					return
				}
			}
		})
	}},
	{"a death is told before it is known", "notify/tells of a death", func(b *broken, _ *fake.World) {
		b.isAlive = func(context.Context, sandboxer.Handle) (sandboxer.Liveness, error) { return sandboxer.Alive, nil }
	}},
	{"the first who asks hears it alone", "notify/tells of a death", func(b *broken, _ *fake.World) {
		b.notify = func(ctx context.Context, owner string) (iter.Seq2[string, error], error) {
			if heard.Swap(true) {
				owner = "nobody"
			}
			return b.Extension.Notify(ctx, owner)
		}
	}},
	{"notices of every owner's", "notify/tells an owner of its own alone", func(b *broken, _ *fake.World) {
		b.notify = func(ctx context.Context, _ string) (iter.Seq2[string, error], error) {
			return b.Extension.Notify(ctx, "conformance")
		}
	}},
	{"notices end as if they could", "notify/ends", func(b *broken, _ *fake.World) {
		b.notify = func(ctx context.Context, owner string) (iter.Seq2[string, error], error) {
			return func(yield func(string, error) bool) { <-ctx.Done() }, nil
		}
	}},
	{"a watch that sees one directory", "watch/below only if asked", func(b *broken, _ *fake.World) {
		b.watch = func(ctx context.Context, h sandboxer.Handle, dir string, _ bool) (iter.Seq2[sandboxer.FileChange, error], error) {
			return b.Extension.WatchFiles(ctx, h, dir, false)
		}
	}},
	{"a watch that sees all", "watch/below only if asked", func(b *broken, _ *fake.World) {
		b.watch = func(ctx context.Context, h sandboxer.Handle, dir string, _ bool) (iter.Seq2[sandboxer.FileChange, error], error) {
			return b.Extension.WatchFiles(ctx, h, dir, true)
		}
	}},
	{"a watch that begins late", "watch/every change from the return on", func(b *broken, _ *fake.World) {
		b.watch = func(ctx context.Context, h sandboxer.Handle, dir string, recursive bool) (iter.Seq2[sandboxer.FileChange, error], error) {
			return func(yield func(sandboxer.FileChange, error) bool) {
				time.Sleep(100 * time.Millisecond)
				seq, err := b.Extension.WatchFiles(ctx, h, dir, recursive)
				if err != nil {
					yield(sandboxer.FileChange{}, err)
					return
				}
				seq(yield)
			}, nil
		}
	}},
	{"a rename is told as a removal", "watch/what happens to a file", func(b *broken, _ *fake.World) {
		watchAs(b, func(c *sandboxer.FileChange) {
			if c.Op == sandboxer.FileRename {
				c.Op = sandboxer.FileRemove
			}
		})
	}},
	{"changes without the file", "watch/with what the file is", func(b *broken, _ *fake.World) {
		watchAs(b, func(c *sandboxer.FileChange) { c.File = nil })
	}},
	{"names relative to what is watched", "watch/what happens to a file", func(b *broken, _ *fake.World) {
		watchAs(b, func(c *sandboxer.FileChange) { c.Path = path.Base(c.Path) })
	}},
	{"two objects for one order", "core/provision is idempotent", func(b *broken, w *fake.World) {
		w.Inject(fake.Fault{Verb: fake.VerbProvision, Twice: true})
	}},
	{"concurrent orders make two", "core/concurrent provision makes one", func(b *broken, w *fake.World) {
		w.Inject(fake.Fault{Verb: fake.VerbProvision, Twice: true, Times: 1})
	}},
	{"everybody's paths are taken", "core/restricted inputs", func(b *broken, _ *fake.World) {
		b.admit = func(sandboxer.Spec, string) error { return nil }
	}},
	{"what it must know is in memory", "core/handle survives JSON and another process", func(b *broken, _ *fake.World) {
		mine := map[string]bool{}
		handleAs(b, func(s sandboxer.Spec, h *sandboxer.Handle) { mine[s.ID] = true })
		b.waitReady = func(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
			if !mine[h.SandboxID] {
				return sandboxer.Reachability{}, sandboxer.E(sandboxer.NotFound, nil, "not mine")
			}
			return b.Extension.WaitReady(ctx, h)
		}
	}},
	{"the order is kept in the handle", "core/handle is small", func(b *broken, _ *fake.World) {
		handleAs(b, func(s sandboxer.Spec, h *sandboxer.Handle) { h.Data, _ = json.Marshal(s.Env) })
	}},
	{"secrets in the handle", "core/secrets stay inside", func(b *broken, _ *fake.World) {
		handleAs(b, func(s sandboxer.Spec, h *sandboxer.Handle) { h.Data, _ = json.Marshal(s.Env) })
	}},
	{"secrets in errors", "core/secrets stay inside", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			x, err := b.Extension.Exec(ctx, h, c)
			if err != nil {
				err = sandboxer.E(sandboxer.KindOf(err), err, "could not run %v", c)
			}
			return x, err
		}
	}},
	{"the order is changed", "core/the order is not modified", func(b *broken, _ *fake.World) {
		provisionAs(b, func(s *sandboxer.Spec) {
			if s.Labels != nil {
				s.Labels["sandboxer.id"] = s.ID
			}
		})
	}},
	{"ready although it never was", "core/wait ready of the unknown", func(b *broken, _ *fake.World) {
		b.waitReady = func(context.Context, sandboxer.Handle) (r sandboxer.Reachability, err error) { return r, nil }
	}},
	{"teardown of the absent fails", "core/teardown twice", func(b *broken, _ *fake.World) {
		b.teardown = func(ctx context.Context, h sandboxer.Handle) (r sandboxer.CleanupReport, err error) {
			if l, err := b.Extension.IsAlive(ctx, h); err == nil && l == sandboxer.Gone {
				return r, sandboxer.E(sandboxer.NotFound, nil, "no such sandbox")
			}
			return b.Extension.Teardown(ctx, h)
		}
	}},
	{"teardown does nothing", "core/teardown twice", func(b *broken, _ *fake.World) {
		b.teardown = func(context.Context, sandboxer.Handle) (r sandboxer.CleanupReport, err error) { return r, nil }
	}},
	{"teardown needs the whole handle", "core/teardown by ID and generation", func(b *broken, _ *fake.World) {
		b.teardown = func(ctx context.Context, h sandboxer.Handle) (r sandboxer.CleanupReport, err error) {
			if h.Ref == "" {
				return r, nil
			}
			return b.Extension.Teardown(ctx, h)
		}
	}},
	{"teardown needs the generation", "core/teardown by ID alone", func(b *broken, _ *fake.World) {
		b.teardown = func(ctx context.Context, h sandboxer.Handle) (r sandboxer.CleanupReport, err error) {
			h.Generation = max(h.Generation, 1)
			return b.Extension.Teardown(ctx, h)
		}
	}},
	{"teardown ignores the generation", "core/late teardown spares the newer generation", func(b *broken, _ *fake.World) {
		b.teardown = func(ctx context.Context, h sandboxer.Handle) (r sandboxer.CleanupReport, err error) {
			h.Generation = 0
			return b.Extension.Teardown(ctx, h)
		}
	}},
	{"owners are not told apart", "core/a stranger's sandbox of the same ID", func(b *broken, w *fake.World) {
		b.Extension = fake.New(w, fake.Config{Images: []string{"demo"}})
	}},
	{"a done context is ignored", "core/canceled context changes nothing", func(b *broken, _ *fake.World) {
		b.provision = func(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
			return b.Extension.Provision(context.WithoutCancel(ctx), s)
		}
	}},
	{"variables are dropped", "core/env", func(b *broken, _ *fake.World) {
		provisionAs(b, func(s *sandboxer.Spec) { s.Env = nil })
	}},
	{"a locale of the machine's", "core/text is UTF-8", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) {
			if c.Env["LANG"] == "" {
				c.Env = map[string]string{"LANG": "en_US"}
			}
		})
	}},
	{"a locale that nobody can change", "core/text is UTF-8", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) { c.Env = map[string]string{"LANG": "C.UTF-8"} })
	}},
	{"limits are dropped silently", "core/memory limit is refused", func(b *broken, _ *fake.World) {
		provisionAs(b, func(s *sandboxer.Spec) { s.Limits = sandboxer.Limits{} })
	}},
	{"mounts are dropped silently", "core/mount of a missing path is refused", func(b *broken, _ *fake.World) {
		provisionAs(b, func(s *sandboxer.Spec) { s.Mounts = nil })
	}},
	{"another image than asked for", "core/missing image", func(b *broken, _ *fake.World) {
		provisionAs(b, func(s *sandboxer.Spec) { s.Image = "demo" })
	}},
	{"a refused order leaves an object", "core/missing image", func(b *broken, _ *fake.World) {
		b.provision = func(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
			h, err := b.Extension.Provision(ctx, s)
			if err != nil { // under a name that no teardown finds
				s.Image, s.Generation = "demo", s.Generation+7
				b.Extension.Provision(ctx, s)
			}
			return h, err
		}
	}},
	{"the main command is dropped", "core/missing main command", func(b *broken, _ *fake.World) {
		provisionAs(b, func(s *sandboxer.Spec) { s.Command = nil })
	}},
	{"a goroutine for each sandbox", "core/leaves no goroutine and no file descriptor", func(b *broken, _ *fake.World) {
		provisionAs(b, func(*sandboxer.Spec) { go func() { select {} }() })
	}},
	{"a file for each command", "core/leaves no goroutine and no file descriptor", func(b *broken, _ *fake.World) {
		execAs(b, func(*sandboxer.Cmd) { syscall.Open("/dev/null", syscall.O_RDONLY, 0) })
	}},

	{"everything goes to the first host", "place/asked-for host is kept", func(b *broken, _ *fake.World) {
		b.place = func(context.Context, sandboxer.Spec, []string) (string, error) { return "one", nil }
	}},
	{"made where it likes", "place/place is where it is made", func(b *broken, _ *fake.World) {
		provisionAs(b, func(s *sandboxer.Spec) { s.Place = "one" })
	}},
	{"made elsewhere than its handle says", "place/place is where it is made", func(b *broken, _ *fake.World) {
		b.provision = func(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
			place := s.Place
			s.Place = "one"
			h, err := b.Extension.Provision(ctx, s)
			h.Host = place
			return h, err
		}
	}},
	{"a host that failed comes again", "place/place is one that did not fail", func(b *broken, _ *fake.World) {
		b.place = func(ctx context.Context, s sandboxer.Spec, _ []string) (string, error) {
			return b.Extension.Place(ctx, s, nil)
		}
	}},
	{"placing makes it", "place/place changes nothing", func(b *broken, _ *fake.World) {
		b.place = func(ctx context.Context, s sandboxer.Spec, avoid []string) (string, error) {
			host, err := b.Extension.Place(ctx, s, avoid)
			if err == nil {
				s.Place = host
				_, err = b.Extension.Provision(ctx, s)
			}
			return host, err
		}
	}},
	{"any host will do", "place/a place that went away", func(b *broken, _ *fake.World) {
		b.provision = func(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
			h, err := b.Extension.Provision(ctx, s)
			if sandboxer.KindOf(err) == sandboxer.Unavailable {
				s.Place = "one"
				_, err = b.Extension.Provision(ctx, s)
				err = sandboxer.E(sandboxer.Unavailable, err, "it is away")
			}
			return h, err
		}
	}},
	{"what was not begun is not told apart", "place/a place that went away", func(b *broken, _ *fake.World) {
		b.provision = func(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
			h, err := b.Extension.Provision(ctx, s)
			if sandboxer.IsUntouched(err) {
				err = sandboxer.E(sandboxer.KindOf(err), nil, "it is away")
			}
			return h, err
		}
	}},
	{"a missing note is taken for absence", "place/found by ID alone", func(b *broken, _ *fake.World) {
		noted := map[string]string{}
		handleAs(b, func(s sandboxer.Spec, h *sandboxer.Handle) { noted[s.ID] = h.Host })
		b.teardown = func(ctx context.Context, h sandboxer.Handle) (r sandboxer.CleanupReport, err error) {
			if h.Host == "" {
				if h.Host = noted[h.SandboxID]; h.Host == "" {
					return r, nil
				}
			}
			return b.Extension.Teardown(ctx, h)
		}
	}},
	{"only whole handles are found", "place/found by ID and host", func(b *broken, _ *fake.World) {
		b.waitReady = func(ctx context.Context, h sandboxer.Handle) (r sandboxer.Reachability, err error) {
			if h.Ref == "" {
				return r, sandboxer.E(sandboxer.NotFound, nil, "no such sandbox")
			}
			return b.Extension.WaitReady(ctx, h)
		}
	}},
	{"a host that is away has nothing", "place/its host is away", func(b *broken, _ *fake.World) {
		b.teardown = func(ctx context.Context, h sandboxer.Handle) (r sandboxer.CleanupReport, err error) {
			if r, err = b.Extension.Teardown(ctx, h); h.Host == "" && sandboxer.KindOf(err) == sandboxer.Unavailable {
				err = nil
			}
			return r, err
		}
	}},
	{"what is away is said to be gone", "place/another host is away", func(b *broken, _ *fake.World) {
		b.isAlive = func(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
			l, err := b.Extension.IsAlive(ctx, h)
			if h.Host == "" && sandboxer.KindOf(err) == sandboxer.Unavailable {
				return sandboxer.Gone, nil
			}
			return l, err
		}
	}},
	{"found on one host, others are not asked", "place/another host is away", func(b *broken, _ *fake.World) {
		b.teardown = func(ctx context.Context, h sandboxer.Handle) (r sandboxer.CleanupReport, err error) {
			if r, err = b.Extension.Teardown(ctx, h); len(r.Removed) > 0 {
				err = nil
			}
			return r, err
		}
	}},
	{"every host is asked for what is on one", "place/another host is away", func(b *broken, _ *fake.World) {
		b.teardown = func(ctx context.Context, h sandboxer.Handle) (sandboxer.CleanupReport, error) {
			h.Host = ""
			return b.Extension.Teardown(ctx, h)
		}
	}},

	{"stderr goes to stdout", "exec/streams are apart", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) { c.Stderr = c.Stdout })
	}},
	{"exit codes are lost", "exec/exit code is a result", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			_, err := b.Extension.Exec(ctx, h, c)
			return sandboxer.Exit{}, err
		}
	}},
	{"exit codes are errors", "exec/exit code is a result", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			x, err := b.Extension.Exec(ctx, h, c)
			if x.Code != 0 {
				err = errors.New("exit status " + strconv.Itoa(x.Code))
			}
			return x, err
		}
	}},
	{"signals have no name", "exec/killed by a signal", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			x, err := b.Extension.Exec(ctx, h, c)
			x.Signal = ""
			return x, err
		}
	}},
	{"stdin is lost", "exec/1 MiB of binary both ways", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) { c.Stdin = nil })
	}},
	{"text mode", "exec/1 MiB of binary both ways", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) {
			if out := c.Stdout; out != nil {
				c.Stdout = writer(func(p []byte) (int, error) {
					_, err := io.WriteString(out, strings.ReplaceAll(string(p), "\n", "\r\n"))
					return len(p), err
				})
			}
		})
	}},
	{"output is cut at 1 MiB", "exec/large output to a slow reader", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) {
			out, left := c.Stdout, 1<<20
			c.Stdout = writer(func(p []byte) (int, error) {
				if n := min(len(p), left); n > 0 {
					left -= n
					out.Write(p[:n])
				}
				return len(p), nil
			})
		})
	}},
	{"a writer's failure is ignored", "exec/a failing writer ends the command", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) {
			out := c.Stdout
			n := 0
			c.Stdout = writer(func(p []byte) (int, error) {
				if n += len(p); n > 1<<20 { // or the test would last for ever
					return 0, nil
				}
				_, _ = out.Write(p)
				return len(p), nil
			})
			c.Args = append([]string{"timeout", "2"}, c.Args...)
		})
	}},
	{"the directory is ignored", "exec/working directory", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) { c.Dir = "" })
	}},
	{"a missing directory is passed over", "exec/missing working directory", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) { c.Dir = "" })
	}},
	{"variables of commands stay", "exec/env is added", func(b *broken, _ *fake.World) {
		kept := map[string]string{}
		execAs(b, func(c *sandboxer.Cmd) {
			for k, v := range c.Env {
				kept[k] = v
			}
			c.Env = kept
		})
	}},
	{"the broker's environment is passed on", "exec/the broker's environment stays outside", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) {
			c.Env = map[string]string{}
			for _, kv := range os.Environ() {
				k, v, _ := strings.Cut(kv, "=")
				c.Env[k] = v
			}
		})
	}},
	{"an unknown user is passed over", "exec/unknown user", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) { c.User = "" })
	}},
	{"an unknown service is passed over", "exec/unknown service", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) { c.Service = "" })
	}},
	{"a missing command is an error", "exec/missing command is 127", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			x, err := b.Extension.Exec(ctx, h, c)
			if x.Code == 127 {
				return sandboxer.Exit{}, sandboxer.E(sandboxer.Invalid, nil, "no such command")
			}
			return x, err
		}
	}},
	{"cancel leaves the command", "exec/cancel kills the command", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			return abandon(ctx, func() (sandboxer.Exit, error) { return b.Extension.Exec(context.WithoutCancel(ctx), h, c) })
		}
	}},
	{"cancel kills the client only", "exec/cancel kills its children", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			signals := make(chan os.Signal, 1)
			c.Signals = signals
			context.AfterFunc(ctx, func() { signals <- syscall.SIGKILL })
			x, err := b.Extension.Exec(context.WithoutCancel(ctx), h, c)
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return x, err
		}
	}},
	{"cancel kills the process group only", "exec/cancel kills what it detached", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			f, err := os.CreateTemp("", "pid")
			if err != nil {
				return sandboxer.Exit{}, err
			}
			defer os.Remove(f.Name())
			defer f.Close()
			c.Args = append([]string{"sh", "-c", `echo $$ >"$0"; exec "$@"`, f.Name()}, c.Args...)
			stop := context.AfterFunc(ctx, func() {
				text, _ := os.ReadFile(f.Name())
				if pid, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && pid > 1 {
					syscall.Kill(-pid, syscall.SIGKILL)
				}
			})
			defer stop()
			x, err := b.Extension.Exec(context.WithoutCancel(ctx), h, c)
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return x, err
		}
	}},
	{"commands are shared among sandboxes", "core/sandboxes are apart", func(b *broken, _ *fake.World) {
		var first sandboxer.Handle
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			if first.SandboxID == "" {
				first = h
			}
			return b.Extension.Exec(ctx, first, c)
		}
	}},
	{"signals are dropped", "exec/signals are delivered", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) { c.Signals = nil })
	}},
	{"no terminal", "exec/tty", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) { c.TTY = nil })
	}},
	{"always a terminal", "exec/no terminal unless asked", func(b *broken, _ *fake.World) {
		execAs(b, func(c *sandboxer.Cmd) { c.TTY = &sandboxer.WinSize{Cols: 80, Rows: 24} })
	}},
	{"one command at a time", "exec/cancel spares other commands", func(b *broken, _ *fake.World) {
		var running atomic.Bool
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			if !running.CompareAndSwap(false, true) {
				return sandboxer.Exit{}, sandboxer.E(sandboxer.Conflict, nil, "busy")
			}
			defer running.Store(false)
			return b.Extension.Exec(ctx, h, c)
		}
	}},

	{"modes are dropped", "files/modes", func(b *broken, _ *fake.World) {
		b.write = func(ctx context.Context, h sandboxer.Handle, name string, _ fs.FileMode, r io.Reader) error {
			return b.Extension.WriteFile(ctx, h, name, 0o644, r)
		}
	}},
	{"a broken upload is a short file", "files/a broken source changes nothing", func(b *broken, _ *fake.World) {
		b.write = func(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
			data, _ := io.ReadAll(r)
			return b.Extension.WriteFile(ctx, h, name, mode, strings.NewReader(string(data)))
		}
	}},
	{"a broken upload is an error and a short file", "files/a broken source changes nothing", func(b *broken, _ *fake.World) {
		b.write = func(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
			data, failed := io.ReadAll(r)
			return errors.Join(failed, b.Extension.WriteFile(ctx, h, name, mode, strings.NewReader(string(data))))
		}
	}},
	{"a file that is replaced gets the usual mode", "files/a file that is replaced keeps what it is", func(b *broken, _ *fake.World) {
		b.write = func(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
			return b.Extension.WriteFile(ctx, h, name, cmp.Or(mode, 0o644), r)
		}
	}},
	{"a file that is replaced loses its other names", "files/names of one file stay names of one file", func(b *broken, _ *fake.World) {
		b.write = func(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
			_ = b.Extension.RemoveFile(ctx, h, name)
			return b.Extension.WriteFile(ctx, h, name, mode, r)
		}
	}},
	{"reads are cut at 64 KiB", "files/round trip", func(b *broken, _ *fake.World) {
		b.read = func(ctx context.Context, h sandboxer.Handle, name string) (io.ReadCloser, error) {
			r, err := b.Extension.ReadFile(ctx, h, name)
			if err != nil {
				return nil, err
			}
			return struct {
				io.Reader
				io.Closer
			}{io.LimitReader(r, 64<<10), r}, nil
		}
	}},
	{"links are followed", "files/links are described, not followed", func(b *broken, _ *fake.World) {
		b.stat = func(ctx context.Context, h sandboxer.Handle, name string) (sandboxer.FileInfo, error) {
			fi, err := b.Extension.StatFile(ctx, h, name)
			fi.Target, fi.Mode = "", fi.Mode.Perm()
			return fi, err
		}
	}},
	{"listings are unsorted", "files/list in order", func(b *broken, _ *fake.World) {
		b.listFiles = func(ctx context.Context, h sandboxer.Handle, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
			var all []sandboxer.FileInfo
			for fi, err := range b.Extension.ListFiles(ctx, h, dir, after) {
				if err == nil {
					all = append([]sandboxer.FileInfo{fi}, all...)
				}
			}
			return func(yield func(sandboxer.FileInfo, error) bool) {
				for _, fi := range all {
					if !yield(fi, nil) {
						return
					}
				}
			}
		}
	}},
	{"a missing directory lists nothing", "files/unknown sandbox", func(b *broken, _ *fake.World) {
		b.makeDir = func(ctx context.Context, h sandboxer.Handle, dir string) error {
			if err := b.Extension.MakeDir(ctx, h, dir); sandboxer.KindOf(err) != sandboxer.NotFound {
				return err
			}
			return nil
		}
	}},
	{"removing the absent fails", "files/remove", func(b *broken, _ *fake.World) {
		b.remove = func(ctx context.Context, h sandboxer.Handle, name string) error {
			if _, err := b.Extension.StatFile(ctx, h, name); err != nil {
				return err
			}
			return b.Extension.RemoveFile(ctx, h, name)
		}
	}},
	{"a missing file is a bug", "files/missing", func(b *broken, _ *fake.World) {
		b.read = func(ctx context.Context, h sandboxer.Handle, name string) (io.ReadCloser, error) {
			r, err := b.Extension.ReadFile(ctx, h, name)
			if err != nil {
				err = errors.New("open: no such file")
			}
			return r, err
		}
	}},

	{"sandboxes share ports", "dial/another sandbox's port", func(b *broken, _ *fake.World) {
		b.dial = func(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
			return net.Dial("tcp", "127.0.0.1:"+strconv.Itoa(port))
		}
	}},
	{"the table of sockets is not shown", "dial/listed", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
			if cmd.Args[0] == "cat" && slices.Contains(cmd.Args, "/proc/net/tcp") {
				cmd.Args = []string{"cat", "/nothing/tcp"}
			}
			return b.Extension.Exec(ctx, h, cmd)
		}
	}},
	{"the table of sockets of IPv6 is not shown", "dial/listed on IPv6", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
			if slices.Contains(cmd.Args, "/proc/net/tcp6") {
				cmd.Args = []string{"cat", "/nothing/tcp6"}
			}
			return b.Extension.Exec(ctx, h, cmd)
		}
	}},
	{"no half close", "dial/half close", func(b *broken, _ *fake.World) {
		b.dial = func(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
			c, err := b.Extension.Dial(ctx, h, port)
			if err != nil {
				return nil, err
			}
			return struct{ net.Conn }{c}, nil
		}
	}},
	{"kills for memory look like any", "exec/out of memory", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			x, err := b.Extension.Exec(ctx, h, c)
			x.OOMKilled = false
			return x, err
		}
	}},
	{"a sandbox killed for memory breaks its commands off", "exec/out of memory", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			x, err := b.Extension.Exec(ctx, h, c)
			if x.OOMKilled {
				return sandboxer.Exit{}, sandboxer.E(sandboxer.NotFound, nil, "the sandbox ended")
			}
			return x, err
		}
	}},
	{"every kill is one for memory", "exec/killed within its memory", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			x, err := b.Extension.Exec(ctx, h, c)
			x.OOMKilled = x.Signal == "KILL"
			return x, err
		}
	}},
	{"sandboxes killed for memory are just gone", "probe/out of memory", func(b *broken, _ *fake.World) {
		b.isAlive = func(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
			l, err := b.Extension.IsAlive(ctx, h)
			if l == sandboxer.OOMKilled {
				l = sandboxer.Gone
			}
			return l, err
		}
	}},
	{"a closed port connects", "dial/closed port", func(b *broken, _ *fake.World) {
		b.dial = func(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
			c, err := b.Extension.Dial(ctx, h, port)
			if sandboxer.KindOf(err) == sandboxer.Unavailable {
				a, other := net.Pipe()
				other.Close()
				return a, nil
			}
			return c, err
		}
	}},
	{"the dead are alive", "probe/alive then gone", func(b *broken, _ *fake.World) {
		b.isAlive = func(context.Context, sandboxer.Handle) (sandboxer.Liveness, error) { return sandboxer.Alive, nil }
	}},
	{"the unknown cannot be told", "probe/unknown sandbox is gone", func(b *broken, _ *fake.World) {
		b.isAlive = func(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
			if l, err := b.Extension.IsAlive(ctx, h); err != nil || l == sandboxer.Alive {
				return l, err
			}
			return sandboxer.Unknown, sandboxer.E(sandboxer.NotFound, nil, "no such sandbox")
		}
	}},
	{"discovers what is not there", "discover/unknown ID", func(b *broken, _ *fake.World) {
		b.discover = func(_ context.Context, id string) (sandboxer.Found, error) {
			return sandboxer.Found{Handle: sandboxer.Handle{SandboxID: id, Generation: 1}}, nil
		}
	}},
	{"lists everybody's", "list/owners are apart", func(b *broken, _ *fake.World) {
		b.list = func(ctx context.Context, _ string) iter.Seq2[sandboxer.Handle, error] {
			return b.Extension.ListRunning(ctx, "conformance")
		}
	}},
	{"lists everything twice", "list/each sandbox once", func(b *broken, w *fake.World) {
		w.Inject(fake.Fault{Verb: fake.VerbList, Twice: true})
	}},
	{"lists nothing", "list/each sandbox once", func(b *broken, w *fake.World) {
		w.Inject(fake.Fault{Verb: fake.VerbList, Lie: true})
	}},
	{"lists without the generation", "list/each sandbox once", func(b *broken, _ *fake.World) {
		b.list = func(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
			return func(yield func(sandboxer.Handle, error) bool) {
				for h, err := range b.Extension.ListRunning(ctx, owner) {
					h.Generation = 0
					if !yield(h, err) {
						return
					}
				}
			}
		}
	}},
	{"a snapshot is written over", "snapshot/is idempotent", func(b *broken, _ *fake.World) {
		b.snapshot = func(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
			b.Extension.DropSnapshot(ctx, sandboxer.Snapshot{SnapshotID: id})
			return b.Extension.Snapshot(ctx, h, id)
		}
	}},
	{"a snapshot ends its sandbox", "snapshot/restore", func(b *broken, _ *fake.World) {
		b.snapshot = func(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
			s, err := b.Extension.Snapshot(ctx, h, id)
			b.Extension.Teardown(ctx, h)
			return s, err
		}
	}},
	{"restores an empty sandbox", "snapshot/restore", func(b *broken, _ *fake.World) {
		b.restore = func(ctx context.Context, s sandboxer.Spec, _ sandboxer.Snapshot) (sandboxer.Handle, error) {
			return b.Extension.Provision(ctx, s)
		}
	}},
	{"lists no snapshots", "snapshot/list", func(b *broken, w *fake.World) {
		w.Inject(fake.Fault{Verb: fake.VerbListSnapshots, Lie: true})
	}},
	{"a dropped snapshot stays", "snapshot/drop", func(b *broken, _ *fake.World) {
		b.drop = func(context.Context, sandboxer.Snapshot) error { return nil }
	}},
	{"promises memory", "snapshot/processes", func(b *broken, _ *fake.World) {
		b.snapshot = func(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
			s, err := b.Extension.Snapshot(ctx, h, id)
			s.Memory = true
			return s, err
		}
	}},
	{"a dropped snapshot fails strangely", "snapshot/drop", func(b *broken, _ *fake.World) {
		b.restore = func(ctx context.Context, s sandboxer.Spec, snap sandboxer.Snapshot) (sandboxer.Handle, error) {
			h, err := b.Extension.RestoreFromSnapshot(ctx, s, snap)
			if err != nil {
				err = sandboxer.E(sandboxer.Failed, err, "broken")
			}
			return h, err
		}
	}},
	{"restores what it was", "snapshot/identity", func(b *broken, _ *fake.World) {
		b.restore = func(ctx context.Context, s sandboxer.Spec, snap sandboxer.Snapshot) (sandboxer.Handle, error) {
			s.Env = map[string]string{"WHO": "source"}
			return b.Extension.RestoreFromSnapshot(ctx, s, snap)
		}
	}},
	{"a snapshot is bound to a generation", "snapshot/the next generation of its source", func(b *broken, _ *fake.World) {
		b.restore = func(ctx context.Context, s sandboxer.Spec, snap sandboxer.Snapshot) (sandboxer.Handle, error) {
			if s.Generation > 1 {
				return b.Extension.Provision(ctx, s)
			}
			return b.Extension.RestoreFromSnapshot(ctx, s, snap)
		}
	}},
	{"a snapshot thaws", "snapshot/of a paused sandbox", func(b *broken, _ *fake.World) {
		b.snapshot = func(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
			s, err := b.Extension.Snapshot(ctx, h, id)
			b.Extension.Resume(ctx, h)
			return s, err
		}
	}},
	{"a late teardown takes the next generation", "snapshot/the next generation of its source", func(b *broken, _ *fake.World) {
		b.teardown = func(ctx context.Context, h sandboxer.Handle) (sandboxer.CleanupReport, error) {
			h.Generation = 0
			return b.Extension.Teardown(ctx, h)
		}
	}},
	{"modes are lost in a snapshot", "snapshot/keeps files", func(b *broken, _ *fake.World) {
		b.snapshot = func(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
			b.Extension.Exec(ctx, h, sandboxer.Cmd{Args: []string{"chmod", "-R", "u+rw", "tree"}})
			s, err := b.Extension.Snapshot(ctx, h, id)
			b.Extension.Exec(ctx, h, sandboxer.Cmd{Args: []string{"chmod", "644", "tree/tool"}})
			return s, err
		}
	}},
	{"memory that begins anew", "snapshot/memory", func(b *broken, _ *fake.World) {
		b.snapshot = func(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
			s, err := b.Extension.Snapshot(ctx, h, id)
			s.Memory = true
			return s, err
		}
	}},
	{"an archive without empty directories", "archive/round trip", func(b *broken, _ *fake.World) {
		b.archive = func(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
			b.Extension.Exec(ctx, h, sandboxer.Cmd{Args: []string{"rmdir", dir + "/empty"}})
			err := b.Extension.Archive(ctx, h, dir, w)
			b.Extension.Exec(ctx, h, sandboxer.Cmd{Args: []string{"mkdir", dir + "/empty"}})
			return err
		}
	}},
	{"an archive of absolute names", "archive/a tar of relative names", func(b *broken, _ *fake.World) {
		b.archive = func(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
			_, err := b.Extension.Exec(ctx, h, sandboxer.Cmd{Args: []string{"tar", "-cPf", "-", dir}, Stdout: w})
			return err
		}
	}},
	{"an archive adds to what is there", "archive/replaces what was there", func(b *broken, _ *fake.World) {
		b.unarchive = func(ctx context.Context, h sandboxer.Handle, dir string, r io.Reader) error {
			_, err := b.Extension.Exec(ctx, h, sandboxer.Cmd{Args: []string{"tar", "-xf", "-"}, Dir: dir, Stdin: r})
			return err
		}
	}},
	{"half an archive will do", "archive/what is no archive", func(b *broken, _ *fake.World) {
		b.unarchive = func(ctx context.Context, h sandboxer.Handle, dir string, r io.Reader) error {
			b.Extension.Unarchive(ctx, h, dir, r)
			return nil
		}
	}},
	{"an archive that nobody takes", "archive/a reader that fails", func(b *broken, _ *fake.World) {
		b.archive = func(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
			b.Extension.Archive(ctx, h, dir, w)
			return nil
		}
	}},
	{"an archive of nothing", "archive/missing directory", func(b *broken, _ *fake.World) {
		b.archive = func(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
			b.Extension.MakeDir(ctx, h, dir)
			return b.Extension.Archive(ctx, h, dir, w)
		}
	}},
	{"volumes are dropped silently", "checkpoint/round trip", func(b *broken, _ *fake.World) {
		b.save = func(ctx context.Context, h sandboxer.Handle, begin func(sandboxer.Contents) io.Writer) error {
			return b.Extension.Archive(ctx, h, "", begin(sandboxer.Contents{}))
		}
	}},
	{"volumes are promised and not placed", "checkpoint/round trip", func(b *broken, _ *fake.World) {
		b.from = func(ctx context.Context, s sandboxer.Spec, _ sandboxer.Contents, r io.Reader) (sandboxer.Handle, error) {
			h, err := b.Extension.ProvisionFrom(ctx, s, sandboxer.Contents{}, r)
			if err == nil {
				b.Extension.RemoveFile(ctx, h, "/workspace/.sandboxer")
			}
			return h, err
		}
	}},
	{"a checkpoint is put over what has changed since", "checkpoint/round trip", func(b *broken, _ *fake.World) {
		b.from = func(ctx context.Context, s sandboxer.Spec, c sandboxer.Contents, r io.Reader) (sandboxer.Handle, error) {
			b.Extension.Teardown(ctx, sandboxer.Handle{SandboxID: s.ID})
			return b.Extension.ProvisionFrom(ctx, s, c, r)
		}
	}},
	{"an unknown volume goes nowhere", "checkpoint/round trip", func(b *broken, _ *fake.World) {
		b.from = func(ctx context.Context, s sandboxer.Spec, c sandboxer.Contents, r io.Reader) (sandboxer.Handle, error) {
			for _, v := range c.Volumes {
				if v != s.Inputs["volume"] {
					return b.Extension.Provision(ctx, s)
				}
			}
			return b.Extension.ProvisionFrom(ctx, s, c, r)
		}
	}},
	{"half a checkpoint will do", "checkpoint/of an archive", func(b *broken, _ *fake.World) {
		b.from = func(ctx context.Context, s sandboxer.Spec, c sandboxer.Contents, r io.Reader) (sandboxer.Handle, error) {
			h, err := b.Extension.ProvisionFrom(ctx, s, c, r)
			if err != nil {
				return b.Extension.Provision(ctx, s)
			}
			return h, err
		}
	}},
	{"says that it stood still", "checkpoint/of one moment", func(b *broken, _ *fake.World) {
		b.save = func(ctx context.Context, h sandboxer.Handle, begin func(sandboxer.Contents) io.Writer) error {
			return b.Extension.Checkpoint(ctx, h, func(c sandboxer.Contents) io.Writer {
				c.Quiesced = true
				return begin(c)
			})
		}
	}},
	{"stands still for ever if nobody takes it", "checkpoint/of one moment", func(b *broken, _ *fake.World) {
		b.save = func(ctx context.Context, h sandboxer.Handle, begin func(sandboxer.Contents) io.Writer) error {
			b.Extension.Pause(ctx, h)
			if err := b.Extension.Checkpoint(ctx, h, begin); err != nil {
				return err
			}
			return b.Extension.Resume(ctx, h)
		}
	}},
	{"a command waits for the thaw", "pause/exec on a paused sandbox", func(b *broken, _ *fake.World) {
		b.exec = func(ctx context.Context, h sandboxer.Handle, c sandboxer.Cmd) (sandboxer.Exit, error) {
			x, err := b.Extension.Exec(ctx, h, c)
			if sandboxer.KindOf(err) == sandboxer.Conflict {
				<-ctx.Done()
				err = ctx.Err()
			}
			return x, err
		}
	}},
	{"pausing twice is an error", "pause/freezes and thaws", func(b *broken, _ *fake.World) {
		var paused atomic.Bool
		b.pause = func(ctx context.Context, h sandboxer.Handle) error {
			if paused.Swap(true) {
				return sandboxer.E(sandboxer.Conflict, nil, "it is paused already")
			}
			return b.Extension.Pause(ctx, h)
		}
	}},
	{"only what is paused can be resumed", "pause/resume of one that was not paused", func(b *broken, _ *fake.World) {
		b.resume = func(context.Context, sandboxer.Handle) error {
			return sandboxer.E(sandboxer.Conflict, nil, "it is not paused")
		}
	}},
	{"longer is cheaper", "quote/grows with time and makes nothing", func(b *broken, _ *fake.World) {
		b.quote = func(_ context.Context, _ sandboxer.Spec, d time.Duration) (*sandboxer.MeterQuote, error) {
			return &sandboxer.MeterQuote{Amount: sandboxer.Credits(time.Hour * 100 / d), Duration: d}, nil
		}
	}},
	{"a meter of the last reading", "meter/cumulative", func(b *broken, _ *fake.World) {
		last := time.Hour
		b.meter = func(ctx context.Context, h sandboxer.Handle, d time.Duration) (sandboxer.Usage, error) {
			u, err := b.Extension.MeterActual(ctx, h, d)
			last /= 2
			u.Cost = sandboxer.Credits(last)
			return u, err
		}
	}},
	{"a live sandbox has its final bill", "meter/cumulative", func(b *broken, _ *fake.World) {
		b.meter = func(ctx context.Context, h sandboxer.Handle, d time.Duration) (sandboxer.Usage, error) {
			u, err := b.Extension.MeterActual(ctx, h, d)
			u.Final = true
			return u, err
		}
	}},
	{"the final bill is less than the meter read", "meter/after the teardown", func(b *broken, _ *fake.World) {
		b.meter = func(ctx context.Context, h sandboxer.Handle, d time.Duration) (sandboxer.Usage, error) {
			u, err := b.Extension.MeterActual(ctx, h, d)
			if u.Cost = 1; err != nil {
				return sandboxer.Usage{At: time.Now(), Final: true}, nil
			}
			return u, err
		}
	}},
	{"pause does nothing", "pause/a frozen process does not run", func(b *broken, _ *fake.World) {
		b.pause = func(context.Context, sandboxer.Handle) error { return nil }
	}},
	{"renew does nothing", "renew/moves the fuse out", func(b *broken, _ *fake.World) {
		b.renew = func(context.Context, sandboxer.Handle, time.Time) error { return nil }
	}},
	{"renew of what is frozen is refused", "renew/while it is frozen", func(b *broken, _ *fake.World) {
		var frozen atomic.Bool
		b.pause = func(ctx context.Context, h sandboxer.Handle) error {
			frozen.Store(true)
			return b.Extension.Pause(ctx, h)
		}
		b.renew = func(ctx context.Context, h sandboxer.Handle, until time.Time) error {
			if frozen.Load() {
				return sandboxer.E(sandboxer.Conflict, nil, "it is paused")
			}
			return b.Extension.Renew(ctx, h, until)
		}
	}},
	{"every host has room", "capacity/unknown host", func(b *broken, _ *fake.World) {
		b.capacity = func(ctx context.Context, _ string) (sandboxer.HostCapacity, error) {
			return b.Extension.Capacity(ctx, "")
		}
	}},
	{"a policy for nobody", "network/unknown sandbox", func(b *broken, _ *fake.World) {
		b.network = func(context.Context, sandboxer.Handle, sandboxer.NetworkPolicy) error { return nil }
	}},
	{"a policy works once", "network/is idempotent", func(b *broken, _ *fake.World) {
		var last sandboxer.NetworkMode
		b.network = func(ctx context.Context, h sandboxer.Handle, p sandboxer.NetworkPolicy) error {
			if p.Mode == last && p.Mode != "" {
				return sandboxer.E(sandboxer.Conflict, nil, "that is the policy already")
			}
			last = p.Mode
			return b.Extension.SetNetwork(ctx, h, p)
		}
	}},
	{"a warm sandbox starts its command", "pool/the main command waits for the claim", func(b *broken, _ *fake.World) {
		provisionAs(b, func(s *sandboxer.Spec) { s.Warm = false })
		b.claim = func(_ context.Context, h sandboxer.Handle, _ sandboxer.Spec) (sandboxer.Handle, error) { return h, nil }
	}},
	{"a claim changes nothing", "pool/is given what it asked for", func(b *broken, _ *fake.World) {
		b.claim = func(_ context.Context, h sandboxer.Handle, _ sandboxer.Spec) (sandboxer.Handle, error) { return h, nil }
	}},
	{"a claim adds to the environment", "pool/is given what it asked for", func(b *broken, _ *fake.World) {
		var born map[string]string
		b.provision = func(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
			born = s.Env
			return b.Extension.Provision(ctx, s)
		}
		b.claim = func(ctx context.Context, h sandboxer.Handle, s sandboxer.Spec) (sandboxer.Handle, error) {
			both := maps.Clone(born)
			maps.Copy(both, s.Env)
			s.Env = both
			return b.Extension.Claim(ctx, h, s)
		}
	}},
	{"a claim comes twice", "pool/a claim is idempotent", func(b *broken, _ *fake.World) {
		b.claim = func(ctx context.Context, h sandboxer.Handle, s sandboxer.Spec) (sandboxer.Handle, error) {
			if _, err := b.Extension.Claim(ctx, h, s); err != nil {
				return h, err
			}
			return h, b.Extension.RemoveFile(ctx, h, "/workspace/kept")
		}
	}},
	{"a warm sandbox has several owners", "pool/is claimed by one", func(b *broken, _ *fake.World) {
		b.claim = func(ctx context.Context, h sandboxer.Handle, s sandboxer.Spec) (sandboxer.Handle, error) {
			out, err := b.Extension.Claim(ctx, h, s)
			if errors.Is(err, sandboxer.Conflict) {
				err = nil
				out = h
			}
			return out, err
		}
	}},
	{"a claim of nobody", "pool/unknown sandbox", func(b *broken, _ *fake.World) {
		b.claim = func(_ context.Context, h sandboxer.Handle, _ sandboxer.Spec) (sandboxer.Handle, error) { return h, nil }
	}},
	{"a claim puts the fuse out", "pool/the fuse moves with the claim", func(b *broken, _ *fake.World) {
		b.claim = func(ctx context.Context, h sandboxer.Handle, s sandboxer.Spec) (sandboxer.Handle, error) {
			s.Fuse = time.Time{}
			return b.Extension.Claim(ctx, h, s)
		}
	}},
	{"every basis is new", "pool/the basis is stable", func(b *broken, _ *fake.World) {
		b.basis = func(context.Context, sandboxer.Spec) (string, error) { return sandboxer.NewID(), nil }
	}},
	{"what does not answer is not there", "hang", func(b *broken, _ *fake.World) {
		b.discover = func(ctx context.Context, id string) (sandboxer.Found, error) {
			f, err := b.Extension.Discover(ctx, id)
			if sandboxer.KindOf(err) == sandboxer.Unavailable {
				err = sandboxer.E(sandboxer.NotFound, err, "no such sandbox")
			}
			return f, err
		}
	}},
	{"figures of nobody", "stats/unknown sandbox", func(b *broken, _ *fake.World) {
		b.stats = func(context.Context, sandboxer.Handle) (sandboxer.Stats, error) {
			return sandboxer.Stats{At: time.Now()}, nil
		}
	}},
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// abandon returns when ctx is done, whatever f still does.
func abandon(ctx context.Context, f func() (sandboxer.Exit, error)) (sandboxer.Exit, error) {
	type result struct {
		x   sandboxer.Exit
		err error
	}
	done := make(chan result, 1)
	go func() {
		x, err := f()
		done <- result{x, err}
	}()
	select {
	case r := <-done:
		return r.x, r.err
	case <-ctx.Done():
		return sandboxer.Exit{}, ctx.Err()
	}
}

// TestBroken runs the suite on one mutant; TestMutants starts it in a process of its
// own, since it must fail.
func TestBroken(t *testing.T) {
	name := os.Getenv("EXTENSIONTEST_MUTANT")
	if name == "" {
		t.Skip("runs only for TestMutants")
	}
	w := fake.NewWorld()
	defer w.Close()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h := extensiontest.Harness{
		Inputs:   fake.Adapter.Inputs,
		Open:     func(t *testing.T) sandboxer.Extension { return mutant(t, w, name, "conformance") },
		Stranger: func(t *testing.T) sandboxer.Extension { return mutant(t, w, name, "stranger") },
		Spec:     sandboxer.Spec{Owner: "conformance", Image: "demo", Inputs: map[string]string{"volume": "data"}},
		Volume:   "../volumes/data",
		Want:     sandboxer.Capabilities(),
		Enforces: []extensiontest.Feature{extensiontest.Locale},
		Patience: 5 * time.Second, // it waits in vain
		Kill:     func(_ *testing.T, h sandboxer.Handle) { w.Kill(h.SandboxID) },
		Hang: func(*testing.T, sandboxer.Handle) func() {
			w.Inject(fake.Fault{Verb: fake.VerbAny, Silent: true})
			return w.Forgive
		},
		Hosts: []string{"one", "two"},
		Away: func(_ *testing.T, host string) func() {
			w.SetAway(host, true)
			return func() { w.SetAway(host, false) }
		},
		OutOfMemory: func(t *testing.T, h sandboxer.Handle) {
			if err := w.OOMKill(h.SandboxID); err != nil {
				t.Fatal(err)
			}
		},
		Listen: func(port int) []string {
			return []string{self, "echo", "127.0.0.1:" + strconv.Itoa(port)}
		},
	}
	if os.Getuid() != 0 {
		h.User = strconv.Itoa(os.Getuid())
	}
	if roots := os.Getenv("EXTENSIONTEST_ROOTS"); roots != "" && name != "mounts are left out" {
		h.Enforces = append(h.Enforces, extensiontest.Mounts)
		h.MountRoot, h.ReadOnlyRoot = mountRoots(roots)
	}
	if name == "a capability nobody wants" {
		h.Want = h.Want[:len(h.Want)-1]
	}
	if os.Getenv("EXTENSIONTEST_WIRE") != "" {
		h.Parallel = 4
		extensiontest.RunWire(t, h)
		return
	}
	extensiontest.Run(t, h)
}

// closing is an extension that takes its world with it.
type closing struct {
	*broken
	w *fake.World
}

func (c closing) Close() error {
	for _, o := range c.w.Live() {
		c.w.Kill(o.Spec.ID)
	}
	return nil
}

// described is an extension that says of itself what says returns.
type described struct {
	*broken
	says func() sandboxer.Description
}

func (d described) Describe() sandboxer.Description { return d.says() }

// narrowed disclaims capabilities that do not exist.
type narrowed struct{ *broken }

func (narrowed) Without() []sandboxer.Capability { return []sandboxer.Capability{"flying"} }

// descriptions are what extensions may not say of themselves: each changes what is right, as the n-th that is opened says
// it.
var descriptions = map[string]func(d *sandboxer.Description, n int){
	"sound, and says so":           func(*sandboxer.Description, int) {},
	"says another thing each time": func(d *sandboxer.Description, n int) { d.Title = strconv.Itoa(n) },
	"says what is no capability":   func(d *sandboxer.Description, _ int) { d.Capabilities = append(d.Capabilities, "flying") },
	"says what it has no methods for": func(d *sandboxer.Description, _ int) {
		d.Capabilities = append(d.Capabilities, sandboxer.CanCaches)
	},
	"says no isolation":              func(d *sandboxer.Description, _ int) { d.Isolation = nil },
	"says an input that nobody has":  func(d *sandboxer.Description, _ int) { d.Inputs = append(d.Inputs, sandboxer.Input{Name: "more"}) },
	"says no inputs":                 func(d *sandboxer.Description, _ int) { d.Inputs = nil },
	"says that anybody may give all": func(d *sandboxer.Description, _ int) { d.Inputs[0].Restricted = !d.Inputs[0].Restricted },
}

// agentProgram is the test binary: TestMain lets it be the agent.
func agentProgram(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return self
}

// mountRoots are the roots below a directory.
func mountRoots(dir string) (rw, ro string) {
	return filepath.Join(dir, "rw"), filepath.Join(dir, "ro")
}

// canMount says why the fake mounts nothing here; nil if it does.
func canMount(t *testing.T) error {
	t.Helper()
	err := fake.CanMount(t.TempDir())
	if err != nil && sandboxer.KindOf(err) != sandboxer.Unsupported {
		t.Fatal(err)
	}
	return err
}

func mutant(t *testing.T, w *fake.World, name, owner string) sandboxer.Extension {
	cfg := fake.Config{Owner: owner, Images: []string{"demo"}, PerHour: sandboxer.Credit, Agent: agentProgram(t), Hosts: []string{"one", "two"}}
	if roots := os.Getenv("EXTENSIONTEST_ROOTS"); roots != "" {
		rw, ro := mountRoots(roots)
		cfg.Mounts.Roots = []mounts.Root{{Path: rw}, {Path: ro, ReadOnly: true}}
	}
	switch name {
	case "a capability is missing":
		cfg.Drop = []sandboxer.Capability{sandboxer.CanStats}
		return fake.New(w, cfg)
	case "closing destroys":
		return closing{&broken{Extension: fake.New(w, cfg)}, w}
	}
	b := &broken{Extension: fake.New(w, cfg)}
	if change, ok := descriptions[name]; ok {
		n := 0
		return described{b, func() sandboxer.Description {
			n++
			a := fake.Adapter
			d := sandboxer.Description{Isolation: a.Isolation, Pricing: a.Pricing, Inputs: slices.Clone(a.Inputs),
				Capabilities: append(sandboxer.Capabilities(), sandboxer.CanPlace, sandboxer.CanAdmit, sandboxer.CanServices)}
			change(&d, n)
			return d
		}}
	}
	if name == "disclaims what there is not" {
		return narrowed{b}
	}
	if name == "users are passed over" {
		execAs(b, func(c *sandboxer.Cmd) { c.User = "" })
		return b
	}
	for _, m := range mutants {
		if m.name == name {
			m.mutate(b, w)
			return b
		}
	}
	if name == "sound" || name == "a capability nobody wants" {
		return b
	}
	t.Fatalf("there is no mutant %q", name)
	return nil
}

// An endsWith is a connection that takes nothing once ctx is done.
type endsWith struct {
	net.Conn
	ctx context.Context
}

func (c endsWith) Write(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

func TestMutants(t *testing.T) {
	roots, noMounts := "", canMount(t)
	if noMounts == nil {
		roots = t.TempDir()
		rw, ro := mountRoots(roots)
		if err := errors.Join(os.Mkdir(rw, 0o755), os.Mkdir(ro, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	run := func(t *testing.T, name, pattern string) (passed bool, output string) {
		t.Helper()
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), self, "-test.run", pattern, "-test.timeout", "2m", "-test.v")
		cmd.Env = append(os.Environ(), "EXTENSIONTEST_MUTANT="+name, "EXTENSIONTEST_ROOTS="+roots)
		out, err := cmd.CombinedOutput()
		return err == nil, string(out)
	}
	only := func(subtest string) string {
		pattern := "^TestBroken$"
		for part := range strings.SplitSeq(subtest, "/") {
			pattern += "/^" + strings.ReplaceAll(part, " ", "_") + "$"
		}
		return pattern
	}
	check := func(name, subtest string) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if noMounts != nil && strings.HasPrefix(subtest, "mounts/") {
				t.Skip(noMounts)
			}
			passed, out := run(t, name, only(subtest))
			// This fault shows only if somebody writes while the reader passes.
			for tries := 1; passed && name == "says that it stood still" && tries < 3; tries++ {
				passed, out = run(t, name, only(subtest))
			}
			failed := "--- FAIL: TestBroken/" + strings.ReplaceAll(subtest, " ", "_") + " "
			if passed || !strings.Contains(out, failed) {
				t.Errorf("%s passes on an extension with the fault %q:\n%s", subtest, name, out)
			}
			if strings.Contains(out, "panic:") {
				t.Errorf("the suite panics instead of failing:\n%s", out)
			}
		})
	}
	seen := map[string]bool{}
	for _, m := range mutants {
		if seen[m.name] {
			t.Errorf("two mutants are called %q", m.name)
		}
		seen[m.name] = true
		check(m.name, m.fails)
	}
	if os.Getuid() == 0 {
		check("users are passed over", "exec/user")
	}
	for name := range descriptions {
		if name != "sound, and says so" {
			check(name, "core/what it says of itself")
		}
	}
	check("disclaims what there is not", "core/what it says of itself")
	check("closing destroys", "core/closing leaves sandboxes alone")
	check("a capability is missing", "core/capabilities")
	check("a capability is missing", "stats")
	check("a capability nobody wants", "core/capabilities")
	t.Run("sound", func(t *testing.T) {
		t.Parallel()
		if passed, out := run(t, "sound", "^TestBroken$/^(core|files|archive|list|probe|discover|quote|meter|capacity|mounts|place)$"); !passed {
			t.Errorf("the suite fails without a fault:\n%s", out)
		}
	})
	t.Run("sound, on a wire", func(t *testing.T) {
		t.Setenv("EXTENSIONTEST_WIRE", "1")
		t.Setenv("SANDBOXER_TEST_WHOLE", "")
		passed, out := run(t, "sound", "^TestBroken$")
		if !passed {
			t.Errorf("the suite fails without a fault:\n%s", out)
		}
		for group, names := range extensiontest.Wire {
			for _, name := range names {
				if name = group + "/" + strings.ReplaceAll(name, " ", "_"); name == "mounts/are_refused" || noMounts != nil && group == "mounts" {
					continue
				}
				if !strings.Contains(out, "=== RUN   TestBroken/"+name+"\n") {
					t.Errorf("there is no %s", name)
				}
			}
		}
	})
	t.Run("sound, and says so", func(t *testing.T) {
		t.Parallel()
		if passed, out := run(t, "sound, and says so", "^TestBroken$/^core$"); !passed {
			t.Errorf("the suite fails without a fault:\n%s", out)
		}
	})
}
