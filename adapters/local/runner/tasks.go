//go:build linux

package runner

import (
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/seccheck"
	pb "gvisor.dev/gvisor/pkg/sentry/seccheck/points/points_go_proto"
)

// limitTasks makes the sandbox's kernel apply the limit of processes (RLIMIT_NPROC) to
// all tasks together. gVisor alone counts those of each user inside, so a process that
// may change users has the limit many times over.
//
// The limit is the one in the broker's spec, not the present one of a process inside:
// root inside can raise that of the first process.
func (g *guest) limitTasks() {
	for _, l := range g.Process.Rlimits {
		if l.Type == "RLIMIT_NPROC" && l.Hard > 0 {
			seccheck.Global.AppendSink(&tasks{limit: l.Hard}, []seccheck.PointReq{{Pt: seccheck.PointClone}})
		}
	}
}

type tasks struct {
	seccheck.SinkDefaults
	limit uint64
}

func (*tasks) Name() string { return "sandboxer-tasks" }

// Clone is called by the parent's task, before the child runs; a refused child ends
// without having run. A task that may exceed a user's limit may exceed this one.
func (s *tasks) Clone(ctx context.Context, _ seccheck.FieldSet, _ *pb.CloneInfo) error {
	parent := kernel.TaskFromContext(ctx)
	if parent == nil || uint64(parent.Kernel().RootPIDNamespace().NumTasks()) <= s.limit {
		return nil
	}
	if c := parent.Credentials(); c.HasRootCapability(linux.CAP_SYS_RESOURCE) || c.HasRootCapability(linux.CAP_SYS_ADMIN) {
		return nil
	}
	return linuxerr.EAGAIN
}
