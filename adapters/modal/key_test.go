//go:build linux

package modal

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	modal "github.com/modal-labs/modal-client/go"
	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/hosted"
	"github.com/sand-boxer/sandboxer/internal/notes"
)

// opensWith opens the extension with secrets, by their names, which the test may change.
func opensWith(t *testing.T, f *fake, credential string, secrets map[string]sandboxer.Secret, recorded *[]sandboxer.Handle) (*extension, error) {
	t.Helper()
	dir := t.TempDir()
	config := fmt.Sprintf(`{"url":%q,"settle":0,"credential":%s,"agent":%q}`, f.url, credential, buildtest.Program(t, "cmd/sandboxer-agent"))
	x, err := Adapter.Open(t.Context(), sandboxer.Env{
		Extension: "ext.modal", Owner: "test", Dir: dir, Notes: notes.New(dir, "ext.modal", []byte("key")), Prices: book,
		Decode:   func(v any) error { return json.Unmarshal([]byte(config), v) },
		Recorded: func(context.Context) ([]sandboxer.Handle, error) { return *recorded, nil },
		Secret: func(_ context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error) {
			if key, ok := secrets[strings.Trim(ref.Tenant+"/"+ref.Name, "/")]; ok {
				return key, nil
			}
			return "", sandboxer.E(sandboxer.NotFound, nil, "there is no %s", ref)
		},
	})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { x.(*extension).Close() })
	return x.(*extension), nil
}

func (f *fake) accountOf(ref string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.boxes[ref] == nil {
		return ""
	}
	return f.boxes[ref].account
}

