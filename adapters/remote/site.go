package remote

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"iter"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// site is the extension of the kinds url and aio.
type site struct {
	cfg   Config
	env   sandboxer.Env
	bases map[string]*url.URL
	allow []*url.URL

	named  *http.Client // for what stands in the configuration
	public *http.Client // for what does not

	mu      sync.Mutex // of what follows: nothing begins once it is closing
	late    sync.WaitGroup
	closing context.Context
	close   context.CancelFunc
}

// begin has f run, which may go on after the call that it is of, and is to end soon after closing has. Close waits for it.
func (s *site) begin(f func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing.Err() != nil {
		return sandboxer.E(sandboxer.Unavailable, nil, "%s is closed", s.env.Extension)
	}
	s.late.Go(f)
	return nil
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

func openSite(env sandboxer.Env, cfg Config) (*site, error) {
	s := &site{cfg: cfg, env: env, bases: map[string]*url.URL{}}
	s.closing, s.close = context.WithCancel(context.Background())
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
	if err := os.MkdirAll(s.dir("lease"), 0o700); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the directory of %s cannot be made", env.Extension)
	}
	if err := wholefile.Sweep(s.dir("lease")); err != nil {
		s.log().Warn("what a former server was writing stays", "extension", env.Extension, "err", err)
	}
	return s, nil
}

func (s *site) log() *slog.Logger { return cmp.Or(s.env.Log, slog.New(slog.DiscardHandler)) }

func (s *site) dir(parts ...string) string {
	return filepath.Join(append([]string{s.env.Dir}, parts...)...)
}

// Close lets go of connections, after starts of commands that are given up; what is lent stays so.
func (s *site) Close() error {
	s.mu.Lock()
	s.close()
	s.mu.Unlock()
	s.late.Wait()
	s.named.CloseIdleConnections()
	s.public.CloseIdleConnections()
	return nil
}

// Check implements sandboxer.Checker.
func (s *site) Check(_ context.Context, spec sandboxer.Spec) error {
	_, err := s.wish(spec)
	return err
}

// A wish is what a spec asks for: a URL, one base, or any base (both empty).
type wish struct {
	base string
	url  *url.URL
}

// wish says what spec asks for, and refuses what cannot be had of something that is there already.
func (s *site) wish(spec sandboxer.Spec) (wish, error) {
	var w wish
	refuse := func(what string) error {
		return sandboxer.E(sandboxer.Unsupported, nil, "%s is something that exists already, and cannot be given %s", s.env.Extension, what).WithHint("leave it out")
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
		if err := spec.Network.Check(); err != nil {
			return w, err
		}
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
		return w, sandboxer.E(sandboxer.Invalid, nil, "%s names no bases, and the request no URL", s.env.Extension).WithHint("give one: --input url=https://host/path")
	}
	return w, nil
}

// Admit implements sandboxer.Admitter: URLs below what the configuration allows.
func (s *site) Admit(spec sandboxer.Spec, name string) error {
	denied := func(why string) error {
		return sandboxer.E(sandboxer.Denied, nil, "%s takes %q only from an administrator or as its profile has it%s", s.env.Extension, name, why).
			WithHint("leave it out, or ask an administrator, who can put it into a profile")
	}
	if name != inputURL {
		return denied("")
	}
	u, err := parseURL(spec.Inputs[inputURL])
	if err != nil || !s.allowed(u) {
		return denied(", but for what lies below one of those that it allows")
	}
	return nil
}

func (s *site) allowed(u *url.URL) bool {
	return slices.ContainsFunc(s.allow, func(dir *url.URL) bool { return below(u, dir) })
}

// client returns what asks u.
func (s *site) client(u *url.URL) *http.Client {
	if s.allowed(u) || slices.ContainsFunc(slices.Collect(maps.Values(s.bases)), func(b *url.URL) bool { return *b == *u }) {
		return s.named
	}
	return s.public
}

// Provision implements sandboxer.Extension: it lends a URL that nobody has.
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
	leases, err := s.leases()
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
			return none, sandboxer.E(sandboxer.Exhausted, nil, "every base of %s is a sandbox already (%d)", s.env.Extension, len(s.bases)).
				WithHint("destroy one, or name more of them in its configuration")
		}
	}
	if taken[u.String()] {
		return none, sandboxer.E(sandboxer.Conflict, nil, "what was asked for is another sandbox's").WithHint("destroy that one, or take another URL")
	}
	l := lease{V: leaseVersion, ID: spec.ID, Generation: spec.Generation, Owner: s.env.Owner, URL: u.String(), Stamp: spec.Stamp}
	if err := s.write(l); err != nil {
		return none, err
	}
	return l.handle(), nil
}

const (
	firstStep = 5 * time.Millisecond
	lastStep  = 100 * time.Millisecond
)

// asks returns what is asked of something at u, the status that is to be answered (0 is any), and how much of the answer is
// read.
func (s *site) asks(u *url.URL) (path *url.URL, status int, most int64) {
	if s.cfg.Kind == kindAIO {
		return u.JoinPath("v1/sandbox"), http.StatusOK, maxGuest
	}
	return u, 0, 0
}

