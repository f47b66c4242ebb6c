package cli

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

func newCmdQuota(f *factory) *cobra.Command {
	var q api.QuotaQuery
	c := &cobra.Command{
		Use: "quota [TENANT]", Aliases: []string{"quotas"}, Short: "Show a tenant's use and quota (default: yours)", Args: wants(0, 1, "at most one tenant"),
		Long: "Show a tenant's use of every resource with a quota, and the quota. The operator sets quotas in quotas.yaml of the server's\n" +
			"configuration directory. The server reads that file at its start and on a reload.",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				q.Tenant = args[0]
			}
			if q.All && q.Tenant != "" {
				return invalid("both --all and the tenant %s are given", q.Tenant).WithHint("leave one of them out")
			}
			if err := checkLimit(q.Limit); err != nil {
				return err
			}
			return listed(cmd.Context(), f, quotaView(), func(ctx context.Context, s *session) (*api.List[api.Quota], error) { return s.Quotas(ctx, q) })
		},
	}
	c.Flags().BoolVar(&q.All, "all", false, "every tenant, for administrators")
	pageFlags(c, &q.Limit, &q.Cursor)
	return c
}

func quotaView() view[*api.Quota] {
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
	return v
}