// TestKeyOfEachTenant: tenants and consumers reach their own accounts only; a key that is refused proves nothing, and hinders nobody else.
func TestKeyOfEachTenant(t *testing.T) {
	canBox(t)
	ctx, f := t.Context(), newFake(t)
	f.keys = map[string]string{"ak-acme": "as-canary", "ak-rival": "as-canary", "ak-seven": "as-canary"}
	secrets := map[string]sandboxer.Secret{"acme/modal": "ak-acme:as-canary\n", "rival/modal": "ak-rival:as-canary", "acme/modal.seven": "ak-seven:as-canary", "odd/modal": "canary"}
	var all []sandboxer.Handle
	x, err := opensWith(t, f, `{"secret":"modal","by":"tenant"}`, secrets, &all)
	if err != nil {
		t.Fatal(err)
	}
	consumers, err := opensWith(t, f, `{"secret":"modal","by":"consumer"}`, secrets, &all)
	if err != nil {
		t.Fatal(err)
	}
	handles := map[string]sandboxer.Handle{}
	for who, x := range map[string]*extension{"acme": x, "rival": x, "seven": consumers} {
		spec := order("box-" + who)
		spec.Tenant = strings.Replace(who, "seven", "acme", 1)
		if spec.Credential, err = x.Credential().Ref(spec.Tenant, "seven"); err != nil {
			t.Fatal(err)
		}
		spec.Credential.Version = 1
		h, err := x.Provision(ctx, spec)
		if err != nil || h.Credential != spec.Credential || f.accountOf(h.Ref) != "ak-"+who {
			t.Fatalf("Provision = %+v, %v", h, err)
		}
		if out, err := says(t, x, h, "echo $CANARY"); err != nil || out != "cafe\n" {
			t.Errorf("%s: %q, %v", who, out, err)
		}
		handles[who], all = h, append(all, h)
	}
	acme, rival := handles["acme"], handles["rival"]
	crossed := rival
	crossed.Credential = acme.Credential
	if l, err := x.IsAlive(ctx, crossed); l != sandboxer.Gone {
		t.Errorf("with acme's key, rival's is %s, %v", l, err)
	}
	if out, err := says(t, x, crossed, "echo in"); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("with acme's key, in rival's: %q, %v", out, err)
	}
	s, err := x.Snapshot(ctx, acme, "snap-1")
	if err != nil || s.Credential != acme.Credential {
		t.Fatalf("Snapshot = %+v, %v", s, err)
	}
	copied := order("copy")
	copied.Credential = rival.Credential
	_, err = x.RestoreFromSnapshot(ctx, copied, s)
	wantKind(t, "acme's snapshot with rival's key", err, sandboxer.NotFound)
	listed := func() (ids []string, last error) {
		for h, err := range x.ListRunning(ctx, "test") {
			if err == nil {
				ids = append(ids, h.SandboxID+" "+h.Credential.Tenant)
			}
			last = err
		}
		slices.Sort(ids)
		return ids, last
	}
	if ids, err := listed(); err != nil || !slices.Equal(ids, []string{"box-acme acme", "box-rival rival", "box-seven acme"}) {
		t.Errorf("listed are %q, %v", ids, err)
	}
	if found, err := x.Discover(ctx, "box-rival"); err != nil || found.Handle.Credential != rival.Credential {
		t.Errorf("Discover = %+v, %v", found, err)
	}
	if out, err := says(t, x, sandboxer.Handle{SandboxID: "box-rival"}, "echo found"); err != nil || out != "found\n" {
		t.Errorf("by its ID: %q, %v", out, err)
	}

	f.mu.Lock()
	delete(f.keys, "ak-acme") // it is revoked
	f.mu.Unlock()
	_, err = x.Teardown(ctx, acme)
	wantKind(t, "Teardown with a revoked key", err, sandboxer.Unavailable)
	if text := fmt.Sprintf("%+v %s", err, sandboxer.HintOf(err)); !strings.Contains(text, "secret modal (version 1)") || strings.Contains(text, "canary") || strings.Contains(text, "ak-acme") {
		t.Errorf("it says %s", text)
	}
	if l, err := x.IsAlive(ctx, acme); l != sandboxer.Unknown || !hosted.IsRefused(err) {
		t.Errorf("with a revoked key it is %s, %v", l, err)
	}
	x.agents.Drop(hosted.InAccount(hosted.For(ctx, acme.Credential), acme.Ref)) // an open connection would wait for its answer
	if _, err := says(t, x, acme, "true"); !hosted.IsRefused(err) {
		t.Errorf("Exec with a revoked key: %v", err)
	}
	if err := x.DropSnapshot(ctx, sandboxer.Snapshot{SnapshotID: "snap-1"}); !hosted.IsRefused(err) {
		t.Errorf("DropSnapshot with a revoked key: %v", err)
	}
	if ids, err := listed(); !hosted.IsRefused(err) || len(ids) != 2 {
		t.Errorf("listed are %q, %v", ids, err)
	}
	if out, err := says(t, x, rival, "echo yes"); err != nil || out != "yes\n" {
		t.Errorf("rival: %q, %v", out, err)
	}
	for tenant, want := range map[string]string{"acme": "refuses", "odd": "ak-…:as-…", "none": "was removed"} {
		spec := order("late-" + tenant)
		spec.Credential = sandboxer.SecretRef{Tenant: tenant, Name: "modal", Version: 1}
		_, err = x.Provision(ctx, spec)
		wantKind(t, "Provision with the key of "+tenant, err, sandboxer.Invalid) // no fault of Modal
		if text := fmt.Sprintf("%+v %s", err, sandboxer.HintOf(err)); !strings.Contains(text, want) || !strings.Contains(text, "sandboxer secret set modal") || strings.Contains(text, "canary") {
			t.Errorf("%s: it says %s", tenant, text)
		}
	}
	if remains, err := x.Forget(ctx, acme); err != nil || len(remains) != 1 || !strings.Contains(remains[0], acme.Ref) {
		t.Errorf("Forget = %q, %v", remains, err)
	}
	if _, err := x.Teardown(ctx, rival); err != nil {
		t.Error(err)
	}
	if ids := f.running(); len(ids) != 2 {
		t.Errorf("Modal has %q", ids)
	}
}

