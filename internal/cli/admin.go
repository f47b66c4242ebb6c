package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

func newCmdKey(f *factory) *cobra.Command {
	return newGroup("key", "API keys: make, list and revoke them", []string{"keys"}, newCmdKeyCreate(f), newCmdKeyLs(f), newCmdKeyRevoke(f))
}

type keyCreateOptions struct {
	f *factory
	k api.NewKey
}

func newCmdKeyCreate(f *factory) *cobra.Command {
	o := &keyCreateOptions{f: f}
	var scopes, spend []string
	var ttl string
	c := &cobra.Command{
		Use: "create [NAME]", Short: "Make an API key and print it once", Args: wants(0, 1, "at most a name"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				if o.k.Name != "" && o.k.Name != args[0] {
					return invalid("the key's name is given twice: %q and --name %q", args[0], o.k.Name)
				}
				o.k.Name = args[0]
			}
			if o.k.Name == "" {
				return invalid("the key needs a name, to recognize it later").WithHint("sandboxer key create ci")
			}
			for _, w := range scopes {
				if !slices.Contains(sandboxer.Scopes(), sandboxer.Scope(w)) {
					return invalid("--scope: %q is not a scope", w).WithHint("want one of: %s", strings.Join(scopeWords(), ", "))
				}
				o.k.Scopes = append(o.k.Scopes, sandboxer.Scope(w))
			}
			if ttl != "" {
				d, err := parseDuration("--ttl", ttl)
				if err != nil {
					return err
				}
				o.k.TTL = d
			}
			var err error
			if o.k.MaxSpend, err = parseMaxSpend(spend); err != nil {
				return err
			}
			return keyCreateRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.k.Name, "name", "", "`NAME` to recognize it by")
	c.Flags().StringVar(&o.k.Tenant, "tenant", "", "`TENANT` it acts for (default: yours)")
	c.Flags().StringSliceVar(&scopes, "scope", []string{string(sandboxer.ScopeRead), string(sandboxer.ScopeWrite)}, "`SCOPE` of the key: read, write, admin")
	c.Flags().StringVar(&ttl, "ttl", "", "`LIFETIME`; without it the key does not expire")
	c.Flags().StringSliceVar(&spend, "max-spend", nil, "most `CREDITS` that its sandboxes may cost: day=5,month=50, or one of them, in UTC")
	c.Flags().StringVar(&o.k.Consumer, "consumer", "", "`NAME` of the consumer of all requests with this key")
	complete(c, "scope", scopeWords()...)
	return c
}

// parseMaxSpend reads the values of --max-spend.
func parseMaxSpend(values []string) (m sandboxer.MaxSpend, err error) {
	byPeriod, err := keyValues("--max-spend", values)
	if err != nil {
		return m, err
	}
	for period, text := range byPeriod {
		of := map[string]*api.Credits{"day": &m.Day, "month": &m.Month}[period]
		if of == nil {
			return m, invalid("--max-spend: %q is not a period", period).WithHint("give credits for a day, a month or both: --max-spend day=5,month=50")
		}
		amount, err := sandboxer.ParseCredits(text)
		if err != nil {
			return m, invalid("--max-spend: %s", sandboxer.Message(err))
		}
		if amount <= 0 {
			return m, invalid("--max-spend: %q is not a positive amount", text)
		}
		*of = api.Credits(amount)
	}
	return m, nil
}

// maxSpend writes the bounds of a key, as --max-spend has them.
func maxSpend(m sandboxer.MaxSpend) string {
	var out []string
	if m.Day != 0 {
		out = append(out, "day="+m.Day.String())
	}
	if m.Month != 0 {
		out = append(out, "month="+m.Month.String())
	}
	return strings.Join(out, ",")
}

func keyView() view[*api.Key] {
	day := func(t time.Time) string {
		if t.IsZero() {
			return ""
		}
		return t.Local().Format("2006-01-02 15:04")
	}
	return view[*api.Key]{
		cols: []string{"ID", "NAME", "TENANT", "SCOPES", "CREATED", "EXPIRES", "REVOKED", "LAST USED"},
		wide: []string{"MAX SPEND", "CONSUMER"},
		row: func(k *api.Key) []string {
			return []string{k.ID, k.Name, k.Tenant, join(k.Scopes, ","), day(k.CreatedAt), day(k.ExpiresAt), day(k.RevokedAt), day(k.LastUsedAt), maxSpend(k.MaxSpend), k.Consumer}
		},
		name: func(k *api.Key) string { return k.ID },
	}
}

func keyCreateRun(ctx context.Context, o *keyCreateOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	k, err := s.CreateKey(ctx, o.k)
	if err != nil {
		return err
	}
	if format := o.f.format(); format != "table" && format != "wide" && format != "name" {
		return printData(o.f.io.out, format, k)
	}
	o.f.progress().done("key %s (%s) for tenant %s may %s; save it now: it is shown only once", k.Key.ID, k.Key.Name, k.Key.Tenant, join(k.Key.Scopes, ", "))
	_, err = fmt.Fprintln(o.f.io.out, k.Token)
	return err
}

