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
	return newGroup("network", "Network policy of a sandbox: show and change it", []string{"net"}, newCmdNetworkGet(f), newCmdNetworkSet(f))
}

func newCmdNetworkGet(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "get ID", Short: "Show the network policy of a sandbox", Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			return networkRun(cmd.Context(), f, func(ctx context.Context, s *session) (*api.Sandbox, error) { return s.Get(ctx, args[0]) })
		},
	}
}

// networkRun prints the network policy of the sandbox that get returns.
func networkRun(ctx context.Context, f *factory, get func(context.Context, *session) (*api.Sandbox, error)) error {
	s, err := f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	sb, err := get(ctx, s)
	if err != nil {
		return err
	}
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

func newCmdNetworkSet(f *factory) *cobra.Command {
	var policy sandboxer.NetworkPolicy
	var mode string
	modes := []string{string(sandboxer.NetworkNone), string(sandboxer.NetworkPublic), string(sandboxer.NetworkAllow)}
	c := &cobra.Command{
		Use: "set ID", Short: "Change the network policy of a running sandbox",
		Long: "Change the network policy of a running sandbox, within the limits of its profile. The new policy is in force when the command returns:\n" +
			"open connections that it forbids are cut.",
		Example: "  sandboxer network set 7k2mq0xa --mode none\n" +
			"  sandboxer network set 7k2mq0xa --allow '*.example.org:443' --allow 192.0.2.0/24",
		Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			policy.Mode = sandboxer.NetworkMode(mode)
			switch {
			case mode == "" && len(policy.Allow) == 0:
				return invalid("neither a mode nor a destination is given").WithHint("add --mode none, --mode public, or --allow with a destination")
			case mode == "":
				policy.Mode = sandboxer.NetworkAllow
			case !slices.Contains(modes, mode):
				return invalid("%q is not a network mode", mode).WithHint("the modes are none, public and allow")
			}
			if err := policy.Check(); err != nil {
				return err
			}
			return networkRun(cmd.Context(), f, func(ctx context.Context, s *session) (*api.Sandbox, error) { return s.SetNetwork(ctx, args[0], policy) })
		},
	}
	c.Flags().StringVar(&mode, "mode", "", "`MODE`: none, public, or allow (which --allow implies)")
	c.Flags().StringSliceVar(&policy.Allow, "allow", nil, "`DESTINATION`: domain, *.domain, IP address or CIDR, each with an optional :port; may be repeated")
	complete(c, "mode", modes...)
	return c
}
