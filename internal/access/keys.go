package access

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// TokenPrefix begins every API key, so that leaked ones are recognized.
const TokenPrefix = "sbx_key_"

var tokenEncoding = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)

// CreateKey makes an API key and returns its token, which is shown this once: only a
// digest of it is kept. It needs the admin scope.
func (a *APIKeys) CreateKey(ctx context.Context, k sandboxer.KeyRequest) (sandboxer.Secret, sandboxer.APIKey, error) {
	p, err := May(ctx, sandboxer.ScopeAdmin)
	if err != nil {
		return "", sandboxer.APIKey{}, err
	}
	switch {
	case k.Name == "" || len(k.Name) > 128 || strings.ContainsFunc(k.Name, func(r rune) bool { return r < 0x20 }):
		return "", sandboxer.APIKey{}, sandboxer.E(sandboxer.Invalid, nil, "an API key needs a name of 1 to 128 characters").
			WithHint("name it after the program that uses it: sandboxer key create ci")
	case k.TTL < 0:
		return "", sandboxer.APIKey{}, sandboxer.E(sandboxer.Invalid, nil, "a key that lives for %s has ended already", k.TTL).WithHint("give a time above zero: --ttl 720h")
	case min(k.MaxSpend.Month, k.MaxSpend.Day) < 0:
		return "", sandboxer.APIKey{}, sandboxer.E(sandboxer.Invalid, nil, "a key cannot spend less than nothing").
			WithHint("give amounts above zero, or leave max_spend out")
	case len(k.Scopes) == 0:
		return "", sandboxer.APIKey{}, sandboxer.E(sandboxer.Invalid, nil, "an API key needs at least one scope").
			WithHint("the scopes are: %s", suggest.List(sandboxer.Scopes()))
	case k.Consumer != "" && (sandboxer.CheckSecretName(k.Consumer) != nil || len(k.Consumer) > sandboxer.MaxBoundConsumer):
		return "", sandboxer.APIKey{}, sandboxer.E(sandboxer.Invalid, nil, "%q is not a consumer that a key can be bound to: want 1 to %d letters, digits, dots, hyphens and underscores, the first a letter or a digit", k.Consumer, sandboxer.MaxBoundConsumer)
	case len(k.Tenant) > 128:
		return "", sandboxer.APIKey{}, sandboxer.E(sandboxer.Invalid, nil, "a tenant's name has at most 128 bytes")
	}
	for _, s := range k.Scopes {
		if !slices.Contains(sandboxer.Scopes(), s) {
			return "", sandboxer.APIKey{}, sandboxer.E(sandboxer.Invalid, nil, "%q is not a scope", s).
				WithHint("the scopes are: %s", suggest.List(sandboxer.Scopes()))
		}
	}
	var b [32]byte
	rand.Read(b[:])
	secret := tokenEncoding.EncodeToString(b[:])
	hash := sha256.Sum256([]byte(secret))
	key := sandboxer.APIKey{
		ID: sandboxer.NewID(), Name: k.Name, Tenant: cmp.Or(k.Tenant, p.Tenant), Hash: hash[:],
		Scopes: slices.Clone(k.Scopes), CreatedAt: now(), MaxSpend: k.MaxSpend, Consumer: k.Consumer,
	}
	if k.TTL > 0 {
		key.ExpiresAt = key.CreatedAt.Add(k.TTL)
	}
	what := "made"
	if k.Consumer != "" {
		what += " for consumer " + k.Consumer
	}
	if err := a.write(ctx, key, what); err != nil {
		return "", sandboxer.APIKey{}, err
	}
	a.changed()
	return sandboxer.Secret(TokenPrefix + key.ID + "_" + secret), key, nil
}

// Keys lists every API key, also ended ones. It needs the admin scope.
func (a *APIKeys) Keys(ctx context.Context) ([]sandboxer.APIKey, error) {
	if _, err := May(ctx, sandboxer.ScopeAdmin); err != nil {
		return nil, err
	}
	return a.list(ctx)
}

