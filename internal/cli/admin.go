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
	return newGroup("key", "API keys: make, list and revoke them", []string{"keys"}, newCmdKeyCreate(f, nil), newCmdKeyLs(f, nil), newCmdKeyRevoke(f, nil))
}

type keyCreateOptions struct {
	f *factory
	k api.NewKey
}

func newCmdKeyCreate(f *factory, runF func(context.Context, *keyCreateOptions) error) *cobra.Command {
	o := &keyCreateOptions{f: f}
	var scopes []string
	var ttl string
	c := &cobra.Command{
		Use: "create [NAME]", Short: "Make an API key and print it, this one time", Args: wants(0, 1, "at most a name"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				if o.k.Name != "" && o.k.Name != args[0] {
					return invalid("the key's name is given twice: %q and --name %q", args[0], o.k.Name)
				}
				o.k.Name = args[0]
			}
			if o.k.Name == "" {
				return invalid("the key needs a name, to be known by later").WithHint("sandboxer key create ci")
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
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return keyCreateRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.k.Name, "name", "", "`name` to know it by")
	c.Flags().StringVar(&o.k.Tenant, "tenant", "", "`tenant` it acts for (default: yours)")
	c.Flags().StringSliceVar(&scopes, "scope", []string{string(sandboxer.ScopeRead), string(sandboxer.ScopeWrite)}, "`right` it has: read, write, admin")
	c.Flags().StringVar(&ttl, "ttl", "", "`lifetime`; without it the key does not expire")
	complete(c, "scope", scopeWords()...)
	return c
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
		row: func(k *api.Key) []string {
			return []string{k.ID, k.Name, k.Tenant, join(k.Scopes, ","), day(k.CreatedAt), day(k.ExpiresAt), day(k.RevokedAt), day(k.LastUsedAt)}
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
	o.f.progress().done("key %s (%s) for tenant %s may %s; keep it: it is shown this one time", k.Key.ID, k.Key.Name, k.Key.Tenant, join(k.Key.Scopes, ", "))
	_, err = fmt.Fprintln(o.f.io.out, k.Token)
	return err
}

type plainOptions struct{ f *factory }

func newCmdKeyLs(f *factory, runF func(context.Context, *plainOptions) error) *cobra.Command {
	o := &plainOptions{f}
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the API keys", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return keyLsRun(cmd.Context(), o)
		},
	}
}

func keyLsRun(ctx context.Context, o *plainOptions) error {
	return listed(ctx, o.f, keyView(), func(s *session) (*api.List[api.Key], error) { return s.Keys(ctx) })
}

func newCmdKeyRevoke(f *factory, runF func(context.Context, *refOptions) error) *cobra.Command {
	o := &refOptions{f: f}
	return &cobra.Command{
		Use: "revoke ID", Aliases: []string{"rm"}, Short: "Make an API key worthless at once", Args: wants(1, 1, "the ID of one key"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return keyRevokeRun(cmd.Context(), o)
		},
	}
}

func keyRevokeRun(ctx context.Context, o *refOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.RevokeKey(ctx, o.ref); err != nil {
		return err
	}
	o.f.progress().done("revoked key %s", o.ref)
	return nil
}

func newCmdCredits(f *factory) *cobra.Command {
	return newGroup("credits", "Money: balances, grants and the ledger", []string{"spend"}, newCmdCreditsBalance(f, nil), newCmdCreditsGrant(f, nil), newCmdCreditsLedger(f, nil))
}

func balanceView() view[*api.Balance] {
	return view[*api.Balance]{
		name: func(b *api.Balance) string { return b.Balance.String() },
		detail: func(b *api.Balance) [][2]string {
			return [][2]string{{"tenant", b.Tenant}, {"balance", b.Balance.String()}}
		},
	}
}

func newCmdCreditsBalance(f *factory, runF func(context.Context, *refOptions) error) *cobra.Command {
	o := &refOptions{f: f}
	return &cobra.Command{
		Use: "balance [TENANT]", Short: "Show a tenant's balance, yours if none is named", Args: wants(0, 1, "at most one tenant"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				o.ref = args[0]
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return creditsBalanceRun(cmd.Context(), o)
		},
	}
}

