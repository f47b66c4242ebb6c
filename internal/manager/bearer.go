package manager

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"iter"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// BearerTokenPrefix begins every token of BearerToken, so that leaked ones are recognized.
const BearerTokenPrefix = "sbx_box_"

// BearerToken returns what lets its bearer, without any other credential, run commands and use
// files in sb, for callers that can send nothing but a URL. It is the same for the whole life
// of sb, pauses and restarts of the broker included, and ends with it: the next sandbox of the
// ID has another one.
func (m *Manager) BearerToken(sb *sandboxer.Sandbox) sandboxer.Secret {
	b := binary.BigEndian.AppendUint32(nil, uint32(sb.Generation))
	return sandboxer.Secret(BearerTokenPrefix + base64.RawURLEncoding.EncodeToString(append(b, m.ports.bearerMAC(sb.ID, b)...)))
}

func (a *portAccess) bearerMAC(id string, generation []byte) []byte {
	return keyedDigest(a.key, "sandboxer bearer\x00", append([]byte(id+"\x00"), generation...)) // no ID has a NUL
}

var (
	errNoBearer = sandboxer.E(sandboxer.Unauthenticated, nil, "there is no such sandbox, or its token is another one").
			WithHint("ask for the sandbox again: the answer has its URL")
	// ErrSandboxOver is what a Bearer gets once its sandbox has ended. Kind: NotFound, which a file that is not
	// there has too.
	ErrSandboxOver error = sandboxer.E(sandboxer.NotFound, nil, "this sandbox has ended").
			WithHint("create a new one, which has a URL of its own")
)

// A Bearer is whoever came with a token of BearerToken. Each method is one use of the sandbox, by which a paused one
// is resumed whatever its profile says, since its bearer has no other way to; it ends, with what
// it does inside, when the sandbox stops running, which is Unavailable. All of them fail with
// ErrSandboxOver once the sandbox has ended, and otherwise as the Manager's of the same name do.
type Bearer struct {
	m          *Manager
	id         string // Sandbox.ID
	generation int    // Sandbox.Generation
	p          sandboxer.Principal
}

// Bearer returns the way in that token opens to the sandbox whose Sandbox.ID is id, and its record.
// Every token that is not good is the same Unauthenticated; a good one of a sandbox that has ended
// is NotFound.
func (m *Manager) Bearer(ctx context.Context, id string, token sandboxer.Secret) (*Bearer, *sandboxer.Sandbox, error) {
	text, ok := strings.CutPrefix(token.Reveal(), BearerTokenPrefix)
	const size = 4 + sha256.Size
	if !ok || len(text) != base64.RawURLEncoding.EncodedLen(size) || sandboxer.CheckID(id) != nil {
		return nil, nil, errNoBearer
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(b) != size || !hmac.Equal(b[4:], m.ports.bearerMAC(id, b[:4:4])) {
		return nil, nil, errNoBearer
	}
	generation := int(binary.BigEndian.Uint32(b))
	sb, err := m.store.SandboxGeneration(ctx, id, generation)
	if isKind(err, sandboxer.NotFound) || err == nil && !isThere(sb) {
		return nil, nil, ErrSandboxOver
	}
	if err != nil {
		return nil, nil, err
	}
	return &Bearer{m: m, id: id, generation: generation, p: sandboxer.Principal{
		Tenant: sb.Tenant, Actor: "url:" + id, Scopes: []sandboxer.Scope{sandboxer.ScopeRead, sandboxer.ScopeWrite},
	}}, sb, nil
}

// isThere reports whether sb is somebody's and not about to end.
func isThere(sb *sandboxer.Sandbox) bool {
	return sb.State.Live() && sb.State != sandboxer.Terminating && sb.Tenant != ""
}

// Principal is who the bearer counts as.
func (a *Bearer) Principal() sandboxer.Principal { return a.p }

// Vouch has the door that the bearer came through stand for what it says of the sandbox (Principal.Vouches).
func (a *Bearer) Vouch(names ...string) { a.p.Vouches = names }

// Awake returns the sandbox when it runs: it waits for one that is being made or paused, and
// resumes a paused one, until ctx ends.
func (a *Bearer) Awake(ctx context.Context) (*sandboxer.Sandbox, error) {
	ctx = sandboxer.WithPrincipal(ctx, a.p)
	for {
		sb, err := a.m.store.SandboxGeneration(ctx, a.id, a.generation)
		switch {
		case isKind(err, sandboxer.NotFound), err == nil && !isThere(sb):
			return nil, ErrSandboxOver
		case err != nil:
			return nil, err
		case sb.State == sandboxer.Running:
			return sb, nil
		case sb.State == sandboxer.Creating && !isPaused(sb):
			_, err = a.m.waitState(ctx, sb, sandboxer.Running)
		default:
			_, err = a.m.resumeOrWait(ctx, sb, 0)
		}
		// What a create failed with is told to who asked for it; here it has ended.
		if err != nil && ctx.Err() == nil {
			if now, serr := a.m.store.SandboxGeneration(ctx, a.id, a.generation); serr == nil && !isThere(now) {
				return nil, ErrSandboxOver
			}
		}
		if err != nil {
			return nil, err
		}
	}
}

// use begins a use of the sandbox that kind counts, until End.
func (a *Bearer) use(ctx context.Context, kind *limiter) (*Visit, error) {
	ctx = sandboxer.WithPrincipal(ctx, a.p)
	for {
		sb, err := a.Awake(ctx)
		if err != nil {
			return nil, err
		}
		v := &Visit{}
		err = a.m.beginVisit(ctx, ctx, v, kind, sb.Ref(), func(now *sandboxer.Sandbox, running bool) error {
			switch {
			case now.ID != a.id || now.Generation != a.generation || !isThere(now):
				return ErrSandboxOver
			case !running:
				return errPausedMeanwhile
			}
			return nil
		})
		if errors.Is(err, errPausedMeanwhile) || isKind(err, sandboxer.Conflict) {
			if ctx.Err() == nil {
				continue // it was paused, or has ended, since it was looked at
			}
		}
		if err != nil {
			return nil, err
		}
		return v, nil
	}
}

var errPausedMeanwhile = errors.New("it was paused since it was looked at")

// ended returns err, or why v ended, if that is the reason for it. That the sandbox stopped running forbids its
// bearer nothing: the next use resumes it, or finds that it has ended.
func (a *Bearer) ended(v *Visit, err error) error {
	if err != nil && v.Ctx.Err() != nil {
		var e *sandboxer.Error
		if cause := context.Cause(v.Ctx); errors.As(cause, &e) {
			if e.Kind == sandboxer.Denied {
				return sandboxer.E(sandboxer.Unavailable, cause, "the sandbox stopped running meanwhile").WithHint("ask again: a paused one is resumed")
			}
			return cause
		}
	}
	return a.m.probeOnError(v.h, err)
}

// Exec runs a command to its end.
func (a *Bearer) Exec(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	if err := a.m.enter(); err != nil {
		return sandboxer.Exit{}, err
	}
	defer a.m.wg.Done()
	v, err := a.use(ctx, a.m.execs)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	defer v.End()
	x, err := a.m.exec(v.Ctx, v.b, v.h, cmd)
	return x, a.ended(v, err)
}

// ReadFile opens a file; the caller closes it.
func (a *Bearer) ReadFile(ctx context.Context, name string) (io.ReadCloser, error) {
	v, err := a.use(ctx, a.m.streams)
	if err != nil {
		return nil, err
	}
	r, err := v.b.ReadFile(v.Ctx, v.h, name)
	if err != nil {
		defer v.End()
		return nil, a.ended(v, err)
	}
	return &usedReader{&endedReader{r, func(err error) error { return a.ended(v, err) }}, v.End}, nil
}

// endedReader says why the file could not be read to its end.
type endedReader struct {
	io.ReadCloser
	ended func(error) error
}

func (r *endedReader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = r.ended(err)
	}
	return n, err
}

