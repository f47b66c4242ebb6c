package sandboxer

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// Sandbox is the broker's record of one generation of a sandbox. Only the manager
// changes it, through a Store.
type Sandbox struct {
	// ID is unique in the installation: it is the key of the record, and what everything
	// outside is named by. ShownID is the ID that the sandbox's tenant asked for and knows it
	// by, where that is another one (ObjectID); Shown is what to show.
	ID         string `json:"id"`
	ShownID    string `json:"shown_id,omitempty"`
	Generation int    `json:"generation"` // 1 for the first sandbox of that ID
	Name       string `json:"name,omitempty"`
	Tenant     string `json:"tenant"`
	Profile    string `json:"profile"`
	Extension  string `json:"extension"`
	Host       string `json:"host,omitempty"` // where it is, or is to be; Spec.Host is what was asked for
	// Untouched says that nothing of it was made at Host, or anywhere if that is empty, since
	// none of the calls that were to do so came to it. It is taken back before the next one.
	Untouched bool     `json:"untouched,omitempty"`
	Consumer  Consumer `json:"consumer,omitzero"`
	// Thread is whom the sandbox was made for, if that was a thread; no other gets its ID. Its
	// User is never empty.
	Thread Thread `json:"thread,omitzero"`

	State   State  `json:"state"`
	Reason  Reason `json:"reason,omitempty"`  // why it ends
	Message string `json:"message,omitempty"` // the same for people
	Fault   Kind   `json:"fault,omitempty"`   // the kind of error a create failed with, to answer a repeated request alike
	Hint    string `json:"hint,omitempty"`    // what it said to do

	Spec         Spec           `json:"spec"`
	SealedEnv    []byte         `json:"-"` // Spec.Env, encrypted by the manager
	Handle       Handle         `json:"handle"`
	Reachability Reachability   `json:"reachability,omitzero"`
	Opened       []OpenPort     `json:"opened,omitempty"` // what the port proxy serves
	Cleanup      *CleanupReport `json:"cleanup,omitempty"`
	Quote        MeterQuote     `json:"quote,omitzero"` // price snapshot: a later price change does not touch it
	Cost         Credits        `json:"cost,omitempty"` // posted; final once terminated

	// RestoredFrom is the snapshot that the sandbox began with, RestoredAs the form that
	// was taken: native or portable.
	RestoredFrom string       `json:"restored_from,omitempty"`
	RestoredAs   SnapshotKind `json:"restored_as,omitempty"`

	// Pause is set from pausing until it runs again. PausedFor sums former pauses:
	// neither counts as running time. Every resume from a snapshot makes an object of a
	// higher generation; Spec.Generation is that of the latest, Generation that of the
	// first, and a later sandbox of the ID begins above both.
	Pause     Pause         `json:"pause,omitzero"`
	PausedFor time.Duration `json:"paused_for_ns,omitempty"`

	// Pool is the digest of what it was made of, if it was made for the pool of its
	// profile; while it waits there it is nobody's: Tenant is empty. PooledAt is when it
	// was ready there; the other times of a claimed one count from its claim.
	Pool     string    `json:"pool,omitempty"`
	PooledAt time.Time `json:"pooled_at,omitzero"`

	Version     int64     `json:"version"` // grows with every write; a write with a stale one fails with Conflict
	Retries     int       `json:"retries,omitempty"`
	LastError   string    `json:"last_error,omitempty"` // of the step that is being retried
	AbsentSince time.Time `json:"absent_since,omitzero"`
	// UnresponsiveSince is when its backend first said that it is there and does not answer;
	// zero while it does. It is not given up for that.
	UnresponsiveSince time.Time `json:"unresponsive_since,omitzero"`

	CreatedAt time.Time `json:"created_at"`
	// ProvisionedAt is when Provision had answered; WaitReady took from then until ReadyAt.
	ProvisionedAt time.Time `json:"provisioned_at,omitzero"`

	ReadyAt   time.Time `json:"ready_at,omitzero"`
	ResumedAt time.Time `json:"resumed_at,omitzero"` // the last time
	UsedAt    time.Time `json:"used_at,omitzero"`
	ExpiresAt time.Time `json:"expires_at,omitzero"` // while it is paused: how long it is kept
	RetryAt   time.Time `json:"retry_at,omitzero"`   // the sweep leaves it alone until then
	EndingAt  time.Time `json:"ending_at,omitzero"`
	EndedAt   time.Time `json:"ended_at,omitzero"`

	// Unconfirmed says that the database went back and the record may be older than its
	// sandbox: until that is settled no deadline of it counts. ConfirmedAt is when it was.
	Unconfirmed Unconfirmed `json:"unconfirmed,omitempty"`
	ConfirmedAt time.Time   `json:"confirmed_at,omitzero"`

	// Damaged says why the record could not be read; the other fields are then only
	// what is left of it. It is never stored: writing the record mends it.
	Damaged string `json:"-"`
	// Found says, in what Create returns, that another request made this sandbox or is
	// making it. It is never stored.
	Found bool `json:"-"`
}

