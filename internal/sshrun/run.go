package sshrun

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/marked"
)

// Cmd is a command for a host, with its streams. Everything except Script is as in
// sandboxer.Cmd.
type Cmd struct {
	// Script is text for /bin/sh, with Args as its $1, $2 and so on. If it is empty,
	// Args is the command itself, found through PATH. Pass values to a script only as
	// arguments.
	Script string
	Args   []string
	Env    map[string]string
	Dir    string // empty means the account's home
	TTY    *sandboxer.WinSize
	// Raw leaves the terminal without echo, line editing and signals, for a command that is the client of another
	// terminal: what is typed before that command has changed the terminal itself would be changed on its way.
	Raw            bool
	Stdin          io.Reader // nil means no input
	Stdout, Stderr io.Writer // nil discards
	Resize         <-chan sandboxer.WinSize
	Signals        <-chan os.Signal
}

// These are the only text that the login shell sees, whichever shell it is: no newline, backslash, exclamation mark or single quote may be within the
// single quotes. ${IFS#??} is a newline. The first character distinguishes each line of the script
// from the end; without the end nothing is run. A bash takes a broken character
// at the end of a line together with that end, unless its locale knows no such characters. With a terminal the
// script must neither be echoed nor edited.
const (
	loop    = `s=;n=${IFS#??};while LC_ALL=C IFS= read -r l;do case $l in .)%seval "$s";exit;;esac;s=$s${l#?}$n;done;exit 125`
	begin   = `exec /bin/sh -c 'export "$1";`
	prompt  = `g=$(stty -g)&&stty raw -echo||exit 124;echo "${1#*=}.";`
	restore = `stty "$g";`
)

// runVar is the variable that marks what a command started.
const runVar = "SANDBOXER_RUN"

// boot is the command that runs the script that is sent to it. run, the value of SANDBOXER_RUN,
// is in the arguments of the shell too: others see a shell's own environment as it
// was at its start.
func boot(run string, tty, raw bool) string {
	script, change := begin, ""
	if tty {
		script += prompt
		if !raw {
			change = restore
		}
	}
	script += strings.Replace(loop, "%s", change, 1)
	return script + "' sh " + runVar + "=" + run
}

// text is the script that the boot loop runs for c. The command runs in a child that
// the shell waits for, since a shell can report 128+n for a child that a signal killed,
// where the control protocol of ssh could not; the traps let the shell outlive
// signals that are sent to the whole group. Descriptor 3 keeps the shell's own messages
// about such a child apart from the command's output.
func (c *Cmd) text(mark string) (string, error) {
	var b strings.Builder
	if err := errors.Join(checkWords("the command", c.Args...), checkWords("the script", c.Script), checkWords("the directory", c.Dir)); err != nil {
		return "", err
	}
	if c.Script == "" && (len(c.Args) == 0 || c.Args[0] == "") {
		return "", invalid("there is no command to run")
	}
	b.WriteString("trap : HUP INT QUIT TERM USR1 USR2\n")
	for _, k := range slices.Sorted(maps.Keys(c.Env)) {
		if err := errors.Join(checkName(k), checkWords("variable "+k, c.Env[k])); err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "export %s=%s\n", k, Quote(c.Env[k]))
	}
	if c.Dir != "" {
		// With CDPATH, cd could go elsewhere and print that.
		fmt.Fprintf(&b, "CDPATH= cd %s 2>/dev/null || { echo %s -; exit 125; }\n", Quote(dirWord(c.Dir)), mark)
	}
	if len(c.Args) > 0 {
		fmt.Fprintf(&b, "set -- %s\n", Quote(c.Args...))
	} else {
		b.WriteString("set --\n")
	}
	what := `exec "$@"`
	if c.Script != "" {
		what = "eval " + Quote(c.Script)
	}
	if c.TTY != nil {
		fmt.Fprintf(&b, "echo %s $$\n(%s)\nexit $?", mark, what)
	} else {
		fmt.Fprintf(&b, "echo %[1]s $$\necho %[1]s >&2\nexec 3>&2 2>/dev/null\n(exec 2>&3 3>&-\n%[2]s)\nexit $?", mark, what)
	}
	return b.String(), nil
}

func dirWord(dir string) string {
	if strings.HasPrefix(dir, "-") {
		return "./" + dir
	}
	return dir
}

// header is script in the form that the boot loop reads.
func header(script string) []byte {
	var b bytes.Buffer
	for line := range strings.SplitSeq(script, "\n") {
		b.WriteByte(':')
		b.WriteString(line)
		b.WriteByte('\n')
	}
	b.WriteString(".\n")
	return b.Bytes()
}

