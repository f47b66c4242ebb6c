package remote

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// peer is the extension of kind sandboxer.
type peer struct {
	cfg    Config
	env    sandboxer.Env
	name   string // of the other installation, for people
	client *api.Client
	http   *http.Transport // nil over a Unix socket
	urls   *http.Transport // for the URLs of its sandboxes
	tenant string          // there, ours
	admin  bool            // our key may do everything there
	main   profile         // of cfg.Profile
	not    []sandboxer.Capability

	mu  sync.Mutex
	oom map[string]bool // by ID there: killed for its memory, and torn down
}

// The compiler checks what the adapter claims.
var _ interface {
	sandboxer.Extension
	sandboxer.Checker
	sandboxer.Admitter
	sandboxer.Execer
	sandboxer.Filer
	sandboxer.Dialer
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.Snapshotter
	sandboxer.Quoter
	sandboxer.Meter
	sandboxer.Pauser
	sandboxer.Renewer
	sandboxer.CapacityReporter
	sandboxer.StatsReader
	sandboxer.Networker
	sandboxer.Archiver
	sandboxer.AgentDialer
	sandboxer.ProcessManager
	sandboxer.Watcher
	sandboxer.Notifier
	sandboxer.URLDialer
	sandboxer.Narrower
	io.Closer
} = (*peer)(nil)

const (
	// openTime bounds the questions with which an extension is opened.
	openTime = 15 * time.Second
	// answerTime is how long a request that makes something waits for its answer although the caller
	// left.
	answerTime = 20 * time.Second
)

// openPeer opens an extension that takes answers of at most most bytes, except those that are passed on as they come.
func openPeer(ctx context.Context, env sandboxer.Env, cfg Config, most int64) (_ *peer, err error) {
	p := &peer{cfg: cfg, env: env, name: shownURL(cfg.URL), oom: map[string]bool{}}
	roots, err := authorities(cfg.CA)
	if err != nil {
		return nil, err
	}
	p.urls = reach{}.transport(roots)
	opts := api.Options{Token: cfg.Token, RootCAs: roots, MaxAnswer: most}
	if !strings.HasPrefix(cfg.URL, "unix:") {
		// The address is in the configuration file, so it may be anywhere.
		p.http = http.DefaultTransport.(*http.Transport).Clone()
		p.http.TLSClientConfig = p.urls.TLSClientConfig.Clone()
		p.http.Proxy = nil // one would choose the address, and read the key of http://
		p.http.ForceAttemptHTTP2, p.http.TLSNextProto = false, nil
		p.http.DisableCompression, p.http.MaxIdleConnsPerHost, p.http.MaxResponseHeaderBytes = true, 64, 64<<10
		opts.HTTP = &http.Client{Transport: p.http, CheckRedirect: noRedirect}
	}
	if p.client, err = api.New(cfg.URL, opts); err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "url: %s", sandboxer.Message(err)).WithHint("%s", sandboxer.HintOf(err))
	}
	defer func() {
		if err != nil {
			_ = p.Close() // there is an error already
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	// A fault there may be corrected there: it is no fault of the configuration.
	away := func(err error) error {
		err = p.fail(err)
		return sandboxer.E(sandboxer.Unavailable, err, "%s", sandboxer.Message(err)).WithHint("%s", sandboxer.HintOf(err))
	}
	status, err := p.client.Status(ctx)
	if err != nil {
		return nil, away(err)
	}
	p.tenant, p.admin = status.Tenant, slices.Contains(status.Scopes, sandboxer.ScopeAdmin)
	if p.main, err = p.profile(ctx, cfg.Profile); err != nil {
		return nil, away(err)
	}
	for c, of := range there {
		if !p.has(of) {
			p.not = append(p.not, c)
		}
	}
	if !p.has(sandboxer.CanExec) && !p.has(sandboxer.CanAgent) { // an archive is made by one of them
		p.not = append(p.not, sandboxer.CanArchive)
	}
	slices.Sort(p.not)
	return p, nil
}

// there maps capabilities of a peer to the capability that the extension there must have. The others need only its
// API.
var there = map[sandboxer.Capability]sandboxer.Capability{
	sandboxer.CanExec: sandboxer.CanExec, sandboxer.CanFiles: sandboxer.CanFiles, sandboxer.CanDial: sandboxer.CanDial,
	sandboxer.CanSnapshot: sandboxer.CanSnapshot, sandboxer.CanPause: sandboxer.CanPause, sandboxer.CanStats: sandboxer.CanStats,
	sandboxer.CanNetwork: sandboxer.CanNetwork, sandboxer.CanCapacity: sandboxer.CanCapacity,
	sandboxer.CanAgent: sandboxer.CanAgent, sandboxer.CanProcesses: sandboxer.CanAgent, sandboxer.CanWatch: sandboxer.CanAgent,
}

// has reports whether the extension there has a capability.
func (p *peer) has(c sandboxer.Capability) bool { return slices.Contains(p.main.ext.Capabilities, c) }

// shownURL is where the other installation is, for people.
func shownURL(text string) string {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return "the other installation"
	case u.Host != "":
		return u.Host
	}
	return u.Path
}

