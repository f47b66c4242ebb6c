package remote

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosts"
	"github.com/sand-boxer/sandboxer/internal/notes"
)

// site is the extension of the kinds url and aio.
type site struct {
	cfg   Config
	env   sandboxer.Env
	bases map[string]*url.URL
	allow []*url.URL

	named  *http.Client // for URLs in the configuration
	public *http.Client // for what does not
}

// The compiler checks what the adapter claims.
var _ interface {
	sandboxer.Extension
	sandboxer.Checker
	sandboxer.Admitter
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.CapacityReporter
	sandboxer.URLDialer
} = (*site)(nil)

func openSite(ctx context.Context, env sandboxer.Env, cfg Config) (*site, error) {
	s := &site{cfg: cfg, env: env, bases: map[string]*url.URL{}}
	var written []netip.Addr
	add := func(text string) (*url.URL, error) {
		u, err := parseURL(text)
		if err == nil {
			if a, err := netip.ParseAddr(u.Hostname()); err == nil {
				written = append(written, a)
			}
		}
		return u, err
	}
	for name, text := range cfg.Bases {
		u, err := add(text)
		if err != nil {
			return nil, err
		}
		s.bases[name] = u
	}
	for _, text := range cfg.Allow {
		u, err := add(text)
		if err != nil {
			return nil, err
		}
		s.allow = append(s.allow, u)
	}
	roots, err := authorities(cfg.CA)
	if err != nil {
		return nil, err
	}
	client := func(r reach) *http.Client {
		return &http.Client{Transport: r.transport(roots), CheckRedirect: noRedirect}
	}
	s.named, s.public = client(reach{written: written, named: true}), client(reach{})
	if err := notes.Move(ctx, env.Notes, filepath.Join(env.Dir, formerDir), ".json"); err != nil {
		return nil, err
	}
	return s, nil
}

// formerDir is where earlier versions kept leases, in the extension's directory.
const formerDir = "lease"

// Close closes connections; leases stay.
func (s *site) Close() error {
	s.named.CloseIdleConnections()
	s.public.CloseIdleConnections()
	return nil
}

// Check implements sandboxer.Checker.
func (s *site) Check(_ context.Context, spec sandboxer.Spec) error {
	_, err := s.wish(spec)
	return err
}

// A wish is a parsed request: a URL, one base, or any base (both empty).
type wish struct {
	base string
	url  *url.URL
}

// wish returns what spec asks for, and refuses what something that exists already cannot provide.
func (s *site) wish(spec sandboxer.Spec) (wish, error) {
	var w wish
	refuse := func(what string) error {
		return sandboxer.E(sandboxer.Unsupported, nil, "a sandbox of %s exists already and is not changed: it cannot have %s", s.env.Extension, what).WithHint("leave it out")
	}
	if err := refuseInputs(spec, inputBase, inputURL); err != nil {
		return w, err
	}
	switch {
	case spec.Image != "":
		return w, refuse("an image")
	case len(spec.Command) > 0:
		return w, refuse("a command")
	case len(spec.Env) > 0:
		return w, refuse("an environment")
	case spec.Limits != sandboxer.Limits{}:
		return w, refuse("limits")
	case spec.Network.Mode != "" || len(spec.Network.Allow) > 0:
		return w, refuse("a network policy")
	case len(spec.Mounts) > 0:
		return w, refuse("mounts")
	case len(spec.Ports) > 0:
		return w, refuse("ports")
	case spec.Workspace != "":
		return w, refuse("a workspace")
	case spec.User != "":
		return w, refuse("a user")
	case spec.Host != "":
		return w, refuse("a host")
	case spec.Warm:
		return w, refuse("a pool")
	}
	w.base = spec.Inputs[inputBase]
	if w.base != "" && s.bases[w.base] == nil {
		return w, sandboxer.E(sandboxer.Invalid, nil, "%s has no base %.60q", s.env.Extension, w.base)
	}
	if text := spec.Inputs[inputURL]; text != "" {
		if w.base != "" {
			return w, sandboxer.E(sandboxer.Invalid, nil, "the inputs base and url exclude each other").WithHint("give one of them")
		}
		var err error
		if w.url, err = parseURL(text); err != nil {
			return w, err
		}
	}
	if w.base == "" && w.url == nil && len(s.bases) == 0 {
		return w, sandboxer.E(sandboxer.Invalid, nil, "%s has no bases, and the request has no URL", s.env.Extension).WithHint("give one: --input url=https://host/path")
	}
	return w, nil
}

// Admit implements sandboxer.Admitter: URLs below what the configuration allows.
func (s *site) Admit(spec sandboxer.Spec, name string) error {
	denied := func(why string) error {
		return sandboxer.E(sandboxer.Denied, nil, "%s takes %q only from an administrator, or with the value that its profile gives%s", s.env.Extension, name, why).
			WithHint("leave it out, or ask an administrator to put it into a profile")
	}
	if name != inputURL {
		return denied("")
	}
	u, err := parseURL(spec.Inputs[inputURL])
	if err != nil || !s.allowed(u) {
		return denied(", except URLs below those that the configuration allows")
	}
	return nil
}

