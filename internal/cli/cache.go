package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

func newCmdCache(f *factory) *cobra.Command {
	return newGroup("cache", "What is kept between sandboxes, such as layers of built images: list and remove it", []string{"caches"}, newCmdCacheLs(f, nil), newCmdCachePrune(f, nil))
}

type cacheOptions struct {
	f    *factory
	host string
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

func newCmdCacheLs(f *factory, runF func(context.Context, *cacheOptions) error) *cobra.Command {
	o := &cacheOptions{f: f}
	c := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List what is kept between sandboxes", Args: wants(0, 0, "no arguments"),
		Long: "List what extensions keep between sandboxes to make later ones faster: on hosts, the layers of images that were built there.\n" +
			"Each tenant has its own. SIZE counts what a layer is based on with it, as the bound (build_cache) does.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return cacheLsRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.host, "host", "", "only of this `host`")
	return c
}

func cacheLsRun(ctx context.Context, o *cacheOptions) error {
	return cachesRun(ctx, o, (*api.Client).Caches)
}

func newCmdCachePrune(f *factory, runF func(context.Context, *cacheOptions) error) *cobra.Command {
	o := &cacheOptions{f: f}
	c := &cobra.Command{
		Use: "prune", Short: "Remove what is kept between sandboxes", Args: wants(0, 0, "no arguments"),
		Long: "Remove what extensions keep between sandboxes, and list what was removed. The next builds begin from nothing. What is in use\n" +
			"at that moment stays; what hosts have of others is not touched.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return cachePruneRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.host, "host", "", "only of this `host`")
	return c
}

func cachePruneRun(ctx context.Context, o *cacheOptions) error {
	return cachesRun(ctx, o, (*api.Client).PruneCaches)
}

func cachesRun(ctx context.Context, o *cacheOptions, call func(*api.Client, context.Context, string) (*api.Caches, error)) error {
	p := o.f.progress()
	defer p.stop()
	s, err := o.f.connectOrEmbed(ctx, p)
	if err != nil {
		return err
	}
	defer s.close()
	got, err := call(s.Client, ctx, o.host)
	if err != nil {
		return err
	}
	p.stop()
	l := &api.List[*api.Cache]{SchemaVersion: api.SchemaVersion, Items: []*api.Cache{}}
	for i := range got.Items {
		l.Items = append(l.Items, &got.Items[i])
	}
	if err := printList(o.f, l, cacheView()); err != nil {
		return err
	}
	if got.Problem != "" {
		return sandboxer.E(sandboxer.Unavailable, nil, "this is not all: %s", got.Problem)
	}
	return nil
}
