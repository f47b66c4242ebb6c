package manager

import (
	"context"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/spec"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// liveStates are the states in which something may exist outside the database.
var liveStates = slices.DeleteFunc(sandboxer.States(), func(s sandboxer.State) bool { return !s.Live() })

// Get returns the sandbox that ref means: an ID, a name, or the beginning of an ID (3 characters or more) that only one sandbox
// has. TENANT/ may precede it, which an administrator needs if two tenants have it. Living sandboxes take precedence over ended
// ones. Kinds: NotFound if there is none, or it is another tenant's; Conflict if ref is ambiguous, and the message lists the
// sandboxes; Failed if its record is damaged.
func (m *Manager) Get(ctx context.Context, ref string) (*sandboxer.Sandbox, error) {
	sb, err := m.find(ctx, sandboxer.ScopeRead, ref)
	if err != nil {
		return nil, err
	}
	return sb, nil
}

// GetChosen returns the newest sandbox, also one that has ended, that the caller's tenant has under an ID that it chose,
// directly or by a thread. Unlike Get it accepts no name, no beginning of an ID and no other tenant's sandbox. Kinds: NotFound
// if there never was one; Failed if its record is damaged.
func (m *Manager) GetChosen(ctx context.Context, id string) (*sandboxer.Sandbox, error) {
	p, err := access.May(ctx, sandboxer.ScopeRead)
	if err != nil {
		return nil, err
	}
	sb, err := m.store.SandboxShown(ctx, p.Tenant, id)
	switch {
	case isKind(err, sandboxer.NotFound):
		return nil, noSuchSandbox(id)
	case err != nil:
		return nil, err
	}
	return m.withLastUse(sb), nil
}

// find is Get for a principal that needs scope. With the error about a damaged record it returns the readable part of the
// record.
func (m *Manager) find(ctx context.Context, scope sandboxer.Scope, ref string) (*sandboxer.Sandbox, error) {
	p, err := access.May(ctx, scope)
	if err != nil {
		return nil, err
	}
	asked, own, tenant := ref, p.Tenant, p.Tenant
	if p.Can(sandboxer.ScopeAdmin) {
		tenant = ""
	}
	if whose, rest, ok := cutRef(ref); ok {
		own, ref = whose, rest
		if tenant != "" && tenant != own {
			return nil, noSuchSandbox(asked)
		}
		tenant = own
	}
	if sandboxer.CheckID(ref) == nil {
		if sb, err := m.findID(ctx, tenant, ref); sb != nil || err != nil {
			return sb, err
		}
	}
	if ref != "" && spec.CheckName(ref) == nil {
		for _, tenants := range slices.Compact([]string{own, tenant}) {
			for _, states := range [][]sandboxer.State{liveStates, nil} {
				items, _, err := m.store.Sandboxes(ctx, sandboxer.Query{Tenant: tenants, Name: ref, States: states, Limit: 2})
				if err != nil {
					return nil, err
				}
				if len(items) == 1 || len(items) > 1 && states == nil && tenants != "" {
					return sandboxRecords.whole(m.withLastUse(items[0]))
				}
				if len(items) > 1 && tenants == "" {
					return nil, ambiguous(ref, items)
				}
			}
		}
	}
	if len(ref) >= 3 && sandboxer.CheckID(strings.TrimRight(ref, "-")) == nil {
		for _, states := range [][]sandboxer.State{liveStates, nil} {
			items, _, err := m.store.Sandboxes(ctx, sandboxer.Query{Tenant: tenant, IDPrefix: ref, States: states, Limit: 20})
			if err != nil {
				return nil, err
			}
			ids := slices.CompactFunc(items, func(a, b *sandboxer.Sandbox) bool { return a.ID == b.ID })
			if len(ids) == 1 {
				return sandboxRecords.whole(m.withLastUse(ids[0]))
			}
			if len(ids) > 1 {
				return nil, ambiguous(ref, ids)
			}
		}
	}
	return nil, noSuchSandbox(asked)
}

// cutRef splits TENANT/ID.
func cutRef(ref string) (tenant, id string, ok bool) {
	i := strings.LastIndexByte(ref, '/')
	if i <= 0 {
		return "", ref, false
	}
	return ref[:i], ref[i+1:], true
}

func noSuchSandbox(ref string) error {
	return sandboxer.E(sandboxer.NotFound, nil, "there is no sandbox %q", ref).
		WithHint("list yours: sandboxer ls --all")
}

// findID is find for an ID. It searches for the sandbox whose tenant uses that ID, then for the one whose objects carry it. It
// returns nil if there is none. Without a tenant it searches those of all tenants.
func (m *Manager) findID(ctx context.Context, tenant, id string) (*sandboxer.Sandbox, error) {
	exact, err := m.store.Sandbox(ctx, id)
	switch {
	case exact == nil && !isKind(err, sandboxer.NotFound):
		return nil, err
	case exact != nil && tenant != "" && exact.Tenant != tenant: // another tenant's
		exact = nil
	}
	if tenant != "" {
		if exact != nil && err == nil && exact.Shown() == id && exact.State.Live() {
			return m.withLastUse(exact), nil // as almost always
		}
		switch shown, err := m.store.SandboxShown(ctx, tenant, id); {
		case shown != nil && err == nil:
			return m.withLastUse(shown), nil
		case shown != nil || !isKind(err, sandboxer.NotFound):
			return shown, err
		}
	} else {
		// Ended ones count: a caller that destroys one twice must not end another tenant's.
		tenants, terr := m.store.TenantsOfShown(ctx, id)
		switch {
		case terr != nil:
			return nil, terr
		case len(tenants) > 1:
			return nil, sandboxer.E(sandboxer.Conflict, nil, "%q means several sandboxes: %s", id, suggest.List(refsOf(tenants, id))).
				WithHint("name the tenant, too: TENANT/ID")
		case len(tenants) == 1:
			shown, serr := m.store.SandboxShown(ctx, tenants[0], id)
			if serr == nil {
				shown = m.withLastUse(shown)
			}
			return shown, serr
		}
	}
	if exact == nil {
		return nil, nil
	}
	if err != nil {
		return exact, err // damaged
	}
	return m.withLastUse(exact), nil
}

// refsOf returns the full form of id for each of tenants.
func refsOf(tenants []string, id string) (refs []string) {
	for _, tenant := range tenants {
		refs = append(refs, (&sandboxer.Sandbox{Tenant: tenant, ID: id}).Ref())
	}
	return refs
}

func ambiguous(ref string, items []*sandboxer.Sandbox) error {
	var names []string
	hint := "write more of the ID"
	for _, sb := range items {
		name := sb.Shown()
		if slices.ContainsFunc(items, func(o *sandboxer.Sandbox) bool { return o.Shown() == name && o.Tenant != sb.Tenant }) {
			name, hint = sb.Ref(), "name the tenant, too: TENANT/ID"
		}
		if sb.Name != "" {
			name += " (" + sb.Name + ", " + sb.Tenant + ")"
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return sandboxer.E(sandboxer.Conflict, nil, "%q means several sandboxes: %s", ref, suggest.List(names)).
		WithHint("%s", hint)
}

// withLastUse adds the data that is only in memory to a record of the store.
func (m *Manager) withLastUse(sb *sandboxer.Sandbox) *sandboxer.Sandbox {
	if at, _ := m.usage.last(sb.ID); sb.State == sandboxer.Running && at.After(sb.UsedAt) {
		sb.UsedAt = at
	}
	return sb
}

// List pages through sandboxes, newest first. Without the admin scope only the
// caller's tenant is listed.
func (m *Manager) List(ctx context.Context, q sandboxer.Query) ([]*sandboxer.Sandbox, string, error) {
	p, err := access.May(ctx, sandboxer.ScopeRead)
	if err != nil {
		return nil, "", err
	}
	if !p.Can(sandboxer.ScopeAdmin) {
		if q.Tenant != "" && q.Tenant != p.Tenant {
			return nil, "", nil
		}
		q.Tenant = p.Tenant
	}
	if err := access.CheckPage(q.Limit); err != nil {
		return nil, "", err
	}
	for _, s := range q.States {
		if !s.Valid() {
			return nil, "", sandboxer.E(sandboxer.Invalid, nil, "%q is not a state%s", s, suggest.DidYouMean(string(s), strings.Split(suggest.List(sandboxer.States()), ", "))).
				WithHint("the states are: %s", suggest.List(sandboxer.States()))
		}
	}
	if q.Profile != "" {
		if prof, err := m.profile(q.Profile); err == nil { // one that exists no more still has its history
			q.Profile = prof.ID
		}
	}
	items, next, err := m.store.Sandboxes(ctx, q)
	for _, sb := range items {
		m.withLastUse(sb)
	}
	return items, next, err
}

// Wait returns the sandbox once it is in one of states; without states, once its state is not transitional. If it ends in
// another state, Wait fails with the sandbox's own failure, or with Conflict. It fails with ctx's error when ctx ends first.
func (m *Manager) Wait(ctx context.Context, ref string, states ...sandboxer.State) (*sandboxer.Sandbox, error) {
	sb, err := m.find(ctx, sandboxer.ScopeRead, ref)
	if err != nil {
		return nil, err
	}
	if len(states) == 0 {
		states = []sandboxer.State{sandboxer.Warm, sandboxer.Running, sandboxer.Paused, sandboxer.Terminated}
	}
	return m.box(sb).waitState(ctx, states...)
}

// waitState is Wait for one generation.
func (bx box) waitState(ctx context.Context, states ...sandboxer.State) (*sandboxer.Sandbox, error) {
	ctx, cancel := bx.m.untilClosed(ctx)
	defer cancel(nil)
	changed, unsubscribe := bx.m.events.Subscribe(bx.sb.ID)
	defer unsubscribe()
	for {
		sb, err := bx.m.store.SandboxGeneration(ctx, bx.sb.ID, bx.sb.Generation)
		if err != nil {
			return nil, err
		}
		if slices.Contains(states, sb.State) {
			return bx.m.withLastUse(sb), nil
		}
		if sb.State == sandboxer.Terminated || sb.State == sandboxer.Terminating && !slices.Contains(states, sandboxer.Terminated) {
			if err := failure(sb); err != nil {
				return sb, err
			}
			return sb, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s (%s) and will not become %s", sb.Shown(), sb.State, sb.Reason, suggest.List(states))
		}
		if err := events.Wait(ctx, changed); err != nil {
			return nil, err
		}
	}
}