// An operator's secret that is missing, or no token, is told where extensions are listed; once it is right, and after it changed, it works.
func TestOperatorsKey(t *testing.T) {
	f, secrets := newFake(t), map[string]sandboxer.Secret{}
	f.keys["ak-new"] = "as-new"
	open := func() (*extension, error) {
		return opensWith(t, f, `{}`, secrets, new([]sandboxer.Handle))
	}
	_, err := open()
	if wantKind(t, "without the secret", err, sandboxer.NotFound); !strings.HasPrefix(sandboxer.Message(err), "needs a key: ") || !strings.HasSuffix(sandboxer.HintOf(err), ": sandboxer secret set --operator modal") {
		t.Errorf("it says %v (%s)", err, sandboxer.HintOf(err))
	}
	secrets["modal"] = "as-canary"
	_, err = open()
	wantKind(t, "with half a token", err, sandboxer.Unavailable)
	if text := fmt.Sprintf("%+v %s", err, sandboxer.HintOf(err)); !strings.Contains(text, "ak-…:as-…") || !strings.Contains(text, "sandboxer secret set --operator modal") || strings.Contains(text, "canary") {
		t.Errorf("it says %s", text)
	}
	secrets["modal"] = fakeKey
	x, err := open()
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []sandboxer.Secret{fakeKey, "ak-new:as-new"} {
		secrets["modal"] = key
		for _, err := range x.ListRunning(t.Context(), "test") {
			t.Errorf("with %s: %v", key, err)
		}
		f.mu.Lock()
		f.keys = map[string]string{"ak-new": "as-new"}
		f.mu.Unlock()
	}
}

// Accounts without a call are closed after a while, or when there are too many; one with a call stays.
func TestAccounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conns := map[*modal.Client]*grpc.ClientConn{}
		as := accounts{connect: func(sandboxer.Secret) (*modal.Client, error) {
			conn, err := grpc.NewClient("127.0.0.1:1", grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				return nil, err
			}
			p := modal.ClientParams{ControlPlaneClient: pb.NewModalClientClient(conn), ControlPlaneConn: conn}
			alloc(&p.Config)
			client, err := modal.NewClientWithOptions(&p)
			conns[client] = conn
			return client, err
		}}
		take := func(tenant string, key sandboxer.Secret) (*account, func()) {
			t.Helper()
			a, done, err := as.take(sandboxer.SecretRef{Tenant: tenant, Name: "modal", Version: 1}, key)
			if err != nil {
				t.Fatal(err)
			}
			return a, done
		}
		closed := func(a *account) bool { return conns[a.client].GetState() == connectivity.Shutdown }
		kept := func() (n int, two bool) {
			synctest.Wait()
			as.mu.Lock()
			defer as.mu.Unlock()
			return len(as.kept), as.kept[sandboxer.SecretRef{Tenant: "2", Name: "modal", Version: 1}] != nil
		}
		busy, end := take("acme", fakeKey)
		for range 2 {
			if _, done := take("acme", fakeKey); len(conns) != 1 {
				t.Errorf("%d clients of one account", len(conns))
			} else {
				done()
			}
		}
		for i := range keptAccounts + 3 {
			_, done := take(fmt.Sprint(i), fakeKey)
			done()
			time.Sleep(time.Second)
		}
		if n, two := kept(); n != keptAccounts+1 || two {
			t.Errorf("%d accounts are kept, the oldest but two among them: %t", n, two)
		}
		time.Sleep(2 * keepAccount)
		if n, _ := kept(); n != 1 || closed(busy) {
			t.Errorf("%d accounts are kept, and one with a call is closed: %t", n, closed(busy))
		}
		next, done := take("acme", "ak-2:as-2") // the key was replaced
		if next == busy || next.name == busy.name || closed(busy) {
			t.Error("a call with the former key lost its client")
		}
		end()
		if !closed(busy) || closed(next) {
			t.Error("the former client is open after its last call, or the new one is closed")
		}
		as.close()
		if done(); !closed(next) {
			t.Error("a client is open after the end")
		}
	})
}
