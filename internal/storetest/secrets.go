package storetest

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// secret returns version n of a secret of acme.
func secret(name string, n int64) *sandboxer.SecretRecord {
	return &sandboxer.SecretRecord{SecretRef: sandboxer.SecretRef{Tenant: "acme", Name: name, Version: n},
		Sealed: fmt.Appendf(nil, "sealed \x00 %s %d", name, n), CreatedAt: start}
}

func (s *suite) putSecret(r *sandboxer.SecretRecord) error {
	return s.Write(s.ctx, sandboxer.Writes{Secret: r})
}

// putSecrets makes what the first of records names, after that has become the operator's in all of them.
func (s *suite) putSecrets(records ...*sandboxer.Sandbox) {
	s.Helper()
	for i, sb := range records {
		sb.Spec.Credential.Tenant = ""
		all := []sandboxer.SecretRef{sb.Spec.Credential}
		for variable, ref := range sb.Secrets {
			ref.Tenant = ""
			sb.Secrets[variable] = ref
			all = append(all, ref)
		}
		for _, ref := range all {
			if i == 0 {
				s.ok(s.putSecret(&sandboxer.SecretRecord{SecretRef: ref, Sealed: []byte{1}}))
			}
		}
	}
}

func using(name string, version int64) func(*sandboxer.Sandbox) {
	return func(sb *sandboxer.Sandbox) {
		sb.Secrets = map[string]sandboxer.SecretRef{"TOKEN": {Tenant: "acme", Name: name, Version: version}}
	}
}

// versions returns the versions of a secret of acme that exist.
func (s *suite) versions(name string) (all []int64) {
	s.Helper()
	for n := range int64(40) {
		r, err := s.Secret(s.ctx, sandboxer.SecretRef{Tenant: "acme", Name: name, Version: n + 1})
		if err == nil {
			s.same("secret", r, *secret(name, n+1))
			all = append(all, n+1)
			continue
		}
		s.fails(err, sandboxer.NotFound)
	}
	return all
}

func (s *suite) wantVersions(name string, want ...int64) {
	s.Helper()
	if got := s.versions(name); !slices.Equal(got, want) {
		s.Errorf("versions %v of %s; want %v", got, name, want)
	}
}

func secretVersions(s *suite) {
	_, err := s.Secret(s.ctx, sandboxer.SecretRef{Tenant: "acme", Name: "a"})
	s.fails(err, sandboxer.NotFound)
	s.ok(s.putSecret(secret("a", 1)))
	s.ok(s.putSecret(secret("b", 1)))
	s.fails(s.putSecret(secret("a", 1)), sandboxer.Conflict)
	s.ok(s.putSecret(secret("a", 2)))
	s.fails(s.putSecret(secret("a", 1)), sandboxer.Conflict)
	s.wantVersions("a", 2)
	got, err := s.Secret(s.ctx, sandboxer.SecretRef{Tenant: "acme", Name: "a"})
	s.ok(err)
	s.same("newest", got, *secret("a", 2))
	all, err := s.Secrets(s.ctx, "acme")
	s.ok(err)
	a, b := *secret("a", 2), *secret("b", 1)
	a.Sealed, b.Sealed, a.Versions, b.Versions = nil, nil, 1, 1
	s.same("list", all, []sandboxer.SecretRecord{a, b})
	if n, err := s.NextSecretVersion(s.ctx, "acme", "a"); err != nil || n != 3 {
		s.Errorf("the next version is %d, %v; want 3", n, err)
	}
	errs := parallel(8, func(int) error { return s.putSecret(secret("a", 3)) })
	if ok, conflict := count(errs, ""), count(errs, sandboxer.Conflict); ok != 1 || conflict != 7 {
		s.Errorf("%d writers made version 3 and %d met a conflict; want 1 and 7", ok, conflict)
	}
}

func secretTenants(s *suite) {
	s.ok(s.putSecret(secret("a", 1)))
	other, operators := secret("a", 1), secret("a", 1)
	other.Tenant, operators.Tenant = "other", ""
	s.ok(s.putSecret(other))
	s.ok(s.putSecret(operators))
	for tenant, want := range map[string]int{"acme": 1, "other": 1, "": 1, "third": 0} {
		all, err := s.Secrets(s.ctx, tenant)
		s.ok(err)
		if len(all) != want {
			s.Errorf("tenant %q has %d secrets; want %d", tenant, len(all), want)
		}
	}
	_, err := s.Secret(s.ctx, sandboxer.SecretRef{Tenant: "third", Name: "a"})
	s.fails(err, sandboxer.NotFound)
	foreign := sandbox("x", 1)
	foreign.Secrets = map[string]sandboxer.SecretRef{"TOKEN": {Tenant: "other", Name: "a"}}
	s.fails(s.CreateSandbox(s.ctx, foreign, sandboxer.Writes{}), sandboxer.Invalid)
	s.ok(s.Write(s.ctx, sandboxer.Writes{NoSecret: &sandboxer.SecretRemoval{Tenant: "other", Name: "a"}}))
	s.wantVersions("a", 1)
}

