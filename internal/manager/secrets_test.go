package manager

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/sqlstore"
)

// secretRig has a profile that offers the secrets token and other, and one that offers none.
func secretRig(t *testing.T, change func(*setup)) *rig {
	return newRig(t, func(s *setup) {
		s.profiles[0].Secrets = []string{"token", "other"}
		if change != nil {
			change(s)
		}
	})
}

func (r *rig) setSecret(ctx context.Context, name, value string) int64 {
	r.t.Helper()
	rec, err := r.SetSecret(ctx, name, false, sandboxer.Secret(value))
	if err != nil || rec.Sealed != nil {
		r.t.Fatalf("set %s: %+v, %v", name, rec, err)
	}
	return rec.Version
}

// inside returns the environment that the live object of a sandbox was made with.
func (r *rig) inside(id string) map[string]string {
	r.t.Helper()
	for _, o := range r.world.Live() {
		if o.Spec.ID == id {
			return o.Spec.Env
		}
	}
	r.t.Fatalf("%s has no object", id)
	return nil
}

// chief is an administrator of the tenant of acme.
var chief = as(sandboxer.DefaultTenant, sandboxer.ScopeAdmin)

var tokenAsked = map[string]string{"TOKEN": "token"}

// TestSecretOfSandbox: a sandbox gets the value, and keeps the version it was created with over pauses, restarts and
// copies, until nothing needs it.
func TestSecretOfSandbox(t *testing.T) {
	r := secretRig(t, nil)
	if _, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", Secrets: tokenAsked}); !errors.Is(err, sandboxer.NotFound) {
		t.Errorf("a create with a missing secret: %v", err)
	}
	if _, err := r.Plan(acme, sandboxer.CreateRequest{Profile: "test", Secrets: tokenAsked}); !errors.Is(err, sandboxer.NotFound) {
		t.Errorf("a plan with a missing secret: %v", err)
	}
	r.setSecret(acme, "token", "one")
	if n := r.setSecret(acme, "token", "one"); n != 1 {
		t.Errorf("the same value made version %d; want none", n)
	}
	sb := r.create(sandboxer.CreateRequest{Secrets: tokenAsked, Env: map[string]string{"A": "b"}})
	if env := r.inside(sb.ID); env["TOKEN"] != "one" || env["A"] != "b" || env["FROM"] != "profile" {
		t.Errorf("inside are %v", env)
	}
	if n := r.setSecret(acme, "token", "two"); n != 2 {
		t.Errorf("another value made version %d; want 2", n)
	}
	young := r.create(sandboxer.CreateRequest{Secrets: tokenAsked})
	if got := r.inside(young.ID)["TOKEN"]; got != "two" {
		t.Errorf("a new sandbox got %q", got)
	}
	snap, err := r.Snapshot(acme, sb.ID, SnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	copied, err := r.Restore(acme, snap.ID, RestoreRequest{})
	if err != nil || r.inside(copied.ID)["TOKEN"] != "one" || r.inside(copied.ID)["A"] != "b" {
		t.Errorf("a copy has %v, %v", r.inside(copied.ID), err)
	}
	over, err := r.Restore(acme, snap.ID, RestoreRequest{Env: map[string]string{"TOKEN": "mine"}})
	if err != nil || r.inside(over.ID)["TOKEN"] != "mine" || len(over.Secrets) != 0 {
		t.Errorf("a copy with a value of its own has %v, %v, %v", r.inside(over.ID), over.Secrets, err)
	}
	if _, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles}); err != nil {
		t.Fatal(err)
	}
	r.restart()
	if _, err := r.Resume(acme, sb.ID, ResumeRequest{}); err != nil || r.inside(sb.ID)["TOKEN"] != "one" {
		t.Errorf("after a pause %v, %v", r.inside(sb.ID), err)
	}
	kept := func() int {
		t.Helper()
		all, err := r.Secrets(acme, false)
		if err != nil || len(all) != 1 || all[0].Sealed != nil {
			t.Fatalf("the secrets are %+v, %v", all, err)
		}
		return all[0].Versions
	}
	err = r.RemoveSecret(acme, "token", false, false)
	if m := sandboxer.Message(err); !errors.Is(err, sandboxer.Conflict) || !strings.Contains(m, "sandbox "+sb.ID) || !strings.Contains(m, "snapshot "+snap.ID) {
		t.Errorf("a removal is refused with %v", err)
	}
	r.destroy(sb.ID)
	r.destroy(copied.ID)
	if _, err := r.DropSnapshot(acme, snap.ID); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the former version is forgotten", func() bool {
		r.mu.Lock()
		r.lastCleanup = time.Time{}
		r.mu.Unlock()
		r.housekeep()
		return kept() == 1
	})
	r.destroy(young.ID)
	if err := r.RemoveSecret(acme, "token", false, false); err != nil {
		t.Error(err)
	}
}

