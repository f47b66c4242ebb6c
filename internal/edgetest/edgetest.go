// Package edgetest is for tests of package edge and of its doors: a broker
// for doors, listeners to serve them on, and what a client of raw
// connections needs. No program imports it.
package edgetest

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"database/sql"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/manager"
	"github.com/sand-boxer/sandboxer/internal/sqlstore"
)

// Patience is how long a test waits for an event that must happen.
const Patience = time.Minute

// Receive returns the next value of ch, and fails the test if none comes within Patience: a
// test that waits for ever does not report what it waits for.
func Receive[T any](t testing.TB, ch <-chan T, what string) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(Patience):
		t.Fatalf("%s does not come", what)
	}
	return v
}

// Poll waits until ok, which must be within Patience.
func Poll(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(Patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s does not come", what)
		}
	}
}

// A Log keeps what is logged. It is safe for concurrent use.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Logger returns a logger of every level that writes to l.
func (l *Log) Logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// WriteCert writes a self-signed certificate for 127.0.0.1 and its key, and returns it.
func WriteCert(t testing.TB, certFile, keyFile, name string) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(
		os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600),
		os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// Listen has the functions of package edge that listen. Its own tests are in it, so that this
// package cannot import it.
type Listen struct {
	Unix func(path string) (net.Listener, error)
	TCP  func(addr string, open bool) (net.Listener, error)
	TLS  func(addr, certFile, keyFile string, log *slog.Logger) (net.Listener, error)
}

// A Server is where an edge listens.
type Server struct {
	TCP, TLS string // host:port
	Unix     string // the socket's path
	Stop     func() // ends it and waits; again it does nothing
}

// Serve makes serve, an edge's, answer on a Unix socket, a TCP port, and one with TLS, until
// Stop is called or the test ends.
func Serve(t testing.TB, listen Listen, log *slog.Logger, serve func(context.Context, ...net.Listener) error) *Server {
	t.Helper()
	dir := t.TempDir()
	s := &Server{Unix: filepath.Join(dir, "s", "api.sock")}
	unix, err := listen.Unix(s.Unix)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := listen.TCP("127.0.0.1:0", false)
	if err != nil {
		t.Fatal(err)
	}
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	WriteCert(t, cert, key, "test")
	secure, err := listen.TLS("127.0.0.1:0", cert, key, log)
	if err != nil {
		t.Fatal(err)
	}
	s.TCP, s.TLS = plain.Addr().String(), secure.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- serve(ctx, unix, plain, secure) }()
	s.Stop = sync.OnceFunc(func() {
		cancel()
		if err := Receive(t, done, "the end of the server"); err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	t.Cleanup(s.Stop)
	return s
}

// Try opens a connection to one of the listeners, "tcp", "tls" or "unix", which lasts for
// the test, or for Patience.
func (s *Server) Try(t testing.TB, network string) (c net.Conn, err error) {
	switch network {
	case "tls":
		c, err = tls.Dial("tcp", s.TLS, &tls.Config{InsecureSkipVerify: true})
	case "unix":
		c, err = net.Dial("unix", s.Unix)
	default:
		c, err = net.Dial("tcp", s.TCP)
	}
	if err == nil {
		c.SetDeadline(time.Now().Add(Patience))
		t.Cleanup(func() { c.Close() })
	}
	return c, err
}

// Dial is Try for connections that must succeed.
func (s *Server) Dial(t testing.TB, network string) net.Conn {
	t.Helper()
	c, err := s.Try(t, network)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Client returns a client of the REST interface that knows the server at url.
func Client(t testing.TB, url string, opts api.Options) *api.Client {
	t.Helper()
	c, err := api.New(url, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// A Broker is the real manager with the real store and ext.fake.
type Broker struct {
	*manager.Manager
	World *fake.World // what ext.fake has
	Stop  func()      // ends all of it; again it does nothing
	dir   string      // of the database
}

// DatabaseCause is in the cause of each error that BreakDatabase leads to.
const DatabaseCause = "no such table"

// BreakDatabase hides all tables except that of the keys from the broker until the test ends. Calls that need them
// fail with internal errors.
func (b *Broker) BreakDatabase(t testing.TB) {
	t.Helper()
	rename := func(from, to string) {
		t.Helper()
		db, err := sql.Open("sqlite", "file:"+filepath.Join(b.dir, "sandboxer.db")+"?_pragma=busy_timeout(60000)&_pragma=foreign_keys(0)&_pragma=legacy_alter_table(1)")
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		for _, table := range []string{"sandboxes", "snapshots", "secrets", "events", "idempotency_keys", "balances", "entries", "open_holds", "spent", "usage", "sinks", "dead_letters"} {
			if _, err := db.Exec("ALTER TABLE " + from + table + " RENAME TO " + to + table); err != nil {
				t.Fatal(err)
			}
		}
	}
	rename("", "gone_")
	t.Cleanup(func() { rename("gone_", "") })
}

var errorID = regexp.MustCompile(`internal error ([A-Z2-7]{10})\b`)

// HasCause reports an error unless told, an answer, has an ID and nothing of the cause, and a line of the log has both.
func (l *Log) HasCause(t testing.TB, told, cause string) {
	t.Helper()
	m := errorID.FindStringSubmatch(told)
	if m == nil || strings.Contains(told, cause) {
		t.Errorf("the caller gets %s; want an internal error with an ID, without its cause", told)
		return
	}
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, "error_id="+m[1]) && strings.Contains(line, cause) {
			return
		}
	}
	t.Errorf("no line of the log has the ID %s and the cause %q", m[1], cause)
}

// BrokerOptions tune a Broker; the zero value works.
type BrokerOptions struct {
	Backend  backend.Options
	Fake     fake.Config                               // of ext.fake; Owner is filled in
	Extend   func(*fake.Extension) sandboxer.Extension // nil: ext.fake as it is
	Profiles []sandboxer.Profile
	More     []manager.Extension // besides ext.fake
	Manager  manager.Options     // Owner, Key and SweepEvery are filled in
}

// NewBroker starts a broker, which ends when Stop is called or the test ends.
func NewBroker(t testing.TB, o BrokerOptions) *Broker {
	t.Helper()
	dir := t.TempDir()
	store, err := sqlstore.OpenSQLite(context.Background(), dir, sqlstore.Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	r := &Broker{World: fake.NewWorld(), dir: dir}
	o.Fake.Owner = "test"
	x := fake.New(r.World, o.Fake)
	var ext sandboxer.Extension = x
	if o.Extend != nil {
		ext = o.Extend(x)
	}
	b := backend.New("ext.fake", ext, o.Backend)
	info := sandboxer.ExtensionInfo{ID: "ext.fake", Adapter: "fake", Isolation: fake.Adapter.Isolation, Capabilities: b.Capabilities(), Inputs: fake.Adapter.Inputs}
	o.Manager.Owner, o.Manager.Key, o.Manager.SweepEvery = "test", bytes.Repeat([]byte{7}, 32), time.Hour
	r.Manager, err = manager.New(store, o.Profiles, append([]manager.Extension{{Info: info, Backend: b}}, o.More...), o.Manager)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	r.Stop = sync.OnceFunc(func() {
		if err := r.Close(); err != nil {
			t.Errorf("manager: %v", err)
		}
		if err := store.Close(); err != nil {
			t.Errorf("store: %v", err)
		}
		r.World.Close()
	})
	t.Cleanup(r.Stop)
	return r
}
