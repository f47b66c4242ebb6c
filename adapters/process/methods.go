package process

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"iter"
	"net"
	"os"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/protocol"
)

// quick bounds calls that package backend makes without a deadline.
const quick = 10 * time.Second

// ask makes one request without a stream.
func ask[R any](ctx context.Context, e *extension, method string, params any) (result R, err error) {
	l, err := e.super.session(ctx)
	if err != nil {
		return result, sandboxer.Untouched(err)
	}
	err = l.call(ctx, method, params, &result, "")
	return result, err
}

// do is ask for methods without a result.
func do(ctx context.Context, e *extension, method string, params any) error {
	_, err := ask[struct{}](ctx, e, method, params)
	return err
}

// begin makes a request that answers when its stream has begun, and returns that.
func (e *extension) begin(ctx context.Context, method string, params any) (*protocol.Stream, error) {
	l, err := e.super.session(ctx)
	if err != nil {
		return nil, err
	}
	token := protocol.NewToken()
	arrived, forget := l.expect(token)
	if err := l.call(ctx, method, params, nil, token); err != nil {
		forget()
		return nil, err
	}
	select {
	case a := <-arrived:
		if a.s != nil {
			a.s.Hide = e.super.hidden.hide
		}
		return a.s, a.err
	case <-ctx.Done():
		forget()
		return nil, ctx.Err()
	}
}

// along makes a request that works along its stream: work does the broker's part; sends says that this part sends. An
// error of work that is the broker's own, mine, ends the request and is returned, unless the extension
// received it and has answered. If the extension reports that it is done, along does not
// wait for what the broker still has to send.
func (e *extension) along(ctx context.Context, method string, params, result any, sends bool, work func(s *protocol.Stream) (mine, theirs error)) (err error) {
	l, err := e.super.session(ctx)
	if err != nil {
		return sandboxer.Untouched(err)
	}
	outer := ctx
	defer func() { // the stream that ends with ctx may be what the extension tells of
		if k := sandboxer.KindOf(outer.Err()); err != nil && outer.Err() != nil && sandboxer.KindOf(err) != k {
			err = sandboxer.E(k, err, "%s was given up", method)
		}
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	token := protocol.NewToken()
	arrived, forget := l.expect(token)
	answered := make(chan error, 1)
	go func() { answered <- l.call(ctx, method, params, result, token) }()
	var s *protocol.Stream
	select {
	case a := <-arrived:
		if a.err != nil {
			cancel()
			return errors.Join(a.err, ignoreCanceled(<-answered))
		}
		s = a.s
	case err := <-answered:
		if err != nil {
			forget()
			return err
		}
		select { // what it sent on its stream may come behind its answer
		case a := <-arrived:
			if a.err != nil {
				return a.err
			}
			s = a.s
		case <-ctx.Done():
			forget()
			return ctx.Err()
		}
		answered <- nil
	}
	s.Hide = e.super.hidden.hide
	defer s.Close()
	stop := context.AfterFunc(ctx, func() { s.Close() }) // a pending send then fails as cancelled
	defer stop()
	type outcome struct{ mine, theirs error }
	worked := make(chan outcome, 1)
	go func() {
		mine, theirs := work(s)
		worked <- outcome{mine, theirs}
	}()
	select {
	case w := <-worked:
		if w.mine != nil && !sends { // what was sent has told the extension
			cancel()
			<-answered
			return w.mine
		}
		// Nothing more has to be done if the extension was the one to send, or its stream broke.
		if !sends || cmp.Or(w.mine, w.theirs) != nil {
			defer time.AfterFunc(protocol.TokenTime, cancel).Stop()
		}
		if err := <-answered; err != nil {
			if ctx.Err() != nil && outer.Err() == nil { // the time was over
				err = cmp.Or(w.mine, broken(w.theirs), error(sandboxer.E(sandboxer.Unavailable, nil, "the extension does not report that %s is done", method)))
			}
			return err
		}
		if sends { // it has what it needs, and may have left before it was sent the end
			return w.mine
		}
		return broken(w.theirs)
	case err := <-answered:
		if err == nil && !sends {
			s.Hurry(protocol.TokenTime) // all was sent
			w := <-worked
			return cmp.Or(w.mine, broken(w.theirs))
		}
		s.Close() // which ends work, unless a reader of the caller's holds it
		select {
		case w := <-worked:
			return cmp.Or(w.mine, err)
		case <-time.After(lingering):
			return err
		}
	}
}

// broken is the error for a stream on which nothing came in time.
func broken(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return sandboxer.E(sandboxer.Unavailable, err, "the extension reported that a request is done, but did not end its stream")
	}
	return err
}