func (s *site) allowed(u *url.URL) bool {
	return slices.ContainsFunc(s.allow, func(dir *url.URL) bool { return below(u, dir) })
}

// client returns the HTTP client for u.
func (s *site) client(u *url.URL) *http.Client {
	if s.allowed(u) || slices.ContainsFunc(slices.Collect(maps.Values(s.bases)), func(b *url.URL) bool { return *b == *u }) {
		return s.named
	}
	return s.public
}

// Provision implements sandboxer.Extension: it lends a URL that no other sandbox has.
func (s *site) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	none := sandboxer.Handle{}
	w, err := s.wish(spec)
	if err != nil {
		return none, err
	}
	unlock, err := s.lock(ctx)
	if err != nil {
		return none, err
	}
	defer unlock()
	leases, err := s.leases(ctx)
	if err != nil {
		return none, err
	}
	taken := map[string]bool{}
	for _, l := range leases {
		if l.ID == spec.ID && l.Generation == spec.Generation {
			return l.handle(), nil
		}
		taken[l.URL] = true
	}
	u := w.url
	switch {
	case u != nil:
	case w.base != "":
		u = s.bases[w.base]
	default:
		for _, name := range slices.Sorted(maps.Keys(s.bases)) {
			if !taken[s.bases[name].String()] {
				u = s.bases[name]
				break
			}
		}
		if u == nil {
			return none, sandboxer.E(sandboxer.Exhausted, nil, "every base of %s is in use by a sandbox (%d)", s.env.Extension, len(s.bases)).
				WithHint("destroy a sandbox, or add bases to the configuration")
		}
	}
	if taken[u.String()] {
		return none, sandboxer.E(sandboxer.Conflict, nil, "another sandbox uses this URL").WithHint("destroy that sandbox, or use another URL")
	}
	l := lease{V: leaseVersion, ID: spec.ID, Generation: spec.Generation, Owner: s.env.Owner, URL: u.String()}
	if err := s.write(ctx, l); err != nil {
		return none, err
	}
	return l.handle(), nil
}

const (
	firstStep = 5 * time.Millisecond
	lastStep  = 100 * time.Millisecond
)

// asks returns the URL for checking that u is ready, and the status that it has to answer (0 is any).
func (s *site) asks(u *url.URL) (path *url.URL, status int) {
	if s.cfg.Kind == kindAIO {
		return u.JoinPath("v1/sandbox"), http.StatusOK
	}
	return u, 0
}

// WaitReady implements sandboxer.Extension: of kind url anything that answers is ready. A profile that wants more says so (ready).
func (s *site) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	none := sandboxer.Reachability{}
	until, cancel := context.WithTimeout(ctx, s.cfg.Wait)
	defer cancel()
	var last error
	for step := firstStep; ; step = min(2*step, lastStep) {
		if err := ctx.Err(); err != nil {
			return none, err
		}
		l, err := s.find(ctx, h) // it may be taken back meanwhile
		if err != nil {
			return none, err
		}
		u, err := parseURL(l.URL)
		if err != nil {
			return none, err
		}
		path, want := s.asks(u)
		status, err := ask(until, s.client(u), path)
		if err == nil && want != 0 && status != want {
			err = sandboxer.E(sandboxer.Unavailable, nil, "%s answered %d instead of %d", path, status, want)
		}
		switch {
		case err == nil:
			return sandboxer.Reachability{URL: l.URL}, nil
		case sandboxer.KindOf(err) == sandboxer.Denied:
			return none, err
		case until.Err() == nil:
			last = err
		case last == nil: // an answer tells more than that there was no time for one
			last = sandboxer.E(sandboxer.Unavailable, err, "%s has not answered", path)
		}
		select {
		case <-time.After(step):
		case <-until.Done():
			if err := ctx.Err(); err != nil {
				return none, err
			}
			return none, sandboxer.E(sandboxer.Unavailable, last, "it was not ready within %s: %s", sandboxer.FormatDuration(s.cfg.Wait), sandboxer.Message(last)).
				WithHint("check that it runs, and that the server's machine can reach it")
		}
	}
}

// DialURL implements sandboxer.URLDialer.
func (s *site) DialURL(ctx context.Context, h sandboxer.Handle) (net.Conn, error) {
	l, err := s.find(ctx, h)
	if err != nil {
		return nil, err
	}
	u, err := parseURL(l.URL)
	if err != nil {
		return nil, err
	}
	return connect(ctx, s.client(u).Transport.(*http.Transport), u)
}

