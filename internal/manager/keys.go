package manager

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const tokenPrefix = "sbx_key_"

var tokenEncoding = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)

// CreateKey makes an API key and returns its token, which is shown this once: only a
// digest of it is kept. It needs the admin scope.
func (m *Manager) CreateKey(ctx context.Context, k NewKey) (sandboxer.Secret, sandboxer.APIKey, error) {
	p, err := may(ctx, sandboxer.ScopeAdmin)
	if err != nil {
		return "", sandboxer.APIKey{}, err
	}
	switch {
	case k.Name == "" || len(k.Name) > 128 || strings.ContainsFunc(k.Name, func(r rune) bool { return r < 0x20 }):
		return "", sandboxer.APIKey{}, sandboxer.E(sandboxer.Invalid, nil, "an API key needs a name of 1 to 128 characters")
	case k.TTL < 0:
		return "", sandboxer.APIKey{}, sandboxer.E(sandboxer.Invalid, nil, "a key that lives for %s is dead already", k.TTL)
	case len(k.Scopes) == 0:
		return "", sandboxer.APIKey{}, sandboxer.E(sandboxer.Invalid, nil, "an API key needs at least one scope").
			WithHint("the scopes are: %s", join(sandboxer.Scopes()))
	case len(k.Tenant) > 128:
		return "", sandboxer.APIKey{}, sandboxer.E(sandboxer.Invalid, nil, "a tenant's name has at most 128 bytes")
	}
	for _, s := range k.Scopes {
		if !slices.Contains(sandboxer.Scopes(), s) {
			return "", sandboxer.APIKey{}, sandboxer.E(sandboxer.Invalid, nil, "%q is not a scope", s).
				WithHint("the scopes are: %s", join(sandboxer.Scopes()))
		}
	}
	var b [32]byte
	rand.Read(b[:])
	secret := tokenEncoding.EncodeToString(b[:])
	hash := sha256.Sum256([]byte(secret))
	key := sandboxer.APIKey{
		ID: sandboxer.NewID(), Name: k.Name, Tenant: cmp.Or(k.Tenant, p.Tenant), Hash: hash[:],
		Scopes: slices.Clone(k.Scopes), CreatedAt: now(),
	}
	if k.TTL > 0 {
		key.ExpiresAt = key.CreatedAt.Add(k.TTL)
	}
	if err := m.keys.write(ctx, key, "made"); err != nil {
		return "", sandboxer.APIKey{}, err
	}
	m.notify("")
	return sandboxer.Secret(tokenPrefix + key.ID + "_" + secret), key, nil
}

// Keys lists every API key, also ended ones. It needs the admin scope.
func (m *Manager) Keys(ctx context.Context) ([]sandboxer.APIKey, error) {
	if _, err := may(ctx, sandboxer.ScopeAdmin); err != nil {
		return nil, err
	}
	return m.keys.list(ctx)
}

// RevokeKey ends an API key at once, with every stream opened under it. It needs the
// admin scope. Revoking twice is success.
func (m *Manager) RevokeKey(ctx context.Context, id string) error {
	if _, err := may(ctx, sandboxer.ScopeAdmin); err != nil {
		return err
	}
	changed, err := m.keys.revoke(ctx, id)
	if changed {
		m.notify("")
	}
	return err
}

// Authenticate returns the principal that token stands for. Unauthenticated: it
// stands for none, any more or ever; the answer does not say which. Nothing is
// cached, so that a revocation counts from the next call.
func (m *Manager) Authenticate(ctx context.Context, token sandboxer.Secret) (sandboxer.Principal, error) {
	return m.keys.authenticate(ctx, token)
}

// Bind returns a ctx that also ends, with a cause that is Unauthenticated, when p's
// API key is revoked or expires: for streams, which outlive the check that opened
// them. The returned function releases it.
func (m *Manager) Bind(ctx context.Context, p sandboxer.Principal) (context.Context, context.CancelFunc) {
	return m.keys.bind(ctx, p)
}

// errNotLoggedIn says the same whatever is wrong with a token.
var errNotLoggedIn = sandboxer.E(sandboxer.Unauthenticated, nil, "the API key is not valid").
	WithHint("it may be mistyped, revoked or expired; ask an administrator for a new one")

var errKeyEnded = sandboxer.E(sandboxer.Unauthenticated, nil, "the API key was revoked or has expired")