// lingering is how long to wait for a caller's reader that is not needed any more.
const lingering = 100 * time.Millisecond

func ignoreCanceled(err error) error {
	if sandboxer.KindOf(err) == sandboxer.Canceled {
		return nil
	}
	return err
}

// Provision implements sandboxer.Extension.
func (e *extension) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	return ask[sandboxer.Handle](ctx, e, protocol.MethodProvision, protocol.SpecOf(spec))
}

// WaitReady implements sandboxer.Extension.
func (e *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	return ask[sandboxer.Reachability](ctx, e, protocol.MethodWaitReady, of(h))
}

// Teardown implements sandboxer.Extension.
func (e *extension) Teardown(ctx context.Context, h sandboxer.Handle) (sandboxer.CleanupReport, error) {
	return ask[sandboxer.CleanupReport](ctx, e, protocol.MethodTeardown, of(h))
}

func of(h sandboxer.Handle) protocol.OfSandbox { return protocol.OfSandbox{Handle: h} }

// Check implements sandboxer.Checker.
func (e *extension) Check(ctx context.Context, spec sandboxer.Spec) error {
	return do(ctx, e, protocol.MethodCheck, protocol.SpecOf(spec))
}

// Place implements sandboxer.Placer.
func (e *extension) Place(ctx context.Context, spec sandboxer.Spec, avoid []string) (string, error) {
	p, err := ask[protocol.Place](ctx, e, protocol.MethodPlace, protocol.PlaceParams{SpecParams: protocol.SpecOf(spec), Avoid: avoid})
	return p.Host, err
}

// Admit implements sandboxer.Admitter.
func (e *extension) Admit(spec sandboxer.Spec, name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), quick)
	defer cancel()
	return do(ctx, e, protocol.MethodAdmit, protocol.AdmitParams{SpecParams: protocol.SpecOf(spec), Name: name})
}

// DefaultLimits implements sandboxer.Limiter. For an extension that does not answer it returns the lowest possible
// limits: no sandbox gets more than the extension would allow.
func (e *extension) DefaultLimits(spec sandboxer.Spec) sandboxer.Limits {
	ctx, cancel := context.WithTimeout(context.Background(), quick)
	defer cancel()
	l, err := ask[sandboxer.Limits](ctx, e, protocol.MethodDefaultLimits, protocol.SpecOf(spec))
	if err != nil || l.Check() != nil {
		return sandboxer.Limits{MilliCPU: 1, MemoryBytes: 1, DiskBytes: 1, PIDs: 1, GPUs: 1}
	}
	return l
}

// Bounds of lists of texts.
const (
	maxNotices = 20
	maxNotice  = 1 << 10
)

// Notices implements sandboxer.Noticer.
func (e *extension) Notices(ctx context.Context) []string {
	ctx, cancel := context.WithTimeout(ctx, quick)
	defer cancel()
	n, err := ask[protocol.Notices](ctx, e, protocol.MethodNotices, nil)
	if err != nil {
		return nil
	}
	var out []string
	for _, text := range n.Notices[:min(len(n.Notices), maxNotices)] {
		out = append(out, protocol.Line(e.super.hidden.hide(text), maxNotice))
	}
	return out
}

// Forget implements sandboxer.Forgetter.
func (e *extension) Forget(ctx context.Context, h sandboxer.Handle) ([]string, error) {
	r, err := ask[protocol.Remains](ctx, e, protocol.MethodForget, of(h))
	return r.Remains, err
}

