//go:build !linux

package agent

import (
	"fmt"
	"os"
)

func runKillMarked([]string) int {
	fmt.Fprintln(os.Stderr, "sandboxer-agent: kill-marked needs Linux")
	return 1
}

func runDonate([]string) int {
	fmt.Fprintln(os.Stderr, "sandboxer-agent: donate needs Linux")
	return 1
}

func runMount([]string) int {
	fmt.Fprintln(os.Stderr, "sandboxer-agent: mount needs Linux")
	return 1
}
