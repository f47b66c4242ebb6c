package engine

import (
	"context"
	"os"
	"strconv"
	"syscall"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/marked"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// inContainer runs one of sshrun's scripts for marked processes in a container, with the command's
// cookie.
func (en *Engine) inContainer(ctx context.Context, id, script, cookie string, more ...string) (sandboxer.Exit, error) {
	args := append([]string{en.Program, "exec", "-u", "0", id, "sh", "-c", script, "sh", procs.ExecVar, cookie, marked.Tag(cookie)}, more...)
	return en.Host.Ask(ctx, sshrun.Cmd{Args: args, Env: en.Env})
}

// killCommand ends what a command started, inside. If there is no shell inside, or the engine
// does not answer, it does so from the host, which works if the account has the right. If the engine
// could not be asked, it is asked when it answers again.
func (en *Engine) killCommand(ctx context.Context, id, cookie string) {
	inside := func(ctx context.Context) (sandboxer.Exit, error) {
		return en.inContainer(ctx, id, marked.Kill, cookie)
	}
	limited := func(f func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
		defer cancel()
		return f(ctx)
	}
	exit, err := sandboxer.Exit{}, error(nil)
	unasked := en.Watch.Hangs()
	if !unasked {
		err = limited(func(ctx context.Context) (err error) { exit, err = inside(ctx); return err })
		unasked = sandboxer.KindOf(err) == sandboxer.Timeout
	}
	if unasked {
		en.Watch.Owe(func(ctx context.Context) error { _, err := inside(ctx); return err })
	}
	if unasked || err != nil || exit.Code == sandboxer.ExitNotExecutable || exit.Code == sandboxer.ExitNotFound || exit.Code == 3 {
		err = limited(func(ctx context.Context) error { return en.Host.Kill(ctx, procs.ExecVar, cookie) })
	}
	if err != nil {
		en.log().Warn("an abandoned command may still run", "container", id, "err", err)
	}
}

// forward sends signals to a command.
func (en *Engine) forward(ctx context.Context, id, cookie string, signals <-chan os.Signal, stop <-chan struct{}) {
	for {
		select {
		case s, ok := <-signals:
			if !ok {
				signals = nil
				continue
			}
			sig, ok := s.(syscall.Signal)
			if !ok {
				continue
			}
			kctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
			_, err := en.inContainer(kctx, id, marked.Signal, cookie, strconv.Itoa(int(sig)))
			cancel()
			if err != nil {
				en.log().Debug("a signal was not delivered", "container", id, "err", err)
			}
		case <-stop:
			return
		}
	}
}
