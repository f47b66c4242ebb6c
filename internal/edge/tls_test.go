package edge

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
)

func TestTLS(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	_, err := ListenTLS("127.0.0.1:0", certFile, keyFile, log)
	if sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(err.Error(), certFile) {
		t.Errorf("without files: %v; want them named as unusable", err)
	}
	first := edgetest.WriteCert(t, certFile, keyFile, "first")
	l, err := ListenTLS("127.0.0.1:0", certFile, keyFile, log)
	if err != nil {
		t.Fatal(err)
	}
	s := New(&fakeAuth{}, Options{})
	s.Mount(fakeDoor(&fakeAuth{}))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	defer func() { cancel(); <-done }()

	shows := func() string {
		t.Helper()
		c, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].Subject.CommonName
	}
	if got := shows(); got != "first" {
		t.Errorf("it shows the certificate %q", got)
	}
	if _, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}); err == nil {
		t.Error("TLS 1.1 was accepted")
	}

	// The client trusts the configured authority, also for WebSockets.
	ask := func(roots *x509.CertPool) error {
		c, err := api.New("https://"+l.Addr().String(), api.Options{RootCAs: roots})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, err = c.Exec(t.Context(), "a", sandboxer.Cmd{Args: []string{"x"}})
		return err
	}
	pool := x509.NewCertPool()
	pool.AddCert(first)
	if err := ask(pool); sandboxer.KindOf(err) != sandboxer.Unauthenticated {
		t.Errorf("with its authority: %v; want the server's own answer that a key is missing", err)
	}
	if err := ask(x509.NewCertPool()); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("without its authority: %v; want no connection", err)
	}

	// A changed certificate is taken up, half a change is not.
	edgetest.WriteCert(t, certFile, keyFile, "second certificate")
	if got := shows(); got != "second certificate" {
		t.Errorf("after a change it shows %q", got)
	}
	if err := os.WriteFile(keyFile, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := shows(); got != "second certificate" {
		t.Errorf("with a broken key it shows %q", got)
	}
	edgetest.WriteCert(t, certFile, keyFile, "third")
	if got := shows(); got != "third" {
		t.Errorf("after the next change it shows %q", got)
	}
}

// TestListenInTheClear: keys are not sent in the clear unless somebody takes the blame.
func TestListenInTheClear(t *testing.T) {
	for _, c := range []struct {
		addr string
		open bool
		kind sandboxer.Kind
	}{
		{"127.0.0.1:0", false, ""}, {"localhost:0", false, ""}, {"0.0.0.0:0", false, sandboxer.Denied}, {":0", false, sandboxer.Denied},
		{"127.0.0.1:0", true, ""}, {"no.such.host.invalid:0", false, sandboxer.Unavailable},
	} {
		l, err := ListenTCP(c.addr, c.open)
		if sandboxer.KindOf(err) != c.kind {
			t.Errorf("ListenTCP(%q, %t) = %v; want %q", c.addr, c.open, err, c.kind)
		}
		if c.kind == sandboxer.Denied && !strings.Contains(sandboxer.HintOf(err), "--tls-cert") {
			t.Errorf("hint %q", sandboxer.HintOf(err))
		}
		if err == nil {
			l.Close()
		}
	}
}