func newCmdKeyLs(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the API keys", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return listed(cmd.Context(), f, keyView(), func(ctx context.Context, s *session) (*api.List[api.Key], error) { return s.Keys(ctx) })
		},
	}
}

func newCmdKeyRevoke(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "revoke ID", Aliases: []string{"rm"}, Short: "Revoke an API key immediately", Args: wants(1, 1, "the ID of one key"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			return keyRevokeRun(cmd.Context(), f, args[0])
		},
	}
}

func keyRevokeRun(ctx context.Context, f *factory, id string) error {
	s, err := f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.RevokeKey(ctx, id); err != nil {
		return err
	}
	f.progress().done("revoked key %s", id)
	return nil
}

func newCmdCredits(f *factory) *cobra.Command {
	return newGroup("credits", "Money: balances, grants, the ledger, usage", []string{"spend"}, newCmdCreditsBalance(f), newCmdCreditsGrant(f), newCmdCreditsLedger(f), newCmdCreditsExport(f), newCmdSink(f))
}

func balanceView() view[*api.Balance] {
	return view[*api.Balance]{
		name: func(b *api.Balance) string { return b.Balance.String() },
		detail: func(b *api.Balance) [][2]string {
			return [][2]string{{"tenant", b.Tenant}, {"balance", b.Balance.String()}}
		},
	}
}

func newCmdCreditsBalance(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "balance [TENANT]", Short: "Show the balance of a tenant (default: yours)", Args: wants(0, 1, "at most one tenant"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			return shown(cmd.Context(), f, balanceView(), func(ctx context.Context, s *session) (*api.Balance, error) {
				return s.Balance(ctx, strings.Join(args, "")) // at most one
			})
		},
	}
}

func newCmdCreditsGrant(f *factory) *cobra.Command {
	var g api.Grant
	c := &cobra.Command{
		Use: "grant TENANT AMOUNT", Short: "Add credits to a tenant's balance", Args: wants(2, 2, "a tenant and an amount"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			g.Tenant = args[0]
			amount, err := sandboxer.ParseCredits(args[1])
			if err != nil {
				return err
			}
			g.Amount = api.Credits(amount)
			return shown(cmd.Context(), f, balanceView(), func(ctx context.Context, s *session) (*api.Balance, error) { return s.Grant(ctx, g) })
		},
	}
	c.Flags().StringVar(&g.Key, "key", "", "operation `KEY`: the same grant under the same key counts once; another grant under it is a conflict")
	c.Flags().StringVar(&g.Note, "note", "", "`TEXT` for the ledger")
	return c
}

func newCmdCreditsLedger(f *factory) *cobra.Command {
	var q api.EntryQuery
	c := &cobra.Command{
		Use: "ledger", Short: "List the ledger's entries, oldest first",
		Long: "List the ledger's entries, oldest first. The balance is the sum of grants, holds and voids: a hold takes the\n" +
			"money out of the balance, a post says how much of the hold was charged, and a void gives back the rest.",
		Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkLimit(q.Limit); err != nil {
				return err
			}
			return listed(cmd.Context(), f, entryView(), func(ctx context.Context, s *session) (*api.List[api.Entry], error) { return s.Entries(ctx, q) })
		},
	}
	c.Flags().StringVar(&q.Tenant, "tenant", "", "only of this `TENANT`")
	c.Flags().StringVar(&q.SandboxID, "sandbox", "", "only of this sandbox `ID`")
	pageFlags(c, &q.Limit, &q.Cursor)
	return c
}

func entryView() view[*api.Entry] {
	return view[*api.Entry]{
		cols: []string{"TIME", "TENANT", "TYPE", "AMOUNT", "SANDBOX", "NOTE"},
		wide: []string{"KEY", "API KEY"},
		row: func(e *api.Entry) []string {
			return []string{e.At.Local().Format("2006-01-02 15:04:05"), e.Tenant, string(e.Type), e.Amount.String(), e.SandboxID, e.Note, e.Key, e.KeyID}
		},
		name: func(e *api.Entry) string { return e.Key },
	}
}

type auditOptions struct {
	f    *factory
	deep bool
}

func newCmdAudit(f *factory) *cobra.Command {
	o := &auditOptions{f: f}
	c := &cobra.Command{
		Use: "audit", Short: "Check the database, and compare it with every backend",
		Long: "Check the database, and compare it with the objects of every backend. Exits with 10 when something is wrong,\n" +
			"or could not be checked because a backend does not answer. --deep also reads the\n" +
			"data of all portable snapshots and checks their digests. This may take long; you can interrupt it at any time.",
		Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return auditRun(cmd.Context(), o)
		},
	}
	c.Flags().BoolVar(&o.deep, "deep", false, "also read the content of portable snapshots")
	return c
}

