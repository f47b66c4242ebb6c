// Fakeworld runs the fake's backend in a process of its own, for tests that kill the
// broker: it survives, goes on, and keeps a log of every step the broker took.
//
//	fakeworld -socket S [-log F] [-faults '[{"verb":"provision","lost":true}]']
//
// It prints "ready" once it listens, and destroys its sandboxes when it is
// interrupted or terminated.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/sand-boxer/sandboxer/adapters/fake"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "fakeworld:", err)
		os.Exit(1)
	}
}

func run() error {
	opts := fake.ServeOptions{Ready: func() { fmt.Println("ready") }}
	flag.StringVar(&opts.Socket, "socket", "", "Unix socket to listen on")
	flag.StringVar(&opts.Log, "log", "", "file to append the log to, one JSON object a line")
	faults := flag.String("faults", "[]", "JSON list of faults to begin with")
	flag.Parse()
	if opts.Socket == "" || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	if err := json.Unmarshal([]byte(*faults), &opts.Faults); err != nil {
		return fmt.Errorf("-faults: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return fake.Serve(ctx, opts)
}
