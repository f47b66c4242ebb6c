package agent

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent/proto/filesystem/filesystemconnect"
	"github.com/sand-boxer/sandboxer/agent/proto/process/processconnect"
)

// A server is the agent of one sandbox.
type server struct {
	fuse  *fuse
	procs *table
	gates
	users userDB
	log   *slog.Logger
	base  []string // environment of every process, under the user's own
	id    string   // tells our processes' marks from those of other agents

	mu      sync.RWMutex
	set     settings
	initAt  time.Time
	watches watchers

	once    sync.Once
	handler http.Handler
	cpu     cpuMeter
	marks   atomic.Uint64
}

// settings are what POST /init can change.
type settings struct {
	token   string            // empty: everybody is let in
	env     map[string]string // of every process, over the user's own
	user    string            // whoever does not name one
	workdir string            // where processes start that do not say; empty means the user's home
}

func newServer(set settings, base []string, ringMax int, log *slog.Logger) *server {
	return &server{
		procs: newTable(ringMax),
		users: userDB{"/etc/passwd", "/etc/group"},
		log:   log, base: base, set: set, fuse: newFuse(),
		id: rand.Text()[:8],
	}
}

func (s *server) settings() settings {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.set
}

// ServeHTTP builds the handlers with the first request, because nobody waits for them
// while a sandbox is being created.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.once.Do(s.build)
	s.handler.ServeHTTP(w, r)
}

func (s *server) build() {
	opts := []connect.HandlerOption{
		connect.WithReadMaxBytes(maxMessage),
		connect.WithCompressMinBytes(4 << 10),
		connect.WithInterceptors(errorInterceptor{}),
	}
	mux := http.NewServeMux()
	mux.Handle(processconnect.NewProcessHandler(processService{s}, opts...))
	mux.Handle(filesystemconnect.NewFilesystemHandler(filesystemService{s}, opts...))
	mux.HandleFunc("GET /metrics", s.serveMetrics)
	mux.HandleFunc("GET /envs", s.serveEnvs)
	mux.HandleFunc("GET "+statsPath, s.serveStats)
	mux.HandleFunc("GET "+relayPath, s.serveRelay)
	mux.HandleFunc("GET "+archivePath, s.serveArchive)
	mux.HandleFunc("DELETE "+archivePath, s.serveEmpty)
	mux.HandleFunc("PUT "+archivePath, s.serveUnarchive)
	authed := s.authenticated(mux)

	open := http.NewServeMux()
	open.HandleFunc("GET /health", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(http.StatusNoContent)
	})
	open.HandleFunc("GET /files", s.serveDownload)
	open.HandleFunc("POST /files", s.serveUpload)
	open.HandleFunc("POST /init", s.serveInit)
	open.Handle("/", authed)
	s.handler = s.disk.handler(open)
}

// maxMessage bounds one message of the RPC services; streams have any number.
const maxMessage = 16 << 20

