package api

import (
	"context"
	"crypto/rand"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Pause describes the pause of a sandbox.
type Pause struct {
	Depth    sandboxer.PauseDepth `json:"depth" example:"freeze" doc:"freeze: memory stays. disk: memory and files are saved. files: files are saved, processes end"`
	Snapshot string               `json:"snapshot,omitempty" doc:"Snapshot that it resumes from, unless it is frozen"`
	At       time.Time            `json:"at" doc:"Since when; running time ends here"`
	Left     Duration             `json:"left,omitempty" doc:"Time to live that goes on when it resumes; absent: it was used up, and is granted again"`
	Cause    sandboxer.Reason     `json:"cause" example:"requested"`
	Attempts int                  `json:"attempts,omitempty" doc:"Resumes that failed"`
}

// Forked is the result of a fork: the copies.
type Forked struct {
	SchemaVersion int       `json:"schema_version" example:"1"`
	Items         []Sandbox `json:"items" nullable:"false"`
}

// Snapshot is a saved sandbox. Only a sealed one can be restored.
type Snapshot struct {
	SchemaVersion int    `json:"schema_version" example:"1"`
	ID            string `json:"id" example:"snap-7k2mq0xa4t9c"`
	Name          string `json:"name,omitempty" example:"base"`
	Tenant        string `json:"tenant" example:"default"`
	SandboxID     string `json:"sandbox_id,omitempty" example:"7k2mq0xa" doc:"The sandbox that was saved; absent for an imported snapshot"`
	Generation    int    `json:"generation,omitempty" example:"1"`
	Parent        string `json:"parent,omitempty" doc:"The snapshot that the sandbox was restored from"`
	Profile       string `json:"profile,omitempty" example:"profile.local"`
	Extension     string `json:"extension,omitempty" example:"ext.local"`
	Host          string `json:"host,omitempty" doc:"Where its sandbox was"`

	Kind    sandboxer.SnapshotKind    `json:"kind" example:"native"`
	Purpose sandboxer.SnapshotPurpose `json:"purpose,omitempty" doc:"pause or fork: the broker made it for itself"`
	State   sandboxer.SnapshotState   `json:"state" enum:"saving,sealed,dropping,dropped" example:"sealed"`
	Message string                    `json:"message,omitempty"`
	Memory  bool                      `json:"memory" doc:"Processes are saved, not only files"`

	Quiesced bool   `json:"quiesced" doc:"Taken while nothing was written; otherwise crash-consistent"`
	Bytes    int64  `json:"bytes" doc:"How much content it has, in all its forms"`
	Stored   int64  `json:"stored_bytes,omitempty" doc:"Bytes that it added to the store; for administrators"`
	Size     int64  `json:"size,omitempty" doc:"Of the portable form, unpacked"`
	Files    int    `json:"files,omitempty" doc:"Entries of the portable form"`
	Digest   string `json:"digest,omitempty" doc:"Of the portable form, unpacked"`
	// Volumes are saved data outside the workspace, such as named volumes of a compose project.
	Volumes []string `json:"volumes,omitempty" doc:"Volumes whose content is in the portable form, besides the workspace"`

	Retries   int       `json:"retries,omitempty" doc:"Attempts of the step that is being retried"`
	LastError string    `json:"last_error,omitempty" doc:"Of the step that is being retried"`
	RetryAt   time.Time `json:"retry_at,omitzero" doc:"When that step is tried again"`
	Damaged   string    `json:"damaged,omitempty" doc:"Why the record could not be read; the other fields have only the readable rest"`
	CreatedAt time.Time `json:"created_at"`
	SealedAt  time.Time `json:"sealed_at,omitzero"`
	ExpiresAt time.Time `json:"expires_at,omitzero"`
	DroppedAt time.Time `json:"dropped_at,omitzero"`
}

// NewSnapshot converts a record to its public form.
func NewSnapshot(r *sandboxer.SnapshotRecord) Snapshot {
	return Snapshot{
		SchemaVersion: SchemaVersion, ID: r.ID, Name: r.Name, Tenant: r.Tenant, SandboxID: r.ShownSandbox(), Generation: r.Generation,
		Parent: r.Parent, Profile: r.Profile, Extension: r.Extension, Host: r.Host, Kind: r.Kind, Purpose: r.Purpose, State: r.State, Message: r.Message,
		Memory: r.Memory(), Quiesced: r.Kind.Has(sandboxer.SnapshotNative) && r.Native.Quiesced || r.Kind == sandboxer.SnapshotPortable && r.Portable.Quiesced,
		Bytes: r.Bytes(), Size: r.Portable.Size, Files: r.Portable.Files, Digest: r.Portable.Digest, Volumes: r.Portable.Volumes,
		Retries: r.Retries, LastError: r.LastError, RetryAt: r.RetryAt, Damaged: r.Damaged, CreatedAt: r.CreatedAt, SealedAt: r.SealedAt, ExpiresAt: r.ExpiresAt, DroppedAt: r.DroppedAt,
	}
}

// SnapshotChange is one difference between two snapshots.
type SnapshotChange struct {
	Path   string `json:"path" example:"src/main.go"`
	Change string `json:"change" enum:"added,removed,changed" example:"changed"`
	Before int64  `json:"before" doc:"Size; 0 where it was added"`
	After  int64  `json:"after" doc:"Size; 0 where it was removed"`
}

// SnapshotDiff is the differences between the files of two portable snapshots.
type SnapshotDiff struct {
	SchemaVersion int              `json:"schema_version" example:"1"`
	Items         []SnapshotChange `json:"items" nullable:"false"`
}

// SnapshotQuery selects snapshots; zero fields do not restrict.
type SnapshotQuery struct {
	Sandbox string // ID or name
	Parent  string // ID or name of a snapshot
	Name    string
	States  []sandboxer.SnapshotState // default: those that are not dropped
	All     bool                      // also the broker's own snapshots
	Tenant  string                    // for administrators
	Limit   int
	Cursor  string
}

// Pause pauses a running sandbox.
func (c *Client) Pause(ctx context.Context, ref string, p PauseSandbox) (*Sandbox, error) {
	return do[*Sandbox](ctx, c, call{method: "POST", path: sandboxPath(ref) + "/pause", body: p})
}

// Resume resumes a paused sandbox.
func (c *Client) Resume(ctx context.Context, ref string, r ResumeSandbox) (*Sandbox, error) {
	return do[*Sandbox](ctx, c, call{method: "POST", path: sandboxPath(ref) + "/resume", body: r})
}

// Fork makes copies of a running sandbox: either all of them, or none and an error. It is safe to
// repeat with the same f.Key: one key makes one set of copies.
func (c *Client) Fork(ctx context.Context, ref string, f ForkSandbox) (*Forked, error) {
	if f.Key == "" {
		f.Key = rand.Text()
	}
	return do[*Forked](ctx, c, call{method: "POST", path: sandboxPath(ref) + "/fork", body: f, again: true, header: http.Header{"Idempotency-Key": {f.Key}}})
}

// Snapshot saves a running sandbox, which continues to run.
func (c *Client) Snapshot(ctx context.Context, ref string, s CreateSnapshot) (*Snapshot, error) {
	return do[*Snapshot](ctx, c, call{method: "POST", path: sandboxPath(ref) + "/snapshots", body: s})
}

// Snapshots lists snapshots, newest first.
func (c *Client) Snapshots(ctx context.Context, q SnapshotQuery) (*List[Snapshot], error) {
	v := url.Values{}
	set(v, "sandbox", q.Sandbox)
	set(v, "parent", q.Parent)
	set(v, "name", q.Name)
	set(v, "tenant", q.Tenant)
	for _, s := range q.States {
		v.Add("state", string(s))
	}
	if q.All {
		v.Set("all", "true")
	}
	page(v, q.Limit, q.Cursor)
	return do[*List[Snapshot]](ctx, c, call{method: "GET", path: "/v1/snapshots", query: v})
}

// GetSnapshot returns one snapshot by its ID, a unique beginning of the ID, or its name.
func (c *Client) GetSnapshot(ctx context.Context, ref string) (*Snapshot, error) {
	return do[*Snapshot](ctx, c, call{method: "GET", path: snapshotPath(ref)})
}

// DropSnapshot removes a snapshot. Sandboxes that were restored from it are not affected.
func (c *Client) DropSnapshot(ctx context.Context, ref string) (*Snapshot, error) {
	return do[*Snapshot](ctx, c, call{method: "DELETE", path: snapshotPath(ref)})
}

// Restore makes a sandbox from a snapshot.
func (c *Client) Restore(ctx context.Context, ref string, r RestoreSnapshot) (*Sandbox, error) {
	if r.Key == "" {
		r.Key = rand.Text()
	}
	q := call{method: "POST", path: snapshotPath(ref) + "/restore", body: r, again: true, header: http.Header{"Idempotency-Key": {r.Key}}}
	if r.NoWaiting {
		q.header.Set("Prefer", "respond-async")
	}
	return do[*Sandbox](ctx, c, q)
}

// DiffSnapshots compares the files of two portable snapshots.
func (c *Client) DiffSnapshots(ctx context.Context, before, after string) (*SnapshotDiff, error) {
	return do[*SnapshotDiff](ctx, c, call{method: "GET", path: snapshotPath(before) + "/diff", query: url.Values{"to": {after}}})
}

// ExportSnapshot opens the portable form of a snapshot as one file, an ordinary .tar.zst that
// ImportSnapshot reads. The caller closes it.
func (c *Client) ExportSnapshot(ctx context.Context, ref string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, call{method: "GET", path: snapshotPath(ref) + "/export"})
	if err != nil {
		return nil, err
	}
	return fileBody{resp.Body, "snapshot " + ref}, nil
}

// ImportSnapshot makes a snapshot from an exported file. profile may be empty. accept names signers to
// trust for this import only.
func (c *Client) ImportSnapshot(ctx context.Context, name, profile string, accept []string, r io.Reader) (*Snapshot, error) {
	v := url.Values{}
	set(v, "name", name)
	set(v, "profile", profile)
	for _, a := range accept {
		v.Add("accept", a)
	}
	return do[*Snapshot](ctx, c, call{method: "POST", path: "/v1/snapshots/import", query: v, raw: r})
}

func snapshotPath(ref string) string {
	return "/v1/snapshots/" + url.PathEscape(ref)
}
