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
	// ID is unique in the installation. It is the key of the record, and all outside objects are named
	// after it. ShownID is the ID that the tenant asked for, if it differs (ObjectID). Shown returns
	// the one to display.
	ID         string `json:"id"`
	ShownID    string `json:"shown_id,omitempty"`
	Generation int    `json:"generation"` // 1 for the first sandbox of that ID
	Name       string `json:"name,omitempty"`
	Tenant     string `json:"tenant"`
	Profile    string `json:"profile"`
	Extension  string `json:"extension"`
	Host       string `json:"host,omitempty"` // present or chosen host; Spec.Host is the requested one
	// Untouched says that nothing of the sandbox exists at Host, or anywhere if that is empty, because
	// no call to make it has reached a host. It is cleared before the next such call.
	Untouched bool     `json:"untouched,omitempty"`
	Consumer  Consumer `json:"consumer,omitzero"`
	// Thread is the thread that the sandbox was made for, if any; no other thread gets its ID. Its User
	// is never empty.
	Thread Thread `json:"thread,omitzero"`

	State   State  `json:"state"`
	Reason  Reason `json:"reason,omitempty"`  // why it ends
	Message string `json:"message,omitempty"` // the same for display
	Fault   Kind   `json:"fault,omitempty"`   // kind of error of a failed create, to answer a repeated request alike
	Hint    string `json:"hint,omitempty"`    // hint of that error

	Spec      Spec   `json:"spec"`
	SealedEnv []byte `json:"-"` // Spec.Env, encrypted by the manager
	// Secrets are environment variables, added to Spec.Env, whose values are the secrets that they name. The version does
	// not change while the sandbox lives.
	Secrets      map[string]SecretRef `json:"secrets,omitempty"`
	Handle       Handle               `json:"handle"`
	Reachability Reachability         `json:"reachability,omitzero"`
	Opened       []OpenPort           `json:"opened,omitempty"` // ports that the port proxy serves
	Cleanup      *CleanupReport       `json:"cleanup,omitempty"`
	Quote        MeterQuote           `json:"quote,omitzero"`     // price at creation: later price changes do not affect it
	MaxCost      Credits              `json:"max_cost,omitempty"` // of its request; 0 means no bound
	Cost         Credits              `json:"cost,omitempty"`     // charged so far; final once terminated and not pending
	Usage        Usage                `json:"usage,omitzero"`     // last reading of the backend's meter; zero if there was none
	Billing      Billing              `json:"billing,omitempty"`

	// Route says, for a profile with several candidates, what became of each when the sandbox was made.
	Route []RouteChoice `json:"route,omitempty"`

	// Debts are what may exist of the sandbox where its create could not make it, and left for another
	// candidate. The sandbox does not end before each is proven gone.
	Debts []Debt `json:"debts,omitempty"`

	// RestoredFrom is the snapshot that the sandbox was restored from, RestoredAs the form that was
	// used: native or portable.
	RestoredFrom string       `json:"restored_from,omitempty"`
	RestoredAs   SnapshotKind `json:"restored_as,omitempty"`

	// Pause is set from pausing until the sandbox runs again. PausedFor is the sum of former pauses.
	// Neither counts as running time. Every resume from a snapshot makes an object of a higher
	// generation: Spec.Generation is that of the latest object, Generation that of the first, and a
	// later sandbox of the ID begins above both.
	Pause     Pause         `json:"pause,omitzero"`
	PausedFor time.Duration `json:"paused_for_ns,omitempty"`

	// Pool identifies the material of a sandbox that was made for the pool of its profile. While it
	// waits there it has no owner: Tenant is empty. PooledAt is when it became ready there; the other
	// times of a claimed sandbox count from its claim.
	Pool     string    `json:"pool,omitempty"`
	PooledAt time.Time `json:"pooled_at,omitzero"`

	Version     int64     `json:"version"` // grows with every write; a write with an old one fails with Conflict
	Retries     int       `json:"retries,omitempty"`
	LastError   string    `json:"last_error,omitempty"` // of the step that is being retried
	AbsentSince time.Time `json:"absent_since,omitzero"`
	// UnresponsiveSince is when the backend first reported that the sandbox exists but does not answer;
	// zero while it answers. The broker does not give it up for that.
	UnresponsiveSince time.Time `json:"unresponsive_since,omitzero"`

	CreatedAt time.Time `json:"created_at"`
	// ProvisionedAt is when Provision returned; WaitReady took from then until ReadyAt.
	ProvisionedAt time.Time `json:"provisioned_at,omitzero"`

	ReadyAt   time.Time `json:"ready_at,omitzero"`
	ResumedAt time.Time `json:"resumed_at,omitzero"` // last resume
	UsedAt    time.Time `json:"used_at,omitzero"`
	ExpiresAt time.Time `json:"expires_at,omitzero"` // end of the time to live; while paused, end of the pause
	RetryAt   time.Time `json:"retry_at,omitzero"`   // the sweep ignores the sandbox until then
	EndingAt  time.Time `json:"ending_at,omitzero"`
	EndedAt   time.Time `json:"ended_at,omitzero"`

	// Unconfirmed is Claimed if the sandbox waited in a pool when the database went back in time.
	Unconfirmed Unconfirmed `json:"unconfirmed,omitempty"`

	// Damaged says why the record could not be read; the other fields then hold only the readable rest.
	// It is never stored: writing the record repairs it.
	Damaged string `json:"-"`
	// Found says, in the result of Create, that another request made this sandbox or is making it. It
	// is never stored.
	Found bool `json:"-"`
}

