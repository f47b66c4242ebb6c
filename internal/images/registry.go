package images

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sand-boxer/sandboxer"
)

const goarch = runtime.GOARCH

// maxSessions bounds how many repositories access is remembered for.
const maxSessions = 64

// A session is access to one repository of one registry: who we are there is settled.
type session struct {
	client *http.Client
	old    bool // settled for an earlier request
}

// places are where a repository can be read, in order: its registry's mirrors, then
// the registry.
func (s *Store) places(ref name.Reference, access Access) ([]name.Repository, error) {
	repo := ref.Context()
	var out []name.Repository
	for _, m := range append(slices.Clone(s.opts.Mirrors[shown(repo.RegistryStr())]), shown(repo.RegistryStr())) {
		var opts []name.Option
		if s.insecure(hostName(m), access) {
			opts = append(opts, name.Insecure)
		}
		reg, err := name.NewRegistry(m, opts...)
		if err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, err, "%q is not the name of a registry", m)
		}
		out = append(out, reg.Repo(repo.RepositoryStr()))
	}
	return out, nil
}

// insecure reports whether the registry called host may speak plain HTTP.
func (s *Store) insecure(host string, access Access) bool {
	if access == Operator && isLoopback(host) {
		return true
	}
	return slices.ContainsFunc(s.opts.Insecure, func(c string) bool {
		h, _ := splitHost(host)
		return c == host || c == h
	})
}

func splitHost(host string) (h, port string) {
	if h, p, err := net.SplitHostPort(host); err == nil {
		return h, p
	}
	return strings.Trim(host, "[]"), ""
}

func isLoopback(host string) bool {
	h, _ := splitHost(host)
	ip, err := netip.ParseAddr(h)
	return h == "localhost" || strings.HasSuffix(h, ".localhost") || err == nil && ip.Unmap().IsLoopback()
}

// guard keeps a registry from leading us astray: to plain HTTP, where credentials and
// redirects could be read and changed, or by a redirect to services of this machine. With
// public access nothing leads to an address that is not public (Store.reach): what a
// redirect or the realm of a token names comes through here, too.
type guard struct {
	s      *Store
	home   string // the registry
	access Access
}

func (g guard) RoundTrip(req *http.Request) (*http.Response, error) {
	host := req.URL.Host
	if req.URL.Scheme != "https" && !g.s.insecure(host, g.access) {
		return nil, problem{host + " is not asked over plain HTTP"}
	}
	resp, err := g.roundTrip(req, host)
	if err == nil && req.Header.Get(ours) == "" {
		// An answer to go-containerregistry, which reads some of them to their ends.
		resp.Body = capped{io.LimitReader(resp.Body, maxAnswer), resp.Body}
	}
	return resp, err
}

// ours is a header of requests whose answers are read with bounds of their own. Redirects
// keep it; it stands for itself where it goes, too.
const ours = "Accept-Encoding"

// maxAnswer bounds what else a registry says: errors, tokens, whether it is one.
const maxAnswer = 1 << 20

type capped struct {
	io.Reader
	io.Closer
}

// A problem is an error in words of ours only.
type problem struct{ why string }

func (p problem) Error() string { return p.why }

func (g guard) roundTrip(req *http.Request, host string) (*http.Response, error) {
	if g.access != Operator {
		return g.s.public.RoundTrip(req)
	}
	h, _ := splitHost(host)
	ip, err := netip.ParseAddr(h)
	local := isLoopback(host) || err == nil && (ip.Unmap().IsLinkLocalUnicast() || ip.IsUnspecified())
	if local && host != g.home && !isLoopback(g.home) {
		return nil, problem{fmt.Sprintf("%s leads to %s, an address of this machine", g.home, host)}
	}
	return g.s.http.RoundTrip(req)
}

// session settles who we are at a registry: nobody, or, as Operator, whoever the user
// logged in as with Docker.
func (s *Store) session(ctx context.Context, repo name.Repository, access Access) (*session, error) {
	key := repo.Name() + access.suffix()
	s.mu.Lock()
	old := s.sessions[key]
	s.mu.Unlock()
	if old != nil {
		return &session{old.client, true}, nil
	}
	auth := authn.Anonymous
	if access == Operator {
		var err error
		if auth, err = credentials(ctx, repo); err != nil {
			return nil, err
		}
	}
	rt, err := transport.NewWithContext(ctx, repo.Registry, auth, guard{s, repo.RegistryStr(), access}, []string{repo.Scope(transport.PullScope)})
	if err != nil {
		return nil, err
	}
	n := &session{client: &http.Client{Transport: rt}}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.sessions) >= maxSessions {
		clear(s.sessions)
	}
	s.sessions[key] = n
	return n, nil
}

