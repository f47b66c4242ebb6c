package docker

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// lives makes a sandbox there, and tests everything that uses streams and files.
func lives(t *testing.T, o options) {
	t.Helper()
	e := o.opened(t)
	h := up(t, e, order("there", o))
	if got := run(t, e, h, "echo out"); got != "out" {
		t.Errorf("a command answers %q", got)
	}
	if err := e.WriteFile(t.Context(), h, "/workspace/f", 0o644, strings.NewReader(strings.Repeat("x", 1<<20))); err != nil {
		t.Fatal(err)
	}
	r, err := e.ReadFile(t.Context(), h, "/workspace/f")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if data, err := io.ReadAll(r); err != nil || len(data) != 1<<20 {
		t.Errorf("%d bytes, %v", len(data), err)
	}
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Error(err)
	}
}

// TestSSH: an engine on another machine, through its socket there.
func TestSSH(t *testing.T) {
	en := engines["docker"](t)
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	dir := t.TempDir()
	known := fmt.Sprintf("[127.0.0.1]:%d %s\n", s.Port, s.HostKey)
	if err := os.WriteFile(dir+"/known", []byte(known), 0o600); err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf("Host *\n\tIdentityFile %s\n\tIdentitiesOnly yes\n\tUserKnownHostsFile %s/known\n\tGlobalKnownHostsFile none\n", s.Identity, dir)
	if err := os.WriteFile(dir+"/config", []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	o := en.options(t, "ssh")
	o.config["engines"] = map[string]any{"one": map[string]any{"address": fmt.Sprintf("ssh://%s@127.0.0.1:%d%s", s.User, s.Port, strings.TrimPrefix(en.address, "unix://"))}}
	o.config["ssh_config"] = dir + "/config"
	lives(t, o)
}

// TestTLS: an engine over TCP with certificates of both sides.
func TestTLS(t *testing.T) {
	en := engines["docker"](t)
	dir := t.TempDir()
	ca, caKey := certificate(t, dir, "ca", nil, nil)
	certificate(t, dir, "server", ca, caKey)
	certificate(t, dir, "client", ca, caKey)
	pair, err := tls.LoadX509KeyPair(dir+"/server.pem", dir+"/server-key.pem")
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: roots, ClientAuth: tls.RequireAndVerifyClientCert})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				to, err := net.Dial("unix", strings.TrimPrefix(en.address, "unix://"))
				if err != nil {
					return
				}
				defer to.Close()
				go func() { io.Copy(to, c); to.(*net.UnixConn).CloseWrite() }()
				io.Copy(c, to)
			}()
		}
	}()
	o := en.options(t, "tls")
	one := map[string]any{"address": "tcp://" + l.Addr().String(), "ca": dir + "/ca.pem", "cert": dir + "/client.pem", "key": dir + "/client-key.pem"}
	o.config["engines"] = map[string]any{"one": one}
	lives(t, o)

	// A server with a certificate of another authority is refused.
	other := t.TempDir()
	certificate(t, other, "ca", nil, nil)
	one["ca"] = other + "/ca.pem"
	o.dir = t.TempDir()
	e := o.opened(t)
	_, err = e.Provision(t.Context(), order("none", o))
	wantKind(t, err, sandboxer.Unavailable, "cannot be reached")
	if !sandboxer.IsUntouched(err) {
		t.Errorf("%v does not say that nothing was done", err)
	}
}

// certificate writes one, and its key.
func certificate(t *testing.T, dir, name string, parent *x509.Certificate, parentKey *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IsCA: parent == nil, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign}
	if parent == nil {
		parent, parentKey = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, parentKey)
	if err != nil {
		t.Fatal(err)
	}
	k, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, b := range map[string]*pem.Block{name + ".pem": {Type: "CERTIFICATE", Bytes: der}, name + "-key.pem": {Type: "EC PRIVATE KEY", Bytes: k}} {
		if err := os.WriteFile(filepath.Join(dir, file), pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	made, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return made, key
}
