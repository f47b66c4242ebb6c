package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

func newCmdCache(f *factory) *cobra.Command {
	return newGroup("cache", "Caches of extensions, such as layers of built images: list and remove them", []string{"caches"}, newCmdCacheLs(f), newCmdCachePrune(f))
}

func cacheView() view[*api.Cache] {
	return view[*api.Cache]{
		cols: []string{"NAME", "EXTENSION", "HOST", "TENANT", "SIZE", "USED", "PROBLEM"},
		row: func(c *api.Cache) []string {
			return []string{c.Name, c.Extension, c.Host, c.Tenant, size(c.Bytes), moment(c.UsedAt, ago), c.Problem}
		},
		name: func(c *api.Cache) string { return c.Name },
	}
}

func newCmdCacheLs(f *factory) *cobra.Command {
	var host string
	c := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the caches that extensions keep", Args: wants(0, 0, "no arguments"),
		Long: "List the caches that extensions keep to make later sandboxes faster: on hosts, the layers of images that were built there.\n" +
			"Each tenant has its own. SIZE of a layer includes the layers below it, as in the limit (build_cache).",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cachesRun(cmd.Context(), f, host, (*api.Client).Caches)
		},
	}
	c.Flags().StringVar(&host, "host", "", "only on this `HOST`")
	return c
}

func newCmdCachePrune(f *factory) *cobra.Command {
	var host string
	c := &cobra.Command{
		Use: "prune", Short: "Remove the caches that extensions keep", Args: wants(0, 0, "no arguments"),
		Long: "Remove the caches that extensions keep, and list them. The next builds start without a cache. Caches in use stay;\n" +
			"data of others on the hosts is not touched.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cachesRun(cmd.Context(), f, host, (*api.Client).PruneCaches)
		},
	}
	c.Flags().StringVar(&host, "host", "", "only on this `HOST`")
	return c
}

// cachesRun lists the caches that call returns: all, or those that it removed.
func cachesRun(ctx context.Context, f *factory, host string, call func(*api.Client, context.Context, string) (*api.Caches, error)) error {
	p := f.progress()
	defer p.stop()
	s, err := f.connectOrEmbed(ctx, p)
	if err != nil {
		return err
	}
	defer s.close()
	got, err := call(s.Client, ctx, host)
	if err != nil {
		return err
	}
	p.stop()
	l := pointers(&api.List[api.Cache]{SchemaVersion: api.SchemaVersion, Items: got.Items})
	if err := printList(f, l, cacheView()); err != nil {
		return err
	}
	if got.Problem != "" {
		return sandboxer.E(sandboxer.Unavailable, nil, "this is not all: %s", got.Problem)
	}
	return nil
}
