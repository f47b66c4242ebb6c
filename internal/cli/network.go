package cli

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

func newCmdNetwork(f *factory) *cobra.Command {
	return newGroup("network", "What a sandbox may reach", []string{"net"}, newCmdNetworkGet(f, nil), newCmdNetworkSet(f, nil))
}

func newCmdNetworkGet(f *factory, runF func(context.Context, *refOptions) error) *cobra.Command {
	o := &refOptions{f: f}
	return &cobra.Command{
		Use: "get ID", Short: "Show what a sandbox may reach", Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return networkGetRun(cmd.Context(), o)
		},
	}
}

func networkGetRun(ctx context.Context, o *refOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	sb, err := s.Get(ctx, o.ref)
	if err != nil {
		return err
	}
	return printNetwork(o.f, sb)
}

func printNetwork(f *factory, sb *api.Sandbox) error {
	if sb.Network.Mode == "" {
		sb.Network.Mode = sandboxer.NetworkNone
	}
	return printOne(f, &sb.Network, view[*sandboxer.NetworkPolicy]{
		detail: func(p *sandboxer.NetworkPolicy) [][2]string {
			return [][2]string{{"sandbox", sb.ID}, {"mode", string(p.Mode)}, {"allow", strings.Join(p.Allow, "\n")}}
		},
		name: func(*sandboxer.NetworkPolicy) string { return sb.ID },
	})
}

type networkSetOptions struct {
	refOptions
	policy sandboxer.NetworkPolicy
}

func newCmdNetworkSet(f *factory, runF func(context.Context, *networkSetOptions) error) *cobra.Command {
	o := &networkSetOptions{refOptions: refOptions{f: f}}
	var mode string
	modes := []string{string(sandboxer.NetworkNone), string(sandboxer.NetworkPublic), string(sandboxer.NetworkAllow)}
	c := &cobra.Command{
		Use: "set ID", Short: "Change what a running sandbox may reach",
		Long: "Change what a running sandbox may reach, within what its profile allows. It is in force when the command returns:\n" +
			"open connections that are not allowed any more are cut.",
		Example: "  sandboxer network set 7k2mq0xa --mode none\n" +
			"  sandboxer network set 7k2mq0xa --allow '*.example.org:443' --allow 192.0.2.0/24",
		Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			o.policy.Mode = sandboxer.NetworkMode(mode)
			switch {
			case mode == "" && len(o.policy.Allow) == 0:
				return invalid("neither a mode nor a destination is given").WithHint("add --mode none, --mode public, or --allow with what to reach")
			case mode == "":
				o.policy.Mode = sandboxer.NetworkAllow
			case !slices.Contains(modes, mode):
				return invalid("%q is not a network mode", mode).WithHint("the modes are none, public and allow")
			}
			if err := o.policy.Check(); err != nil {
				return err
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return networkSetRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&mode, "mode", "", "`mode`: none, public, or allow (which --allow implies)")
	c.Flags().StringSliceVar(&o.policy.Allow, "allow", nil, "`destination`: domain, *.domain, IP address or CIDR, each with an optional :port; may be repeated")
	complete(c, "mode", modes...)
	return c
}

func networkSetRun(ctx context.Context, o *networkSetOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	sb, err := s.SetNetwork(ctx, o.ref, o.policy)
	if err != nil {
		return err
	}
	return printNetwork(o.f, sb)
}