// ListPorts implements sandboxer.PortLister.
func (e *extension) ListPorts(ctx context.Context, h sandboxer.Handle) ([]int, error) {
	p, err := ask[protocol.Ports](ctx, e, protocol.MethodListPorts, of(h))
	return p.Ports, err
}

// Services implements sandboxer.Serviced.
func (e *extension) Services(ctx context.Context, h sandboxer.Handle) ([]string, error) {
	s, err := ask[protocol.Services](ctx, e, protocol.MethodServices, of(h))
	return s.Services, err
}

// maxCaches bounds how many caches are listed.
const maxCaches = 10_000

// Caches implements sandboxer.Cacher.
func (e *extension) Caches(ctx context.Context, host string) ([]sandboxer.Cache, error) {
	return e.caches(ctx, protocol.MethodCaches, host)
}

// PruneCaches implements sandboxer.Cacher.
func (e *extension) PruneCaches(ctx context.Context, host string) ([]sandboxer.Cache, error) {
	return e.caches(ctx, protocol.MethodPruneCaches, host)
}

func (e *extension) caches(ctx context.Context, method, host string) (out []sandboxer.Cache, err error) {
	for c, err := range values(ctx, e, method, protocol.OnHost{Host: host}, same[sandboxer.Cache]) {
		if err != nil {
			return out, err
		}
		if len(out) == maxCaches {
			return out, sandboxer.E(sandboxer.Internal, nil, "the extension lists more than %d caches", maxCaches)
		}
		out = append(out, c)
	}
	return out, nil
}

func same[T any](v T) T { return v }

// values is the list that a method's stream carries.
func values[W, V any](ctx context.Context, e *extension, method string, params any, arrive func(W) V) iter.Seq2[V, error] {
	return func(yield func(V, error) bool) {
		s, err := e.begin(ctx, method, params)
		if err != nil {
			var none V
			yield(none, err)
			return
		}
		received(ctx, s, arrive)(yield)
	}
}

// received is the list that comes on s, which is closed at the list's end.
func received[W, V any](ctx context.Context, s *protocol.Stream, arrive func(W) V) iter.Seq2[V, error] {
	stop := context.AfterFunc(ctx, func() { s.Close() })
	return func(yield func(V, error) bool) {
		defer stop()
		defer s.Close()
		var none V
		for {
			payload, err := s.Next(protocol.ChannelOut)
			if errors.Is(err, io.EOF) {
				return
			}
			var w W
			if err == nil {
				err = protocol.DecodeFrame(payload, &w)
			}
			if err != nil {
				if ctx.Err() != nil {
					err = ctx.Err()
				}
				yield(none, err)
				return
			}
			if !yield(arrive(w), nil) {
				return
			}
		}
	}
}

// Exec implements sandboxer.Execer.
func (e *extension) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (x sandboxer.Exit, err error) {
	params := protocol.ExecParams{OfSandbox: of(h), Cmd: protocol.CmdOf(cmd)}
	err = e.along(ctx, protocol.MethodExec, params, nil, false, command(&x, protocol.Caller{Stdin: cmd.Stdin, Stdout: cmd.Stdout, Stderr: cmd.Stderr, Resize: cmd.Resize, Signals: cmd.Signals}))
	return x, err
}

// command connects c to a command, and sets x to how it ended.
func command(x *sandboxer.Exit, c protocol.Caller) func(*protocol.Stream) (mine, theirs error) {
	return func(s *protocol.Stream) (mine, theirs error) {
		var exit sandboxer.Exit
		if exit, mine, theirs = s.CallCommand(c); mine == nil && theirs == nil {
			if theirs = sound(exit); theirs == nil {
				*x = exit
			}
		}
		return mine, theirs
	}
}

