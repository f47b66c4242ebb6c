package remote

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/marked"
)

// Commands, by /v1/bash/exec. Of that API's words for them a command, its environment, exit codes, and outputs that
// can be asked for while it runs are used. What it lacks a script inside makes up for, which keeps what it needs in
// a directory of its own until the command has ended:
//
//	run      what becomes the command: its arguments, and what is done right before
//	o, e     pipes that are its outputs. Each is read by the piece, which is said in base64, a line with its number.
//	         Then the next is due: an output that nobody takes holds the command, as a pipe does
//	oa, ea   pipes by which pieces are asked for: who asks writes lines to the script's input (/v1/bash/write)
//	i, ic    pipes: its input, and that this ends
//	draft    a piece of its input that is too large for a request
//	pid, tty what signals and sizes go to
//
// What the script says itself begins with "! ".

const (
	markVar = "SANDBOXER_REMOTE_EXEC" // by which what a command started is found

	pieceSize  = 64<<10 - 1 // bytes of an output in one piece, almost as much as a pipe holds; in base64 nothing fills up the last of them
	pieceAhead = 5          // pieces that are said before one is asked for: less than what the far side keeps of an output
	inputSize  = 4 << 20    // bytes of an input in one piece
	maxInline  = 32 << 10   // bytes of an input that go with the script which writes them, as a variable; more is a file first
	maxScript  = 90 << 10   // bytes of a script: an argument, with room to spare. More of a command is a file first
	maxCommand = 1 << 20    // bytes of a command
	maxVars    = 48 << 10   // bytes of its environment
	maxQueued  = 2 << 20    // bytes of an output that wait for whoever reads it
	maxOutput  = 4 << 20    // bytes of one answer about outputs
	pollTime   = 20 * time.Second
	pollTries  = 6                      // more of them where one fails
	pollPause  = 100 * time.Millisecond // before the first of those, and twice as long before each other one
	endTime    = 20 * time.Second       // for ending a command that is given up, once its sessions are closed
	closeTime  = 5 * time.Second        // for closing one of them
	startTime  = 40 * time.Second       // for the answer to a start
	startLate  = 5 * time.Second        // of that, when its caller has left. What starts later is ended then
)

var (
	variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	groupName    = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)
)