// apiKeys are the API keys of the installation: the store has them, memory has the streams
// that end with a key, and when keys were last used, which is stored now and then.
//
// mu guards the two maps. Under it neither the store is called nor a stream ended. changing is
// held by the one who reads a key, changes and writes it, across those calls of the store;
// mu may be taken under it, never the other way round.
type apiKeys struct {
	store    sandboxer.Store
	changing sync.Mutex

	mu      sync.Mutex
	streams map[string]map[*keyStream]struct{} // by key ID: what ends with it
	lastUse map[string]time.Time               // by key ID: not stored yet
}

// A keyStream is one stream that must not outlive its key.
type keyStream struct{ cancel context.CancelCauseFunc }

func newAPIKeys(store sandboxer.Store) *apiKeys {
	return &apiKeys{store: store, streams: map[string]map[*keyStream]struct{}{}, lastUse: map[string]time.Time{}}
}

// write stores key together with the event that says what happened to it.
func (a *apiKeys) write(ctx context.Context, key sandboxer.APIKey, what string) error {
	return a.store.Write(ctx, sandboxer.Writes{APIKey: &key, Events: []sandboxer.Event{{
		At: now(), Tenant: key.Tenant, Type: sandboxer.EventKey, Actor: actor(ctx),
		Message: "API key " + key.ID + " (" + key.Name + ") was " + what,
	}}})
}

// list returns every key, without its hash, with the time of last use as it is now.
func (a *apiKeys) list(ctx context.Context) ([]sandboxer.APIKey, error) {
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

// revoke ends a key and its streams, and reports whether that changed the store. Revoking
// again is success. NotFound: there is no such key.
func (a *apiKeys) revoke(ctx context.Context, id string) (changed bool, err error) {
	a.changing.Lock()
	defer a.changing.Unlock()
	key, err := a.store.APIKey(ctx, id)
	switch {
	case isKind(err, sandboxer.NotFound):
		return false, sandboxer.E(sandboxer.NotFound, nil, "there is no API key %q", id)
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

// authenticate returns the principal that token stands for, and notes the use of its key.
// Unauthenticated: it stands for none.
func (a *apiKeys) authenticate(ctx context.Context, token sandboxer.Secret) (sandboxer.Principal, error) {
	rest, ok := strings.CutPrefix(token.Reveal(), tokenPrefix)
	id, secret, ok2 := strings.Cut(rest, "_")
	if !ok || !ok2 || sandboxer.CheckID(id) != nil || len(secret) > 128 {
		return sandboxer.Principal{}, errNotLoggedIn
	}
	key, err := a.store.APIKey(ctx, id)
	if err != nil && !isKind(err, sandboxer.NotFound) {
		return sandboxer.Principal{}, err
	}
	hash := sha256.Sum256([]byte(secret))
	same := subtle.ConstantTimeCompare(hash[:], key.Hash) == 1
	if err != nil || !same || !isValid(key) {
		return sandboxer.Principal{}, errNotLoggedIn
	}
	a.noteUse(id, now())
	return sandboxer.Principal{Tenant: key.Tenant, Actor: "key:" + id, KeyID: id, Scopes: key.Scopes}, nil
}

// noteUse remembers a use until it is stored.
func (a *apiKeys) noteUse(id string, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if at.After(a.lastUse[id]) {
		a.lastUse[id] = at
	}
}

func isValid(k sandboxer.APIKey) bool {
	return k.RevokedAt.IsZero() && (k.ExpiresAt.IsZero() || time.Now().Before(k.ExpiresAt))
}

// bind is Bind of the manager.
func (a *apiKeys) bind(ctx context.Context, p sandboxer.Principal) (context.Context, context.CancelFunc) {
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
	// Only now: a key that ended after it was checked and before it was bound.
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

// saveLastUse stores when keys were last used, where what is stored is older than lag. What is
// not stored, also because of an error, is kept for the next time.
func (a *apiKeys) saveLastUse(ctx context.Context, lag time.Duration) error {
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
func (a *apiKeys) saveLastUseOf(ctx context.Context, id string, at time.Time, lag time.Duration) (saved bool, err error) {
	a.changing.Lock()
	defer a.changing.Unlock()
	key, err := a.store.APIKey(ctx, id)
	switch {
	case isKind(err, sandboxer.NotFound):
		return true, nil
	case err != nil, at.Sub(key.LastUsedAt) <= lag:
		return false, err
	}
	key.LastUsedAt = at
	err = a.store.PutAPIKey(ctx, key)
	return err == nil, err
}