// ReadFile implements sandboxer.Filer.
func (e *extension) ReadFile(ctx context.Context, h sandboxer.Handle, name string) (io.ReadCloser, error) {
	s, err := e.begin(ctx, protocol.MethodReadFile, protocol.FileParams{OfSandbox: of(h), Path: protocol.Bytes(name)})
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	return &file{s.Reader(protocol.ChannelOut), s, stop}, nil
}

// A file is the content of one, as it comes.
type file struct {
	*protocol.Reader
	s    *protocol.Stream
	stop func() bool
}

func (f *file) Close() error {
	f.stop()
	return f.s.Close()
}

// WriteFile implements sandboxer.Filer.
func (e *extension) WriteFile(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
	if mode == 0 { // extensions are always told one
		mode = 0o644
		fi, err := e.StatFile(ctx, h, name)
		if err == nil && fi.Mode.IsRegular() {
			mode = fi.Mode.Perm()
		} else if err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
			return err
		}
	}
	params := protocol.FileParams{OfSandbox: of(h), Path: protocol.Bytes(name), Mode: uint32(mode)}
	return e.along(ctx, protocol.MethodWriteFile, params, nil, true, sending(r))
}

// sending is the broker's part where it sends data.
func sending(r io.Reader) func(*protocol.Stream) (mine, theirs error) {
	return func(s *protocol.Stream) (mine, theirs error) { return s.SendAll(protocol.ChannelIn, r) }
}

// StatFile implements sandboxer.Filer.
func (e *extension) StatFile(ctx context.Context, h sandboxer.Handle, name string) (sandboxer.FileInfo, error) {
	f, err := ask[protocol.File](ctx, e, protocol.MethodStatFile, protocol.FileParams{OfSandbox: of(h), Path: protocol.Bytes(name)})
	return f.File(), err
}

// ListFiles implements sandboxer.Filer.
func (e *extension) ListFiles(ctx context.Context, h sandboxer.Handle, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return values(ctx, e, protocol.MethodListFiles, protocol.DirParams{OfSandbox: of(h), Dir: protocol.Bytes(dir), After: protocol.Bytes(after)}, protocol.File.File)
}

// MakeDir implements sandboxer.Filer.
func (e *extension) MakeDir(ctx context.Context, h sandboxer.Handle, dir string) error {
	return do(ctx, e, protocol.MethodMakeDir, protocol.DirParams{OfSandbox: of(h), Dir: protocol.Bytes(dir)})
}

// MoveFile implements sandboxer.Filer.
func (e *extension) MoveFile(ctx context.Context, h sandboxer.Handle, from, to string) error {
	return do(ctx, e, protocol.MethodMoveFile, protocol.MoveParams{OfSandbox: of(h), From: protocol.Bytes(from), To: protocol.Bytes(to)})
}

// RemoveFile implements sandboxer.Filer.
func (e *extension) RemoveFile(ctx context.Context, h sandboxer.Handle, name string) error {
	return do(ctx, e, protocol.MethodRemoveFile, protocol.FileParams{OfSandbox: of(h), Path: protocol.Bytes(name)})
}

// Archive implements sandboxer.Archiver.
func (e *extension) Archive(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
	params := protocol.DirParams{OfSandbox: of(h), Dir: protocol.Bytes(dir)}
	return e.along(ctx, protocol.MethodArchive, params, nil, false, func(s *protocol.Stream) (mine, theirs error) { return s.CopyTo(w) })
}

// Unarchive implements sandboxer.Archiver.
func (e *extension) Unarchive(ctx context.Context, h sandboxer.Handle, dir string, r io.Reader) error {
	return e.along(ctx, protocol.MethodUnarchive, protocol.DirParams{OfSandbox: of(h), Dir: protocol.Bytes(dir)}, nil, true, sending(r))
}

