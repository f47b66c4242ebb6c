package cli

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/checkpoint"
	"github.com/sand-boxer/sandboxer/internal/checkpoint/s3"
)

// cmdBucket starts an object store with a bucket called snapshots, for as long as the
// script runs, and sets S3 to its address. "bucket ls" lists what is in it to the file
// objects.
func cmdBucket(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) > 1 {
		ts.Fatalf("usage: bucket [ls]")
	}
	if len(args) == 1 {
		res, err := http.Get(ts.Getenv("S3") + "/snapshots?list-type=2")
		ts.Check(err)
		defer res.Body.Close()
		list, err := io.ReadAll(res.Body)
		ts.Check(err)
		ts.Check(os.WriteFile(ts.MkAbs("objects"), list, 0o600))
		return
	}
	b := s3mem.New()
	ts.Check(b.CreateBucket("snapshots"))
	srv := httptest.NewServer(gofakes3.New(b).Server())
	ts.Defer(srv.Close)
	ts.Setenv("S3", srv.URL)
}

func TestS3Settings(t *testing.T) {
	for _, bad := range []string{"bucket", "s3://", "http://x/y", "s3://a:1/b", "s3://u:p@b/x", "s3://b/x?y"} {
		if checkSnapshotStore(bad) == nil {
			t.Errorf("snapshot_store takes %q", bad)
		}
	}
	for _, bad := range []string{"host", "ftp://x", "https://user:pw@host", "https://host/path"} {
		if checkS3Endpoint(bad) == nil {
			t.Errorf("s3_endpoint takes %q", bad)
		}
	}
	file := filepath.Join(t.TempDir(), "credentials")
	text := "# mine\n[other]\naws_access_key_id = no\n[default]\naws_access_key_id = AK\naws_secret_access_key=se=cret\naws_session_token = tok\n"
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	var c s3.Config
	if err := readS3Credentials(file, &c); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("credentials that others can read: %v", err)
	}
	if err := os.Chmod(file, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := readS3Credentials(file, &c); err != nil || c.AccessKey != "AK" || string(c.SecretKey) != "se=cret" || string(c.Token) != "tok" {
		t.Errorf("credentials = %q, %v", c.AccessKey, err)
	}
}

// A place that cannot be reached at first is reached later; until then its housekeeping
// says so, and nothing else waits for it.
func TestVaultPlaceLater(t *testing.T) {
	dir := t.TempDir()
	down := true
	v, err := openSnapshotStore(dir, func(context.Context) (checkpoint.Blobs, error) {
		if down {
			return nil, sandboxer.E(sandboxer.Unavailable, nil, "down")
		}
		return checkpoint.OpenDir(filepath.Join(dir, "later"))
	})
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	ctx, stop := context.WithCancel(t.Context())
	told := make(chan error, 1)
	go v.tidy(ctx, time.Millisecond, time.Hour, func(err error) { told <- err })
	if err := <-told; sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("housekeeping says %v", err)
	}
	stop()
	if _, err := v.List(t.Context()); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("List = %v; want unavailable", err)
	}
	v.mu.Lock()
	down = false
	v.mu.Unlock()
	if l, err := v.List(t.Context()); err != nil || len(l) != 0 {
		t.Errorf("List = %v, %v", l, err)
	}
}

// While one caller waits for a place that hangs, others share its result, and a caller that has left
// waits for nothing.
func TestVaultPlaceHangs(t *testing.T) {
	entered, answer := make(chan struct{}, 10), make(chan error)
	v, err := openSnapshotStore(t.TempDir(), func(ctx context.Context) (checkpoint.Blobs, error) {
		entered <- struct{}{}
		select {
		case err := <-answer:
			return nil, err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	list := func(ctx context.Context) <-chan error {
		got := make(chan error, 1)
		go func() {
			_, err := v.List(ctx)
			got <- err
		}()
		return got
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	first := list(ctx)
	<-entered
	late, stop := context.WithCancel(t.Context())
	stop()
	if err := <-list(late); !errors.Is(err, context.Canceled) {
		t.Errorf("for who has left: %v", err)
	}

	// Who opened it leaves: somebody else opens it.
	second := list(t.Context())
	leave()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("who opened it: %v", err)
	}
	<-entered
	var all []<-chan error
	for range 5 {
		all = append(all, list(t.Context()))
	}
	answer <- sandboxer.E(sandboxer.Unavailable, nil, "it hangs")
	if err := <-second; sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("who waited: %v", err)
	}
	for _, got := range all { // those who came after the answer have opened it once more
		for over := false; !over; {
			select {
			case answer <- sandboxer.E(sandboxer.Unavailable, nil, "it hangs"):
			case err := <-got:
				if over = true; sandboxer.KindOf(err) != sandboxer.Unavailable {
					t.Errorf("another who waited: %v", err)
				}
			}
		}
	}
}
