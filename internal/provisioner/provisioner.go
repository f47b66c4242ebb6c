// Package provisioner is deer-flow's interface: the API of its sandbox provisioner, by which it makes, finds and
// ends sandboxes, and below /s/ the API inside of each of them, whose URL is all that deer-flow's
// client sends. deer-flow works with it unchanged. docs/how-to/deer-flow.md is for its users.
package provisioner

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/aioserver"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// The paths of the doors.
const (
	apiPath    = "/api/"
	healthPath = "/health"
	boxPath    = "/s/" // /s/<id>/<token>/v1/…
)

// How long requests wait. deer-flow's client gives up a create after 30 s, a delete after 15, and a
// look whether a sandbox is ready after 5.
const (
	createTime = 25 * time.Second
	deleteTime = 12 * time.Second
	readyTime  = 4 * time.Second
	bodyTime   = 10 * time.Second
)

const (
	maxBody = 64 << 10 // of a request of the provisioner's API
	maxList = 10_000   // sandboxes in one answer
)

// Options of New.
type Options struct {
	Profile    string      // of every sandbox
	MountRoots []MountRoot // directories within which requests may mount
	// IgnoreMounts leaves out requested mounts from other directories, which are refused otherwise: for a
	// gateway on another machine, whose paths mean nothing here.
	IgnoreMounts bool
	// UserData is a directory of this machine that has one for every tenant, user and thread, which
	// is mounted at /mnt/user-data. "": that directory's files end with the sandbox.
	UserData string
	// Skills is a directory of this machine whose "public", and "legacy" where a request wants it,
	// are mounted below /mnt/skills. "": only the skills that requests mount.
	Skills string
	// PublicURL is where clients reach the server, without a slash at its end. nil: as the request
	// came.
	PublicURL *url.URL
	// Anonymous admits requests without a key as the default tenant, over connections that begin and end
	// on this machine. There must be no proxy in front of the server: its clients would be admitted, too.
	Anonymous bool
	// StatusOK makes the API inside answer failures with the status 200, as images from 1.9 on do.
	StatusOK bool
	Owner    string       // the installation's name
	SpoolDir string       // see aioserver.Options
	Log      *slog.Logger // nil discards
}

// Sandboxes are the broker's sandboxes, as far as these doors need them. Except for BearerToken and
// Bearer, the methods act for the principal of ctx. Errors have kinds.
type Sandboxes interface {
	AdmitRequest(p sandboxer.Principal) error
	Create(ctx context.Context, req sandboxer.CreateRequest) (*sandboxer.Sandbox, error)
	GetChosen(ctx context.Context, id string) (*sandboxer.Sandbox, error)
	List(ctx context.Context, q sandboxer.Query) ([]*sandboxer.Sandbox, string, error)
	Destroy(ctx context.Context, ref string) (*sandboxer.Sandbox, error)
	// BearerToken returns the token that opens sb, and Bearer the access that a token gives.
	BearerToken(sb *sandboxer.Sandbox) sandboxer.Secret
	Bearer(ctx context.Context, id string, token sandboxer.Secret) (*manager.Bearer, *sandboxer.Sandbox, error)
}

// A Provisioner has deer-flow's doors to a broker. Close ends the commands that go on in sandboxes.
type Provisioner struct {
	sandboxes Sandboxes

	opts Options
	aio  *aioserver.Server
	data string // where the files of users are inside
	// patience is how long a create waits, and a call for a sandbox that does not run yet.
	patience time.Duration
	larkTold sync.Once // that there is no Lark CLI

	mu       sync.Mutex
	prepared map[object]struct{} // those that have /mnt/user-data
}

// object is one version of a sandbox's files.
type object struct {
	id         string
	generation int
}

// New returns the doors in front of sandboxes.
func New(sandboxes Sandboxes, o Options) *Provisioner {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	p := &Provisioner{sandboxes: sandboxes, opts: o, data: userDataPath, patience: createTime, prepared: map[object]struct{}{}}
	p.aio = aioserver.New(aioserver.Options{
		Sandboxes: boxes{p}, StatusOK: o.StatusOK, SpoolDir: o.SpoolDir,
		Failed: func(ctx context.Context, err error) (message, hint string) {
			p := edge.Problem(ctx, err)
			return p.Detail, p.Hint
		},
	})
	return p
}

// Close ends the work that goes on through p.
func (p *Provisioner) Close() { p.aio.Close() }

