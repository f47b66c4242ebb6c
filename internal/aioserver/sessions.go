package aioserver

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// The bounds of sessions.
const (
	maxSessions   = 64               // of one kind in one sandbox that were asked for by name
	maxImplicit   = 16               // of one kind in one sandbox that were not; the ones used longest ago go
	maxCommands   = 16               // of a bash session whose outputs are kept; the oldest that have ended go
	maxSessionEnv = 64 << 10         // bytes of what a session has exported
	sessionIdle   = time.Hour        // without a command or a question: the session is dropped
	sessionRoom   = 10 * time.Minute // so, where there is no room for another one
	maxCommand    = 1 << 20          // bytes
	maxArgument   = 96 << 10         // bytes of a command that are an argument: Linux takes 128 KiB
	maxID         = 128
	killGrace     = 2 * time.Second // between a signal that asks and one that does not
)

// kind is whose sessions they are.
type kind int

const (
	shellKind kind = iota
	bashKind
)

// sandboxState is what is kept of a sandbox. Server.mu guards all of it.
type sandboxState struct {
	generation int
	used       time.Time
	shell      string // of its commands: "bash" or "sh"; "" if nobody has looked
	sessions   [2]map[string]*session
	edits      map[string][]edit // by path; what undo_edit goes back to
	editBytes  int
	who        account
}

// session is a directory and an environment that commands begin with. Server.mu guards it.
type session struct {
	id       string
	kind     kind
	implicit bool // nobody chose its ID
	dir      string
	env      map[string]string
	unset    []string
	snapshot string // a script that commands of a bash session read first
	noChange time.Duration
	created  time.Time
	used     time.Time
	commands []*command // oldest first
	count    int
	ended    bool
}

func (se *session) last() *command {
	if len(se.commands) == 0 {
		return nil
	}
	return se.commands[len(se.commands)-1]
}

func (se *session) running() bool {
	return slices.ContainsFunc(se.commands, func(c *command) bool { return !c.isDone() })
}

// command is one command of a session.
type command struct {
	id      string
	out     *output // of a shell session: both. The text is with it
	err     *output // nil in a shell session
	input   *input
	signals chan os.Signal
	stop    context.CancelCauseFunc
	done    chan struct{}

	// Server.mu guards these: a session may let go of a command whose output somebody is about to answer.
	callers int
	dropped bool

	// Once it is done.
	end    error // why it was stopped, or not observed; nil if it came to its end
	exit   sandboxer.Exit
	killed bool // somebody sent a signal before
}

func (cmd *command) isDone() bool {
	select {
	case <-cmd.done:
		return true
	default:
		return false
	}
}

// Why a command is stopped.
var (
	errHardLimit = errors.New("the command took longer than it may")
	errNoChange  = errors.New("the command wrote nothing for longer than it may")
	errKilled    = errors.New("the command was ended")
	errLeft      = errors.New("the caller left")
)

var errNoSession = &statusError{error: sandboxer.E(sandboxer.NotFound, nil, "Session not found"), status: 404}

// state returns what is kept of the sandbox of a call, with s.mu held.
func (s *Server) state(c *call) (*sandboxState, error) {
	if s.closed {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "the server ends")
	}
	st := s.known[c.sb.ID]
	if st != nil && st.generation > c.sb.Generation {
		return nil, &statusError{error: sandboxer.E(sandboxer.NotFound, nil, "the sandbox has ended").WithHint("ask for a new one"), status: http.StatusGone}
	}
	if st != nil && st.generation < c.sb.Generation {
		go s.drop(st)
		st = nil
	}
	if st == nil {
		st = &sandboxState{generation: c.sb.Generation, who: c.who, edits: map[string][]edit{}}
		st.sessions[shellKind], st.sessions[bashKind] = map[string]*session{}, map[string]*session{}
		s.known[c.sb.ID] = st
	}
	st.used = time.Now()
	return st, nil
}

// prune drops what nobody has used for long, once a minute.
func (s *Server) prune() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if now.Unix()-s.pruned < 60 && now.Unix() >= s.pruned {
		return
	}
	s.pruned = now.Unix()
	for id, st := range s.known {
		for _, sessions := range st.sessions {
			for _, se := range sessions {
				if now.Sub(se.used) > sessionIdle && !se.running() {
					s.endSession(st, se)
				}
			}
		}
		if len(st.sessions[shellKind])+len(st.sessions[bashKind]) == 0 && now.Sub(st.used) > sessionIdle {
			s.memory.shrink(st.who, forEdits, st.editBytes)
			delete(s.known, id)
		}
	}
}

