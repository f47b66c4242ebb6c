package sshrun

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"strings"

	"golang.org/x/crypto/ssh"
)

// NewKey makes an Ed25519 key: the private half as the text of an OpenSSH key file, the
// public half as an authorized_keys line.
func NewKey() (private, public string, err error) {
	_, k, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return "", "", err
	}
	block, err := ssh.MarshalPrivateKey(k, "")
	if err != nil {
		return "", "", err
	}
	signer, err := ssh.NewSignerFromKey(k)
	if err != nil {
		return "", "", err
	}
	return string(pem.EncodeToMemory(block)), strings.TrimSpace(string(ssh.MarshalAuthorizedKey(signer.PublicKey()))), nil
}