// Teardown implements sandboxer.Extension: the URL is free again, and unchanged.
func (s *site) Teardown(ctx context.Context, h sandboxer.Handle) (sandboxer.CleanupReport, error) {
	var r sandboxer.CleanupReport
	unlock, err := s.lock(ctx)
	if err != nil {
		return r, err
	}
	defer unlock()
	leases, err := s.leases(ctx)
	if err != nil {
		return r, err
	}
	for _, l := range leases {
		if l.ID != h.SandboxID || h.Generation != 0 && l.Generation != h.Generation {
			continue
		}
		if err := s.env.Notes.Delete(ctx, l.key()); err != nil {
			return r, err
		}
		r.Kept = append(r.Kept, l.URL+", which existed before and was not changed")
	}
	return r, nil
}

// IsAlive implements sandboxer.Prober. A missing answer proves nothing.
func (s *site) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	if err := ctx.Err(); err != nil {
		return sandboxer.Unknown, err
	}
	l, err := s.find(ctx, h)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return sandboxer.Gone, nil
	}
	if err != nil {
		return sandboxer.Unknown, err
	}
	u, err := parseURL(l.URL)
	if err != nil {
		return sandboxer.Unknown, err
	}
	path, _ := s.asks(u)
	if _, err := ask(ctx, s.client(u), path); err != nil {
		return sandboxer.Unknown, err
	}
	return sandboxer.Alive, nil
}

// Discover implements sandboxer.Discoverer.
func (s *site) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	if err := ctx.Err(); err != nil {
		return sandboxer.Found{}, err
	}
	l, err := s.find(ctx, sandboxer.Handle{SandboxID: id})
	if err != nil {
		return sandboxer.Found{}, err
	}
	return sandboxer.Found{Handle: l.handle()}, nil
}

// ListRunning implements sandboxer.Lister.
func (s *site) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return hosts.List(func() (all []sandboxer.Handle, err error) {
		leases, err := s.leases(ctx)
		for _, l := range leases {
			if l.Owner == owner {
				all = append(all, l.handle())
			}
		}
		return all, cmp.Or(ctx.Err(), err)
	})
}

// Capacity implements sandboxer.CapacityReporter: the number of free bases. It is unknown if the extension has no bases.
func (s *site) Capacity(ctx context.Context, host string) (sandboxer.HostCapacity, error) {
	if host != "" {
		return sandboxer.HostCapacity{}, sandboxer.E(sandboxer.NotFound, nil, "%s has no hosts", s.env.Extension)
	}
	leases, err := s.leases(ctx)
	if err = cmp.Or(ctx.Err(), err); err != nil {
		return sandboxer.HostCapacity{}, err
	}
	if len(s.bases) == 0 {
		return sandboxer.HostCapacity{Free: -1}, nil
	}
	taken := map[string]bool{}
	for _, l := range leases {
		taken[l.URL] = true
	}
	free := 0
	for _, u := range s.bases {
		if !taken[u.String()] {
			free++
		}
	}
	return sandboxer.HostCapacity{Free: free, Attrs: map[string]string{"bases": strconv.Itoa(len(s.bases))}}, nil
}

// lock excludes all other calls, also of other processes of this installation, from lending and taking back.
func (s *site) lock(ctx context.Context) (unlock func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return s.env.Notes.Lock(ctx, "lease")
}

// find returns the lease of h, the newest if it names no generation.
func (s *site) find(ctx context.Context, h sandboxer.Handle) (lease, error) {
	leases, err := s.leases(ctx)
	if err != nil {
		return lease{}, err
	}
	leases = slices.DeleteFunc(leases, func(l lease) bool { return l.ID != h.SandboxID || h.Generation != 0 && l.Generation != h.Generation })
	return hosts.Newest(h.SandboxID, leases, func(l lease) int { return l.Generation }, nil)
}

func (s *site) write(ctx context.Context, l lease) error {
	data, err := l.encode()
	if err != nil {
		return sandboxer.E(sandboxer.Internal, err, "the lease of %s cannot be encoded", l.ID)
	}
	return s.env.Notes.Put(ctx, l.key(), data)
}

// leases returns all leases. One that cannot be read is an error: its URL must not be lent twice.
func (s *site) leases(ctx context.Context) ([]lease, error) {
	keys, err := s.env.Notes.List(ctx)
	if err != nil {
		return nil, err
	}
	var out []lease
	for _, key := range keys {
		n, err := s.env.Notes.Get(ctx, key)
		if sandboxer.KindOf(err) == sandboxer.NotFound { // taken back meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		l, err := readLease(n.Value)
		if err == nil && l.key() != key {
			err = errors.New("it belongs to another sandbox")
		}
		switch {
		case sandboxer.KindOf(err) == sandboxer.Unavailable:
			return nil, err
		case err != nil:
			return nil, notes.Damaged(s.env.Notes, key, err)
		}
		out = append(out, l)
	}
	return out, nil
}