// drop ends everything of a sandbox that is not known any more.
func (s *Server) drop(st *sandboxState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sessions := range st.sessions {
		for _, se := range sessions {
			s.endSession(st, se)
		}
	}
	s.memory.shrink(st.who, forEdits, st.editBytes)
	st.edits, st.editBytes = nil, 0
}

// endSession stops the commands of a session and forgets it, with s.mu held.
func (s *Server) endSession(st *sandboxState, se *session) {
	se.ended = true
	delete(st.sessions[se.kind], se.id)
	for _, cmd := range se.commands {
		cmd.stop(errKilled)
		cmd.drop()
	}
}

// drop gives up what is kept of a command's output, once no call needs it.
func (cmd *command) drop() {
	cmd.dropped = true
	cmd.settle()
}

// settle says what may become of the outputs, with Server.mu held.
func (cmd *command) settle() {
	for _, o := range []*output{cmd.out, cmd.err} {
		switch {
		case o == nil:
		case cmd.callers > 0:
			o.wake()
		case cmd.dropped:
			o.release()
		case cmd.isDone():
			o.rest()
		}
	}
}

func checkSessionID(field, id string) error {
	if len(id) > maxID || strings.ContainsFunc(id, func(r rune) bool { return r < ' ' || r == 0x7f || r == '/' }) {
		return bad(field, "want at most %d bytes, none of them a slash or a control character", maxID)
	}
	return nil
}

// openSession returns a session, made if it is not there, and whether it was.
func (c *call) openSession(k kind, field, id string, setUp func(*session)) (*session, bool, error) {
	if err := checkSessionID(field, id); err != nil {
		return nil, false, err
	}
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	st, err := s.state(c)
	if err != nil {
		return nil, false, err
	}
	now := time.Now()
	if se := st.sessions[k][id]; se != nil && id != "" {
		se.used = now
		return se, true, nil
	}
	se := &session{id: id, kind: k, implicit: id == "", created: now, used: now}
	if se.implicit {
		se.id = strings.ToLower(rand.Text())
	}
	if err := s.makeRoom(st, se); err != nil {
		return nil, false, err
	}
	setUp(se)
	st.sessions[k][se.id] = se
	return se, false, nil
}

// makeRoom lets go of sessions in which nothing runs: of implicit ones, and of others that nobody has used for
// a while. Where there are none of these there is no room.
func (s *Server) makeRoom(st *sandboxState, se *session) error {
	var same, idle []*session
	for _, o := range st.sessions[se.kind] {
		if o.implicit != se.implicit {
			continue
		}
		same = append(same, o)
		if !o.running() {
			idle = append(idle, o)
		}
	}
	slices.SortFunc(idle, func(a, b *session) int { return a.used.Compare(b.used) })
	if !se.implicit {
		if len(same) >= maxSessions && len(idle) > 0 && se.created.Sub(idle[0].used) > sessionRoom {
			s.endSession(st, idle[0])
		} else if len(same) >= maxSessions {
			return sandboxer.E(sandboxer.Exhausted, nil, "this sandbox has %d sessions, as many as there may be", len(same)).
				WithHint("close one of them, or use it again")
		}
		return nil
	}
	for i := range min(len(same)-maxImplicit+1, len(idle)) {
		s.endSession(st, idle[i])
	}
	return nil
}

// session returns a session that is there.
func (c *call) session(k kind, id string) (*session, error) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	st, err := c.s.state(c)
	if err != nil {
		return nil, err
	}
	se := st.sessions[k][id]
	if se == nil {
		return nil, errNoSession
	}
	se.used = time.Now()
	return se, nil
}

// lastCommand returns the last command of a session; nil if it has none.
func (c *call) lastCommand(se *session) *command {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	return c.hold(se.last())
}

// hold keeps the output of a command, which may be nil, until the end of the call; with Server.mu held.
func (c *call) hold(cmd *command) *command {
	if cmd != nil {
		cmd.callers++
		cmd.settle()
		c.held = append(c.held, cmd)
	}
	return cmd
}

