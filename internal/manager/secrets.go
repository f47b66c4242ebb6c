package manager

import (
	"context"
	"crypto/subtle"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/events"
)

// A SecretReader returns the value of a secret (sandboxer.Env.Secret).
type SecretReader func(ctx context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error)

// Secrets returns the reader of the secrets in store, which are sealed with the installation's key. Kind: Invalid for
// another key than one of 32 bytes.
func Secrets(store sandboxer.Store, key []byte) (SecretReader, error) {
	s, err := newSealer(key)
	if err != nil {
		return nil, err
	}
	return s.secrets(store), nil
}

// secrets returns the reader of the secrets in store.
func (s sealer) secrets(store sandboxer.Store) SecretReader {
	return func(ctx context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error) {
		rec, err := store.Secret(ctx, ref)
		if err != nil {
			return "", err
		}
		plain, err := s.open(secretSealName(rec.SecretRef), rec.Sealed)
		if err != nil {
			return "", sandboxer.E(sandboxer.Failed, err, "the %s cannot be opened", rec.SecretRef).
				WithHint("the installation's key was replaced; set the secret once more")
		}
		return sandboxer.Secret(plain), nil
	}
}

// secretOwner returns the tenant of the secrets that the caller means: its own, or the operator's, which need an administrator.
func secretOwner(ctx context.Context, scope sandboxer.Scope, operators bool) (tenant string, err error) {
	if operators {
		_, err := access.May(ctx, sandboxer.ScopeAdmin)
		return "", err
	}
	p, err := access.May(ctx, scope)
	return p.Tenant, err
}

// SetSecret stores value as the newest version of a secret of the caller's tenant, or of the operator. If the newest version
// has that value already, nothing changes. Sandboxes keep the version that they were created with. It needs the write scope,
// and the admin scope for a secret of the operator. Kinds: Invalid for the name or the value, Exhausted at sandboxer.MaxSecrets
// and MaxSecretVersions.
func (m *Manager) SetSecret(ctx context.Context, name string, operators bool, value sandboxer.Secret) (sandboxer.SecretRecord, error) {
	none := sandboxer.SecretRecord{}
	tenant, err := secretOwner(ctx, sandboxer.ScopeWrite, operators)
	if err == nil {
		err = sandboxer.CheckSecretName(name)
	}
	if err == nil {
		err = checkSecretValue(name, value.Reveal())
	}
	if err != nil {
		return none, err
	}
	for range 5 { // another request may set it at the same time
		if now, err := m.secret(ctx, sandboxer.SecretRef{Tenant: tenant, Name: name}); err == nil &&
			subtle.ConstantTimeCompare([]byte(now), []byte(value)) == 1 {
			return m.listedSecret(ctx, tenant, name)
		}
		rec := sandboxer.SecretRecord{SecretRef: sandboxer.SecretRef{Tenant: tenant, Name: name}, CreatedAt: now()}
		if rec.Version, err = m.store.NextSecretVersion(ctx, tenant, name); err != nil {
			return none, err
		}
		rec.Sealed = m.seal.seal(secretSealName(rec.SecretRef), []byte(value))
		err = m.writeSecret(ctx, sandboxer.Writes{Secret: &rec}, rec.SecretRef, "set")
		if err == nil {
			return m.listedSecret(ctx, tenant, name)
		}
		if !isKind(err, sandboxer.Conflict) {
			break
		}
	}
	return none, err
}

// checkSecretValue refuses values that no environment variable and no setting can have.
func checkSecretValue(name, value string) error {
	hint := "encode it, for example with base64"
	problem := ""
	switch {
	case value == "":
		problem, hint = "is empty", "remove a secret that is not needed: sandboxer secret rm NAME"
	case len(value) > sandboxer.MaxSecretBytes:
		problem, hint = "is longer than 64 KiB", "put large data into a file: sandboxer cp"
	case !utf8.ValidString(value):
		problem = "is not text in UTF-8"
	case strings.ContainsRune(value, 0):
		problem = "has a NUL byte"
	default:
		return nil
	}
	return sandboxer.E(sandboxer.Invalid, nil, "the value of secret %s %s", name, problem).WithHint("%s", hint)
}

// writeSecret commits w with the event that says what happened to the secret.
func (m *Manager) writeSecret(ctx context.Context, w sandboxer.Writes, ref sandboxer.SecretRef, what string) error {
	w.Events = []sandboxer.Event{{At: now(), Tenant: ref.Tenant, Type: sandboxer.EventSecret, Actor: events.Actor(ctx), Message: ref.String() + " was " + what}}
	if err := m.store.Write(ctx, w); err != nil {
		return err
	}
	m.events.Notify("")
	return nil
}

