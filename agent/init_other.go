//go:build !linux

package agent

import (
	"fmt"
	"os"
	"runtime"
)

func runInit([]string) int {
	fmt.Fprintln(os.Stderr, "sandboxer-agent: init runs on Linux, not on", runtime.GOOS)
	return 1
}
