package remote

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A reach says which addresses may be connected to.
type reach struct {
	// written are the addresses that stand in the configuration themselves.
	written []netip.Addr
	// named says that an operator wrote the name down: it may lead to this machine and into private
	// networks. Otherwise it leads to the public internet, or nowhere.
	named bool
}

// admits reports whether a may be connected to. Link-local addresses, among them those of clouds' metadata
// services, have to be written down as such: no name leads there.
func (r reach) admits(a netip.Addr) bool {
	a = a.Unmap()
	return sandboxer.PublicAddr(a) || slices.Contains(r.written, a) || r.named && (sandboxer.PrivateAddr(a) || a.IsLoopback())
}

// errAddress says that an address may not be connected to.
var errAddress = errors.New("the address may not be connected to")

// transport returns one that connects to what r admits and nowhere else: what a name leads to nobody knows before that
// moment. There is no proxy, which would choose the address.
func (r reach) transport(roots *x509.CertPool) *http.Transport {
	d := &net.Dialer{Timeout: 10 * time.Second, Control: func(_, address string, _ syscall.RawConn) error {
		if to, err := netip.ParseAddrPort(address); err != nil || !r.admits(to.Addr()) {
			return errAddress
		}
		return nil
	}}
	return &http.Transport{
		DialContext:            d.DialContext,
		TLSClientConfig:        &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    10 * time.Second,
		ResponseHeaderTimeout:  scriptTime + 30*time.Second,
		MaxResponseHeaderBytes: 64 << 10,
		IdleConnTimeout:        15 * time.Second,
		MaxIdleConnsPerHost:    4,
		DisableCompression:     true,
	}
}

// noRedirect leaves a redirect to whoever asked.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// authorities reads the file of Config.CA; nil means the system's.
func authorities(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the file with authorities (ca) cannot be read")
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "ca: there is no certificate in the file")
	}
	return roots, nil
}

// ask sends a GET request for u and returns the status of whatever answers, and of a success the first most bytes of what it says.
func ask(ctx context.Context, c *http.Client, u *url.URL, most int64) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return 0, nil, sandboxer.E(sandboxer.Internal, err, "the request cannot be made")
	}
	req.Header.Set("User-Agent", "sandboxer")
	resp, err := c.Do(req)
	if err == nil {
		defer resp.Body.Close()
		var said []byte
		if most > 0 && resp.StatusCode == http.StatusOK {
			said, _ = io.ReadAll(io.LimitReader(resp.Body, most)) // what broke off says less
		}
		return resp.StatusCode, said, nil
	}
	return 0, nil, unreached(ctx, err, u)
}

// unreached says why there is no connection to u.
func unreached(ctx context.Context, err error, u *url.URL) error {
	var cert *tls.CertificateVerificationError
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, errAddress):
		return sandboxer.E(sandboxer.Denied, err, "%s leads to an address that is not public, and does not stand in the configuration", u.Host).
			WithHint("name it in bases or allow, if it is meant")
	case errors.As(err, &cert):
		return sandboxer.E(sandboxer.Unavailable, err, "the certificate of %s is not trusted", u.Host).WithHint("name the authority that signed it: ca")
	}
	return sandboxer.E(sandboxer.Unavailable, err, "%s does not answer: %s", u, whyUnreached(err))
}

// whyUnreached says in words of ours why nothing was heard: what came instead is not ours.
func whyUnreached(err error) string {
	var dns *net.DNSError
	var op *net.OpError
	var plain tls.RecordHeaderError
	switch {
	case errors.As(err, &dns) && dns.IsNotFound:
		return "its name is not known"
	case errors.As(err, &dns):
		return "its name cannot be looked up now"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "the connection is refused"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return "there is no way to its address"
	case errors.As(err, &plain):
		return "it speaks no TLS"
	case errors.As(err, &op) && op.Op == "dial", errors.Is(err, os.ErrDeadlineExceeded):
		return "there is no connection in time"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "it closes the connection"
	}
	return "what it says is not HTTP, or too long"
}

// connect opens a connection to the host of u, which is of parseURL, as t would; for https TLS is done.
func connect(ctx context.Context, t *http.Transport, u *url.URL) (net.Conn, error) {
	c, err := t.DialContext(ctx, "tcp", u.Host)
	if err != nil {
		return nil, unreached(ctx, err, u)
	}
	if u.Scheme != "https" {
		return c, nil
	}
	config := t.TLSClientConfig.Clone()
	config.ServerName, config.NextProtos = u.Hostname(), nil // HTTP/2 is not spoken over it
	s := tls.Client(c, config)
	within, cancel := context.WithTimeout(ctx, t.TLSHandshakeTimeout)
	defer cancel()
	if err := s.HandshakeContext(within); err != nil {
		c.Close()
		return nil, unreached(ctx, err, u)
	}
	return s, nil
}
