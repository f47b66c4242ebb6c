package extension

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"iter"
	"net"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/halfclose"
	"github.com/sand-boxer/sandboxer/internal/protocol"
)

// A call is one request under way.
type call struct {
	ctx context.Context // ends with the request
	ext sandboxer.Extension
	req *protocol.Request

	// lasting outlives the request; it ends with the control connection.
	lasting context.Context
	// open opens the stream of the request.
	open func(ctx context.Context, token string) (*protocol.Stream, error)
}

// A method does what a request asks for. can is the capability that it belongs to; the verbs that every
// extension has need none.
type method struct {
	can sandboxer.Capability
	do  func(c call) (any, error)
}

// plain is a method without a stream: X is the interface that has it, P what its params are.
func plain[X, P, R any](can sandboxer.Capability, f func(ctx context.Context, x X, p P) (R, error)) method {
	return method{can, func(c call) (any, error) {
		x, p, err := prepare[X, P](c)
		if err != nil {
			return nil, err
		}
		return f(c.ctx, x, p)
	}}
}

// prepare returns the extension as the interface that has the method, and its params. The broker is another process: a spec from there
// is checked here.
func prepare[X, P any](c call) (x X, p P, err error) {
	x, ok := c.ext.(X)
	if !ok {
		return x, p, sandboxer.E(sandboxer.Unsupported, nil, "this extension does not support %s", c.req.Method)
	}
	if err := c.req.Decode(&p); err != nil {
		return x, p, err
	}
	early := c.req.Method == protocol.MethodDefaultLimits || c.req.Method == protocol.MethodAdmit // asked before a spec is complete
	if s, ok := any(p).(interface{ Full() sandboxer.Spec }); ok && !early {
		err = s.Full().Check()
	}
	return x, p, err
}

// done is the result of a method without an answer.
func done(err error) (any, error) { return nil, err }

// along is a method that works along its stream, and answers when all is done.
func along[X, P any](can sandboxer.Capability, f func(ctx context.Context, x X, p P, s *protocol.Stream) (any, error)) method {
	return method{can, func(c call) (any, error) {
		x, p, err := prepare[X, P](c)
		if err != nil {
			return nil, err
		}
		s, err := c.open(c.ctx, c.req.Token)
		if err != nil {
			return nil, err
		}
		defer s.Close()
		stop := context.AfterFunc(c.ctx, func() { s.Close() })
		defer stop()
		return f(c.ctx, x, p, s)
	}}
}

// begun is a method that answers when its stream has begun: begin does the work for that, and
// returns the function that continues afterwards, whose error ends the stream.
func begun[X, P any](can sandboxer.Capability, begin func(ctx context.Context, x X, p P) (func(s *protocol.Stream) error, error)) method {
	return method{can, func(c call) (any, error) {
		x, p, err := prepare[X, P](c)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithCancel(c.lasting)
		stop := context.AfterFunc(c.ctx, cancel) // until it is answered
		goOn, err := begin(ctx, x, p)
		if err == nil && !stop() {
			err = c.ctx.Err()
			go goOn(protocol.NewStream(nothing{}, protocol.NewReader(nothing{}))) // what was opened is closed
		}
		var s *protocol.Stream
		if err == nil {
			if s, err = c.open(c.ctx, c.req.Token); err != nil {
				go goOn(protocol.NewStream(nothing{}, protocol.NewReader(nothing{})))
			}
		}
		if err != nil {
			cancel()
			return nil, err
		}
		go func() {
			defer cancel()
			defer s.Close()
			end := context.AfterFunc(ctx, func() { s.Close() })
			defer end()
			if err := goOn(s); err != nil {
				_ = s.SendError(err)
			} else {
				_ = s.Send(protocol.ChannelEnd, nil)
			}
		}()
		return nil, nil
	}}
}

// nothing is a connection that is closed.
type nothing struct{}

func (nothing) Read([]byte) (int, error)  { return 0, io.EOF }
func (nothing) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }
func (nothing) Close() error              { return nil }

