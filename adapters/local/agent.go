//go:build linux

package local

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// openAgent connects one call to the agent of h's sandbox (agent.Capabilities).
func (e *extension) openAgent(ctx context.Context, h sandboxer.Handle, long bool) (agent.Call, error) {
	b, err := e.thawed(h)
	if err != nil {
		return agent.Call{}, err
	}
	ctx, done, err := b.pulse.attend(ctx, long)
	if err != nil {
		return agent.Call{}, err
	}
	end := func(err error) error {
		if err != nil && context.Cause(ctx) == errUnresponsive {
			err = errUnresponsive
		}
		done()
		return err
	}
	return agent.Call{Agent: b.agent, Ctx: ctx, Done: end, Env: b.givenEnv(nil), Dir: b.rec.Workspace, User: b.rec.User}, nil
}

// within makes a call to the agent, which also ends if the sandbox does not respond. A command
// may run as long as it likes.
func (b *liveSandbox) within(ctx context.Context, command bool, f func(context.Context) error) error {
	ctx, done, err := b.pulse.attend(ctx, command)
	if err != nil {
		return err
	}
	defer done()
	if err = f(ctx); err != nil && context.Cause(ctx) == errUnresponsive {
		return errUnresponsive
	}
	return err
}

func (b *liveSandbox) stat(ctx context.Context, name string) (fi sandboxer.FileInfo, err error) {
	err = b.within(ctx, false, func(ctx context.Context) (err error) { fi, err = b.agent.StatFile(ctx, name); return err })
	return fi, err
}

// donate hands files to the agent, which serves them as connections. Inside, only root can do
// the same. (gVisor's own port forwarding loses data when it is busy and cannot close one
// direction.) The first donation starts two programs inside, because it wakes the agent.
func (b *liveSandbox) donate(ctx context.Context, theirs []*os.File) error {
	if err := b.handOver(ctx, theirs); err != nil {
		return err
	}
	if !slices.Contains(b.c.Spec.Process.Args, handedOn) {
		conn, end, err := agent.Pipes()
		if err != nil {
			return err
		}
		err = b.handOver(ctx, end[:])
		end[0].Close()
		end[1].Close()
		if err == nil {
			err = b.tellFuse(ctx, conn)
		}
		conn.Close()
		if err != nil {
			return err
		}
	}
	b.awake.Store(true)
	return nil
}

func (b *liveSandbox) handOver(ctx context.Context, theirs []*os.File) error {
	message := &capture.Last{Max: 1 << 10}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	defer w.Close()
	files := map[int]*os.File{2: w}
	for i, f := range theirs {
		files[3+i] = f
	}
	count := strconv.Itoa(len(theirs))
	if b.awake.Load() && aboveLimits(b.c.Spec.Process.Args) { // one that an older build saved does not know the option
		if ws, err := b.run(ctx, ownCapabilities, files, pausePath, "donate", agentSocket(b.rec.AgentMount), count, "1"); err != nil || ws == 0 {
			return err
		}
		// No process listens yet: the agent's own program waits for one.
	}
	ws, err := b.run(ctx, ownCapabilities, files, agentPath, "donate", "--wake", "1", agentSocket(b.rec.AgentMount), count)
	if err != nil || ws.ExitStatus() == 0 {
		return err
	}
	w.Close()
	_ = r.SetReadDeadline(time.Now().Add(drainTime)) // its message has arrived
	_, _ = io.Copy(message, io.LimitReader(r, pipeSize))
	if !ws.Signaled() && ws.ExitStatus() == agent.StrangerExit {
		return errReplaced
	}
	return fmt.Errorf("the agent could not be reached: %s", strings.TrimSpace(capture.Text(message.String(), 1<<10)))
}

// errReplaced is why no call is made to an agent after another process has taken its place.
var errReplaced = sandboxer.E(sandboxer.Failed, nil, "another program in the sandbox has replaced its agent, so that calls to the agent are refused").
	WithHint("root inside did that; commands without a terminal still run; to get an agent again, create a new sandbox")

// agentSocket is where the agent accepts connections, inside: in a directory in memory that
// every sandbox has, whatever its image, and that only root may write.
func agentSocket(agentMount bool) string {
	if agentMount {
		return "/dev/.sandboxer-agent"
	}
	return agentDir + "/agent.sock"
}
