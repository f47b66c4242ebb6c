package provisioner

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"iter"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/aioserver"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// boxRouter routes to the API inside of a sandbox: /s/<id>/<token>/v1/….
type boxRouter struct{ p *Provisioner }

// boxPattern is the pattern of every route: so metrics do not have one for each sandbox.
const boxPattern = "deer-flow sandbox"

func (b *boxRouter) Routes() []edge.Route { return []edge.Route{b.route("", "", "")} }

func (b *boxRouter) Route(r *http.Request) edge.Route {
	id, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, boxPath), "/")
	token, rest, _ := strings.Cut(rest, "/")
	return b.route(id, sandboxer.Secret(token), "/"+rest)
}

// visit is one request to the inside of a sandbox.
type visit struct {
	*manager.Bearer
	sb       *sandboxer.Sandbox // as it was when the request came
	patience time.Duration      // for a sandbox that does not run yet
}

type visitKey struct{}

func (b *boxRouter) route(id string, token sandboxer.Secret, rest string) edge.Route {
	access := edge.AdmittedBy(func(ctx context.Context) (context.Context, sandboxer.Principal, func(), error) {
		in, sb, err := b.p.bearer(ctx, id, token)
		if err != nil {
			return nil, sandboxer.Principal{}, nil, err
		}
		if err := b.p.sandboxes.AdmitRequest(in.Principal()); err != nil {
			return nil, sandboxer.Principal{}, nil, err
		}
		v := &visit{Bearer: in, sb: sb, patience: b.p.patience}
		if rest == "/v1/sandbox" { // clients ask that again soon
			v.patience = readyTime
		}
		return context.WithValue(ctx, visitKey{}, v), in.Principal(), func() {}, nil
	})
	return edge.Route{Pattern: boxPattern, Access: access, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(rest, "/v1/") {
			edge.Fail(w, r, edge.WithStatus(http.StatusBadRequest, sandboxer.E(sandboxer.Invalid, nil, "there is nothing here: the API of the sandbox is below /v1/")))
			return
		}
		ctx, cancel := edge.Stream(r.Context())
		defer cancel(nil)
		v := ctx.Value(visitKey{}).(*visit)
		in := r.WithContext(ctx)
		in.URL = &url.URL{Path: rest, RawQuery: r.URL.RawQuery} // nothing of the token goes further
		b.p.aio.Serve(w, in, aioserver.Sandbox{ID: v.sb.ID, Generation: v.sb.Generation})
	})}
}

// bearer gives access to a sandbox. The operator vouches for it if its mounts are those that the operator
// configured.
func (p *Provisioner) bearer(ctx context.Context, id string, token sandboxer.Secret) (*manager.Bearer, *sandboxer.Sandbox, error) {
	b, sb, err := p.sandboxes.Bearer(ctx, id, token)
	if err == nil && p.standsFor(sb.Spec.Mounts) {
		b.Vouch(sandboxer.RestrictedMounts)
	}
	return b, sb, err
}

// prepare makes /mnt/user-data in the running sandbox sb, unless that was done: by a command as root,
// since the user of later commands has to be able to write there, or as files are made where
// there is no root.
func (p *Provisioner) prepare(ctx context.Context, sb *sandboxer.Sandbox) error {
	b, _, err := p.bearer(ctx, sb.ID, p.sandboxes.BearerToken(sb))
	if err != nil {
		return err
	}
	return p.prepareFor(ctx, b, sb)
}

const maxPrepared = 10_000 // what is forgotten is looked at once more