// Shown returns the ID that the tenant knows. It is unique only together with the tenant.
func (sb *Sandbox) Shown() string { return cmp.Or(sb.ShownID, sb.ID) }

// LivesByUse reports whether sb lives as long as it is used (TTLIdle). ExpiresAt is then the end of the
// longest life that its profile allows.
func (sb *Sandbox) LivesByUse() bool { return sb.Spec.Profile.TTL == TTLIdle }

// EndsAt returns when sb ends if it is not used until then. It is ExpiresAt, or earlier for a sandbox
// that lives by its use.
func (sb *Sandbox) EndsAt() time.Time {
	if unused := sb.UsedAt.Add(sb.Spec.Profile.Idle); sb.State == Running && sb.LivesByUse() && unused.Before(sb.ExpiresAt) {
		return unused
	}
	return sb.ExpiresAt
}

// Ref names sb among the sandboxes of all tenants: TENANT/ID. A sandbox in a pool has no owner and only
// its ID.
func (sb *Sandbox) Ref() string {
	if sb.Tenant == "" {
		return sb.ID
	}
	return sb.Tenant + "/" + sb.Shown()
}

// Unconfirmed says that a record may be wrong about the owner of its sandbox, after the database went
// back in time.
type Unconfirmed string

// Claimed is of a sandbox that waited in a pool: it may be a tenant's since. No pool gives it out, and
// its object is quarantined.
const Claimed Unconfirmed = "claimed"

// OpenPort is a port that the port proxy serves.
type OpenPort struct {
	Port int   `json:"port"`
	Rev  int64 `json:"rev"` // signed URLs are valid for one Rev; no two of a sandbox are equal
}

// Thread identifies a conversation of an agent. The same thread always gets the same sandbox ID.
type Thread struct {
	User string `json:"user,omitempty"` // DefaultUser if empty
	ID   string `json:"id,omitempty"`
}

// DefaultUser is the user of a thread without one.
const DefaultUser = "default"

// Compiled when first needed: the agent, which every create starts, links
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

// NewID returns a random sandbox ID of 8 characters (40 bits).
func NewID() string {
	var b [8]byte
	rand.Read(b[:])
	for i := range b {
		b[i] = idAlphabet[b[i]%32]
	}
	return string(b[:])
}

// CheckID reports why id cannot be a sandbox ID. IDs are lower-case DNS labels of at most 48
// characters, so that every backend can use them in a name. Kind: Invalid.
func CheckID(id string) error {
	if !idPattern().MatchString(id) {
		return E(Invalid, nil, "%q is not a sandbox ID: want 1 to 48 characters a-z, 0-9 and inner hyphens", id)
	}
	return nil
}

// DefaultTenant is the tenant of an installation without others.
const DefaultTenant = "default"

