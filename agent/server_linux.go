package agent

import (
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
	users  userDB
	log    *slog.Logger
	drafts drafts
	listed dirNames
	base   []string // environment of every process, under the user's own
	id     string   // distinguishes the marks of our processes from those of other agents

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
	token   string            // empty: any caller is accepted
	env     map[string]string // of every process, over the user's own
	user    string            // of callers that name none
	workdir string            // where processes start by default; empty means the user's home
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

// ServeHTTP builds the handlers for the first request, so that creating a sandbox does not
// wait for them.
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

// serveInit takes settings from the broker. While a token is set the caller needs it; an
// init older than the last one is accepted and ignored.
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
		writeError(w, http.StatusBadRequest, "the access token is empty: leave it out to keep the current one")
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

// userOf finds a user of the sandbox; an empty name means the default user.
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

// resolve makes a path of a request absolute: relative to the default directory or to
// the user's home, which ~ also means.
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

// environ is the environment of a process: that of the agent, the user's, the
// sandbox's, the request's.
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

// workdir is where a process starts. A directory that the caller asked for must exist;
// without its home from the image the process starts anyway.
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

// headTime is how long a caller that connects to us may take for the head of a request.
const headTime = 30 * time.Second

// servers are those of s's wire: for connections that callers made, and for those that were
// handed over. The first request on the latter may come at any time, and a time limit could
// also expire because the agent has had no processor time.
type servers struct {
	made, donated *http.Server
	calls         gate // of the connections that callers made
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

// httpServer makes a server of s's wire: HTTP/1.1, and HTTP/2 without TLS. The time limit
// for the head of a request may be 0, which means none.
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

// listen opens one of init's addresses.
func listen(addr string) (net.Listener, error) {
	if path, ok := strings.CutPrefix(addr, donatePrefix); ok {
		return listenDonated(path)
	}
	if name, ok := strings.CutPrefix(addr, ownPrefix); ok {
		return listenOwn(name)
	}
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		// Remove a socket that a killed agent left.
		if fi, err := os.Lstat(path); err == nil && fi.Mode()&fs.ModeSocket != 0 {
			_ = os.Remove(path)
		}
		return net.Listen("unix", path)
	}
	return net.Listen("tcp", addr)
}
