package provisioner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a server with deer-flow's doors in front of ext.fake.
type rig struct {
	*edgetest.Broker
	t    *testing.T
	p    *Provisioner
	log  *edgetest.Log
	url  string
	key  string
	http *http.Client
}

// as is ctx for an administrator.
func as(ctx context.Context, tenant string) context.Context {
	return sandboxer.WithPrincipal(ctx, sandboxer.Principal{Tenant: tenant, Actor: "test", Scopes: sandboxer.Scopes()})
}

func newRig(t *testing.T, o Options, extend func(*fake.Extension) sandboxer.Extension) *rig {
	t.Helper()
	r := &rig{t: t, log: &edgetest.Log{}, http: &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(r.http.CloseIdleConnections)
	r.Broker = edgetest.NewBroker(t, edgetest.BrokerOptions{Extend: extend, Profiles: []sandboxer.Profile{
		{ID: "profile.df", Extension: "ext.fake", TTL: time.Hour, MaxTTL: 24 * time.Hour, OnIdle: sandboxer.ExpiryPause},
	}})
	o.Profile, o.Owner, o.Log = "profile.df", "test", r.log.Logger()
	r.p = New(r.Manager, o)
	r.p.data = filepath.Join(t.TempDir(), "user-data") // commands of ext.fake see this machine
	r.p.patience = edgetest.Patience
	e := edge.New(r.Manager, edge.Options{Log: r.log.Logger()})
	for _, d := range r.p.Doors() {
		e.Mount(d)
	}
	s := edgetest.Serve(t, edgetest.Listen{Unix: edge.ListenUnix, TCP: edge.ListenTCP, TLS: edge.ListenTLS}, r.log.Logger(), e.Serve)
	r.url = "http://" + s.TCP
	r.key = r.newKey("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	t.Cleanup(func() { s.Stop(); r.p.Close() })
	return r
}

func (r *rig) newKey(tenant string, scopes ...sandboxer.Scope) string {
	r.t.Helper()
	k, _, err := r.CreateKey(as(r.t.Context(), "default"), manager.NewKey{Name: tenant, Tenant: tenant, Scopes: scopes})
	if err != nil {
		r.t.Fatal(err)
	}
	return k.Reveal()
}

// ask sends a request with a key, "" for none, and returns the status and the answer.
func (r *rig) ask(key, method, path, body string, header ...string) (int, string) {
	r.t.Helper()
	if strings.HasPrefix(path, "/") {
		path = r.url + path
	}
	req, err := http.NewRequestWithContext(r.t.Context(), method, path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	if key != "" {
		req.Header.Set("X-API-Key", key)
	}
	for i := 0; i+1 < len(header); i += 2 {
		if req.Header.Set(header[i], header[i+1]); header[i] == "Host" {
			req.Host = header[i+1]
		}
	}
	res, err := r.http.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return res.StatusCode, strings.TrimSpace(string(b))
}

// create is a create that must succeed.
func (r *rig) create(body string) (a answer) {
	r.t.Helper()
	status, got := r.ask(r.key, "POST", "/api/sandboxes", body)
	if err := json.Unmarshal([]byte(got), &a); status != 200 || err != nil {
		r.t.Fatalf("create: %d %s", status, got)
	}
	return a
}

// want asks and compares, with the answer if that is not "".
func (r *rig) want(status int, answer, method, path, body string) string {
	r.t.Helper()
	gotStatus, got := r.ask(r.key, method, path, body)
	if gotStatus != status || answer != "" && got != answer {
		r.t.Errorf("%s %s %s: %d %s\nwant %d %s", method, path, body, gotStatus, got, status, answer)
	}
	return got
}

const (
	alice  = "dc977b840cb8638e" // of alice's thread-1
	order1 = `{"sandbox_id":"` + alice + `","thread_id":"thread-1","user_id":"alice","include_legacy_skills":false,"provision_lark_cli_runtime":false,"provision_lark_cli_broker":false,"of_a_later_revision":{"x":[1]}}`
)

// TestAPI: the provisioner's API to the letter, as its client reads it.
func TestAPI(t *testing.T) {
	r := newRig(t, Options{}, nil)
	if s, b := r.ask("", "GET", "/health", ""); s != 200 || b != `{"status":"ok"}` {
		t.Errorf("health: %d %s", s, b)
	}
	for _, key := range []string{"", "wrong", "sbx_key_abcdefgh_wrong"} {
		if s, b := r.ask(key, "PUT", "/api/sandboxes", ""); s != 401 || b != "Unauthorized" {
			t.Errorf("a wrong method with the key %q: %d %s", key, s, b)
		}
		for _, path := range []string{"/api/", "/api/none", "/api/sandboxes/x/y", "/api//sandboxes", "/api/sandboxes", "/api/sandboxes/x", "/api/capabilities", "/api/reconciliation/sandboxes/x"} {
			if s, b := r.ask(key, "GET", path, ""); s != 401 || b != "Unauthorized" {
				t.Errorf("%s with the key %q: %d %s", path, key, s, b)
			}
		}
	}
	if s, b := r.ask(r.newKey("acme", sandboxer.ScopeRead), "POST", "/api/sandboxes", order1); s != 403 || !strings.HasPrefix(b, `{"detail":"this needs the scope`) {
		t.Errorf("a create with a key that reads: %d %s", s, b)
	}
	r.want(200, `{"lark_cli_broker_image":false,"lark_cli_init_image":false,"mount_contract_version":2}`, "GET", "/api/capabilities", "")
	r.want(200, `{"count":0,"sandboxes":[]}`, "GET", "/api/sandboxes", "")
	r.want(404, `{"detail":"Sandbox '`+alice+`' not found"}`, "GET", "/api/sandboxes/"+alice, "")
	r.want(404, `{"detail":"Not Found"}`, "GET", "/api/sandboxes/"+alice+"/x", "")
	r.want(405, `{"detail":"Method Not Allowed"}`, "PUT", "/api/sandboxes", "")
	absent := `{"backend_namespace":"test/acme","sandbox_id":"` + alice + `","status":"absent"}`
	r.want(200, absent, "GET", "/api/reconciliation/sandboxes/"+alice, "")

	for _, c := range []struct {
		status       int
		body, answer string
	}{
		{422, `{`, ""}, {422, ``, ""}, {422, `{"sandbox_id":"a"`, ""},
		{422, `[7]`, `{"detail":[{"type":"model_attributes_type","loc":["body"],"msg":"Input should be a valid dictionary or object to extract fields from","input":[7]}]}`},
		{422, `{"sandbox_id":7}`, `{"detail":[{"type":"string_type","loc":["body","sandbox_id"],"msg":"Input should be a valid string","input":7}]}`},
		{422, `{"sandbox_id":"a","include_legacy_skills":1}`, `{"detail":[{"type":"bool_type","loc":["body","include_legacy_skills"],"msg":"Input should be a valid boolean","input":1}]}`},
		{422, `{"sandbox_id":"a","extra_mounts":7}`, `{"detail":[{"type":"list_type","loc":["body","extra_mounts"],"msg":"Input should be a valid list","input":7}]}`},
		{422, `{"sandbox_id":"a","extra_mounts":[{},7]}`, `{"detail":[{"type":"model_attributes_type","loc":["body","extra_mounts",1],"msg":"Input should be a valid dictionary or object to extract fields from","input":7}]}`},
		{422, `{"sandbox_id":"a","extra_mounts":[{},{"host_path":7}]}`, `{"detail":[{"type":"string_type","loc":["body","extra_mounts",1,"host_path"],"msg":"Input should be a valid string","input":7}]}`},
		{422, `{"sandbox_id":"a"} x`, ""},
		{422, `{"sandbox_id":"a","extra_mounts":[{"host_path":"/x"}]}`, `{"detail":[{"type":"missing","loc":["body","extra_mounts",0,"container_path"],"msg":"Field required","input":{"host_path":"/x"}}]}`},
		{422, `{"thread_id":"t"}`, `{"detail":[{"type":"missing","loc":["body","sandbox_id"],"msg":"Field required","input":{"thread_id":"t"}}]}`},
		{422, `{"sandbox_id":"a","thread_id":"a b"}`, `{"detail":[{"type":"string_pattern_mismatch","loc":["body","thread_id"],"msg":"String should match pattern '^[A-Za-z0-9_-]{1,64}$'","input":"a b"}]}`},
		{422, `{"sandbox_id":"a","user_id":"../x"}`, `{"detail":[{"type":"string_pattern_mismatch","loc":["body","user_id"],"msg":"String should match pattern '^[A-Za-z0-9_\\-]+$'","input":"../x"}]}`},
		{422, `{"sandbox_id":"a","user_id":"` + strings.Repeat("u", maxUser+1) + `"}`, `{"detail":[{"type":"string_too_long","loc":["body","user_id"],"msg":"String should have at most 255 characters","input":"` + strings.Repeat("u", maxUser+1) + `"}]}`},
		{422, `{"sandbox_id":"../x"}`, ""}, {422, `{"sandbox_id":""}`, ""},
		{409, `{"sandbox_id":"a","required_mount_contract_version":1}`, `{"detail":{"actual":2,"code":"mount_contract_changed"}}`},
		{413, `{"sandbox_id":"` + strings.Repeat("a", maxBody) + `"}`, ""},
	} {
		r.want(c.status, c.answer, "POST", "/api/sandboxes", c.body)
	}
	if n := len(r.World.Live()); n != 0 {
		t.Errorf("refused creates made %d sandboxes", n)
	}

	a := r.create(order1)
	id := sandboxer.ObjectID("acme", alice)
	if want := (answer{alice, a.SandboxURL, "Running", "alice", "thread-1", 2}); a != want || !strings.HasPrefix(a.SandboxURL, r.url+"/s/"+id+"/"+access.BearerTokenPrefix) {
		t.Errorf("create = %+v", a)
	}
	text, _ := json.Marshal(a)
	for range 2 {
		r.want(200, string(text), "POST", "/api/sandboxes", order1)
	}
	r.want(200, string(text), "POST", "/api/sandboxes", strings.Replace(order1, `{`, `{"required_mount_contract_version":2,`, 1))
	r.want(200, string(text), "GET", "/api/sandboxes/"+alice, "")
	r.want(200, `{"count":1,"sandboxes":[`+string(text)+`]}`, "GET", "/api/sandboxes", "")
	var found map[string]any
	json.Unmarshal([]byte(r.want(200, "", "GET", "/api/reconciliation/sandboxes/"+alice, "")), &found)
	if want := (map[string]any{"sandbox_id": alice, "status": "found", "backend_namespace": "test/acme", "incarnation_id": id + "-g1", "sandbox_url": a.SandboxURL,
		"user_id": "alice", "thread_id": "thread-1", "mount_contract_version": 2.0}); !reflect.DeepEqual(found, want) {
		t.Errorf("reconciliation = %v, want %v", found, want)
	}
	sb, err := r.Get(as(t.Context(), "acme"), "acme/"+alice)
	if err != nil || sb.Thread != (sandboxer.Thread{User: "alice", ID: "thread-1"}) || sb.Consumer.ID != "alice" {
		t.Errorf("the record: %v, %+v", err, sb)
	}
	for _, d := range append([]string{""}, userDirs...) {
		if st, err := os.Stat(filepath.Join(r.p.data, d)); err != nil || st.Mode().Perm() != 0o777 {
			t.Errorf("user-data/%s: %v", d, err)
		}
	}

	// An ID is one user's and thread's, and a tenant's.
	r.want(409, `{"detail":"sandbox `+alice+` belongs to another user or thread"}`, "POST", "/api/sandboxes", strings.Replace(order1, `"alice"`, `"bob"`, 1))
	r.want(409, "", "POST", "/api/sandboxes", strings.Replace(order1, `"thread-1"`, `"thread-2"`, 1))
	other := r.newKey("other", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	if s, b := r.ask(other, "GET", "/api/sandboxes/"+alice, ""); s != 404 {
		t.Errorf("another tenant: %d %s", s, b)
	}
	if s, b := r.ask(other, "DELETE", "/api/sandboxes/"+alice, ""); s != 200 || b != `{"ok":true,"sandbox_id":"`+alice+`"}` {
		t.Errorf("another tenant's delete: %d %s", s, b)
	}
	r.want(200, string(text), "GET", "/api/sandboxes/"+alice, "")

	// Without a thread the ID stands for one; an ID that is not the thread's is as good.
	if a := r.create(`{"sandbox_id":"3f2a91bc","thread_id":null}`); a.UserID != "default" || a.ThreadID != "3f2a91bc" {
		t.Errorf("without a thread: %+v", a)
	}
	if a := r.create(`{"sandbox_id":"abc123","thread_id":"t1","user_id":"alice"}`); a.ThreadID != "t1" {
		t.Errorf("an ID that is not the thread's: %+v", a)
	}
	long := strings.Repeat("u", maxUser)
	longID, err := sandboxer.Thread{User: long, ID: "t"}.SandboxID()
	if err != nil {
		t.Fatal(err)
	}
	if a := r.create(`{"sandbox_id":"` + longID + `","thread_id":"t","user_id":"` + long + `"}`); a.UserID != long {
		t.Errorf("a long user: %+v", a)
	}
	// A sandbox that was not made here is not shown here: deer-flow ends what it finds.
	if _, err := r.Create(as(t.Context(), "acme"), sandboxer.CreateRequest{Profile: "df", Inputs: map[string]string{"sandbox_id": "mine"}}); err != nil {
		t.Fatal(err)
	}
	r.want(404, "", "GET", "/api/sandboxes/mine", "")
	r.want(200, `{"ok":true,"sandbox_id":"mine"}`, "DELETE", "/api/sandboxes/mine", "")
	r.want(409, "", "POST", "/api/sandboxes", `{"sandbox_id":"mine"}`)
	if sb, err := r.Get(as(t.Context(), "acme"), "acme/mine"); err != nil || sb.State != sandboxer.Running {
		t.Errorf("it is %v, %v", sb, err)
	}

	ok := `{"ok":true,"sandbox_id":"` + alice + `"}`
	r.want(200, ok, "DELETE", "/api/sandboxes/"+alice, "")
	r.want(200, ok, "DELETE", "/api/sandboxes/"+alice, "")
	r.want(200, `{"ok":true,"sandbox_id":"never..."}`, "DELETE", "/api/sandboxes/never...", "")
	r.want(404, "", "GET", "/api/sandboxes/"+alice, "")
	r.want(200, absent, "GET", "/api/reconciliation/sandboxes/"+alice, "")
	again := r.create(order1)
	if again.SandboxURL == a.SandboxURL {
		t.Error("the next sandbox has the URL of the one before")
	}
	if got := r.want(200, "", "GET", "/api/reconciliation/sandboxes/"+alice, ""); !strings.Contains(got, id+"-g2") {
		t.Errorf("the next incarnation: %s", got)
	}
}

// inside says what a call inside of a sandbox comes to: the status of its URL for a path that nothing
// is at, which nothing but the door answers.
func (r *rig) inside(url string) int {
	s, _ := r.ask("", "GET", url+"/nothing", "")
	return s
}

// TestURL: the token in a URL is all that lets somebody in, lasts as long as the sandbox, and is in no log.
func TestURL(t *testing.T) {
	r := newRig(t, Options{}, nil)
	a, b := r.create(`{"sandbox_id":"a"}`), r.create(`{"sandbox_id":"b"}`)
	const in = http.StatusBadRequest // past the token, where nothing is
	if s := r.inside(a.SandboxURL); s != in {
		t.Errorf("with the token: %d", s)
	}
	cut := strings.LastIndexByte(a.SandboxURL, '/')
	token := a.SandboxURL[cut+1:]
	for _, url := range []string{
		a.SandboxURL[:cut], a.SandboxURL[:cut] + "/", a.SandboxURL + "A", a.SandboxURL[:len(a.SandboxURL)-1], b.SandboxURL[:strings.LastIndexByte(b.SandboxURL, '/')+1] + token,
		a.SandboxURL[:cut+1] + strings.ToUpper(token), a.SandboxURL[:cut+1] + "sbx_box_", r.url + "/s", r.url + "/s//" + token,
	} {
		if s := r.inside(url); s != http.StatusUnauthorized && url != r.url+"/s" {
			t.Errorf("%s: %d", url, s)
		}
	}
	// The API's keys are no way in, and the token is none to the API.
	if s, _ := r.ask(r.key, "GET", a.SandboxURL[:cut]+"/"+r.key+"/v1/sandbox", ""); s != http.StatusUnauthorized {
		t.Errorf("with a key for a token: %d", s)
	}
	if s, _ := r.ask(token, "GET", "/api/sandboxes", ""); s != http.StatusUnauthorized {
		t.Errorf("with a token for a key: %d", s)
	}
	r.want(200, "", "DELETE", "/api/sandboxes/a", "")
	if s, body := r.ask("", "POST", a.SandboxURL+"/v1/bash/exec", "{}"); s != http.StatusGone || body != `{"data":null,"hint":"create a new one, which has a URL of its own","message":"this sandbox has ended","success":false}` {
		t.Errorf("when it has ended: %d %s", s, body)
	}
	again := r.create(`{"sandbox_id":"a"}`)
	if s := r.inside(a.SandboxURL); s != http.StatusGone {
		t.Errorf("when there is another one: %d", s)
	}
	if s := r.inside(again.SandboxURL); s != in {
		t.Errorf("the other one: %d", s)
	}
	for _, secret := range []string{token, token[len(access.BearerTokenPrefix):], again.SandboxURL[cut+1:]} {
		if strings.Contains(r.log.String(), secret) {
			t.Errorf("the log has the token %s", secret)
		}
	}
	if !strings.Contains(r.log.String(), "/[token]/") {
		t.Error("the log shows no calls")
	}
}

// gate is ext.fake whose sandboxes are made, and ended, when the test lets them.
type gate struct {
	*fake.Extension
	provision, teardown func(context.Context) error
}

func (g *gate) Provision(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
	if g.provision != nil {
		if err := g.provision(ctx); err != nil {
			return sandboxer.Handle{}, err
		}
	}
	return g.Extension.Provision(ctx, s)
}

func (g *gate) Teardown(ctx context.Context, h sandboxer.Handle) (sandboxer.CleanupReport, error) {
	if g.teardown != nil {
		if err := g.teardown(ctx); err != nil {
			return sandboxer.CleanupReport{}, err
		}
	}
	return g.Extension.Teardown(ctx, h)
}

// held returns what waits until release, and tells of everybody who comes.
func held() (wait func(context.Context) error, came chan struct{}, release func()) {
	open := make(chan struct{})
	came = make(chan struct{}, 100)
	return func(ctx context.Context) error {
		came <- struct{}{}
		select {
		case <-open:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}, came, sync.OnceFunc(func() { close(open) })
}

// TestCreates: those who ask for one ID at the same time get one sandbox, with one answer, also
// where it is paused.
func TestCreates(t *testing.T) {
	wait, came, release := held()
	r := newRig(t, Options{}, func(x *fake.Extension) sandboxer.Extension { return &gate{Extension: x, provision: wait} })
	defer release()
	for _, what := range []string{"new", "paused"} {
		const n = 20
		got := make(chan string, n)
		for range n {
			go func() {
				s, b := r.ask(r.key, "POST", "/api/sandboxes", order1)
				got <- fmt.Sprint(s, b)
			}()
		}
		if what == "new" {
			edgetest.Receive(t, came, "a create at the backend")
			release()
		}
		first := edgetest.Receive(t, got, "an answer")
		for range n - 1 {
			if next := edgetest.Receive(t, got, "an answer"); next != first || !strings.HasPrefix(next, "200") {
				t.Errorf("%s: one is told %s, another %s", what, first, next)
			}
		}
		if n := len(r.World.Live()); n != 1 {
			t.Errorf("%s: there are %d sandboxes", what, n)
		}
		if _, err := r.Pause(as(t.Context(), "acme"), "acme/"+alice, manager.PauseRequest{}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestUserDataIsWritable: also where /mnt/user-data is there before, as with mounts below it; those keep their modes.
func TestUserDataIsWritable(t *testing.T) {
	r := newRig(t, Options{}, nil)
	mount := filepath.Join(r.p.data, userDirs[0])
	if err := os.MkdirAll(mount, 0o755); err != nil {
		t.Fatal(err)
	}
	r.create(order1)
	for dir, want := range map[string]fs.FileMode{r.p.data: 0o777, mount: 0o755, filepath.Join(r.p.data, userDirs[1]): 0o777} {
		if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want %v", dir, st, err, want)
		}
	}
}

// TestPending: a create that takes long is answered before the client gives it up, and goes on.
func TestPending(t *testing.T) {
	wait, came, release := held()
	r := newRig(t, Options{}, func(x *fake.Extension) sandboxer.Extension { return &gate{Extension: x, provision: wait} })
	defer release()
	first := make(chan answer, 1)
	go func() { first <- r.create(order1) }()
	edgetest.Receive(t, came, "a create at the backend") // it is written down by now
	r.p.patience = 100 * time.Millisecond
	a := r.create(order1)
	if a.Status != "Pending" {
		t.Errorf("create = %+v", a)
	}
	pending, _ := json.Marshal(a)
	r.want(200, string(pending), "GET", "/api/sandboxes/"+alice, "")
	if err := r.boxes(a, func(ctx context.Context, b boxes) error { return b.Awake(ctx, "") }); sandboxer.KindOf(err) != sandboxer.Unavailable || sandboxer.RetryAfterOf(err) == 0 {
		t.Errorf("a call for one that does not run yet: %v", err)
	}
	r.p.patience = edgetest.Patience
	done := make(chan error, 1)
	go func() {
		done <- r.boxes(a, func(ctx context.Context, b boxes) error {
			return b.WriteFile(ctx, "", "/workspace/x", 0o600, strings.NewReader("x"))
		})
	}()
	release()
	if err := edgetest.Receive(t, done, "the call"); err != nil {
		t.Errorf("a call that waits for it: %v", err)
	}
	a.Status = "Running"
	if got := edgetest.Receive(t, first, "the answer to who waits"); got != a {
		t.Errorf("who waited is told %+v, not %+v", got, a)
	}
	running, _ := json.Marshal(a)
	r.want(200, string(running), "POST", "/api/sandboxes", order1)
	r.want(200, string(running), "GET", "/api/sandboxes/"+alice, "")
}

// boxes makes calls as the API inside does, for the bearer of a URL.
func (r *rig) boxes(a answer, do func(context.Context, boxes) error) error {
	parts := strings.Split(a.SandboxURL, "/")
	b, sb, err := r.p.bearer(r.t.Context(), parts[len(parts)-2], sandboxer.Secret(parts[len(parts)-1]))
	if err != nil {
		return err
	}
	return do(context.WithValue(r.t.Context(), visitKey{}, &visit{Bearer: b, sb: sb, patience: r.p.patience}), boxes{r.p})
}

// TestCreateAmidDelete: a create never gets the sandbox that is on its way out, and none that is not
// its own; a delete that takes long is answered.
func TestCreateAmidDelete(t *testing.T) {
	wait, came, release := held()
	r := newRig(t, Options{}, func(x *fake.Extension) sandboxer.Extension { return &gate{Extension: x, teardown: wait} })
	defer release()
	before := r.create(order1)
	deleted := make(chan string, 1)
	go func() {
		s, b := r.ask(r.key, "DELETE", "/api/sandboxes/"+alice, "")
		deleted <- fmt.Sprint(s, b)
	}()
	edgetest.Receive(t, came, "the teardown")
	r.want(404, "", "GET", "/api/sandboxes/"+alice, "")
	r.want(503, "", "GET", "/api/reconciliation/sandboxes/"+alice, "")
	if s := r.inside(before.SandboxURL); s != http.StatusGone {
		t.Errorf("a call while it ends: %d", s)
	}
	r.p.patience = 50 * time.Millisecond
	r.want(503, "", "POST", "/api/sandboxes", order1)
	r.p.patience = edgetest.Patience
	created := make(chan answer, 1)
	go func() { created <- r.create(order1) }()
	release()
	if got := edgetest.Receive(t, deleted, "the delete"); !strings.HasPrefix(got, `200{"ok":true`) {
		t.Errorf("delete = %s", got)
	}
	after := edgetest.Receive(t, created, "the create")
	if after.SandboxURL == before.SandboxURL || after.Status != "Running" {
		t.Errorf("create = %+v", after)
	}
	if s := r.inside(after.SandboxURL); s != http.StatusBadRequest {
		t.Errorf("a call to the next one: %d", s)
	}
}

// TestRequestsOfAURL: calls by the URL of a sandbox count for its tenant as those with a key do.
func TestRequestsOfAURL(t *testing.T) {
	r := newRig(t, Options{}, nil)
	a := r.create(order1)
	r.SetQuotas(sandboxer.Quotas{Tenants: map[string]sandboxer.Quota{"acme": {sandboxer.QuotaRequests: 1}}})
	for i, want := range []int{http.StatusBadRequest, http.StatusTooManyRequests} {
		if s := r.inside(a.SandboxURL); s != want {
			t.Errorf("call %d: %d; want %d", i+1, s, want)
		}
	}
	r.want(http.StatusTooManyRequests, "", "GET", "/api/sandboxes/"+alice, "")
}

// TestRaces: a hundred times the sandbox of one ID is deleted while others ask for it. All callers that get another
// than the one that is deleted get the same, which is left alone, and answers.
func TestRaces(t *testing.T) {
	r := newRig(t, Options{}, nil)
	before := r.create(order1)
	for round := range 100 {
		const n = 4
		got := make(chan answer, n)
		deleted := make(chan string, 1)
		go func() {
			s, b := r.ask(r.key, "DELETE", "/api/sandboxes/"+alice, "")
			deleted <- fmt.Sprint(s, b)
		}()
		for range n {
			go func() {
				var a answer
				status, text := r.ask(r.key, "POST", "/api/sandboxes", order1)
				if err := json.Unmarshal([]byte(text), &a); status != 200 || err != nil {
					a.Status = fmt.Sprint(status, text)
				}
				got <- a
			}()
		}
		if d := edgetest.Receive(t, deleted, "the delete"); !strings.HasPrefix(d, `200{"ok":true`) {
			t.Fatalf("round %d: delete = %s", round, d)
		}
		answers := []answer{r.create(order1)} // which is none of the deleted one
		for range n {
			if a := edgetest.Receive(t, got, "an answer"); a != before {
				answers = append(answers, a)
			}
		}
		for _, a := range answers {
			if a != answers[0] || a.Status != "Running" || a.SandboxURL == before.SandboxURL {
				t.Fatalf("round %d: %+v and %+v, after %+v", round, answers[0], a, before)
			}
		}
		if now, then := r.inside(answers[0].SandboxURL), r.inside(before.SandboxURL); now != http.StatusBadRequest || then != http.StatusGone {
			t.Fatalf("round %d: a call to it: %d; to the one before: %d", round, now, then)
		}
		if n := len(r.World.Live()); n != 1 {
			t.Fatalf("round %d: there are %d sandboxes", round, n)
		}
		before = answers[0]
	}
}

// TestPaused: what is paused counts as running, since the next call resumes it, is not listed, and
// keeps its URL. A command is a use until its end, and is ended with the sandbox.
func TestPaused(t *testing.T) {
	r := newRig(t, Options{}, nil)
	a := r.create(order1)
	text, _ := json.Marshal(a)
	admin := as(t.Context(), "acme")
	ref := "acme/" + alice
	pause := func() {
		t.Helper()
		if _, err := r.Pause(admin, ref, manager.PauseRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	state := func() sandboxer.State {
		sb, err := r.Get(admin, ref)
		if err != nil {
			t.Fatal(err)
		}
		return sb.State
	}
	pause()
	r.want(200, string(text), "GET", "/api/sandboxes/"+alice, "")
	r.want(200, `{"count":0,"sandboxes":[]}`, "GET", "/api/sandboxes", "")
	if s := state(); s != sandboxer.Paused {
		t.Errorf("looking at it made it %s", s)
	}
	r.want(200, string(text), "POST", "/api/sandboxes", order1)
	if s := state(); s != sandboxer.Running {
		t.Errorf("a create left it %s", s)
	}
	pause()
	if err := r.boxes(a, func(ctx context.Context, b boxes) error { return b.Awake(ctx, "") }); err != nil || state() != sandboxer.Running {
		t.Errorf("a call by its URL: %v; it is %s", err, state())
	}

	// While a command runs it is in use; a pause ends the command.
	started := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- r.boxes(a, func(ctx context.Context, b boxes) error {
			_, err := b.Exec(ctx, "", sandboxer.Cmd{Args: []string{"sh", "-c", "echo; sleep 1000"}, Stdout: writer(sync.OnceFunc(func() { close(started) }))})
			return err
		})
	}()
	edgetest.Receive(t, started, "the command")
	pause()
	if err := edgetest.Receive(t, ended, "the end of the command"); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("a command in a sandbox that is paused: %v", err)
	}
	r.want(200, "", "DELETE", "/api/sandboxes/"+alice, "")
	if err := r.boxes(a, func(ctx context.Context, b boxes) error { return nil }); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("by its URL when it has ended: %v", err)
	}
	if n := len(r.World.Live()); n != 0 {
		t.Errorf("%d are left", n)
	}
}

// midway is ext.fake that goes on with a file, and to the end of a directory, when its caller may not any more.
type midway struct {
	*fake.Extension
	came chan struct{}
	fail bool // says why, as a host does whose way is cut
}

func (m *midway) until(ctx context.Context) error {
	m.came <- struct{}{}
	<-ctx.Done()
	if m.fail {
		return context.Cause(ctx)
	}
	return nil
}

func (m *midway) ListFiles(ctx context.Context, h sandboxer.Handle, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		m.Extension.ListFiles(ctx, h, dir, after)(yield)
		if m.fail == (dir != "/workspace") { // of the others nothing but its files
			if err := m.until(ctx); err != nil {
				yield(sandboxer.FileInfo{}, err)
			}
		}
	}
}

func (m *midway) ReadFile(ctx context.Context, h sandboxer.Handle, name string) (io.ReadCloser, error) {
	f, err := m.Extension.ReadFile(ctx, h, name)
	if m.fail && err == nil {
		f = midRead{f, func() error { return m.until(ctx) }}
	}
	return f, err
}

type midRead struct {
	io.ReadCloser
	until func() error
}

func (r midRead) Read([]byte) (int, error) { return 0, r.until() }

// TestEndedMidway: a call during which its sandbox stops fails, says that of the sandbox rather than of files, and
// never passes what it has found by then for all there is.
func TestEndedMidway(t *testing.T) {
	for _, fail := range []bool{false, true} {
		m := &midway{came: make(chan struct{}, 100), fail: fail}
		r := newRig(t, Options{}, func(x *fake.Extension) sandboxer.Extension { m.Extension = x; return m })
		want := "503"
		if !fail { // the next directory finds that it has ended
			want = "410"
		}
		for path, body := range map[string]string{
			"/v1/file/list": `{"path":"/workspace","recursive":true}`,
			"/v1/file/find": `{"path":"/workspace","glob":"*.txt"}`,
			"/v1/file/grep": `{"path":"/workspace","pattern":"."}`,
		} {
			a := r.create(order1)
			if err := r.boxes(a, func(ctx context.Context, b boxes) error {
				in, err := b.awake(ctx)
				if err != nil {
					return err
				}
				return errors.Join(in.MakeDir(ctx, "/workspace/a/b"), b.WriteFile(ctx, "", "/workspace/a/x.txt", 0o600, strings.NewReader("x")))
			}); err != nil {
				t.Fatal(err)
			}
			got := make(chan string, 1)
			go func() {
				s, b := r.ask("", "POST", a.SandboxURL+path, body)
				got <- fmt.Sprint(s, " ", b)
			}()
			edgetest.Receive(t, m.came, "the call")
			r.want(200, "", "DELETE", "/api/sandboxes/"+alice, "")
			if s := edgetest.Receive(t, got, "the answer"); !strings.HasPrefix(s, want) || strings.Contains(s, "not_found") {
				t.Errorf("%s: %s, want %s", path, s, want)
			}
		}
	}

	// Whatever is asked for by somebody who came before it ended.
	r := newRig(t, Options{}, nil)
	a := r.create(order1)
	err := r.boxes(a, func(ctx context.Context, b boxes) error {
		r.want(200, "", "DELETE", "/api/sandboxes/"+alice, "")
		_, execErr := b.Exec(ctx, "", sandboxer.Cmd{Args: []string{"true"}})
		_, readErr := b.ReadFile(ctx, "", "/x")
		_, statErr := b.StatFile(ctx, "", "/x")
		var listErr error
		for _, err := range b.ListFiles(ctx, "", "/", "") {
			listErr = err
		}
		for i, err := range []error{
			execErr, readErr, statErr, listErr, b.WriteFile(ctx, "", "/x", 0o600, strings.NewReader("")),
		} {
			if !errors.Is(err, manager.ErrSandboxOver) || sandboxer.KindOf(err) == sandboxer.NotFound {
				t.Errorf("%d: %v", i, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

type writer func()

func (w writer) Write(p []byte) (int, error) { w(); return len(p), nil }

// TestFailedCreate: the error says why a sandbox could not be made, and nothing of it is left.
func TestFailedCreate(t *testing.T) {
	r := newRig(t, Options{}, nil)
	r.World.Inject(fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Failed, Times: 1})
	if got := r.want(500, "", "POST", "/api/sandboxes", order1); !strings.HasPrefix(got, `{"detail":"`) {
		t.Errorf("it says %s", got)
	}
	r.want(404, "", "GET", "/api/sandboxes/"+alice, "")
	r.World.Inject(fake.Fault{Verb: fake.VerbExec, Kind: sandboxer.Failed, Times: 1}) // files are made the other way
	r.create(order1)
	r.World.Inject(fake.Fault{Verb: fake.VerbExec, Kind: sandboxer.Unavailable}, fake.Fault{Verb: fake.VerbFiles, Kind: sandboxer.Denied})
	if got := r.want(403, "", "POST", "/api/sandboxes", `{"sandbox_id":"b"}`); !strings.Contains(got, "deerflow_profile") {
		t.Errorf("where users can have no files it says %s", got)
	}
	if n := len(r.World.Live()); n != 1 {
		t.Errorf("there are %d sandboxes, of which one can be used", n)
	}
}

// meddled is ext.fake whose first command meets what a test does, and fails then, as do its files for its caller.
type meddled struct {
	*fake.Extension
	once   sync.Once
	meddle func()
}

func (m *meddled) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (x sandboxer.Exit, err error) {
	first := false
	m.once.Do(func() { first = true })
	if !first {
		return m.Extension.Exec(ctx, h, cmd)
	}
	m.meddle()
	return x, sandboxer.E(sandboxer.Failed, nil, "the first command fails")
}

func (m *meddled) MakeDir(context.Context, sandboxer.Handle, string) error {
	return sandboxer.E(sandboxer.Failed, nil, "there are no files")
}

// TestFailedCreateAmidOthers: a create that cannot prepare what it has made leaves alone what others were given
// meanwhile, be it the same sandbox or the next one of the ID.
func TestFailedCreateAmidOthers(t *testing.T) {
	for what, do := range map[string]func(r *rig){
		"the same": func(*rig) {},
		"the next": func(r *rig) { r.want(200, "", "DELETE", "/api/sandboxes/"+alice, "") },
	} {
		m := &meddled{}
		r := newRig(t, Options{}, func(x *fake.Extension) sandboxer.Extension { m.Extension = x; return m })
		other := make(chan answer, 1)
		m.meddle = func() { do(r); other <- r.create(order1) }
		got := r.create(order1)
		if given := edgetest.Receive(t, other, "the other's answer"); got != given {
			t.Errorf("%s: one is told %+v, another %+v", what, got, given)
		}
		if s := r.inside(got.SandboxURL); s != http.StatusBadRequest {
			t.Errorf("%s: a call to it: %d", what, s)
		}
	}
}

// TestAnonymous: who sends no key is let in where that is wanted, from this machine alone, and
// neither by a proxy nor under another's name.
func TestAnonymous(t *testing.T) {
	r := newRig(t, Options{Anonymous: true}, nil)
	if s, b := r.ask("", "POST", "/api/sandboxes", `{"sandbox_id":"a"}`); s != 200 {
		t.Fatalf("create: %d %s", s, b)
	}
	if sb, err := r.Get(as(t.Context(), "default"), "default/a"); err != nil || sb.Tenant != "default" {
		t.Errorf("it is %v, %v", sb, err)
	}
	port := r.url[strings.LastIndexByte(r.url, ':'):]
	if s, b := r.ask("", "GET", "/api/sandboxes", "", "Host", "localhost"+port); s != 200 {
		t.Errorf("by the name localhost: %d %s", s, b)
	}
	for _, header := range [][]string{
		{"X-Forwarded-For", "10.0.0.1"}, {"X-Forwarded", "10.0.0.1"}, {"Forwarded", "for=10.0.0.1"}, {"Via", "1.1 x"}, {"X-Real-IP", "10.0.0.1"}, {"X-Client-IP", "10.0.0.1"},
		{"X-Cluster-Client-IP", "10.0.0.1"}, {"True-Client-IP", "10.0.0.1"}, {"CF-Connecting-IP", "10.0.0.1"}, {"Fastly-Client-IP", "10.0.0.1"}, {"X-Original-Forwarded-For", "10.0.0.1"},
		{"X-Envoy-External-Address", "10.0.0.1"}, {"X-API-Key", "wrong"}, {"X-API-Key", ""},
		{"Host", "evil.example.org"}, {"Host", "upstream"}, {"Host", "localhost"}, {"Host", "127.0.0.1:1"}, {"Host", "upstream" + port},
	} {
		if s, b := r.ask("", "GET", "/api/sandboxes", "", header...); s != 401 && s != 421 {
			t.Errorf("with %s: %d %s", header, s, b)
		}
	}
	// nginx asks by HTTP/1.0 unless configured otherwise, and does not say for whom it asks.
	c, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "GET /api/sandboxes HTTP/1.0\r\nHost: 127.0.0.1%s\r\nConnection: close\r\n\r\n", port)
	if b, err := io.ReadAll(c); err != nil || !strings.Contains(string(b), " 401 ") {
		t.Errorf("HTTP/1.0: %s, %v", b, err)
	}
	if s, b := r.ask("", "POST", "/api/sandboxes", `{"sandbox_id":"b"}`, "Sec-Fetch-Site", "cross-site"); s != 403 {
		t.Errorf("a page of another origin: %d %s", s, b)
	}
}

// TestLarkCLI: deer-flow asks for it whatever the server says it has, and its own server ignores that.
func TestLarkCLI(t *testing.T) {
	r := newRig(t, Options{}, nil)
	for _, body := range []string{
		`{"sandbox_id":"a","provision_lark_cli_runtime":true}`, `{"sandbox_id":"b","provision_lark_cli_broker":true,"provision_lark_cli_runtime":true}`,
	} {
		if s, b := r.ask(r.key, "POST", "/api/sandboxes", body); s != 200 || !strings.Contains(b, `"Running"`) {
			t.Errorf("%s: %d %s", body, s, b)
		}
	}
	if n := strings.Count(r.log.String(), "Lark CLI"); n != 1 {
		t.Errorf("it is told %d times", n)
	}
}

// TestSkillsOfUsers: those of deer-flow's own state are a user's, and mounted for each.
func TestSkillsOfUsers(t *testing.T) {
	dir := t.TempDir()
	home := filepath.Join(dir, "data/acme")
	for _, d := range []string{"shared/public", "shared/legacy", "data/acme/users/u/skills_view/legacy", "data/acme/users/u/skills_view/custom"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	p := &Provisioner{opts: Options{UserData: filepath.Join(dir, "data"), Skills: filepath.Join(dir, "shared"), MountRoots: []MountRoot{{Path: dir}}}, data: userDataPath}
	sources := func(tenant string, o order) map[string]string {
		mounts, err := p.mounts(tenant, o)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		for _, m := range mounts {
			if at, ok := strings.CutPrefix(m.Target, "/mnt/skills/"); ok {
				if !m.ReadOnly {
					t.Errorf("%s can be written to", m.Target)
				}
				got[at] = m.Source
			}
		}
		return got
	}
	own, shared := filepath.Join(home, "users/u/skills_view"), filepath.Join(dir, "shared")
	for _, c := range []struct {
		tenant string
		o      order
		want   map[string]string
	}{
		{"acme", order{user: "u", thread: "t"}, map[string]string{"public": shared + "/public", "custom": own + "/custom", "legacy": own + "/legacy"}},
		{"acme", order{user: "other", thread: "t", legacy: true}, map[string]string{"public": shared + "/public", "legacy": shared + "/legacy"}},
		{"rival", order{user: "u", thread: "t"}, map[string]string{"public": shared + "/public"}},
		{"acme", order{user: "u", thread: "t", mounts: []mountBody{{dir + "/mine", "/mnt/skills/custom", true}}},
			map[string]string{"public": shared + "/public", "custom": dir + "/mine", "legacy": own + "/legacy"}},
	} {
		if got := sources(c.tenant, c.o); !maps.Equal(got, c.want) {
			t.Errorf("of %s, %s: %v\nwant %v", c.tenant, c.o.user, got, c.want)
		}
	}
}

// TestMissingSources: what may be written to is made where it is missing, within the roots alone and through no link.
func TestMissingSources(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"state", "shared", "outside"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, to := range []string{"../outside", "shared"} {
		if err := os.Symlink(to, filepath.Join(dir, "state", filepath.Base(to)+"-link")); err != nil {
			t.Fatal(err)
		}
	}
	p := &Provisioner{opts: Options{MountRoots: []MountRoot{{Path: filepath.Join(dir, "shared"), ReadOnly: true}, {Path: filepath.Join(dir, "state")}}}, data: userDataPath}
	there := func(name string) bool {
		_, err := os.Lstat(filepath.Join(dir, name))
		return err == nil
	}
	for _, c := range []struct {
		source       string
		readOnly, ok bool
		made         string
	}{
		{"state/users/u/data", false, true, "state/users/u/data"},
		{"state/users/u/data", false, true, "state/users/u/data"},
		{"state/missing", true, true, ""},
		{"shared/missing", true, true, ""},
		{"state/outside-link/x", false, true, ""}, // for the extension to refuse
		{"state/shared-link/x", false, false, ""},
		{"shared/x", false, false, ""},
	} {
		_, err := p.mounts("acme", order{user: "u", thread: "t", mounts: []mountBody{{filepath.Join(dir, c.source), "/mnt/integrations/lark-cli/data", c.readOnly}}})
		if (err == nil) != c.ok || err != nil && sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%s: %v", c.source, err)
		}
		if c.made != "" && !there(c.made) {
			t.Errorf("%s is not made", c.made)
		}
	}
	for _, name := range []string{"state/missing", "shared/missing", "outside/x", "shared/x"} {
		if there(name) {
			t.Errorf("%s is made", name)
		}
	}
}

// TestMounts: what is mounted, and what is refused, by words of the request.
func TestMounts(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"data", "skills/public", "skills/legacy", "state/acp"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	state := filepath.Join(dir, "state")
	o := Options{UserData: filepath.Join(dir, "data"), Skills: filepath.Join(dir, "skills"), MountRoots: []MountRoot{{Path: state}, {Path: filepath.Join(dir, "shared"), ReadOnly: true}}}
	p := &Provisioner{opts: o, data: userDataPath}
	at := func(host, container string, readOnly bool) mountBody { return mountBody{host, container, readOnly} }
	ord := func(mounts ...mountBody) order { return order{id: "a", user: "u", thread: "t", mounts: mounts} }
	user := func(tenant string) (all []sandboxer.Mount) {
		for _, d := range userDirs {
			all = append(all, sandboxer.Mount{Source: filepath.Join(dir, "data", tenant, "users/u/threads/t/user-data", d), Target: "/mnt/user-data/" + d})
		}
		return all
	}
	public := sandboxer.Mount{Source: filepath.Join(dir, "skills/public"), Target: "/mnt/skills/public", ReadOnly: true}
	legacy := sandboxer.Mount{Source: filepath.Join(dir, "skills/legacy"), Target: "/mnt/skills/legacy", ReadOnly: true}
	acp := sandboxer.Mount{Source: state + "/acp", Target: "/mnt/acp-workspace", ReadOnly: true}
	full := ord(at(state+"/x/../acp", "/mnt/acp-workspace/", true))
	full.legacy = true
	got, err := p.mounts("acme", full)
	if want := append(user("acme"), public, legacy, acp); err != nil || !slices.Equal(got, want) {
		t.Errorf("mounts = %v, %v\nwant %v", got, err, want)
	}
	if !p.standsFor(got) || p.standsFor([]sandboxer.Mount{{Source: "/etc", Target: "/x", ReadOnly: true}}) || p.standsFor([]sandboxer.Mount{{Source: public.Source, Target: "/x"}}) {
		t.Error("the operator stands for other mounts than he said")
	}
	if err := sandboxer.CheckMounts(got, "/workspace"); err != nil {
		t.Errorf("no sandbox can have them: %v", err)
	}
	for _, m := range user("acme") {
		if st, err := os.Stat(m.Source); err != nil || st.Mode().Perm() != 0o750 {
			t.Errorf("%s: %v", m.Source, err)
		}
	}
	long := order{id: "a", user: strings.Repeat("u", maxUser), thread: "t"}
	if got, err := p.mounts("acme", long); err != nil || !strings.Contains(got[0].Source, "/users/"+long.user+"/") {
		t.Errorf("the directories of a long user: %v, %v", got, err)
	}
	for _, tenant := range []string{"../..", "a/b", "..", ".", "", "ä"} { // the name of a tenant is any text
		if got, err := p.mounts(tenant, ord()); err != nil || !strings.HasPrefix(got[0].Source, filepath.Join(dir, "data/t-")) {
			t.Errorf("the directory of tenant %q: %v, %v", tenant, got, err)
		}
	}
	if a, b := dirName("a/b"), dirName(dirName("a/b")); a == b {
		t.Errorf("two tenants have the directory %s", a)
	}

	var many []mountBody
	for i := range maxMounts + 1 {
		many = append(many, at(state, fmt.Sprint("/mnt/", i), true))
	}
	for what, ms := range map[string][]mountBody{
		"11 mounts are too many":                             many,
		`host path "acp" of /mnt/acp-workspace`:              {at("acp", "/mnt/acp-workspace", true)},
		`host path "C:\\state" of`:                           {at(`C:\state`, "/mnt/acp-workspace", true)},
		"/etc is in no directory":                            {at("/etc", "/mnt/acp-workspace", true)},
		"state2 is in no directory":                          {at(state+"2", "/mnt/acp-workspace", true)},
		"etc is in no directory that":                        {at(state+"/../../../../../../etc", "/mnt/acp-workspace", true)},
		"is in no directory that may be mounted for writing": {at(filepath.Join(dir, "shared/x"), "/mnt/integrations/lark-cli/data", false)},
		`container path "mnt/x" is not absolute`:             {at(state, "mnt/x", true)},
		"mounts at /mnt/user-data/workspace are not allowed": {at(state, "/mnt/user-data/workspace", true)},
		"mounts at /etc are not allowed":                     {at(state, "/mnt/acp-workspace/../../etc", true)},
		"/mnt/acp-workspace is given twice":                  {at(state, "/mnt/acp-workspace", true), at(state, "/mnt//acp-workspace/", true)},
		"must be read-only":                                  {at(state, "/mnt/user-data/.upload-conversions", false)},
	} {
		if _, err := p.mounts("acme", ord(ms...)); sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(err.Error(), what) {
			t.Errorf("%v: %v; want %q", ms, err, what)
		}
	}
	p.opts.IgnoreMounts = true
	if got, err := p.mounts("acme", ord(at("/etc", "/mnt/acp-workspace", true))); err != nil || !slices.Equal(got, append(user("acme"), public)) {
		t.Errorf("where others are left out: %v, %v", got, err)
	}
	// No link leads the directories of users elsewhere.
	if err := errors.Join(os.Symlink("/etc", filepath.Join(dir, "data/evil")), os.WriteFile(filepath.Join(dir, "data/file"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, tenant := range []string{"evil", "file"} {
		if got, err := p.mounts(tenant, ord()); err == nil {
			t.Errorf("data/%s: %v", tenant, got)
		}
	}

	// By the API they are faults of the request, before anything is made; one that is there is found without a look at them.
	r := newRig(t, Options{}, func(x *fake.Extension) sandboxer.Extension { return mountless{x} })
	bad := `{"sandbox_id":"a","extra_mounts":[{"host_path":"/etc","container_path":"/mnt/acp-workspace","read_only":true}]}`
	if got := r.want(400, "", "POST", "/api/sandboxes", bad); !strings.HasPrefix(got, `{"detail":"extra_mounts: the host path /etc`) {
		t.Errorf("it says %s", got)
	}
	r.create(`{"sandbox_id":"a"}`)
	r.create(bad)
	r.p.opts.MountRoots = []MountRoot{{Path: "/etc"}} // the extension takes no mounts at all
	if got := r.want(400, "", "POST", "/api/sandboxes", strings.Replace(bad, `"a"`, `"b"`, 1)); !strings.Contains(got, "has no mounts") {
		t.Errorf("where there are no mounts it says %s", got)
	}
}

// mountless is an extension without mounts.
type mountless struct{ *fake.Extension }

func (m mountless) Provision(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
	if len(s.Mounts) > 0 {
		return sandboxer.Handle{}, sandboxer.E(sandboxer.Unsupported, nil, "this extension has no mounts")
	}
	return m.Extension.Provision(ctx, s)
}

// TestURLOfProxy: behind a proxy sandboxes have its address.
func TestURLOfProxy(t *testing.T) {
	u, err := url.Parse("https://sandboxer.example.org/base")
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, Options{PublicURL: u}, nil)
	if a := r.create(`{"sandbox_id":"a"}`); !strings.HasPrefix(a.SandboxURL, "https://sandboxer.example.org/base/s/"+sandboxer.ObjectID("acme", "a")+"/sbx_box_") {
		t.Errorf("its URL is %s", a.SandboxURL)
	}
}

// FuzzCreate: a body is refused, or an order whose names are safe as those of directories.
func FuzzCreate(f *testing.F) {
	f.Add([]byte(order1))
	f.Add([]byte(`{"sandbox_id":"a","thread_id":null,"extra_mounts":[{"host_path":"/a","container_path":"/mnt/acp-workspace"}]}`))
	f.Add([]byte(`{"sandbox_id":"a","Sandbox_ID":"b"}`))
	p := &Provisioner{opts: Options{MountRoots: []MountRoot{{Path: "/srv"}}}}
	f.Fuzz(func(t *testing.T, body []byte) {
		o, _, bad := decodeCreate(body)
		if bad != nil {
			if b, err := json.Marshal(bad); err != nil || len(bad.Loc) == 0 {
				t.Fatalf("%s, %v", b, err)
			}
			return
		}
		if sandboxer.CheckID(o.id) != nil || !userName.MatchString(o.user) || len(o.user) > maxUser || !threadName.MatchString(o.thread) {
			t.Fatalf("%+v", o)
		}
		mounts, err := p.mounts("acme", o)
		for _, m := range mounts {
			if !strings.HasPrefix(m.Source, "/srv") || sandboxer.CheckMounts([]sandboxer.Mount{m}, "/workspace") != nil || len(mounts) > maxMounts {
				t.Fatalf("%+v mounts %v, %v", o, m, err)
			}
		}
	})
}