// quoted is s as a word of a shell.
func quoted(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// A command is one that runs inside.
type command struct {
	a       aio
	h       sandboxer.Handle
	cmd     sandboxer.Cmd
	session string
	dir     string // inside
	mark    string
	tag     string
	end     []byte        // what follows the last byte of each output
	id      string        // of the API
	draft   atomic.Bool   // a piece of input may lie in a file
	ended   chan struct{} // closed when the far side has said that it runs no more
}

// Exec implements sandboxer.Execer.
func (a aio) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	var none sandboxer.Exit
	if err := ctx.Err(); err != nil {
		return none, err
	}
	if _, err := a.find(h); err != nil {
		return none, err
	}
	name := strings.ToLower(rand.Text())
	c := &command{a: a, h: h, cmd: cmd, session: "sandboxer-" + name, dir: "/tmp/.sandboxer-" + name, mark: rand.Text(), ended: make(chan struct{}), end: []byte("\x00end-" + rand.Text()[:20] + "\x00\x00\x00\x00\x00\x00")}
	body, late, err := c.request(ctx)
	if err != nil {
		return none, err
	}
	if late != nil {
		if err := c.bring(ctx, late); err != nil {
			return none, err
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// A start whose answer nobody waits for may come after what should end it.
	type answer struct {
		id  string
		err error
	}
	started, left := make(chan answer), make(chan struct{})
	err = a.begin(func() {
		within, stop := context.WithTimeout(context.WithoutCancel(ctx), startTime)
		defer stop()
		defer context.AfterFunc(a.closing, stop)()
		id, err := c.start(within, body)
		select {
		case started <- answer{id, err}:
		case <-left:
			if err == nil || unclear(err) {
				c.kill(ctx)
			}
		}
	})
	if err != nil {
		if late != nil {
			c.kill(ctx)
		}
		return none, err
	}
	var got answer
	select {
	case got = <-started:
	case <-ctx.Done():
		select {
		case got = <-started:
		case <-time.After(startLate):
			close(left)
		}
		got.err = ctx.Err()
	}
	if got.err != nil {
		if ctx.Err() != nil || unclear(got.err) || late != nil { // it lies there
			c.kill(ctx)
		} else {
			c.forget(ctx) // the far side may have the session already
		}
		return none, got.err
	}
	c.id = got.id
	return c.follow(ctx, cancel)
}

// unclear says that the command may have been started although starting it failed.
func unclear(err error) bool {
	switch sandboxer.KindOf(err) {
	case sandboxer.Invalid, sandboxer.Denied, sandboxer.Unsupported, sandboxer.Exhausted, sandboxer.NotFound:
		return false
	}
	return true
}

// request returns the request that starts the command, and what of it is to be brought inside before.
func (c *command) request(ctx context.Context) (body map[string]any, late []byte, err error) {
	wrong := func(kind sandboxer.Kind, format string, args ...any) (map[string]any, []byte, error) {
		return nil, nil, sandboxer.E(kind, nil, format, args...)
	}
	switch {
	case len(c.cmd.Args) == 0:
		return wrong(sandboxer.Invalid, "there is no command")
	case c.cmd.Service != "":
		return wrong(sandboxer.Unsupported, "a sandbox of %s has no services", c.a.env.Extension)
	}
	for _, s := range append(slices.Clone(c.cmd.Args), c.cmd.Dir, c.cmd.User) {
		if strings.ContainsRune(s, 0) {
			return wrong(sandboxer.Invalid, "an argument, a directory or a user has a NUL byte")
		}
	}
	switch _, group, _ := strings.Cut(c.cmd.User, ":"); {
	case !utf8.ValidString(c.cmd.Dir) || !utf8.ValidString(c.cmd.User):
		return wrong(sandboxer.Unsupported, "a directory or a user is not UTF-8, which is all that the sandbox's API takes")
	case group != "" && !groupName.MatchString(group):
		return wrong(sandboxer.Invalid, "%.60q is no group", group)
	}
	env, size := map[string]string{markVar: c.mark}, 0
	var run strings.Builder
	c.tag = c.runs(&run)
	for i, k := range slices.Sorted(maps.Keys(c.cmd.Env)) {
		v := c.cmd.Env[k]
		switch {
		case !variableName.MatchString(k):
			return wrong(sandboxer.Unsupported, "the shell inside the sandbox, which the command is started by, cannot set the variable %.60q", k)
		case strings.ContainsRune(v, 0) || !utf8.ValidString(v):
			return wrong(sandboxer.Unsupported, "the value of the variable %s is not UTF-8, which is all that the sandbox's API takes", k)
		}
		size += len(k) + len(v)
		field := "SBX_E" + strconv.Itoa(i)
		env[field] = k + "=" + v
		fmt.Fprintf(&run, "export \"$%[1]s\"; unset %[1]s\n", field)
	}
	if size > maxVars {
		return wrong(sandboxer.Unsupported, "the environment of a command has at most %d KiB by way of the sandbox's API", maxVars>>10)
	}
	c.becomes(&run)
	if run.Len() > maxCommand {
		return wrong(sandboxer.Unsupported, "a command has at most %d KiB by way of the sandbox's API", maxCommand>>10)
	}
	text := run.String()
	script := c.script(text)
	if len(script) > maxScript {
		late, script = []byte(text), c.script("")
	}
	body = map[string]any{"session_id": c.session, "command": script, "env": env, "async_mode": true}
	if until, ok := ctx.Deadline(); ok { // for a broker that is gone by then
		body["hard_timeout"] = max(time.Until(until), 0).Seconds() + endTime.Seconds() + 60
	}
	return body, late, nil
}

// runs writes the first half of the file run: what makes the process known, but not yet the command.
func (c *command) runs(b *strings.Builder) (tag string) {
	tag = marked.Tag(c.mark)
	b.WriteString(marked.TaggingOnce(tag))
	if t := c.cmd.TTY; t != nil {
		fmt.Fprintf(b, "stty rows %d cols %d\ntty >%s/tty\n", t.Rows, t.Cols, c.dir)
		b.WriteString("if [ -n \"$SBX_SHELL\" ]; then SHELL=$SBX_SHELL; else unset SHELL; fi; unset SBX_SHELL\n")
	}
	// A builtin command: self is this very process, which becomes the command.
	fmt.Fprintf(b, "read -r sbx_pid sbx_rest </proc/self/stat && echo \"$sbx_pid\" >%[1]s/pid\numask \"$sbx_umask\"\n", c.dir)
	return tag
}

// becomes writes the second half: the command.
func (c *command) becomes(b *strings.Builder) {
	fmt.Fprintf(b, "set -- %s\n", argWords(b, c.cmd.Args))
	// Shells differ in what they call it.
	b.WriteString("case $1 in */*) [ -e \"$1\" ] || { echo \"sandboxer: $1: command not found: no such file or directory\" >&2; exit 127; }\n" +
		"{ [ -f \"$1\" ] && [ -x \"$1\" ]; } || { echo \"sandboxer: $1: cannot be executed: it is not an executable file\" >&2; exit 126; };; esac\n")
	b.WriteString("[ -z \"$sbx_chroot\" ] || exec \"$sbx_chroot\" --userspec=\"$sbx_user\" --skip-chdir / \"$@\"\nexec \"$@\"\n")
}

// argWords returns args as words of a shell, after what has to be said before them.
func argWords(b *strings.Builder, args []string) string {
	words := make([]string, len(args))
	for i, arg := range args {
		if utf8.ValidString(arg) {
			words[i] = quoted(arg)
			continue
		}
		// JSON has no such bytes.
		fmt.Fprintf(b, "sbx_%[1]d=$(printf %%s %[2]s | base64 -d; printf x); sbx_%[1]d=${sbx_%[1]d%%x}\n", i, base64.StdEncoding.EncodeToString([]byte(arg)))
		words[i] = fmt.Sprintf("\"$sbx_%d\"", i)
	}
	return strings.Join(words, " ")
}

// script returns what runs the file run, which it writes unless it has been brought.
func (c *command) script(run string) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	end := base64.StdEncoding.EncodeToString
	needs := "mkfifo dd base64 rm cat"
	if c.cmd.TTY != nil {
		needs += " script stty"
	}
	line("sbx_umask=$(umask); umask 077")
	line("sbx_refuse() { echo \"! $1\"; rm -rf %s; exit 0; }", c.dir)
	line("for sbx in %s; do command -v $sbx >/dev/null || sbx_refuse \"tools $sbx\"; done", needs)
	if run != "" {
		line("mkdir %s 2>/dev/null || sbx_refuse room", c.dir)
	}
	line("exec 9>&2 2>/dev/null")
	if c.cmd.Dir != "" {
		line("CDPATH= cd -- %s >/dev/null || sbx_refuse dir", quoted(c.cmd.Dir))
	}
	line("sbx_chroot= sbx_user=")
	if c.cmd.User != "" {
		name, group, _ := strings.Cut(c.cmd.User, ":")
		line("sbx_n=%s", quoted(name))
		line("if sbx_u=$(id -u -- \"$sbx_n\"); then sbx_g=$(id -g -- \"$sbx_n\")")
		line("else case $sbx_n in ''|*[!0-9]*) sbx_refuse user;; esac; sbx_u=$sbx_n sbx_g=$sbx_n; fi")
		if group != "" {
			line("sbx_g=%s", quoted(group))
		}
		line("sbx_user=$sbx_u:$sbx_g")
		line("if [ \"$sbx_user\" != \"$(id -u):$(id -g)\" ]; then [ \"$(id -u)\" = 0 ] || sbx_refuse root")
		line("sbx_chroot=$(command -v chroot) || sbx_refuse 'tools chroot'; \"$sbx_chroot\" --userspec=\"$sbx_user\" --skip-chdir / true || sbx_refuse user; fi")
	}
	line("{ echo \"sbx_umask=$sbx_umask sbx_chroot='$sbx_chroot'\"; printf 'sbx_user=%%s\\n' \"'$sbx_user'\"")
	if run != "" {
		mark := "SBX_" + rand.Text()
		line("cat <<'%s'\n%s%s\n}>%s/run || sbx_refuse room", mark, run, mark, c.dir)
	} else {
		line("cat %[1]s/late && rm -f %[1]s/late; } >%[1]s/run || sbx_refuse room", c.dir)
	}
	line("mkfifo %[1]s/o %[1]s/e %[1]s/oa %[1]s/ea %[1]s/i %[1]s/ic || sbx_refuse room", c.dir)

	// The end of an output is known by what is the same of it in base64 wherever in a piece it begins. Only a piece
	// that is full can have cut it in two.
	line("sbx_pump() { LC_ALL=C sbx_s=0 sbx_k=%d sbx_t=", pieceAhead)
	line("while sbx_c=$(dd bs=%d count=1 | base64 -w0); do echo \"$sbx_s $sbx_c\"", pieceSize)
	line("case $sbx_t$sbx_c in ''|*%s*|*%s*|*%s*) return;; esac", end(c.end[:30]), end(c.end[1:28]), end(c.end[2:29]))
	line("sbx_t=; [ ${#sbx_c} -lt %d ] || sbx_t=$sbx_c", base64.StdEncoding.EncodedLen(pieceSize))
	line("sbx_s=$((sbx_s+1)) sbx_k=$((sbx_k-1))")
	line("while [ $sbx_k -le 0 ]; do read -r sbx_more <&4 || return; sbx_k=$((sbx_k+sbx_more)); done")
	line("done; }")
	line("exec 3<&0 5<>%[1]s/oa 6<>%[1]s/ea 8<>%[1]s/ic </dev/null", c.dir)
	line("while read -r sbx_w sbx_n; do case $sbx_w in o) echo $sbx_n >&5;; e) echo $sbx_n >&6;; i) echo >&8;; esac; done <&3 >/dev/null 9>&- & sbx_asked=$!")
	line("sbx_pump <%[1]s/o 4<&5 3<&- 5>&- 6>&- 8>&- 9>&- & sbx_o=$!", c.dir)
	line("sbx_pump <%[1]s/e 4<&6 3<&- 5>&- 6>&- 8>&- >&9 9>&- & sbx_e=$!", c.dir)
	line("exec 3<&- 5>%[1]s/o 6>%[1]s/e", c.dir)
	in := "/dev/null"
	if c.cmd.Stdin != nil {
		in = c.dir + "/i"
		line("{ exec 7>%s/i; read -r sbx_more <&8; } >/dev/null 5>&- 6>&- 9>&- & sbx_i=$!", c.dir)
	}
	streams := "<" + in + " >&5 2>&6 5>&- 6>&- 8>&- 9>&-"
	if c.cmd.TTY != nil {
		line("( SBX_SHELL=${SHELL-} SHELL=/bin/sh; export SBX_SHELL SHELL; exec script -q -e -f -c '. %s/run' /dev/null ) %s", c.dir, streams)
	} else {
		line("( . %s/run ) %s", c.dir, streams)
	}
	line("sbx_code=$?; trap '' PIPE")
	line("[ -z \"${sbx_i-}\" ] || kill $sbx_i; : <>%s/i", c.dir) // who waits to write there waits no more
	line("sbx_end() { printf '%s' >&$1; }; sbx_end 5; sbx_end 6", octal(c.end))
	line("wait $sbx_o $sbx_e; kill $sbx_asked; rm -rf %s; exit $sbx_code", c.dir)
	return b.String()
}

// octal is b as printf's format takes it.
func octal(b []byte) string {
	var s strings.Builder
	for _, c := range b {
		fmt.Fprintf(&s, `\%03o`, c)
	}
	return s.String()
}

// bring writes what is too long to go with the script.
func (c *command) bring(ctx context.Context, late []byte) error {
	err := c.a.small(ctx, c.h, "umask 077; mkdir "+c.dir)
	if err == nil {
		_, err = c.a.upload(ctx, c.h, "the command", c.dir+"/late", bytes.NewReader(late))
	}
	if err != nil {
		c.kill(ctx)
	}
	return err
}

// start starts the command and returns its ID.
func (c *command) start(ctx context.Context, body map[string]any) (string, error) {
	data, err := c.a.post(ctx, c.h, "v1/bash/exec", body)
	if err != nil {
		return "", err
	}
	x, err := readBash(data)
	if err == nil && (x.CommandID == "" || len(x.CommandID) > maxShown) {
		err = sandboxer.E(sandboxer.Failed, nil, "the sandbox does not say what it calls the command that it started")
	}
	return x.CommandID, err
}

// errTaken says that an output could not be delivered.
var errTaken = errors.New("the output of the command could not be delivered")

// follow is there until the command has ended.
func (c *command) follow(ctx context.Context, cancel context.CancelCauseFunc) (sandboxer.Exit, error) {
	out, errs := c.output(c.cmd.Stdout, "o"), c.output(c.cmd.Stderr, "e")
	var work sync.WaitGroup // ends with ctx, but for who waits for its caller
	for _, o := range []*output{out, errs} {
		work.Go(func() {
			if err := o.deliver(ctx); err != nil {
				cancel(err)
			}
		})
		work.Go(func() {
			if err := o.ask(ctx); err != nil && ctx.Err() == nil {
				cancel(err)
			}
		})
	}
	if c.cmd.Signals != nil {
		work.Go(func() { c.signals(ctx) })
	}
	if c.cmd.TTY != nil && c.cmd.Resize != nil {
		work.Go(func() { c.sizes(ctx) })
	}
	if c.cmd.Stdin != nil {
		work.Go(func() {
			if err := c.feed(ctx); err != nil && ctx.Err() == nil {
				cancel(err)
			}
		})
	}
	type end struct {
		exit sandboxer.Exit
		err  error
	}
	ended := make(chan end, 1)
	work.Go(func() {
		exit, err := c.poll(ctx, out, errs)
		if err == nil {
			for _, o := range []*output{out, errs} {
				select {
				case <-o.over:
				case <-ctx.Done():
				}
			}
			err = context.Cause(ctx)
		}
		ended <- end{exit, err}
	})
	var e end
	select {
	case e = <-ended:
	case <-ctx.Done():
		e.err = context.Cause(ctx)
	}
	gone := make(chan struct{})
	cause := context.Cause(ctx)
	cancel(nil)
	go func() { work.Wait(); close(gone) }()
	if e.err != nil {
		c.kill(ctx)
	} else {
		c.forget(ctx)
	}
	// Who does not take what is written must not keep this from returning.
	select {
	case <-gone:
	case <-time.After(2 * time.Second):
	}
	if c.draft.Load() { // the directory may be there again
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTime)
		defer cancel()
		_ = c.a.small(ctx, c.h, "rm -rf "+c.dir) // there is nobody to tell
	}
	if e.err != nil && cause != nil {
		e.err = cause
	}
	return e.exit, e.err
}