// read returns what is kept of an output from a place on, at most so many characters if that is not 0, and the place after it.
// It reserves room for it in the answer, where it is so many times.
func (c *call) read(o *output, from int64, running bool, most, times int) (string, int64, error) {
	c.s.reading.Lock()
	s, next := o.since(from, running)
	if most > 0 {
		s = shorten(s, most)
	}
	if times*encodedSize(s) > maxEncoded/2 {
		s = shorten(s, maxEncoded/2/6/times)
	}
	c.s.reading.Unlock()
	if err := c.reserve(len(s)); err != nil {
		return "", from, err
	}
	return s, next, c.foresee(s, times)
}

// readEnd is read for who has had a command run, and must not do that again because its output has no room.
func (c *call) readEnd(o *output, running bool, most, times int) (string, int64) {
	s, next, err := c.read(o, 0, running, most, times)
	if err != nil {
		return "\n[… the output is left out: " + sandboxer.Message(err) + " …]\n", 0
	}
	return s, next
}

// commandSpec says what start starts.
type commandSpec struct {
	text      string
	dir       string // "": that of the session
	env       map[string]string
	unset     []string
	input     bool // it has one, that write writes to
	hard      time.Duration
	noChange  time.Duration
	separated bool // stderr is kept apart
}

// start has a command run in a session. It goes on until it ends, a limit is reached, or somebody
// stops it; the ctx of the call matters to its values alone.
func (c *call) start(se *session, spec commandSpec) (*command, error) {
	if len(spec.text) > maxCommand {
		return nil, bad("command", "it is longer than %d bytes", maxCommand)
	}
	if strings.ContainsRune(spec.text, 0) {
		return nil, bad("command", "it has a NUL byte")
	}
	shell, err := c.findShell()
	if err != nil {
		return nil, err
	}
	s := c.s
	ctx, stop := context.WithCancelCause(context.WithoutCancel(c.ctx()))
	cmd := &command{id: strings.ToLower(rand.Text()), stop: stop, done: make(chan struct{}), signals: make(chan os.Signal, 4)}
	silence := newSilence(spec.noChange, func() { stop(errNoChange) })
	cmd.out = newOutput(s.memory, c.who, silence.broken)

	s.mu.Lock()
	defer s.mu.Unlock()
	if se.ended || s.closed {
		stop(nil)
		silence.stop()
		return nil, errNoSession
	}
	if !cmd.out.keepText(spec.text) {
		stop(nil)
		silence.stop()
		return nil, errFull()
	}
	job := sandboxer.Cmd{Env: maps.Clone(se.env), Dir: se.dir, Stdout: cmd.out, Signals: cmd.signals}
	if spec.dir != "" {
		job.Dir = spec.dir
	}
	if job.Env == nil {
		job.Env = map[string]string{}
	}
	unset := slices.Concat(se.unset, spec.unset)
	for k, v := range spec.env {
		job.Env[k] = v
		unset = slices.DeleteFunc(unset, func(name string) bool { return name == k })
	}
	var state *stateReader
	if spec.separated {
		cmd.err = newOutput(s.memory, c.who, silence.broken)
		job.Stderr = cmd.err
	} else {
		state = &stateReader{memory: s.memory, who: c.who}
		job.Stderr = state
	}
	job.Args = shellArgs(shell, spec.text, script{unset: unset, snapshot: se.snapshot, reports: !spec.separated})
	if len(spec.text) > maxArgument {
		job.Stdin = strings.NewReader(spec.text)
	} else if spec.input {
		cmd.input = newInput(s.memory, c.who)
		job.Stdin = cmd.input
		context.AfterFunc(ctx, cmd.input.close)
	}
	se.used = time.Now()
	se.count++
	se.commands = append(se.commands, cmd)
	most := 1
	if se.kind == bashKind {
		most = maxCommands
	}
	for i := 0; i < len(se.commands) && len(se.commands) > most; {
		if o := se.commands[i]; o.isDone() {
			o.drop()
			se.commands = slices.Delete(se.commands, i, i+1)
		} else {
			i++
		}
	}

	s.work.Go(func() {
		unstop := context.AfterFunc(s.ctx, func() { stop(sandboxer.E(sandboxer.Unavailable, nil, "the server ends")) })
		defer unstop()
		var exit sandboxer.Exit
		err := s.opts.Sandboxes.Awake(ctx, c.sb.ID)
		if err == nil {
			if spec.hard > 0 {
				defer time.AfterFunc(spec.hard, func() { stop(errHardLimit) }).Stop()
			}
			silence.begin()
			exit, err = s.opts.Sandboxes.Exec(ctx, c.sb.ID, job)
		}
		cause := context.Cause(ctx)
		stop(nil)
		if cmd.input != nil {
			cmd.input.close()
		}
		var ended shellState
		if state != nil {
			var said []byte
			if ended, said = state.end(); len(said) > 0 {
				cmd.out.Write(said)
			}
		}
		if exit.OOMKilled { // which its code alone does not tell
			said := cmd.err
			if said == nil {
				said = cmd.out
			}
			io.WriteString(said, "sandboxer: killed for its use of memory: the sandbox has a limit\n")
		}
		silence.stop() // which every output begins again
		if err != nil && cause != nil {
			err = cause
		}

		s.mu.Lock()
		defer s.mu.Unlock()
		se.used = time.Now()
		cmd.exit, cmd.end = exit, err
		if sandboxer.KindOf(err) == sandboxer.Invalid && job.Dir != "" && job.Dir == se.dir {
			// Most probably the directory is not there any more: that must not be the end of the session.
			se.dir = ""
			cmd.end = sandboxer.E(sandboxer.Invalid, err, "%s", sandboxer.Message(err)).WithHint("the next command of the session begins where sessions begin")
		}
		if err == nil && ended.ok {
			se.keep(ended)
		}
		close(cmd.done)
		cmd.settle()
	})
	return c.hold(cmd), nil
}