// values is a method whose stream is a list.
func values[X, P, V, W any](can sandboxer.Capability, list func(ctx context.Context, x X, p P) (iter.Seq2[V, error], error), travel func(V) W) method {
	return begun(can, func(ctx context.Context, x X, p P) (func(*protocol.Stream) error, error) {
		ctx, cancel := context.WithCancel(ctx)
		all, err := list(ctx, x, p)
		if err != nil {
			cancel()
			return nil, err
		}
		return func(s *protocol.Stream) error {
			defer cancel()
			go func() { // the broker sends nothing: it leaves
				_, _, _ = s.Receive()
				cancel()
			}()
			for v, err := range all {
				if err != nil {
					return err
				}
				if err := s.SendJSON(protocol.ChannelOut, travel(v)); err != nil {
					return err
				}
			}
			return ctx.Err()
		}, nil
	})
}

// connection is a method whose stream is a connection.
func connection[X, P any](can sandboxer.Capability, dial func(ctx context.Context, x X, p P) (net.Conn, error)) method {
	return begun(can, func(ctx context.Context, x X, p P) (func(*protocol.Stream) error, error) {
		conn, err := dial(ctx, x, p)
		if err != nil {
			return nil, err
		}
		return func(s *protocol.Stream) error {
			defer conn.Close()
			in := make(chan error, 1)
			go func() {
				_, err := io.Copy(conn, s.Reader(protocol.ChannelIn))
				if err != nil {
					conn.Close() // there is no reader any more
				} else if err = halfclose.CloseWrite(conn); errors.Is(err, errors.ErrUnsupported) {
					conn.Close() // it has only one end
					err = nil
				}
				in <- err
			}()
			_, err := io.Copy(s.Writer(protocol.ChannelOut), conn)
			if err != nil && !errors.Is(err, net.ErrClosed) {
				return err
			}
			if err := s.Send(protocol.ChannelEnd, nil); err != nil {
				return err
			}
			return <-in
		}, nil
	})
}

type (
	extension = sandboxer.Extension
	ofSandbox = protocol.OfSandbox
	none      = struct{}
)

func same[T any](v T) T { return v }

func listed[V any](all iter.Seq2[V, error]) (iter.Seq2[V, error], error) { return all, nil }

// pages lists values that come all at once, followed by an error.
func pages[V any](list []V, err error) (iter.Seq2[V, error], error) {
	if len(list) == 0 {
		return func(func(V, error) bool) {}, err
	}
	return func(yield func(V, error) bool) {
		for _, v := range list {
			if !yield(v, nil) {
				return
			}
		}
		if err != nil {
			var zero V
			yield(zero, err)
		}
	}, nil
}

