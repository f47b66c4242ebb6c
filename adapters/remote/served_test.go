package remote

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"syscall"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/extension"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
)

// serveFar starts the program itself as another installation, that listens for HTTP. The fake is not in the program: this process
// serves it as an extension that is a service, and has its world.
func serveFar(t *testing.T) *far {
	t.Helper()
	program := buildtest.Program(t, "cmd/sandboxer")
	dir := t.TempDir()
	f := &far{Broker: &edgetest.Broker{World: fake.NewWorld()}, Server: &edgetest.Server{Unix: filepath.Join(dir, "api.sock")}}
	t.Cleanup(func() { f.World.Close() })

	l, err := net.Listen("unix", filepath.Join(dir, "fake.sock"))
	if err != nil {
		t.Fatal(err)
	}
	a := fake.Adapter
	a.Open = func(_ context.Context, env sandboxer.Env) (sandboxer.Extension, error) {
		return fake.New(f.World, fake.Config{Owner: env.Owner, Images: []string{"demo"}, PerHour: sandboxer.Credit, Agent: self(t)}), nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	service := make(chan error, 1)
	go func() { service <- extension.ServeListener(ctx, a, l) }()
	t.Cleanup(func() {
		cancel()
		if err := edgetest.Receive(t, service, "the end of the service"); err != nil {
			t.Error(err)
		}
	})

	write := func(name, text string) {
		t.Helper()
		file := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write("extensions/ext.far.yaml", "id: ext.far\nconnect: unix:"+l.Addr().String()+"\ncapabilities: {isolation_levels: [process], pricing_model: self-hosted}\n")
	for name, rest := range map[string]string{"far": "isolation: process\nmax_ttl: 100h\n", "open": ""} {
		write("profiles/profile."+name+".yaml", "id: profile."+name+"\nextension: ext.far\nimage: demo\nttl: 1h\nnetwork: public\n"+rest)
	}

	log := &serverLog{listens: make(chan string, 1)}
	server := exec.Command(program, "serve", "--socket", f.Unix, "--listen", "127.0.0.1:0")
	server.Env, server.Stderr = append(os.Environ(), "SANDBOXER_HOME="+dir, "SANDBOXER_PROGRESS=none"), log
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Wait() }()
	f.Server.Stop = sync.OnceFunc(func() {
		_ = server.Process.Signal(syscall.SIGTERM)
		if err := edgetest.Receive(t, ended, "the end of the server"); err != nil {
			t.Errorf("the server: %v\n%s", err, log)
		}
	})
	t.Cleanup(f.Server.Stop)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the other installation says at last:\n%s", log)
		}
	})
	select {
	case f.TCP = <-log.listens:
	case err := <-ended:
		ended <- err
		t.Fatalf("the server ended: %v\n%s", err, log)
	}
	f.admit(t)
	return f
}

// serverLog is what a server says, and tells where it listens.
type serverLog struct {
	mu      sync.Mutex
	text    bytes.Buffer
	told    bool
	listens chan string
}

var listening = regexp.MustCompile(`listening network=tcp addr=(\S+)\s`)

func (l *serverLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, err := l.text.Write(b)
	if at := listening.FindSubmatch(l.text.Bytes()); at != nil && !l.told {
		l.told = true
		l.listens <- string(at[1])
	}
	return n, err
}

// String returns the last of it.
func (l *serverLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.text.Bytes()
	return string(b[max(len(b)-16<<10, 0):])
}

// admit makes the tenant there that is ours, with money and a key.
func (f *far) admit(t testing.TB) {
	t.Helper()
	f.client = edgetest.Client(t, "unix://"+f.Unix, api.Options{})
	if _, err := f.client.Grant(t.Context(), api.Grant{Tenant: "ours", Amount: api.Credits(1_000_000 * sandboxer.Credit)}); err != nil {
		t.Fatal(err)
	}
	k, err := f.client.CreateKey(t.Context(), api.NewKey{Name: "near", Tenant: "ours", Scopes: []sandboxer.Scope{sandboxer.ScopeRead, sandboxer.ScopeWrite}})
	if err != nil {
		t.Fatal(err)
	}
	f.key = k.Token
}
