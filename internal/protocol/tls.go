package protocol

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// TLS is the configuration of either side of a TLS connection: it shows the certificate in the file cert, whose key is
// in the file key, and accepts those of the other side that are signed by one in ca. Kinds, with the file's name: Unavailable, and Invalid for a ca without certificates.
func TLS(ca, cert, key string) (*tls.Config, error) {
	pem, err := os.ReadFile(ca)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the certificates of authorities cannot be read: %s", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%s has no certificates", ca)
	}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the certificate %s with the key %s cannot be used: %s", cert, key, strings.TrimPrefix(err.Error(), "tls: "))
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair},
		RootCAs:   pool,                                             // of a service
		ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert, // of a broker
	}, nil
}