// RevokeKey ends an API key immediately, and every stream that was opened with it. It needs the admin scope. Revoking twice is
// success.
func (a *APIKeys) RevokeKey(ctx context.Context, id string) error {
	if _, err := May(ctx, sandboxer.ScopeAdmin); err != nil {
		return err
	}
	changed, err := a.revoke(ctx, id)
	if changed {
		a.changed()
	}
	return err
}

// Authenticate returns the principal of token. Unauthenticated: token is no key, or a key that has ended; the error does not
// say which. Nothing is cached, so a revocation counts from the next call.
func (a *APIKeys) Authenticate(ctx context.Context, token sandboxer.Secret) (sandboxer.Principal, error) {
	return a.authenticate(ctx, token)
}

// Bind returns a ctx that also ends, with an Unauthenticated cause, when the API key of p is revoked or expires. Streams use
// it, because they outlive the check at their start. The returned function releases it.
func (a *APIKeys) Bind(ctx context.Context, p sandboxer.Principal) (context.Context, context.CancelFunc) {
	return a.bind(ctx, p)
}

// ErrNotLoggedIn is the same for every fault of a token.
var ErrNotLoggedIn = sandboxer.E(sandboxer.Unauthenticated, nil, "the API key is not valid").
	WithHint("it may be mistyped, revoked or expired; ask an administrator for a new one")

var errKeyEnded = sandboxer.E(sandboxer.Unauthenticated, nil, "the API key was revoked or has expired")

// APIKeys are the API keys of the installation. The store has them. Memory has the streams that end with each key, and the
// times of last use, which are stored now and then.
//
// mu guards the two maps. While it is held, no store is called and no stream ended. A caller that reads, changes and writes a
// key holds changing during these calls of the store; mu may be taken while changing is held, never the other way round.
type APIKeys struct {
	store    sandboxer.Store
	changed  func() // called after each commit with an event
	changing sync.Mutex

	mu      sync.Mutex
	streams map[string]map[*keyStream]struct{} // by key ID: what ends with it
	lastUse map[string]time.Time               // by key ID: not stored yet
}

// A keyStream is one stream that must not outlive its key.
type keyStream struct{ cancel context.CancelCauseFunc }

// NewAPIKeys returns the keys in store. changed is called after each commit that has an event.
func NewAPIKeys(store sandboxer.Store, changed func()) *APIKeys {
	return &APIKeys{store: store, changed: changed, streams: map[string]map[*keyStream]struct{}{}, lastUse: map[string]time.Time{}}
}

// write stores key together with the event that says what happened to it.
func (a *APIKeys) write(ctx context.Context, key sandboxer.APIKey, what string) error {
	return a.store.Write(ctx, sandboxer.Writes{APIKey: &key, Events: []sandboxer.Event{{
		At: now(), Tenant: key.Tenant, Type: sandboxer.EventKey, Actor: events.Actor(ctx),
		Message: "API key " + key.ID + " (" + key.Name + ") was " + what,
	}}})
}

// list returns every key, without its hash, with the time of last use as it is now.
func (a *APIKeys) list(ctx context.Context) ([]sandboxer.APIKey, error) {
	keys, err := a.store.APIKeys(ctx, "")
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range keys {
		keys[i].Hash = nil
		if at := a.lastUse[keys[i].ID]; at.After(keys[i].LastUsedAt) {
			keys[i].LastUsedAt = at
		}
	}
	return keys, nil
}

// revoke ends a key and its streams, and reports whether it changed the store. Revoking again is success. NotFound: the key
// does not exist.
func (a *APIKeys) revoke(ctx context.Context, id string) (changed bool, err error) {
	a.changing.Lock()
	defer a.changing.Unlock()
	key, err := a.store.APIKey(ctx, id)
	switch {
	case errors.Is(err, sandboxer.NotFound):
		return false, sandboxer.E(sandboxer.NotFound, nil, "there is no API key %q", id).WithHint("list them with: sandboxer key ls")
	case err != nil:
		return false, err
	}
	if key.RevokedAt.IsZero() {
		key.RevokedAt = now()
		if err := a.write(ctx, key, "revoked"); err != nil {
			return false, err
		}
		changed = true
	}
	a.mu.Lock()
	streams := slices.Collect(maps.Keys(a.streams[id]))
	a.mu.Unlock()
	for _, s := range streams { // one that begins now looks at the store after it
		s.cancel(errKeyEnded)
	}
	return changed, nil
}

