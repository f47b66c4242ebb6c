//go:build linux

package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/egress"
	"github.com/sand-boxer/sandboxer/internal/usernet"
	"github.com/sand-boxer/sandboxer/internal/usernet/tap"
)

// runLink makes the device of a link in this network, routes the traffic and the names of all containers that
// share it there, and hands it to the gateway, and to the next one when that is gone.
func runLink(ctx context.Context, name string) error {
	device, err := tap.Make(egress.Device)
	if err != nil {
		return err
	}
	defer unix.Close(device)
	if err := resolveBy("/etc/resolv.conf"); err != nil {
		return err
	}
	for ctx.Err() == nil {
		c, err := connect(ctx)
		if err != nil {
			return err
		}
		stop := context.AfterFunc(ctx, func() { c.Close() })
		if err = ask(c, egress.Message{Link: name}, device); err == nil {
			_, err = c.Read(make([]byte, 1))
		}
		stop()
		c.Close()
		if ctx.Err() == nil {
			fmt.Fprintln(os.Stderr, "sandboxer-egress: the gateway is gone:", err)
		}
	}
	return nil
}

// resolveBy makes a resolver's configuration name the gateway instead of the servers in it. The
// file is written in place: containers that share it have it mounted.
func resolveBy(file string) error {
	old, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	text := []byte("nameserver " + usernet.Gateway.String() + "\n")
	for line := range bytes.Lines(old) {
		if f := bytes.Fields(line); len(f) > 0 && !bytes.Equal(f[0], []byte("nameserver")) && !bytes.HasPrefix(f[0], []byte("#")) {
			text = append(append(text, bytes.TrimSpace(line)...), '\n')
		}
	}
	return os.WriteFile(file, text, 0o644)
}