func auditRun(ctx context.Context, o *auditOptions) error {
	p := o.f.progress()
	defer p.stop()
	s, err := o.f.connectOrEmbed(ctx, p)
	if err != nil {
		return err
	}
	defer s.close()
	audit := s.Audit
	if o.deep {
		p.note("reading the data of all portable snapshots")
		audit = s.DeepAudit
	}
	a, err := audit(ctx)
	if err != nil {
		return err
	}
	switch format := o.f.format(); format {
	case "table", "wide":
		fmt.Fprintf(o.f.io.out, "%d checked, %d violations\n", a.Checked, len(a.Violations)+a.LeftOut)
		if len(a.Violations) > 0 {
			rows := [][]string{{"INVARIANT", "SANDBOX", "DETAIL"}}
			for _, v := range a.Violations {
				rows = append(rows, []string{v.Invariant, v.SandboxID, v.Detail})
			}
			if err := table(o.f.io.out, rows); err != nil {
				return err
			}
			if a.LeftOut > 0 {
				fmt.Fprintf(o.f.io.out, "%d more are left out\n", a.LeftOut)
			}
		}
	case "name":
		for _, v := range a.Violations {
			fmt.Fprintln(o.f.io.out, clean(v.SandboxID))
		}
	default:
		if err := printData(o.f.io.out, format, a); err != nil {
			return err
		}
	}
	if len(a.Violations) > 0 {
		return &exitError{exitFindings, nil}
	}
	return nil
}

func newCmdAccept(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "accept", Short: "Accept a database that went back in time", Args: wants(0, 0, "no arguments"),
		Long: "After a backup was restored or writes were lost, the server ends and pauses no sandbox on a deadline until this\n" +
			"command is run. 'sandboxer audit' lists the objects that the database does not know, and the sandboxes that expired by\n" +
			"their records: extend those that you want to keep; the others end after this command.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return shown(cmd.Context(), f, statusView(), func(ctx context.Context, s *session) (*api.Status, error) {
				st, err := s.AcceptDatabase(ctx)
				if err == nil {
					f.progress().done("the database is accepted; deadlines count")
				}
				return st, err
			})
		},
	}
}

type forgetOptions struct {
	f    *factory
	refs []string
	yes  bool
}

func newCmdForget(f *factory) *cobra.Command {
	o := &forgetOptions{f: f}
	c := &cobra.Command{
		Use: "forget ID…", Short: "Give up sandboxes whose host is gone for good", Args: wants(1, -1, "a sandbox"),
		Long: "End the record of a sandbox that cannot be removed, because its host or machine will never answer again. Nothing is\n" +
			"removed there. The command prints what may remain and keeps it in the record (cleanup); 'sandboxer audit' lists it\n" +
			"until the host confirms that it is gone. If the host comes back, its leftovers belong to no sandbox and are removed.\n" +
			"On a terminal the command asks before it forgets more than one; --yes confirms.",
		ValidArgsFunction: f.completeSandboxes,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.refs = args
			return forgetRun(cmd.Context(), o)
		},
	}
	c.Flags().BoolVar(&o.yes, "yes", false, "do not ask")
	return c
}

func forgetRun(ctx context.Context, o *forgetOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	if len(o.refs) > 1 && !o.yes {
		if !o.f.io.inTTY {
			return invalid("confirmation is needed to give them all up, and stdin is not a terminal").WithHint("add --yes")
		}
		ok, err := ask(o.f.io, "Give up %s? Leftovers on the host stay there.", join(o.refs, ", "))
		if err != nil {
			return err
		}
		if !ok {
			return sandboxer.E(sandboxer.Canceled, nil, "nothing was given up")
		}
	}
	for _, ref := range o.refs {
		sb, err := s.Forget(ctx, ref)
		if err != nil {
			return err
		}
		if c := sb.Cleanup; c != nil && c.Forgotten {
			for _, what := range c.Kept {
				fmt.Fprintf(o.f.io.err, "%s: these may remain: %s\n", sb.ID, clean(what))
			}
		}
		if err := printOne(o.f, sb, sandboxID()); err != nil {
			return err
		}
	}
	return nil
}

func newCmdReconcile(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "reconcile", Aliases: []string{"sweep"}, Short: "Run one pass of the sweep now",
		Long: "Compare the records with the backends once and take the steps that are due: end expired sandboxes, finish pending\n" +
			"work, and remove objects without a record. The server does this every few seconds.",
		Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return reconcileRun(cmd.Context(), f)
		},
	}
}

func reconcileRun(ctx context.Context, f *factory) error {
	p := f.progress()
	defer p.stop()
	s, err := f.connectOrEmbed(ctx, p)
	if err != nil {
		return err
	}
	defer s.close()
	r, err := s.Sweep(ctx)
	if err != nil {
		return err
	}
	return printOne(f, r, view[*api.Sweep]{
		name: func(*api.Sweep) string { return "" },
		detail: func(r *api.Sweep) [][2]string {
			var rows [][2]string
			for _, x := range []struct {
				name string
				n    int
			}{{"seen", r.Seen}, {"expired", r.Expired}, {"torn down", r.Torndown}, {"adopted", r.Adopted}, {"lost", r.Lost}, {"orphans", r.Orphans}, {"quarantined", r.Quarantined}, {"failed", r.Failed}, {"damaged", r.Damaged}} {
				rows = append(rows, [2]string{x.name, fmt.Sprint(x.n)})
			}
			return rows
		},
	})
}