// Shown is the ID that sb's tenant knows it by. Only together with the tenant it is unique.
func (sb *Sandbox) Shown() string { return cmp.Or(sb.ShownID, sb.ID) }

// LivesByUse reports whether sb has no time to live but that of its use (TTLIdle). ExpiresAt is then
// when it has lived for as long as its profile allows.
func (sb *Sandbox) LivesByUse() bool { return sb.Spec.Profile.TTL == TTLIdle }

// EndsAt is when sb is over if nobody uses it until then; ExpiresAt, unless it lives by its use.
func (sb *Sandbox) EndsAt() time.Time {
	if unused := sb.UsedAt.Add(sb.Spec.Profile.Idle); sb.State == Running && sb.LivesByUse() && unused.Before(sb.ExpiresAt) {
		return unused
	}
	return sb.ExpiresAt
}

// Ref names sb among those of all tenants: TENANT/ID. One that waits in a pool is nobody's and
// has its ID alone.
func (sb *Sandbox) Ref() string {
	if sb.Tenant == "" {
		return sb.ID
	}
	return sb.Tenant + "/" + sb.Shown()
}

// Unconfirmed is how far it is known whether what a record says still holds, after the
// database went back.
type Unconfirmed string

// What is to be known of an unconfirmed record.
const (
	Unasked Unconfirmed = "unasked" // its backend was not asked yet, or could not be
	Untold  Unconfirmed = "untold"  // its backend cannot tell: it is kept until somebody extends or destroys it
	Claimed Unconfirmed = "claimed" // it waited in a pool, and may be a tenant's since: its object is quarantined
)

// OpenPort is a port that the port proxy serves.
type OpenPort struct {
	Port int   `json:"port"`
	Rev  int64 `json:"rev"` // signed URLs hold for one Rev; no two of a sandbox are equal
}

// Thread identifies a conversation of an agent: the same thread always gets the
// same sandbox ID.
type Thread struct {
	User string `json:"user,omitempty"` // DefaultUser if empty
	ID   string `json:"id,omitempty"`
}

// DefaultUser is the user of a thread that names none.
const DefaultUser = "default"

// Compiled when first needed: the agent, which is on the path of every create, links
// this package and needs none of them.
var (
	idPattern     = lazyRegexp(`^[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?$`)
	threadPattern = lazyRegexp(`^[A-Za-z0-9_-]{1,64}$`)
	foreignChar   = lazyRegexp(`[^A-Za-z0-9_-]`)
)

func lazyRegexp(pattern string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })
}

const idAlphabet = "0123456789abcdefghjkmnpqrstvwxyz" // Crockford's: no i, l, o, u

// NewID returns a fresh random 8-character sandbox ID (40 bits).
func NewID() string {
	var b [8]byte
	rand.Read(b[:])
	for i := range b {
		b[i] = idAlphabet[b[i]%32]
	}
	return string(b[:])
}

// CheckID reports, as an Invalid error, why id cannot be a sandbox ID. IDs are
// lower-case DNS labels of at most 48 characters, so that every backend can carry
// them in a name.
func CheckID(id string) error {
	if !idPattern().MatchString(id) {
		return E(Invalid, nil, "%q is not a sandbox ID: want 1 to 48 characters a-z, 0-9 and inner hyphens", id)
	}
	return nil
}

// DefaultTenant is the tenant of an installation that has no others.
const DefaultTenant = "default"

// ObjectID returns what the records and the outside objects of the sandbox carry for which a
// caller of tenant chose id: DefaultTenant's that ID itself, every other's one that is derived
// from both, so that two tenants who choose one ID have two sandboxes that never meet.
func ObjectID(tenant, id string) string {
	if tenant == DefaultTenant {
		return id
	}
	return DerivedID(tenant, id)
}

const derivedPrefix, derivedChars = "t-", 26 // 130 bits

// DerivedID is ObjectID for a tenant that is not the default one. IsDerivedID tells its
// results, which no caller may choose, from other IDs.
func DerivedID(tenant, id string) string {
	sum := sha256.Sum256([]byte(tenant + "\x00" + id)) // no ID has a NUL
	text := base32.NewEncoding(idAlphabet).EncodeToString(sum[:])
	return derivedPrefix + text[:derivedChars]
}

// IsDerivedID reports whether id has the form of DerivedID's results.
func IsDerivedID(id string) bool {
	rest, ok := strings.CutPrefix(id, derivedPrefix)
	return ok && len(rest) == derivedChars && strings.Trim(rest, idAlphabet) == ""
}

// SandboxID returns the deterministic ID of the thread: the first 16 hexadecimal
// digits of SHA-256 over "user:thread", as deer-flow computes it. Characters outside
// [A-Za-z0-9_-] are first replaced (normalizeForeign).
func (t Thread) SandboxID() (string, error) {
	user := normalizeForeign(cmp.Or(t.User, DefaultUser))
	if !threadPattern().MatchString(t.ID) {
		return "", E(Invalid, nil, "%q is not a thread ID: want 1 to 64 characters A-Z, a-z, 0-9, _ and -", t.ID)
	}
	sum := sha256.Sum256([]byte(user + ":" + t.ID))
	return hex.EncodeToString(sum[:])[:16], nil
}