func token() string {
	var b [12]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// lateOutput is how long an ended command's outputs, held open by something that it
// started, may be silent before they are closed. A server reports the end of a command
// before it has passed on all that the command wrote, and a busy one may take longer than
// this for the rest: so a later command must have come to its end on the same connection, too.
const lateOutput = 500 * time.Millisecond

// ErrOutput is the cause of an error of Run that says that c's Stdout or Stderr failed.
var ErrOutput = errors.New("copying the command's output")

// Run runs c to its end, as sandboxer.Execer describes: a non-zero exit is a result,
// 127 is a command that does not exist, and when ctx ends c is killed with what it
// started, before Run returns, if the host can be reached to do it. Output that a
// remaining process writes after c has ended is lost. Invalid: c cannot be
// sent, or its Dir cannot be entered. ErrLost: the connection broke after c was sent.
func (h *Host) Run(ctx context.Context, c Cmd) (sandboxer.Exit, error) {
	return h.run(ctx, c, command)
}

// Ask runs c as Run does, in the sessions that are reserved for ending commands: it reaches the
// host even if commands have taken all others. It is for short questions.
func (h *Host) Ask(ctx context.Context, c Cmd) (sandboxer.Exit, error) {
	return h.run(ctx, c, spare)
}

func (h *Host) run(ctx context.Context, c Cmd, as use) (sandboxer.Exit, error) {
	mark, run := token(), token()
	text, err := c.text(mark)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	var s *session
	var l *link
	if err := ctx.Err(); err != nil {
		return sandboxer.Exit{}, failure(ctx, h.target, err, "a command")
	}
	if sh := h.takeShell(ctx, c.TTY); sh != nil {
		s, l, run = sh.session, sh.l, sh.run
	} else if s, l, err = h.start(ctx, boot(run, c.TTY != nil, c.Raw), c.TTY, as); err != nil {
		return sandboxer.Exit{}, err
	}
	text = marked.Tagging(marked.Tag(run)) + text
	defer h.release(l, false)
	defer s.close()
	h.settle()

	r := &running{h: h, c: &c, s: s, ready: make(chan struct{}), ended: make(chan struct{}), unheard: make(chan struct{})}
	defer close(r.ended)
	r.outputs.Add(1)
	out := &opening{mark: []byte(mark + " "), to: c.Stdout, ready: r.begun}
	if c.TTY != nil {
		out.mark, out.ready = []byte(run+"."), r.begun
		out.then = []byte(mark + " ")
	}
	r.out = out
	if c.TTY != nil {
		out.prompted = func() { go r.feed(header(text)) }
	}
	go r.copyOut(out, s.stdout())
	if c.TTY == nil {
		r.outputs.Add(1)
		go r.copyOut(&opening{mark: []byte(mark), to: c.Stderr}, s.stderr())
	}
	if c.TTY == nil {
		go r.feed(header(text))
	}
	if as == command {
		h.ready(l, 1)
		defer h.ready(l, shellsWaiting)
	}
	stop := make(chan struct{})
	var side sync.WaitGroup
	side.Go(func() { r.control(ctx, run, stop) })
	defer side.Wait()
	defer close(stop)

	over := false
	select {
	case e := <-s.exit():
		if r.drain(ctx, l) {
			return r.result(ctx, l, e, run)
		}
		if ctx.Err() == nil {
			s.close()
			return sandboxer.Exit{}, h.target.fault(ErrUnreachable, "its connections are closed")
		}
		over = true // except what it left behind
	case <-ctx.Done():
	case <-r.unheard:
	}
	if as == ending {
		// It ends on its own.
	} else if !h.kill(l, run, out.pid.Load()) {
		h.owe(run)
	} else if !over {
		select {
		case <-s.exit():
		case <-time.After(2 * time.Second):
		case <-l.done():
		}
	}
	s.close()
	// The reader of the output may have stopped reading.
	done := make(chan struct{})
	go func() { r.outputs.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(lateOutput):
	}
	if err := r.wfail.Load(); err != nil && ctx.Err() == nil {
		return sandboxer.Exit{}, fmt.Errorf("%w: %w", ErrOutput, *err)
	}
	return sandboxer.Exit{}, failure(ctx, h.target, ctx.Err(), "a command")
}

// running is a command under way.
type running struct {
	h       *Host
	c       *Cmd
	s       *session
	out     *opening
	ready   chan struct{} // closed when the script has begun
	ended   chan struct{} // closed when Run returns
	unheard chan struct{} // closed when an output could not be passed on
	once    sync.Once
	outputs sync.WaitGroup
	sent    atomic.Int64 // when the header went
	last    atomic.Int64 // when output was passed on last
	passing atomic.Int32 // outputs that are being read
	wfail   atomic.Pointer[error]
}

func (r *running) begun() {
	r.once.Do(func() {
		close(r.ready)
		if sent := r.sent.Load(); sent > 0 {
			r.h.answered(time.Since(time.Unix(0, sent)))
		}
	})
}

// feed sends the header and then the command's own input.
func (r *running) feed(header []byte) {
	w := r.s.stdin()
	r.sent.Store(time.Now().UnixNano())
	if _, err := w.Write(header); err == nil && r.c.Stdin != nil {
		io.Copy(w, r.c.Stdin)
	}
	if r.c.TTY == nil || r.c.Stdin != nil {
		w.Close()
		return
	}
	// A terminal signals the end of input by a character, and only once the script
	// runs: before, the terminal does not edit lines. A raw one passes it to the terminal behind the command.
	select {
	case <-r.ready:
		w.Write([]byte{4})
	case <-r.ended:
	}
}

func (r *running) copyOut(o *opening, from io.Reader) {
	defer r.outputs.Done()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			r.passing.Add(1)
			werr := o.write(buf[:n])
			r.last.Store(time.Now().UnixNano())
			r.passing.Add(-1)
			if werr != nil {
				if r.wfail.CompareAndSwap(nil, &werr) {
					close(r.unheard)
				}
			}
		}
		if err != nil {
			return
		}
	}
}

