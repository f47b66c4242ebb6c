package hosted

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// Keys are the keys of one extension to its service: one in the extension's file, or sealed secrets, which may differ by
// tenant. Every call is made for one account: the secret whose value is its key (For). A nil Keys has no key.
type Keys struct {
	env   sandboxer.Env
	fixed sandboxer.Secret // in the extension's file
	by    sandboxer.Credential
}

// NeedKeys is OpenKeys for a service that needs a key: if the extension's file names none, the key is the operator's secret with
// the extension's name.
func NeedKeys(ctx context.Context, env sandboxer.Env, fixed sandboxer.Secret, c sandboxer.Credential) (*Keys, error) {
	if fixed == "" {
		c.Secret = cmp.Or(c.Secret, secretOf(env))
	}
	return OpenKeys(ctx, env, fixed, c)
}

// secretOf is the name of the secret for an extension whose file names none.
func secretOf(env sandboxer.Env) string { return strings.TrimPrefix(env.Extension, "ext.") }

// OpenKeys returns the keys of an extension. A key in its file is used unless tenants or consumers bring their own; even then,
// sandboxes that were made with it need it until they have ended. Kinds: Invalid for c; NotFound if the operator's secret is
// not set, so that listings show a built-in extension with this reason; Unavailable in a process that keeps no secrets.
func OpenKeys(ctx context.Context, env sandboxer.Env, fixed sandboxer.Secret, c sandboxer.Credential) (*Keys, error) {
	if c.By != "" {
		c.Secret = cmp.Or(c.Secret, secretOf(env))
	}
	k := &Keys{env: env, fixed: fixed, by: c}
	switch {
	case c.By == "" && fixed != "":
		k.by = sandboxer.Credential{}
	case c.Secret == "":
	case sandboxer.CheckSecretName(c.Secret) != nil:
		return nil, sandboxer.E(sandboxer.Invalid, nil, "credential.secret: %s", sandboxer.Message(sandboxer.CheckSecretName(c.Secret)))
	case env.Secret == nil:
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "secret %s is kept by the server, and cannot be read in this process", c.Secret).
			WithHint("run the extension in the server, or name the key in its file: key: ${env:NAME}")
	case c.By == "":
		_, err := env.Secret(ctx, sandboxer.SecretRef{Name: c.Secret})
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			err = sandboxer.E(sandboxer.NotFound, nil, "needs a key: there is no operator's secret %s", c.Secret).
				WithHint("an administrator sets it: sandboxer secret set --operator %s", c.Secret)
		}
		if err != nil {
			return nil, err
		}
	}
	return k, nil
}

// credential says whose secret is the key for new sandboxes.
func (k *Keys) credential() sandboxer.Credential {
	if k == nil {
		return sandboxer.Credential{}
	}
	return k.by
}

type accountKey struct{}

// For returns ctx for calls with the key that ref names: that of a spec, a handle or a snapshot.
func For(ctx context.Context, ref sandboxer.SecretRef) context.Context {
	return context.WithValue(ctx, accountKey{}, ref)
}

// Account returns what For put into ctx; the zero value means the key in the extension's file.
func Account(ctx context.Context) sandboxer.SecretRef {
	ref, _ := ctx.Value(accountKey{}).(sandboxer.SecretRef)
	return ref
}

// Operator returns ctx for calls that concern no sandbox, such as one about capacity. ok is false if each tenant has its own
// account: then no account is common to all.
func (k *Keys) Operator(ctx context.Context) (_ context.Context, ok bool) {
	switch by := k.credential(); {
	case by.By != "":
		return ctx, false
	case by.Secret != "":
		return For(ctx, sandboxer.SecretRef{Name: by.Secret}), true
	}
	return For(ctx, sandboxer.SecretRef{}), true
}