// normalizeForeign maps any user name into [A-Za-z0-9_-], appending a digest of the
// original when that lost something, so that two names never become one.
func normalizeForeign(s string) string {
	clean := foreignChar().ReplaceAllString(s, "-")
	if clean == s {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	return clean + "-" + hex.EncodeToString(sum[:])[:16]
}

// ExternalName is the name every outside object of one generation carries. It is
// derived from what the broker wrote down before the object existed, so that it can
// be found again after any crash. id is Sandbox.ID, which differs by tenant.
func ExternalName(owner, id string, generation int) string {
	return fmt.Sprintf("sbx-%s-%s-g%d", owner, id, generation)
}

// An Event is one line of a sandbox's history, written in the same transaction as
// the change it reports.
type Event struct {
	Seq        int64     `json:"seq"` // assigned by the store, strictly growing
	At         time.Time `json:"at"`
	SandboxID  string    `json:"sandbox_id,omitempty"`
	ShownID    string    `json:"shown_id,omitempty"` // the sandbox's
	Generation int       `json:"generation,omitempty"`
	Tenant     string    `json:"tenant"`
	Type       EventType `json:"type"`
	From       State     `json:"from,omitempty"`
	To         State     `json:"to,omitempty"`
	Cause      Reason    `json:"cause,omitempty"`
	Actor      string    `json:"actor"` // principal, or "sweep"
	Message    string    `json:"message,omitempty"`
	Progress   *Progress `json:"progress,omitempty"` // of EventProgress
}

// EventType is what happened.
type EventType string

// The event types.
const (
	EventState EventType = "state" // From became To
	EventStep  EventType = "step"  // progress within a state ("provisioned")
	// EventProgress is never stored: who follows a sandbox's events while it is created
	// gets it between others, with a Seq of 0.
	EventProgress EventType = "progress" // how far a long step has come
	EventExtend   EventType = "extend"   // the expiry moved
	EventNetwork  EventType = "network"  // what it may reach changed
	EventPort     EventType = "port"     // a port was opened or closed to the port proxy
	EventRetry    EventType = "retry"    // a step failed and will be tried again
	EventOrphan   EventType = "orphan"   // an object without a record was removed
	// EventQuarantine: an object is ours that the database does not know; it is kept until
	// its fuse, or until an administrator adopts or destroys it.
	EventQuarantine EventType = "quarantine"
	EventAdopt      EventType = "adopt"    // a record was made anew for such an object
	EventSnapshot   EventType = "snapshot" // a snapshot was begun, sealed or dropped
	EventKey        EventType = "key"      // an API key was made or revoked
	EventWarning    EventType = "warning"  // something an operator should look at
)

// Principal is who is calling.
type Principal struct {
	Tenant string
	Actor  string // for events: "key:<id>", "unix:<uid>", …
	KeyID  string // the API key used, if any
	Scopes []Scope
	// Vouches names what of a request (RestrictedMounts) whoever let the principal in stands
	// for, as an administrator would: a front door that holds it to what its operator said.
	Vouches []string
}

// Scope is one right of a principal.
type Scope string

// The scopes. Admin includes the others and sees every tenant.
const (
	ScopeRead  Scope = "read"  // look at sandboxes, files, events
	ScopeWrite Scope = "write" // create, change, run commands, destroy
	ScopeAdmin Scope = "admin" // keys, credits, audit, every tenant
)

// Scopes lists every scope.
func Scopes() []Scope { return []Scope{ScopeRead, ScopeWrite, ScopeAdmin} }

// Can reports whether p has scope s.
func (p Principal) Can(s Scope) bool {
	return slices.Contains(p.Scopes, ScopeAdmin) || slices.Contains(p.Scopes, s)
}

type principalKey struct{}

// WithPrincipal returns ctx carrying p.
func WithPrincipal(ctx context.Context, p Principal) context.Context {
	return context.WithValue(ctx, principalKey{}, p)
}

// PrincipalFrom returns the principal in ctx. Without one it returns a principal
// that may do nothing.
func PrincipalFrom(ctx context.Context) Principal {
	p, _ := ctx.Value(principalKey{}).(Principal)
	return p
}

// A Secret is a string that does not print: every ordinary way of formatting,
// logging or encoding it shows a mark instead. (Package fmt reaches around that for
// unexported fields of a struct printed as a whole; keep secrets out of those.)
type Secret string

const redacted = "[redacted]"

// Reveal returns the secret itself.
func (s Secret) Reveal() string               { return string(s) }
func (s Secret) String() string               { return redacted }
func (s Secret) GoString() string             { return redacted }
func (s Secret) LogValue() slog.Value         { return slog.StringValue(redacted) }
func (s Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// Format implements fmt.Formatter: a verb that does not fit a string, such as %d,
// would print the value itself.
func (s Secret) Format(f fmt.State, _ rune) { io.WriteString(f, redacted) }
