//go:build !unix

package sshrun

import (
	"log/slog"

	"github.com/sand-boxer/sandboxer"
)

const muxWorks = false

func newOpenSSH(string, Options, *slog.Logger) (driver, error) {
	return nil, sandboxer.E(sandboxer.Unsupported, nil, "ssh's control sockets do not work on this system").
		WithHint("use the transport native")
}

func sshCommand(conn) (string, bool) { return "", false }