func (p *Provisioner) prepareFor(ctx context.Context, b *manager.Bearer, sb *sandboxer.Sandbox) error {
	one := objectOf(sb)
	if p.isPrepared(one) {
		return nil
	}
	dirs := []string{p.data}
	for _, d := range userDirs {
		dirs = append(dirs, p.data+"/"+d)
	}
	// Their common directory may exist: a mount below it makes it, and an image may
	// have it. Those below may be mounts, whose modes are their owners'.
	const script = `mkdir -p -m 0777 -- "$@" && chmod 0777 -- "$1"`
	x, err := b.Exec(ctx, sandboxer.Cmd{Args: append([]string{"sh", "-c", script, "sh"}, dirs...), Dir: "/", User: "0"})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil || x.Code != 0 {
		for _, d := range dirs {
			if err := b.MakeDir(ctx, d); err != nil {
				return sandboxer.E(sandboxer.KindOf(err), err, "sandbox %s can have no %s: %s", sb.Shown(), d, sandboxer.Message(err)).
					WithHint("choose a profile whose sandboxes can (deerflow_profile)")
			}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.prepared) >= maxPrepared {
		clear(p.prepared)
	}
	p.prepared[one] = struct{}{}
	return nil
}

func (p *Provisioner) isPrepared(one object) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ok := p.prepared[one]
	return ok
}

// objectOf is the object of sb that has files: a sandbox that was paused to files gets a new one.
func objectOf(sb *sandboxer.Sandbox) object {
	return object{sb.ID, max(sb.Generation, sb.Spec.Generation)}
}

// boxes are the sandboxes of the API inside: for each request the one that it names. Each call
// waits for the sandbox to run as long as the request may take.
type boxes struct{ p *Provisioner }

func (b boxes) awake(ctx context.Context) (*manager.Bearer, error) {
	v, ok := ctx.Value(visitKey{}).(*visit)
	if !ok {
		return nil, sandboxer.E(sandboxer.Internal, nil, "this is the ctx of no request for a sandbox")
	}
	if v.sb.State == sandboxer.Running && b.p.isPrepared(objectOf(v.sb)) {
		return v.Bearer, nil
	}
	wait, cancel := context.WithTimeout(ctx, v.patience)
	defer cancel()
	sb, err := v.Awake(wait)
	if err == nil {
		err = b.p.prepareFor(wait, v.Bearer, sb)
	}
	if err != nil && wait.Err() != nil && ctx.Err() == nil {
		e := sandboxer.E(sandboxer.Unavailable, err, "sandbox %s is not ready yet", v.sb.Shown())
		e.RetryAfter = time.Second
		err = e
	}
	return v.Bearer, over(err)
}

// over distinguishes an ended sandbox, which is NotFound, from a missing file.
func over(err error) error {
	if errors.Is(err, manager.ErrSandboxOver) {
		return aioserver.Ended(err)
	}
	return err
}

func (b boxes) Awake(ctx context.Context, _ string) error {
	_, err := b.awake(ctx)
	return err
}

func (b boxes) Exec(ctx context.Context, _ string, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	in, err := b.awake(ctx)
	var x sandboxer.Exit
	if err == nil {
		x, err = in.Exec(ctx, cmd)
		err = over(err)
	}
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		// deer-flow takes 404 for a command as final (failInside). A retry gets the answer that the sandbox has ended.
		err = sandboxer.E(sandboxer.Unavailable, err, "the sandbox ended meanwhile")
	}
	return x, err
}

func (b boxes) ReadFile(ctx context.Context, _, name string) (io.ReadCloser, error) {
	in, err := b.awake(ctx)
	if err != nil {
		return nil, err
	}
	f, err := in.ReadFile(ctx, name)
	return f, over(err)
}

func (b boxes) WriteFile(ctx context.Context, _, name string, mode fs.FileMode, r io.Reader) error {
	in, err := b.awake(ctx)
	if err != nil {
		return err
	}
	return over(in.WriteFile(ctx, name, mode, r))
}

func (b boxes) StatFile(ctx context.Context, _, name string) (sandboxer.FileInfo, error) {
	in, err := b.awake(ctx)
	if err != nil {
		return sandboxer.FileInfo{}, err
	}
	fi, err := in.StatFile(ctx, name)
	return fi, over(err)
}

func (b boxes) ListFiles(ctx context.Context, _, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		in, err := b.awake(ctx)
		if err != nil {
			yield(sandboxer.FileInfo{}, err)
			return
		}
		for fi, err := range in.ListFiles(ctx, dir, after) {
			if !yield(fi, over(err)) {
				return
			}
		}
	}
}
