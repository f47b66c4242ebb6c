package sandboxer

import (
	"cmp"
	"crypto/rand"
	"slices"
	"time"
)

// SnapshotRecord is the broker's record of one snapshot: its source, its forms, and all facts for a
// restore. Only the manager changes it, through a Store.
type SnapshotRecord struct {
	ID     string `json:"id"`
	Name   string `json:"name,omitempty"` // unique among the tenant's snapshots that are not dropped
	Tenant string `json:"tenant"`

	SandboxID  string `json:"sandbox_id"`         // the saved sandbox
	ShownID    string `json:"shown_id,omitempty"` // Sandbox.ShownID
	Generation int    `json:"generation"`         // its generation
	Parent     string `json:"parent,omitempty"`   // the snapshot that the sandbox was restored from
	Profile    string `json:"profile"`
	Extension  string `json:"extension"`
	Host       string `json:"host,omitempty"`

	Spec      Spec   `json:"spec"` // of the sandbox, at that time
	SealedEnv []byte `json:"-"`    // Spec.Env, encrypted by the manager
	// Secrets are those of the sandbox, in the same versions.
	Secrets map[string]SecretRef `json:"secrets,omitempty"`

	Kind    SnapshotKind    `json:"kind"`
	Purpose SnapshotPurpose `json:"purpose,omitempty"`
	State   SnapshotState   `json:"state"`
	Message string          `json:"message,omitempty"` // why it differs from the request, for display

	Native   Snapshot        `json:"native,omitzero"`   // the extension's receipt, once saved
	Portable PortablePayload `json:"portable,omitzero"` // the files in the broker's own store, once saved

	Version   int64     `json:"version"` // grows with every write; a write with an old one fails with Conflict
	Retries   int       `json:"retries,omitempty"`
	LastError string    `json:"last_error,omitempty"` // of the step that is being retried
	RetryAt   time.Time `json:"retry_at,omitzero"`    // the sweep ignores the snapshot until then

	CreatedAt time.Time `json:"created_at"`
	SealedAt  time.Time `json:"sealed_at,omitzero"`
	ExpiresAt time.Time `json:"expires_at,omitzero"` // time at which it is dropped; zero means never
	DroppedAt time.Time `json:"dropped_at,omitzero"`

	// Damaged says why the record could not be read; the other fields then hold only the readable rest.
	// It is never stored.
	Damaged string `json:"-"`
}

// ShownSandbox returns the ID of the sandbox that the snapshot's tenant knows.
func (r *SnapshotRecord) ShownSandbox() string { return cmp.Or(r.ShownID, r.SandboxID) }

// Bytes returns the size of the snapshot's content in all its forms. It does not reveal which parts the
// broker's store shares with other snapshots, perhaps of other tenants.
func (r *SnapshotRecord) Bytes() int64 { return r.Native.Bytes + r.Portable.Size }

// StoredBytes returns how much the snapshot added to the stored data, for administrators.
func (r *SnapshotRecord) StoredBytes() int64 { return r.Native.Bytes + r.Portable.Bytes }

// Memory reports whether processes are saved, not only files.
func (r *SnapshotRecord) Memory() bool { return r.Native.Memory }

// PortablePayload is a snapshot's files in the broker's own store.
type PortablePayload struct {
	Digest   string `json:"digest,omitempty"` // "sha256:…" of the canonical tar
	Bytes    int64  `json:"bytes,omitempty"`  // added to the store, which keeps equal parts once
	Size     int64  `json:"size,omitempty"`   // of the canonical tar
	Files    int    `json:"files,omitempty"`
	Quiesced bool   `json:"quiesced,omitempty"` // the sandbox was frozen during the copy; otherwise crash-consistent
	// Volumes are the volumes in it (Contents). Only an extension that can place them restores the
	// snapshot.
	Volumes []string `json:"volumes,omitempty"`
}

// SnapshotKind says in which forms a snapshot is kept.
type SnapshotKind string

// The kinds of snapshot.
const (
	SnapshotNative   SnapshotKind = "native"   // the extension's own: fast, may hold memory, restored by that extension alone
	SnapshotPortable SnapshotKind = "portable" // the workspace's files: restored by any extension
	SnapshotBoth     SnapshotKind = "both"
)

// SnapshotKinds lists every kind.
func SnapshotKinds() []SnapshotKind {
	return []SnapshotKind{SnapshotNative, SnapshotPortable, SnapshotBoth}
}

// Has reports whether k includes the form, native or portable.
func (k SnapshotKind) Has(form SnapshotKind) bool { return k == form || k == SnapshotBoth }

