package spec

import (
	"maps"
	"slices"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// secretRefs are the secrets of tenant that a request names, by environment variable, in their newest versions.
func secretRefs(tenant string, asked map[string]string) map[string]sandboxer.SecretRef {
	if len(asked) == 0 {
		return nil
	}
	refs := make(map[string]sandboxer.SecretRef, len(asked))
	for variable, name := range asked {
		refs[variable] = sandboxer.SecretRef{Tenant: tenant, Name: name}
	}
	return refs
}

// keyFor is the secret whose value is the key to the account of e for this tenant and consumer.
func (e *Extension) keyFor(tenant, consumer string) (sandboxer.SecretRef, error) {
	if e == nil || e.Backend == nil { // making it reports that
		return sandboxer.SecretRef{}, nil
	}
	return e.Backend.Credential().Ref(tenant, consumer)
}

// restoredKey is keyFor for a restore of rec. A native form stays in its account, and keeps the version of the key.
func (e *Extension) restoredKey(rec *sandboxer.SnapshotRecord, as sandboxer.SnapshotKind, consumer string) (sandboxer.SecretRef, error) {
	key, err := e.keyFor(rec.Tenant, consumer)
	if have := rec.Spec.Credential; err == nil && as == sandboxer.SnapshotNative {
		if have.Tenant != key.Tenant || have.Name != key.Name {
			return key, sandboxer.E(sandboxer.Unsupported, nil, "the native form of snapshot %s is in the account of another key than the one of this request", rec.ID).
				WithHint("restore its portable form, or have the consumer that made it restore it")
		}
		key = have
	}
	return key, err
}

// boundConsumer is the consumer of a request of p: the one that its API key is bound to, if any. Kind: Denied for another one.
func boundConsumer(p sandboxer.Principal, asked sandboxer.Consumer) (sandboxer.Consumer, error) {
	if p.Consumer != "" && asked.ID != "" && asked.ID != p.Consumer {
		return asked, sandboxer.E(sandboxer.Denied, nil, "the API key of this request is bound to consumer %s, and the request names %s", p.Consumer, asked.ID).
			WithHint("leave out the consumer")
	}
	if p.Consumer != "" {
		asked.ID = p.Consumer
	}
	return asked, nil
}

// checkSecrets refuses secrets that no request may name.
func checkSecrets(prof sandboxer.Profile, req sandboxer.CreateRequest) error {
	if n := len(req.Secrets); n > sandboxer.MaxSandboxSecrets {
		return sandboxer.E(sandboxer.Invalid, nil, "%d secrets are too many for one sandbox: want at most %d", n, sandboxer.MaxSandboxSecrets)
	}
	if err := checkEnv(req.Secrets); err != nil {
		return err
	}
	refs := secretRefs("", req.Secrets)
	if overlap(refs, req.Env) {
		return sandboxer.E(sandboxer.Invalid, nil, "an environment variable is given both a value and a secret").WithHint("leave out one of them")
	}
	return offers(prof, refs)
}

// offers refuses, as Denied, secrets that the profile does not offer, and, as Invalid, names that no secret has.
func offers(prof sandboxer.Profile, refs map[string]sandboxer.SecretRef) error {
	for _, variable := range slices.Sorted(maps.Keys(refs)) {
		name := refs[variable].Name
		if err := sandboxer.CheckSecretName(name); err != nil {
			return err
		}
		if slices.Contains(prof.Secrets, name) {
			continue
		}
		err := sandboxer.E(sandboxer.Denied, nil, "profile %s offers no secret %s", prof.ID, name)
		if len(prof.Secrets) > 0 {
			return err.WithHint("it offers: %s", suggest.List(prof.Secrets))
		}
		return err.WithHint("ask the operator to list it in the profile, under secrets")
	}
	return nil
}

// overlap reports whether a variable is in both maps.
func overlap(refs map[string]sandboxer.SecretRef, env map[string]string) bool {
	for variable := range refs {
		if _, ok := env[variable]; ok {
			return true
		}
	}
	return false
}
