package cli

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/catalog"
)

// Completions never start anything and give up soon: they run at every press of a key.
const completeWithin = time.Second

func (f *factory) completeSandbox(cmd *cobra.Command, args []string, toComplete string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return f.completeSandboxes(cmd, args, toComplete)
}

func (f *factory) completeSandboxes(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return completeOf(f, args, func(ctx context.Context, s *session) (*api.List[api.Sandbox], error) {
		return s.List(ctx, api.SandboxQuery{})
	},
		func(sb api.Sandbox) (id, name, about string) {
			return sb.ID, sb.Name, sb.Profile + ", " + string(sb.State)
		})
}

func (f *factory) completeSnapshot(cmd *cobra.Command, args []string, toComplete string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return f.completeSnapshots(cmd, args, toComplete)
}

func (f *factory) completeSnapshots(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return completeOf(f, args, func(ctx context.Context, s *session) (*api.List[api.Snapshot], error) {
		return s.Snapshots(ctx, api.SnapshotQuery{})
	},
		func(sn api.Snapshot) (id, name, about string) {
			return sn.ID, sn.Name, string(sn.Kind) + " of " + sn.SandboxID
		})
}

// completeOf offers the IDs and names of a list of the server, without those that are typed already.
func completeOf[T any](f *factory, typed []string, get func(context.Context, *session) (*api.List[T], error),
	words func(T) (id, name, about string)) ([]cobra.Completion, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(context.Background(), completeWithin)
	defer cancel()
	s, err := f.connect(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer s.close()
	l, err := get(ctx, s)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []cobra.Completion
	for _, it := range l.Items {
		id, name, about := words(it)
		for _, word := range []string{id, name} {
			if word != "" && !slices.Contains(typed, word) {
				out = append(out, cobra.CompletionWithDesc(word, about))
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// completeProfiles reads the catalogue's files: it works without a server.
func (f *factory) completeProfiles(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	c := f.whatLoads()
	var out []cobra.Completion
	for _, p := range c.Profiles {
		out = append(out, cobra.CompletionWithDesc(p.ID, p.Title))
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

func (f *factory) completeExtensions(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	c := f.whatLoads()
	var out []cobra.Completion
	for _, e := range c.Extensions {
		out = append(out, cobra.CompletionWithDesc(e.ID, e.Title))
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// whatLoads is the valid part of the catalogue.
func (f *factory) whatLoads() *catalog.Catalog {
	c, _ := f.catalog()
	return c
}

func scopeWords() []string {
	var out []string
	for _, s := range sandboxer.Scopes() {
		out = append(out, string(s))
	}
	return out
}