// poll asks for outputs until the command has ended and both have, and returns how.
func (c *command) poll(ctx context.Context, out, errs *output) (sandboxer.Exit, error) {
	var none sandboxer.Exit
	body := map[string]any{"session_id": c.session, "command_id": c.id, "wait": true, "wait_timeout": pollTime.Seconds(), "offset": int64(0), "stderr_offset": int64(0)}
	failed := 0 // polls in a row
	for last := false; ; {
		began := time.Now()
		data, err := c.a.postUpTo(ctx, c.h, "v1/bash/output", body, maxOutput)
		if sandboxer.KindOf(err) == sandboxer.Unsupported { // 404: the path is there
			err = sandboxer.E(sandboxer.Failed, err, "the sandbox has forgotten the command while it ran")
		}
		// Nothing is lost by asking again: the request says what has come so far.
		if k := sandboxer.KindOf(err); (k == sandboxer.Unavailable || k == sandboxer.Exhausted) && failed < pollTries {
			failed++
			if pause(ctx, pollPause<<(failed-1)) {
				continue
			}
		}
		if err != nil {
			return none, err
		}
		failed = 0
		x, err := readBash(data)
		if err != nil {
			return none, err
		}
		if word, ok := strings.CutPrefix(x.Stdout, "! "); ok && out.untouched() {
			return none, c.refused(strings.TrimSpace(word))
		}
		if err := errors.Join(out.add(x.Stdout), errs.add(x.Stderr)); err != nil {
			return none, err
		}
		body["offset"], body["stderr_offset"] = x.Offset, x.StderrOffset
		switch status := x.Command.Status; {
		case status == "running" || status == "pending":
			if x.Stdout == "" && x.Stderr == "" && time.Since(began) < 10*time.Millisecond { // it does not wait
				if !pause(ctx, idlePause) {
					return none, context.Cause(ctx)
				}
			}
		case !last: // there may be more than was said with it
			last = true
			close(c.ended)
			body["wait"] = false
		case status == "completed" && x.Command.ExitCode != nil:
			out.last()
			errs.last()
			return exitOf(*x.Command.ExitCode), nil
		default:
			return none, sandboxer.E(sandboxer.Failed, nil, "the sandbox ended the command (%s)", shown(status))
		}
	}
}

