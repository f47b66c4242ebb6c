package server

import (
	"context"
	"os"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/manager"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

func (s *Server) profiles(ctx context.Context, _ *none) (*reply[api.List[api.Profile]], error) {
	return listed(api.NewProfile, s.m.Profiles(ctx), "", nil)
}

type inID struct {
	ID string `path:"id" maxLength:"128"`
}

func (s *Server) profile(ctx context.Context, in *inID) (*reply[api.Profile], error) {
	slug := strings.TrimPrefix(in.ID, "profile.")
	var known []string
	for _, p := range s.m.Profiles(ctx) {
		if p.ID == "profile."+slug {
			return &reply[api.Profile]{Body: api.NewProfile(p)}, nil
		}
		known = append(known, strings.TrimPrefix(p.ID, "profile."))
	}
	e := sandboxer.E(sandboxer.NotFound, nil, "profile %q does not exist", in.ID)
	if n := suggest.Nearest(slug, known); n != "" {
		return nil, e.WithHint("did you mean %q?", "profile."+n)
	}
	return nil, e.WithHint("list them with: sandboxer profile ls")
}

func (s *Server) extensions(ctx context.Context, _ *none) (*reply[api.List[api.Extension]], error) {
	return listOf(s.m.Extensions(ctx), ""), nil
}

func (s *Server) probe(ctx context.Context, in *inID) (*reply[api.HostCapacity], error) {
	o, err := s.m.Probe(ctx, in.ID)
	return &reply[api.HostCapacity]{Body: o}, err
}

func (s *Server) reload(ctx context.Context, _ *none) (*reply[api.Reload], error) {
	if s.opts.Reload == nil {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "this server cannot read its profiles again")
	}
	r, err := s.opts.Reload(ctx)
	return &reply[api.Reload]{Body: r}, err
}

func (s *Server) createKey(ctx context.Context, _ *none, b api.NewKey) (*reply[api.CreatedKey], error) {
	token, key, err := s.m.CreateKey(ctx, b)
	if err != nil {
		return nil, err
	}
	return &reply[api.CreatedKey]{Body: api.CreatedKey{Token: token.Reveal(), Key: key}}, nil
}

func (s *Server) keys(ctx context.Context, _ *none) (*reply[api.List[api.Key]], error) {
	ks, err := s.m.Keys(ctx)
	return listOf(ks, ""), err
}

func (s *Server) revokeKey(ctx context.Context, in *inID) (*none, error) {
	return nil, s.m.RevokeKey(ctx, in.ID)
}

// InSecrets says whose secrets are meant.
type InSecrets struct {
	Operator bool `query:"operator" doc:"The operator's, which files of extensions name; for administrators"`
}

// InSecret names a secret.
type InSecret struct {
	InSecrets
	Name string `path:"name" maxLength:"128" doc:"1 to 64 letters, digits, dots, hyphens and underscores, beginning with a letter or a digit"`
}

func (s *Server) setSecret(ctx context.Context, in *InSecret, b api.SetSecret) (*reply[api.Secret], error) {
	rec, err := s.m.SetSecret(ctx, in.Name, in.Operator, sandboxer.Secret(b.Value))
	return &reply[api.Secret]{Body: api.NewSecret(rec)}, err
}

func (s *Server) secrets(ctx context.Context, in *InSecrets) (*reply[api.List[api.Secret]], error) {
	all, err := s.m.Secrets(ctx, in.Operator)
	return listed(api.NewSecret, all, "", err)
}

type inRemoveSecret struct {
	InSecret
	Force bool `query:"force" doc:"Also if something needs it, which then cannot read it any more; for administrators"`
}

func (s *Server) removeSecret(ctx context.Context, in *inRemoveSecret) (*none, error) {
	return nil, s.m.RemoveSecret(ctx, in.Name, in.Operator, in.Force)
}

type InTenant struct {
	Tenant string `query:"tenant" doc:"The caller's if empty; another's for administrators"`
}

func (s *Server) balance(ctx context.Context, in *InTenant) (*reply[api.Balance], error) {
	return s.balanceOf(ctx, in.Tenant)
}

func (s *Server) balanceOf(ctx context.Context, tenant string) (*reply[api.Balance], error) {
	if tenant == "" {
		tenant = sandboxer.PrincipalFrom(ctx).Tenant
	}
	c, err := s.m.Balance(ctx, tenant)
	if err != nil {
		return nil, err
	}
	return &reply[api.Balance]{Body: api.Balance{Tenant: tenant, Balance: api.Credits(c)}}, nil
}

type inQuotas struct {
	InPage
	Tenant string `query:"tenant" maxLength:"128" doc:"Another one than the caller's, for administrators"`
	All    bool   `query:"all" doc:"Every tenant, for administrators"`
}

func (s *Server) quotas(ctx context.Context, in *inQuotas) (*reply[api.List[api.Quota]], error) {
	all, next, err := s.m.Quotas(ctx, access.QuotaQuery{Tenant: in.Tenant, All: in.All, After: in.Cursor, Limit: in.Limit})
	return listed(func(q access.QuotaStatus) api.Quota {
		out := api.Quota{Tenant: q.Tenant}
		for _, r := range sandboxer.Resources() {
			x := api.QuotaResource{Resource: r, Used: q.Used[r]}
			if most, bounded := q.Quota[r]; bounded {
				x.Limit = &most
			}
			out.Resources = append(out.Resources, x)
		}
		return out
	}, all, next, err)
}