// forget makes the next session settle anew who we are.
func (s *Store) forget(repo name.Repository, access Access) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, repo.Name()+access.suffix())
}

// credentials looks up what the user's Docker configuration has for the repository.
// A credential helper is a program, which may hang.
func credentials(ctx context.Context, repo name.Repository) (authn.Authenticator, error) {
	type answer struct {
		auth authn.Authenticator
		err  error
	}
	done := make(chan answer, 1)
	go func() {
		auth, err := authn.DefaultKeychain.Resolve(repo)
		done <- answer{auth, err}
	}()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	select {
	case a := <-done:
		if a.err != nil {
			return nil, sandboxer.E(sandboxer.Failed, a.err, "the credentials for %s cannot be read from the server's Docker configuration", shown(repo.RegistryStr())).
				WithHint("see whether this works for the user who runs the server: docker login %s", shown(repo.RegistryStr()))
		}
		return a.auth, nil
	case <-ctx.Done():
		return nil, sandboxer.E(sandboxer.Unavailable, ctx.Err(), "the credential helper for %s does not answer", shown(repo.RegistryStr()))
	}
}

// get asks a registry, at a path below the repository.
func (s *Store) get(ctx context.Context, repo name.Repository, access Access, path string, header http.Header) (*http.Response, error) {
	for again := false; ; again = true {
		ses, err := s.session(ctx, repo, access)
		if err != nil {
			return nil, err
		}
		u := url.URL{Scheme: repo.Scheme(), Host: repo.RegistryStr(), Path: "/v2/" + repo.RepositoryStr() + "/" + path}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
		if err != nil {
			return nil, err
		}
		for k, v := range header {
			req.Header[k] = v
		}
		req.Header.Set(ours, "identity")
		resp, err := ses.client.Do(req)
		if err != nil {
			return nil, err
		}
		if err := transport.CheckError(resp, http.StatusOK, http.StatusPartialContent, http.StatusRequestedRangeNotSatisfiable); err != nil {
			resp.Body.Close()
			refused := resp.StatusCode == http.StatusUnauthorized || resp.StatusCode == http.StatusForbidden
			if refused && ses.old && !again {
				s.forget(repo, access) // the user may have logged in since
				continue
			}
			return nil, err
		}
		return resp, nil
	}
}

// parallel is how many layers of an image are fetched at a time.
const parallel = 3

// attempts is how often in a row something may fail without a byte of progress.
const attempts = 5

// pause is how long to wait before the n-th attempt.
func (s *Store) pause(ctx context.Context, n int) error {
	select {
	case <-time.After(s.opts.retry << n):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ask asks the registry, or one of its mirrors, what ref stands for.
func (s *Store) ask(ctx context.Context, text string, ref name.Reference, access Access) (*known, error) {
	places, err := s.places(ref, access)
	if err != nil {
		return nil, err
	}
	for i, repo := range places {
		var k *known
		for n := range attempts {
			if k, err = s.askAt(ctx, repo, ref, access); err == nil {
				return k, nil
			}
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if !temporary(err) || n == attempts-1 || i < len(places)-1 {
				break
			}
			if err := s.pause(ctx, n); err != nil {
				return nil, err
			}
		}
	}
	return nil, s.explain(err, text, ref.Context(), access)
}

// askAt resolves ref at repo: its manifest, for this platform if there are several,
// and the configuration.
func (s *Store) askAt(ctx context.Context, repo name.Repository, ref name.Reference, access Access) (*known, error) {
	raw, kind, err := s.manifest(ctx, repo, access, ref.Identifier())
	if err != nil {
		return nil, err
	}
	named := []string{ref.Identifier(), digestOf(raw)}
	for depth := 0; kind.IsIndex(); depth++ {
		idx, err := v1.ParseIndexManifest(strings.NewReader(string(raw)))
		if err != nil || depth > 2 {
			return nil, refusal{"its index cannot be read", fmt.Sprintf(": %v", err)}
		}
		d, err := choose(idx)
		if err != nil {
			return nil, err
		}
		if raw, kind, err = s.manifest(ctx, repo, access, d.Digest.String()); err != nil {
			return nil, err
		}
		named = append(named, digestOf(raw))
	}
	if !kind.IsImage() {
		return nil, refusal{"it is not an image that can run", fmt.Sprintf(": it is of the type %q", kind)}
	}
	m, err := v1.ParseManifest(strings.NewReader(string(raw)))
	if err != nil {
		return nil, refusal{"its manifest cannot be read", fmt.Sprintf(": %v", err)}
	}
	if m.Config.MediaType != types.OCIConfigJSON && m.Config.MediaType != types.DockerConfigJSON {
		return nil, refusal{"it is not an image that can run", fmt.Sprintf(": its configuration is of the type %q", m.Config.MediaType)}
	}
	if m.Config.Size > maxConfig || !isSHA256(m.Config.Digest) {
		return nil, refusal{why: fmt.Sprintf("its configuration has %d bytes; the limit is %d MiB", m.Config.Size, maxConfig>>20)}
	}
	config, err := s.config(ctx, repo, access, m.Config.Digest)
	if err != nil {
		return nil, err
	}
	k := known{Digest: digestOf(raw), Manifest: raw, Config: config}
	if _, err := readImage(&k); err != nil {
		return nil, refusal{"what its manifest and its configuration say does not fit together", ": " + err.Error()}
	}
	// Under its digests too, so that a pinned reference finds it without asking.
	for _, id := range named {
		r, err := name.ParseReference(ref.Context().Name() + "@" + id)
		if !strings.HasPrefix(id, "sha256:") {
			r, err = ref, nil
		}
		if err != nil {
			return nil, err
		}
		if err := s.remember(r, access, k); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "what the image is could not be written down")
		}
	}
	return &k, nil
}