// exitOf is how a command ended whose shell tells it by a code alone.
func exitOf(code int) sandboxer.Exit {
	x := sandboxer.Exit{Code: code}
	if name := unix.SignalName(syscall.Signal(code - 128)); code > 128 && name != "" {
		x.Signal = strings.TrimPrefix(name, "SIG")
	}
	return x
}

// refused is why the command was not started.
func (c *command) refused(word string) error {
	word, what, _ := strings.Cut(word, " ")
	switch word {
	case "tools":
		return sandboxer.E(sandboxer.Unsupported, nil, "the sandbox's image lacks what commands take: %s", shown(what)).WithHint("use an image with GNU's coreutils, and util-linux for terminals")
	case "dir":
		return sandboxer.E(sandboxer.Invalid, nil, "%s is not a directory inside the sandbox", c.cmd.Dir)
	case "user":
		return sandboxer.E(sandboxer.Invalid, nil, "there is no user %q inside the sandbox", c.cmd.User)
	case "root":
		return sandboxer.E(sandboxer.Unsupported, nil, "the sandbox's API runs commands as one user, who is not root and cannot become %q", c.cmd.User).WithHint("leave the user out")
	case "room":
		return sandboxer.E(sandboxer.Exhausted, nil, "there is no room in /tmp inside the sandbox for what a command takes")
	}
	return sandboxer.E(sandboxer.Failed, nil, "the sandbox does not start the command: %s", shown(word))
}