func (m *Manager) listedSecret(ctx context.Context, tenant, name string) (sandboxer.SecretRecord, error) {
	all, err := m.store.Secrets(ctx, tenant)
	if i := slices.IndexFunc(all, func(r sandboxer.SecretRecord) bool { return r.Name == name }); i >= 0 {
		return all[i], nil
	}
	if err == nil {
		err = sandboxer.E(sandboxer.NotFound, nil, "secret %s was removed meanwhile", name)
	}
	return sandboxer.SecretRecord{}, err
}

// Secrets lists the secrets of the caller's tenant, or of the operator, without values. It needs the read scope, and
// for the operator's the admin scope.
func (m *Manager) Secrets(ctx context.Context, operators bool) ([]sandboxer.SecretRecord, error) {
	tenant, err := secretOwner(ctx, sandboxer.ScopeRead, operators)
	if err != nil {
		return nil, err
	}
	return m.store.Secrets(ctx, tenant)
}

// RemoveSecret removes a secret of the caller's tenant, or of the operator. It needs the write scope; for the operator's,
// and with force, the admin scope. Kinds: NotFound; Conflict if something refers to it, which force ignores.
func (m *Manager) RemoveSecret(ctx context.Context, name string, operators, force bool) error {
	tenant, err := secretOwner(ctx, sandboxer.ScopeWrite, operators)
	if err == nil && force {
		_, err = access.May(ctx, sandboxer.ScopeAdmin)
	}
	if err == nil {
		err = sandboxer.CheckSecretName(name)
	}
	if err != nil {
		return err
	}
	if operators && !force {
		for _, e := range m.extensions() {
			if slices.Contains(e.Secrets, name) || e.Backend != nil && e.Backend.Credential() == (sandboxer.Credential{Secret: name}) {
				return sandboxer.E(sandboxer.Conflict, nil, "secret %s is needed by %s, whose file refers to it", name, e.Info.ID).
					WithHint("change the file and restart the server; or remove the secret all the same: sandboxer secret rm --operator --force %s", name)
			}
		}
	}
	if using := m.sinks.Using(name); operators && !force && len(using) > 0 {
		return sandboxer.E(sandboxer.Conflict, nil, "secret %s is needed by sink %s, whose requests it signs", name, strings.Join(using, ", ")).
			WithHint("change sinks.yaml and reload; or remove the secret all the same: sandboxer secret rm --operator --force %s", name)
	}
	ref := sandboxer.SecretRef{Tenant: tenant, Name: name}
	return m.writeSecret(ctx, sandboxer.Writes{NoSecret: &sandboxer.SecretRemoval{Tenant: tenant, Name: name, Force: force}}, ref, "removed")
}

// checkSecrets refuses c if a secret that it names does not exist. The commit of a record checks that, too.
func (c *creation) checkSecrets(ctx context.Context) error {
	for _, variable := range slices.Sorted(maps.Keys(c.Secrets)) {
		if _, err := c.m.store.Secret(ctx, c.Secrets[variable]); err != nil {
			return err
		}
	}
	return nil
}

// checkCredential refuses c, as Invalid, if the secret that is the key to its account does not exist. The commit of a record checks
// that, too.
func (c *creation) checkCredential(ctx context.Context) error {
	ref := c.Spec.Credential
	if ref.Name == "" {
		return nil
	}
	_, err := c.m.store.Secret(ctx, ref)
	if isKind(err, sandboxer.NotFound) {
		err = sandboxer.E(sandboxer.Invalid, err, "%s needs a key: %s", c.Extension, sandboxer.Message(err)).WithHint("%s", sandboxer.HintOf(err))
	}
	return err
}

// withNames returns env with the variables that get secrets, without their values.
func withNames(env map[string]string, secrets map[string]sandboxer.SecretRef) map[string]string {
	if len(secrets) == 0 {
		return env
	}
	all := make(map[string]string, len(env)+len(secrets)) // env may be the profile's
	maps.Copy(all, env)
	for variable := range secrets {
		all[variable] = ""
	}
	return all
}

// withSecrets returns env with the secrets of the record. Failed: one was removed by force, or cannot be opened.
func (bx box) withSecrets(ctx context.Context, env map[string]string) (map[string]string, error) {
	all := withNames(env, bx.sb.Secrets)
	for variable, ref := range bx.sb.Secrets {
		value, err := bx.m.secret(ctx, ref)
		if isKind(err, sandboxer.NotFound) { // of a backend, that would mean the sandbox
			err = sandboxer.E(sandboxer.Failed, err, "the %s, which the sandbox was created with, was removed", ref).
				WithHint("create the sandbox again")
		}
		if err != nil {
			return nil, err
		}
		all[variable] = value.Reveal()
	}
	return all, nil
}
