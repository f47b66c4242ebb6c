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
	// written are the addresses that are in the configuration itself.
	written []netip.Addr
	// named says that an operator configured the name: it may lead to this machine and into private
	// networks. Otherwise it leads to the public internet, or nowhere.
	named bool
}

// admits reports whether a may be connected to. Link-local addresses, among them those of clouds' metadata
// services, must be configured as addresses: no name leads there.
func (r reach) admits(a netip.Addr) bool {
	a = a.Unmap()
	return sandboxer.PublicAddr(a) || slices.Contains(r.written, a) || r.named && (sandboxer.PrivateAddr(a) || a.IsLoopback())
}

// errAddress says that an address may not be connected to.
var errAddress = errors.New("the address may not be connected to")

// transport returns one that connects only to what r admits, checked when it connects: what a name leads to is not known
// earlier. There is no proxy, which would choose the address.
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
		ResponseHeaderTimeout:  5 * time.Minute,
		MaxResponseHeaderBytes: 64 << 10,
		IdleConnTimeout:        15 * time.Second,
		MaxIdleConnsPerHost:    4,
		DisableCompression:     true,
	}
}

// noRedirect returns a redirect to the caller.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// authorities reads the file of Config.CA; nil means the system's.
func authorities(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "ca: cannot read the file")
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "ca: the file contains no certificate")
	}
	return roots, nil
}

// ask sends a GET request for u and returns the status of the answer. The rest of the answer is not read.
func ask(ctx context.Context, c *http.Client, u *url.URL) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return 0, sandboxer.E(sandboxer.Internal, err, "the request cannot be made")
	}
	req.Header.Set("User-Agent", "sandboxer")
	resp, err := c.Do(req)
	if err != nil {
		return 0, unreached(ctx, err, u)
	}
	resp.Body.Close()
	return resp.StatusCode, nil
}

// unreached says why there is no connection to u.
func unreached(ctx context.Context, err error, u *url.URL) error {
	var cert *tls.CertificateVerificationError
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, errAddress):
		return sandboxer.E(sandboxer.Denied, err, "the address of %s is not public, and the configuration does not allow it", u.Host).
			WithHint("to allow it, add it to bases or allow")
	case errors.As(err, &cert):
		return sandboxer.E(sandboxer.Unavailable, err, "the certificate of %s is not trusted", u.Host).WithHint("set ca to the certificate of the authority that signed it")
	}
	return sandboxer.E(sandboxer.Unavailable, err, "%s does not answer: %s", u, whyUnreached(err))
}

// whyUnreached says in our own words why there was no answer: any other text is not ours.
func whyUnreached(err error) string {
	var dns *net.DNSError
	var op *net.OpError
	var plain tls.RecordHeaderError
	switch {
	case errors.As(err, &dns) && dns.IsNotFound:
		return "its name does not exist"
	case errors.As(err, &dns):
		return "its name cannot be resolved now"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "it refused the connection"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return "there is no route to its address"
	case errors.As(err, &plain):
		return "it does not use TLS"
	case errors.As(err, &op) && op.Op == "dial", errors.Is(err, os.ErrDeadlineExceeded):
		return "connecting took too long"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "it closed the connection"
	}
	return "its answer is not HTTP, or is too long"
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