// Without implements sandboxer.Narrower.
func (p *peer) Without() []sandboxer.Capability { return p.not }

// Close closes connections; sandboxes live on.
func (p *peer) Close() error {
	p.client.Close()
	if p.http != nil {
		p.http.CloseIdleConnections()
	}
	return nil
}

// maxAnswer bounds an answer that is held in memory.
const maxAnswer = 64 << 20

// A profile is a profile of the other installation, with its extension.
type profile struct {
	api.Profile
	ext api.Extension
}

// profile asks for the profile of a name, and for its extension.
func (p *peer) profile(ctx context.Context, name string) (profile, error) {
	prof, err := p.client.Profile(ctx, name)
	if err != nil {
		return profile{}, err
	}
	exts, err := p.client.Extensions(ctx)
	if err != nil {
		return profile{}, err
	}
	i := slices.IndexFunc(exts.Items, func(e api.Extension) bool { return e.ID == prof.Extension })
	switch {
	case i < 0:
		return profile{}, sandboxer.E(sandboxer.Unavailable, nil, "%s has no extension %.60q", prof.ID, prof.Extension)
	case exts.Items[i].Problem != "":
		return profile{}, sandboxer.E(sandboxer.Unavailable, nil, "%s cannot be used: %.1000s", prof.Extension, exts.Items[i].Problem)
	}
	return profile{*prof, exts.Items[i]}, nil
}

// isolates reports whether every sandbox of the profile has the level.
func (f profile) isolates(level sandboxer.Isolation) bool {
	if f.Isolation != "" {
		return f.Isolation == level
	}
	return len(f.ext.Isolation) == 1 && f.ext.Isolation[0] == level
}

// fail turns an error of the other installation into ours: of the same kind, with its origin. If our key is
// not accepted, our caller cannot change that, and a fault of the other installation is not ours.
func (p *peer) fail(err error) error {
	if err == nil {
		return nil
	}
	var e *sandboxer.Error
	if !errors.As(err, &e) {
		return err
	}
	kind, cause := e.Kind, error(causeThere{err})
	if problem, theirs := e.Err.(*api.Problem); theirs { // and not what was made of one here
		kind = kindThere(kind)
		cause = &api.Problem{Status: problem.Status, Code: sandboxer.Kind(wordThere(string(problem.Code))), RequestID: wordThere(problem.RequestID)}
	}
	out := &sandboxer.Error{Kind: kind, Msg: p.name + ": " + textThere(e.Msg), Hint: textThere(sandboxer.HintOf(err)), RetryAfter: min(sandboxer.RetryAfterOf(err), time.Hour), Err: cause}
	if kind == sandboxer.Unauthenticated {
		out.Err = sandboxer.E(kind, cause, "%s", out.Msg) // why, for the log
		out.Kind, out.Msg = sandboxer.Unavailable, p.name+" does not accept the API key of "+p.env.Extension
		out.Hint = "an operator can set another one: token in its configuration"
	}
	return out
}

// A causeThere is an error whose text the other installation may have influenced, fit to be shown and kept.
type causeThere struct{ err error }

func (c causeThere) Error() string { return textThere(c.err.Error()) }

func (c causeThere) Unwrap() error { return c.err }

// kindThere is our kind for an error of the other installation. Its internal errors, its cancellations and unknown kinds may pass: Unavailable.
func kindThere(k sandboxer.Kind) sandboxer.Kind {
	switch {
	case k == sandboxer.Internal, k == sandboxer.Canceled, !slices.Contains(sandboxer.Kinds(), k):
		return sandboxer.Unavailable
	}
	return k
}

// maxText bounds texts from the other installation, in bytes.
const maxText = 2000

// textThere is a text from the other installation, fit to be shown and kept.
func textThere(s string) string { return capture.Text(s, maxText) }

// wordThere is a name or number from the other installation, fit to be shown and kept.
func wordThere(s string) string { return textThere(s[:min(len(s), 100)]) }

// textsThere are the first of a list of such.
func textsThere(all []string) (out []string) {
	for _, s := range all[:min(len(all), 100)] {
		out = append(out, textThere(s))
	}
	return out
}

