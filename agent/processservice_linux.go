package agent

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	pb "github.com/sand-boxer/sandboxer/agent/proto/process"
)

// processService translates process.Process to the table.
type processService struct{ *server }

func (s processService) List(ctx context.Context, _ *connect.Request[pb.ListRequest]) (*connect.Response[pb.ListResponse], error) {
	res := &pb.ListResponse{}
	for _, p := range s.procs.running() {
		res.Processes = append(res.Processes, &pb.ProcessInfo{Config: p.cfg.(*pb.ProcessConfig), Pid: uint32(p.pid), Tag: p.tag})
	}
	return connect.NewResponse(res), nil
}

// prepare turns a request into a command for the table.
func (s *server) prepare(cfg *pb.ProcessConfig, u user) (command, error) {
	args := append([]string{cfg.GetCmd()}, cfg.GetArgs()...)
	for _, a := range args {
		if strings.ContainsRune(a, 0) {
			return command{}, sandboxer.E(sandboxer.Invalid, nil, "an argument of the command contains a NUL byte")
		}
	}
	for k, v := range cfg.GetEnvs() {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return command{}, sandboxer.E(sandboxer.Invalid, nil,
				"environment variable %q: a name has no '=', and neither name nor value a NUL byte", k)
		}
	}
	dir, err := s.workdir(cfg.GetCwd(), u)
	if err != nil {
		return command{}, err
	}
	mark := s.id + "-" + strconv.FormatUint(s.marks.Add(1), 10)
	return command{args: args, env: s.environ(u, cfg.GetEnvs(), mark), mark: mark, dir: dir, as: u, cfg: cfg}, nil
}

// run starts the process of a request.
func (s processService) run(ctx context.Context, req *connect.Request[pb.StartRequest]) (*process, *subscriber, error) {
	if err := s.disk.enterUntil(ctx); err != nil {
		return nil, nil, err
	}
	defer s.disk.leave()
	u, err := s.rpcUser(req.Header())
	if err != nil {
		return nil, nil, err
	}
	cfg := req.Msg.GetProcess()
	if cfg == nil {
		cfg = &pb.ProcessConfig{}
	}
	c, err := s.prepare(cfg, u)
	if err != nil {
		return nil, nil, err
	}
	c.tag = req.Msg.Tag
	c.stdin = req.Msg.Stdin == nil || req.Msg.GetStdin()
	if req.Msg.Pty != nil {
		c.size = winSize(req.Msg.GetPty())
	}
	return s.procs.start(c)
}

func (s processService) Start(ctx context.Context, req *connect.Request[pb.StartRequest], out *connect.ServerStream[pb.StartResponse]) error {
	p, sub, err := s.run(ctx, req)
	if err != nil {
		return err
	}
	// The caller's deadline applies to the process, even if the caller leaves.
	if at, ok := ctx.Deadline(); ok {
		p.killAt(at)
	}
	err = s.follow(ctx, sub, req.Header(), func(ev *pb.ProcessEvent) error {
		return out.Send(&pb.StartResponse{Event: ev})
	})
	if ctx.Err() != nil && req.Header().Get(foregroundHeader) == "true" {
		p.killUnlessDone()
	}
	return err
}

func (s processService) Connect(ctx context.Context, req *connect.Request[pb.ConnectRequest], out *connect.ServerStream[pb.ConnectResponse]) error {
	p, err := s.find(req.Msg.GetProcess(), true)
	if err != nil {
		return err
	}
	if p.size != nil {
		out.ResponseHeader().Set(ttyHeader, "true")
	}
	sub := p.subscribe(req.Header().Get(replayHeader) == "true")
	return s.follow(ctx, sub, req.Header(), func(ev *pb.ProcessEvent) error {
		return out.Send(&pb.ConnectResponse{Event: ev})
	})
}

const (
	defaultKeepalive = 90 * time.Second
	// Clients of the JSON codec get the piece sizes that they know; ours get fewer,
	// larger ones.
	jsonChunk  = 32 << 10
	protoChunk = 256 << 10
)

// keepaliveOf is the longest silence that the caller of a stream wants.
func keepaliveOf(h http.Header) time.Duration {
	if n, err := strconv.Atoi(h.Get(keepaliveHeader)); err == nil && n > 0 && n < 1<<20 {
		return time.Duration(n) * time.Second
	}
	return defaultKeepalive
}