// Checkpoint implements sandboxer.Checkpointer.
func (e *extension) Checkpoint(ctx context.Context, h sandboxer.Handle, begin func(sandboxer.Contents) io.Writer) error {
	return e.along(ctx, protocol.MethodCheckpoint, of(h), nil, false, func(s *protocol.Stream) (mine, theirs error) {
		payload, err := s.Next(protocol.ChannelResult)
		var c sandboxer.Contents
		if err == nil {
			err = protocol.DecodeFrame(payload, &c)
		}
		if errors.Is(err, io.EOF) {
			err = sandboxer.E(sandboxer.Internal, nil, "the extension does not report the contents of the checkpoint")
		}
		if err != nil {
			return nil, err
		}
		return s.CopyTo(begin(c))
	})
}

// ProvisionFrom implements sandboxer.Checkpointer.
func (e *extension) ProvisionFrom(ctx context.Context, spec sandboxer.Spec, c sandboxer.Contents, r io.Reader) (h sandboxer.Handle, err error) {
	err = e.along(ctx, protocol.MethodProvisionFrom, protocol.ProvisionFromParams{SpecParams: protocol.SpecOf(spec), Contents: c}, &h, true, sending(r))
	return h, err
}

// Dial implements sandboxer.Dialer.
func (e *extension) Dial(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
	return e.connection(ctx, protocol.MethodDial, protocol.PortParams{OfSandbox: of(h), Port: port})
}

// DialAgent implements sandboxer.AgentDialer.
func (e *extension) DialAgent(ctx context.Context, h sandboxer.Handle) (net.Conn, error) {
	return e.connection(ctx, protocol.MethodDialAgent, of(h))
}

func (e *extension) connection(ctx context.Context, method string, params any) (net.Conn, error) {
	s, err := e.begin(ctx, method, params)
	if err != nil {
		return nil, err
	}
	return s.Conn(protocol.ChannelIn, protocol.ChannelOut), nil
}

// Expose implements sandboxer.Exposer.
func (e *extension) Expose(ctx context.Context, h sandboxer.Handle, port int) (sandboxer.Endpoint, error) {
	return ask[sandboxer.Endpoint](ctx, e, protocol.MethodExpose, protocol.PortParams{OfSandbox: of(h), Port: port})
}

// StartProcess implements sandboxer.ProcessManager.
func (e *extension) StartProcess(ctx context.Context, h sandboxer.Handle, p sandboxer.ProcessSpec) (int, error) {
	pid, err := ask[protocol.PID](ctx, e, protocol.MethodStartProcess, protocol.StartParams{OfSandbox: of(h), Process: protocol.ProcessSpecOf(p)})
	return pid.PID, err
}

// AttachProcess implements sandboxer.ProcessManager.
func (e *extension) AttachProcess(ctx context.Context, h sandboxer.Handle, pid int, c sandboxer.ProcessStreams) (x sandboxer.Exit, err error) {
	params := protocol.AttachParams{OfSandbox: of(h), PID: pid, Replay: c.Replay, Stdin: c.Stdin != nil}
	err = e.along(ctx, protocol.MethodAttach, params, nil, false, command(&x, protocol.Caller{Stdin: c.Stdin, Stdout: c.Stdout, Stderr: c.Stderr, Resize: c.Resize, Signals: c.Signals}))
	return x, err
}

// ListProcesses implements sandboxer.ProcessManager.
func (e *extension) ListProcesses(ctx context.Context, h sandboxer.Handle) (out []sandboxer.Process, err error) {
	list, err := ask[protocol.Processes](ctx, e, protocol.MethodProcesses, of(h))
	for _, p := range list.Processes {
		out = append(out, p.Process())
	}
	return out, err
}

// SignalProcess implements sandboxer.ProcessManager.
func (e *extension) SignalProcess(ctx context.Context, h sandboxer.Handle, pid, signal int) error {
	return do(ctx, e, protocol.MethodSignal, protocol.SignalParams{OfSandbox: of(h), PID: pid, Signal: signal})
}

// WatchFiles implements sandboxer.Watcher.
func (e *extension) WatchFiles(ctx context.Context, h sandboxer.Handle, dir string, recursive bool) (iter.Seq2[sandboxer.FileChange, error], error) {
	s, err := e.begin(ctx, protocol.MethodWatchFiles, protocol.DirParams{OfSandbox: of(h), Dir: protocol.Bytes(dir), Recursive: recursive})
	if err != nil {
		return nil, err
	}
	return received(ctx, s, protocol.Change.Change), nil
}

