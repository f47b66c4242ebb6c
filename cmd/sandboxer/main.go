// Command sandboxer is the broker: command line, server, and, if no helper programs are
// next to it, the helpers too.
package main

import (
	"os"

	"github.com/sand-boxer/sandboxer/internal/cli"
)

func main() {
	playRole()
	// Not on this goroutine: adapters/local ties it to the first thread, which every
	// step of it would have to wait for.
	go func() { os.Exit(cli.Main()) }()
	select {}
}
