package access

import (
	"context"
	"crypto/sha256"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// keyStore is a store that has nothing but API keys.
type keyStore struct {
	sandboxer.Store
	mu     sync.Mutex
	keys   map[string]sandboxer.APIKey
	puts   int
	fail   error  // of every call
	onRead func() // called by APIKey after it has read
}

func (s *keyStore) APIKey(_ context.Context, id string) (sandboxer.APIKey, error) {
	s.mu.Lock()
	key, ok := s.keys[id]
	fail, onRead := s.fail, s.onRead
	s.mu.Unlock()
	if onRead != nil {
		onRead()
	}
	if !ok && fail == nil {
		fail = sandboxer.E(sandboxer.NotFound, nil, "no key")
	}
	return key, fail
}

func (s *keyStore) APIKeys(context.Context, string) ([]sandboxer.APIKey, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.keys), func(a, b sandboxer.APIKey) int { return a.CreatedAt.Compare(b.CreatedAt) }), s.fail
}

func (s *keyStore) PutAPIKey(_ context.Context, key sandboxer.APIKey) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail == nil {
		s.keys[key.ID] = key
		s.puts++
	}
	return s.fail
}

func (s *keyStore) Write(ctx context.Context, w sandboxer.Writes) error {
	return s.PutAPIKey(ctx, *w.APIKey)
}

// testKeys has the keys called ids, whose secret is "secret".
func testKeys(ids ...string) (*APIKeys, *keyStore) {
	hash := sha256.Sum256([]byte("secret"))
	s := &keyStore{keys: map[string]sandboxer.APIKey{}}
	for _, id := range ids {
		s.keys[id] = sandboxer.APIKey{ID: id, Tenant: sandboxer.DefaultTenant, Hash: hash[:], Scopes: sandboxer.Scopes(), CreatedAt: now()}
	}
	return NewAPIKeys(s, func() {}), s
}

func tokenOf(id string) sandboxer.Secret { return sandboxer.Secret(TokenPrefix + id + "_secret") }

// A stream ends with its key, and only with that; also if the key ends while it begins.
func TestStreamsEndWithTheirKey(t *testing.T) {
	a, store := testKeys("one", "two")
	ctx := context.Background()
	one, end1 := a.bind(ctx, sandboxer.Principal{KeyID: "one"})
	two, end2 := a.bind(ctx, sandboxer.Principal{KeyID: "two"})
	free, end3 := a.bind(ctx, sandboxer.Principal{})
	if changed, err := a.revoke(ctx, "one"); err != nil || !changed {
		t.Fatalf("revoke: %t, %v", changed, err)
	}
	if changed, err := a.revoke(ctx, "one"); err != nil || changed {
		t.Errorf("revoked again: %t, %v", changed, err)
	}
	if sandboxer.KindOf(context.Cause(one)) != sandboxer.Unauthenticated || two.Err() != nil || free.Err() != nil {
		t.Errorf("ended: %v, %v, %v", context.Cause(one), two.Err(), free.Err())
	}
	_, err := a.revoke(ctx, "three")
	if sandboxer.KindOf(err) != sandboxer.NotFound || !strings.Contains(sandboxer.Message(err), `there is no API key "three"`) {
		t.Errorf("revoked a key that does not exist: %v", err)
	}

	// Revoked between the look at the key and the end of bind.
	store.onRead = func() {
		store.onRead = nil
		if _, err := a.revoke(ctx, "two"); err != nil {
			t.Error(err)
		}
	}
	late, end4 := a.bind(ctx, sandboxer.Principal{KeyID: "two"})
	if sandboxer.KindOf(context.Cause(late)) != sandboxer.Unauthenticated {
		t.Errorf("a stream that began while its key ended: %v", context.Cause(late))
	}
	for _, end := range []func(){end1, end2, end3, end4} {
		end()
	}
	if len(a.streams) != 0 {
		t.Errorf("left: %v", a.streams)
	}
}

func TestStreamsEndWhenTheirKeyExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, store := testKeys("one")
		key := store.keys["one"]
		key.ExpiresAt = now().Add(time.Minute)
		store.keys["one"] = key
		ctx, end := a.bind(context.Background(), sandboxer.Principal{KeyID: "one"})
		defer end()
		time.Sleep(time.Minute - time.Second)
		if _, err := a.authenticate(ctx, tokenOf("one")); err != nil || ctx.Err() != nil {
			t.Errorf("before it expires: %v, %v", err, ctx.Err())
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if _, err := a.authenticate(context.Background(), tokenOf("one")); err != ErrNotLoggedIn || context.Cause(ctx) != error(errKeyEnded) {
			t.Errorf("after it expired: %v, %v", err, context.Cause(ctx))
		}
	})
}

// The time of last use is shown at once, stored when the stored one lags, and lost by no failure.
func TestLastUseOfKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, store := testKeys("one", "two")
		ctx := context.Background()
		use := func(id string) {
			t.Helper()
			if p, err := a.authenticate(ctx, tokenOf(id)); err != nil || p.KeyID != id || p.Actor != "key:"+id || p.Tenant != sandboxer.DefaultTenant {
				t.Fatalf("%+v, %v", p, err)
			}
		}
		use("one")
		use("two")
		at := now()
		store.fail = errors.New("away")
		if err := a.SaveLastUse(ctx, 0); err == nil || len(a.lastUse) != 2 {
			t.Errorf("%v; kept for later: %v", err, a.lastUse)
		}
		store.fail = nil
		keys, err := a.list(ctx)
		if err != nil || len(keys) != 2 || !keys[0].LastUsedAt.Equal(at) || keys[0].Hash != nil || store.puts != 0 {
			t.Errorf("%+v, %v; %d writes", keys, err, store.puts)
		}
		if err := a.SaveLastUse(ctx, time.Minute); err != nil || store.puts != 2 || len(a.lastUse) != 0 {
			t.Errorf("%v; %d writes, kept: %v", err, store.puts, a.lastUse)
		}
		time.Sleep(time.Minute)
		use("one") // not more than a minute behind
		if err := a.SaveLastUse(ctx, time.Minute); err != nil || store.puts != 2 || len(a.lastUse) != 1 {
			t.Errorf("%v; %d writes, kept: %v", err, store.puts, a.lastUse)
		}
		if err := a.SaveLastUse(ctx, 0); err != nil || !store.keys["one"].LastUsedAt.Equal(now()) || len(a.lastUse) != 0 {
			t.Errorf("%v; stored %v, kept: %v", err, store.keys["one"], a.lastUse)
		}
		use("two")
		delete(store.keys, "two")
		if err := a.SaveLastUse(ctx, 0); err != nil || len(a.lastUse) != 0 {
			t.Errorf("%v; kept of a key that is gone: %v", err, a.lastUse)
		}
	})
}

// A revocation and a store of the last use do not undo each other.
func TestKeysAreConcurrent(t *testing.T) {
	a, store := testKeys("one")
	ctx := context.Background()
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 100 {
				bound, end := a.bind(ctx, sandboxer.Principal{KeyID: "one"})
				_, _ = a.authenticate(bound, tokenOf("one"))
				if err := a.SaveLastUse(ctx, 0); err != nil {
					t.Error(err)
				}
				_, _ = a.list(ctx)
				end()
			}
		})
	}
	all.Go(func() {
		if _, err := a.revoke(ctx, "one"); err != nil {
			t.Error(err)
		}
	})
	all.Wait()
	if store.keys["one"].RevokedAt.IsZero() || len(a.streams) != 0 {
		t.Errorf("%+v; left: %v", store.keys["one"], a.streams)
	}
}