// Admit implements sandboxer.Admitter. With a key that may not do everything, the other installation checks our requests
// as those of all its callers.
func (p *peer) Admit(spec sandboxer.Spec, name string) error {
	ok := !p.admin
	switch name {
	case inputProfile:
		ok = spec.Inputs[inputProfile] == p.cfg.Profile || slices.Contains(p.cfg.Profiles, spec.Inputs[inputProfile])
	case inputURL, sandboxer.AnyInput, sandboxer.RestrictedMounts:
		ok = false
	case sandboxer.RestrictedHost, sandboxer.RestrictedImage:
	default:
		// It is not known here which inputs the extension of another profile takes.
		in, declared := sandboxer.DeclarationOf(p.main.ext.Inputs, name)
		chosen := spec.Inputs[inputProfile]
		ok = ok || declared && !in.Restricted && (chosen == "" || chosen == p.cfg.Profile)
	}
	if ok {
		return nil
	}
	return sandboxer.E(sandboxer.Denied, nil, "%s takes %q only from an administrator, or with the value that its profile gives", p.env.Extension, name).
		WithHint("leave it out, or ask an administrator to put it into a profile")
}

// Check implements sandboxer.Checker: the other installation says what it would refuse.
func (p *peer) Check(ctx context.Context, spec sandboxer.Spec) error {
	req, err := p.request(ctx, spec)
	if err != nil {
		return err
	}
	_, err = p.client.Plan(ctx, req)
	return p.fail(err)
}

// request is the request to the other installation. It refuses what that API cannot express.
func (p *peer) request(ctx context.Context, spec sandboxer.Spec) (api.CreateSandbox, error) {
	none := api.CreateSandbox{}
	refuse := func(format string, args ...any) *sandboxer.Error {
		return sandboxer.E(sandboxer.Unsupported, nil, p.env.Extension+" "+format, args...)
	}
	switch {
	case len(spec.Mounts) > 0:
		return none, refuse("cannot mount directories of this machine in sandboxes of another installation, which has other files").WithHint("leave the mounts out and copy the files in, or add mounts to the profile of the other installation")
	case spec.Workspace != "":
		return none, refuse("cannot choose the workspace: the profile of the other installation sets it").WithHint("leave the workspace out")
	case spec.Warm:
		return none, refuse("keeps no sandboxes ready: the API of the other installation cannot hand over an existing sandbox").WithHint("leave the pool out of the profile")
	case spec.Inputs[inputURL] != "" || spec.Inputs[inputBase] != "":
		return none, sandboxer.E(sandboxer.Invalid, nil, "only extensions of kind url take the inputs url and base")
	}
	main := p.main
	if name := spec.Inputs[inputProfile]; name != "" && name != p.cfg.Profile {
		var err error
		if main, err = p.profile(ctx, name); err != nil {
			return none, p.fail(err)
		}
	}
	if level := spec.Profile.Isolation; level != "" && !main.isolates(level) {
		return none, refuse("cannot promise the isolation level %s: %s of the other installation does not", level, main.ID).WithHint("choose another profile of the other installation, or leave the isolation out of this profile")
	}
	inputs := maps.Clone(spec.Inputs)
	delete(inputs, inputProfile)
	if inputs == nil {
		inputs = map[string]string{}
	}
	inputs["sandbox_id"] = farID(p.env.Owner, p.env.Extension, spec.ID, spec.Generation)
	labels, err := p.labels(spec)
	if err != nil {
		return none, err
	}
	req := api.CreateSandbox{
		Profile: main.ID, Inputs: inputs, TTL: ttlUntil(spec.Fuse), Consumer: spec.Consumer, Labels: labels, Env: spec.Env, Limits: spec.Limits,
		Command: spec.Command, Image: spec.Image, User: spec.User, Host: spec.Host,
	}
	// Anything that the profile there would allow beyond that is removed. A profile whose extension cannot filter has no network mode.
	if m := main.Network.Mode; spec.Network.Mode != "" || len(spec.Network.Allow) > 0 || m != "" && m != sandboxer.NetworkNone {
		n := spec.Network
		n.Mode = cmp.Or(n.Mode, sandboxer.NetworkNone)
		req.Network = &n
	}
	return req, nil
}

// ttlUntil is the time to live that ends at a fuse; 0 if there is none.
func ttlUntil(fuse time.Time) time.Duration {
	if fuse.IsZero() {
		return 0
	}
	return max(time.Until(fuse), time.Second)
}

// whole calls f, which makes something, and waits for its answer even if the caller leaves: a request under way might
// arrive after the teardown that the caller sends next.
func whole[T any](ctx context.Context, f func(context.Context) (T, error)) (T, error) {
	var none T
	if err := ctx.Err(); err != nil {
		return none, err
	}
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		t := time.NewTimer(answerTime)
		defer t.Stop()
		select {
		case <-t.C:
			cancel()
		case <-own.Done():
		}
	})
	defer stop()
	out, err := f(own)
	if ctx.Err() != nil {
		return none, ctx.Err()
	}
	return out, err
}