// authenticate returns the principal of token and notes the use of its key. Unauthenticated: token is no valid key.
func (a *APIKeys) authenticate(ctx context.Context, token sandboxer.Secret) (sandboxer.Principal, error) {
	rest, ok := strings.CutPrefix(token.Reveal(), TokenPrefix)
	id, secret, ok2 := strings.Cut(rest, "_")
	if !ok || !ok2 || sandboxer.CheckID(id) != nil || len(secret) > 128 {
		return sandboxer.Principal{}, ErrNotLoggedIn
	}
	key, err := a.store.APIKey(ctx, id)
	if err != nil && !errors.Is(err, sandboxer.NotFound) {
		return sandboxer.Principal{}, err
	}
	hash := sha256.Sum256([]byte(secret))
	same := subtle.ConstantTimeCompare(hash[:], key.Hash) == 1
	if err != nil || !same || !isValid(key) {
		return sandboxer.Principal{}, ErrNotLoggedIn
	}
	a.noteUse(id, now())
	return sandboxer.Principal{Tenant: key.Tenant, Actor: "key:" + id, KeyID: id, Scopes: key.Scopes, Consumer: key.Consumer}, nil
}

// noteUse remembers a use until it is stored.
func (a *APIKeys) noteUse(id string, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if at.After(a.lastUse[id]) {
		a.lastUse[id] = at
	}
}

func isValid(k sandboxer.APIKey) bool {
	return k.RevokedAt.IsZero() && (k.ExpiresAt.IsZero() || time.Now().Before(k.ExpiresAt))
}

// bind is Bind.
func (a *APIKeys) bind(ctx context.Context, p sandboxer.Principal) (context.Context, context.CancelFunc) {
	if p.KeyID == "" {
		return context.WithCancel(ctx)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	s := &keyStream{cancel}
	a.mu.Lock()
	if a.streams[p.KeyID] == nil {
		a.streams[p.KeyID] = map[*keyStream]struct{}{}
	}
	a.streams[p.KeyID][s] = struct{}{}
	a.mu.Unlock()
	release := func() {
		cancel(nil)
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.streams[p.KeyID], s)
		if len(a.streams[p.KeyID]) == 0 {
			delete(a.streams, p.KeyID)
		}
	}
	// Checked here, because the key may have ended between its check and this binding.
	key, err := a.store.APIKey(ctx, p.KeyID)
	switch {
	case err != nil && ctx.Err() == nil, err == nil && !isValid(key):
		cancel(errKeyEnded)
	case err == nil && !key.ExpiresAt.IsZero():
		timed, stop := context.WithDeadlineCause(ctx, key.ExpiresAt, errKeyEnded)
		return timed, func() { stop(); release() }
	}
	return ctx, release
}

// SaveLastUse stores the times of last use that are newer than the stored ones by more than lag. The others, and those that
// failed, are kept for the next call.
func (a *APIKeys) SaveLastUse(ctx context.Context, lag time.Duration) error {
	a.mu.Lock()
	used := a.lastUse
	a.lastUse = map[string]time.Time{}
	a.mu.Unlock()
	var failed error
	for id, at := range used {
		saved := false
		if failed == nil {
			saved, failed = a.saveLastUseOf(ctx, id, at, lag)
		}
		if !saved {
			a.noteUse(id, at)
		}
	}
	return failed
}

// saveLastUseOf is saveLastUse of one key. One that does not exist any more counts as saved.
func (a *APIKeys) saveLastUseOf(ctx context.Context, id string, at time.Time, lag time.Duration) (saved bool, err error) {
	a.changing.Lock()
	defer a.changing.Unlock()
	key, err := a.store.APIKey(ctx, id)
	switch {
	case errors.Is(err, sandboxer.NotFound):
		return true, nil
	case err != nil, at.Sub(key.LastUsedAt) <= lag:
		return false, err
	}
	key.LastUsedAt = at
	err = a.store.PutAPIKey(ctx, key)
	return err == nil, err
}

// BoundStreams is how many streams are bound to API keys.
func (a *APIKeys) BoundStreams() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, of := range a.streams {
		n += len(of)
	}
	return n
}
