//go:build linux

package modal

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"

	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A router is the server of a worker, for the commands in its sandboxes.
type router struct {
	pb.UnimplementedTaskCommandRouterServer
	f *fake
}

func (r *router) TaskExecStart(ctx context.Context, q *pb.TaskExecStartRequest) (*pb.TaskExecStartResponse, error) {
	f := r.f
	f.mu.Lock()
	defer f.mu.Unlock()
	sb, err := f.find(ctx, q.GetTaskId())
	if err == nil && !sb.ended.IsZero() {
		err = status.Error(codes.NotFound, "the sandbox has ended")
	}
	if err != nil || f.execs[q.GetExecId()] != nil { // a repetition
		return &pb.TaskExecStartResponse{}, err
	}
	x := &running{out: newOutput(), err: newOutput(), done: make(chan struct{})}
	in, feed, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	x.in = feed
	var env []string
	cmd, err := sb.start(q.GetCommandArgs(), env, in, x.out, x.err)
	in.Close()
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	f.execs[q.GetExecId()] = x
	go func() {
		err := cmd.Wait()
		if e, ok := errors.AsType[*exec.ExitError](err); ok {
			x.code = int32(e.ExitCode())
			if x.code < 0 {
				x.code = 137
			}
		}
		x.out.end()
		x.err.end()
		feed.Close()
		close(x.done)
	}()
	return &pb.TaskExecStartResponse{}, nil
}

func (r *router) exec(id string) (*running, error) {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	if x := r.f.execs[id]; x != nil {
		return x, nil
	}
	return nil, status.Error(codes.NotFound, "no such command")
}

func (r *router) TaskExecStdinWrite(_ context.Context, q *pb.TaskExecStdinWriteRequest) (*pb.TaskExecStdinWriteResponse, error) {
	x, err := r.exec(q.GetExecId())
	if err != nil {
		return nil, err
	}
	data := q.GetData()
	if seen := x.written - min(x.written, q.GetOffset()); seen < uint64(len(data)) {
		n, _ := x.in.Write(data[seen:])
		x.written += uint64(n)
	}
	if q.GetEof() {
		x.in.Close()
	}
	return &pb.TaskExecStdinWriteResponse{}, nil
}

func (r *router) TaskExecStdioRead(q *pb.TaskExecStdioReadRequest, s grpc.ServerStreamingServer[pb.TaskExecStdioReadResponse]) error {
	x, err := r.exec(q.GetExecId())
	if err != nil {
		return err
	}
	o := x.out
	if q.GetFileDescriptor() == pb.TaskExecStdioFileDescriptor_TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR {
		o = x.err
	}
	defer context.AfterFunc(s.Context(), o.wake)()
	r.f.mu.Lock()
	left := r.f.drop
	r.f.mu.Unlock()
	for offset, drop := int(q.GetOffset()), left > 0; ; {
		data, err := o.next(offset, func() bool { return s.Context().Err() != nil })
		if err != nil || s.Context().Err() != nil {
			return s.Context().Err()
		}
		if drop {
			if left == 0 {
				return status.Error(codes.Unavailable, "the stream broke")
			}
			data = data[:min(len(data), left)]
			left -= len(data)
		}
		if err := s.Send(pb.TaskExecStdioReadResponse_builder{Data: data}.Build()); err != nil {
			return err
		}
		offset += len(data)
	}
}

func (r *router) TaskExecWait(ctx context.Context, q *pb.TaskExecWaitRequest) (*pb.TaskExecWaitResponse, error) {
	x, err := r.exec(q.GetExecId())
	if err != nil {
		return nil, err
	}
	select {
	case <-x.done:
		return pb.TaskExecWaitResponse_builder{Code: &x.code}.Build(), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (r *router) TaskSnapshotFilesystem(ctx context.Context, q *pb.TaskSnapshotFilesystemRequest) (*pb.TaskSnapshotFilesystemResponse, error) {
	f := r.f
	if q.GetTtlSeconds() != 30*24*3600 {
		f.t.Errorf("a snapshot for %d seconds", q.GetTtlSeconds())
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	sb, err := f.find(ctx, q.GetTaskId())
	if err == nil && !sb.ended.IsZero() {
		err = status.Error(codes.NotFound, "the sandbox has ended")
	}
	if err != nil {
		return nil, err
	}
	id := f.next("im")
	f.images[id] = image{filepath.Join(f.dir, id), sb.account}
	if out, err := exec.Command("cp", "-a", "--one-file-system", sb.root, f.images[id].dir).CombinedOutput(); err != nil {
		return nil, status.Error(codes.Internal, string(out))
	}
	return pb.TaskSnapshotFilesystemResponse_builder{ImageId: id}.Build(), nil
}