// Doors returns the doors. One has the API of the provisioner, one answers health checks, and one
// the API inside of sandboxes.
func (p *Provisioner) Doors() []edge.Door {
	health := &edge.Mux{}
	health.Handle(edge.Route{Pattern: "GET " + healthPath, Access: edge.Anyone(), Quiet: true, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	})})
	return []edge.Door{
		{Name: "deer-flow provisioner", Path: apiPath, Routes: p.routes(), Key: apiKey, Fail: fail},
		{Name: "deer-flow health", Path: healthPath, Routes: health, Fail: fail},
		{Name: "deer-flow sandboxes", Path: boxPath, Routes: &boxRouter{p}, Fail: failInside},
	}
}

func apiKey(r *http.Request) (sandboxer.Secret, error) { return edge.HeaderKey(r, "X-API-Key") }

// router is a Mux that admits callers without a key where that is configured. Requests without a route need a key, too: to
// a caller without one every path looks the same.
type router struct {
	edge.Mux
	anonymous bool
}

func (m *router) Route(r *http.Request) edge.Route {
	route := m.Mux.Route(r)
	if !route.Access.Identified() {
		none := route.Handler
		route.Access = edge.Needs(sandboxer.ScopeRead)
		route.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { none.ServeHTTP(bare{w}, r) })
	}
	if m.anonymous && route.Access.Scope() != "" && len(r.Header.Values(edge.KeyHeader)) == 0 && isLocal(r) {
		route.Access = edge.AdmittedBy(func(ctx context.Context) (context.Context, sandboxer.Principal, func(), error) {
			return ctx, sandboxer.Principal{
				Tenant: sandboxer.DefaultTenant, Actor: "deer-flow", Scopes: []sandboxer.Scope{sandboxer.ScopeRead, sandboxer.ScopeWrite},
			}, func() {}, nil
		})
	}
	return route
}

// bare answers with only the text of the status, as deer-flow's own server does where it has nothing.
type bare struct{ http.ResponseWriter }

func (b bare) WriteHeader(status int) {
	writeJSON(b.ResponseWriter, status, map[string]string{"detail": http.StatusText(status)})
}

func (b bare) Write(p []byte) (int, error) { return len(p), nil }

// byProxies are headers that proxies add. Missing ones prove nothing: nginx adds none unless it is configured to.
var byProxies = []string{"Forwarded", "Via", "X-Real-", "X-Forwarded", "X-Original-", "X-Client-", "X-Cluster-Client-", "X-Envoy-", "X-Amzn-", "X-Azure-", "True-Client-", "Cf-", "Fastly-", "Cdn-"}

// isLocal reports whether r comes from this machine to the address that the server listens on, and nothing shows that a
// proxy forwards it for others. The operator must know whether one could: see Options.Anonymous.
func isLocal(r *http.Request) bool {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if !ok || !local.IP.IsLoopback() {
		return false
	}
	remote, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || !remote.Addr().Unmap().IsLoopback() || !r.ProtoAtLeast(1, 1) {
		return false
	}
	for h := range r.Header {
		if slices.ContainsFunc(byProxies, func(p string) bool { return strings.HasPrefix(h, p) }) {
			return false
		}
	}
	host, port, err := net.SplitHostPort(r.Host)
	if err != nil {
		host, port = strings.Trim(r.Host, "[]"), map[bool]string{false: "80", true: "443"}[r.TLS != nil]
	}
	ip, err := netip.ParseAddr(host)
	return port == strconv.Itoa(local.Port) && (strings.EqualFold(host, "localhost") || err == nil && ip.Unmap().IsLoopback())
}

func (p *Provisioner) routes() *router {
	m := &router{anonymous: p.opts.Anonymous}
	for _, r := range []struct {
		pattern string
		scope   sandboxer.Scope
		handle  func(http.ResponseWriter, *http.Request) error
	}{
		{"GET /api/capabilities", sandboxer.ScopeRead, p.capabilities},
		{"POST /api/sandboxes", sandboxer.ScopeWrite, p.create},
		{"GET /api/sandboxes", sandboxer.ScopeRead, p.list},
		{"GET /api/sandboxes/{id}", sandboxer.ScopeRead, p.get},
		{"DELETE /api/sandboxes/{id}", sandboxer.ScopeWrite, p.destroy},
		{"GET /api/reconciliation/sandboxes/{id}", sandboxer.ScopeRead, p.reconcile},
	} {
		m.Handle(edge.Route{Pattern: r.pattern, Access: edge.Needs(r.scope), Handler: http.HandlerFunc(func(w http.ResponseWriter, in *http.Request) {
			if err := r.handle(w, in); err != nil {
				edge.Fail(w, in, err)
			}
		})})
	}
	return m
}

// mountContract is the version of the agreement of deer-flow and its provisioner about mounts: since 2
// the files of a thread are its user's.
const mountContract = 2

// The labels that identify what the doors made.
const (
	labelContract = "deer-flow.mount-contract"
	labelUser     = "deer-flow.user"
	labelThread   = "deer-flow.thread"
)

