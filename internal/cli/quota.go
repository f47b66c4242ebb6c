package cli

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

type quotaOptions struct {
	f *factory
	q api.QuotaQuery
}

func newCmdQuota(f *factory, runF func(context.Context, *quotaOptions) error) *cobra.Command {
	o := &quotaOptions{f: f}
	c := &cobra.Command{
		Use: "quota [TENANT]", Aliases: []string{"quotas"}, Short: "Show what a tenant has and may have, yours if none is named", Args: wants(0, 1, "at most one tenant"),
		Long: "Show how much of everything that can be bounded a tenant uses, and may use. The operator sets the bounds in quotas.yaml of\n" +
			"the server's configuration directory, which the server reads when it starts and on a reload.",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				o.q.Tenant = args[0]
			}
			if o.q.All && o.q.Tenant != "" {
				return invalid("--all is given, and the tenant %s", o.q.Tenant).WithHint("leave one of them out")
			}
			if err := checkLimit(o.q.Limit); err != nil {
				return err
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return quotaRun(cmd.Context(), o)
		},
	}
	c.Flags().BoolVar(&o.q.All, "all", false, "every tenant, for administrators")
	pageFlags(c, &o.q.Limit, &o.q.Cursor)
	return c
}

func quotaRun(ctx context.Context, o *quotaOptions) error {
	v := view[*api.Quota]{cols: []string{"TENANT"}, name: func(q *api.Quota) string { return q.Tenant }}
	for _, r := range sandboxer.Resources() {
		v.cols = append(v.cols, strings.ToUpper(strings.ReplaceAll(string(r), "_", " ")))
	}
	v.row = func(q *api.Quota) []string {
		cells := map[sandboxer.Resource]string{}
		for _, x := range q.Resources {
			cells[x.Resource] = x.Resource.Format(x.Used)
			if x.Limit != nil {
				cells[x.Resource] += " of " + x.Resource.Format(*x.Limit)
			}
		}
		out := []string{q.Tenant}
		for _, r := range sandboxer.Resources() {
			out = append(out, cells[r])
		}
		return out
	}
	return listed(ctx, o.f, v, func(s *session) (*api.List[api.Quota], error) { return s.Quotas(ctx, o.q) })
}