func (s *Server) grant(ctx context.Context, _ *none, b api.Grant) (*reply[api.Balance], error) {
	if err := s.m.Grant(ctx, b.Tenant, b.Amount.Std(), b.Key, b.Note); err != nil {
		return nil, err
	}
	return s.balanceOf(ctx, b.Tenant)
}

type inEntries struct {
	InPage
	InTenant
	Sandbox string `query:"sandbox" doc:"Only of this sandbox ID"`
}

func (s *Server) entries(ctx context.Context, in *inEntries) (*reply[api.List[api.Entry]], error) {
	es, next, err := s.m.Entries(ctx, sandboxer.EntryQuery{Tenant: in.Tenant, SandboxID: in.Sandbox, After: in.Cursor, Limit: in.Limit})
	return listed(api.NewEntry, es, next, err)
}

type inAudit struct {
	Deep bool `query:"deep" doc:"Also read the data of every portable snapshot, which may take long"`
}

func (s *Server) audit(ctx context.Context, in *inAudit) (*reply[api.Audit], error) {
	audit := s.m.Audit
	if in.Deep {
		audit = s.m.DeepAudit
	}
	a, err := audit(ctx)
	if err != nil {
		return nil, err
	}
	out := api.Audit{SchemaVersion: api.SchemaVersion, Checked: a.Checked, LeftOut: a.LeftOut, Violations: []api.Violation{}}
	for _, v := range a.Violations {
		out.Violations = append(out.Violations, api.Violation(v))
	}
	return &reply[api.Audit]{Body: out}, nil
}

func (s *Server) quarantine(ctx context.Context, _ *none) (*reply[api.List[api.Quarantined]], error) {
	qs, err := s.m.Quarantine(ctx)
	return listed(func(q manager.Quarantined) api.Quarantined { return api.Quarantined(q) }, qs, "", err)
}

func (s *Server) forget(ctx context.Context, in *InRef) (*reply[api.Sandbox], error) {
	return sandboxReply(s.m.Forget(ctx, in.ID))
}

func (s *Server) acceptDatabase(ctx context.Context, in *none) (*reply[api.Status], error) {
	if err := s.m.AcceptDatabase(ctx); err != nil {
		return nil, err
	}
	return s.status(ctx, in)
}

func (s *Server) sweep(ctx context.Context, _ *none) (*reply[api.Sweep], error) {
	r, err := s.m.Sweep(ctx)
	return &reply[api.Sweep]{Body: api.Sweep(r)}, err
}

func (s *Server) status(ctx context.Context, _ *none) (*reply[api.Status], error) {
	p := sandboxer.PrincipalFrom(ctx)
	counts, err := s.count(ctx)
	if err != nil {
		return nil, err
	}
	out := api.Status{
		SchemaVersion: api.SchemaVersion, Version: s.opts.Version, Owner: s.opts.Owner, PID: os.Getpid(),
		StartedAt: s.started.UTC(), Uptime: api.Duration(time.Since(s.started).Round(time.Second)),
		Tenant: p.Tenant, Actor: p.Actor, Scopes: p.Scopes, Sandboxes: counts,
	}
	if p.Can(sandboxer.ScopeAdmin) {
		out.Data = s.opts.Data
		qs, err := s.m.Quarantine(ctx)
		if err != nil {
			return nil, err
		}
		out.Quarantined = len(qs)
		out.WentBack = s.m.WentBack()
	}
	for _, e := range s.m.Extensions(ctx) {
		out.Extensions++
		for _, n := range e.Notices {
			out.Notices = append(out.Notices, e.ID+": "+n)
		}
		if e.Problem != "" {
			out.Unavailable = append(out.Unavailable, e.ID)
		}
	}
	return &reply[api.Status]{Body: out}, nil
}

// extensionInfos returns all extensions, also to a caller that may not read.
func (s *Server) extensionInfos(ctx context.Context) []sandboxer.ExtensionInfo {
	return s.m.Extensions(sandboxer.WithPrincipal(ctx, sandboxer.Principal{Tenant: "server", Actor: "server", Scopes: []sandboxer.Scope{sandboxer.ScopeRead}}))
}

// extensionIDs returns the IDs of all extensions, and of those that cannot be used now.
func (s *Server) extensionIDs(ctx context.Context) (all, down []string) {
	for _, e := range s.extensionInfos(ctx) {
		all = append(all, e.ID)
		if e.Problem != "" {
			down = append(down, e.ID)
		}
	}
	return all, down
}

// count counts the live sandboxes that ctx's principal sees, by state.
func (s *Server) count(ctx context.Context) (map[sandboxer.State]int, error) {
	counts := map[sandboxer.State]int{}
	q := sandboxer.Query{States: liveStates(), Limit: sandboxer.MaxPage}
	for _, st := range q.States {
		counts[st] = 0
	}
	for {
		sbs, next, err := s.m.List(ctx, q)
		if err != nil {
			return nil, err
		}
		for _, sb := range sbs {
			counts[sb.State]++
		}
		if q.After = next; next == "" {
			return counts, nil
		}
	}
}
