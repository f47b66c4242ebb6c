package cli

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer/api"
)

func newCmdPool(f *factory) *cobra.Command {
	return newGroup("pool", "Sandboxes that are kept ready: list and drain the warm pools", []string{"pools"}, newCmdPoolLs(f, nil), newCmdPoolDrain(f, nil))
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

// count is n, or a dash where it is not told.
func count(n *int64) string {
	if n == nil {
		return "-"
	}
	return strconv.FormatInt(*n, 10)
}

func newCmdPoolLs(f *factory, runF func(context.Context, *plainOptions) error) *cobra.Command {
	o := &plainOptions{f}
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the warm pools", Args: wants(0, 0, "no arguments"),
		Long: "List the profiles that keep sandboxes ready, with how many wait and should, and how many creates were answered from the\n" +
			"pool and how many were not (cold) since the server started, which only administrators are told. The sandboxes themselves: sandboxer ls --state warm",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return poolLsRun(cmd.Context(), o)
		},
	}
}

func poolLsRun(ctx context.Context, o *plainOptions) error {
	return listed(ctx, o.f, poolView(), func(s *session) (*api.List[api.Pool], error) { return s.Pools(ctx) })
}

func newCmdPoolDrain(f *factory, runF func(context.Context, *refOptions) error) *cobra.Command {
	o := &refOptions{f: f}
	return &cobra.Command{
		Use: "drain PROFILE", Short: "Remove the sandboxes that wait in a pool; new ones take their place", Args: wants(1, 1, "one profile"),
		Long: "Remove every sandbox that waits in the pool of PROFILE, and make new ones. What was claimed is not touched. A pool does this\n" +
			"itself when its profile or the image behind it changes; drain it where something else went stale.",
		ValidArgsFunction: f.completePools,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return poolDrainRun(cmd.Context(), o)
		},
	}
}

func poolDrainRun(ctx context.Context, o *refOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	d, err := s.DrainPool(ctx, o.ref)
	if err != nil {
		return err
	}
	return printOne(o.f, d, view[*api.DrainedPool]{
		name: func(d *api.DrainedPool) string { return d.Profile },
		detail: func(d *api.DrainedPool) [][2]string {
			return [][2]string{{"profile", d.Profile}, {"removed", fmt.Sprint(d.Removed)}}
		},
	})
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