// answer is a sandbox in deer-flow's form. The fields from UserID on belong to a later contract, and
// clients of the first ignore them.
type answer struct {
	SandboxID  string `json:"sandbox_id"`
	SandboxURL string `json:"sandbox_url"`
	Status     string `json:"status"`
	UserID     string `json:"user_id"`
	ThreadID   string `json:"thread_id"`
	Contract   int    `json:"mount_contract_version"`
}

func (p *Provisioner) answer(ctx context.Context, sb *sandboxer.Sandbox) (answer, error) {
	base := p.opts.PublicURL
	if base == nil {
		base = edge.BaseURL(ctx)
	}
	if base == nil {
		return answer{}, sandboxer.E(sandboxer.Unavailable, nil, "the server listens on its Unix socket alone, so that sandboxes have no URL").
			WithHint("start it with --listen")
	}
	u := url.URL{Scheme: base.Scheme, Host: base.Host, Path: strings.TrimSuffix(base.Path, "/") + boxPath + sb.ID + "/" + p.sandboxes.BearerToken(sb).Reveal()}
	return answer{
		SandboxID: sb.Shown(), SandboxURL: u.String(), Status: statusOf(sb),
		UserID: sb.Spec.Labels[labelUser], ThreadID: sb.Spec.Labels[labelThread], Contract: mountContract,
	}, nil
}

// The words of Kubernetes by which deer-flow knows the state of a sandbox. A sandbox that is not running counts
// as dead for it, and is deleted.
const (
	statusRunning     = "Running"
	statusPending     = "Pending"
	statusTerminating = "Terminating"
)

// statusOf is Running for every sandbox that the next call finds running: that call resumes a paused one.
func statusOf(sb *sandboxer.Sandbox) string {
	if sb.State == sandboxer.Creating && sb.Pause.At.IsZero() {
		return statusPending
	}
	return statusRunning
}

// isThere reports whether sb is neither gone nor about to go.
func isThere(sb *sandboxer.Sandbox) bool {
	return sb.State.Live() && sb.State != sandboxer.Terminating
}

// find returns the sandbox of the caller's tenant that was made here under an ID, as long as it
// exists. NotFound: there is none.
func (p *Provisioner) find(ctx context.Context, id string) (*sandboxer.Sandbox, error) {
	none := sandboxer.E(sandboxer.NotFound, nil, "Sandbox '%s' not found", id)
	if sandboxer.CheckID(id) != nil {
		return nil, none
	}
	sb, err := p.sandboxes.GetChosen(ctx, id)
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound:
		return nil, none
	case err != nil: // in doubt it is never not found
		return nil, edge.WithStatus(http.StatusServiceUnavailable, err)
	case !isThere(sb) || sb.Spec.Labels[labelContract] == "":
		return nil, none
	}
	return sb, nil
}

func (p *Provisioner) capabilities(w http.ResponseWriter, _ *http.Request) error {
	writeJSON(w, http.StatusOK, map[string]any{"lark_cli_init_image": false, "lark_cli_broker_image": false, "mount_contract_version": mountContract})
	return nil
}

