package sandboxer

import (
	"fmt"
	"strings"
	"time"
)

// SecretRef names a secret. Records have it instead of the value.
type SecretRef struct {
	// Tenant is whose secret it is; it is found under no other tenant. Empty means the operator's, which only files of
	// the installation name, never a request.
	Tenant string `json:"tenant,omitempty"`
	Name   string `json:"name"`
	// Version is 1 or more. 0 means the newest; records have none with 0.
	Version int64 `json:"version,omitempty"`
}

// A Credential says who owns the secret that is an extension's key to a hosted service. The zero value names none.
type Credential struct {
	Secret string       `yaml:"secret" json:"secret,omitempty" help:"Name of the secret that is the key to the service. It is the operator's, unless by says otherwise. If a key is needed and this is empty, it is the name of the extension without ext."`
	By     CredentialBy `yaml:"by" json:"by,omitempty" help:"With tenant, each tenant brings the key: its own secret of that name. With consumer, it is the tenant's secret SECRET.CONSUMER, and the API key of a request is bound to its consumer."`
}

// CredentialBy says who brings the key to a hosted service; empty means the operator.
type CredentialBy string

// The other values of CredentialBy.
const (
	ByTenant   CredentialBy = "tenant"
	ByConsumer CredentialBy = "consumer"
)

// CredentialsBy lists the values of CredentialBy that can be written.
func CredentialsBy() []CredentialBy { return []CredentialBy{ByTenant, ByConsumer} }

// Ref returns the secret that is the key for a request, in its newest version; the zero value if c names none. consumer is the
// consumer to which the API key of the request is bound. Kinds: Invalid if the API key is bound to no consumer and c needs one;
// Denied for a caller without a tenant.
func (c Credential) Ref(tenant, consumer string) (SecretRef, error) {
	ref := SecretRef{Tenant: tenant, Name: c.Secret}
	switch c.By {
	case ByTenant:
	case ByConsumer:
		if consumer == "" {
			return SecretRef{}, E(Invalid, nil, "each consumer brings a key of its own here, and the API key of this request is bound to no consumer").
				WithHint("ask an administrator for one that is: sandboxer key create ci --consumer NAME")
		}
		ref.Name += "." + consumer
	default:
		ref.Tenant = ""
		return ref, nil
	}
	if tenant == "" { // the empty name would be the operator's secret
		return SecretRef{}, E(Denied, nil, "each tenant brings a key of its own here, and this request is no tenant's")
	}
	return ref, CheckSecretName(ref.Name)
}

// SecretRecord is one version of a secret, as the database keeps it.
type SecretRecord struct {
	SecretRef
	Sealed    []byte    `json:"-"` // the value, encrypted by the manager; nil in lists
	CreatedAt time.Time `json:"created_at"`
	// Versions is how many versions are kept, this one included. The store sets it.
	Versions int `json:"versions"`
}

// SecretRemoval removes all versions of a secret.
type SecretRemoval struct {
	Tenant, Name string
	Force        bool // also if a record refers to it, which then cannot read it any more
}

// Bounds of secrets.
const (
	MaxSecretBytes    = 64 << 10 // of one value
	MaxSecretName     = 64       // bytes
	MaxSecrets        = 200      // of one tenant
	MaxSecretVersions = 16       // of one secret that are kept at the same time, because records refer to them
	MaxSandboxSecrets = 16       // of one sandbox
	MaxBoundConsumer  = 40       // bytes of the consumer that an API key is bound to, which ends names of secrets
)

var secretName = lazyRegexp(fmt.Sprintf(`^[A-Za-z0-9][A-Za-z0-9._-]{0,%d}$`, MaxSecretName-1))

// CheckSecretName refuses an invalid name of a secret. Kind: Invalid. The message does not repeat the name, which may be a
// value that was given in its place.
func CheckSecretName(name string) error {
	if !secretName().MatchString(name) {
		return E(Invalid, nil, "this is not the name of a secret: want 1 to %d letters, digits, dots, hyphens and underscores, the first a letter or a digit", MaxSecretName).
			WithHint("choose a name such as registry-token; the value is given on stdin or in a file")
	}
	return nil
}

// String returns the name of the secret and, if it is known, its version.
func (r SecretRef) String() string {
	var b strings.Builder
	if r.Tenant == "" {
		b.WriteString("operator's ")
	}
	b.WriteString("secret " + r.Name)
	if r.Version > 0 {
		fmt.Fprintf(&b, " (version %d)", r.Version)
	}
	return b.String()
}
