package cli

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer/api"
)

func newCmdPool(f *factory) *cobra.Command {
	return newGroup("pool", "Sandboxes that are kept ready: list and drain the warm pools", []string{"pools"}, newCmdPoolLs(f), newCmdPoolDrain(f))
}

func poolView() view[*api.Pool] {
	return view[*api.Pool]{
		cols: []string{"PROFILE", "EXTENSION", "READY", "CLAIMED", "COLD", "PROBLEM"},
		wide: []string{"RETRY"},
		row: func(p *api.Pool) []string {
			return []string{p.Profile, p.Extension, fmt.Sprintf("%d of %d", p.Ready, p.Size), count(p.Claimed), count(p.Cold), p.Problem,
				moment(p.RetryAt, until)}
		},
		name: func(p *api.Pool) string { return p.Profile },
	}
}

// count is n, or a dash if it is not known.
func count(n *int64) string {
	if n == nil {
		return "-"
	}
	return strconv.FormatInt(*n, 10)
}

func newCmdPoolLs(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the warm pools", Args: wants(0, 0, "no arguments"),
		Long: "List the profiles that keep sandboxes ready, with the present and the intended number. Administrators also see how many\n" +
			"creates the pool has answered and how many not (cold) since the server started. To list the waiting sandboxes, run\n" +
			"sandboxer ls --state warm",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return listed(cmd.Context(), f, poolView(), func(ctx context.Context, s *session) (*api.List[api.Pool], error) { return s.Pools(ctx) })
		},
	}
}

func newCmdPoolDrain(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "drain PROFILE", Short: "Replace the sandboxes that wait in a pool", Args: wants(1, 1, "one profile"),
		Long: "Remove every sandbox that waits in the pool of PROFILE, and make new ones. Claimed sandboxes are not touched. A pool does\n" +
			"this itself when its profile or image changes; drain it when something else is out of date.",
		ValidArgsFunction: f.completePools,
		RunE: func(cmd *cobra.Command, args []string) error {
			return shown(cmd.Context(), f, drainedView(), func(ctx context.Context, s *session) (*api.DrainedPool, error) { return s.DrainPool(ctx, args[0]) })
		},
	}
}

func drainedView() view[*api.DrainedPool] {
	return view[*api.DrainedPool]{
		name: func(d *api.DrainedPool) string { return d.Profile },
		detail: func(d *api.DrainedPool) [][2]string {
			return [][2]string{{"profile", d.Profile}, {"removed", fmt.Sprint(d.Removed)}}
		},
	}
}

// completePools offers the profiles of this machine that keep a pool.
func (f *factory) completePools(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []cobra.Completion
	for _, p := range f.whatLoads().Profiles {
		if p.Pool.Size > 0 {
			out = append(out, cobra.CompletionWithDesc(p.ID, p.Title))
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
