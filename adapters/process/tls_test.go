package process_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// An authority signs certificates for tests.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.sign("authority", nil)
	return a
}

// sign makes name.pem and name.key, signed by the authority or self-signed.
func (a *authority) sign(name string, by *authority) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{name + ".test"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	parent, signer := c, key
	if by == nil {
		c.IsCA, c.BasicConstraintsValid, c.KeyUsage = true, true, x509.KeyUsageCertSign
	} else {
		parent, signer = by.cert, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{a.file(name): {Type: "CERTIFICATE", Bytes: der}, strings.TrimSuffix(a.file(name), "pem") + "key": {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	made, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return made, key
}

func (a *authority) file(name string) string    { return filepath.Join(a.dir, name+".pem") }
func (a *authority) private(name string) string { return filepath.Join(a.dir, name+".key") }

// A service by TLS accepts no client without a certificate of its authority, nor does a broker accept such a service; one
// that is restarted is reached again.
func TestServiceByTLS(t *testing.T) {
	a, stranger := newAuthority(t), newAuthority(t)
	a.sign("service", a)
	a.sign("broker", a)
	stranger.sign("broker", stranger)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	serve := func() (stop func()) {
		cmd := exec.Command(self(t), "service", "-listen", "tls:"+addr, "-cert", a.file("service"), "-key", a.private("service"), "-client-ca", a.file("authority"))
		var said bytes.Buffer
		cmd.Stderr = &said
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			if c, err := net.Dial("tcp", addr); err == nil {
				c.Close()
				break
			}
			if time.Now().After(end) {
				t.Fatalf("the service does not listen: %s", said.String())
			}
		}
		return func() { cmd.Process.Kill(); cmd.Wait() }
	}
	stop := serve()
	defer func() { stop() }()

	good := sandboxer.ProgramTLS{CA: a.file("authority"), Cert: a.file("broker"), Key: a.private("broker")}
	e, err := openProgram(t, t.TempDir(), "o", sandboxer.Program{Connect: "tls:" + addr, TLS: good}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer e.(io.Closer).Close()
	spec := sandboxer.Spec{ID: "tls", Generation: 1, Owner: "o", Place: "localhost"}
	life := func() {
		t.Helper()
		h, err := e.Provision(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		x, err := e.(sandboxer.Execer).Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"cat"}, Stdin: strings.NewReader("by TLS"), Stdout: &out})
		if err != nil || x.Code != 0 || out.String() != "by TLS" {
			t.Errorf("%+v, %q, %v", x, out.String(), err)
		}
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Error(err)
		}
	}
	life()
	stop()
	if _, err := e.Provision(t.Context(), spec); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("without the service: %v", err)
	}
	stop = serve()
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		_, err := e.(sandboxer.Prober).IsAlive(t.Context(), sandboxer.Handle{SandboxID: "tls"})
		if err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("it is not reached again: %v", err)
		}
	}
	life()

	for what, c := range map[string]struct {
		sandboxer.ProgramTLS
		want sandboxer.Kind
		says string
	}{
		"a stranger's certificate": {sandboxer.ProgramTLS{CA: a.file("authority"), Cert: stranger.file("broker"), Key: stranger.private("broker")}, sandboxer.Unavailable, ""},
		"a service of a stranger":  {sandboxer.ProgramTLS{CA: stranger.file("authority"), Cert: a.file("broker"), Key: a.private("broker")}, sandboxer.Unavailable, ""},
		"another name":             {sandboxer.ProgramTLS{CA: a.file("authority"), Cert: a.file("broker"), Key: a.private("broker"), Name: "other.test"}, sandboxer.Unavailable, ""},
		"no authority":             {sandboxer.ProgramTLS{CA: a.file("nobody"), Cert: a.file("broker"), Key: a.private("broker")}, sandboxer.Unavailable, a.file("nobody")},
		"a key as authority":       {sandboxer.ProgramTLS{CA: a.private("broker"), Cert: a.file("broker"), Key: a.private("broker")}, sandboxer.Invalid, a.private("broker")},
		"another's key":            {sandboxer.ProgramTLS{CA: a.file("authority"), Cert: a.file("broker"), Key: a.private("service")}, sandboxer.Unavailable, a.private("service")},
	} {
		_, err := openProgram(t, t.TempDir(), "o", sandboxer.Program{Connect: "tls:" + addr, TLS: c.ProgramTLS}, nil)
		if sandboxer.KindOf(err) != c.want || !strings.Contains(sandboxer.Message(err), c.says) {
			t.Errorf("%s: %v", what, err)
		}
	}
	named := good
	named.Name = "service.test"
	n, err := openProgram(t, t.TempDir(), "o", sandboxer.Program{Connect: "tls:" + addr, TLS: named}, nil)
	if err != nil {
		t.Errorf("by the name in its certificate: %v", err)
	} else {
		n.(io.Closer).Close()
	}

	// Without encryption no client is answered.
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintln(conn, `{"hello":{"protocols":[1]}}`)
	conn.SetReadDeadline(time.Now().Add(time.Minute))
	if said, _ := io.ReadAll(conn); bytes.Contains(said, []byte("hello")) {
		t.Errorf("plain TCP is answered: %q", said)
	}
}
