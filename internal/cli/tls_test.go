package cli

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// cmdMkCert makes an authority, NAME.ca, and a certificate of it for 127.0.0.1,
// NAME.cert with NAME.key.
func cmdMkCert(ts *testscript.TestScript, _ bool, args []string) {
	name := args[0]
	write := func(suffix, kind string, der []byte) {
		ts.Check(os.WriteFile(ts.MkAbs(name+suffix), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
	}
	newKey := func() *ecdsa.PrivateKey {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		ts.Check(err)
		return key
	}
	caKey, key := newKey(), newKey()
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name + " authority"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, caKey.Public(), caKey)
	ts.Check(err)
	write(".ca", "CERTIFICATE", der)
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err = x509.CreateCertificate(rand.Reader, leaf, ca, key.Public(), caKey)
	ts.Check(err)
	write(".cert", "CERTIFICATE", der)
	der, err = x509.MarshalPKCS8PrivateKey(key)
	ts.Check(err)
	write(".key", "PRIVATE KEY", der)
}