// keep makes what a command has changed what the next one begins with, with Server.mu held.
func (se *session) keep(st shellState) {
	env, unset := maps.Clone(se.env), slices.Clone(se.unset)
	if env == nil {
		env = map[string]string{}
	}
	for k, v := range st.set {
		env[k] = v
		unset = slices.DeleteFunc(unset, func(name string) bool { return name == k })
	}
	for _, k := range st.unset {
		delete(env, k)
		if !slices.Contains(unset, k) {
			unset = append(unset, k)
		}
	}
	size := 0
	for k, v := range env {
		size += len(k) + len(v)
	}
	for _, k := range unset {
		size += len(k)
	}
	if size <= maxSessionEnv {
		se.env, se.unset = env, unset
	}
	if st.dir != "" {
		se.dir = st.dir
	}
}

// wait waits until the command has ended, for at most most if that is not 0, and reports whether it
// has. If the caller leaves, the command is ended.
func (c *call) wait(cmd *command, most time.Duration) (bool, error) {
	var over <-chan time.Time
	if most > 0 {
		t := time.NewTimer(most)
		defer t.Stop()
		over = t.C
	}
	select {
	case <-cmd.done:
		return true, nil
	case <-over:
		return cmd.isDone(), nil
	case <-c.ctx().Done():
		cmd.stop(errLeft)
		<-cmd.done
		return true, c.ctx().Err()
	}
}

// kill sends a command a signal. KILL, and whatever does not end it in time, ends it with all that
// it has started.
func (c *call) kill(cmd *command, sig syscall.Signal) {
	c.s.mu.Lock()
	cmd.killed = true
	c.s.mu.Unlock()
	if sig == syscall.SIGKILL {
		cmd.stop(errKilled)
		return
	}
	select {
	case cmd.signals <- sig:
	default:
	}
	t := time.AfterFunc(killGrace, func() { cmd.stop(errKilled) })
	go func() {
		<-cmd.done
		t.Stop()
	}()
}

// silence tells when nothing was written for a while.
type silence struct {
	limit time.Duration
	timer *time.Timer
}

func newSilence(limit time.Duration, f func()) *silence {
	si := &silence{limit: limit}
	if limit > 0 {
		si.timer = time.AfterFunc(maxLimit, f)
	}
	return si
}

func (si *silence) begin() { si.broken() }

func (si *silence) broken() {
	if si.timer != nil {
		si.timer.Reset(si.limit)
	}
}

func (si *silence) stop() {
	if si.timer != nil {
		si.timer.Stop()
	}
}