// drain waits for the outputs to end, or to fall silent. Their readers may
// take their time, until ctx ends or the pool is closed: then false.
func (r *running) drain(ctx context.Context, l *link) bool {
	done := make(chan struct{})
	go func() { r.outputs.Wait(); close(done) }()
	ended, silent := time.Now(), false
	var passed chan struct{} // closed when l has passed on what came before a later command
	for {
		select {
		case <-done:
			return true
		case <-ctx.Done():
			return false
		case <-r.h.pool.ctx.Done():
			return false
		case <-time.After(lateOutput / 5):
		}
		heard := false
		select {
		case <-passed:
			heard = true
		default:
		}
		last := time.Unix(0, r.last.Load())
		if last.Before(ended) {
			last = ended
		}
		switch {
		case silent, r.passing.Load() > 0, time.Since(last) <= lateOutput:
		case passed == nil:
			passed = make(chan struct{})
			go func() {
				defer close(passed)
				r.h.catchUp(ctx, l)
				r.last.Store(time.Now().UnixNano()) // ssh may report the end of a session shortly before it writes the output
			}()
		case heard:
			silent = true
			r.s.close()
		}
	}
}

// control passes on resizes and signals.
func (r *running) control(ctx context.Context, run string, stop <-chan struct{}) {
	resize, signals := r.c.Resize, r.c.Signals
	for {
		select {
		case size, ok := <-resize:
			if !ok {
				resize = nil
				continue
			}
			r.s.resize(size)
		case sig, ok := <-signals:
			if !ok {
				signals = nil
				continue
			}
			select {
			case <-r.ready:
			case <-stop:
				return
			}
			if s, ok := sig.(syscall.Signal); ok {
				kctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
				_, err := r.h.output(kctx, spare, `kill -"$1" -"$2"`, strconv.Itoa(int(s)), strconv.FormatInt(r.out.pid.Load(), 10))
				cancel()
				if err != nil {
					r.h.pool.log.Debug("signal not delivered", "host", r.h.target.Name, "signal", s.String(), "err", err)
				}
			}
		case <-stop:
			return
		}
	}
}

