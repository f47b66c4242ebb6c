// Package aioserver answers the part of the API inside of agent-infra's all-in-one image that deer-flow
// uses, for sandboxes of any kind: commands and files are the broker's own, so that any
// image with a shell will do. It refuses the rest of that API by name.
//
// It is no door: the door that mounts it checks who may use it, and for which sandbox.
package aioserver

import (
	"context"
	"io"
	"io/fs"
	"iter"
	"net/http"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// Sandboxes runs commands and moves files in sandboxes, on behalf of the principal of ctx. Its
// errors have kinds.
type Sandboxes interface {
	// Awake returns once the sandbox can run a command. Time limits of commands begin then.
	Awake(ctx context.Context, ref string) error
	Exec(ctx context.Context, ref string, cmd sandboxer.Cmd) (sandboxer.Exit, error)
	ReadFile(ctx context.Context, ref, name string) (io.ReadCloser, error)
	WriteFile(ctx context.Context, ref, name string, mode fs.FileMode, r io.Reader) error
	StatFile(ctx context.Context, ref, name string) (sandboxer.FileInfo, error)
	ListFiles(ctx context.Context, ref, dir, after string) iter.Seq2[sandboxer.FileInfo, error]
}

// A Sandbox is the sandbox of a request.
type Sandbox struct {
	// ID is the ID for Sandboxes: sandboxer.Sandbox.ID, which is unique in the installation.
	ID string
	// Generation is sandboxer.Sandbox.Generation, which stays over a pause. Sessions of other generations
	// are forgotten.
	Generation int
}

// Options of New.
type Options struct {
	Sandboxes Sandboxes
	// StatusOK answers operations on files, except downloads, that fail because of the files with the status 200 and
	// "success": false, as images from 1.9 on do. Otherwise they have an HTTP status
	// for the error, as failures for other reasons always have.
	StatusOK bool
	// Failed gets every error that is answered, with its cause, for the log, and returns the message and the hint of the
	// answer: for an internal error the ID of its log entry. nil: there is no log.
	Failed func(ctx context.Context, err error) (message, hint string)
	// SpoolDir is where the contents of files that come in JSON wait until all of it is read, in
	// files without a name. "": the directory for temporary files.
	SpoolDir string
}

// Server answers requests, and keeps the sessions of sandboxes. Its methods are safe for concurrent use.
type Server struct {
	opts   Options
	ctx    context.Context // of commands
	cancel context.CancelFunc
	memory *memory

	reading sync.Mutex // of outputs: copies of them that are on their way into answers are not accounted for

	mu      sync.Mutex
	spools  map[string]int   // contents that wait in files: all at "", those of a tenant at its name and a slash
	spooled map[string]int64 // bytes of them
	closed  bool
	known   map[string]*sandboxState
	pruned  int64          // unix time
	work    sync.WaitGroup // commands; added to under mu
}

// New returns a Server without sessions.
func New(o Options) *Server {
	s := &Server{opts: o, memory: newMemory(), known: map[string]*sandboxState{}, spools: map[string]int{}, spooled: map[string]int64{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Serve answers a request for a path below /v1/, where r.URL.Path begins, about a sandbox. The
// principal of r's ctx uses the sandbox. When that ctx ends, so does what the request waits
// for; behind an edge, the caller passes a ctx of edge.Stream, since answers are flushed.
func (s *Server) Serve(w http.ResponseWriter, r *http.Request, sb Sandbox) {
	c := &call{s: s, w: w, r: r, sb: sb, who: account{sandboxer.PrincipalFrom(r.Context()).Tenant, sb.ID}}
	defer c.release()
	s.prune()
	if err := c.route(); err != nil {
		c.fail(err)
	}
}

// Forget ends the commands and drops the sessions of the sandbox with an ID. Call it when the
// sandbox has ended.
func (s *Server) Forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st := s.known[id]; st != nil {
		st.drop()
		delete(s.known, id)
	}
}

// Close ends all commands, and waits for that. Later requests are refused.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.work.Wait()
}
