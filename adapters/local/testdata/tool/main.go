// Command tool is what tests run inside sandboxes: a server that echoes TCP
// connections and a client that fetches a URL.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/sand-boxer/sandboxer/extensiontest"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: tool echo ADDRESS | tool get URL")
		os.Exit(2)
	}
	var err error
	switch os.Args[1] {
	case "echo":
		err = extensiontest.Echo(os.Args[2])
	case "get":
		var res *http.Response
		c := http.Client{Timeout: 5 * time.Second}
		if res, err = c.Get(os.Args[2]); err == nil {
			_, err = io.Copy(os.Stdout, res.Body)
		}
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}
