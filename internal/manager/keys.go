package manager

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"slices"
	"strings"
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
	if err := m.writeKey(ctx, key, "made"); err != nil {
		return "", sandboxer.APIKey{}, err
	}
	return sandboxer.Secret(tokenPrefix + key.ID + "_" + secret), key, nil
}

// writeKey stores key together with the event that says what happened to it.
func (m *Manager) writeKey(ctx context.Context, key sandboxer.APIKey, what string) error {
	err := m.store.Write(ctx, sandboxer.Writes{APIKey: &key, Events: []sandboxer.Event{{
		At: now(), Tenant: key.Tenant, Type: sandboxer.EventKey, Actor: actor(ctx),
		Message: "API key " + key.ID + " (" + key.Name + ") was " + what,
	}}})
	if err == nil {
		m.notify("")
	}
	return err
}

// Keys lists every API key, also ended ones. It needs the admin scope.
func (m *Manager) Keys(ctx context.Context) ([]sandboxer.APIKey, error) {
	if _, err := may(ctx, sandboxer.ScopeAdmin); err != nil {
		return nil, err
	}
	keys, err := m.store.APIKeys(ctx, "")
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range keys {
		keys[i].Hash = nil
		if at := m.keyUse[keys[i].ID]; at.After(keys[i].LastUsedAt) {
			keys[i].LastUsedAt = at
		}
	}
	return keys, nil
}

// RevokeKey ends an API key at once, with every stream opened under it. It needs the
// admin scope. Revoking twice is success.
func (m *Manager) RevokeKey(ctx context.Context, id string) error {
	if _, err := may(ctx, sandboxer.ScopeAdmin); err != nil {
		return err
	}
	m.keyMu.Lock()
	defer m.keyMu.Unlock()
	key, err := m.store.APIKey(ctx, id)
	switch {
	case isKind(err, sandboxer.NotFound):
		return sandboxer.E(sandboxer.NotFound, nil, "there is no API key %q", id)
	case err != nil:
		return err
	}
	if key.RevokedAt.IsZero() {
		key.RevokedAt = now()
		if err := m.writeKey(ctx, key, "revoked"); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for b := range m.bound[id] {
		b.cancel(errKeyEnded)
	}
	return nil
}

// errNotLoggedIn says the same whatever is wrong with a token.
var errNotLoggedIn = sandboxer.E(sandboxer.Unauthenticated, nil, "the API key is not valid").
	WithHint("it may be mistyped, revoked or expired; ask an administrator for a new one")

var errKeyEnded = sandboxer.E(sandboxer.Unauthenticated, nil, "the API key was revoked or has expired")

// Authenticate returns the principal that token stands for. Unauthenticated: it
// stands for none, any more or ever; the answer does not say which. Nothing is
// cached, so that a revocation counts from the next call.
func (m *Manager) Authenticate(ctx context.Context, token sandboxer.Secret) (sandboxer.Principal, error) {
	rest, ok := strings.CutPrefix(token.Reveal(), tokenPrefix)
	id, secret, ok2 := strings.Cut(rest, "_")
	if !ok || !ok2 || sandboxer.CheckID(id) != nil || len(secret) > 128 {
		return sandboxer.Principal{}, errNotLoggedIn
	}
	key, err := m.store.APIKey(ctx, id)
	if err != nil && !isKind(err, sandboxer.NotFound) {
		return sandboxer.Principal{}, err
	}
	hash := sha256.Sum256([]byte(secret))
	same := subtle.ConstantTimeCompare(hash[:], key.Hash) == 1
	if err != nil || !same || !valid(key) {
		return sandboxer.Principal{}, errNotLoggedIn
	}
	m.mu.Lock()
	m.keyUse[id] = now()
	m.mu.Unlock()
	return sandboxer.Principal{Tenant: key.Tenant, Actor: "key:" + id, KeyID: id, Scopes: key.Scopes}, nil
}

func valid(k sandboxer.APIKey) bool {
	return k.RevokedAt.IsZero() && (k.ExpiresAt.IsZero() || time.Now().Before(k.ExpiresAt))
}

// A binding is one stream that must not outlive its key.
type binding struct{ cancel context.CancelCauseFunc }

// Bind returns a ctx that also ends, with a cause that is Unauthenticated, when p's
// API key is revoked or expires: for streams, which outlive the check that opened
// them. The returned function releases it.
func (m *Manager) Bind(ctx context.Context, p sandboxer.Principal) (context.Context, context.CancelFunc) {
	if p.KeyID == "" {
		return context.WithCancel(ctx)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	b := &binding{cancel}
	m.mu.Lock()
	if m.bound[p.KeyID] == nil {
		m.bound[p.KeyID] = map[*binding]struct{}{}
	}
	m.bound[p.KeyID][b] = struct{}{}
	m.mu.Unlock()
	release := func() {
		cancel(nil)
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.bound[p.KeyID], b)
		if len(m.bound[p.KeyID]) == 0 {
			delete(m.bound, p.KeyID)
		}
	}
	// Only now: a key that ended after it was checked and before it was bound.
	key, err := m.store.APIKey(ctx, p.KeyID)
	switch {
	case err != nil && ctx.Err() == nil, err == nil && !valid(key):
		cancel(errKeyEnded)
	case err == nil && !key.ExpiresAt.IsZero():
		timed, stop := context.WithDeadlineCause(ctx, key.ExpiresAt, errKeyEnded)
		return timed, func() { stop(); release() }
	}
	return ctx, release
}

// saveKeyUse stores when API keys were last used, where what is stored is older than
// lag.
func (m *Manager) saveKeyUse(ctx context.Context, lag time.Duration) error {
	m.mu.Lock()
	used := m.keyUse
	m.keyUse = map[string]time.Time{}
	m.mu.Unlock()
	for id, at := range used {
		if err := m.saveOneKeyUse(ctx, id, at, lag); err != nil {
			return err
		}
	}
	return nil
}

func (m *Manager) saveOneKeyUse(ctx context.Context, id string, at time.Time, lag time.Duration) error {
	m.keyMu.Lock()
	defer m.keyMu.Unlock()
	key, err := m.store.APIKey(ctx, id)
	switch {
	case isKind(err, sandboxer.NotFound):
		return nil
	case err != nil:
		return err
	case at.Sub(key.LastUsedAt) <= lag:
		m.mu.Lock()
		defer m.mu.Unlock()
		if at.After(m.keyUse[id]) {
			m.keyUse[id] = at // keep it for later
		}
		return nil
	}
	key.LastUsedAt = at
	return m.store.PutAPIKey(ctx, key)
}