func (s *server) authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.hasToken(r) {
			writeError(w, http.StatusUnauthorized, "unauthorized access, please provide a valid access token or method signing")
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (s *server) hasToken(r *http.Request) bool {
	want := s.settings().token
	return want == "" || sameSecret(r.Header.Get(tokenHeader), want)
}

func sameSecret(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// writeError answers in the form of the plain endpoints: a numeric code.
func writeError(w http.ResponseWriter, status int, format string, args ...any) {
	body, _ := json.Marshal(map[string]any{"code": status, "message": fmt.Sprintf(format, args...)})
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

func writeJSON(w http.ResponseWriter, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		writeError(w, http.StatusInternalServerError, "%v", err)
		return
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	_, _ = w.Write(body)
}

// writeFailure answers err on a plain endpoint.
func writeFailure(w http.ResponseWriter, err error) {
	err = fileError(err)
	kind := sandboxer.KindOf(err)
	w.Header().Set(kindHeader, string(kind))
	status := http.StatusInternalServerError
	switch kind {
	case sandboxer.Invalid, sandboxer.Conflict:
		status = http.StatusBadRequest
	case sandboxer.Unauthenticated:
		status = http.StatusUnauthorized
	case sandboxer.Denied:
		status = http.StatusForbidden
	case sandboxer.NotFound:
		status = http.StatusNotFound
	case sandboxer.Exhausted:
		status = http.StatusInsufficientStorage
	case sandboxer.Unavailable:
		status = http.StatusBadGateway
	}
	writeError(w, status, "%s", err.Error())
}

// serveInit takes the settings from whoever runs the sandbox. While a token is set it
// is demanded; an older order than the last one is accepted and ignored.
func (s *server) serveInit(w http.ResponseWriter, r *http.Request) {
	if !s.hasToken(r) {
		writeError(w, http.StatusUnauthorized, "unauthorized access: the sandbox has been initialized with another access token")
		return
	}
	var req struct {
		AccessToken    *string           `json:"accessToken"`
		EnvVars        map[string]string `json:"envVars"`
		DefaultUser    *string           `json:"defaultUser"`
		DefaultWorkdir *string           `json:"defaultWorkdir"`
		Timestamp      time.Time         `json:"timestamp"`
		Fuse           *time.Time        `json:"fuse"`
	}
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<20)).Decode(&req)
	switch {
	case errors.Is(err, io.EOF): // an empty body changes nothing
	case err != nil:
		writeError(w, http.StatusBadRequest, "the body is not the JSON expected here: %v", err)
		return
	case req.AccessToken != nil && *req.AccessToken == "":
		writeError(w, http.StatusBadRequest, "the access token is empty: leave it out to keep the present one")
		return
	case req.DefaultWorkdir != nil && *req.DefaultWorkdir != "" && !filepath.IsAbs(*req.DefaultWorkdir):
		writeError(w, http.StatusBadRequest, "defaultWorkdir %q is not absolute", *req.DefaultWorkdir)
		return
	}
	if req.DefaultUser != nil && *req.DefaultUser != "" {
		if _, ok := s.users.lookup(*req.DefaultUser); !ok {
			writeError(w, http.StatusBadRequest, "invalid username: '%s'", *req.DefaultUser)
			return
		}
	}
	for k, v := range req.EnvVars {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			writeError(w, http.StatusBadRequest, "environment variable %q: a name has no '=', and neither name nor value a NUL byte", k)
			return
		}
	}
	s.mu.Lock()
	if req.Timestamp.IsZero() || !req.Timestamp.Before(s.initAt) {
		s.initAt = req.Timestamp
		if req.AccessToken != nil {
			s.set.token = *req.AccessToken
		}
		if req.EnvVars != nil {
			s.set.env = req.EnvVars
		}
		if req.DefaultUser != nil {
			s.set.user = *req.DefaultUser
		}
		if req.DefaultWorkdir != nil {
			s.set.workdir = *req.DefaultWorkdir
		}
		if req.Fuse != nil {
			s.fuse.set(*req.Fuse)
		}
	}
	s.mu.Unlock()
	w.WriteHeader(http.StatusNoContent)
}

func (s *server) serveEnvs(w http.ResponseWriter, r *http.Request) {
	env := s.settings().env
	if env == nil {
		env = map[string]string{}
	}
	writeJSON(w, env)
}

// userOf finds a user of the sandbox; the empty name means the default one.
func (s *server) userOf(name string) (user, error) {
	if name == "" {
		name = s.settings().user
	}
	if name == "" {
		name = strconv.Itoa(os.Geteuid())
	}
	u, ok := s.users.lookup(name)
	if !ok {
		return user{}, sandboxer.E(sandboxer.Invalid, errNoUser, "invalid username: '%s'", name)
	}
	if euid := os.Geteuid(); euid != 0 && int(u.uid) != euid {
		return user{}, sandboxer.E(sandboxer.Invalid, errNoUser,
			"invalid username: '%s': the agent runs as uid %d and cannot become another user", name, euid)
	}
	return u, nil
}

// errNoUser marks errors about users, which the wire calls unauthenticated.
var errNoUser = errors.New("no such user")

