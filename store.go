package sandboxer

import (
	"context"
	"time"
)

// Store keeps the database: sandboxes, their history, snapshots, the ledger, secrets, idempotency keys and
// API keys. Package sqlstore implements it; package internal/storetest is its
// conformance suite.
//
// A record and the Writes given with it are committed in one transaction or not at
// all, and durably: once a method returned nil, a power cut does not undo it. Times
// are kept to the microsecond and returned in UTC. Methods are safe for concurrent
// use. Kinds: NotFound for a missing row, Conflict as each method says, Exhausted
// when the disk is full, Unavailable when the database cannot be reached.
type Store interface {
	// CreateSandbox inserts sb with Version 1, setting sb.Version. Conflict when a
	// live sandbox has that ID, or that (tenant, shown ID) or (tenant, name);
	// sb.Generation must be larger than that of every earlier sandbox of the ID, or
	// Conflict. Each of sb.Secrets with Version 0 gets the newest version, here too. NotFound if a secret or a version
	// does not exist; Invalid if it is another tenant's.
	CreateSandbox(ctx context.Context, sb *Sandbox, w Writes) error
	// UpdateSandbox writes sb if the stored version equals sb.Version and raises it
	// (in sb too). Otherwise it returns Conflict and writes nothing, not even w.
	UpdateSandbox(ctx context.Context, sb *Sandbox, w Writes) error
	// Sandbox returns the newest generation of id. Failed when its record is damaged; the error then
	// comes with the readable rest, with Damaged set.
	Sandbox(ctx context.Context, id string) (*Sandbox, error)
	// SandboxShown returns, like Sandbox, the tenant's newest sandbox with the shown ID.
	SandboxShown(ctx context.Context, tenant, shown string) (*Sandbox, error)
	// TenantsOfShown returns the tenants that have, or had, a sandbox with the shown ID, sorted by
	// name, at most DefaultPage of them; "" for a sandbox that waits in a pool.
	TenantsOfShown(ctx context.Context, shown string) ([]string, error)
	// SandboxGeneration returns exactly that generation of id, like Sandbox.
	SandboxGeneration(ctx context.Context, id string, generation int) (*Sandbox, error)
	// Sandboxes returns up to q.Limit records in the order of creation, newest first, and the cursor of
	// the next page ("" at the end). Kind: Invalid for a cursor that the store did not make. A damaged
	// record does not fail the query: the result has its readable rest, with Damaged set. If only its
	// identity is readable, it is left out of queries that restrict tenant, profile, extension, name or
	// labels.
	Sandboxes(ctx context.Context, q Query) (items []*Sandbox, next string, err error)

	// Snapshot returns the record of one snapshot. (Writes.Snapshots makes and changes
	// them.)
	Snapshot(ctx context.Context, id string) (*SnapshotRecord, error)
	// Snapshots returns up to q.Limit records in the order of creation, newest first, and the cursor of
	// the next page. It returns damaged records as Sandboxes does.
	Snapshots(ctx context.Context, q SnapshotQuery) (items []*SnapshotRecord, next string, err error)

	// QuotaUse returns the tenants' use of the resources that are counted from records (not execs and
	// requests), sorted by tenant, up to q.Limit of them. next is the tenant after which the next page
	// begins ("" at the end).
	QuotaUse(ctx context.Context, q QuotaUseQuery) (items []QuotaUse, next string, err error)

	// RoomUse counts the sandboxes that take room on the extension and of the profile of r, each only if r bounds it, and
	// without those in pools, which give their room to others.
	RoomUse(ctx context.Context, r Room) (RoomUse, error)

	// Write commits w alone.
	Write(ctx context.Context, w Writes) error
	// Events returns up to q.Limit events after q.After, oldest first.
	Events(ctx context.Context, q EventQuery) ([]Event, error)
	// IdempotencyKey returns the entry of (tenant, key), or NotFound.
	IdempotencyKey(ctx context.Context, tenant, key string) (IdempotencyKey, error)
	// ForgetIdempotencyKeys removes keys that were recorded before t.
	ForgetIdempotencyKeys(ctx context.Context, t time.Time) error
	// ForgetHistory removes, in one transaction, up to limit sandboxes that ended before t and have
	// nothing on hold, each with its events; up to limit snapshots that were dropped before t; and up
	// to limit events before t that belong to no sandbox in the database. It never shortens the ledger.
	// It returns the number of removed items; fewer than limit means that no more are left.
	ForgetHistory(ctx context.Context, t time.Time, limit int) (removed int, err error)

	// Balance returns the sum of the tenant's grants, holds and voids.
	Balance(ctx context.Context, tenant string) (Credits, error)
	// Entries returns up to q.Limit ledger entries after q.After, oldest first, and the cursor of the
	// next page.
	Entries(ctx context.Context, q EntryQuery) (items []Entry, next string, err error)
	// OpenHolds returns, for every sandbox generation whose holds, posts and voids
	// do not sum to zero, what is still on hold (positive).
	OpenHolds(ctx context.Context) ([]OpenHold, error)

	// UsageRows returns up to q.Limit usage rows after q.After, oldest first.
	UsageRows(ctx context.Context, q UsageQuery) ([]UsageRow, error)
	// ForgetUsage removes, of the oldest limit usage rows, those that were written before t, with the dead letters
	// of them. It returns their number; fewer than limit means that no more are left.
	ForgetUsage(ctx context.Context, t time.Time, limit int) (removed int, err error)
	// SinkStates returns how far each known sink is, sorted by name.
	SinkStates(ctx context.Context) ([]SinkState, error)
	// DeadLetters returns up to q.Limit dead letters, in the order of their rows.
	DeadLetters(ctx context.Context, q DeadLetterQuery) ([]DeadLetter, error)

	// Secret returns one version of a secret, the newest for a Version of 0. NotFound.
	Secret(ctx context.Context, ref SecretRef) (SecretRecord, error)
	// Secrets returns the newest version of each secret of the tenant ("" for the operator's), sorted by name, without
	// Sealed. There are at most MaxSecrets.
	Secrets(ctx context.Context, tenant string) ([]SecretRecord, error)
	// NextSecretVersion returns a version that Writes.Secret takes, if nothing changes meanwhile.
	NextSecretVersion(ctx context.Context, tenant, name string) (int64, error)
	// ForgetSecretVersions removes all versions that are not the newest and that no live sandbox or snapshot refers to.
	ForgetSecretVersions(ctx context.Context) error

	// PutAPIKey inserts or replaces k by ID.
	PutAPIKey(ctx context.Context, k APIKey) error
	// APIKey returns the key with that ID, or NotFound.
	APIKey(ctx context.Context, id string) (APIKey, error)
	APIKeys(ctx context.Context, tenant string) ([]APIKey, error) // "" lists all

	// Close closes the database.
	Close() error
}

