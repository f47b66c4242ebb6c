package images

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"runtime"
	"slices"
	"strings"
	"time"

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

// A session is access to one repository of one registry, with our credentials for it.
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

// guard keeps a registry from redirecting us: to plain HTTP, where credentials and
// redirects could be read and changed, or to services of this machine. With
// public access nothing leads to an address that is not public (Store.reach): the targets of
// redirects and the realms of tokens pass through here, too.
type guard struct {
	s      *Store
	home   string // the registry
	access Access
}

func (g guard) RoundTrip(req *http.Request) (*http.Response, error) {
	host := req.URL.Host
	if req.URL.Scheme != "https" && !g.s.insecure(host, g.access) {
		return nil, problem{host + " is not contacted over plain HTTP"}
	}
	resp, err := g.roundTrip(req, host)
	if err == nil && req.Header.Get(ours) == "" {
		// For go-containerregistry, which reads some answers to their ends.
		resp.Body = capped{io.LimitReader(resp.Body, maxAnswer), resp.Body}
	}
	return resp, err
}

// ours is a header of requests whose answers are read with bounds of their own. Redirects
// keep it; it has its own meaning there, too.
const ours = "Accept-Encoding"

// maxAnswer bounds a registry's other answers: errors, tokens, whether it is one.
const maxAnswer = 1 << 20

type capped struct {
	io.Reader
	io.Closer
}

// A problem is an error in our own words only.
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

// session authenticates us at a registry: anonymously, or, as Operator, with the user's
// login of Docker.
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

// forget makes the next session authenticate again.
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
				WithHint("check that this works for the user who runs the server: docker login %s", shown(repo.RegistryStr()))
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
		return nil, refusal{"its manifest and its configuration contradict each other", ": " + err.Error()}
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
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the description of the image could not be stored")
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