// Of returns the key for the account of ctx; "" if the service needs none. The kind of an error is Unavailable, never NotFound:
// a sandbox that we cannot ask about is not gone.
func (k *Keys) Of(ctx context.Context) (sandboxer.Secret, error) {
	ref := Account(ctx)
	switch {
	case ref.Name == "" && (k == nil || k.fixed != "" || k.by.Secret == ""):
		if k == nil {
			return "", nil
		}
		return k.fixed, nil
	case ref.Name == "":
		return "", sandboxer.E(sandboxer.Unavailable, errRefused, "the key in the extension's file, which the sandbox was made with, is no longer there").
			WithHint("have an administrator put it back, until the sandboxes that were made with it have ended")
	case k == nil || k.env.Secret == nil:
		return "", sandboxer.E(sandboxer.Unavailable, errRefused, "the %s cannot be read in this process", ref).WithHint("run the extension in the server")
	}
	key, err := k.env.Secret(ctx, ref)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		err = sandboxer.E(sandboxer.Unavailable, errRefused, "the %s, which is the key to the account of the sandbox, was removed", ref).
			WithHint("remove the sandbox at the service; then have an administrator end its record: sandboxer forget ID")
	}
	return key, err
}

var errRefused = errors.New("the key is refused")

// Refused is the error for a key that the service refuses; said is its explanation. Nothing was changed. Kind: Unavailable.
func Refused(ctx context.Context, said string) error {
	return unusable(ctx, "the service refuses the %s: %s", said, "if it was revoked, ")
}

// Malformed is like Refused, for a key whose form is wrong, so that it is not sent. want describes the right form, without the
// key.
func Malformed(ctx context.Context, want string) error {
	return unusable(ctx, "the %s is not a valid key for the service: %s", want, "")
}

func unusable(ctx context.Context, format, said, when string) error {
	ref, what, hint := Account(ctx), "key in the extension's file", when+"an administrator sets another key in the extension's file"
	switch {
	case ref.Name == "":
	case ref.Tenant == "":
		what, hint = ref.String(), when+"an administrator sets another one for new sandboxes: sandboxer secret set --operator "+ref.Name
	default:
		what, hint = ref.String(), when+"set another one for new sandboxes: sandboxer secret set "+ref.Name
	}
	return sandboxer.Untouched(sandboxer.E(sandboxer.Unavailable, errRefused, format, what, capture.Text(said, maxText)).WithHint("%s", hint))
}

// IsRefused reports whether err says that the key of an account cannot be used; those of others may work.
func IsRefused(err error) bool { return errors.Is(err, errRefused) }

// Accounts returns the accounts in which the sandbox of a record with the key ref may be: only that one, except if the record
// has no key and the extension's file has none either. Then it may be in any account.
func (k *Keys) Accounts(ctx context.Context, ref sandboxer.SecretRef) ([]sandboxer.SecretRef, error) {
	if _, err := k.Of(For(ctx, ref)); ref.Name == "" && err != nil {
		return k.accounts(ctx)
	}
	return []sandboxer.SecretRef{ref}, nil
}

// accounts returns all accounts in which sandboxes may be: those of recorded sandboxes, and that of new ones.
func (k *Keys) accounts(ctx context.Context) ([]sandboxer.SecretRef, error) {
	if k == nil {
		return []sandboxer.SecretRef{{}}, nil
	}
	var all []sandboxer.SecretRef
	if k.env.Recorded != nil {
		handles, err := k.env.Recorded(ctx)
		if err != nil {
			return nil, err
		}
		for _, h := range handles {
			if h.Credential.Name != "" && !slices.Contains(all, h.Credential) {
				all = append(all, h.Credential)
			}
		}
	}
	if k.fixed != "" || k.by.Secret == "" {
		all = append(all, sandboxer.SecretRef{})
	}
	if k.by.Secret != "" && k.by.By == "" {
		all = append(all, sandboxer.SecretRef{Name: k.by.Secret})
	}
	return all, nil
}

// Everywhere yields the results of list in every account. list gets a ctx for one account (Account). If the service refuses the
// key of an account, Everywhere continues with the others and yields that error last. Any other error ends it.
func Everywhere[T any](ctx context.Context, k *Keys, list func(context.Context) iter.Seq2[T, error]) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		accounts, refused := k.accounts(ctx)
		for _, ref := range accounts {
			for item, err := range list(For(ctx, ref)) {
				if IsRefused(err) {
					refused = err
					break
				}
				if !yield(item, err) || err != nil {
					return
				}
			}
		}
		if refused != nil {
			yield(none, refused)
		}
	}
}

// Within yields what list finds in the account of a key, or Everywhere if none is named.
func Within[T any](ctx context.Context, k *Keys, ref sandboxer.SecretRef, list func(context.Context) iter.Seq2[T, error]) iter.Seq2[T, error] {
	if ref.Name == "" {
		return Everywhere(ctx, k, list)
	}
	return list(For(ctx, ref))
}