// SnapshotPurpose is the reason for a snapshot. Empty means a user's own; the broker makes the others
// and drops them itself.
type SnapshotPurpose string

// The purposes of the broker's own snapshots.
const (
	ForPause SnapshotPurpose = "pause" // a paused sandbox resumes from it
	ForFork  SnapshotPurpose = "fork"  // the children of one fork are restored from it
)

// SnapshotState is where a snapshot is in its life:
//
//	saving ─► sealed ─► dropping ─► dropped
//	saving ─► dropping
type SnapshotState string

// The states of a snapshot, with the broker's duty in each. Only a sealed one can be restored.
const (
	SnapshotSaving   SnapshotState = "saving"   // owes saving it, or dropping what was begun
	SnapshotSealed   SnapshotState = "sealed"   // owes keeping it: read back and verified
	SnapshotDropping SnapshotState = "dropping" // owes removing it
	SnapshotDropped  SnapshotState = "dropped"  // owes nothing; history
)

// SnapshotStates lists every state in the order of a life.
func SnapshotStates() []SnapshotState {
	return []SnapshotState{SnapshotSaving, SnapshotSealed, SnapshotDropping, SnapshotDropped}
}

// CanBecome reports whether a snapshot may move from s to next.
func (s SnapshotState) CanBecome(next SnapshotState) bool {
	switch s {
	case SnapshotSaving:
		return next == SnapshotSealed || next == SnapshotDropping
	case SnapshotSealed:
		return next == SnapshotDropping
	case SnapshotDropping:
		return next == SnapshotDropped
	}
	return false
}

// Valid reports whether s is one of the states.
func (s SnapshotState) Valid() bool { return slices.Contains(SnapshotStates(), s) }

// NewSnapshotID returns a random snapshot ID: "snap-" and 12 characters (60 bits).
func NewSnapshotID() string {
	var b [12]byte
	rand.Read(b[:])
	for i := range b {
		b[i] = idAlphabet[b[i]%32]
	}
	return "snap-" + string(b[:])
}

// SnapshotQuery selects snapshots; zero fields do not restrict.
type SnapshotQuery struct {
	Tenant    string
	SandboxID string
	Parent    string
	Name      string
	IDPrefix  string
	States    []SnapshotState
	Purposes  []SnapshotPurpose // "" selects users' own
	DueBefore time.Time         // ExpiresAt or RetryAt set and at or before this; never a dropped one
	After     string            // cursor
	Limit     int               // at most MaxPage; 0 means DefaultPage
}

// Pause describes the pause of a sandbox.
type Pause struct {
	Depth    PauseDepth `json:"depth"`
	Snapshot string     `json:"snapshot,omitempty"` // snapshot to resume from, unless the sandbox is frozen
	// As is the form of that snapshot; empty means native.
	As SnapshotKind `json:"as,omitempty"`
	At time.Time    `json:"at"` // start of the pause; running time ends here
	// Left is the rest of its time to live, which continues when it resumes. Zero means that none is
	// left: resuming grants the profile's time to live again.
	Left     time.Duration `json:"left_ns,omitempty"`
	Cause    Reason        `json:"cause"`              // requested, or expired if the profile pauses instead of destroying
	Undo     bool          `json:"undo,omitempty"`     // pausing failed: the sandbox returns to running
	Attempts int           `json:"attempts,omitempty"` // failed resumes
}

// PauseDepth says what happens to a paused sandbox's memory.
type PauseDepth string

// The depths of a pause.
const (
	PauseFreeze PauseDepth = "freeze" // processes are frozen in place; memory stays in use
	PauseDisk   PauseDepth = "disk"   // memory and files are saved, the object is torn down
	PauseFiles  PauseDepth = "files"  // files are saved, processes end
)

// PauseDepths lists every depth.
func PauseDepths() []PauseDepth { return []PauseDepth{PauseFreeze, PauseDisk, PauseFiles} }

// ExpiryAction says what happens to a sandbox whose time to live is over, or that is idle for too long.
type ExpiryAction string

// The expiry actions. Empty means ExpiryDestroy.
const (
	ExpiryDestroy ExpiryAction = "destroy"
	ExpiryPause   ExpiryAction = "pause"
)

// ExpiryActions lists every action.
func ExpiryActions() []ExpiryAction { return []ExpiryAction{ExpiryDestroy, ExpiryPause} }

// DefaultMaxPaused is how long a paused sandbox is kept if its profile sets no time.
const DefaultMaxPaused = 7 * 24 * time.Hour