func secretKept(s *suite) {
	s.ok(s.putSecret(secret("a", 1)))
	first := s.create("first", 1, using("a", 0))
	s.ok(s.putSecret(secret("a", 2)))
	s.put(snapshot("saved", func(r *sandboxer.SnapshotRecord) {
		r.Tenant, r.State = "acme", sandboxer.SnapshotSealed
		r.Secrets = map[string]sandboxer.SecretRef{"TOKEN": {Tenant: "acme", Name: "a", Version: 2}}
	}))
	s.ok(s.putSecret(secret("a", 3)))
	s.wantVersions("a", 1, 2, 3)
	all, err := s.Secrets(s.ctx, "acme")
	s.ok(err)
	if len(all) != 1 || all[0].Version != 3 || all[0].Versions != 3 {
		s.Errorf("the list is %+v; want version 3 of 3", all)
	}
	s.ok(s.ForgetSecretVersions(s.ctx))
	s.wantVersions("a", 1, 2, 3)
	s.end(first)
	s.ok(s.ForgetSecretVersions(s.ctx))
	s.wantVersions("a", 2, 3)
	saved, err := s.Snapshot(s.ctx, "saved")
	s.ok(err)
	saved.State = sandboxer.SnapshotDropped
	s.put(saved)
	s.ok(s.ForgetSecretVersions(s.ctx))
	s.wantVersions("a", 3)
}

func secretOfSandbox(s *suite) {
	w := everything("x")
	missing := sandbox("x", 1)
	using("a", 0)(missing)
	s.fails(s.CreateSandbox(s.ctx, missing, w), sandboxer.NotFound)
	s.wroteNothing("x")
	s.ok(s.putSecret(secret("a", 1)))
	s.ok(s.putSecret(secret("a", 2)))
	stale := sandbox("x", 1)
	using("a", 1)(stale)
	s.fails(s.CreateSandbox(s.ctx, stale, sandboxer.Writes{}), sandboxer.NotFound)
	sb := s.create("x", 1, using("a", 0))
	s.ok(s.putSecret(secret("a", 3)))
	s.update(sb, func(sb *sandboxer.Sandbox) { sb.State = sandboxer.Running })
	got, err := s.Sandbox(s.ctx, "x")
	s.ok(err)
	for what, refs := range map[string]map[string]sandboxer.SecretRef{"given": sb.Secrets, "stored": got.Secrets} {
		if refs["TOKEN"].Version != 2 {
			s.Errorf("the %s record refers to %v; want version 2", what, refs)
		}
	}
}

func secretRemoval(s *suite) {
	remove := func(force bool) error {
		return s.Write(s.ctx, sandboxer.Writes{NoSecret: &sandboxer.SecretRemoval{Tenant: "acme", Name: "a", Force: force}})
	}
	s.fails(remove(false), sandboxer.NotFound)
	s.ok(s.putSecret(secret("a", 1)))
	s.ok(s.putSecret(secret("b", 1)))
	sb := s.create("needs-it", 1, using("a", 0))
	s.create("needs-b", 1, using("b", 0))
	s.ok(s.putSecret(secret("a", 2)))
	err := remove(false)
	s.fails(err, sandboxer.Conflict)
	if m := sandboxer.Message(err); !strings.Contains(m, "sandbox needs-it") || strings.Contains(m, "needs-b") {
		s.Errorf("the refusal is %q; want it to name sandbox needs-it", m)
	}
	s.wantVersions("a", 1, 2)
	s.ok(remove(true))
	s.wantVersions("a")
	// What the record refers to never becomes another value.
	s.fails(s.putSecret(secret("a", 1)), sandboxer.Conflict)
	if n, err := s.NextSecretVersion(s.ctx, "acme", "a"); err != nil || n != 2 {
		s.Errorf("the next version is %d, %v; want 2", n, err)
	}
	s.ok(s.putSecret(secret("a", 2)))
	s.end(sb)
	s.ok(remove(false))
	s.wantVersions("a")
	s.wantVersions("b", 1)
	for i := range 12 {
		s.create(fmt.Sprint("many", i), 1, using("b", 0))
	}
	err = s.Write(s.ctx, sandboxer.Writes{NoSecret: &sandboxer.SecretRemoval{Tenant: "acme", Name: "b"}})
	if m := sandboxer.Message(err); !strings.HasSuffix(m, " and 3 more") {
		s.Errorf("the refusal is %q; want ten names and 3 more", m)
	}
	if s.damage != nil {
		s.ok(s.putSecret(secret("c", 1)))
		s.damage(s.T, s.Store, SandboxRecord, "needs-b")
		s.fails(s.Write(s.ctx, sandboxer.Writes{NoSecret: &sandboxer.SecretRemoval{Tenant: "acme", Name: "c"}}), sandboxer.Conflict)
		s.ok(s.putSecret(secret("c", 2)))
		s.wantVersions("c", 1, 2)
	}
}