func (p *Provisioner) get(w http.ResponseWriter, r *http.Request) error {
	sb, err := p.find(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	a, err := p.answer(r.Context(), sb)
	if err == nil {
		writeJSON(w, http.StatusOK, a)
	}
	return err
}

// list has the running sandboxes. A paused sandbox is left out: deer-flow takes listed ones for left behind by
// one of its processes, and deletes them when no user asks for them.
func (p *Provisioner) list(w http.ResponseWriter, r *http.Request) error {
	ctx := r.Context()
	all := []answer{}
	q := sandboxer.Query{
		Tenant: sandboxer.PrincipalFrom(ctx).Tenant, States: []sandboxer.State{sandboxer.Creating, sandboxer.Running},
		Labels: map[string]string{labelContract: fmt.Sprint(mountContract)}, Limit: sandboxer.MaxPage,
	}
	for {
		items, next, err := p.sandboxes.List(ctx, q)
		if err != nil {
			return err
		}
		for _, sb := range items {
			a, err := p.answer(ctx, sb)
			if err != nil {
				return err
			}
			all = append(all, a)
		}
		if len(all) > maxList {
			return sandboxer.E(sandboxer.Exhausted, nil, "there are more than %d sandboxes, and this API has no pages", maxList).
				WithHint("list them by the server's own API: GET /v1/sandboxes")
		}
		if q.After = next; next == "" {
			break
		}
	}
	writeJSON(w, http.StatusOK, map[string]any{"sandboxes": all, "count": len(all)})
	return nil
}

// destroy succeeds also if there is nothing, and while the teardown goes on: it is recorded.
func (p *Provisioner) destroy(w http.ResponseWriter, r *http.Request) error {
	id := r.PathValue("id")
	out := map[string]any{"ok": true, "sandbox_id": id}
	sb, err := p.find(r.Context(), id)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		writeJSON(w, http.StatusOK, out)
		return nil
	}
	if err != nil {
		return err
	}
	p.aio.Forget(sb.ID)
	ctx, cancel := context.WithTimeout(r.Context(), deleteTime)
	defer cancel()
	if _, err = p.sandboxes.Destroy(ctx, sb.Ref()); err != nil {
		now, ferr := p.sandboxes.GetChosen(r.Context(), id)
		if ferr != nil || now.Generation == sb.Generation && isThere(now) {
			return sandboxer.E(sandboxer.KindOf(err), err, "Partial cleanup: %s", sandboxer.Message(err))
		}
		edge.LogError(r.Context(), err)
		out["status"] = statusTerminating
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// reconcile says for certain whether a sandbox exists, or fails.
func (p *Provisioner) reconcile(w http.ResponseWriter, r *http.Request) error {
	ctx, id := r.Context(), r.PathValue("id")
	namespace := p.opts.Owner + "/" + sandboxer.PrincipalFrom(ctx).Tenant
	absent := map[string]any{"sandbox_id": id, "status": "absent", "backend_namespace": namespace}
	if sandboxer.CheckID(id) != nil {
		writeJSON(w, http.StatusOK, absent)
		return nil
	}
	sb, err := p.sandboxes.GetChosen(ctx, id)
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound, err == nil && (sb.State == sandboxer.Terminated || sb.Spec.Labels[labelContract] == ""):
		writeJSON(w, http.StatusOK, absent)
		return nil
	case err != nil:
		return edge.WithStatus(http.StatusServiceUnavailable, err)
	case !isThere(sb):
		e := sandboxer.E(sandboxer.Unavailable, nil, "sandbox %s is being removed", id)
		e.RetryAfter = time.Second
		return e
	}
	a, err := p.answer(ctx, sb)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, struct {
		answer
		Status      string `json:"status"`
		Namespace   string `json:"backend_namespace"`
		Incarnation string `json:"incarnation_id"`
	}{a, "found", namespace, fmt.Sprintf("%s-g%d", sb.ID, sb.Generation)})
	return nil
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v)
}

// fail answers as the provisioner's own server does.
func fail(w http.ResponseWriter, p *api.Problem) {
	for k, v := range edge.ProblemHeaders(p) {
		w.Header()[k] = v
	}
	status, detail := p.Status, p.Detail
	switch {
	case status == http.StatusUnauthorized:
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(status)
		fmt.Fprint(w, "Unauthorized")
		return
	case p.Code == sandboxer.Failed && status == http.StatusUnprocessableEntity:
		status = http.StatusInternalServerError // 422 is a request that is none
	}
	if p.Hint != "" {
		detail += " (" + p.Hint + ")"
	}
	writeJSON(w, status, map[string]string{"detail": detail})
}

// failInside answers in the form of the API inside.
func failInside(w http.ResponseWriter, p *api.Problem) {
	for k, v := range edge.ProblemHeaders(p) {
		w.Header()[k] = v
	}
	status := p.Status
	if p.Code == sandboxer.NotFound && status == http.StatusNotFound {
		// A client that gets 404 for a command takes the image for too old, for good.
		status = http.StatusGone
	}
	var hint *string
	if p.Hint != "" {
		hint = &p.Hint
	}
	writeJSON(w, status, map[string]any{"success": false, "message": p.Detail, "data": nil, "hint": hint})
}

// Valid names of threads and users, as in deer-flow's own server, with its messages.
var (
	threadName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	userName   = regexp.MustCompile(`^[A-Za-z0-9_\-]+$`)
)

const maxUser = 255 // bytes: a directory has the name

// A MountRoot is a directory of this machine within which requests may mount.
type MountRoot struct {
	Path     string
	ReadOnly bool
}

// standsFor reports whether the operator has configured all mounts of a sandbox, so that they may
// be mounted for every caller.
func (p *Provisioner) standsFor(mounts []sandboxer.Mount) bool {
	roots := slices.Clone(p.opts.MountRoots)
	if p.opts.UserData != "" {
		roots = append(roots, MountRoot{Path: p.opts.UserData})
	}
	if p.opts.Skills != "" {
		roots = append(roots, MountRoot{Path: p.opts.Skills, ReadOnly: true})
	}
	return !slices.ContainsFunc(mounts, func(m sandboxer.Mount) bool {
		return !slices.ContainsFunc(roots, func(r MountRoot) bool { return m.Within(r.Path, r.ReadOnly) })
	})
}