// ObjectID returns the ID in records and outside objects for a caller of tenant that chose id. For
// DefaultTenant it is id itself. For other tenants it is derived from both, so that the sandboxes of
// two tenants with the same id never collide.
func ObjectID(tenant, id string) string {
	if tenant == DefaultTenant {
		return id
	}
	return DerivedID(tenant, id)
}

const derivedPrefix, derivedChars = "t-", 26 // 130 bits

// DerivedID is ObjectID for a tenant other than the default one. IsDerivedID recognizes its results; no
// caller may choose such an ID.
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

// normalizeForeign maps any user name into [A-Za-z0-9_-]. If that loses something, it appends a digest
// of the original, so that two names never become one.
func normalizeForeign(s string) string {
	clean := foreignChar().ReplaceAllString(s, "-")
	if clean == s {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	return clean + "-" + hex.EncodeToString(sum[:])[:16]
}

// ExternalName is the name of every outside object of one generation. It is derived from facts that the
// broker stored before the object existed, so that the object can be found after any crash. id is
// Sandbox.ID, which differs by tenant.
func ExternalName(owner, id string, generation int) string {
	return fmt.Sprintf("sbx-%s-%s-g%d", owner, id, generation)
}

// An Event is one line of a sandbox's history. It is written in the same transaction as the change that
// it reports.
type Event struct {
	Seq        int64     `json:"seq"` // assigned by the store, strictly growing
	At         time.Time `json:"at"`
	SandboxID  string    `json:"sandbox_id,omitempty"`
	ShownID    string    `json:"shown_id,omitempty"` // Sandbox.ShownID
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

// EventType is the type of an event.
type EventType string

// The event types.
const (
	EventState EventType = "state" // From became To
	EventStep  EventType = "step"  // progress within a state ("provisioned")
	// EventProgress is never stored. Callers that follow a sandbox's events during its creation get it
	// between other events, with a Seq of 0.
	EventProgress EventType = "progress" // how far a long step has come
	EventExtend   EventType = "extend"   // the expiry moved
	EventNetwork  EventType = "network"  // its network policy changed
	EventPort     EventType = "port"     // a port was opened or closed at the port proxy
	EventRetry    EventType = "retry"    // a step failed and will be tried again
	EventOrphan   EventType = "orphan"   // an object without a record was removed
	// EventQuarantine reports an object of this installation that the database does not know. It is
	// kept until its fuse, or until an administrator destroys it.
	EventQuarantine EventType = "quarantine"
	EventSnapshot   EventType = "snapshot" // a snapshot was begun, sealed or dropped
	EventKey        EventType = "key"      // an API key was made or revoked
	EventSecret     EventType = "secret"   // a secret was set or removed
	EventBilling    EventType = "billing"  // what it cost differs from what was on hold, or is not known yet
	EventWarning    EventType = "warning"  // an operator should look at it
)

// Principal is the authenticated caller.
type Principal struct {
	Tenant string
	Actor  string // for events: "key:<id>", "unix:<uid>", …
	KeyID  string // the API key used, if any
	Scopes []Scope
	// Consumer is the consumer that the API key is bound to: the ID of the consumer of every request. Empty without one.
	Consumer string
	// Vouches names parts of a request (RestrictedMounts) that the principal's front door vouches for,
	// as an administrator would: a front door that enforces its operator's settings.
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

// PrincipalFrom returns the principal in ctx. Without one it returns a principal without rights.
func PrincipalFrom(ctx context.Context) Principal {
	p, _ := ctx.Value(principalKey{}).(Principal)
	return p
}

// A Secret is a string that does not print: formatting, logging and encoding it show a placeholder.
// (Package fmt ignores that for unexported fields of a struct that is printed as a whole; keep secrets
// out of those.)
type Secret string

const redacted = "[redacted]"

// Reveal returns the secret itself.
func (s Secret) Reveal() string { return string(s) }

// String returns the placeholder.
func (s Secret) String() string { return redacted }

// GoString returns the placeholder.
func (s Secret) GoString() string { return redacted }

// LogValue returns the placeholder.
func (s Secret) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText returns the placeholder.
func (s Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// Format implements fmt.Formatter. Without it, a verb that does not fit a string, such as %d, would
// print the value.
func (s Secret) Format(f fmt.State, _ rune) { io.WriteString(f, redacted) }
