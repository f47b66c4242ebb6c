// Package aioserver answers the API that agent-infra's all-in-one image has inside of its
// containers, for sandboxes that are made of anything: commands and files are the broker's own,
// so that any image with a shell will do. Clients of that API, deer-flow's for one, work unchanged.
//
// It is no door: whoever mounts it finds out who may, and for which sandbox.
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
	MakeDir(ctx context.Context, ref, dir string) error
	MoveFile(ctx context.Context, ref, from, to string) error
	RemoveFile(ctx context.Context, ref, name string) error
}

// A Sandbox is the one that a request is about.
type Sandbox struct {
	// ID is what Sandboxes is asked by: sandboxer.Sandbox.ID, which is unique in the installation.
	ID string
	// Generation is sandboxer.Sandbox.Generation, which stays over a pause. Sessions of another one
	// are forgotten.
	Generation int
}

// Options of New.
type Options struct {
	Sandboxes Sandboxes
	// StatusOK answers operations on files that fail by what the files are with the status 200 and
	// "success": false, as images from 1.9 on do, but for downloads; otherwise they have an HTTP status
	// that says so, as what fails for other reasons always has.
	StatusOK bool
	// Failed is told of every error that is answered, with its cause, for the log. nil: nobody is.
	Failed func(ctx context.Context, err error)
	// SpoolDir is where the contents of files that come in JSON wait until all of it is read, in
	// files without a name. "": the directory for temporary files.
	SpoolDir string
}

// Server answers requests, and keeps the sessions of sandboxes. Its methods may be called at once.
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

// Serve answers a request for something below /v1/, where r.URL.Path begins, about a sandbox. The
// principal of r's ctx is who uses the sandbox. When that ctx ends, so does what the request waits
// for; who mounts a Server behind an edge gives it a ctx of edge.Stream, since answers are flushed.
func (s *Server) Serve(w http.ResponseWriter, r *http.Request, sb Sandbox) {
	c := &call{s: s, w: w, r: r, sb: sb, who: account{sandboxer.PrincipalFrom(r.Context()).Tenant, sb.ID}}
	defer c.release()
	s.prune()
	if err := c.route(); err != nil {
		c.fail(err)
	}
}

// Forget ends the commands and drops the sessions of the sandbox with an ID. It is to be called when the
// sandbox has ended.
func (s *Server) Forget(id string) {
	s.mu.Lock()
	st := s.known[id]
	delete(s.known, id)
	s.mu.Unlock()
	if st != nil {
		s.drop(st)
	}
}

// Close ends all commands, and waits for that. Requests that come later are refused.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.work.Wait()
}
