//go:build linux

package runner

import (
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/seccheck"
	pb "gvisor.dev/gvisor/pkg/sentry/seccheck/points/points_go_proto"
)

// keepDescendants lets background processes of commands continue in restored copies.
//
// The broker starts commands through gVisor's control socket. gVisor marks their tasks,
// and those of everything they start, and kills all marked tasks in a restored copy,
// because the command's streams have no peer there. That is right for the command
// itself, and wrong for the server it left running in the background. So a process
// started inside loses the mark as soon as it exists.
func keepDescendants() {
	seccheck.Global.AppendSink(&descendants{}, []seccheck.PointReq{{Pt: seccheck.PointClone}})
}

type descendants struct {
	seccheck.SinkDefaults
}

func (*descendants) Name() string { return "sandboxer-descendants" }

// Clone is called by the parent's task, before the child runs.
func (*descendants) Clone(ctx context.Context, _ seccheck.FieldSet, info *pb.CloneInfo) error {
	parent := kernel.TaskFromContext(ctx)
	if parent == nil || parent.Origin != kernel.OriginExec || info.CreatedThreadId != info.CreatedThreadGroupId {
		return nil
	}
	if child := parent.Kernel().RootPIDNamespace().TaskWithID(kernel.ThreadID(info.CreatedThreadId)); child != nil {
		child.Origin = kernel.OriginUnknown
	}
	return nil
}