// config fetches an image's configuration.
func (s *Store) config(ctx context.Context, repo name.Repository, access Access, id v1.Hash) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*s.opts.stall)
	defer cancel()
	resp, err := s.get(ctx, repo, access, "blobs/"+id.String(), nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return readAll(resp.Body, maxConfig, "its configuration")
}

// choose picks the image for this machine from an index.
func choose(idx *v1.IndexManifest) (v1.Descriptor, error) {
	best, have := -1, []string{}
	for i, d := range idx.Manifests {
		if d.Platform == nil {
			if d.MediaType.IsIndex() && best < 0 {
				best = i
			}
			continue
		}
		p := *d.Platform
		if p.OS == "unknown" { // an attestation
			continue
		}
		have = append(have, p.String())
		if p.OS != "linux" || p.Architecture != goarch {
			continue
		}
		base := map[string]string{"arm64": "v8", "amd64": "v1"}[goarch]
		if p.Variant == "" || p.Variant == base {
			return d, nil
		}
		if best < 0 && goarch == "arm64" { // a newer variant may need what this machine lacks
			best = i
		}
	}
	if best < 0 {
		return v1.Descriptor{}, refusal{fmt.Sprintf("it has nothing for linux/%s", goarch), ", only for " + strings.Join(have, ", ")}
	}
	return idx.Manifests[best], nil
}

// manifest fetches a manifest or an index by tag or digest.
func (s *Store) manifest(ctx context.Context, repo name.Repository, access Access, id string) ([]byte, types.MediaType, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*s.opts.stall)
	defer cancel()
	resp, err := s.get(ctx, repo, access, "manifests/"+id, http.Header{"Accept": {
		string(types.OCIImageIndex), string(types.OCIManifestSchema1), string(types.DockerManifestList), string(types.DockerManifestSchema2)}})
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	raw, err := readAll(resp.Body, maxManifest, "its manifest")
	if err != nil {
		return nil, "", err
	}
	got := digestOf(raw)
	for _, want := range []string{id, resp.Header.Get("Docker-Content-Digest")} {
		if strings.HasPrefix(want, "sha256:") && want != got {
			return nil, "", refusal{why: "the registry sent a manifest with the digest " + got, detail: " as " + want}
		}
	}
	var head struct {
		MediaType types.MediaType `json:"mediaType"`
	}
	if err := json.Unmarshal(raw, &head); err != nil {
		return nil, "", refusal{why: "its manifest is not JSON"}
	}
	if head.MediaType == "" {
		ct, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
		head.MediaType = types.MediaType(strings.TrimSpace(ct))
	}
	return raw, head.MediaType, nil
}

func readAll(r io.Reader, limit int64, what string) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(data)) > limit {
		return nil, refusal{why: fmt.Sprintf("%s has more than %d MiB", what, limit>>20)}
	}
	return data, err
}

// refusal is a reason why an image cannot be used that asking again does not change.
// The detail has words of the answer in it, which may not be one of a registry: they are
// for those who are trusted with what this machine reaches.
type refusal struct{ why, detail string }

func (r refusal) Error() string { return r.why + tell(r.detail) }

// temporary reports whether asking again may help.
func temporary(err error) bool {
	var r refusal
	var te *transport.Error
	var se *sandboxer.Error
	var dns *net.DNSError
	switch {
	case errors.As(err, &r), errors.As(err, &se), errors.Is(err, context.Canceled), errors.Is(err, errNotPublic):
		return false
	case errors.As(err, &dns):
		return dns.IsTemporary || dns.IsTimeout
	case errors.As(err, &te):
		return te.StatusCode >= 500 || te.StatusCode == http.StatusTooManyRequests
	}
	return true
}

