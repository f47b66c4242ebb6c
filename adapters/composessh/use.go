package composessh

import (
	"archive/tar"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/composessh/composefile"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/procnet"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// unit returns the container of a service.
func (e *extension) unit(ctx context.Context, h *host, m *meta, service string) (string, error) {
	e.mu.Lock()
	id := e.units[m.Name][service]
	e.mu.Unlock()
	if id != "" {
		return id, nil
	}
	out, err := h.engine.Script(ctx, nil, nil, containers, h.known.engine, m.Name, service)
	if err != nil {
		return "", err
	}
	list, shell, _ := strings.Cut(out, "shell ")
	ids := strings.Fields(list)
	if len(ids) == 0 {
		return "", sandboxer.E(sandboxer.NotFound, nil, "sandbox %s has no container of the service %s any more", m.ID, service)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.units[m.Name] == nil {
		e.units[m.Name] = map[string]string{}
	}
	e.units[m.Name][service] = ids[len(ids)-1] // the oldest: the first replica
	if shell = strings.TrimSpace(shell); shell == "126" || shell == "127" {
		e.bare[ids[len(ids)-1]] = true
	}
	return ids[len(ids)-1], nil
}

// containers prints the containers of the service $3 of $2, and how a shell in the last of
// them ended: 126 or 127 where there is none.
const containers = `
ids=$("$1" ps -aq --no-trunc --filter "label=dev.sandboxer.name=$2" --filter "label=dev.sandboxer.service=$3") || exit
[ -n "$ids" ] || exit 0
echo "$ids"
"$1" exec "${ids##*
}" sh -c : >/dev/null 2>&1
echo "shell $?"`

// hasShell reports whether there may be a shell in a container that unit returned.
func (e *extension) hasShell(id string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return !e.bare[id]
}

func (e *extension) drop(name string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.unknow(name)
}

// unknow forgets what is known of a sandbox. The caller holds e.mu.
func (e *extension) unknow(name string) {
	for _, id := range e.units[name] {
		delete(e.bare, id)
		delete(e.ooms, id)
	}
	delete(e.units, name)
	delete(e.metas, name)
}

// Services implements sandboxer.Serviced.
func (e *extension) Services(ctx context.Context, h sandboxer.Handle) ([]string, error) {
	_, m, err := e.find(ctx, h)
	if err != nil {
		return nil, err
	}
	if m.Name == "" {
		return nil, gone(h)
	}
	return m.names(), nil
}

// names are those of the services, the default one first.
func (m *meta) names() []string {
	names := []string{m.Service}
	for _, s := range m.Services {
		if s.Name != m.Service {
			names = append(names, s.Name)
		}
	}
	return names
}

// Exec implements sandboxer.Execer.
func (e *extension) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	exit, err := e.execOnce(ctx, h, cmd)
	// A sandbox that has all its processes may have one less soon. Nothing ran yet, and no
	// input was taken.
	for end := time.Now().Add(5 * time.Second); sandboxer.KindOf(err) == sandboxer.Exhausted && cmd.Stdin == nil && cmd.TTY == nil && time.Now().Before(end); {
		select {
		case <-ctx.Done():
			return exit, ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
		exit, err = e.execOnce(ctx, h, cmd)
	}
	if errors.Is(err, errStale) { // what was known of it is not so any more
		if exit, err = e.execOnce(ctx, h, cmd); errors.Is(err, errStale) {
			err = gone(h)
		}
	}
	return exit, err
}

func (e *extension) execOnce(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	if m.Name == "" {
		return sandboxer.Exit{}, gone(h)
	}
	service := cmp.Or(cmd.Service, m.Service)
	if m.service(service) == nil {
		return sandboxer.Exit{}, sandboxer.E(sandboxer.Invalid, nil, "sandbox %s has no service %q", m.ID, service).WithHint("it has %s", strings.Join(m.names(), ", "))
	}
	exit, err := e.exec(ctx, ho, m, service, cmd)
	if errors.Is(err, errStale) {
		e.drop(m.Name)
	}
	return exit, err
}

var (
	errStale    = errors.New("the container is not there")
	errNoEngine = errors.New("the engine is not there")
)

// carried returns args in a form that reaches a container as it is. An engine's API is
// JSON, in which bytes that are no UTF-8 become something else; a shell inside makes them
// out of what printf's %b reads.
func carried(args []string) []string {
	if !slices.ContainsFunc(args, func(a string) bool { return !utf8.ValidString(a) }) {
		return args
	}
	out := []string{"sh", "-c", `i=$#; while [ "$i" -gt 0 ]; do a=$(printf %b. "$1"); shift; set -- "$@" "${a%.}"; i=$((i-1)); done; exec "$@"`, "sh"}
	for _, a := range args {
		var b strings.Builder
		for _, c := range []byte(a) {
			if c == '\\' || c < ' ' || c > '~' {
				fmt.Fprintf(&b, `\0%03o`, c)
			} else {
				b.WriteByte(c)
			}
		}
		out = append(out, b.String())
	}
	return out
}

func (e *extension) exec(ctx context.Context, h *host, m *meta, service string, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	id, err := e.unit(ctx, h, m, service)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	outer, done, err := h.engine.Watch.Attend(ctx)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	exit, err := e.command(outer, h, m, service, id, cmd)
	return exit, done(err)
}

// command runs cmd in the container id, until ctx ends.
func (e *extension) command(ctx context.Context, h *host, m *meta, service, id string, cmd sandboxer.Cmd) (exit sandboxer.Exit, err error) {
	cookie := rand.Text()
	args := []string{h.known.engine, "exec"}
	stdin := cmd.Stdin
	if cmd.TTY != nil && stdin == nil {
		stdin = hangUp{ctx, time.Now().Add(500 * time.Millisecond)}
	}
	if stdin != nil {
		args = append(args, "-i")
	}
	if cmd.TTY != nil {
		args = append(args, "-t")
	}
	user := cmd.User
	if user == "" {
		user = m.User
	}
	if user != "" {
		args = append(args, "-u", user)
	}
	dir := cmd.Dir
	if s := m.service(service); dir == "" && s != nil {
		dir = s.Workspace
	}
	if dir != "" {
		args = append(args, "-w", dir)
	}
	env := map[string]string{}
	if e.cfg.Engine != "" {
		maps.Copy(env, e.engineEnv())
	}
	args = append(args, variables("-e", cmd.Env, env)...)
	args = append(args, "-e", "SANDBOXER_EXEC="+cookie, id)
	switch {
	case cmd.TTY != nil:
		// The engine sets the size of a terminal a little after the command began.
		args = append(args, "sh", "-c", sshrun.Tagging(sshrun.Tag(cookie))+`stty rows "$1" cols "$2" 2>/dev/null; shift 2; exec "$@"`, "sh", strconv.Itoa(int(cmd.TTY.Rows)), strconv.Itoa(int(cmd.TTY.Cols)))
	case e.hasShell(id):
		args = append(args, "sh", "-c", sshrun.Tagging(sshrun.Tag(cookie))+`exec "$@"`, "sh")
	}
	args = append(args, carried(cmd.Args)...)

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := &guard{w: cmd.Stdout, failed: cancel, heard: h.engine.Watch.Heard}
	errs := &guard{w: cmd.Stderr, failed: cancel, heard: out.heard}
	if cmd.Signals != nil {
		stop := make(chan struct{})
		done := make(chan struct{})
		defer func() { close(stop); <-done }()
		go func() { defer close(done); e.forward(ctx, h, id, cookie, cmd.Signals, stop) }()
	}
	rc := sshrun.Cmd{Args: args, Env: env, TTY: cmd.TTY, Stdin: stdin, Stdout: out, Stderr: errs}
	if cmd.Resize != nil {
		rc.Resize = repeatFirstSizes(ctx, cmd.Resize)
	}
	type end struct {
		exit sandboxer.Exit
		err  error
	}
	ended := make(chan end, 1)
	go func() {
		exit, err := h.Run(ctx, rc)
		ended <- end{exit, err}
	}()
	select {
	case en := <-ended:
		exit, err = en.exit, en.err
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		e.killCommand(ctx, h, id, cookie)
		// Somebody who does not take the output must not keep this from returning.
		select {
		case en := <-ended:
			err = en.err
		case <-time.After(2 * time.Second):
		}
		if c := context.Cause(ctx); errors.Is(c, errWriter) {
			return sandboxer.Exit{}, c
		}
		if err == nil {
			err = ctx.Err()
		}
	}
	if err != nil {
		return sandboxer.Exit{}, err
	}
	said := out.held() + errs.held()
	kind, err := exitOf(exit, said, dir, user)
	if errors.Is(err, errNoEngine) { // a command may say the same of an engine inside
		if _, err := h.engine.Script(ctx, nil, nil, `"$1" version >/dev/null`, h.known.engine); err != nil {
			return sandboxer.Exit{}, err
		}
		err = nil
	}
	if err != nil {
		if errors.Is(err, errStale) {
			return sandboxer.Exit{}, e.stale(ctx, h, m, id)
		}
		return sandboxer.Exit{}, err
	} else if kind.Code != 0 {
		to := cmd.Stderr
		if cmd.TTY != nil || to == nil {
			to = cmd.Stdout
		}
		if to != nil {
			text := "command not found"
			if kind.Code == 126 {
				text = "cannot be executed"
			}
			fmt.Fprintf(to, "sandboxer: %s: %s\n", cmd.Args[0], text)
		}
		return kind, nil
	}
	out.release()
	errs.release()
	if exit.Code == 137 {
		exit.OOMKilled = e.killedForMemory(ctx, h, id)
	}
	return exit, nil
}

// oomKills prints how many processes of the container $2 were killed for memory so far.
const oomKills = `
p=$("$1" inspect --format '{{.State.Pid}}' "$2") && [ "$p" -gt 0 ] || exit 0
while IFS=: read -r n c g; do
	case ,$c, in
	,,) sed -n 's/^oom_kill //p' "/sys/fs/cgroup$g/memory.events" 2>/dev/null;;
	*,memory,*) sed -n 's/^oom_kill //p' "/sys/fs/cgroup/memory$g/memory.oom_control" 2>/dev/null;;
	esac
done <"/proc/$p/cgroup"
exit 0`

// killedForMemory reports whether more processes of a container were killed for memory
// than when it was asked last.
func (e *extension) killedForMemory(ctx context.Context, h *host, id string) bool {
	out, err := h.engine.Script(ctx, nil, nil, oomKills, h.known.engine, id)
	if err != nil {
		return false
	}
	n := 0
	for f := range strings.FieldsSeq(out) {
		if k, err := strconv.Atoi(f); err == nil {
			n += k
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	more := n > e.ooms[id]
	e.ooms[id] = n
	return more
}

// hangUp is the input of a terminal that nobody types at: an end, once the terminal is
// there to take it, again and again.
type hangUp struct {
	ctx  context.Context
	from time.Time
}

func (r hangUp) Read(p []byte) (int, error) {
	select {
	case <-r.ctx.Done():
		return 0, io.EOF
	case <-time.After(max(time.Until(r.from), 200*time.Millisecond)):
	}
	p[0] = 4
	return 1, nil
}

// stale tells why a command cannot run in a container.
func (e *extension) stale(ctx context.Context, h *host, m *meta, id string) error {
	out, err := h.engine.Script(ctx, nil, nil, `"$1" inspect --format '{{.State.Status}} {{.State.Paused}}' "$2" 2>/dev/null || "$1" version >/dev/null`, h.known.engine, id)
	switch {
	case err != nil:
		return err
	case strings.Contains(out, "paused") || strings.Contains(out, "true"):
		return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is paused", m.ID).WithHint("resume it first: sandboxer resume %s", m.ID)
	case strings.TrimSpace(out) == "":
		return errStale
	}
	return sandboxer.E(sandboxer.NotFound, nil, "the service that commands run in has ended in sandbox %s (%s)", m.ID, strings.Fields(out)[0])
}

// openings are how the engines' own messages begin.
var openings = []string{"OCI runtime exec failed", "unable to find user ", "Error response from daemon: ", "Error: ", "unable to start container process", "unable to upgrade to tcp",
	"Cannot connect to the Docker daemon", "failed to connect to the docker API", "Cannot connect to Podman"}

// exitOf tells an engine's failure to start a command from what a command did.
func exitOf(exit sandboxer.Exit, said, dir, user string) (sandboxer.Exit, error) {
	if said == "" || exit.Code != 1 && exit.Code != 125 && exit.Code != 126 && exit.Code != 127 && exit.Code != 255 {
		return sandboxer.Exit{}, nil
	}
	low := strings.ToLower(said)
	has := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(low, w) })
	}
	if has("cannot connect to the docker daemon", "failed to connect to the docker api", "cannot connect to podman") {
		return sandboxer.Exit{}, errNoEngine
	}
	oci := has("oci runtime", "unable to start container process", "crun:", "runc:")
	switch {
	case has("no such container", "no container with", "is not running", "is paused", "only create exec sessions on running", "container state improper"):
		return sandboxer.Exit{}, errStale
	case has("unable to find user", "no matching entries in passwd", "unable to find group"):
		return sandboxer.Exit{}, sandboxer.E(sandboxer.Invalid, nil, "there is no user %q inside", user)
	case oci && has("chdir to cwd", "no such file or directory: oci runtime attempted to invoke", "workdir"):
		if has("chdir to cwd", "workdir") {
			return sandboxer.Exit{}, sandboxer.E(sandboxer.Invalid, nil, "%s is not a directory inside that can be entered", dir)
		}
		return sandboxer.Exit{Code: 127}, nil
	case oci && has("executable file not found", "no such file or directory", "not found"):
		return sandboxer.Exit{Code: 127}, nil
	case oci && has("permission denied", "is a directory", "exec format error", "not a directory"):
		return sandboxer.Exit{Code: 126}, nil
	case oci && has("resource temporarily unavailable", "cannot fork", "try again", "read init-p", "errno 11", "newosproc"):
		return sandboxer.Exit{}, sandboxer.E(sandboxer.Exhausted, errors.New(said), "the sandbox has no process left to start a command with")
	case oci && has("procready", "broken pipe", "unexpected eof", "cannot allocate", "cgroup"):
		return sandboxer.Exit{}, errStale // it ended just then
	}
	return sandboxer.Exit{}, nil
}

var errWriter = errors.New("the output could not be written")

// A guard passes on what is written to it, but for an opening line that may be the
// engine's message instead of the command's: that waits until more comes or all ends.
type guard struct {
	w      io.Writer
	buf    []byte
	open   bool
	failed context.CancelCauseFunc
	heard  func() // called with every output, if set
}

func (g *guard) Write(p []byte) (int, error) {
	if g.heard != nil {
		g.heard()
	}
	if !g.open {
		g.buf = append(g.buf, p...)
		line := strings.IndexByte(string(g.buf), '\n')
		if (line < 0 || line >= len(g.buf)-2) && len(g.buf) < 8<<10 && slices.ContainsFunc(openings, func(o string) bool {
			n := min(len(o), len(g.buf))
			return string(g.buf[:n]) == o[:n]
		}) {
			return len(p), nil
		}
		return len(p), g.release()
	}
	if g.w == nil {
		return len(p), nil
	}
	n, err := g.w.Write(p)
	if err != nil {
		g.failed(fmt.Errorf("%w: %w", errWriter, err))
	}
	return n, err
}

func (g *guard) release() error {
	g.open = true
	if g.w == nil || len(g.buf) == 0 {
		return nil
	}
	b := g.buf
	g.buf = nil
	if _, err := g.w.Write(b); err != nil {
		g.failed(fmt.Errorf("%w: %w", errWriter, err))
		return err
	}
	return nil
}

func (g *guard) held() string {
	if g.open {
		return ""
	}
	return string(g.buf)
}

// repeatFirstSizes passes sizes of a terminal on, those of its beginning more than once. The engine's
// command heeds changes only after it has told the engine the first size, and a terminal
// in a browser has its true size just then.
func repeatFirstSizes(ctx context.Context, sizes <-chan sandboxer.WinSize) <-chan sandboxer.WinSize {
	to := make(chan sandboxer.WinSize)
	go func() {
		send := func(s sandboxer.WinSize) {
			select {
			case to <- s:
			case <-ctx.Done():
			}
		}
		begin := time.Now()
		var last sandboxer.WinSize
		var again <-chan time.Time
		for {
			select {
			case s, ok := <-sizes:
				if !ok {
					sizes = nil
					continue
				}
				send(s)
				if last = s; time.Since(begin) < sizeTime {
					again = time.After(sizeAgain)
				}
			case <-again:
				other := last // what does not change is not heeded
				other.Rows++
				send(other)
				select { // nor what is changed back before anybody looks
				case <-time.After(sizeSeen):
				case <-ctx.Done():
				}
				send(last)
				if again = nil; time.Since(begin) < sizeTime {
					again = time.After(2 * sizeAgain)
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return to
}

const (
	sizeTime  = 3 * time.Second // the beginning of a terminal
	sizeAgain = time.Second
	sizeSeen  = 250 * time.Millisecond
)

// killScript, inside, ends what carries the cookie $1 or the tag $3, or sends the signal $2 to the
// first of it, which has no parent inside. It looks twice before it believes that there
// is none: in the middle of an execve a process has no environment.
const killScript = `
none=
for i in 1 2 3 4 5 6 7 8 9 10; do
	some= t=" $(grep -ls "^Max file locks .* $3 " /proc/[0-9]*/limits 2>/dev/null | tr '\n' ' ') "
	for f in /proc/[0-9]*; do
		case $t in *" $f/limits "*) ;; *) tr '\0' '\n' <"$f/environ" 2>/dev/null | grep -qxF "SANDBOXER_EXEC=$1" || continue;; esac
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

// killTime bounds ending a command whose context is over.
const killTime = 10 * time.Second

// killCommand ends what a command started, inside; where there is no shell inside, or an engine
// that does not answer, from the host, which works if the account there may. What an engine
// could not be asked it is asked when it answers again.
func (e *extension) killCommand(ctx context.Context, h *host, id, cookie string) {
	inside := func(ctx context.Context) (sandboxer.Exit, error) {
		return h.Ask(ctx, sshrun.Cmd{Args: []string{h.known.engine, "exec", "-u", "0", id, "sh", "-c", killScript, "sh", cookie, "KILL", sshrun.Tag(cookie)}, Env: e.engineEnv()})
	}
	limited := func(f func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
		defer cancel()
		return f(ctx)
	}
	exit, err := sandboxer.Exit{}, error(nil)
	unasked := h.engine.Watch.Hangs()
	if !unasked {
		err = limited(func(ctx context.Context) (err error) { exit, err = inside(ctx); return err })
		unasked = sandboxer.KindOf(err) == sandboxer.Timeout
	}
	if unasked {
		h.engine.Watch.Owe(func(ctx context.Context) error { _, err := inside(ctx); return err })
	}
	if unasked || err != nil || exit.Code == 126 || exit.Code == 127 || exit.Code == 3 {
		err = limited(func(ctx context.Context) error { return h.Kill(ctx, "SANDBOXER_EXEC", cookie) })
	}
	if err != nil && e.env.Log != nil {
		e.env.Log.Warn("a command that was given up may still run", "extension", e.env.Extension, "host", h.Name(), "container", id, "err", err)
	}
}

// forward sends signals to a command.
func (e *extension) forward(ctx context.Context, h *host, id, cookie string, signals <-chan os.Signal, stop <-chan struct{}) {
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
			_, err := h.Ask(kctx, sshrun.Cmd{Args: []string{h.known.engine, "exec", "-u", "0", id, "sh", "-c", killScript, "sh", cookie, strconv.Itoa(int(sig)), sshrun.Tag(cookie)}, Env: e.engineEnv()})
			cancel()
			if err != nil && e.env.Log != nil {
				e.env.Log.Debug("a signal was not delivered", "extension", e.env.Extension, "host", h.Name(), "err", err)
			}
		case <-stop:
			return
		}
	}
}

// below returns what dir, a place inside, is below the workspace.
func (m *meta) below(dir string) (string, error) {
	s := m.service(m.Service)
	if dir == "" {
		return ".", nil
	}
	if s != nil && s.Workspace != "" {
		if dir == s.Workspace {
			return ".", nil
		}
		if rest, ok := strings.CutPrefix(dir, strings.TrimSuffix(s.Workspace, "/")+"/"); ok {
			return rest, nil
		}
	}
	return "", sandboxer.E(sandboxer.Unsupported, nil, "only the workspace can be archived, and %s is not below it", dir).
		WithHint("pack it inside: sandboxer exec %s -- tar -C %s -cf - .", m.ID, dir)
}

// enter goes to $2 below the workspace $1, without being led out of it; it stays where
// it is whatever is moved there afterwards.
const enter = `
cd -P -- "$1" || exit 40
root=$(pwd -P)
# What is made belongs to whom the workspace does.
o=$(ls -nd . | awk '{ print $3 ":" $4 }')
own() { [ "$(id -u)" != 0 ] || [ "$o" = 0:0 ] || chown -h "$o" "$@"; }
[ -e "./$2" ] || [ -n "$make" ] || exit 44
[ ! -e "./$2" ] || [ -d "./$2" ] || exit 46
[ -z "$make" ] || {
	rest=$2/
	while [ -n "$rest" ]; do
		part=${rest%%/*} rest=${rest#*/}
		[ -L "$part" ] && exit 45
		[ -d "$part" ] || { mkdir -- "$part" && own -- "$part"; } || exit
		cd -P -- "$part" || exit 47
	done
	cd -P -- "$root" || exit
}
cd -P -- "./$2" 2>/dev/null || exit 47
case $(pwd -P)/ in "$root"/*) ;; *) exit 45;; esac
`

func (e *extension) archiveError(h *host, code int, dir, said string) error {
	if dir == "" {
		dir = "the workspace"
	}
	switch code {
	case 40:
		return sandboxer.E(sandboxer.NotFound, nil, "the workspace is gone from host %s", h.Name())
	case 44:
		return sandboxer.E(sandboxer.NotFound, nil, "%s does not exist", dir)
	case 45:
		return sandboxer.E(sandboxer.Invalid, nil, "%s is behind a link that leads out of the workspace", dir)
	case 46:
		return sandboxer.E(sandboxer.Invalid, nil, "%s: there is a file where a directory is expected", dir)
	case 47:
		return sandboxer.E(sandboxer.Denied, nil, "%s may not be read by the account on host %s", dir, h.Name())
	}
	if strings.Contains(said, "Permission denied") || strings.Contains(said, "Operation not permitted") {
		return sandboxer.E(sandboxer.Denied, errors.New(said), "a file in %s may not be touched by the account on host %s", dir, h.Name()).
			WithHint("let the services write as that account's user, or give sandboxer an account that may")
	}
	return e.failed(h, "the archive of "+dir, said, nil)
}

// Archive implements sandboxer.Archiver. It reads on the host, so that images need no
// tools; the services go on meanwhile.
func (e *extension) Archive(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return err
	}
	if m.Name == "" {
		return gone(h)
	}
	rel, err := m.below(dir)
	if err != nil {
		return err
	}
	return e.archive(ctx, ho, m, rel, dir, w)
}

// archive writes the directory rel below the workspace, which is called dir, as a tar.
func (e *extension) archive(ctx context.Context, ho *host, m *meta, rel, dir string, w io.Writer) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := &guard{w: w, open: true, failed: cancel}
	var said strings.Builder
	exit, err := ho.Run(ctx, sshrun.Cmd{Script: enter + `LC_ALL=C exec tar -cf - .`, Args: []string{path.Join(ho.known.root, m.Name, "repo"), rel}, Stdout: out, Stderr: engine.Last(&said)})
	if c := context.Cause(ctx); errors.Is(c, errWriter) {
		return sandboxer.E(sandboxer.Unavailable, c, "the archive could not be written")
	}
	if err != nil {
		return err
	}
	if exit.Code == 1 && onlyChanged(said.String()) || exit.Code == 0 {
		return nil
	}
	return e.archiveError(ho, exit.Code, dir, said.String())
}

// onlyChanged reports whether tar complained of nothing but files that changed while
// they were read.
func onlyChanged(said string) bool {
	for line := range strings.Lines(said) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasSuffix(line, "file changed as we read it") && !strings.HasSuffix(line, "File removed before we read it") && !strings.HasSuffix(line, "socket ignored") {
			return false
		}
	}
	return said != ""
}

// Unarchive implements sandboxer.Archiver. The services stand still while files are
// written on the host: none of them can put a link where a directory was looked at.
func (e *extension) Unarchive(ctx context.Context, h sandboxer.Handle, dir string, r io.Reader) (err error) {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return err
	}
	if m.Name == "" {
		return gone(h)
	}
	rel, err := m.below(dir)
	if err != nil {
		return err
	}
	thaw, err := e.freeze(ctx, ho, m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, thaw()) }()
	return e.refill(ctx, ho, path.Join(ho.known.root, m.Name, "repo"), rel, dir, m.Places, r)
}

// refill makes the directory rel below the workspace root, which is called dir, hold what
// the tar r holds, and nothing else. places are those below root that must stay what they
// are: directories, which are kept, though empty, and files, with true.
func (e *extension) refill(ctx context.Context, ho *host, root, rel, dir string, places map[string]bool, r io.Reader) error {
	stay := map[string]bool{}
	keep := ""
	for _, p := range slices.Sorted(maps.Keys(places)) {
		rest, in := strings.CutPrefix(p, rel+"/")
		if rel == "." {
			rest, in = p, true
		}
		if in {
			stay[rest] = places[p]
			if !places[p] {
				keep += " ! -path " + sshrun.Quote("./"+pattern.Replace(rest))
			}
		}
	}
	pr, pw := io.Pipe()
	checked := make(chan error, 1)
	go func() {
		err := filterTar(r, pw, stay)
		checked <- err
		pw.CloseWithError(err)
	}()
	var said strings.Builder
	exit, err := ho.Run(ctx, sshrun.Cmd{Script: "make=1\n" + enter + `
find . -xdev -mindepth 1 -depth` + keep + ` -delete 2>/dev/null || find . -xdev -depth ! -name .` + keep + ` ! -type d -exec rm -f {} + || exit
find . -xdev -depth ! -name .` + keep + ` -type d -exec rmdir {} + || exit
LC_ALL=C tar -xpo -f - || exit
own -R -- .`, Args: []string{root, rel}, Stdin: pr, Stderr: engine.Last(&said)})
	pr.CloseWithError(errors.New("nobody reads any more"))
	select {
	case cerr := <-checked:
		if cerr != nil && ctx.Err() == nil && (err != nil || exit.Code == 0 || sandboxer.KindOf(cerr) != sandboxer.Internal) {
			return cerr
		}
	case <-ctx.Done():
	}
	if err != nil {
		return err
	}
	if exit.Code != 0 {
		return e.archiveError(ho, exit.Code, dir, said.String())
	}
	return nil
}

// pattern protects what find -path takes for a pattern.
var pattern = strings.NewReplacer(`*`, `\*`, `?`, `\?`, `[`, `\[`, `\`, `\\`)

// filterTar passes on the files of a tar that stay in the directory that it is unpacked in:
// a name that leads out, also by way of a link in the archive, is refused.
// What stay names, with true for files, is of its kind there or missing.
func filterTar(r io.Reader, w io.Writer, stay map[string]bool) error {
	in, out := tar.NewReader(r), tar.NewWriter(w)
	links, files := map[string]bool{}, map[string]bool{}
	for {
		hdr, err := in.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "the archive cannot be read")
		}
		name := path.Clean(strings.TrimPrefix(hdr.Name, "./"))
		if name == "." {
			continue
		}
		bad := path.IsAbs(name) || name == ".." || strings.HasPrefix(name, "../")
		for d := path.Dir(name); d != "." && d != "/" && !bad; d = path.Dir(d) {
			bad = links[d]
		}
		if bad {
			return sandboxer.E(sandboxer.Invalid, nil, "the archive has the name %q, which leads out of it", hdr.Name)
		}
		clean := &tar.Header{Name: name, Typeflag: hdr.Typeflag, Mode: hdr.Mode & 0o777, ModTime: hdr.ModTime.Truncate(time.Second), Format: tar.FormatGNU}
		if file, mounted := stay[name]; mounted && hdr.Typeflag != tar.TypeDir && (!file || hdr.Typeflag != tar.TypeReg) {
			return sandboxer.E(sandboxer.Invalid, nil, "%q is mounted in a service and must stay a directory or file, as it was; the archive has something else there", name)
		} else if mounted && file && hdr.Typeflag == tar.TypeDir {
			return sandboxer.E(sandboxer.Invalid, nil, "%q is mounted in a service and must stay a file; the archive has a directory there", name)
		}
		delete(links, name)
		switch hdr.Typeflag {
		case tar.TypeReg:
			clean.Size, files[name] = hdr.Size, true
		case tar.TypeDir:
			clean.Name += "/"
		case tar.TypeSymlink:
			clean.Linkname, links[name] = hdr.Linkname, true
		case tar.TypeLink:
			if clean.Linkname = path.Clean(strings.TrimPrefix(hdr.Linkname, "./")); !files[clean.Linkname] {
				return sandboxer.E(sandboxer.Invalid, nil, "the archive has the link %q to what is not in it", hdr.Name)
			}
			files[name] = true
		default:
			continue // sockets, pipes and devices
		}
		if err := out.WriteHeader(clean); err != nil {
			return err
		}
		if hdr.Typeflag == tar.TypeReg {
			if _, err := io.Copy(out, in); err != nil {
				return sandboxer.E(sandboxer.Invalid, err, "the archive cannot be read")
			}
		}
	}
	return out.Close()
}

// pausing applies $4 to the containers of $2 that are in the state $3.
const pausing = `
ids=$("$1" ps -q --no-trunc --filter "label=dev.sandboxer.name=$2" --filter "status=$3") || exit
[ -z "$ids" ] || "$1" "$4" $ids >/dev/null`

// Pause implements sandboxer.Pauser: the engine freezes every container.
func (e *extension) Pause(ctx context.Context, h sandboxer.Handle) error {
	return e.pauses(ctx, h, "running", "pause")
}

// Resume implements sandboxer.Pauser.
func (e *extension) Resume(ctx context.Context, h sandboxer.Handle) error {
	return e.pauses(ctx, h, "paused", "unpause")
}

func (e *extension) pauses(ctx context.Context, h sandboxer.Handle, from, verb string) error {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return err
	}
	if m.Name == "" {
		return gone(h)
	}
	s, err := e.see(ctx, ho, m.Name)
	if err != nil {
		return err
	}
	if len(s.units) == 0 {
		return gone(h)
	}
	_, err = ho.engine.Script(ctx, nil, nil, pausing, ho.known.engine, m.Name, from, verb)
	return err
}

// listeners prints which of the addresses $2… are on a network of the host itself (what
// has that address elsewhere is somebody else), and who listens in the network of process
// $1, as /proc has it.
const listeners = `
p=$1; shift
for a; do
	r=$(ip route get "$a" 2>/dev/null) || continue
	case $r in ""|*" via "*) ;; *) echo "near $a";; esac
done
cat "/proc/$p/net/tcp" "/proc/$p/net/tcp6" 2>/dev/null
exit 0`

// Dial implements sandboxer.Dialer. A port that the file publishes is the one inside;
// any other belongs to the default service.
func (e *extension) Dial(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return nil, err
	}
	if m.Name == "" {
		return nil, gone(h)
	}
	service, target := m.target(port)
	s, err := e.see(ctx, ho, m.Name)
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(s.units, func(u unit) bool { return u.service() == service && u.State.Running })
	if len(s.units) == 0 {
		return nil, gone(h)
	}
	nobody := sandboxer.E(sandboxer.Unavailable, nil, "nothing listens on port %d of the service %s", target, service)
	if at < 0 {
		return nil, nobody
	}
	u := &s.units[at]
	addrs, published := s.network(u).addrs(target)
	out, err := e.script(ctx, ho, nil, nil, listeners, append([]string{strconv.Itoa(u.State.Pid)}, addrs...)...)
	if err != nil {
		return nil, err
	}
	known, loopback, wide := listening(out, target)
	if known && !loopback && !wide {
		return nil, nobody
	}
	var failed error = nobody
	if !known || wide {
		var ways []string
		for _, a := range addrs {
			if strings.Contains(out, "near "+a+"\n") {
				ways = append(ways, net.JoinHostPort(a, strconv.Itoa(target)))
			}
		}
		if ho.known.engine != "podman" {
			ways = append(ways, published...)
		}
		for _, addr := range ways {
			c, err := ho.Dial(ctx, "tcp", addr)
			if err == nil {
				return c, nil
			}
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			failed = err
		}
	}
	c, err := e.dialInside(ctx, ho, u.ID, target)
	if err == nil || sandboxer.KindOf(err) != sandboxer.Unavailable || ctx.Err() != nil || !wide {
		return c, err
	}
	// Podman holds a published port also where nothing leads from it into the sandbox.
	for _, addr := range published {
		if c, err := ho.Dial(ctx, "tcp", addr); err == nil {
			return c, nil
		}
	}
	return nil, sandboxer.E(sandboxer.Unavailable, errors.Join(failed, err), "port %d of the service %s cannot be reached", target, service).
		WithHint("an image with nc is reached in any case")
}

// addrs are the container's own addresses, and where the host has a port of it published.
func (u *unit) addrs(port int) (own, published []string) {
	for _, n := range u.NetworkSettings.Networks {
		if n.IPAddress != "" {
			own = append(own, n.IPAddress)
		}
	}
	slices.Sort(own)
	if len(own) == 0 && u.NetworkSettings.IPAddress != "" {
		own = append(own, u.NetworkSettings.IPAddress)
	}
	for _, p := range u.NetworkSettings.Ports[strconv.Itoa(port)+"/tcp"] {
		if p.HostPort != "" {
			published = append(published, net.JoinHostPort("127.0.0.1", p.HostPort))
		}
	}
	return own, published
}

// target says which port of which service is meant: one that the file publishes under
// that number, one that a service publishes as its own, or one of the default service.
func (m *meta) target(port int) (service string, target int) {
	services := slices.Clone(m.Services)
	slices.SortStableFunc(services, func(a, b composefile.Service) int {
		switch {
		case a.Name == m.Service && b.Name != m.Service:
			return -1
		case b.Name == m.Service && a.Name != m.Service:
			return 1
		}
		return 0
	})
	for _, s := range services {
		for _, p := range s.Ports {
			if p.Protocol == "tcp" && p.Published == port {
				return s.Name, p.Target
			}
		}
	}
	for _, s := range services {
		for _, p := range s.Ports {
			if p.Protocol == "tcp" && p.Target == port {
				return s.Name, port
			}
		}
	}
	return m.Service, port
}

// listening says who listens on a port, as the tables of sockets in what a host said have it.
func listening(said string, port int) (known, loopback, wide bool) {
	all, known := procnet.Listeners(strings.NewReader(said))
	for _, l := range all {
		if l.Port == port {
			loopback, wide = loopback || l.Loopback, wide || !l.Loopback
		}
	}
	return known, loopback, wide
}

// sockets prints, for every process that is named, its number and the tables of its sockets.
const sockets = `
for p; do
	echo "process $p"
	cat "/proc/$p/net/tcp" "/proc/$p/net/tcp6" 2>/dev/null | head -c 65536
	echo
done
exit 0`

// ListPorts implements sandboxer.PortLister: those of all services, by the numbers that Dial
// knows them by.
func (e *extension) ListPorts(ctx context.Context, h sandboxer.Handle) ([]int, error) {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return nil, err
	}
	if m.Name == "" {
		return nil, gone(h)
	}
	s, err := e.see(ctx, ho, m.Name)
	if err != nil {
		return nil, err
	}
	if len(s.units) == 0 {
		return nil, gone(h)
	}
	service, pids := map[string]string{}, []string{}
	for i := range s.units {
		u := &s.units[i]
		if pid := strconv.Itoa(u.State.Pid); u.State.Running && u.State.Pid > 0 {
			service[pid] = u.service()
			pids = append(pids, pid)
		}
	}
	out, err := e.script(ctx, ho, nil, nil, sockets, pids...)
	if err != nil {
		return nil, err
	}
	open := map[string]map[int]bool{} // ports that listen, by service
	numbers := map[int]bool{}         // those that may lead to one
	for part := range strings.SplitSeq("\n"+out, "\nprocess ") {
		pid, table, _ := strings.Cut(part, "\n")
		name := service[pid]
		list, known := procnet.Listeners(strings.NewReader(table))
		if name == "" || !known {
			continue
		}
		if open[name] == nil {
			open[name] = map[int]bool{}
		}
		for _, l := range list {
			open[name][l.Port] = true
			numbers[l.Port] = numbers[l.Port] || name == m.Service
		}
	}
	for _, s := range m.Services {
		for _, p := range s.Ports {
			numbers[p.Target], numbers[p.Published] = true, true
		}
	}
	var ports []int
	for n, may := range numbers {
		if name, target := m.target(n); may && n > 0 && open[name][target] {
			ports = append(ports, n)
		}
	}
	return ports, nil
}

// dialInside connects from within the container, with a tool that the image has.
func (e *extension) dialInside(ctx context.Context, h *host, id string, port int) (net.Conn, error) {
	out, err := h.engine.Script(ctx, nil, nil, `"$1" exec "$2" sh -c 'command -v nc || command -v busybox' 2>/dev/null || echo none`, h.known.engine, id)
	if err != nil {
		return nil, err
	}
	tool := strings.Fields(out)
	if len(tool) == 0 || tool[0] == "none" || !path.IsAbs(tool[0]) && tool[0] != "nc" {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "port %d is not open to the host, and the service's image has no nc to reach it from within", port).
			WithHint("have the service listen on 0.0.0.0, which its sandbox keeps to itself")
	}
	// An engine that cannot start the program says so in the stream. What comes after
	// the mark is the stream's own.
	args := []string{h.known.engine, "exec", "-i", id, "sh", "-c", `printf '\006'; exec "$@"`, "sh", tool[0]}
	if strings.HasSuffix(tool[0], "busybox") {
		args = append(args, "nc")
	}
	args = append(args, "127.0.0.1", strconv.Itoa(port))
	ctx, done, err := h.engine.Watch.Attend(ctx)
	if err != nil {
		return nil, err
	}
	c, err := e.tunnel(ctx, h, args, port)
	return c, done(err)
}

// tunnel opens a stream by way of a command, which first writes a mark.
func (e *extension) tunnel(ctx context.Context, h *host, args []string, port int) (net.Conn, error) {
	mine, theirs := net.Pipe()
	input, feed := net.Pipe()
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer cancel()
		h.Run(run, sshrun.Cmd{Args: args, Env: e.engineEnv(), Stdin: input, Stdout: theirs})
		theirs.Close()
		input.Close()
	}()
	t := &tunnel{Conn: mine, w: feed, end: cancel}
	stop := context.AfterFunc(ctx, func() { t.Close() })
	defer stop()
	var first [1]byte
	if _, err := io.ReadFull(mine, first[:]); err != nil || first[0] != '\006' || !stop() {
		t.Close()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the service ended while port %d was being reached", port)
	}
	return t, nil
}

// A tunnel is a stream by way of a command.
type tunnel struct {
	net.Conn          // what it says
	w        net.Conn // what it hears
	end      func()
}

func (t *tunnel) Write(p []byte) (int, error) { return t.w.Write(p) }

// CloseWrite ends what the other side hears.
func (t *tunnel) CloseWrite() error { return t.w.Close() }

func (t *tunnel) Close() error {
	err := errors.Join(t.w.Close(), t.Conn.Close())
	t.end()
	return err
}

func (t *tunnel) SetDeadline(at time.Time) error {
	return errors.Join(t.w.SetDeadline(at), t.Conn.SetDeadline(at))
}

func (t *tunnel) SetWriteDeadline(at time.Time) error { return t.w.SetWriteDeadline(at) }

// measure prints, for every process that is named, what its control groups say: cpu
// (nanoseconds), memory, pids, and the octets of its network. $1: directory to size.
const measure = `
echo "disk $(du -sk -- "$1" 2>/dev/null | cut -f1)"; shift
for p; do
	v1=
	while IFS=: read -r n c g; do
		case ,$c, in
		,,) [ -d "/sys/fs/cgroup$g" ] && d=/sys/fs/cgroup$g || { [ -d "/sys/fs/cgroup/unified$g" ] && d=/sys/fs/cgroup/unified$g || continue; }
			# Where both are mounted, which lists this one last, the old one has the controllers.
			[ -z "$v1" ] && [ -e "$d/cpu.stat" ] && sed -n 's/^usage_usec /cpu_us /p' "$d/cpu.stat"
			[ -e "$d/memory.current" ] && echo "mem $(cat "$d/memory.current")"
			[ -e "$d/pids.current" ] && echo "pids $(cat "$d/pids.current")";;
		*,cpuacct,*) for d in /sys/fs/cgroup/cpuacct /sys/fs/cgroup/cpu,cpuacct /sys/fs/cgroup/cpu; do [ ! -e "$d$g/cpuacct.usage" ] || { echo "cpu $(cat "$d$g/cpuacct.usage")"; v1=1; break; }; done;;
		*,memory,*) [ ! -e "/sys/fs/cgroup/memory$g/memory.usage_in_bytes" ] || echo "mem $(cat "/sys/fs/cgroup/memory$g/memory.usage_in_bytes")";;
		*,pids,*) [ ! -e "/sys/fs/cgroup/pids$g/pids.current" ] || echo "pids $(cat "/sys/fs/cgroup/pids$g/pids.current")";;
		esac
	done <"/proc/$p/cgroup"
	sed -n 's/^ *\([a-z][a-z]*[0-9]*\): */net \1 /p' "/proc/$p/net/dev" 2>/dev/null
done
exit 0`

// Stats implements sandboxer.StatsReader, over all containers. What a host does not tell is
// negative.
func (e *extension) Stats(ctx context.Context, h sandboxer.Handle) (st sandboxer.Stats, err error) {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return st, err
	}
	if m.Name == "" {
		return st, gone(h)
	}
	s, err := e.see(ctx, ho, m.Name)
	if err != nil {
		return st, err
	}
	if len(s.units) == 0 {
		return st, gone(h)
	}
	args := []string{path.Join(ho.known.root, m.Name)}
	for _, u := range s.units {
		if u.State.Pid > 0 {
			args = append(args, strconv.Itoa(u.State.Pid))
		}
		st.MemoryLimit += u.HostConfig.Memory
	}
	if slices.ContainsFunc(s.units, func(u unit) bool { return u.HostConfig.Memory == 0 }) {
		st.MemoryLimit = 0
	}
	out, err := e.script(ctx, ho, nil, nil, measure, args...)
	if err != nil {
		return st, err
	}
	st.At = time.Now()
	st.CPU, st.MemoryBytes, st.PIDs, st.DiskBytes, st.RxBytes, st.TxBytes = -1, -1, -1, -1, -1, -1
	add := func(to *int64, n int64) { *to = max(*to, 0) + n }
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		n, _ := strconv.ParseInt(f[1], 10, 64)
		switch f[0] {
		case "disk":
			st.DiskBytes = n * 1024
		case "cpu":
			add((*int64)(&st.CPU), n)
		case "cpu_us":
			add((*int64)(&st.CPU), n*1000)
		case "mem":
			add(&st.MemoryBytes, n)
		case "pids":
			add(&st.PIDs, n)
		case "net":
			if len(f) > 10 && f[1] != "lo" {
				rx, _ := strconv.ParseInt(f[2], 10, 64)
				tx, _ := strconv.ParseInt(f[10], 10, 64)
				add(&st.RxBytes, rx)
				add(&st.TxBytes, tx)
			}
		}
	}
	return st, nil
}
