//go:build !linux

package local

import (
	"context"
	"runtime"

	"github.com/sand-boxer/sandboxer"
)

func open(context.Context, sandboxer.Env, Config) (sandboxer.Extension, error) {
	return nil, sandboxer.E(sandboxer.Unavailable, nil, "gVisor needs Linux; this is %s", runtime.GOOS).
		WithHint("use a server on a Linux machine: sandboxer --url https://…")
}

func runtimeVersion() string { return "" }