// TestSecretAfterCrash: a create that is finished by the next process has the version that its record names.
func TestSecretAfterCrash(t *testing.T) {
	r := secretRig(t, nil)
	r.setSecret(acme, "token", "one")
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Hang: true, Times: 1})
	sb := r.create(sandboxer.CreateRequest{Secrets: tokenAsked, NoWaiting: true, Key: "k"})
	r.setSecret(acme, "token", "two")
	r.close()
	r.world.Forgive()
	r.open()
	again, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", Secrets: tokenAsked, Key: "k"})
	if err != nil || again.ID != sb.ID || r.inside(sb.ID)["TOKEN"] != "one" {
		t.Errorf("it is %+v with %v, %v", again, r.inside(sb.ID), err)
	}
}

// TestSecretRefusals: who may name what.
func TestSecretRefusals(t *testing.T) {
	r := secretRig(t, nil)
	reader := as(sandboxer.DefaultTenant, sandboxer.ScopeRead)
	r.setSecret(acme, "token", "acmes")
	if _, err := r.SetSecret(admin, "other", true, "the operator's"); err != nil {
		t.Fatal(err)
	}
	many := map[string]string{}
	for range sandboxer.MaxSandboxSecrets + 1 {
		many[strings.Repeat("V", len(many)+1)] = "token"
	}
	for what, tt := range map[string]struct {
		ctx  context.Context
		req  sandboxer.CreateRequest
		kind sandboxer.Kind
	}{
		"of another tenant":          {rival, sandboxer.CreateRequest{Secrets: tokenAsked}, sandboxer.NotFound},
		"of an administrator":        {admin, sandboxer.CreateRequest{Secrets: tokenAsked}, sandboxer.NotFound},
		"the operator's":             {acme, sandboxer.CreateRequest{Secrets: map[string]string{"A": "other"}}, sandboxer.NotFound},
		"not in the profile":         {acme, sandboxer.CreateRequest{Secrets: map[string]string{"A": "third"}}, sandboxer.Denied},
		"of a profile without":       {acme, sandboxer.CreateRequest{Profile: "lazy", Secrets: tokenAsked}, sandboxer.Denied},
		"a path":                     {acme, sandboxer.CreateRequest{Secrets: map[string]string{"A": "../rival/token"}}, sandboxer.Invalid},
		"a variable with a value":    {acme, sandboxer.CreateRequest{Secrets: tokenAsked, Env: map[string]string{"TOKEN": "x"}}, sandboxer.Invalid},
		"a variable without name":    {acme, sandboxer.CreateRequest{Secrets: map[string]string{"": "token"}}, sandboxer.Invalid},
		"more than one sandbox has":  {acme, sandboxer.CreateRequest{Secrets: many}, sandboxer.Invalid},
		"another under a chosen key": {acme, sandboxer.CreateRequest{Secrets: tokenAsked}, ""},
	} {
		if tt.req.Profile == "" {
			tt.req.Profile = "test"
		}
		if _, err := r.Create(tt.ctx, tt.req); sandboxer.KindOf(err) != tt.kind {
			t.Errorf("%s: %v; want %s", what, err, tt.kind)
		}
	}
	for what, tt := range map[string]struct {
		err  error
		kind sandboxer.Kind
	}{
		"set by a reader":        {second(r.SetSecret(reader, "token", false, "x")), sandboxer.Denied},
		"set the operator's":     {second(r.SetSecret(acme, "token", true, "x")), sandboxer.Denied},
		"list the operator's":    {second(r.Secrets(acme, true)), sandboxer.Denied},
		"remove the operator's":  {r.RemoveSecret(acme, "other", true, false), sandboxer.Denied},
		"remove by a reader":     {r.RemoveSecret(reader, "token", false, false), sandboxer.Denied},
		"remove by force":        {r.RemoveSecret(acme, "token", false, true), sandboxer.Denied},
		"remove another's":       {r.RemoveSecret(rival, "token", false, false), sandboxer.NotFound},
		"set without principal":  {second(r.SetSecret(t.Context(), "token", false, "x")), sandboxer.Unauthenticated},
		"an empty value":         {second(r.SetSecret(acme, "token", false, "")), sandboxer.Invalid},
		"a value with a NUL":     {second(r.SetSecret(acme, "token", false, "a\x00b")), sandboxer.Invalid},
		"a value that is binary": {second(r.SetSecret(acme, "token", false, "\xff")), sandboxer.Invalid},
		"a value too long":       {second(r.SetSecret(acme, "token", false, sandboxer.Secret(strings.Repeat("x", sandboxer.MaxSecretBytes+1)))), sandboxer.Invalid},
		"a name too long":        {second(r.SetSecret(acme, strings.Repeat("n", sandboxer.MaxSecretName+1), false, "x")), sandboxer.Invalid},
	} {
		if sandboxer.KindOf(tt.err) != tt.kind {
			t.Errorf("%s: %v; want %s", what, tt.err, tt.kind)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// TestSecretRemovedByForce: what needs it fails in words, and never reads the next secret of that name.
func TestSecretRemovedByForce(t *testing.T) {
	r := secretRig(t, nil)
	r.setSecret(acme, "token", "one")
	sb := r.create(sandboxer.CreateRequest{Secrets: tokenAsked})
	saved, err := r.Snapshot(acme, sb.ID, sandboxer.SnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles}); err != nil {
		t.Fatal(err)
	}
	if err := r.RemoveSecret(chief, "token", false, true); err != nil {
		t.Fatal(err)
	}
	if n := r.setSecret(acme, "token", "another"); n != 2 {
		t.Errorf("a new secret of that name begins with version %d; want 2", n)
	}
	if _, err := r.Resume(acme, sb.ID, ResumeRequest{}); !errors.Is(err, sandboxer.Failed) || !strings.Contains(err.Error(), "secret token (version 1)") {
		t.Errorf("its sandbox resumes with %v", err)
	}
	if _, err := r.Restore(acme, saved.ID, sandboxer.RestoreRequest{}); !errors.Is(err, sandboxer.NotFound) || !strings.Contains(sandboxer.HintOf(err), "it was removed") {
		t.Errorf("its snapshot is restored with %v (%s)", err, sandboxer.HintOf(err))
	}
}

// TestSecretsOfExtensions: the operator's secrets are read by name, and one that an extension's file names is not removed.
func TestSecretsOfExtensions(t *testing.T) {
	r := secretRig(t, nil)
	if _, err := r.SetSecret(admin, "token", true, "the operator's"); err != nil {
		t.Fatal(err)
	}
	read, err := Secrets(r.store, testKey)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := read(t.Context(), sandboxer.SecretRef{Name: "token"}); err != nil || s.Reveal() != "the operator's" {
		t.Errorf("the secret is read as %q, %v", s.Reveal(), err)
	}
	if _, err := read(t.Context(), sandboxer.SecretRef{Tenant: sandboxer.DefaultTenant, Name: "token"}); !errors.Is(err, sandboxer.NotFound) {
		t.Errorf("a tenant's of that name: %v", err)
	}
	other, err := Secrets(r.store, bytes.Repeat([]byte{8}, 32))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other(t.Context(), sandboxer.SecretRef{Name: "token"}); !errors.Is(err, sandboxer.Failed) {
		t.Errorf("with another key: %v", err)
	}
	rec, err := r.store.Secret(t.Context(), sandboxer.SecretRef{Name: "token"})
	if err != nil {
		t.Fatal(err)
	}
	for what, moved := range map[string]sandboxer.SecretRef{
		"tenant": {Tenant: "acme", Name: "token", Version: 1}, "name": {Name: "tokem", Version: 1}, "version": {Name: "token", Version: 2},
	} {
		rec.SecretRef = moved
		if err := r.store.Write(t.Context(), sandboxer.Writes{Secret: &rec}); err != nil {
			t.Fatal(err)
		}
		if _, err := read(t.Context(), moved); !errors.Is(err, sandboxer.Failed) {
			t.Errorf("under another %s it opens: %v", what, err)
		}
	}
	r.extension("ext.fake").Secrets = []string{"token"}
	if err := r.RemoveSecret(admin, "token", true, false); !errors.Is(err, sandboxer.Conflict) || !strings.Contains(err.Error(), "ext.fake") {
		t.Errorf("it is removed with %v", err)
	}
	if err := r.RemoveSecret(admin, "token", true, true); err != nil {
		t.Error(err)
	}
}

// A syncLog keeps what is logged.
type syncLog struct {
	mu sync.Mutex
	bytes.Buffer
}

func (l *syncLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Buffer.Write(p)
}

// TestSecretCanary looks for a secret's bytes in all that is kept, said or logged: also while it is used, after a failed
// create, and in a copy of the database.
func TestSecretCanary(t *testing.T) {
	const canary = "canary-of-a-secret"
	var log syncLog
	r := secretRig(t, func(s *setup) {
		s.opts.Log = slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		s.wrap = func(x *fake.Extension) sandboxer.Extension { // it is the key to an account, too
			return &byKey{x, sandboxer.Credential{Secret: "token", By: sandboxer.ByTenant}}
		}
	})
	r.setSecret(acme, "token", canary)
	if _, err := r.SetSecret(admin, "other", true, canary); err != nil {
		t.Fatal(err)
	}
	sb := r.create(sandboxer.CreateRequest{Secrets: tokenAsked})
	if r.inside(sb.ID)["TOKEN"] != canary {
		t.Fatal("the secret is not inside")
	}
	var said []any
	say := func(v any, err error) { said = append(said, v, sandboxer.Message(err), sandboxer.HintOf(err)) }
	snap, err := r.Snapshot(admin, sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotNative})
	say(snap, err)
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Failed, Times: 1})
	_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "test", Secrets: tokenAsked})
	if err == nil {
		t.Error("the create did not fail")
	}
	say(nil, err)
	_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "lazy", Secrets: tokenAsked})
	say(nil, err)
	_, err = r.SetSecret(acme, "token", false, canary+"\x00")
	say(nil, err)
	say(nil, r.RemoveSecret(acme, "token", false, false))
	say(r.Get(admin, sb.ID))
	say(r.Secrets(acme, false))
	say(r.Secrets(admin, true))
	say(r.Plan(acme, sandboxer.CreateRequest{Profile: "test", Secrets: tokenAsked}))
	say(r.Events(admin, sandboxer.EventQuery{}))
	say(r.Audit(admin))
	text, err := json.Marshal(said)
	if err != nil || bytes.Contains(text, []byte(canary)) {
		t.Errorf("it is said (%v): %s", err, text)
	}
	backup := filepath.Join(t.TempDir(), "backup.db")
	if _, err := sqlstore.BackUp(t.Context(), r.setup.dir, backup, 0); err != nil {
		t.Fatal(err)
	}
	look := func(dir string) {
		t.Helper()
		seen := 0
		err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			f, err := os.Open(name)
			if err != nil {
				return err
			}
			defer f.Close()
			b, err := io.ReadAll(f)
			if seen++; bytes.Contains(b, []byte(canary)) {
				t.Errorf("%s has the secret", name)
			}
			return err
		})
		if err != nil || seen == 0 {
			t.Errorf("%d files in %s, %v", seen, dir, err)
		}
	}
	look(r.setup.dir) // with the log of the database
	look(filepath.Dir(backup))
	r.close()
	look(r.setup.dir)
	r.open()
	log.mu.Lock()
	defer log.mu.Unlock()
	if log.Len() == 0 || bytes.Contains(log.Bytes(), []byte(canary)) {
		t.Errorf("the log has it, or nothing: %s", log.Bytes())
	}
}
