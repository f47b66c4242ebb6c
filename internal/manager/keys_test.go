package manager

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
)

func TestKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, ticking)
		for _, bad := range []NewKey{{}, {Name: "x"}, {Name: "x", Scopes: []sandboxer.Scope{"root"}}, {Name: "x", Scopes: sandboxer.Scopes(), TTL: -1}} {
			_, _, err := r.CreateKey(admin, bad)
			wantErr(t, err, sandboxer.Invalid, "")
		}
		token, key, err := r.CreateKey(admin, NewKey{Name: "ci", Tenant: sandboxer.DefaultTenant, Scopes: []sandboxer.Scope{sandboxer.ScopeRead}, TTL: time.Hour})
		if err != nil || !strings.HasPrefix(token.Reveal(), "sbx_key_"+key.ID+"_") || len(token.Reveal()) < 60 {
			t.Fatalf("%d characters, %v", len(token.Reveal()), err)
		}
		p, err := r.Authenticate(t.Context(), token)
		if err != nil || p.Tenant != sandboxer.DefaultTenant || p.Actor != "key:"+key.ID || p.Can(sandboxer.ScopeWrite) || !p.Can(sandboxer.ScopeRead) {
			t.Errorf("%+v, %v", p, err)
		}
		other, _, err := r.CreateKey(admin, NewKey{Name: "other", Scopes: sandboxer.Scopes()})
		if err != nil {
			t.Fatal(err)
		}
		_, secret, _ := strings.Cut(strings.TrimPrefix(other.Reveal(), access.TokenPrefix), "_")
		var bad []string
		for _, s := range []string{"", "sbx_key_", "sbx_key_x", "sbx_key__", "Bearer x", token.Reveal() + "x", token.Reveal()[1:], strings.ToUpper(token.Reveal()),
			"sbx_key_" + key.ID + "_", "sbx_key_" + key.ID + "_" + secret, "sbx_key_nobody_" + secret, "sbx_key_" + key.ID + "_" + strings.Repeat("x", 1<<20)} {
			_, err := r.Authenticate(t.Context(), sandboxer.Secret(s))
			bad = append(bad, fmt.Sprint(sandboxer.KindOf(err), err))
		}
		if bad = slices.Compact(bad); len(bad) != 1 || bad[0] != fmt.Sprint(sandboxer.Unauthenticated, access.ErrNotLoggedIn) {
			t.Errorf("bad tokens are told apart: %q", bad)
		}

		time.Sleep(10 * time.Second)
		synctest.Wait()
		keys, err := r.Keys(admin)
		if err != nil || len(keys) != 2 || slices.ContainsFunc(keys, func(k sandboxer.APIKey) bool { return k.Hash != nil }) {
			t.Errorf("%+v, %v", keys, err)
		}
		if stored, err := r.store.APIKey(t.Context(), key.ID); err != nil || stored.LastUsedAt.IsZero() {
			t.Errorf("last use was not stored: %+v, %v", stored, err)
		}

		// Storing it lags, so that a busy key does not write all the time.
		before, _ := r.store.APIKey(t.Context(), key.ID)
		for range 4 {
			if _, err := r.Authenticate(t.Context(), token); err != nil {
				t.Error(err)
			}
			time.Sleep(10 * time.Second)
		}
		synctest.Wait()
		if stored, _ := r.store.APIKey(t.Context(), key.ID); !stored.LastUsedAt.Equal(before.LastUsedAt) {
			t.Error("last use is stored every time")
		}

		// A stream ends with its key, at once.
		ctx, cancel := r.Bind(t.Context(), p)
		defer cancel()
		if _, err := r.Authenticate(t.Context(), token); err != nil { // a use that is not stored yet must not bring it back
			t.Error(err)
		}
		if err := r.RevokeKey(admin, key.ID); err != nil {
			t.Fatal(err)
		}
		if sandboxer.KindOf(context.Cause(ctx)) != sandboxer.Unauthenticated {
			t.Errorf("the stream's cause is %v", context.Cause(ctx))
		}
		late, cancel2 := r.Bind(t.Context(), p)
		defer cancel2()
		if sandboxer.KindOf(context.Cause(late)) != sandboxer.Unauthenticated {
			t.Error("a stream was bound to a key that had been revoked")
		}
		time.Sleep(2 * time.Minute)
		if _, err := r.Authenticate(t.Context(), token); sandboxer.KindOf(err) != sandboxer.Unauthenticated {
			t.Errorf("a revoked key works: %v", err)
		}
		if err := r.RevokeKey(admin, key.ID); err != nil {
			t.Errorf("revoked twice: %v", err)
		}
		wantErr(t, r.RevokeKey(admin, "nokey"), sandboxer.NotFound, `there is no API key "nokey"`)

		// Expiry is a revocation too.
		short, _, err := r.CreateKey(admin, NewKey{Name: "short", Scopes: sandboxer.Scopes(), TTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		p, err = r.Authenticate(t.Context(), short)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel3 := r.Bind(t.Context(), p)
		defer cancel3()
		time.Sleep(61 * time.Second)
		if sandboxer.KindOf(context.Cause(ctx)) != sandboxer.Unauthenticated {
			t.Errorf("the stream's cause is %v", context.Cause(ctx))
		}
		if _, err := r.Authenticate(t.Context(), short); sandboxer.KindOf(err) != sandboxer.Unauthenticated {
			t.Errorf("an expired key works: %v", err)
		}
		free, cancel4 := r.Bind(t.Context(), sandboxer.Principal{})
		if free.Err() != nil {
			t.Error("a principal without a key is bound to none")
		}
		for _, cancel := range []context.CancelFunc{cancel, cancel2, cancel3, cancel4} {
			cancel()
		}
		if r.APIKeys.BoundStreams() > 0 {
			t.Errorf("%d streams left", r.APIKeys.BoundStreams())
		}
	})
}