func creditsBalanceRun(ctx context.Context, o *refOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	b, err := s.Balance(ctx, o.ref)
	if err != nil {
		return err
	}
	return printOne(o.f, b, balanceView())
}

type creditsGrantOptions struct {
	f *factory
	g api.Grant
}

func newCmdCreditsGrant(f *factory, runF func(context.Context, *creditsGrantOptions) error) *cobra.Command {
	o := &creditsGrantOptions{f: f}
	c := &cobra.Command{
		Use: "grant TENANT AMOUNT", Short: "Add credits to a tenant's balance", Args: wants(2, 2, "a tenant and an amount"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.g.Tenant = args[0]
			amount, err := sandboxer.ParseCredits(args[1])
			if err != nil {
				return err
			}
			o.g.Amount = api.Credits(amount)
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return creditsGrantRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.g.Key, "key", "", "operation `key`: granting twice under one is granting once; another grant under it is a conflict")
	c.Flags().StringVar(&o.g.Note, "note", "", "`text` for the ledger")
	return c
}

func creditsGrantRun(ctx context.Context, o *creditsGrantOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	b, err := s.Grant(ctx, o.g)
	if err != nil {
		return err
	}
	return printOne(o.f, b, balanceView())
}

type creditsLedgerOptions struct {
	f *factory
	q api.EntryQuery
}

func newCmdCreditsLedger(f *factory, runF func(context.Context, *creditsLedgerOptions) error) *cobra.Command {
	o := &creditsLedgerOptions{f: f}
	c := &cobra.Command{
		Use: "ledger", Short: "List the ledger's entries, oldest first", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkLimit(o.q.Limit); err != nil {
				return err
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return creditsLedgerRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.q.Tenant, "tenant", "", "only of this `tenant`")
	c.Flags().StringVar(&o.q.SandboxID, "sandbox", "", "only of this sandbox `ID`")
	pageFlags(c, &o.q.Limit, &o.q.Cursor)
	return c
}

func creditsLedgerRun(ctx context.Context, o *creditsLedgerOptions) error {
	return listed(ctx, o.f, view[*api.Entry]{
		cols: []string{"TIME", "TENANT", "TYPE", "AMOUNT", "SANDBOX", "NOTE"},
		wide: []string{"KEY"},
		row: func(e *api.Entry) []string {
			return []string{e.At.Local().Format("2006-01-02 15:04:05"), e.Tenant, string(e.Type), e.Amount.String(), e.SandboxID, e.Note, e.Key}
		},
		name: func(e *api.Entry) string { return e.Key },
	}, func(s *session) (*api.List[api.Entry], error) { return s.Entries(ctx, o.q) })
}

type auditOptions struct {
	f    *factory
	deep bool
}

func newCmdAudit(f *factory, runF func(context.Context, *auditOptions) error) *cobra.Command {
	o := &auditOptions{f: f}
	c := &cobra.Command{
		Use: "audit", Short: "Compare the database with itself and with every backend",
		Long: "Compare the database with itself and with what every backend lists. Exits with 10 when something is wrong,\n" +
			"or could not be checked because a backend does not answer. With --deep all that is kept of portable snapshots is\n" +
			"read and held against its digests, too, which may take long; interrupt it at any time.",
		Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return auditRun(cmd.Context(), o)
		},
	}
	c.Flags().BoolVar(&o.deep, "deep", false, "read the content of portable snapshots, too")
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
		p.note("reading all that is kept of portable snapshots")
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

type adoptOptions struct {
	refOptions
	adopt api.AdoptSandbox
}

func newCmdAdopt(f *factory, runF func(context.Context, *adoptOptions) error) *cobra.Command {
	o := &adoptOptions{refOptions: refOptions{f: f}}
	var ttl string
	c := &cobra.Command{
		Use: "adopt ID", Short: "Make a record anew for a sandbox that the database lost", Args: wants(1, 1, "one sandbox"),
		Long: "After a restored backup, or lost writes, sandboxes that are younger than the database are kept and listed by\n" +
			"'sandboxer ls --quarantined'. Adopt one, and it is its tenant's again, with what its stamp says; its time is paid for\n" +
			"from now on. What has no stamp needs --tenant and --profile. 'sandboxer destroy ID' gets rid of one instead.",
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if ttl != "" {
				d, err := parseDuration("--ttl", ttl)
				if err != nil {
					return err
				}
				o.adopt.TTL = d
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return adoptRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.adopt.Tenant, "tenant", "", "whose it becomes, if it has no stamp: a `tenant`")
	c.Flags().StringVar(&o.adopt.Profile, "profile", "", "what it was made from, if it has no stamp: a `profile`")
	c.Flags().StringVar(&ttl, "ttl", "", "`lifetime` from now; left out, as long as before")
	_ = c.RegisterFlagCompletionFunc("profile", f.completeProfiles)
	return c
}

func adoptRun(ctx context.Context, o *adoptOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	sb, err := s.Adopt(ctx, o.ref, o.adopt)
	if err != nil {
		return err
	}
	p := o.f.progress()
	p.done("%s is tenant %s's and expires %s", sb.ID, sb.Tenant, moment(sb.ExpiresAt, until))
	return printOne(o.f, sb, sandboxID())
}

type forgetOptions struct {
	f    *factory
	refs []string
	yes  bool
}

func newCmdForget(f *factory, runF func(context.Context, *forgetOptions) error) *cobra.Command {
	o := &forgetOptions{f: f}
	c := &cobra.Command{
		Use: "forget ID…", Short: "Give up sandboxes whose host is gone for good", Args: wants(1, -1, "a sandbox"),
		Long: "End the record of a sandbox that could not be removed, because its host or machine will never answer again. Nothing is\n" +
			"removed there: what may remain is printed, kept in the record (cleanup), and named by 'sandboxer audit' until the host\n" +
			"answers that it is gone. Should the host come back, what is there belongs to no sandbox and is swept. More than one is\n" +
			"asked about on a terminal; --yes answers.",
		ValidArgsFunction: f.completeSandboxes,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.refs = args
			if runF != nil {
				return runF(cmd.Context(), o)
			}
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
			return invalid("nobody can be asked whether to give them all up").WithHint("add --yes")
		}
		ok, err := ask(o.f.io, "Give up %s? What is left on the host stays there.", join(o.refs, ", "))
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
				fmt.Fprintf(o.f.io.err, "%s: there may remain: %s\n", sb.ID, clean(what))
			}
		}
		if err := printOne(o.f, sb, sandboxID()); err != nil {
			return err
		}
	}
	return nil
}