// IsAlive implements sandboxer.Prober.
func (e *extension) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	a, err := ask[protocol.Alive](ctx, e, protocol.MethodIsAlive, of(h))
	if err != nil {
		return sandboxer.Unknown, err
	}
	return a.Liveness, nil
}

// Discover implements sandboxer.Discoverer.
func (e *extension) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	return ask[sandboxer.Found](ctx, e, protocol.MethodDiscover, protocol.IDParams{ID: id})
}

// ListRunning implements sandboxer.Lister.
func (e *extension) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return values(ctx, e, protocol.MethodListRunning, protocol.OwnerParams{Owner: owner}, same[sandboxer.Handle])
}

// Notify implements sandboxer.Notifier.
func (e *extension) Notify(ctx context.Context, owner string) (iter.Seq2[string, error], error) {
	s, err := e.begin(ctx, protocol.MethodNotify, protocol.OwnerParams{Owner: owner})
	if err != nil {
		return nil, err
	}
	return received(ctx, s, func(n protocol.Notice) string { return n.SandboxID }), nil
}

// Snapshot implements sandboxer.Snapshotter.
func (e *extension) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
	return ask[sandboxer.Snapshot](ctx, e, protocol.MethodSnapshot, protocol.SnapshotParams{OfSandbox: of(h), ID: id})
}

// RestoreFromSnapshot implements sandboxer.Snapshotter.
func (e *extension) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (sandboxer.Handle, error) {
	return ask[sandboxer.Handle](ctx, e, protocol.MethodRestore, protocol.RestoreParams{SpecParams: protocol.SpecOf(spec), Snapshot: s})
}

// DropSnapshot implements sandboxer.Snapshotter.
func (e *extension) DropSnapshot(ctx context.Context, s sandboxer.Snapshot) error {
	return do(ctx, e, protocol.MethodDropSnapshot, protocol.DropParams{Snapshot: s})
}

// ListSnapshots implements sandboxer.Snapshotter.
func (e *extension) ListSnapshots(ctx context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return values(ctx, e, protocol.MethodSnapshots, protocol.OwnerParams{Owner: owner}, same[sandboxer.FoundSnapshot])
}

// EstimateCost implements sandboxer.Quoter.
func (e *extension) EstimateCost(ctx context.Context, spec sandboxer.Spec, duration time.Duration) (*sandboxer.MeterQuote, error) {
	q, err := ask[protocol.Quote](ctx, e, protocol.MethodEstimateCost, protocol.CostParams{SpecParams: protocol.SpecOf(spec), DurationMS: duration.Milliseconds()})
	return q.Quote, err
}

// MeterActual implements sandboxer.Meter.
func (e *extension) MeterActual(ctx context.Context, h sandboxer.Handle, duration time.Duration) (sandboxer.Usage, error) {
	return ask[sandboxer.Usage](ctx, e, protocol.MethodMeterActual, protocol.MeterParams{OfSandbox: of(h), DurationMS: duration.Milliseconds()})
}

// Pause implements sandboxer.Pauser.
func (e *extension) Pause(ctx context.Context, h sandboxer.Handle) error {
	return do(ctx, e, protocol.MethodPause, of(h))
}

// Resume implements sandboxer.Pauser.
func (e *extension) Resume(ctx context.Context, h sandboxer.Handle) error {
	return do(ctx, e, protocol.MethodResume, of(h))
}

// Renew implements sandboxer.Renewer.
func (e *extension) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	return do(ctx, e, protocol.MethodRenew, protocol.RenewParams{OfSandbox: of(h), Until: until})
}

// Capacity implements sandboxer.CapacityReporter.
func (e *extension) Capacity(ctx context.Context, host string) (sandboxer.HostCapacity, error) {
	return ask[sandboxer.HostCapacity](ctx, e, protocol.MethodCapacity, protocol.OnHost{Host: host})
}

