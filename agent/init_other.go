//go:build !linux

package agent

import (
	"fmt"
	"os"
	"runtime"
)

func runInit([]string) int    { return onLinux("init") }
func runAttach([]string) int  { return onLinux("attach") }
func runConnect([]string) int { return onLinux("connect") }
func runHold([]string) int    { return onLinux("hold") }

func onLinux(what string) int {
	fmt.Fprintln(os.Stderr, "sandboxer-agent:", what, "runs on Linux, not on", runtime.GOOS)
	return 1
}
