// Command sandboxer is the broker: command line, server, and, when no helper program
// stands beside it, the helpers too.
package main

import (
	"os"

	"github.com/sand-boxer/sandboxer/internal/cli"
)

func main() {
	playRole()
	os.Exit(cli.Main())
}
