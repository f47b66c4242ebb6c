package storetest

import (
	"fmt"
	"reflect"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func idempotencyKey(s *suite) {
	k := filled[sandboxer.IdempotencyKey](s.T)
	s.ok(s.Write(s.ctx, sandboxer.Writes{Key: &k}))
	truncateTimes(reflect.ValueOf(&k))
	got, err := s.IdempotencyKey(s.ctx, k.Tenant, k.Key)
	s.ok(err)
	s.same("key", got, k)
	_, err = s.IdempotencyKey(s.ctx, k.Tenant, "unknown")
	s.fails(err, sandboxer.NotFound)
	s.fails(s.Write(s.ctx, sandboxer.Writes{Key: &k, Events: []sandboxer.Event{{Message: "x"}}}), sandboxer.Conflict)
	if n := len(s.events(sandboxer.EventQuery{})); n != 0 {
		s.Errorf("%d events; want 0", n)
	}
	errs := parallel(16, func(i int) error {
		return s.Write(s.ctx, sandboxer.Writes{Key: &sandboxer.IdempotencyKey{Tenant: "t", Key: "raced", Digest: fmt.Sprint(i)}})
	})
	if ok, conflict := count(errs, ""), count(errs, sandboxer.Conflict); ok != 1 || conflict != 15 {
		s.Errorf("%d writers got the key and %d met a conflict; want 1 and 15", ok, conflict)
	}
}

func idempotencyTenant(s *suite) {
	for _, tenant := range []string{"t1", "t2"} {
		s.ok(s.Write(s.ctx, sandboxer.Writes{Key: &sandboxer.IdempotencyKey{Tenant: tenant, Key: "k", Digest: tenant}}))
	}
	got, err := s.IdempotencyKey(s.ctx, "t2", "k")
	s.ok(err)
	if got.Digest != "t2" {
		s.Errorf("t2 got the key of %s", got.Digest)
	}
	_, err = s.IdempotencyKey(s.ctx, "t3", "k")
	s.fails(err, sandboxer.NotFound)
}

func idempotencyFree(s *suite) {
	k := sandboxer.IdempotencyKey{Tenant: "t", Key: "k", SandboxID: "a", Generation: 1}
	s.ok(s.Write(s.ctx, sandboxer.Writes{Key: &k}))
	for _, other := range []sandboxer.IdempotencyKey{
		{Tenant: "t2", Key: "k", SandboxID: "a", Generation: 1}, {Tenant: "t", Key: "l", SandboxID: "a", Generation: 1},
		{Tenant: "t", Key: "k", SandboxID: "b", Generation: 1}, {Tenant: "t", Key: "k", SandboxID: "a", Generation: 2},
	} {
		s.ok(s.Write(s.ctx, sandboxer.Writes{FreeKey: &other}))
	}
	_, err := s.IdempotencyKey(s.ctx, "t", "k")
	s.ok(err)
	s.ok(s.Write(s.ctx, sandboxer.Writes{FreeKey: &k}))
	_, err = s.IdempotencyKey(s.ctx, "t", "k")
	s.fails(err, sandboxer.NotFound)
}

func idempotencyForget(s *suite) {
	for i, key := range []string{"old", "edge", "new"} {
		s.ok(s.Write(s.ctx, sandboxer.Writes{Key: &sandboxer.IdempotencyKey{Tenant: "t", Key: key, At: start.Add(time.Duration(i) * time.Hour)}}))
	}
	s.ok(s.ForgetIdempotencyKeys(s.ctx, start.Add(time.Hour)))
	_, err := s.IdempotencyKey(s.ctx, "t", "old")
	s.fails(err, sandboxer.NotFound)
	for _, key := range []string{"edge", "new"} {
		_, err := s.IdempotencyKey(s.ctx, "t", key)
		s.ok(err)
	}
	s.ok(s.Write(s.ctx, sandboxer.Writes{Key: &sandboxer.IdempotencyKey{Tenant: "t", Key: "old"}}))
}

func apiKeys(s *suite) {
	k := filled[sandboxer.APIKey](s.T)
	s.ok(s.PutAPIKey(s.ctx, k))
	truncateTimes(reflect.ValueOf(&k))
	got, err := s.APIKey(s.ctx, k.ID)
	s.ok(err)
	s.same("key", got, k)

	bare := sandboxer.APIKey{ID: "bare", Tenant: "t2"}
	s.ok(s.PutAPIKey(s.ctx, bare))
	got, err = s.APIKey(s.ctx, "bare")
	s.ok(err)
	s.same("bare key", got, bare)

	replaced := filled[sandboxer.APIKey](s.T)
	replaced.ID = "bare"
	s.ok(s.PutAPIKey(s.ctx, replaced))
	truncateTimes(reflect.ValueOf(&replaced))
	got, err = s.APIKey(s.ctx, "bare")
	s.ok(err)
	s.same("replaced key", got, replaced)

	s.ok(s.PutAPIKey(s.ctx, sandboxer.APIKey{ID: "other", Tenant: "t3", CreatedAt: start}))
	all, err := s.APIKeys(s.ctx, "")
	s.ok(err)
	own, err := s.APIKeys(s.ctx, "t3")
	s.ok(err)
	if len(all) != 3 || len(own) != 1 || own[0].ID != "other" {
		s.Errorf("%d keys in all, of t3 %+v; want 3 and one", len(all), own)
	}
	_, err = s.APIKey(s.ctx, "unknown")
	s.fails(err, sandboxer.NotFound)
	s.fails(s.PutAPIKey(s.ctx, sandboxer.APIKey{}), sandboxer.Invalid)
}

func apiKeyInWrites(s *suite) {
	s.ok(s.Write(s.ctx, sandboxer.Writes{
		APIKey: &sandboxer.APIKey{ID: "k", Tenant: "t"},
		Events: []sandboxer.Event{{Tenant: "t", Type: sandboxer.EventKey}},
	}))
	_, err := s.APIKey(s.ctx, "k")
	s.ok(err)
	w := everything("x")
	w.APIKey.ID = "k"
	w.APIKey.RevokedAt = start
	w.Cover = true
	w.Entries = []sandboxer.Entry{entry("h", sandboxer.EntryHold, "a", 1, -1)}
	s.fails(s.Write(s.ctx, w), sandboxer.NoCredit)
	k, err := s.APIKey(s.ctx, "k")
	s.ok(err)
	if !k.RevokedAt.IsZero() {
		s.Error("a refused transaction revoked a key")
	}
}
