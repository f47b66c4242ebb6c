package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

type upOptions struct {
	f      *factory
	listen string
}

func newCmdUp(f *factory) *cobra.Command {
	o := &upOptions{f: f}
	c := &cobra.Command{
		Use: "up", Short: "Start the server in the background, if none runs", Args: wants(0, 0, "no arguments"),
		Long: "Start the server in the background, if none runs. It listens on the Unix socket. With --listen or the\n" +
			"setting listen it also listens on a TCP address, for clients with an API key and for browsers that visit ports.",
		Example: "  sandboxer up\n  sandboxer up --listen 127.0.0.1:8080",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.listen != "" {
				if err := checkListen(o.listen); err != nil {
					return err
				}
			}
			return upRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.listen, "listen", "", "also listen on this TCP `ADDRESS`, for clients with an API key (SANDBOXER_LISTEN)")
	return c
}

func upRun(ctx context.Context, o *upOptions) error {
	p := o.f.progress()
	defer p.stop()
	o.f.listen = o.listen
	if o.listen != "" {
		if ok, err := o.f.running(ctx); err != nil {
			return err
		} else if ok {
			return sandboxer.E(sandboxer.Conflict, nil, "a server runs already, and cannot change where it listens").
				WithHint("stop it first (its sandboxes keep running): sandboxer down")
		}
	}
	s, err := o.f.connectOrStart(ctx, p)
	if err != nil {
		return err
	}
	defer s.close()
	p.stop()
	return showStatus(ctx, o.f, s)
}

func newCmdStatus(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the server and your identity on it", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return shown(cmd.Context(), f, statusView(), func(ctx context.Context, s *session) (*api.Status, error) { return s.Status(ctx) })
		},
	}
}

func showStatus(ctx context.Context, f *factory, s *session) error {
	st, err := s.Status(ctx)
	if err != nil {
		return err
	}
	return printOne(f, st, statusView())
}

func statusView() view[*api.Status] {
	return view[*api.Status]{
		name: func(st *api.Status) string { return st.Owner },
		detail: func(st *api.Status) [][2]string {
			rows := [][2]string{
				{"server", fmt.Sprintf("%s, process %d, up %s", st.Version, st.PID, sandboxer.FormatDuration(st.Uptime.Std()))},
				{"owner", st.Owner},
				{"data", st.Data},
				{"you", fmt.Sprintf("%s, tenant %s, may %s", st.Actor, st.Tenant, join(st.Scopes, ", "))},
				{"sandboxes", countStates(st.Sandboxes)},
				{"extensions", fmt.Sprint(st.Extensions)},
			}
			if len(st.Unavailable) > 0 {
				rows = append(rows, [2]string{"unavailable", strings.Join(st.Unavailable, ", ")})
			}
			if !st.WentBack.IsZero() {
				rows = append(rows, [2]string{"went back", fmt.Sprintf("%s, the database was older than before, so no deadline counts; see: sandboxer audit; then: sandboxer accept", moment(st.WentBack, ago))})
			}
			for _, n := range st.Notices {
				rows = append(rows, [2]string{"notice", n})
			}
			if st.Quarantined > 0 {
				rows = append(rows, [2]string{"quarantined", fmt.Sprintf("%d, unknown to the database: sandboxer ls --quarantined", st.Quarantined)})
			}
			return rows
		},
	}
}

func countStates(m map[sandboxer.State]int) string {
	var parts []string
	for _, st := range sandboxer.States() {
		if n := m[st]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, st))
		}
	}
	if parts == nil {
		return "none"
	}
	return strings.Join(parts, ", ")
}

func newCmdReload(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "reload", Short: "Make the server read its profiles and quotas again", Args: wants(0, 0, "no arguments"),
		Long: "Make the server read its profiles and quotas again, as SIGHUP does. A fault in any file leaves everything unchanged.\n" +
			"Sandboxes keep their settings. Changes of extensions and settings need a restart: down, then up.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return shown(cmd.Context(), f, reloadView(), func(ctx context.Context, s *session) (*api.Reload, error) { return s.Reload(ctx) })
		},
	}
}

func reloadView() view[*api.Reload] {
	return view[*api.Reload]{
		name: func(r *api.Reload) string { return strings.Join(slices.Concat(r.Added, r.Changed, r.Removed), "\n") },
		detail: func(r *api.Reload) [][2]string {
			rows := [][2]string{{"added", strings.Join(r.Added, ", ")}, {"changed", strings.Join(r.Changed, ", ")},
				{"removed", strings.Join(r.Removed, ", ")}, {"unchanged", fmt.Sprint(r.Unchanged)}}
			if r.Quotas {
				rows = append(rows, [2]string{"quotas", "changed"})
			}
			if len(r.Restart) > 0 {
				rows = append(rows, [2]string{"needs a restart", strings.Join(r.Restart, ", ")})
			}
			return rows
		},
	}
}

func newCmdDown(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "down", Short: "Stop the server of this machine; sandboxes keep running", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return downRun(cmd.Context(), f)
		},
	}
}

func downRun(ctx context.Context, f *factory) error {
	set, err := f.settings()
	if err != nil {
		return err
	}
	if u := set.get("url"); u != "" && !strings.HasPrefix(u, "unix://") {
		return invalid("only the server of this machine can be stopped, not %s", u).WithHint("stop it where it runs")
	}
	s, err := f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	st, err := s.Status(ctx)
	if err != nil {
		return err
	}
	p := f.progress()
	defer p.stop()
	if err := syscall.Kill(st.PID, syscall.SIGTERM); err != nil {
		return sandboxer.E(sandboxer.Denied, err, "the server, process %d, cannot be signalled", st.PID)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		// The process must be gone, not only its socket: its data directory must be free.
		if err := syscall.Kill(st.PID, 0); errors.Is(err, syscall.ESRCH) || isZombie(st.PID) {
			break
		}
		select {
		case <-ctx.Done():
			return sandboxer.E(sandboxer.Canceled, ctx.Err(), "stopped waiting for the server, process %d, which continues to stop", st.PID)
		case <-tick.C:
		}
	}
	p.done("stopped the server, process %d", st.PID)
	if n := countStates(st.Sandboxes); n != "none" {
		p.note("sandboxes left running: %s; they do not expire until a server runs again", n)
	}
	return nil
}

// isZombie reports whether a process has ended and only waits for its parent to
// notice, as happens to a server whose starter never waits.
func isZombie(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, ok := bytes.Cut(b, []byte(") "))
	return ok && bytes.HasPrefix(rest, []byte("Z"))
}

// welcomeRun is what the bare command shows on a terminal.
func welcomeRun(ctx context.Context, f *factory) error {
	w := f.io.out
	if s, err := f.connect(ctx); err == nil {
		defer s.close()
		if err := showStatus(ctx, f, s); err != nil {
			return err
		}
	} else {
		fmt.Fprintln(w, "No server runs on this machine.")
	}
	fmt.Fprint(w, "\nNext:\n"+
		"  sandboxer run --input repo=. -- ls -l    run a command in a copy of this directory\n"+
		"  sandboxer create --ttl 1h                make a sandbox that stays\n"+
		"  sandboxer --help                         see everything else\n")
	return nil
}