func (r *running) result(ctx context.Context, l *link, e ended, run string) (sandboxer.Exit, error) {
	t := r.h.target
	select {
	case <-r.ready:
	default:
		if !e.known {
			break
		}
		said := tidy(string(r.out.noise))
		if r.c.TTY != nil && e.code == 124 {
			return sandboxer.Exit{}, sandboxer.E(sandboxer.Unsupported, errors.New(said), "a terminal needs stty, which host %s does not have", t.Name)
		}
		if e.code == 125 && said == "" {
			// The loop's own end: its input was cut.
			return sandboxer.Exit{}, t.fault(ErrLost, "")
		}
		return sandboxer.Exit{}, t.fault(ErrShell, strings.TrimSpace("exit status "+strconv.Itoa(e.code)+" "+said))
	}
	if r.out.refused {
		return sandboxer.Exit{}, invalid("cannot change to the directory %q on host %s", r.c.Dir, t.Name)
	}
	if !e.known {
		// The end of the connection may be noticed a little later than that of the session.
		select {
		case <-l.done():
		case <-time.After(200 * time.Millisecond):
			if l.alive() && r.h.carries(l) {
				return sandboxer.Exit{Code: 137, Signal: "KILL"}, nil
			}
		}
		r.h.owe(run)
		if ctx.Err() != nil {
			return sandboxer.Exit{}, failure(ctx, t, ctx.Err(), "a command")
		}
		return sandboxer.Exit{}, t.fault(ErrLost, tidy(l.reason()))
	}
	if err := r.wfail.Load(); err != nil {
		return sandboxer.Exit{}, fmt.Errorf("%w: %w", ErrOutput, *err)
	}
	exit := sandboxer.Exit{Code: e.code}
	if e.code > 128 {
		exit.Signal = signals[e.code-128]
	}
	return exit, nil
}

// signals are those that end a process, by number as everywhere.
var signals = map[int]string{1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 6: "ABRT", 8: "FPE", 9: "KILL", 11: "SEGV", 13: "PIPE", 14: "ALRM", 15: "TERM"}

// An opening writer drops everything up to and with the line that begins with mark.
type opening struct {
	mark     []byte
	then     []byte // the mark after the first one
	prompted func() // called at the first of two marks
	ready    func()
	to       io.Writer
	noise    []byte
	line     bool // within the line of the mark
	open     bool
	refused  bool // the line says that the directory could not be entered
	pid      atomic.Int64
	tail     []byte // of the line
}

func (o *opening) write(p []byte) error {
	if o.open {
		return o.pass(p)
	}
	o.noise = append(o.noise, p...)
	for !o.line {
		i := bytes.Index(o.noise, o.mark)
		if i < 0 {
			// A mark may begin only at the end.
			if keep := 64 << 10; len(o.noise) > 2*keep {
				o.noise = append(o.noise[:0], o.noise[len(o.noise)-keep:]...)
			}
			return nil
		}
		if o.then == nil {
			o.tail = append(o.tail, o.noise[i+len(o.mark):]...)
			o.line = true
			p = nil
			break
		}
		o.noise = append(o.noise[:0], o.noise[i+len(o.mark):]...)
		o.mark, o.then = o.then, nil
		o.prompted()
	}
	o.tail = append(o.tail, p...)
	i := bytes.IndexByte(o.tail, '\n')
	if i < 0 {
		return nil
	}
	word := strings.TrimSpace(string(o.tail[:i]))
	rest := o.tail[i+1:]
	o.open, o.refused = true, word == "-"
	if pid, err := strconv.ParseInt(word, 10, 64); err == nil && pid > 1 {
		o.pid.Store(pid)
	}
	o.noise, o.tail = nil, nil
	if o.ready != nil {
		o.ready()
	}
	return o.pass(rest)
}

func (o *opening) pass(p []byte) error {
	if o.to == nil || len(p) == 0 {
		return nil
	}
	_, err := o.to.Write(p)
	return err
}

// killTime bounds ending a command on a host that answers.
const killTime = 10 * time.Second

// kill ends run. If pid is not 0, it leads run's process group. false: the host
// could not be reached to do it.
func (h *Host) kill(l *link, run string, pid int64) bool {
	ctx, cancel := context.WithTimeout(h.pool.ctx, killTime)
	defer cancel()
	go func() {
		// A kill over a lost connection would wait for a new one.
		select {
		case <-l.done():
			cancel()
		case <-ctx.Done():
		}
	}()
	group := ""
	if pid > 0 {
		group = strconv.FormatInt(pid, 10)
	}
	_, err := h.output(ctx, ending, marked.Ending, runVar+"="+run, group, marked.Tag(run))
	if err != nil {
		h.pool.log.Debug("command not killed", "host", h.target.Name, "err", err)
	}
	return err == nil
}

// Kill ends, at once, every process on the host that has the variable name with that
// value in its environment and that the account may end. Failed: some would not end.
// On a host without /proc nothing is found, and the error is Unsupported.
func (h *Host) Kill(ctx context.Context, name, value string) error {
	if err := errors.Join(checkName(name), checkWords("the value", value)); err != nil {
		return err
	}
	exit, said, err := h.said(ctx, `[ -r /proc/self/environ ] || exit 4`+marked.Ending, []string{name + "=" + value, "", ""})
	switch {
	case err != nil:
		return err
	case exit.Code == 4:
		return sandboxer.E(sandboxer.Unsupported, nil, "finding processes by their environment needs /proc, which host %s does not have", h.target.Name)
	case exit.Code != 0:
		return sandboxer.E(sandboxer.Failed, errors.New(said), "some processes on host %s with %s=%s did not end", h.target.Name, name, value)
	}
	return nil
}