// explain turns what a registry did into an error for whoever wants the image. No word of
// an answer is in it, but for the cause, which goes to the log.
func (s *Store) explain(err error, text string, repo name.Repository, access Access) error {
	var r refusal
	var te *transport.Error
	var se *sandboxer.Error
	if errors.As(err, &se) {
		return err
	}
	host := shown(repo.RegistryStr())
	cause := strip(err)
	status := 0
	if errors.As(err, &te) {
		status = te.StatusCode
	}
	switch {
	case errors.As(err, &r) && access == Operator:
		return sandboxer.E(sandboxer.Failed, nil, "image %q cannot be used: %s", text, r)
	case errors.As(err, &r):
		return sandboxer.E(sandboxer.Failed, cause, "image %q cannot be used: %s", text, r.why)
	case status == http.StatusTooManyRequests:
		e := sandboxer.E(sandboxer.Unavailable, cause, "image %q: %s wants to be asked less often", text, host).
			WithHint("log in to be allowed more: docker login %s", host)
		if access != Operator {
			e = e.WithHint("try again later; an administrator can name the image in a profile")
		}
		e.RetryAfter = time.Minute
		return e
	case access != Operator && (status == http.StatusUnauthorized || status == http.StatusForbidden || status == http.StatusNotFound):
		return sandboxer.E(sandboxer.Failed, cause, "image %q does not exist at %s, or not everybody may read it", text, host).
			WithHint("see whether the name is right; an image that takes a login, an administrator can name in a profile")
	case access != Operator:
		// One text for all: who asks is not told what this machine reaches, and how.
		return sandboxer.E(sandboxer.Unavailable, cause, "image %q cannot be pulled: %s cannot be reached, or is not a registry on the public internet", text, host).
			WithHint("see whether the name is right; an administrator can use other registries, or name the image in a profile")
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return sandboxer.E(sandboxer.Failed, cause, "image %q: %s does not let us read it, or it does not exist", text, host).
			WithHint("log in as the user who runs the server: docker login %s", host)
	case status == http.StatusNotFound:
		return sandboxer.E(sandboxer.Failed, cause, "image %q does not exist at %s", text, host)
	case status != 0 && status < 500:
		return sandboxer.E(sandboxer.Failed, cause, "image %q: %s refuses with status %d", text, host, status)
	case status != 0:
		return sandboxer.E(sandboxer.Unavailable, cause, "image %q: %s answers with status %d", text, host, status)
	}
	return sandboxer.E(sandboxer.Unavailable, cause, "image %q cannot be pulled: %s cannot be reached: %s", text, host, reason(cause)).
		WithHint("see whether this machine reaches %s; a registry without HTTPS has to be in images.insecure of the extension", host)
}

// reason is what happened to a connection, without what the other side said: its first
// bytes, if they are not HTTP, are in some errors.
func reason(err error) string {
	var op *net.OpError
	var dns *net.DNSError
	var cert *tls.CertificateVerificationError
	var own problem
	switch {
	case errors.As(err, &own), errors.As(err, &dns), errors.As(err, &op), errors.As(err, &cert),
		errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return tell(err.Error())
	case errors.Is(err, http.ErrSchemeMismatch):
		return "it does not speak HTTPS"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "the connection breaks off"
	}
	return "what it answers is not an answer of a registry"
}

// said is what the registry gave as its reason, for the log.
func said(te *transport.Error) string {
	var out []string
	for _, d := range te.Errors[:min(len(te.Errors), 3)] {
		if d.Message != "" {
			out = append(out, tell(d.Message))
		}
	}
	if len(out) == 0 {
		return ""
	}
	return ": " + strings.Join(out, "; ")
}

// tell makes a stranger's text fit to be shown.
func tell(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	if r := []rune(s); len(r) > 200 {
		s = string(r[:200]) + "…"
	}
	return s
}

// strip takes addresses out of an error: a redirect's has an access token in it. What is
// left is bounded, and fit for a log.
func strip(err error) error {
	var ue *url.Error
	var te *transport.Error
	switch {
	case errors.As(err, &te):
		return errors.New("status " + strconv.Itoa(te.StatusCode) + said(te))
	case errors.As(err, &ue):
		return told{ue.Err}
	}
	return told{err}
}

// told is an error whose text is fit to be shown.
type told struct{ error }

func (t told) Error() string { return tell(t.error.Error()) }
func (t told) Unwrap() error { return t.error }