// Writes are committed together with a record.
type Writes struct {
	// Entries are added to the ledger. An entry whose Key exists with the same booking (tenant,
	// generation, type and amount) is skipped; with another booking it is a Conflict and nothing is
	// written. If Cover is set and the transaction would leave the balance of an entry's tenant below
	// zero, nothing is written and the error is NoCredit. So it is if a hold would raise what an API key spends above
	// its MaxSpend. What is on hold for a sandbox, and what is then posted, counts for the key of its last hold that
	// has one (Entry.KeyID).
	Entries []Entry
	Cover   bool
	Usage   []UsageRow      // a row whose Key exists is skipped
	Sink    *SinkChange     // Conflict as it says; nothing is written then
	Events  []Event         // Seq is assigned by the store, here too once committed
	Key     *IdempotencyKey // Conflict when (tenant, key) is taken
	FreeKey *IdempotencyKey // removed before Key is put, if it still belongs to the same sandbox and generation
	APIKey  *APIKey         // inserted or replaced
	// WentBackAccepted says that an administrator accepts the database although it went back in time:
	// the database does not report that any more.
	WentBackAccepted bool
	// Snapshots with Version 0 are inserted: Conflict when the ID exists, or when another snapshot that
	// is not dropped has the (tenant, name). Others replace the stored record with the same Version:
	// Conflict when it has another, NotFound when there is none. Once committed, Version has grown by
	// one, here too.
	Snapshots []*SnapshotRecord
	// If Quota is set and the transaction would raise its tenant's use of a resource above it, nothing
	// is written and the error is Exhausted, or NoCredit where that is of spending (TenantQuota.Check). Use
	// above the quota that does not grow is permitted.
	Quota *TenantQuota
	// If Room is set and the transaction would raise the number of sandboxes of its extension or its
	// profile above the bound, nothing is written and the error is Exhausted, with a FullError as its
	// cause (Room.Check). Any other reason to refuse the transaction takes precedence.
	Room *Room
	// Secret is inserted as a new version of its secret. Versions that are older, and that no live sandbox or snapshot
	// refers to, are removed. Conflict unless its Version is above all that are kept or referred to; Exhausted above
	// MaxSecrets or MaxSecretVersions.
	Secret *SecretRecord
	// NoSecret removes a secret. NotFound if there is none; Conflict, with a message that names them, if live sandboxes or
	// snapshots refer to it, unless Force is set. A damaged record of the tenant counts as one that refers to everything.
	NoSecret *SecretRemoval
}

