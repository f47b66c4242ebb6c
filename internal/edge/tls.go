package edge

import (
	"crypto/tls"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// certificate is a certificate in two files. It is read again when either changes, so a
// renewal needs no signal to the server.
type certificate struct {
	certFile, keyFile string
	log               *slog.Logger

	mu         sync.Mutex
	cert       *tls.Certificate
	versions   [2]fileVersion
	complained time.Time
}

type fileVersion struct {
	at   time.Time
	size int64
}

// ListenTLS listens on a TCP address and speaks TLS 1.2 or later there, with the
// certificate chain and key in two PEM files. Changed files are taken up with the next
// connection; while they do not fit together, the former certificate serves on. Kinds:
// Invalid for files that cannot be used, Unavailable otherwise.
func ListenTLS(addr, certFile, keyFile string, log *slog.Logger) (net.Listener, error) {
	c := &certificate{certFile: certFile, keyFile: keyFile, log: log}
	if err := c.load(); err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "the certificate %s and the key %s cannot be used: %s", certFile, keyFile, err).
			WithHint("give the certificate with its chain, and its private key, as PEM files")
	}
	l, err := ListenTCP(addr, true)
	if err != nil {
		return nil, err
	}
	return &tlsListener{l, &tls.Config{
		MinVersion:     tls.VersionTLS12,
		NextProtos:     []string{"http/1.1"}, // WebSockets need it
		GetCertificate: c.get,
	}}, nil
}

// tlsListener accepts the connections of a listener below as TLS. That listener does everything
// that must happen before a connection's handshake.
type tlsListener struct {
	net.Listener
	config *tls.Config
}

func (l *tlsListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return tls.Server(c, l.config), nil
}

func (c *certificate) fileVersions() (s [2]fileVersion) {
	for i, name := range []string{c.certFile, c.keyFile} {
		if st, err := os.Stat(name); err == nil {
			s[i] = fileVersion{st.ModTime(), st.Size()}
		}
	}
	return s
}

func (c *certificate) load() error {
	stamps := c.fileVersions() // first: a change during the reading is seen next time
	cert, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return err
	}
	c.cert, c.versions = &cert, stamps
	return nil
}

func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fileVersions() != c.versions {
		err := c.load()
		switch {
		case err == nil:
			c.log.Info("certificate reloaded", "file", c.certFile)
		case time.Since(c.complained) > time.Minute: // not once for every connection
			c.complained = time.Now()
			c.log.Error("the changed certificate cannot be used; the former one stays in use", "file", c.certFile, "err", err)
		}
	}
	return c.cert, nil
}