// rpcUser is the user that a call names in its Basic credentials, without password.
func (s *server) rpcUser(h http.Header) (user, error) {
	b, ok := strings.CutPrefix(h.Get("Authorization"), "Basic ")
	if !ok {
		return s.userOf("")
	}
	raw, err := base64.StdEncoding.DecodeString(b)
	if err != nil {
		return user{}, sandboxer.E(sandboxer.Invalid, errNoUser, "invalid username: the Basic credentials are not base64")
	}
	name := string(raw)
	// A user may be written uid:gid, so that only the last colon ends the name.
	if i := strings.LastIndexByte(name, ':'); i >= 0 {
		name = name[:i]
	}
	return s.userOf(name)
}

// resolve makes a path of a request absolute: relative to the default directory or
// the user's home, with ~ meaning the latter.
func (s *server) resolve(path string, u user) (string, error) {
	if strings.ContainsRune(path, 0) {
		return "", sandboxer.E(sandboxer.Invalid, nil, "the path contains a NUL byte")
	}
	switch {
	case path == "~":
		return u.home, nil
	case strings.HasPrefix(path, "~/"):
		return filepath.Join(u.home, path[2:]), nil
	case filepath.IsAbs(path):
		return filepath.Clean(path), nil
	}
	dir := s.settings().workdir
	if dir == "" {
		dir = u.home
	}
	return filepath.Join(dir, path), nil
}

// environ is the environment of a process: what the agent was started with, the
// user's own, the sandbox's, the request's.
func (s *server) environ(u user, extra map[string]string, mark string) []string {
	set := s.settings()
	env := make([]string, 0, len(s.base)+4+len(set.env)+len(extra))
	seen := make(map[string]int, cap(env))
	put := func(k, kv string) {
		if i, ok := seen[k]; ok {
			env[i] = kv
			return
		}
		seen[k] = len(env)
		env = append(env, kv)
	}
	for _, kv := range s.base {
		k, _, _ := strings.Cut(kv, "=")
		put(k, kv)
	}
	put("HOME", "HOME="+u.home)
	put("USER", "USER="+u.name)
	put("LOGNAME", "LOGNAME="+u.name)
	for k, v := range set.env {
		put(k, k+"="+v)
	}
	for k, v := range extra {
		put(k, k+"="+v)
	}
	put(markVar, markVar+"="+mark)
	return env
}

// workdir is where a process starts. A directory that somebody asked for must exist;
// a home that the image lacks is no reason not to run.
func (s *server) workdir(asked string, u user) (string, error) {
	dir, err := s.resolve(asked, u)
	if err != nil {
		return "", err
	}
	fi, err := os.Stat(dir)
	switch {
	case err == nil && fi.IsDir():
		return dir, nil
	case err == nil:
		return "", sandboxer.E(sandboxer.Invalid, nil, "cwd '%s' is not a directory", dir)
	case asked == "" && s.settings().workdir == "":
		return "/", nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return "", sandboxer.E(sandboxer.Invalid, err, "cwd '%s' does not exist", dir)
	}
	return "", sandboxer.E(sandboxer.Invalid, err, "cwd '%s' cannot be used", dir)
}

// errorInterceptor gives every failure its code on the wire, and its Kind in the
// metadata for clients of ours.
type errorInterceptor struct{}

func (errorInterceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		res, err := next(ctx, req)
		return res, wireError(err)
	}
}

func (errorInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (errorInterceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return wireError(next(ctx, conn))
	}
}

func wireError(err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		return err
	}
	var start *sandboxer.StartError
	if errors.As(err, &start) {
		code := connect.CodeNotFound
		if start.Code != sandboxer.ExitNotFound {
			code = connect.CodePermissionDenied
		}
		ce = connect.NewError(code, start)
		ce.Meta().Set(exitHeader, strconv.Itoa(start.Code))
		return ce
	}
	err = fileError(err)
	kind := sandboxer.KindOf(err)
	code := connect.CodeInternal
	switch kind {
	case sandboxer.Invalid:
		code = connect.CodeInvalidArgument
		if errors.Is(err, errNoUser) {
			code = connect.CodeUnauthenticated
		}
	case sandboxer.Denied:
		code = connect.CodePermissionDenied
	case sandboxer.NotFound:
		code = connect.CodeNotFound
	case sandboxer.Conflict:
		code = connect.CodeFailedPrecondition
		if errors.Is(err, fs.ErrExist) {
			code = connect.CodeAlreadyExists
		}
	case sandboxer.Exhausted:
		code = connect.CodeResourceExhausted
	case sandboxer.Unsupported:
		code = connect.CodeUnimplemented
	case sandboxer.Unavailable:
		code = connect.CodeUnavailable
	case sandboxer.Timeout:
		code = connect.CodeDeadlineExceeded
	case sandboxer.Canceled:
		code = connect.CodeCanceled
	}
	var se *sandboxer.Error
	msg := err.Error()
	if errors.As(err, &se) {
		msg = se.Msg
	}
	ce = connect.NewError(code, errors.New(msg))
	ce.Meta().Set(kindHeader, string(kind))
	return ce
}

