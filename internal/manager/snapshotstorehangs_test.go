package manager

import (
	"bytes"
	"context"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A stuckStore answers until it hangs; then it heeds nothing but its context.
type stuckStore struct {
	dirStore
	hangs *atomic.Int64 // from which kind of call on: see the constants
}

const (
	hangsNever = iota
	hangsReading
	hangsAll
)

func (v stuckStore) wait(ctx context.Context, from int64) error {
	if v.hangs.Load() >= from {
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func (v stuckStore) Save(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader) (p sandboxer.PortablePayload, err error) {
	if p, err = v.dirStore.Save(ctx, rec, r); err == nil {
		err = v.wait(ctx, hangsReading) // what it has taken, it reads back
	}
	return p, err
}

func (v stuckStore) Import(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader, accept []string) (p sandboxer.PortablePayload, err error) {
	if p, err = v.dirStore.Import(ctx, rec, r, accept); err == nil {
		err = v.wait(ctx, hangsReading)
	}
	return p, err
}

func (v stuckStore) Load(ctx context.Context, id string) (io.ReadCloser, error) {
	if err := v.wait(ctx, hangsAll); err != nil {
		return nil, err
	}
	r, err := v.dirStore.Load(ctx, id)
	if err != nil {
		return nil, err
	}
	return stuckReader{r, ctx, v}, nil
}

type stuckReader struct {
	io.ReadCloser
	ctx context.Context
	v   stuckStore
}

func (r stuckReader) Read(p []byte) (int, error) {
	if err := r.v.wait(r.ctx, hangsReading); err != nil {
		return 0, err
	}
	return r.ReadCloser.Read(p)
}

func (v stuckStore) Export(ctx context.Context, id string, w io.Writer) error {
	if err := v.wait(ctx, hangsReading); err != nil {
		return err
	}
	return v.dirStore.Export(ctx, id, w)
}

func (v stuckStore) Files(ctx context.Context, id string) ([]SnapshotFile, error) {
	if err := v.wait(ctx, hangsReading); err != nil {
		return nil, err
	}
	return v.dirStore.Files(ctx, id)
}

func (v stuckStore) Check(ctx context.Context, id string, deep bool) error {
	if err := v.wait(ctx, hangsReading); err != nil {
		return err
	}
	return v.dirStore.Check(ctx, id, deep)
}

func (v stuckStore) Drop(ctx context.Context, id string) error {
	if err := v.wait(ctx, hangsAll); err != nil {
		return err
	}
	return v.dirStore.Drop(ctx, id)
}

func (v stuckStore) List(ctx context.Context) ([]string, error) {
	if err := v.wait(ctx, hangsAll); err != nil {
		return nil, err
	}
	return v.dirStore.List(ctx)
}

// Every call that needs a store that hangs ends, says what hangs, and leaves a record that the
// sweep goes on with.
func TestSnapshotStoreHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := new(atomic.Int64)
		r := newRig(t, func(s *setup) {
			ticking(s)
			s.opts.SnapshotStore = stuckStore{dirStore{s.dir}, hangs}
		})
		sb := r.create(sandboxer.CreateRequest{TTL: 2 * time.Hour})
		snap := func(name string) *sandboxer.SnapshotRecord {
			rec, err := r.Snapshot(acme, sb.ID, SnapshotRequest{Name: name, Kind: sandboxer.SnapshotPortable})
			if err != nil {
				t.Fatal(err)
			}
			return rec
		}
		one, two := snap("one"), snap("two")
		var file bytes.Buffer
		if err := r.ExportSnapshot(acme, one.ID, &file); err != nil {
			t.Fatal(err)
		}
		hangs.Store(hangsAll)
		ends := func(what string, limit time.Duration, err error, began time.Time) {
			t.Helper()
			if sandboxer.KindOf(err) != sandboxer.Unavailable && sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.Message(err), storeName+" cannot be reached") {
				t.Errorf("%s: %v (%s)", what, err, sandboxer.KindOf(err))
			}
			if took := time.Since(began); took > limit {
				t.Errorf("%s took %s", what, took)
			}
		}
		began := time.Now()
		_, err := r.DropSnapshot(acme, two.ID)
		ends("drop", storeAsk, err, began)
		began = time.Now()
		_, err = r.Diff(acme, one.ID, one.ID)
		ends("diff", storeRead, err, began)
		began = time.Now()
		ends("export", storeRead, r.ExportSnapshot(acme, one.ID, io.Discard), began)
		began = time.Now()
		_, err = r.ImportSnapshot(acme, ImportRequest{Profile: "test"}, bytes.NewReader(file.Bytes()))
		ends("import", storeSave+storeAsk, err, began) // it drops what came of it
		began = time.Now()
		_, err = r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotPortable})
		ends("snapshot", storeSave+storeAsk, err, began)
		for _, h := range []int64{hangsReading, hangsAll} {
			hangs.Store(h)
			began = time.Now()
			_, err = r.Restore(acme, one.ID, RestoreRequest{})
			ends("restore", 2*storeRead, err, began)
		}

		hangs.Store(hangsNever)
		for end := time.Now().Add(time.Hour); ; time.Sleep(time.Second) {
			if s, err := r.store.Snapshot(t.Context(), two.ID); err == nil && s.State == sandboxer.SnapshotDropped {
				break
			}
			if time.Now().After(end) {
				t.Fatal("the drop is not done when the store answers again")
			}
		}
		if _, err := r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotPortable}); err != nil {
			t.Error(err)
		}
		r.destroy(sb.ID)
	})
}