// owe remembers that run may still be there.
func (h *Host) owe(run string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.debts = append(h.debts, run)
}

// settle kills owed runs in the background.
func (h *Host) settle() {
	h.mu.Lock()
	debts := h.debts
	h.debts = nil
	h.mu.Unlock()
	if len(debts) == 0 {
		return
	}
	h.pool.task(func() {
		ctx, cancel := context.WithTimeout(h.pool.ctx, killTime)
		defer cancel()
		for _, run := range debts {
			if _, err := h.output(ctx, ending, marked.Ending, runVar+"="+run, "", marked.Tag(run)); err != nil {
				h.owe(run)
			}
		}
	})
}

// Output runs script with args as its $1 and so on and returns what it wrote to
// stdout. A non-zero exit is an error here, of the kind Failed, with what it wrote to
// stderr as the cause; see [ExitOf].
func (h *Host) Output(ctx context.Context, script string, args ...string) ([]byte, error) {
	return h.output(ctx, command, script, args...)
}

func (h *Host) output(ctx context.Context, as use, script string, args ...string) ([]byte, error) {
	said := &capture.First{Max: 16 << 10}
	out, exit, err := h.capture(ctx, Cmd{Script: script, Args: args, Stderr: said}, MaxAnswer, as)
	if err == nil && exit.Code != 0 {
		err = sandboxer.E(sandboxer.Failed, &exitError{exit, tidy(said.String())}, "a command on host %s failed", h.target.Name)
	}
	return out, err
}

// MaxAnswer is how much of a command's output is read as a whole, in bytes, where no more
// is expected.
const MaxAnswer = 32 << 20

// Capture runs c as Run does and returns what it wrote to stdout. A host, and what guests left
// there, may send anything: a command that writes more than most bytes is ended, and the error
// is of the kind Failed.
func (h *Host) Capture(ctx context.Context, c Cmd, most int) ([]byte, sandboxer.Exit, error) {
	return h.capture(ctx, c, most, command)
}

func (h *Host) capture(ctx context.Context, c Cmd, most int, as use) ([]byte, sandboxer.Exit, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := &answer{most: most, over: func() {
		cancel(sandboxer.E(sandboxer.Failed, nil, "host %s: an answer is longer than %d bytes", h.target.Name, most).
			WithHint("check what has grown there: files, containers or images"))
	}}
	c.Stdout = out
	exit, err := h.run(ctx, c, as)
	if out.isOver() { // also if it had written all of it before it could be ended
		return nil, exit, context.Cause(ctx)
	}
	return out.b.Bytes(), exit, err
}

// An answer keeps what is written to it, and reports once when that exceeds its limit.
type answer struct {
	most int
	over func()

	mu   sync.Mutex
	told bool
	b    bytes.Buffer
}

func (a *answer) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.b.Len()+len(p) > a.most && !a.told {
		a.told, a.b = true, bytes.Buffer{}
		a.over()
	}
	if !a.told {
		a.b.Write(p)
	}
	return len(p), nil
}

func (a *answer) isOver() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.told
}

func (h *Host) said(ctx context.Context, script string, args []string) (sandboxer.Exit, string, error) {
	said := &capture.First{Max: 16 << 10}
	exit, err := h.Run(ctx, Cmd{Script: script, Args: args, Stderr: said})
	return exit, tidy(said.String()), err
}

type exitError struct {
	exit sandboxer.Exit
	said string
}

func (e *exitError) Error() string { return fmt.Sprintf("exit status %d: %s", e.exit.Code, e.said) }

// ExitOf returns the exit of the command whose non-zero exit is err, with its output on
// stderr: on one line, except for errors of Archive and Replace.
func ExitOf(err error) (exit sandboxer.Exit, said string, ok bool) {
	var e *exitError
	if !errors.As(err, &e) {
		return sandboxer.Exit{}, "", false
	}
	return e.exit, e.said, true
}

// answered notes how long the host took to begin a command.
func (h *Host) answered(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.quickest == 0 || d < h.quickest {
		h.quickest = d
	}
}

// latency is the shortest time in which the host ever answered: a round trip, and a
// little for a shell to start.
func (h *Host) latency() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.quickest
}