// WaitReady implements sandboxer.Extension: of kind url whatever answers is ready. A profile that wants more says so (ready).
func (s *site) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	none := sandboxer.Reachability{}
	until, cancel := context.WithTimeout(ctx, s.cfg.Wait)
	defer cancel()
	var last error
	for step := firstStep; ; step = min(2*step, lastStep) {
		if err := ctx.Err(); err != nil {
			return none, err
		}
		l, err := s.find(h) // it may be taken back meanwhile
		if err != nil {
			return none, err
		}
		u, err := parseURL(l.URL)
		if err != nil {
			return none, err
		}
		path, want, most := s.asks(u)
		status, said, err := ask(until, s.client(u), path, most)
		if err == nil && want != 0 && status != want {
			err = sandboxer.E(sandboxer.Unavailable, nil, "%s answers %d, and is to answer %d", path, status, want)
		}
		switch {
		case err == nil:
			return sandboxer.Reachability{URL: l.URL, RemoteDir: readHome(said)}, nil
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
				WithHint("see whether it is there, and reached from the server's machine")
		}
	}
}

// DialURL implements sandboxer.URLDialer.
func (s *site) DialURL(ctx context.Context, h sandboxer.Handle) (net.Conn, error) {
	l, err := s.find(h)
	if err != nil {
		return nil, err
	}
	u, err := parseURL(l.URL)
	if err != nil {
		return nil, err
	}
	return connect(ctx, s.client(u).Transport.(*http.Transport), u)
}

// Teardown implements sandboxer.Extension: what was lent is free again, and there as before.
func (s *site) Teardown(ctx context.Context, h sandboxer.Handle) (sandboxer.CleanupReport, error) {
	var r sandboxer.CleanupReport
	unlock, err := s.lock(ctx)
	if err != nil {
		return r, err
	}
	defer unlock()
	leases, err := s.leases()
	if err != nil {
		return r, err
	}
	for _, l := range leases {
		if l.ID != h.SandboxID || h.Generation != 0 && l.Generation != h.Generation {
			continue
		}
		if err := os.Remove(s.file(l)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return r, sandboxer.E(sandboxer.Unavailable, err, "what is written down of %s cannot be removed", h.SandboxID)
		}
		r.Kept = append(r.Kept, l.URL+", which was there before, as it is")
	}
	return r, nil
}

// IsAlive implements sandboxer.Prober. That nothing answers proves nothing.
func (s *site) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	if err := ctx.Err(); err != nil {
		return sandboxer.Unknown, err
	}
	l, err := s.find(h)
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
	path, _, _ := s.asks(u)
	if _, _, err := ask(ctx, s.client(u), path, 0); err != nil {
		return sandboxer.Unknown, err
	}
	return sandboxer.Alive, nil
}

// Discover implements sandboxer.Discoverer.
func (s *site) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	if err := ctx.Err(); err != nil {
		return sandboxer.Found{}, err
	}
	l, err := s.find(sandboxer.Handle{SandboxID: id})
	if err != nil {
		return sandboxer.Found{}, err
	}
	return sandboxer.Found{Handle: l.handle(), Stamp: l.Stamp}, nil
}

// ListRunning implements sandboxer.Lister.
func (s *site) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return func(yield func(sandboxer.Handle, error) bool) {
		leases, err := s.leases()
		if err = cmp.Or(ctx.Err(), err); err != nil {
			yield(sandboxer.Handle{}, err)
			return
		}
		for _, l := range leases {
			if l.Owner == owner && !yield(l.handle(), nil) {
				return
			}
		}
	}
}

// Capacity implements sandboxer.CapacityReporter: the bases that nobody has. Without any it is not known.
func (s *site) Capacity(ctx context.Context, host string) (sandboxer.HostCapacity, error) {
	if host != "" {
		return sandboxer.HostCapacity{}, sandboxer.E(sandboxer.NotFound, nil, "%s has no hosts", s.env.Extension)
	}
	leases, err := s.leases()
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

// lock excludes everybody else, also other processes of this installation, from lending and taking back.
func (s *site) lock(ctx context.Context) (unlock func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	l, err := filelock.Take(ctx, s.dir("lock"), filelock.Exclusive)
	switch {
	case err == nil:
		return l.Release, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	return nil, sandboxer.E(sandboxer.Unavailable, err, "the lock of %s cannot be taken", s.env.Extension)
}

// find returns the lease of h, the newest if it names no generation.
func (s *site) find(h sandboxer.Handle) (lease, error) {
	leases, err := s.leases()
	if err != nil {
		return lease{}, err
	}
	var found lease
	for _, l := range leases {
		if l.ID == h.SandboxID && (l.Generation == h.Generation || h.Generation == 0 && l.Generation > found.Generation) {
			found = l
		}
	}
	if found.ID == "" {
		return lease{}, sandboxer.E(sandboxer.NotFound, nil, "there is no sandbox %s", h.SandboxID)
	}
	return found, nil
}

const leaseSuffix = ".json"

func (s *site) file(l lease) string {
	return s.dir("lease", l.ID+".g"+strconv.Itoa(l.Generation)+leaseSuffix)
}

func (s *site) write(l lease) error {
	data, err := l.encode()
	if err == nil {
		err = wholefile.Write(s.file(l), data)
	}
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "it cannot be written down that %s has %s", l.ID, l.URL)
	}
	return nil
}

// leases returns all of them. One that cannot be read is an error: what it lends must not be lent twice.
func (s *site) leases() ([]lease, error) {
	files, err := os.ReadDir(s.dir("lease"))
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the directory of %s cannot be read", s.env.Extension)
	}
	var out []lease
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), leaseSuffix) {
			continue
		}
		name := s.dir("lease", f.Name())
		data, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) { // taken back meanwhile
			continue
		}
		l := lease{}
		if err == nil {
			l, err = readLease(data)
		}
		if err == nil && s.file(l) != name {
			err = errors.New("it is another sandbox's")
		}
		if err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "what is written down in %s cannot be read", name).
				WithHint("a newer sandboxer may have written it; if it is damaged, remove it: then what it names is free")
		}
		out = append(out, l)
	}
	return out, nil
}