// maxStat is more than any backend can have: bytes of memory, disk and traffic, or processes.
const maxStat = 1 << 60

// Stats implements sandboxer.StatsReader.
func (e *extension) Stats(ctx context.Context, h sandboxer.Handle) (sandboxer.Stats, error) {
	s, err := ask[sandboxer.Stats](ctx, e, protocol.MethodStats, of(h))
	if err != nil {
		return sandboxer.Stats{}, err
	}
	return s, soundStats(&s)
}

// soundStats refuses figures that no backend has, and makes negative ones -1: they mean that the
// extension cannot measure something.
func soundStats(s *sandboxer.Stats) error {
	s.CPU = max(s.CPU, -1)
	for _, n := range []*int64{&s.MemoryBytes, &s.MemoryLimit, &s.DiskBytes, &s.DiskLimit, &s.PIDs, &s.RxBytes, &s.TxBytes} {
		if *n = max(*n, -1); *n > maxStat {
			return sandboxer.E(sandboxer.Failed, nil, "the extension's stats are impossible: a value in them is %d", *n)
		}
	}
	return nil
}

// knownSignal reports whether Linux has a signal of the name: KILL, SIGKILL, or RTMIN+3.
func knownSignal(name string) bool {
	name = strings.TrimPrefix(name, "SIG")
	return unix.SignalNum("SIG"+name) != 0 || realtimeSignal.MatchString(name)
}

var realtimeSignal = regexp.MustCompile(`^RTM(IN|AX)([+-][0-9]{1,2})?$|^[0-9]{1,2}$`)

// sound refuses an exit that no command can have.
func sound(x sandboxer.Exit) error {
	switch {
	case x.Code < 0 || x.Code > 255:
		return sandboxer.E(sandboxer.Failed, nil, "the extension returned an impossible exit code: %d is not between 0 and 255", x.Code)
	case x.Signal != "" && !knownSignal(x.Signal):
		return sandboxer.E(sandboxer.Failed, nil, "the extension names a signal that does not exist: %.40q", x.Signal)
	}
	return nil
}

// SetNetwork implements sandboxer.Networker.
func (e *extension) SetNetwork(ctx context.Context, h sandboxer.Handle, p sandboxer.NetworkPolicy) error {
	return do(ctx, e, protocol.MethodSetNetwork, protocol.NetworkParams{OfSandbox: of(h), Policy: p})
}

// Basis implements sandboxer.Pooler.
func (e *extension) Basis(ctx context.Context, spec sandboxer.Spec) (string, error) {
	b, err := ask[protocol.Basis](ctx, e, protocol.MethodBasis, protocol.SpecOf(spec))
	return b.Basis, err
}

// Claim implements sandboxer.Pooler.
func (e *extension) Claim(ctx context.Context, h sandboxer.Handle, spec sandboxer.Spec) (sandboxer.Handle, error) {
	return ask[sandboxer.Handle](ctx, e, protocol.MethodClaim, protocol.ClaimParams{OfSandbox: of(h), SpecParams: protocol.SpecOf(spec)})
}

var _ interface {
	sandboxer.Checker
	sandboxer.Placer
	sandboxer.Admitter
	sandboxer.Limiter
	sandboxer.Noticer
	sandboxer.Cacher
	sandboxer.PortLister
	sandboxer.Forgetter
	sandboxer.Serviced
	sandboxer.Filer
	sandboxer.Archiver
	sandboxer.Checkpointer
	sandboxer.Dialer
	sandboxer.Exposer
	sandboxer.AgentDialer
	sandboxer.ProcessManager
	sandboxer.Watcher
	sandboxer.Notifier
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.Snapshotter
	sandboxer.Quoter
	sandboxer.Meter
	sandboxer.Pauser
	sandboxer.Renewer
	sandboxer.CapacityReporter
	sandboxer.StatsReader
	sandboxer.Networker
	sandboxer.Pooler
} = (*extension)(nil)