// Provision implements sandboxer.Extension.
func (p *peer) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	req, err := p.request(ctx, spec)
	if err != nil {
		return sandboxer.Handle{}, err
	}
	req.NoWaiting = true
	sb, err := whole(ctx, func(ctx context.Context) (*api.Sandbox, error) { return p.client.Create(ctx, req) })
	if err != nil {
		return sandboxer.Handle{}, p.fail(err)
	}
	return p.made(ctx, sb, spec)
}

// made returns the handle of sb once it runs as spec wants it.
func (p *peer) made(ctx context.Context, sb *api.Sandbox, spec sandboxer.Spec) (sandboxer.Handle, error) {
	if s, ok := originOf(sb); !ok || sandboxer.CheckID(sb.ID) != nil || !p.owns(s, p.env.Owner) || s.ID != spec.ID || s.Generation != spec.Generation {
		return sandboxer.Handle{}, sandboxer.E(sandboxer.Conflict, nil, "%s has a sandbox %.60q of another owner", p.name, sb.ID).WithHint("ask an operator there to destroy it, or use another ID for %s", spec.ID)
	}
	sb, err := p.settled(ctx, sb)
	if err == nil && ended(sb) {
		err = p.failure(sb)
	}
	if err != nil {
		return sandboxer.Handle{}, err
	}
	return handleOf(sb, spec.ID, spec.Generation), nil
}

// settled waits until sb is in no transitional state any more, and passes its progress on.
func (p *peer) settled(ctx context.Context, sb *api.Sandbox) (*api.Sandbox, error) {
	if sb.State != sandboxer.Creating {
		return sb, nil
	}
	following, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		for ev, err := range p.client.Follow(following, api.EventQuery{Sandbox: p.ref(sb.ID)}) {
			if err != nil { // it sees less
				return
			}
			if ev.Progress != nil {
				at := *ev.Progress
				at.Step = textThere(at.Step)
				sandboxer.ReportProgress(ctx, at)
			}
		}
	})
	out, err := p.client.Wait(ctx, p.ref(sb.ID))
	stop()
	done.Wait()
	return out, p.fail(err)
}

// WaitReady implements sandboxer.Extension.
func (p *peer) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	none := sandboxer.Reachability{}
	sb, err := p.find(ctx, h)
	if err == nil {
		sb, err = p.settled(ctx, sb)
	}
	if err == nil && ended(sb) {
		err = p.failure(sb)
	}
	if err != nil {
		return none, err
	}
	r := sandboxer.Reachability{Host: p.name, Extra: map[string]string{"remote_sandbox": sb.ID}}
	if at := sb.Reachability; len(at.URL) <= maxURL && len(at.RemoteDir) <= maxURL { // else it is nowhere
		r.URL, r.RemoteDir = at.URL, at.RemoteDir
	}
	if changed := sb.Reachability.Extra[sandboxer.ExtraChanged]; changed != "" {
		r.Extra[sandboxer.ExtraChanged] = textThere(changed)
	}
	return r, nil
}

// Teardown implements sandboxer.Extension.
func (p *peer) Teardown(ctx context.Context, h sandboxer.Handle) (sandboxer.CleanupReport, error) {
	var r sandboxer.CleanupReport
	found := 0
	for sb, err := range p.live(ctx, p.env.Owner, h.SandboxID) {
		if err != nil {
			return r, p.fail(err)
		}
		if s, _ := originOf(&sb); h.Generation != 0 && s.Generation != h.Generation {
			continue
		}
		found++
		gone, err := p.client.Destroy(ctx, p.ref(sb.ID), true)
		switch {
		case sandboxer.KindOf(err) == sandboxer.NotFound:
			continue
		case err != nil:
			return r, p.fail(err)
		}
		r.Removed = append(r.Removed, p.name+"/"+sb.ID)
		if gone.Cleanup != nil {
			r.Kept, r.Warnings = append(r.Kept, textsThere(gone.Cleanup.Kept)...), append(r.Warnings, textsThere(gone.Cleanup.Warnings)...)
		}
	}
	if found > 0 || h.Generation == 0 {
		return r, nil
	}
	// A sandbox killed for its memory is reported as gone from now on.
	if sb, err := p.find(ctx, h); err == nil && sb.Reason == sandboxer.ReasonOOMKilled {
		p.mu.Lock()
		if len(p.oom) >= maxRemembered {
			clear(p.oom)
		}
		p.oom[sb.ID] = true
		p.mu.Unlock()
	} else if err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
		return r, err
	}
	return r, nil
}

// maxRemembered bounds peer.oom: after a teardown callers ask about a sandbox only for a short time.
const maxRemembered = 10_000
