package engine

import (
	"context"
	"os"
	"strconv"
	"syscall"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// execVariable is in the environment of every process of a command, with a value of its own.
const execVariable = "SANDBOXER_EXEC"

// killScript, inside, ends what carries the cookie $1 or the tag $3, or sends the signal $2 to the
// first of it, which has no parent inside. It looks twice before it believes that there
// is none: in the middle of an execve a process has no environment.
const killScript = `
none=
for i in 1 2 3 4 5 6 7 8 9 10; do
	some= t=" $(grep -ls "^Max file locks .* $3 " /proc/[0-9]*/limits 2>/dev/null | tr '\n' ' ') "
	for f in /proc/[0-9]*; do
		case $t in *" $f/limits "*) ;; *) tr '\0' '\n' <"$f/environ" 2>/dev/null | grep -qxF "` + execVariable + `=$1" || continue;; esac
		p=${f#/proc/}
		if [ "$2" != KILL ]; then
			grep -qs '^PPid:[^0-9]*0$' "$f/status" && kill "-$2" "$p"
			continue
		fi
		case $(cat "$f/stat" 2>/dev/null) in *") Z "*|*") X "*|"") continue;; esac
		some=1; kill -KILL "$p" 2>/dev/null
	done
	[ "$2" = KILL ] || exit 0
	if [ -n "$some" ]; then none=; elif [ -n "$none" ]; then exit 0; else none=1; fi
	[ $i -lt 3 ] || sleep 0.1 2>/dev/null || sleep 1
done
exit 3`

// signal runs killScript in a container.
func (en *Engine) signal(ctx context.Context, id, cookie, sig string) (sandboxer.Exit, error) {
	return en.Host.Ask(ctx, sshrun.Cmd{Args: []string{en.Program, "exec", "-u", "0", id, "sh", "-c", killScript, "sh", cookie, sig, sshrun.Tag(cookie)}, Env: en.Env})
}

// killCommand ends what a command started, inside; where there is no shell inside, or an engine
// that does not answer, from the host, which works if the account there may. What an engine
// could not be asked it is asked when it answers again.
func (en *Engine) killCommand(ctx context.Context, id, cookie string) {
	inside := func(ctx context.Context) (sandboxer.Exit, error) {
		return en.signal(ctx, id, cookie, "KILL")
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
	if unasked || err != nil || exit.Code == 126 || exit.Code == 127 || exit.Code == 3 {
		err = limited(func(ctx context.Context) error { return en.Host.Kill(ctx, execVariable, cookie) })
	}
	if err != nil {
		en.log().Warn("a command that was given up may still run", "container", id, "err", err)
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
			_, err := en.signal(kctx, id, cookie, strconv.Itoa(int(sig)))
			cancel()
			if err != nil {
				en.log().Debug("a signal was not delivered", "container", id, "err", err)
			}
		case <-stop:
			return
		}
	}
}
