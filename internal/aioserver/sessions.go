package aioserver

import (
	"crypto/rand"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// The bounds of sessions.
const (
	maxSessions   = 64               // of one kind in one sandbox that were asked for by name
	maxImplicit   = 16               // of one kind in one sandbox that were not; the ones used longest ago go
	maxSessionEnv = 64 << 10         // bytes of what a session has exported
	sessionIdle   = time.Hour        // without a command or a question: the session is dropped
	sessionRoom   = 10 * time.Minute // so, where there is no room for another one
	maxID         = 128
	closeTime     = time.Minute // for the commands of a session that is closed to end
)

// kind is the kind of a session.
type kind int

const (
	shellKind kind = iota
	bashKind
)

// sandboxState is the state of one sandbox. Server.mu guards all of it.
type sandboxState struct {
	generation int
	used       time.Time
	shell      string // of its commands: "bash" or "sh"; "" if not known yet
	sessions   [2]map[string]*session
}

// session is a directory and an environment that commands begin with. Server.mu guards it.
type session struct {
	id       string
	kind     kind
	implicit bool // no client chose its ID
	dir      string
	env      map[string]string
	unset    []string
	noChange time.Duration
	created  time.Time
	used     time.Time
	running  map[*command]bool
	count    int // of its commands
}

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
		st.drop()
		st = nil
	}
	if st == nil {
		st = &sandboxState{generation: c.sb.Generation}
		st.sessions[shellKind], st.sessions[bashKind] = map[string]*session{}, map[string]*session{}
		s.known[c.sb.ID] = st
	}
	st.used = time.Now()
	return st, nil
}

// prune drops what has not been used for long, once a minute.
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
				if now.Sub(se.used) > sessionIdle && len(se.running) == 0 {
					st.end(se)
				}
			}
		}
		if len(st.sessions[shellKind])+len(st.sessions[bashKind]) == 0 && now.Sub(st.used) > sessionIdle {
			delete(s.known, id)
		}
	}
}

// drop ends everything of a sandbox that is not known any more, with Server.mu held.
func (st *sandboxState) drop() {
	for _, sessions := range st.sessions {
		for _, se := range sessions {
			st.end(se)
		}
	}
}

// end stops the commands of a session and forgets it, with Server.mu held.
func (st *sandboxState) end(se *session) {
	delete(st.sessions[se.kind], se.id)
	for cmd := range se.running {
		cmd.stop(errKilled)
	}
}

func checkSessionID(field, id string) error {
	if len(id) > maxID || strings.ContainsFunc(id, func(r rune) bool { return r < ' ' || r == 0x7f || r == '/' }) {
		return bad(field, "want at most %d bytes, none of them a slash or a control character", maxID)
	}
	return nil
}

// open returns a session, with Server.mu held. If there is none, it is made and set up.
func (c *call) open(k kind, id string, setUp func(*session)) (*session, error) {
	st, err := c.s.state(c)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	if se := st.sessions[k][id]; se != nil && id != "" {
		se.used = now
		return se, nil
	}
	se := &session{id: id, kind: k, implicit: id == "", created: now, used: now, running: map[*command]bool{}}
	if se.implicit {
		se.id = strings.ToLower(rand.Text())
	}
	if err := st.makeRoom(se); err != nil {
		return nil, err
	}
	setUp(se)
	st.sessions[k][se.id] = se
	return se, nil
}

// makeRoom drops sessions in which nothing runs: implicit ones, and others that have not been used for
// a while. If there are none of these there is no room.
func (st *sandboxState) makeRoom(se *session) error {
	var same, idle []*session
	for _, o := range st.sessions[se.kind] {
		if o.implicit != se.implicit {
			continue
		}
		same = append(same, o)
		if len(o.running) == 0 {
			idle = append(idle, o)
		}
	}
	slices.SortFunc(idle, func(a, b *session) int { return a.used.Compare(b.used) })
	if !se.implicit {
		if len(same) >= maxSessions && len(idle) > 0 && se.created.Sub(idle[0].used) > sessionRoom {
			st.end(idle[0])
		} else if len(same) >= maxSessions {
			return sandboxer.E(sandboxer.Exhausted, nil, "this sandbox has %d sessions, which is the maximum", len(same)).
				WithHint("close one of them, or use it again")
		}
		return nil
	}
	for i := range min(len(same)-maxImplicit+1, len(idle)) {
		st.end(idle[i])
	}
	return nil
}

// find returns a session that is there, with Server.mu held.
func (c *call) find(k kind, id string) (*session, error) {
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

// keep applies what a command has changed to the next one's start, with Server.mu held.
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

// createSession returns a copy of a session: of an existing one, or of a new one that begins in dir.
func (c *call) createSession(k kind, field, id, dir string, noChange time.Duration) (se session, err error) {
	if err := checkSessionID(field, id); err != nil {
		return se, err
	}
	if dir, err = c.workDir(dir, true); err != nil {
		return se, err
	}
	if dir == "" {
		if dir, err = c.workspace(); err != nil {
			return se, err
		}
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	made, err := c.open(k, id, func(se *session) { se.dir, se.noChange = dir, noChange })
	if err != nil {
		return se, err
	}
	return *made, nil
}

// closeSession ends a session with its commands, and waits for that.
func (c *call) closeSession(k kind, id string) error {
	c.s.mu.Lock()
	var running []*command
	se, err := c.find(k, id)
	if err == nil {
		running = slices.Collect(maps.Keys(se.running))
		c.s.known[c.sb.ID].end(se)
	}
	c.s.mu.Unlock()
	if err != nil {
		return err
	}
	t := time.NewTimer(closeTime)
	defer t.Stop()
	for _, cmd := range running {
		select {
		case <-cmd.done:
		case <-t.C:
			return c.say("Session closed", nil)
		case <-c.ctx().Done():
			return c.ctx().Err()
		}
	}
	return c.say("Session closed", nil)
}
