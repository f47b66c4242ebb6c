package manager

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"iter"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// BearerToken returns a token that lets its bearer run commands and use files in sb without any other credential. It is for
// clients that can send only a URL. It stays the same for the whole life of sb, across pauses and restarts of the broker, and
// ends with sb: the next sandbox of the ID has another token.
func (m *Manager) BearerToken(sb *sandboxer.Sandbox) sandboxer.Secret {
	return m.ports.SignBearer(sb.ID, sb.Generation)
}

var (
	errNoBearer = sandboxer.E(sandboxer.Unauthenticated, nil, "there is no such sandbox, or the token is wrong").
			WithHint("get the sandbox again: the answer has its URL")
	// ErrSandboxOver is the error that a Bearer gets once its sandbox has ended. Kind: NotFound, as for a
	// missing file.
	ErrSandboxOver error = sandboxer.E(sandboxer.NotFound, nil, "this sandbox has ended").
			WithHint("create a new one, which has a URL of its own")
)

// A Bearer is a caller with a token of BearerToken. Each method is one use of the sandbox. It resumes a paused sandbox whatever
// the profile says, since the bearer has no other way to do so. A use, with everything that it started inside, ends when the
// sandbox stops running; its error is then Unavailable. All methods fail with ErrSandboxOver once the sandbox has ended, and
// otherwise as the methods of Manager with the same name do.
type Bearer struct {
	m          *Manager
	id         string // Sandbox.ID
	generation int    // Sandbox.Generation
	p          sandboxer.Principal
}

// Bearer returns the access that token gives to the sandbox whose Sandbox.ID is id, and the record of the sandbox. Kinds:
// Unauthenticated for every invalid token; NotFound for a valid one of a sandbox that has ended.
func (m *Manager) Bearer(ctx context.Context, id string, token sandboxer.Secret) (*Bearer, *sandboxer.Sandbox, error) {
	generation, ok := m.ports.ReadBearer(id, token)
	if !ok {
		return nil, nil, errNoBearer
	}
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

// isThere reports whether sb belongs to a tenant and is not about to end.
func isThere(sb *sandboxer.Sandbox) bool {
	return sb.State.Live() && sb.State != sandboxer.Terminating && sb.Tenant != ""
}

// Principal is the principal for which the bearer counts.
func (a *Bearer) Principal() sandboxer.Principal { return a.p }

// Vouch has the bearer's server vouch for the named parts of the sandbox's spec (Principal.Vouches).
func (a *Bearer) Vouch(names ...string) { a.p.Vouches = names }

// Awake returns the sandbox when it runs. It waits while the sandbox is being made or paused, and resumes a paused one, until
// ctx ends.
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
		case sb.State == sandboxer.Creating && !lifecycle.IsPaused(sb):
			_, err = a.m.box(sb).waitState(ctx, sandboxer.Running)
		default:
			_, err = a.m.box(sb).resumeOrWait(ctx, 0)
		}
		// The caller of the create gets its error; here the sandbox has ended.
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
func (a *Bearer) use(ctx context.Context, kind *access.Limiter) (*Visit, error) {
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

var errPausedMeanwhile = errors.New("it was paused meanwhile")

// ended returns err, or the reason why v ended if that caused err. If the sandbox stopped running, the token stays valid: the
// next use resumes the sandbox, or finds that it has ended.
func (a *Bearer) ended(v *Visit, err error) error {
	if err != nil && v.Ctx.Err() != nil {
		var e *sandboxer.Error
		if cause := context.Cause(v.Ctx); errors.As(cause, &e) {
			if e.Kind == sandboxer.Denied {
				return sandboxer.E(sandboxer.Unavailable, cause, "the sandbox stopped running meanwhile").WithHint("try again: a paused one is resumed")
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
	v, err := a.use(ctx, a.m.Execs)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	defer v.End()
	x, err := a.m.exec(v.Ctx, v.b, v.h, cmd)
	return x, a.ended(v, err)
}

// ReadFile opens a file; the caller closes it.
func (a *Bearer) ReadFile(ctx context.Context, name string) (io.ReadCloser, error) {
	v, err := a.use(ctx, a.m.Streams)
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
		v, err := a.use(ctx, a.m.Streams)
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

// file calls do with the files of the sandbox, as one use.
func (a *Bearer) file(ctx context.Context, do func(context.Context, *backend.Backend, sandboxer.Handle) error) error {
	v, err := a.use(ctx, a.m.Streams)
	if err != nil {
		return err
	}
	defer v.End()
	return a.ended(v, do(v.Ctx, v.b, v.h))
}