// methods are those of the protocol.
var methods = map[string]method{
	protocol.MethodProvision: plain("", func(ctx context.Context, x extension, p protocol.SpecParams) (sandboxer.Handle, error) {
		return x.Provision(ctx, p.Full())
	}),
	protocol.MethodWaitReady: plain("", func(ctx context.Context, x extension, p ofSandbox) (sandboxer.Reachability, error) {
		return x.WaitReady(ctx, p.Handle)
	}),
	protocol.MethodTeardown: plain("", func(ctx context.Context, x extension, p ofSandbox) (sandboxer.CleanupReport, error) {
		return x.Teardown(ctx, p.Handle)
	}),

	protocol.MethodCheck: plain(sandboxer.CanCheck, func(ctx context.Context, x sandboxer.Checker, p protocol.SpecParams) (any, error) {
		return done(x.Check(ctx, p.Full()))
	}),
	protocol.MethodPlace: plain(sandboxer.CanPlace, func(ctx context.Context, x sandboxer.Placer, p protocol.PlaceParams) (protocol.Place, error) {
		host, err := x.Place(ctx, p.Full(), p.Avoid)
		return protocol.Place{Host: host}, err
	}),
	protocol.MethodAdmit: plain(sandboxer.CanAdmit, func(_ context.Context, x sandboxer.Admitter, p protocol.AdmitParams) (any, error) {
		return done(x.Admit(p.Full(), p.Name))
	}),
	protocol.MethodDefaultLimits: plain(sandboxer.CanLimits, func(_ context.Context, x sandboxer.Limiter, p protocol.SpecParams) (sandboxer.Limits, error) {
		return x.DefaultLimits(p.Full()), nil
	}),
	protocol.MethodNotices: plain(sandboxer.CanNotices, func(ctx context.Context, x sandboxer.Noticer, _ none) (protocol.Notices, error) {
		return protocol.Notices{Notices: x.Notices(ctx)}, nil
	}),
	protocol.MethodForget: plain(sandboxer.CanForget, func(ctx context.Context, x sandboxer.Forgetter, p ofSandbox) (protocol.Remains, error) {
		remains, err := x.Forget(ctx, p.Handle)
		return protocol.Remains{Remains: remains}, err
	}),
	protocol.MethodListPorts: plain(sandboxer.CanPorts, func(ctx context.Context, x sandboxer.PortLister, p ofSandbox) (protocol.Ports, error) {
		ports, err := x.ListPorts(ctx, p.Handle)
		return protocol.Ports{Ports: ports}, err
	}),
	protocol.MethodServices: plain(sandboxer.CanServices, func(ctx context.Context, x sandboxer.Serviced, p ofSandbox) (protocol.Services, error) {
		names, err := x.Services(ctx, p.Handle)
		return protocol.Services{Services: names}, err
	}),
	protocol.MethodCaches: values(sandboxer.CanCaches, func(ctx context.Context, x sandboxer.Cacher, p protocol.OnHost) (iter.Seq2[sandboxer.Cache, error], error) {
		return pages(x.Caches(ctx, p.Host))
	}, same),
	protocol.MethodPruneCaches: values(sandboxer.CanCaches, func(ctx context.Context, x sandboxer.Cacher, p protocol.OnHost) (iter.Seq2[sandboxer.Cache, error], error) {
		return pages(x.PruneCaches(ctx, p.Host))
	}, same),

	protocol.MethodExec: along(sandboxer.CanExec, func(ctx context.Context, x sandboxer.Execer, p protocol.ExecParams, s *protocol.Stream) (any, error) {
		return done(s.ServeCommand(ctx, func(ctx context.Context, c protocol.Served) (sandboxer.Exit, error) {
			cmd := p.Cmd.Cmd()
			cmd.Stdout, cmd.Stderr, cmd.Resize, cmd.Signals = c.Stdout, c.Stderr, c.Resize, c.Signals
			if p.Cmd.Stdin {
				cmd.Stdin = c.Stdin
			}
			return x.Exec(ctx, p.Handle, cmd)
		}))
	}),

	protocol.MethodReadFile: begun(sandboxer.CanFiles, func(ctx context.Context, x sandboxer.Filer, p protocol.FileParams) (func(*protocol.Stream) error, error) {
		r, err := x.ReadFile(ctx, p.Handle, string(p.Path))
		if err != nil {
			return nil, err
		}
		return func(s *protocol.Stream) error {
			_, err := io.Copy(s.Writer(protocol.ChannelOut), r)
			return errors.Join(err, r.Close())
		}, nil
	}),
	protocol.MethodWriteFile: along(sandboxer.CanFiles, func(ctx context.Context, x sandboxer.Filer, p protocol.FileParams, s *protocol.Stream) (any, error) {
		return done(x.WriteFile(ctx, p.Handle, string(p.Path), fs.FileMode(p.Mode), s.Reader(protocol.ChannelIn)))
	}),
	protocol.MethodStatFile: plain(sandboxer.CanFiles, func(ctx context.Context, x sandboxer.Filer, p protocol.FileParams) (protocol.File, error) {
		fi, err := x.StatFile(ctx, p.Handle, string(p.Path))
		return protocol.FileOf(fi), err
	}),
	protocol.MethodListFiles: values(sandboxer.CanFiles, func(ctx context.Context, x sandboxer.Filer, p protocol.DirParams) (iter.Seq2[sandboxer.FileInfo, error], error) {
		return listed(x.ListFiles(ctx, p.Handle, string(p.Dir), string(p.After)))
	}, protocol.FileOf),
	protocol.MethodMakeDir: plain(sandboxer.CanFiles, func(ctx context.Context, x sandboxer.Filer, p protocol.DirParams) (any, error) {
		return done(x.MakeDir(ctx, p.Handle, string(p.Dir)))
	}),
	protocol.MethodMoveFile: plain(sandboxer.CanFiles, func(ctx context.Context, x sandboxer.Filer, p protocol.MoveParams) (any, error) {
		return done(x.MoveFile(ctx, p.Handle, string(p.From), string(p.To)))
	}),
	protocol.MethodRemoveFile: plain(sandboxer.CanFiles, func(ctx context.Context, x sandboxer.Filer, p protocol.FileParams) (any, error) {
		return done(x.RemoveFile(ctx, p.Handle, string(p.Path)))
	}),

	protocol.MethodArchive: along(sandboxer.CanArchive, func(ctx context.Context, x sandboxer.Archiver, p protocol.DirParams, s *protocol.Stream) (any, error) {
		if err := x.Archive(ctx, p.Handle, string(p.Dir), s.Writer(protocol.ChannelOut)); err != nil {
			return nil, err
		}
		return done(s.Send(protocol.ChannelEnd, nil))
	}),
	protocol.MethodUnarchive: along(sandboxer.CanArchive, func(ctx context.Context, x sandboxer.Archiver, p protocol.DirParams, s *protocol.Stream) (any, error) {
		return done(x.Unarchive(ctx, p.Handle, string(p.Dir), s.Reader(protocol.ChannelIn)))
	}),
	protocol.MethodCheckpoint: along(sandboxer.CanCheckpoint, func(ctx context.Context, x sandboxer.Checkpointer, p ofSandbox, s *protocol.Stream) (any, error) {
		err := x.Checkpoint(ctx, p.Handle, func(c sandboxer.Contents) io.Writer {
			_ = s.SendJSON(protocol.ChannelResult, c) // what comes behind it fails too
			return s.Writer(protocol.ChannelOut)
		})
		if err != nil {
			return nil, err
		}
		return done(s.Send(protocol.ChannelEnd, nil))
	}),
	protocol.MethodProvisionFrom: along(sandboxer.CanCheckpoint, func(ctx context.Context, x sandboxer.Checkpointer, p protocol.ProvisionFromParams, s *protocol.Stream) (any, error) {
		return x.ProvisionFrom(ctx, p.Full(), p.Contents, s.Reader(protocol.ChannelIn))
	}),

	protocol.MethodDial: connection(sandboxer.CanDial, func(ctx context.Context, x sandboxer.Dialer, p protocol.PortParams) (net.Conn, error) {
		return x.Dial(ctx, p.Handle, p.Port)
	}),
	protocol.MethodDialAgent: connection(sandboxer.CanAgent, func(ctx context.Context, x sandboxer.AgentDialer, p ofSandbox) (net.Conn, error) {
		return x.DialAgent(ctx, p.Handle)
	}),
	protocol.MethodExpose: plain(sandboxer.CanExpose, func(ctx context.Context, x sandboxer.Exposer, p protocol.PortParams) (sandboxer.Endpoint, error) {
		return x.Expose(ctx, p.Handle, p.Port)
	}),

	protocol.MethodStartProcess: plain(sandboxer.CanProcesses, func(ctx context.Context, x sandboxer.ProcessManager, p protocol.StartParams) (protocol.PID, error) {
		pid, err := x.StartProcess(ctx, p.Handle, p.Process.ProcessSpec())
		return protocol.PID{PID: pid}, err
	}),
	protocol.MethodAttach: along(sandboxer.CanProcesses, func(ctx context.Context, x sandboxer.ProcessManager, p protocol.AttachParams, s *protocol.Stream) (any, error) {
		return done(s.ServeCommand(ctx, func(ctx context.Context, c protocol.Served) (sandboxer.Exit, error) {
			streams := sandboxer.ProcessStreams{Replay: p.Replay, Stdout: c.Stdout, Stderr: c.Stderr, Resize: c.Resize, Signals: c.Signals}
			if p.Stdin {
				streams.Stdin = c.Stdin
			}
			return x.AttachProcess(ctx, p.Handle, p.PID, streams)
		}))
	}),
	protocol.MethodProcesses: plain(sandboxer.CanProcesses, func(ctx context.Context, x sandboxer.ProcessManager, p ofSandbox) (protocol.Processes, error) {
		list, err := x.ListProcesses(ctx, p.Handle)
		out := protocol.Processes{Processes: []protocol.Process{}}
		for _, p := range list {
			out.Processes = append(out.Processes, protocol.ProcessOf(p))
		}
		return out, err
	}),
	protocol.MethodSignal: plain(sandboxer.CanProcesses, func(ctx context.Context, x sandboxer.ProcessManager, p protocol.SignalParams) (any, error) {
		return done(x.SignalProcess(ctx, p.Handle, p.PID, p.Signal))
	}),
	protocol.MethodWatchFiles: values(sandboxer.CanWatch, func(ctx context.Context, x sandboxer.Watcher, p protocol.DirParams) (iter.Seq2[sandboxer.FileChange, error], error) {
		return x.WatchFiles(ctx, p.Handle, string(p.Dir), p.Recursive)
	}, protocol.ChangeOf),

	protocol.MethodIsAlive: plain(sandboxer.CanProbe, func(ctx context.Context, x sandboxer.Prober, p ofSandbox) (protocol.Alive, error) {
		l, err := x.IsAlive(ctx, p.Handle)
		return protocol.Alive{Liveness: l}, err
	}),
	protocol.MethodDiscover: plain(sandboxer.CanDiscover, func(ctx context.Context, x sandboxer.Discoverer, p protocol.IDParams) (sandboxer.Found, error) {
		return x.Discover(ctx, p.ID)
	}),
	protocol.MethodListRunning: values(sandboxer.CanList, func(ctx context.Context, x sandboxer.Lister, p protocol.OwnerParams) (iter.Seq2[sandboxer.Handle, error], error) {
		return listed(x.ListRunning(ctx, p.Owner))
	}, same),

	protocol.MethodNotify: values(sandboxer.CanNotify, func(ctx context.Context, x sandboxer.Notifier, p protocol.OwnerParams) (iter.Seq2[string, error], error) {
		return x.Notify(ctx, p.Owner)
	}, func(id string) protocol.Notice { return protocol.Notice{SandboxID: id} }),

	protocol.MethodSnapshot: plain(sandboxer.CanSnapshot, func(ctx context.Context, x sandboxer.Snapshotter, p protocol.SnapshotParams) (sandboxer.Snapshot, error) {
		return x.Snapshot(ctx, p.Handle, p.ID)
	}),
	protocol.MethodRestore: plain(sandboxer.CanSnapshot, func(ctx context.Context, x sandboxer.Snapshotter, p protocol.RestoreParams) (sandboxer.Handle, error) {
		return x.RestoreFromSnapshot(ctx, p.Full(), p.Snapshot)
	}),
	protocol.MethodDropSnapshot: plain(sandboxer.CanSnapshot, func(ctx context.Context, x sandboxer.Snapshotter, p protocol.DropParams) (any, error) {
		return done(x.DropSnapshot(ctx, p.Snapshot))
	}),
	protocol.MethodSnapshots: values(sandboxer.CanSnapshot, func(ctx context.Context, x sandboxer.Snapshotter, p protocol.OwnerParams) (iter.Seq2[sandboxer.FoundSnapshot, error], error) {
		return listed(x.ListSnapshots(ctx, p.Owner))
	}, same),

	protocol.MethodEstimateCost: plain(sandboxer.CanQuote, func(ctx context.Context, x sandboxer.Quoter, p protocol.CostParams) (protocol.Quote, error) {
		q, err := x.EstimateCost(ctx, p.Full(), time.Duration(p.DurationMS)*time.Millisecond)
		return protocol.Quote{Quote: q}, err
	}),
	protocol.MethodMeterActual: plain(sandboxer.CanMeter, func(ctx context.Context, x sandboxer.Meter, p protocol.MeterParams) (sandboxer.Usage, error) {
		return x.MeterActual(ctx, p.Handle, time.Duration(p.DurationMS)*time.Millisecond)
	}),
	protocol.MethodPause: plain(sandboxer.CanPause, func(ctx context.Context, x sandboxer.Pauser, p ofSandbox) (any, error) {
		return done(x.Pause(ctx, p.Handle))
	}),
	protocol.MethodResume: plain(sandboxer.CanPause, func(ctx context.Context, x sandboxer.Pauser, p ofSandbox) (any, error) {
		return done(x.Resume(ctx, p.Handle))
	}),
	protocol.MethodRenew: plain(sandboxer.CanRenew, func(ctx context.Context, x sandboxer.Renewer, p protocol.RenewParams) (any, error) {
		return done(x.Renew(ctx, p.Handle, p.Until))
	}),
	protocol.MethodCapacity: plain(sandboxer.CanCapacity, func(ctx context.Context, x sandboxer.CapacityReporter, p protocol.OnHost) (sandboxer.HostCapacity, error) {
		return x.Capacity(ctx, p.Host)
	}),
	protocol.MethodStats: plain(sandboxer.CanStats, func(ctx context.Context, x sandboxer.StatsReader, p ofSandbox) (sandboxer.Stats, error) {
		return x.Stats(ctx, p.Handle)
	}),
	protocol.MethodSetNetwork: plain(sandboxer.CanNetwork, func(ctx context.Context, x sandboxer.Networker, p protocol.NetworkParams) (any, error) {
		return done(x.SetNetwork(ctx, p.Handle, p.Policy))
	}),
	protocol.MethodBasis: plain(sandboxer.CanPool, func(ctx context.Context, x sandboxer.Pooler, p protocol.SpecParams) (protocol.Basis, error) {
		b, err := x.Basis(ctx, p.Full())
		return protocol.Basis{Basis: b}, err
	}),
	protocol.MethodClaim: plain(sandboxer.CanPool, func(ctx context.Context, x sandboxer.Pooler, p protocol.ClaimParams) (sandboxer.Handle, error) {
		return x.Claim(ctx, p.Handle, p.Full())
	}),
}

