package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
)

// detailOf is what a view shows of one value to people.
func detailOf[T any](v view[*T]) func(T) string {
	return func(x T) string {
		var b strings.Builder
		for _, kv := range v.detail(&x) {
			fmt.Fprintf(&b, "%s: %s\n", kv[0], kv[1])
		}
		return b.String()
	}
}

// TestViewFields: people are shown all of what the API answers, or here stands why not.
func TestViewFields(t *testing.T) {
	const document = "for programs"
	t.Setenv("TZ", "UTC")
	t.Run("profile", func(t *testing.T) {
		fieldtest.Conversion[api.Profile, string]{Convert: detailOf(profileView())}.Check(t)
	})
	t.Run("extension", func(t *testing.T) {
		fieldtest.Conversion[api.Extension, string]{Convert: detailOf(extensionView())}.Check(t)
	})
	t.Run("sandbox", func(t *testing.T) {
		fieldtest.Conversion[api.Sandbox, string]{
			Convert: func(sb api.Sandbox) string {
				// Its host and its workspace are in the reachability, once that is known.
				there := sb
				there.Reachability.Host, there.Reachability.RemoteDir = "", ""
				there.Billing = "" // what it costs is not known while its bill is pending
				return detailOf(sandboxView())(sb) + detailOf(sandboxView())(there)
			},
			Values: fieldtest.Values{
				"Unconfirmed": {sandboxer.Unconfirmed(""), sandboxer.Claimed},
			},
			Withheld: fieldtest.Withheld{"SchemaVersion": document, "Version": document, "Found": "said when it is created",
				"Quote.ByBackend": document, "Quote.Rows": document},
		}.Check(t)
	})
	t.Run("snapshot", func(t *testing.T) {
		fieldtest.Conversion[api.Snapshot, string]{
			Convert:  detailOf(snapshotView()),
			Withheld: fieldtest.Withheld{"SchemaVersion": document},
		}.Check(t)
	})
	t.Run("plan", func(t *testing.T) {
		fieldtest.Conversion[api.Plan, string]{
			Convert:  detailOf(planView()),
			Withheld: fieldtest.Withheld{"SchemaVersion": document, "Quote.ByBackend": document, "Quote.Rows": document},
		}.Check(t)
	})
	t.Run("stats", func(t *testing.T) {
		fieldtest.Conversion[api.Stats, string]{Convert: detailOf(statsView("x")), Withheld: fieldtest.Withheld{"At": "now"}}.Check(t)
	})
}

// TestFlagFields: every field of a request can be asked for, or here stands why not.
func TestFlagFields(t *testing.T) {
	f := testFactory(t)
	dir := t.TempDir()
	vars := filepath.Join(dir, "vars")
	if err := os.WriteFile(vars, []byte("B=2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(c *cobra.Command, args ...string) {
		t.Helper()
		c.SetArgs(args)
		if err := c.Execute(); err != nil {
			t.Fatal(err)
		}
	}
	order := strings.Fields("--profile p --image i:1 --input a=b --env-file " + vars + " --label a=b --name n --ttl 1h --idle 1m --on-idle pause --on-ttl pause --host h --cpus 1 --memory 1GiB --disk 1GiB --pids 9" +
		" --net allow:a.example --max-cost 1 --secret A=b --mount /a:/b:ro --thread u/t --consumer me --consumer-kind ci --consumer-meta a=b --idempotency-key k")
	var create *createOptions
	run(newCmdCreate(f, func(_ context.Context, o *createOptions) error { create = o; return nil }), append(order, "--user", "u", "--", "sleep")...)
	fieldtest.Full(t, create.req, fieldtest.Withheld{
		"Limits.GPUs": "no extension that comes with the program has any to give", "NoWaiting": "create follows what becomes of it itself",
	})
	var plan *planOptions
	run(newCmdPlan(f, func(_ context.Context, o *planOptions) error { plan = o; return nil }), append(order, "--user", "u", "--", "sleep")...)
	fieldtest.Full(t, plan.req, fieldtest.Withheld{"Limits.GPUs": "as for create", "NoWaiting": "nothing is made"})
	fieldtest.Same(t, create.req, plan.req, nil)
	var made *runOptions
	run(newCmdRun(f, func(_ context.Context, o *runOptions) error { made = o; return nil }), append(withoutThread(order), "--user", "u", "--", "true")...)
	fieldtest.Full(t, made.req, fieldtest.Withheld{
		"Limits.GPUs": "as for create", "NoWaiting": "as for create", "Command": "run's command is executed in the sandbox", "Thread": "left out here: with one the user is the command's alone",
	})
	var restore *restoreOptions
	run(newCmdRestore(f, func(_ context.Context, o *restoreOptions) error { restore = o; return nil }), append([]string{"snap"}, strings.Fields("--profile p --kind portable --input a=b --host h -e A=1"+
		" --label a=b --name n --ttl 1h --idle 1m --on-idle pause --on-ttl pause --max-cost 1 --consumer me --consumer-kind ci --consumer-meta a=b --idempotency-key k --detach")...)...)
	fieldtest.Full(t, restore.req, nil)
	var fork *forkOptions
	run(newCmdFork(f, func(_ context.Context, o *forkOptions) error { fork = o; return nil }), strings.Fields("x --count 2 -e A=1 --label a=b --ttl 1h --idempotency-key k --max-cost 1")...)
	fieldtest.Full(t, fork.req, nil)
	var exec *execOptions
	run(newCmdExec(f, func(_ context.Context, o *execOptions) error { exec = o; return nil }), append([]string{"x", "-t", "-u", "u", "-w", "/w", "--service", "s", "--env-file", vars, "--"}, "true")...)
	late := "of this terminal, when it runs"
	fieldtest.Full(t, exec.cmd, fieldtest.Withheld{"Stdin": late, "Stdout": late, "Stderr": late, "TTY": late, "Resize": late, "Signals": late})
	var snap *snapshotCreateOptions
	run(newCmdSnapshotCreate(f, func(_ context.Context, o *snapshotCreateOptions) error { snap = o; return nil }), strings.Fields("x --name n --portable --ttl 1h")...)
	fieldtest.Full(t, snap.req, nil)
	var extend *extendOptions
	run(newCmdExtend(f, func(_ context.Context, o *extendOptions) error { extend = o; return nil }), "x", "--ttl", "1h")
	fieldtest.Full(t, extend.extend, fieldtest.Withheld{"Add": "the other of two"})
	run(newCmdExtend(f, func(_ context.Context, o *extendOptions) error { extend = o; return nil }), "x", "--ttl", "+1h")
	fieldtest.Full(t, extend.extend, fieldtest.Withheld{"TTL": "the other of two"})
	var pause *pauseOptions
	run(newCmdPause(f, func(_ context.Context, o *pauseOptions) error { pause = o; return nil }), "x", "--depth", "disk")
	if pause.depth != "disk" {
		t.Error("the depth of a pause is dropped")
	}
	run(newCmdResume(f, func(_ context.Context, o *pauseOptions) error { pause = o; return nil }), "x", "--ttl", "1h")
	if pause.until == 0 {
		t.Error("the time to live of a resume is dropped")
	}
}

func withoutThread(args []string) []string {
	var out []string
	for i := 0; i < len(args); i++ {
		if args[i] == "--thread" {
			i++
			continue
		}
		out = append(out, args[i])
	}
	return out
}
