// Echo listens on its argument and echoes every connection until its peer closes.
package main

import (
	"io"
	"net"
	"os"
)

func main() {
	l, err := net.Listen("tcp", os.Args[1])
	if err != nil {
		panic(err)
	}
	for {
		c, err := l.Accept()
		if err != nil {
			panic(err)
		}
		go func() {
			defer c.Close()
			io.Copy(c, c)
		}()
	}
}