func secretBounds(s *suite) {
	for n := range int64(sandboxer.MaxSecretVersions) {
		s.ok(s.putSecret(secret("a", n+1)))
		s.create(fmt.Sprint("s", n), 1, using("a", 0))
	}
	s.fails(s.putSecret(secret("a", sandboxer.MaxSecretVersions+1)), sandboxer.Exhausted)
	for i := range sandboxer.MaxSecrets - 1 {
		s.ok(s.putSecret(secret(fmt.Sprint("b", i), 1)))
	}
	s.fails(s.putSecret(secret("c", 1)), sandboxer.Exhausted)
	s.ok(s.putSecret(secret("b0", 2)))
	s.fails(s.putSecret(secret("no/name", 1)), sandboxer.Invalid)
}

func secretAtomic(s *suite) {
	w := everything("x")
	w.Secret = secret("a", 1)
	w.Cover, w.Entries = true, []sandboxer.Entry{entry("h", sandboxer.EntryHold, "a", 1, -1)}
	s.fails(s.Write(s.ctx, w), sandboxer.NoCredit)
	s.wantVersions("a")
	s.ok(s.putSecret(secret("a", 1)))
	w = everything("x")
	w.Secret = secret("a", 1)
	s.fails(s.Write(s.ctx, w), sandboxer.Conflict)
	s.wroteNothing("x")
}

func secretReopen(s *suite) {
	if s.reopen == nil {
		s.Skip("this store does not outlive its process")
	}
	s.ok(s.putSecret(secret("a", 1)))
	s.create("x", 1, using("a", 0))
	s.ok(s.putSecret(secret("a", 2)))
	s.Store = s.reopen(s.T, s.Store)
	s.wantVersions("a", 1, 2)
}

// The key to the account of a sandbox is filled in and kept as its other secrets are, also where an update names another one.
func secretCredential(s *suite) {
	s.ok(s.putSecret(secret("key", 1)))
	s.ok(s.putSecret(secret("key", 2)))
	s.ok(s.putSecret(secret("other", 1)))
	sb := sandbox("a", 1)
	sb.Spec.Credential = sandboxer.SecretRef{Tenant: "acme", Name: "key", Version: 2}
	s.ok(s.CreateSandbox(s.ctx, sb, sandboxer.Writes{}))
	s.put(snapshot("saved", func(r *sandboxer.SnapshotRecord) {
		r.Tenant, r.State, r.Spec.Credential = "acme", sandboxer.SnapshotSealed, sb.Spec.Credential
	}))
	s.ok(s.putSecret(secret("key", 3)))
	s.wantVersions("key", 2, 3)
	s.fails(s.Write(s.ctx, sandboxer.Writes{NoSecret: &sandboxer.SecretRemoval{Tenant: "acme", Name: "key"}}), sandboxer.Conflict)

	sb.Spec.Credential = sandboxer.SecretRef{Tenant: "acme", Name: "other"}
	s.ok(s.UpdateSandbox(s.ctx, sb, sandboxer.Writes{}))
	got, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	for _, have := range []sandboxer.SecretRef{sb.Spec.Credential, got.Spec.Credential} {
		if have.Version != 1 {
			s.Errorf("after an update, the key is %s; want version 1", have)
		}
	}
	young := sandbox("b", 1)
	young.Spec.Credential = sandboxer.SecretRef{Tenant: "acme", Name: "key"}
	s.ok(s.CreateSandbox(s.ctx, young, sandboxer.Writes{}))
	if young.Spec.Credential.Version != 3 {
		s.Errorf("the key of a new record is %s; want version 3", young.Spec.Credential)
	}
	for _, ref := range []sandboxer.SecretRef{{Tenant: "other", Name: "key"}, {Tenant: "acme", Name: "none"}} {
		bad := sandbox("c", 1)
		bad.Spec.Credential = ref
		if err := s.CreateSandbox(s.ctx, bad, sandboxer.Writes{}); err == nil {
			s.Errorf("a record was made with %+v", ref)
		}
	}
}
