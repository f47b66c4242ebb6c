// Command echo echoes TCP connections on the given address; tests run it inside
// sandboxes.
package main

import (
	"fmt"
	"os"

	"github.com/sand-boxer/sandboxer/extensiontest"
)

func main() {
	fmt.Fprintln(os.Stderr, extensiontest.Echo(os.Args[1]))
	os.Exit(1)
}
