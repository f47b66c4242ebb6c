package sandboxer

import (
	"cmp"
	"crypto/rand"
	"slices"
	"time"
)

// SnapshotRecord is the broker's record of one snapshot: what was saved of which
// sandbox, in which forms, and all that restoring takes. Only the manager changes it,
// through a Store.
type SnapshotRecord struct {
	ID     string `json:"id"`
	Name   string `json:"name,omitempty"` // unique among the tenant's snapshots that are not dropped
	Tenant string `json:"tenant"`

	SandboxID  string `json:"sandbox_id"`         // of what
	ShownID    string `json:"shown_id,omitempty"` // the sandbox's
	Generation int    `json:"generation"`         // which generation of it
	Parent     string `json:"parent,omitempty"`   // the snapshot that the sandbox was restored from
	Profile    string `json:"profile"`
	Extension  string `json:"extension"`
	Host       string `json:"host,omitempty"`

	Spec      Spec   `json:"spec"` // of the sandbox, as it was
	SealedEnv []byte `json:"-"`    // Spec.Env, encrypted by the manager

	Kind    SnapshotKind    `json:"kind"`
	Purpose SnapshotPurpose `json:"purpose,omitempty"`
	State   SnapshotState   `json:"state"`
	Message string          `json:"message,omitempty"` // why it is not what was asked for, for people

	Native   Snapshot        `json:"native,omitzero"`   // the extension's receipt, once saved
	Portable PortablePayload `json:"portable,omitzero"` // the files in the broker's own store, once saved

	Version   int64     `json:"version"` // grows with every write; a write with a stale one fails with Conflict
	Retries   int       `json:"retries,omitempty"`
	LastError string    `json:"last_error,omitempty"` // of the step that is being retried
	RetryAt   time.Time `json:"retry_at,omitzero"`    // the sweep leaves it alone until then

	CreatedAt time.Time `json:"created_at"`
	SealedAt  time.Time `json:"sealed_at,omitzero"`
	ExpiresAt time.Time `json:"expires_at,omitzero"` // it is dropped then; zero means never
	DroppedAt time.Time `json:"dropped_at,omitzero"`

	// Unconfirmed says that the database went back to when the snapshot was being saved: it
	// may be whole since, and is kept until somebody drops it.
	Unconfirmed bool `json:"unconfirmed,omitempty"`

	// Damaged says why the record could not be read; the other fields are then only
	// what is left of it. It is never stored.
	Damaged string `json:"-"`
}

// ShownSandbox is the ID that the snapshot's tenant knows its sandbox by.
func (r *SnapshotRecord) ShownSandbox() string { return cmp.Or(r.ShownID, r.SandboxID) }

// Bytes is how much content the snapshot has, in all its forms. What of it the broker's
// store shares with other snapshots, perhaps another tenant's, does not show.
func (r *SnapshotRecord) Bytes() int64 { return r.Native.Bytes + r.Portable.Size }

// StoredBytes is what the snapshot added to what is stored, for administrators.
func (r *SnapshotRecord) StoredBytes() int64 { return r.Native.Bytes + r.Portable.Bytes }

// Memory reports whether processes are saved, not only files.
func (r *SnapshotRecord) Memory() bool { return r.Native.Memory }

// PortablePayload is a snapshot's files in the broker's own store.
type PortablePayload struct {
	Digest   string `json:"digest,omitempty"` // "sha256:…" of the canonical tar
	Bytes    int64  `json:"bytes,omitempty"`  // added to the store, which has equal parts once
	Size     int64  `json:"size,omitempty"`   // of the canonical tar
	Files    int    `json:"files,omitempty"`
	Quiesced bool   `json:"quiesced,omitempty"` // taken while the sandbox stood still; otherwise crash-consistent
	// Volumes are those whose content is in it, too (Contents). Only an extension that
	// can place them restores it.
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

// SnapshotPurpose says whose a snapshot is: empty is a user's own; the broker makes
// others and drops them itself.
type SnapshotPurpose string

// The purposes of snapshots that the broker makes for itself.
const (
	ForPause SnapshotPurpose = "pause" // what a paused sandbox resumes from
	ForFork  SnapshotPurpose = "fork"  // what the children of one fork are restored from
)

// SnapshotState is where a snapshot is in its life:
//
//	saving ─► sealed ─► dropping ─► dropped
//	saving ─► dropping
type SnapshotState string

// The states of a snapshot, with what the broker owes in each. Only a sealed one can
// be restored.
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

// NewSnapshotID returns a fresh random snapshot ID: "snap-" and 12 characters (60
// bits).
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

// Pause says how a sandbox stands still.
type Pause struct {
	Depth    PauseDepth `json:"depth"`
	Snapshot string     `json:"snapshot,omitempty"` // what it resumes from, unless it is frozen
	// As is the form of that snapshot; empty means native.
	As SnapshotKind `json:"as,omitempty"`
	At time.Time    `json:"at"` // since when; running time ends here
	// Left is what is left of its time to live, which goes on when it resumes. Zero
	// means that it was used up: resuming grants the profile's time to live anew.
	Left     time.Duration `json:"left_ns,omitempty"`
	Cause    Reason        `json:"cause"`              // requested, or expired where the profile pauses instead of destroying
	Undo     bool          `json:"undo,omitempty"`     // pausing failed: it is on its way back to running
	Attempts int           `json:"attempts,omitempty"` // resumes that failed
}

// PauseDepth says what becomes of a paused sandbox's memory.
type PauseDepth string

// The depths of a pause.
const (
	PauseFreeze PauseDepth = "freeze" // processes stand still where they are; memory stays occupied
	PauseDisk   PauseDepth = "disk"   // memory and files are saved, the object is torn down
	PauseFiles  PauseDepth = "files"  // files are saved, processes end
)

// PauseDepths lists every depth.
func PauseDepths() []PauseDepth { return []PauseDepth{PauseFreeze, PauseDisk, PauseFiles} }

// ExpiryAction says what becomes of a sandbox whose time to live is over, or that nobody uses.
type ExpiryAction string

// The expiry actions. Empty means ExpiryDestroy.
const (
	ExpiryDestroy ExpiryAction = "destroy"
	ExpiryPause   ExpiryAction = "pause"
)

// ExpiryActions lists every action.
func ExpiryActions() []ExpiryAction { return []ExpiryAction{ExpiryDestroy, ExpiryPause} }

// DefaultMaxPaused is how long a paused sandbox is kept where its profile does not
// say.
const DefaultMaxPaused = 7 * 24 * time.Hour
