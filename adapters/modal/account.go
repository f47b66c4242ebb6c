package modal

import (
	"context"
	"strconv"
	"sync"
	"time"

	modal "github.com/modal-labs/modal-client/go"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosted"
)

const (
	keepAccount  = 5 * time.Minute // for how long an account without calls is kept
	keptAccounts = 32              // the most of them
)

// An account is what the calls with one key share.
type account struct {
	client *modal.Client
	key    sandboxer.Secret
	name   string    // another one than that of an earlier account with this key
	users  int       // calls under way
	since  time.Time // without a call
	timer  *time.Timer

	mu  sync.Mutex
	app *modal.App // ours, once it is known
}

// accounts has the accounts in use. One without calls is kept for a while: its client has a connection.
type accounts struct {
	connect func(sandboxer.Secret) (*modal.Client, error)

	mu     sync.Mutex
	kept   map[sandboxer.SecretRef]*account
	made   int
	closed bool
}

// take returns the account of ref, whose key it is now. The caller gives it back by done, once.
func (as *accounts) take(ref sandboxer.SecretRef, key sandboxer.Secret) (a *account, done func(), err error) {
	as.mu.Lock()
	defer as.mu.Unlock()
	a = as.kept[ref]
	if a == nil || a.key != key {
		client, err := as.connect(key)
		if err != nil {
			return nil, nil, err
		}
		as.drop(ref) // its key was replaced
		as.made++
		a = &account{client: client, key: key, name: strconv.Itoa(as.made)}
		if as.kept == nil {
			as.kept = map[sandboxer.SecretRef]*account{}
		}
		if !as.closed {
			as.kept[ref] = a
		}
	}
	a.users++
	if a.timer != nil {
		a.timer.Stop()
	}
	return a, func() { as.give(ref, a) }, nil
}

func (as *accounts) give(ref sandboxer.SecretRef, a *account) {
	as.mu.Lock()
	defer as.mu.Unlock()
	if a.users--; a.users > 0 {
		return
	}
	if as.kept[ref] != a {
		a.client.Close()
		return
	}
	a.since = time.Now()
	a.timer = time.AfterFunc(keepAccount, func() {
		as.mu.Lock()
		defer as.mu.Unlock()
		if as.kept[ref] == a && a.users == 0 {
			as.drop(ref)
		}
	})
	oldest, unused := ref, 0
	for r, o := range as.kept {
		if o.users > 0 {
			continue
		}
		if unused++; o.since.Before(as.kept[oldest].since) {
			oldest = r
		}
	}
	if unused > keptAccounts {
		as.drop(oldest)
	}
}

// drop forgets an account, and closes it unless there are calls: the last one does. as.mu is held.
func (as *accounts) drop(ref sandboxer.SecretRef) {
	a := as.kept[ref]
	if a == nil {
		return
	}
	delete(as.kept, ref)
	if a.timer != nil {
		a.timer.Stop()
	}
	if a.users == 0 {
		a.client.Close()
	}
}

func (as *accounts) close() {
	as.mu.Lock()
	defer as.mu.Unlock()
	as.closed = true
	for ref := range as.kept {
		as.drop(ref)
	}
}

type accountKey struct{}

// enter returns ctx for calls to the account that it names (hosted.For), which are over before done is called. The kind of an
// error is Unavailable.
func (x *extension) enter(ctx context.Context) (_ context.Context, done func(), err error) {
	key, err := x.Keys.Of(ctx)
	if err != nil {
		return nil, nil, sandboxer.Untouched(err)
	}
	if _, _, err := token(key); err != nil {
		return nil, nil, hosted.Malformed(ctx, sandboxer.Message(err))
	}
	a, done, err := x.accounts.take(hosted.Account(ctx), key)
	if err != nil {
		return nil, nil, sandboxer.Untouched(err)
	}
	return context.WithValue(ctx, accountKey{}, a), done, nil
}

// in returns the account that enter has put into ctx.
func in(ctx context.Context) *account { return ctx.Value(accountKey{}).(*account) }