// kill ends the command and whatever it started.
func (c *command) kill(ctx context.Context) {
	c.forget(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTime)
	defer cancel()
	// The far side may have ended what it knows of alone.
	x, err := c.a.sync(ctx, c.h, fmt.Sprintf("set -- %[1]s %[2]s %[3]s\n(%[4]s) || (%[5]s)\nsbx=$?; rm -rf %[6]s; exit $sbx", markVar, c.mark, c.tag, marked.Look, marked.Kill, c.dir), nil)
	if err == nil && *x.Command.ExitCode != 0 {
		err = errors.New("some of it would not end")
	}
	if err != nil {
		c.a.log().Warn("a command that was given up may still run", "extension", c.a.env.Extension, "sandbox", c.h.SandboxID, "err", err)
	}
}

// forget ends the session of the command, and the command if it runs.
func (c *command) forget(ctx context.Context) {
	sessions := []string{c.session}
	if c.cmd.Stdin != nil {
		sessions = append(sessions, c.session+"-in")
	}
	for _, session := range sessions {
		// The far side may wait for what ends. A session that is left it drops when nobody has used it for a while.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTime)
		_, _ = c.a.post(ctx, c.h, "v1/bash/sessions/"+session+"/close", map[string]any{})
		cancel()
	}
}

// signals sends the command those that come.
func (c *command) signals(ctx context.Context) {
	for {
		select {
		case s, ok := <-c.cmd.Signals:
			if !ok {
				return
			}
			if sig, ok := s.(syscall.Signal); ok && sig > 0 {
				c.tell(ctx, "a signal", "pid", fmt.Sprintf("kill -%d \"$(cat %s/pid)\"", int(sig), c.dir))
			}
		case <-ctx.Done():
			return
		}
	}
}

