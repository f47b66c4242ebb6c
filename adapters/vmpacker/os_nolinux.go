//go:build !linux

package vmpacker

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"syscall"
	"time"
)

// Managed machines need Linux: their processes are found in /proc.
const managedWorks = false

func dialBelow(ctx context.Context, dir, name string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, name))
}

func endAll(context.Context, func() ([]int, error)) error { return nil }
func used(int) (time.Duration, int64, error)              { return 0, 0, errors.ErrUnsupported }
func apart() *syscall.SysProcAttr                         { return nil }
func mortal() *syscall.SysProcAttr                        { return nil }