// has maps each capability to whether an extension has its interface.
var has = map[sandboxer.Capability]func(sandboxer.Extension) bool{
	sandboxer.CanExec: is[sandboxer.Execer], sandboxer.CanFiles: is[sandboxer.Filer], sandboxer.CanArchive: is[sandboxer.Archiver],
	sandboxer.CanDial: is[sandboxer.Dialer], sandboxer.CanExpose: is[sandboxer.Exposer], sandboxer.CanProbe: is[sandboxer.Prober],
	sandboxer.CanDiscover: is[sandboxer.Discoverer], sandboxer.CanList: is[sandboxer.Lister], sandboxer.CanSnapshot: is[sandboxer.Snapshotter],
	sandboxer.CanQuote: is[sandboxer.Quoter], sandboxer.CanMeter: is[sandboxer.Meter], sandboxer.CanPause: is[sandboxer.Pauser],
	sandboxer.CanRenew: is[sandboxer.Renewer], sandboxer.CanCapacity: is[sandboxer.CapacityReporter], sandboxer.CanStats: is[sandboxer.StatsReader],
	sandboxer.CanNetwork: is[sandboxer.Networker], sandboxer.CanPool: is[sandboxer.Pooler], sandboxer.CanCheckpoint: is[sandboxer.Checkpointer],
	sandboxer.CanAgent: is[sandboxer.AgentDialer], sandboxer.CanProcesses: is[sandboxer.ProcessManager], sandboxer.CanWatch: is[sandboxer.Watcher],
	sandboxer.CanNotify: is[sandboxer.Notifier],

	sandboxer.CanCheck: is[sandboxer.Checker], sandboxer.CanPlace: is[sandboxer.Placer], sandboxer.CanAdmit: is[sandboxer.Admitter],
	sandboxer.CanLimits: is[sandboxer.Limiter], sandboxer.CanNotices: is[sandboxer.Noticer], sandboxer.CanCaches: is[sandboxer.Cacher],
	sandboxer.CanPorts: is[sandboxer.PortLister], sandboxer.CanForget: is[sandboxer.Forgetter], sandboxer.CanServices: is[sandboxer.Serviced],
}

func is[X any](e sandboxer.Extension) bool {
	_, ok := e.(X)
	return ok
}

// capabilities are those of e, in the order of the contract.
func capabilities(e sandboxer.Extension) []sandboxer.Capability {
	var without []sandboxer.Capability
	if n, ok := e.(sandboxer.Narrower); ok {
		without = n.Without()
	}
	out := []sandboxer.Capability{}
	for _, c := range slices.Concat(sandboxer.Capabilities(), sandboxer.Besides()) {
		if has[c](e) && !slices.Contains(without, c) {
			out = append(out, c)
		}
	}
	return out
}