// sizes sends the terminal those that come.
func (c *command) sizes(ctx context.Context) {
	for {
		select {
		case s, ok := <-c.cmd.Resize:
			if !ok {
				return
			}
			c.tell(ctx, "a size", "tty", fmt.Sprintf("stty rows %d cols %d <\"$(cat %s/tty)\"", s.Rows, s.Cols, c.dir))
		case <-ctx.Done():
			return
		}
	}
}

// tell runs text once the command has written the file that says to whom.
func (c *command) tell(ctx context.Context, what, file, text string) {
	text = fmt.Sprintf("sbx=0; while [ ! -s %[1]s/%[2]s ] && [ $sbx -lt 100 ]; do sbx=$((sbx+1)); sleep 0.05; done; [ -s %[1]s/%[2]s ] || exit %[3]d\n%[4]s", c.dir, file, exitNotYet, text)
	_, _, err := c.patiently(ctx, func() (int, error) {
		x, err := c.a.sync(ctx, c.h, text, nil)
		if err != nil {
			return 0, err
		}
		return *x.Command.ExitCode, nil
	})
	if err != nil && ctx.Err() == nil {
		c.a.log().Debug("what was sent to a command did not arrive", "extension", c.a.env.Extension, "what", what, "err", err)
	}
}

// An inflow is an input that is read ahead, up to inputSize.
type inflow struct {
	mu   sync.Mutex
	b    []byte
	err  error
	more chan struct{} // holds one where there is something new
	room chan struct{} // holds one where something was taken
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// read reads r to its end, until ctx ends or its caller lets go of it.
func (in *inflow) read(ctx context.Context, r io.Reader) {
	buf := make([]byte, 64<<10)
	for {
		n, err := r.Read(buf)
		in.mu.Lock()
		in.b, in.err = append(in.b, buf[:n]...), err
		full := len(in.b) >= inputSize
		in.mu.Unlock()
		wake(in.more)
		if err != nil || ctx.Err() != nil {
			return
		}
		if full {
			select {
			case <-in.room:
			case <-ctx.Done():
				return
			}
		}
	}
}

// take returns what has been read, and whether that is all.
func (in *inflow) take(ctx context.Context) (b []byte, all bool) {
	select {
	case <-in.more:
	case <-ctx.Done():
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	b, in.b = in.b, nil
	wake(in.room)
	return b, in.err != nil
}

// feed brings the command's input inside, by the piece: the command has read almost all of one before the next.
func (c *command) feed(ctx context.Context) error {
	in := &inflow{more: make(chan struct{}, 1), room: make(chan struct{}, 1)}
	go in.read(ctx, c.cmd.Stdin)
	wait := fmt.Sprintf("sbx=0; while [ ! -p %[1]s/i ] && [ $sbx -lt 1000 ]; do sbx=$((sbx+1)); sleep 0.02; done\n[ -p %[1]s/i ] || exit %[2]d\n", c.dir, exitNotYet)
	runs := func(text string, env map[string]string) (code int, ended bool, err error) {
		return c.patiently(ctx, func() (int, error) { return c.a.long(ctx, c.h, c.session+"-in", text, env) })
	}
	for drafts := false; ; {
		b, all := in.take(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if len(b) > 0 {
			var env map[string]string
			text := wait
			if len(b) <= maxInline {
				// The text is an argument, which everybody inside sees, and the far side shows it. Both are not so of variables.
				env = map[string]string{"SBX_IN": base64.StdEncoding.EncodeToString(b)}
				text += fmt.Sprintf("sbx_in=$SBX_IN; unset SBX_IN; printf %%s \"$sbx_in\" | base64 -d >%s/i", c.dir)
			} else {
				if !drafts { // a draft before it would make the directory, which the script then does not take for its own
					if _, ended, err := runs(wait, nil); ended || err != nil {
						return err
					}
					drafts = true
				}
				draft := c.dir + "/draft"
				c.draft.Store(true)
				if _, err := c.a.upload(ctx, c.h, "the input of the command", draft, bytes.NewReader(b)); err != nil {
					if c.endsSoon(ctx) {
						return nil
					}
					return err
				}
				text += fmt.Sprintf("[ -r %[1]s ] || exit %[2]d\nexec <%[1]s; rm -f %[1]s\ncat >%[3]s/i", draft, exitNoDraft, c.dir)
			}
			code, ended, err := runs(text, env)
			switch {
			case ended || err != nil:
				return err
			case code == exitNoDraft && len(b) > maxInline:
				if c.endsSoon(ctx) {
					return nil
				}
				return sandboxer.E(sandboxer.Failed, nil, "the sandbox took the input of the command, and cannot read it")
			}
			c.draft.Store(false)
			if code != 0 { // nobody reads it
				return nil
			}
		}
		if all {
			return c.write(ctx, "i")
		}
	}
}

// Exit codes of scripts that are to do with a command what it is not ready for.
const (
	exitNotYet  = 75
	exitNoDraft = 74
)

// patiently runs what ends with exitNotYet until it ends otherwise. That the command, or ctx, has ended before is no error.
func (c *command) patiently(ctx context.Context, run func() (int, error)) (code int, ended bool, err error) {
	for {
		select {
		case <-c.ended:
			return 0, true, nil
		case <-ctx.Done():
			return 0, true, nil
		default:
		}
		if code, err = run(); err != nil || code != exitNotYet {
			return code, false, err
		}
		pause(ctx, idlePause)
	}
}

// endsSoon says whether the command, or ctx, ends within moments: what it had is removed a little before that is known.
func (c *command) endsSoon(ctx context.Context) bool {
	select {
	case <-c.ended:
	case <-ctx.Done():
	case <-time.After(closeTime):
		return false
	}
	return true
}

// write writes a line to the script, which reads them while the command runs.
func (c *command) write(ctx context.Context, line string) error {
	var err error
	for step := 20 * time.Millisecond; step < 10*time.Second; step *= 2 {
		if _, err = c.a.post(ctx, c.h, "v1/bash/write", map[string]any{"session_id": c.session, "command_id": c.id, "input": line + "\n"}); err == nil {
			return nil
		}
		select {
		case <-time.After(step):
		case <-c.ended: // and what it wrote is here, also where it is not taken yet
			return nil
		case <-ctx.Done():
			return nil
		}
	}
	return err
}

// An output is one of the two of a command, as pieces in base64.
type output struct {
	c    *command
	w    io.Writer
	name string        // by which more is asked for
	over chan struct{} // closed when all of it has been delivered
	more chan struct{} // holds one where something was added
	took chan int      // pieces that were

	mu     sync.Mutex
	queued []byte
	some   bool // something came
	whole  bool // nothing comes any more

	line  []byte // that has not come to its end
	next  int    // number of the next piece
	held  []byte // what may be the beginning of the end
	ended bool
}

func (c *command) output(w io.Writer, name string) *output {
	if w == nil {
		w = io.Discard
	}
	return &output{c: c, w: w, name: name, over: make(chan struct{}), more: make(chan struct{}, 1), took: make(chan int, 1)}
}

func (o *output) untouched() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return !o.some
}

// add takes what an answer has of it.
func (o *output) add(text string) error {
	if text == "" {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.some = true
	if len(o.queued)+len(text) > maxQueued {
		return sandboxer.E(sandboxer.Failed, nil, "the sandbox says more of a command than it was asked for")
	}
	o.queued = append(o.queued, text...)
	wake(o.more)
	return nil
}

// last says that nothing more comes.
func (o *output) last() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.whole = true
	wake(o.more)
}

var errBroken = sandboxer.E(sandboxer.Failed, nil, "what the command wrote did not come whole out of the sandbox")

// deliver passes on what comes, until its end.
func (o *output) deliver(ctx context.Context) error {
	for {
		select {
		case <-o.more:
		case <-ctx.Done():
			return nil
		}
		o.mu.Lock()
		text, whole := o.queued, o.whole
		o.queued = nil
		o.mu.Unlock()
		o.line = append(o.line, text...)
		for {
			line, rest, ok := bytes.Cut(o.line, []byte("\n"))
			if !ok {
				break
			}
			if err := o.piece(line); err != nil {
				return err
			}
			o.line = rest
			if o.ended {
				close(o.over)
				return nil
			}
			select {
			case n := <-o.took: // nobody has asked for it yet
				o.took <- n + 1
			case o.took <- 1:
			}
		}
		if whole || len(o.line) > 2*pieceSize {
			return errBroken
		}
	}
}

// piece passes on one.
func (o *output) piece(line []byte) error {
	number, text, ok := bytes.Cut(line, []byte(" "))
	n, err := strconv.Atoi(string(number))
	if !ok || err != nil || n != o.next {
		return errBroken
	}
	o.next++
	data, err := base64.StdEncoding.Strict().DecodeString(string(text))
	if err != nil || len(data) > pieceSize || len(data) == 0 {
		return errBroken
	}
	data = append(o.held, data...)
	o.held = nil
	if before, _, found := bytes.Cut(data, o.c.end); found {
		data, o.ended = before, true
	} else {
		for k := min(len(o.c.end)-1, len(data)); k > 0; k-- {
			if bytes.HasSuffix(data, o.c.end[:k]) {
				o.held = bytes.Clone(data[len(data)-k:])
				data = data[:len(data)-k]
				break
			}
		}
	}
	if len(data) == 0 {
		return nil
	}
	if _, err := o.w.Write(data); err != nil {
		return sandboxer.E(sandboxer.Failed, errors.Join(errTaken, err), "the output of the command could not be delivered")
	}
	return nil
}

// ask asks for as many pieces as were taken, until there are no more.
func (o *output) ask(ctx context.Context) error {
	for taken := 0; ; {
		select {
		case n := <-o.took:
			if taken += n; taken < pieceAhead/2 {
				continue
			}
		case <-o.over:
			return nil
		case <-ctx.Done():
			return nil
		}
		if err := o.c.write(ctx, o.name+" "+strconv.Itoa(taken)); err != nil {
			select {
			case <-o.over:
				return nil
			default:
				return err
			}
		}
		taken = 0
	}
}