// IdempotencyKey records the request that was made under a caller's key.
type IdempotencyKey struct {
	Tenant, Key string
	Digest      string // of the request; another request under the same key is a Conflict
	SandboxID   string
	Generation  int
	At          time.Time
}

// Query selects sandboxes; zero fields do not restrict.
type Query struct {
	Tenant    string
	Profile   string
	Extension string
	Name      string
	ShownID   string // as returned by Sandbox.Shown
	IDPrefix  string // beginning of that ID
	States    []State
	Labels    map[string]string // all must match
	DueBefore time.Time         // ExpiresAt or RetryAt, of the sandbox or of a debt, set and at or before this
	DebtsAt   string            // an extension that one of their debts names
	Unsettled bool              // something is still on hold for them
	Billing   Billing
	After     string // cursor
	Limit     int    // at most MaxPage; 0 means DefaultPage
}

// DefaultPage and MaxPage bound every list.
const (
	DefaultPage = 100
	MaxPage     = 1000
)

// EventQuery selects events; zero fields do not restrict.
type EventQuery struct {
	Tenant    string
	SandboxID string
	After     int64     // Seq
	Since     time.Time // only events at or after this time
	Newest    bool      // the last Limit events instead of the first; still oldest first
	Limit     int
}

// EntryQuery selects ledger entries; zero fields do not restrict.
type EntryQuery struct {
	Tenant    string
	SandboxID string
	ShownID   string // compared with SandboxID for entries without one
	After     string
	Limit     int
}

// OpenHold is the amount that one sandbox generation still has on hold.
type OpenHold struct {
	Tenant     string
	SandboxID  string
	Generation int
	Amount     Credits
}

// APIKey is the record of one API key. The secret itself is shown once, at creation; only its SHA-256
// is kept.
type APIKey struct {
	ID         string    `json:"id"`
	Name       string    `json:"name"`
	Tenant     string    `json:"tenant"`
	Hash       []byte    `json:"-"`
	Scopes     []Scope   `json:"scopes"`
	CreatedAt  time.Time `json:"created_at"`
	ExpiresAt  time.Time `json:"expires_at,omitzero"`
	RevokedAt  time.Time `json:"revoked_at,omitzero"`
	LastUsedAt time.Time `json:"last_used_at,omitzero"`
	MaxSpend   MaxSpend  `json:"max_spend,omitzero"`
	Consumer   string    `json:"consumer,omitempty"` // to which it is bound: the ID of every request's consumer; empty binds it to none
}
