package api_test

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// A sandbox is created, runs one command with its output on ours, and goes.
func Example() {
	run := func(ctx context.Context) error {
		c, err := api.New("unix:///run/sandboxer/api.sock", api.Options{})
		if err != nil {
			return err
		}
		defer c.Close()
		sb, err := c.Create(ctx, api.CreateSandbox{Profile: "profile.local", TTL: 10 * time.Minute})
		if err != nil {
			return err
		}
		exit, err := c.Exec(ctx, sb.ID, sandboxer.Cmd{Args: []string{"uname", "-a"}, Stdout: os.Stdout, Stderr: os.Stderr})
		if err != nil {
			return err
		}
		fmt.Println("exit code", exit.Code)
		_, err = c.Destroy(ctx, sb.ID, true)
		return err
	}
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "error:", sandboxer.Message(err))
		if h := sandboxer.HintOf(err); h != "" {
			fmt.Fprintln(os.Stderr, "hint:", h)
		}
	}
}