// WriteFile creates or replaces a file.
func (a *Bearer) WriteFile(ctx context.Context, name string, mode fs.FileMode, r io.Reader) error {
	return a.file(ctx, func(ctx context.Context, b *backend.Backend, h sandboxer.Handle) error {
		return b.WriteFile(ctx, h, name, mode, r)
	})
}

// StatFile describes a file.
func (a *Bearer) StatFile(ctx context.Context, name string) (fi sandboxer.FileInfo, err error) {
	err = a.file(ctx, func(ctx context.Context, b *backend.Backend, h sandboxer.Handle) (err error) {
		fi, err = b.StatFile(ctx, h, name)
		return err
	})
	return fi, err
}

// ListFiles lists a directory, not its subdirectories, in the order of names from the one after
// after. An error is the last value.
func (a *Bearer) ListFiles(ctx context.Context, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		v, err := a.use(ctx, a.m.streams)
		if err != nil {
			yield(sandboxer.FileInfo{}, err)
			return
		}
		defer v.End()
		for fi, err := range v.b.ListFiles(v.Ctx, v.h, dir, after) {
			if !yield(fi, a.ended(v, err)) {
				return
			}
		}
	}
}

// MakeDir makes a directory with its parents.
func (a *Bearer) MakeDir(ctx context.Context, dir string) error {
	return a.file(ctx, func(ctx context.Context, b *backend.Backend, h sandboxer.Handle) error { return b.MakeDir(ctx, h, dir) })
}

// MoveFile renames a file or directory.
func (a *Bearer) MoveFile(ctx context.Context, from, to string) error {
	return a.file(ctx, func(ctx context.Context, b *backend.Backend, h sandboxer.Handle) error {
		return b.MoveFile(ctx, h, from, to)
	})
}

// RemoveFile removes a file or a tree; absence is success.
func (a *Bearer) RemoveFile(ctx context.Context, name string) error {
	return a.file(ctx, func(ctx context.Context, b *backend.Backend, h sandboxer.Handle) error {
		return b.RemoveFile(ctx, h, name)
	})
}

// file has do work on files, as one use.
func (a *Bearer) file(ctx context.Context, do func(context.Context, *backend.Backend, sandboxer.Handle) error) error {
	v, err := a.use(ctx, a.m.streams)
	if err != nil {
		return err
	}
	defer v.End()
	return a.ended(v, do(v.Ctx, v.b, v.h))
}
