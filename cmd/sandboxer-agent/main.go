// Command sandboxer-agent is the program inside a sandbox, alone: small and static, for
// carrying into guests. See package agent.
package main

import (
	"os"

	"github.com/sand-boxer/sandboxer/agent"
)

func main() { os.Exit(agent.Main(os.Args[1:])) }