// fileError gives an error of the file system its Kind.
func fileError(err error) error {
	var e *sandboxer.Error
	if errors.As(err, &e) {
		return err
	}
	var pe *fs.PathError
	var le *os.LinkError
	what := err.Error()
	switch {
	case errors.As(err, &pe):
		what = fmt.Sprintf("path '%s': %v", pe.Path, pe.Err)
	case errors.As(err, &le):
		what = fmt.Sprintf("'%s' to '%s': %v", le.Old, le.New, le.Err)
	}
	for _, m := range [...]struct {
		target error
		kind   sandboxer.Kind
	}{
		{fs.ErrNotExist, sandboxer.NotFound},
		{fs.ErrExist, sandboxer.Conflict},
		{fs.ErrPermission, sandboxer.Denied},
		{unix.EROFS, sandboxer.Denied},
		{unix.ENOSPC, sandboxer.Exhausted},
		{unix.EDQUOT, sandboxer.Exhausted},
		{unix.EMFILE, sandboxer.Exhausted},
		{unix.ENOTDIR, sandboxer.Invalid},
		{unix.EISDIR, sandboxer.Invalid},
		{unix.ENAMETOOLONG, sandboxer.Invalid},
		{unix.ELOOP, sandboxer.Invalid},
		{unix.EINVAL, sandboxer.Invalid},
		{unix.EXDEV, sandboxer.Invalid},
		{unix.ETXTBSY, sandboxer.Conflict},
		{unix.EBUSY, sandboxer.Conflict},
		{context.DeadlineExceeded, sandboxer.Timeout},
		{context.Canceled, sandboxer.Canceled},
	} {
		if errors.Is(err, m.target) {
			return sandboxer.E(m.kind, err, "%s", what)
		}
	}
	return sandboxer.E(sandboxer.Internal, err, "%s", what)
}

// headTime is how long whoever connects by himself may take for the head of a request.
const headTime = 30 * time.Second

// servers are those of s's wire: for connections that somebody made, and for those that were
// handed over. The first request on the latter may come at any time, and a time for it
// would be over, too, where the agent has not had the processor.
type servers struct {
	made, donated *http.Server
	calls         gate // of the connections that somebody made
}

func (s *server) servers(head time.Duration) servers {
	return servers{s.httpServer(head), s.httpServer(0), s.calls}
}

func (s servers) serve(l net.Listener) error {
	if _, ok := l.(*donateListener); ok {
		return s.donated.Serve(l)
	}
	return s.made.Serve(s.calls.listener(l))
}

// httpServer makes a server of s's wire: HTTP/1.1, and HTTP/2 without TLS. The time for the
// head of a request may be 0, which is no limit.
func (s *server) httpServer(head time.Duration) *http.Server {
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           s,
		Protocols:         &p,
		ReadHeaderTimeout: head,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          1000,
			MaxReadFrameSize:              256 << 10,
			MaxReceiveBufferPerStream:     2 << 20,
			MaxReceiveBufferPerConnection: 8 << 20,
		},
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// listen opens one of the addresses of init.
func listen(addr string) (net.Listener, error) {
	if path, ok := strings.CutPrefix(addr, donatePrefix); ok {
		return listenDonated(path)
	}
	if name, ok := strings.CutPrefix(addr, ownPrefix); ok {
		return listenOwn(name)
	}
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		// A socket left by an agent that was killed would be in the way.
		if fi, err := os.Lstat(path); err == nil && fi.Mode()&fs.ModeSocket != 0 {
			_ = os.Remove(path)
		}
		return net.Listen("unix", path)
	}
	return net.Listen("tcp", addr)
}
