// Command dying is a runner whose sandbox kernel ends while it starts, with the message that was linked in, or killed
// by a signal if that is empty.
package main

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

var words, real string

func main() {
	if !slices.Contains(os.Args, "boot") {
		fmt.Println(syscall.Exec(real, os.Args, os.Environ()))
		os.Exit(1)
	}
	if words == "" {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	for _, a := range os.Args {
		if n, ok := strings.CutPrefix(a, "--panic-log-fd="); ok {
			fd, _ := strconv.Atoi(n)
			_, _ = syscall.Write(fd, []byte(strings.Repeat(words, 1000)))
		}
	}
	os.Exit(128)
}