// The audit names a store that does not answer, once, and checks the rest.
func TestAuditOfASnapshotStoreThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := new(atomic.Int64)
		r := newRig(t, func(s *setup) { s.opts.SnapshotStore = stuckStore{dirStore{s.dir}, hangs} })
		sb := r.create(sandboxer.CreateRequest{TTL: 2 * time.Hour})
		for range 3 {
			if _, err := r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotPortable}); err != nil {
				t.Fatal(err)
			}
		}
		for _, c := range []struct {
			hangs int64
			limit time.Duration
			want  string
		}{
			{hangsAll, storeAsk, storeName + ": " + storeName + " cannot be reached"},
			{hangsReading, storeRead, "2 more were not checked"},
		} {
			hangs.Store(c.hangs)
			began := time.Now()
			a, err := r.Audit(admin)
			if err != nil || len(a.Violations) != 1 || a.Violations[0].Invariant != invAsked || !strings.Contains(a.Violations[0].Detail, c.want) {
				t.Errorf("audit: %v, %+v", err, a.Violations)
			}
			if took := time.Since(began); took > c.limit {
				t.Errorf("the audit took %s", took)
			}
		}
		began := time.Now()
		if a, err := r.DeepAudit(admin); err != nil || len(a.Violations) != 1 || time.Since(began) > storeRead {
			t.Errorf("deep audit: %v, %+v after %s", err, a.Violations, time.Since(began))
		}
		hangs.Store(hangsNever)
		r.destroy(sb.ID)
		r.sound(0)
	})
}

// Sandboxes expire on time whatever the number of snapshots that are due in a store that hangs.
func TestExpiryBesideASnapshotStoreThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := new(atomic.Int64)
		r := newRig(t, func(s *setup) {
			ticking(s)
			s.opts.Workers = 2
			s.opts.SnapshotStore = stuckStore{dirStore{s.dir}, hangs}
		})
		sb := r.create(sandboxer.CreateRequest{TTL: 2 * time.Hour})
		for _, kind := range []sandboxer.SnapshotKind{sandboxer.SnapshotPortable, sandboxer.SnapshotBoth} {
			for range 10 {
				if _, err := r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: kind, TTL: 10 * time.Minute}); err != nil {
					t.Fatal(err)
				}
			}
		}
		one, err := r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotPortable})
		if err != nil {
			t.Fatal(err)
		}
		var ids []string
		for range 4 {
			ids = append(ids, r.create(sandboxer.CreateRequest{TTL: 10*time.Minute + 20*time.Second}).ID)
		}
		hangs.Store(hangsAll)
		time.Sleep(9*time.Minute + 50*time.Second)
		var restores sync.WaitGroup
		for range 4 {
			restores.Go(func() { _, _ = r.Manager.Restore(acme, one.ID, RestoreRequest{}) })
		}
		synctest.Wait()
		r.close() // the next one goes on with what is being restored
		restores.Wait()
		r.open()
		time.Sleep(40 * time.Second)
		for _, id := range ids {
			if got := r.get(id); got.State != sandboxer.Terminated {
				t.Errorf("%s is %s after its time", id, got.State)
			}
		}
		began := time.Now()
		r.destroy(sb.ID)
		if took := time.Since(began); took > time.Second {
			t.Errorf("a destroy took %s", took)
		}
		hangs.Store(hangsNever)
		for end := time.Now().Add(2 * time.Hour); ; time.Sleep(time.Second) {
			left, err := dirStore{r.setup.dir}.List(t.Context())
			if err == nil && len(left) == 1 { // the one without a time
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%q are kept, %v", left, err)
			}
		}
	})
}
