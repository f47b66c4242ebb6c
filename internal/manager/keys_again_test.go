package manager

import (
	"context"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestKeysOfPassingFailures: what a restore or a fork could not make for a cause that passes is made under the same key
// later, also by a broker that was started since.
func TestKeysOfPassingFailures(t *testing.T) {
	for _, kind := range []sandboxer.Kind{sandboxer.Unavailable, sandboxer.Timeout, sandboxer.Exhausted} {
		for _, restart := range []bool{false, true} {
			r := newSnapshotRig(t)
			sb := r.create(sandboxer.CreateRequest{})
			rec := r.snapshot(sb.ID, SnapshotRequest{})
			again := func(what string, ask func() (string, error)) {
				t.Helper()
				r.world.Inject(fake.Fault{Verb: fake.VerbRestore, Kind: kind, Times: 1})
				_, err := ask()
				wantErr(t, err, kind, "")
				if restart {
					r.restart()
				}
				made := ""
				eventually(t, what+" to succeed under its key", func() bool {
					made, err = ask()
					if err != nil && !mayPass(sandboxer.KindOf(err)) {
						t.Fatalf("%s after %s: %v", what, kind, err)
					}
					return err == nil
				})
				if id, err := ask(); err != nil || id != made {
					t.Errorf("%s after %s: one key made %s and %s, %v", what, kind, made, id, err)
				}
			}
			again("restore", func() (string, error) {
				sb, err := r.Restore(acme, rec.ID, RestoreRequest{Key: "restore"})
				if err != nil {
					return "", err
				}
				return sb.ID, nil
			})
			again("fork", func() (string, error) {
				made, err := r.Fork(acme, sb.ID, ForkRequest{Count: 1, Key: "fork"})
				if err != nil {
					return "", err
				}
				return made[0].ID, nil
			})
			r.sound(3)
		}
	}
}

// TestKeyFreedMeanwhile: a create whose key a twin had, and which was freed since the twin failed, is tried again.
func TestKeyFreedMeanwhile(t *testing.T) {
	r := newRig(t, nil)
	o, err := r.resolve(sandboxer.PrincipalFrom(acme), sandboxer.CreateRequest{Profile: "test", Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	tries := 0
	sb, err := o.underKey(acme, true, func(ctx context.Context) (*sandboxer.Sandbox, error) {
		if tries++; tries == 1 {
			return nil, sandboxer.E(sandboxer.Conflict, nil, "a twin has the key")
		}
		return o.claimOrCreate(ctx)
	})
	if err != nil || tries != 2 {
		t.Fatalf("%v after %d tries", err, tries)
	}
	if again, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", Key: "k"}); err != nil || again.ID != sb.ID {
		t.Errorf("%v, %v", again, err)
	}
	_, err = o.underKey(acme, true, func(context.Context) (*sandboxer.Sandbox, error) { t.Fatal("made twice"); return nil, nil })
	if err != nil {
		t.Error(err)
	}
}