func newCmdReconcile(f *factory, runF func(context.Context, *plainOptions) error) *cobra.Command {
	o := &plainOptions{f}
	return &cobra.Command{
		Use: "reconcile", Aliases: []string{"sweep"}, Short: "Run one pass of the sweep now",
		Long: "Compare records with backends once and take the steps that are due: end what has expired, finish what was begun,\n" +
			"remove what no record explains. The server does so every few seconds by itself.",
		Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return reconcileRun(cmd.Context(), o)
		},
	}
}

func reconcileRun(ctx context.Context, o *plainOptions) error {
	p := o.f.progress()
	defer p.stop()
	s, err := o.f.connectOrEmbed(ctx, p)
	if err != nil {
		return err
	}
	defer s.close()
	r, err := s.Sweep(ctx)
	if err != nil {
		return err
	}
	return printOne(o.f, r, view[*api.Sweep]{
		name: func(*api.Sweep) string { return "" },
		detail: func(r *api.Sweep) [][2]string {
			var rows [][2]string
			for _, x := range []struct {
				name string
				n    int
			}{{"seen", r.Seen}, {"expired", r.Expired}, {"torn down", r.Torndown}, {"adopted", r.Adopted}, {"lost", r.Lost}, {"orphans", r.Orphans}, {"quarantined", r.Quarantined}, {"unconfirmed", r.Unconfirmed}, {"failed", r.Failed}, {"damaged", r.Damaged}} {
				rows = append(rows, [2]string{x.name, fmt.Sprint(x.n)})
			}
			return rows
		},
	})
}
