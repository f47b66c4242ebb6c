package server

import (
	"context"
	"io"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// InSnapshot is a snapshot in a path.
type InSnapshot struct {
	ID string `path:"id" maxLength:"128" doc:"ID, unique beginning of one (\"snap-\" may be left out), or name"`
}

// snapshotRoutes registers the routes for snapshots and pauses.
func (s *Server) snapshotRoutes() {
	const read, write = sandboxer.ScopeRead, sandboxer.ScopeWrite
	o := op("pauseSandbox", "POST", "/v1/sandboxes/{id}/pause", write, "sandboxes", "Pause a running sandbox")
	o.Description += " Pausing a paused sandbox succeeds. If it cannot be paused, it keeps running."
	routeJSON(s, o, s.pause)
	o = op("resumeSandbox", "POST", "/v1/sandboxes/{id}/resume", write, "sandboxes", "Resume a paused sandbox")
	o.Description += " Resuming a running sandbox succeeds. If it fails, the sandbox stays paused."
	routeJSON(s, o, s.resume)
	o = op("forkSandbox", "POST", "/v1/sandboxes/{id}/fork", write, "snapshots", "Make copies of a running sandbox")
	o.Description += " All of them, or none and an error."
	o.DefaultStatus = http.StatusCreated
	routeJSON(s, o, s.fork)

	o = op("createSnapshot", "POST", "/v1/sandboxes/{id}/snapshots", write, "snapshots", "Save a running sandbox, which keeps running")
	o.DefaultStatus = http.StatusCreated
	o.Description += " Answers when it is sealed: read back and verified. The work continues if the client hangs up."
	routeJSON(s, o, s.createSnapshot)
	route(s, op("listSnapshots", "GET", "/v1/snapshots", read, "snapshots", "List snapshots, newest first"), s.snapshots)
	route(s, op("getSnapshot", "GET", "/v1/snapshots/{id}", read, "snapshots", "Get a snapshot"), s.snapshot)
	o = op("dropSnapshot", "DELETE", "/v1/snapshots/{id}", write, "snapshots", "Drop a snapshot")
	o.Description += " Sandboxes restored from it are not affected; dropping a dropped snapshot succeeds."
	route(s, o, s.dropSnapshot)
	o = op("restoreSnapshot", "POST", "/v1/snapshots/{id}/restore", write, "snapshots", "Make a sandbox from a snapshot")
	o.DefaultStatus = http.StatusCreated
	o.Description += " The same Idempotency-Key finds it again."
	o.Responses["202"] = &huma.Response{Description: "Recorded; creating (Prefer: respond-async)", Content: s.content(api.Sandbox{})}
	routeJSON(s, o, s.restore)
	route(s, op("diffSnapshots", "GET", "/v1/snapshots/{id}/diff", read, "snapshots", "Compare the files of two portable snapshots"), s.diffSnapshots)
	o = op("exportSnapshot", "GET", "/v1/snapshots/{id}/export", read, "snapshots", "Read the portable form of a snapshot as one file")
	o.Responses["200"] = &huma.Response{Description: "A .tar.zst with its signed manifest", Content: map[string]*huma.MediaType{"application/octet-stream": bytesBody()}}
	route(s, o, s.exportSnapshot)
	o = op("importSnapshot", "POST", "/v1/snapshots/import", write, "snapshots", "Make a snapshot from an exported file")
	o.DefaultStatus = http.StatusCreated
	route(s, o, s.importSnapshot)
	s.describeBody(o, true, "application/octet-stream", bytesBody())
}

func (s *Server) pause(ctx context.Context, in *InRef, b api.PauseSandbox) (*reply[api.Sandbox], error) {
	return sandboxReply(s.m.Pause(ctx, in.ID, b))
}

func (s *Server) resume(ctx context.Context, in *InRef, b api.ResumeSandbox) (*reply[api.Sandbox], error) {
	return sandboxReply(s.m.Resume(ctx, in.ID, b))
}

func sandboxReply(sb *sandboxer.Sandbox, err error) (*reply[api.Sandbox], error) {
	return replied(api.NewSandbox, sb, err)
}

type inFork struct {
	InRef
	Key string `header:"Idempotency-Key" maxLength:"255" doc:"One key makes one set of copies, however often it is sent; another body under it is a conflict"`
}

// request is the fork that the headers and the body ask for.
func (in *inFork) request(b api.ForkSandbox) manager.ForkRequest {
	b.Key = in.Key
	return b
}

func (s *Server) fork(ctx context.Context, in *inFork, b api.ForkSandbox) (*reply[api.Forked], error) {
	sbs, err := s.m.Fork(ctx, in.ID, in.request(b))
	if err != nil {
		return nil, err
	}
	out := api.Forked{SchemaVersion: api.SchemaVersion, Items: []api.Sandbox{}}
	for _, sb := range sbs {
		out.Items = append(out.Items, api.NewSandbox(sb))
	}
	return &reply[api.Forked]{Body: out}, nil
}

func (s *Server) createSnapshot(ctx context.Context, in *InRef, b api.CreateSnapshot) (*reply[api.Snapshot], error) {
	rec, err := s.m.Snapshot(ctx, in.ID, b)
	return snapshotReply(ctx, rec, err)
}

// snapshotReply answers ctx's principal with a snapshot.
func snapshotReply(ctx context.Context, rec *sandboxer.SnapshotRecord, err error) (*reply[api.Snapshot], error) {
	if err != nil {
		return nil, err
	}
	return &reply[api.Snapshot]{Body: newSnapshot(ctx, rec)}, nil
}

// newSnapshot is what ctx's principal sees of a snapshot. Only an administrator sees what its
// parts share with other tenants' in the store.
func newSnapshot(ctx context.Context, rec *sandboxer.SnapshotRecord) api.Snapshot {
	out := api.NewSnapshot(rec)
	if sandboxer.PrincipalFrom(ctx).Can(sandboxer.ScopeAdmin) {
		out.Stored = rec.StoredBytes()
	}
	return out
}

type inSnapshots struct {
	InPage
	Sandbox string   `query:"sandbox" doc:"Only of this sandbox: an ID or a name"`
	Parent  string   `query:"parent" doc:"Only of sandboxes restored from this snapshot"`
	Name    string   `query:"name" doc:"Only with this name"`
	State   []string `query:"state,explode" enum:"saving,sealed,dropping,dropped" doc:"Only in one of these states; repeat it for several. Default: those that are not dropped"`
	All     bool     `query:"all" doc:"Also those that the broker made for a pause or a fork"`
	Tenant  string   `query:"tenant" doc:"Only of this tenant, for administrators"`
}

func (s *Server) snapshots(ctx context.Context, in *inSnapshots) (*reply[api.List[api.Snapshot]], error) {
	q := sandboxer.SnapshotQuery{SandboxID: in.Sandbox, Parent: in.Parent, Name: in.Name, Tenant: in.Tenant, After: in.Cursor, Limit: in.Limit}
	for _, st := range in.State {
		q.States = append(q.States, sandboxer.SnapshotState(st))
	}
	if in.All {
		q.Purposes = []sandboxer.SnapshotPurpose{"", sandboxer.ForPause, sandboxer.ForFork}
	}
	recs, next, err := s.m.Snapshots(ctx, q)
	return listed(func(rec *sandboxer.SnapshotRecord) api.Snapshot { return newSnapshot(ctx, rec) }, recs, next, err)
}

func (s *Server) snapshot(ctx context.Context, in *InSnapshot) (*reply[api.Snapshot], error) {
	rec, err := s.m.GetSnapshot(ctx, in.ID)
	return snapshotReply(ctx, rec, err)
}

func (s *Server) dropSnapshot(ctx context.Context, in *InSnapshot) (*reply[api.Snapshot], error) {
	rec, err := s.m.DropSnapshot(ctx, in.ID)
	return snapshotReply(ctx, rec, err)
}

type inRestore struct {
	InSnapshot
	Key    string `header:"Idempotency-Key" maxLength:"255" doc:"One key makes one sandbox, however often it is sent; another body under it is a conflict"`
	Prefer string `header:"Prefer" doc:"respond-async: answer 202 as soon as the request is recorded"`
}

// request is the restore that the headers and the body ask for.
func (in *inRestore) request(b api.RestoreSnapshot) manager.RestoreRequest {
	b.Key, b.NoWaiting = in.Key, prefersAsync(in.Prefer)
	return b
}

func (s *Server) restore(ctx context.Context, in *inRestore, b api.RestoreSnapshot) (*answer, error) {
	req := in.request(b)
	sb, err := s.m.Restore(ctx, in.ID, req)
	if err != nil {
		return nil, err
	}
	return recorded(sb, http.StatusCreated, req.NoWaiting), nil
}

type inDiff struct {
	InSnapshot
	To string `query:"to" required:"true" maxLength:"128" doc:"The snapshot to compare with: files that only it has were added"`
}

func (s *Server) diffSnapshots(ctx context.Context, in *inDiff) (*reply[api.SnapshotDiff], error) {
	changes, err := s.m.Diff(ctx, in.ID, in.To)
	if err != nil {
		return nil, err
	}
	out := api.SnapshotDiff{SchemaVersion: api.SchemaVersion, Items: []api.SnapshotChange{}}
	for _, c := range changes {
		out.Items = append(out.Items, api.SnapshotChange(c))
	}
	return &reply[api.SnapshotDiff]{Body: out}, nil
}

func (s *Server) exportSnapshot(ctx context.Context, in *InSnapshot) (*huma.StreamResponse, error) {
	sctx, cancel := edge.Stream(ctx)
	pr, pw := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		pw.CloseWithError(s.m.ExportSnapshot(sctx, in.ID, pw))
	}()
	end := func() {
		cancel(nil)
		pr.CloseWithError(io.ErrClosedPipe)
		<-done
	}
	return poured(ctx, sctx, pr, `attachment; filename="snapshot.tar.zst"`, end)
}

type inImport struct {
	Name    string   `query:"name" doc:"Unique among the tenant's snapshots"`
	Profile string   `query:"profile" doc:"Profile to restore it on, if its own does not exist here"`
	Accept  []string `query:"accept,explode" doc:"A signer to be trusted this once, as the refusal named it; repeat it for several"`
}

func (s *Server) importSnapshot(ctx context.Context, in *inImport) (*reply[api.Snapshot], error) {
	sctx, cancel := edge.Stream(ctx)
	defer cancel(nil)
	_, r := edge.Exchange(ctx)
	rec, err := s.m.ImportSnapshot(sctx, manager.ImportRequest{Name: in.Name, Profile: in.Profile, Accept: in.Accept}, r.Body)
	if err != nil {
		return nil, edge.StreamError(sctx, err)
	}
	return snapshotReply(ctx, rec, nil)
}