// follow sends the life of a process: start, data, end, and keepalives in long
// silences.
func (s processService) follow(ctx context.Context, sub *subscriber, h http.Header, send func(*pb.ProcessEvent) error) error {
	defer sub.close()
	p := sub.p
	if err := send(&pb.ProcessEvent{Event: &pb.ProcessEvent_Start{Start: &pb.ProcessEvent_StartEvent{Pid: uint32(p.pid)}}}); err != nil {
		return err
	}
	limit := protoChunk
	if strings.Contains(h.Get("Content-Type"), "json") {
		limit = jsonChunk
	}
	interval := keepaliveOf(h)
	alive := time.NewTimer(interval)
	defer alive.Stop()
	var buf []byte
	data := &pb.ProcessEvent_DataEvent{}
	event := &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: data}}
	for {
		if len(buf) < limit {
			buf = make([]byte, min(max(2*len(buf), 4<<10), limit))
		}
		n, src, end, err := sub.next(buf)
		switch {
		case err != nil:
			return err
		case n > 0:
			switch src {
			case stdout:
				data.Output = &pb.ProcessEvent_DataEvent_Stdout{Stdout: buf[:n]}
			case stderr:
				data.Output = &pb.ProcessEvent_DataEvent_Stderr{Stderr: buf[:n]}
			case terminal:
				data.Output = &pb.ProcessEvent_DataEvent_Pty{Pty: buf[:n]}
			}
			if err := send(event); err != nil {
				return err
			}
			alive.Reset(interval)
			continue
		case end:
			return send(&pb.ProcessEvent{Event: &pb.ProcessEvent_End{End: endEvent(p.ws, p.memory)}})
		}
		select {
		case <-sub.notify:
		case <-alive.C:
			if err := send(&pb.ProcessEvent{Event: &pb.ProcessEvent_Keepalive{Keepalive: &pb.ProcessEvent_KeepAlive{}}}); err != nil {
				return err
			}
			alive.Reset(interval)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func endEvent(ws unix.WaitStatus, memory bool) *pb.ProcessEvent_EndEvent {
	more := ""
	if memory {
		more = memoryStatus
	}
	if ws.Signaled() {
		text := signalStatus + signalText(int(ws.Signal())) + more
		return &pb.ProcessEvent_EndEvent{ExitCode: -1, Status: text, Error: &text}
	}
	e := &pb.ProcessEvent_EndEvent{ExitCode: int32(ws.ExitStatus()), Exited: true, Status: "exit status " + strconv.Itoa(ws.ExitStatus()) + more}
	if ws.ExitStatus() != 0 {
		e.Error = &e.Status
	}
	return e
}

func winSize(p *pb.PTY) *sandboxer.WinSize {
	const most = 1<<16 - 1
	size := &sandboxer.WinSize{Cols: uint16(min(p.GetSize().GetCols(), most)), Rows: uint16(min(p.GetSize().GetRows(), most))}
	if size.Cols == 0 || size.Rows == 0 {
		*size = sandboxer.WinSize{Cols: 80, Rows: 24}
	}
	return size
}

// find looks up a process; with ended also one that has ended.
func (s processService) find(sel *pb.ProcessSelector, ended bool) (*process, error) {
	switch sel := sel.GetSelector().(type) {
	case *pb.ProcessSelector_Pid:
		if p := s.procs.find(int(sel.Pid), "", ended); p != nil && sel.Pid != 0 {
			return p, nil
		}
		return nil, sandboxer.E(sandboxer.NotFound, nil, "process with pid %d not found", sel.Pid)
	case *pb.ProcessSelector_Tag:
		if p := s.procs.find(0, sel.Tag, ended); p != nil {
			return p, nil
		}
		return nil, sandboxer.E(sandboxer.NotFound, nil, "process with tag %q not found", sel.Tag)
	}
	return nil, sandboxer.E(sandboxer.Invalid, nil, "no process selected: give its pid or its tag")
}

func (s processService) Update(ctx context.Context, req *connect.Request[pb.UpdateRequest]) (*connect.Response[pb.UpdateResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if req.Msg.Pty != nil {
		if err := p.resize(*winSize(req.Msg.GetPty())); err != nil {
			return nil, err
		}
	}
	return connect.NewResponse(&pb.UpdateResponse{}), nil
}

func (s processService) SendInput(ctx context.Context, req *connect.Request[pb.SendInputRequest]) (*connect.Response[pb.SendInputResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err == nil {
		err = p.input(ctx, req.Msg.GetInput())
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.SendInputResponse{}), nil
}

func (p *process) input(ctx context.Context, in *pb.ProcessInput) error {
	switch in := in.GetInput().(type) {
	case *pb.ProcessInput_Stdin:
		if p.size != nil {
			return sandboxer.E(sandboxer.Conflict, nil, "process %d has a terminal: send the input as pty", p.pid)
		}
		return p.write(ctx, in.Stdin)
	case *pb.ProcessInput_Pty:
		if p.size == nil {
			return sandboxer.E(sandboxer.Conflict, nil, "process %d has no terminal: send the input as stdin", p.pid)
		}
		return p.write(ctx, in.Pty)
	}
	return sandboxer.E(sandboxer.Invalid, nil, "no input given")
}

func (s processService) StreamInput(ctx context.Context, in *connect.ClientStream[pb.StreamInputRequest]) (*connect.Response[pb.StreamInputResponse], error) {
	var p *process
	for in.Receive() {
		var err error
		switch ev := in.Msg().GetEvent().(type) {
		case *pb.StreamInputRequest_Start:
			p, err = s.find(ev.Start.GetProcess(), false)
		case *pb.StreamInputRequest_Data:
			if p == nil {
				return nil, sandboxer.E(sandboxer.Invalid, nil, "input before the process was selected")
			}
			err = p.input(ctx, ev.Data.GetInput())
		}
		if err != nil {
			return nil, err
		}
	}
	if err := in.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.StreamInputResponse{}), nil
}

func (s processService) SendSignal(ctx context.Context, req *connect.Request[pb.SendSignalRequest]) (*connect.Response[pb.SendSignalResponse], error) {
	n := int(req.Msg.GetSignal())
	if n < 1 || n > 64 {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "signal %d does not exist", n)
	}
	p, err := s.find(req.Msg.GetProcess(), false)
	if err == nil {
		err = p.signal(unix.Signal(n))
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.SendSignalResponse{}), nil
}

func (s processService) CloseStdin(ctx context.Context, req *connect.Request[pb.CloseStdinRequest]) (*connect.Response[pb.CloseStdinResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err == nil {
		err = p.closeStdin()
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.CloseStdinResponse{}), nil
}
