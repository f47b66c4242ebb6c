//go:build linux

// Command sandboxer-egress filters the network of containers on a host: small and
// static, in an image of its own that sandboxer brings there. See package egress.
package main

import (
	"os"

	"github.com/sand-boxer/sandboxer/internal/egress/gateway"
)

func main() { os.Exit(gateway.Main(os.Args[1:])) }
