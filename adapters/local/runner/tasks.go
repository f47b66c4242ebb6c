//go:build linux

package runner

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/seccheck"
	pb "gvisor.dev/gvisor/pkg/sentry/seccheck/points/points_go_proto"
)

// limitTasks has the sandbox's kernel hold the limit of processes (RLIMIT_NPROC) for all
// tasks together. By itself it counts those of each user inside, so that whoever may
// change users has the limit many times over.
//
// The limit is what the broker wrote into the spec, not what a process inside has now:
// root inside can raise that of the first process.
func limitTasks(args []string) error {
	limit, err := processLimit(args)
	if err == nil && limit > 0 {
		seccheck.Global.AppendSink(&tasks{limit: limit}, []seccheck.PointReq{{Pt: seccheck.PointClone}})
	}
	return err
}

// processLimit returns the limit in the spec that gVisor will read; 0 if there is none.
func processLimit(args []string) (uint64, error) {
	for _, a := range args {
		v, ok := strings.CutPrefix(a, "--spec-fd=")
		if !ok {
			continue
		}
		fd, err := strconv.Atoi(v)
		if err != nil {
			return 0, err
		}
		data, err := readAll(fd)
		if err != nil {
			return 0, err
		}
		var spec struct {
			Process struct{ Rlimits []specs.POSIXRlimit }
		}
		if err := json.Unmarshal(data, &spec); err != nil {
			return 0, err
		}
		for _, l := range spec.Process.Rlimits {
			if l.Type == "RLIMIT_NPROC" {
				return l.Hard, nil
			}
		}
		return 0, nil
	}
	return 0, fmt.Errorf("no --spec-fd among the arguments")
}

// readAll reads an open file that stays gVisor's.
func readAll(fd int) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	data := make([]byte, st.Size)
	for n := 0; n < len(data); {
		m, err := unix.Pread(fd, data[n:], int64(n))
		if err != nil {
			return nil, os.NewSyscallError("pread", err)
		}
		if m == 0 {
			return data[:n], nil
		}
		n += m
	}
	return data, nil
}

type tasks struct {
	seccheck.SinkDefaults
	limit uint64
}

func (*tasks) Name() string { return "sandboxer-tasks" }

// Clone is called by the parent's task, before the child runs; a child that is refused
// ends without having run. What may exceed the limit of a user may exceed this one.
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
