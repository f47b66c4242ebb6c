package manager

import (
	"context"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// liveStates are the states in which something may exist outside the database.
var liveStates = slices.DeleteFunc(sandboxer.States(), func(s sandboxer.State) bool { return !s.Live() })

// Get returns the sandbox that ref means: an ID, a name, or the beginning of an ID (3
// characters or more) that only one sandbox has; each perhaps after TENANT/, which an
// administrator needs where two tenants have it. Living sandboxes go before ended
// ones. NotFound: there is none, or it is another tenant's. Conflict: several are
// meant; the message lists them. Failed: its record is damaged.
func (m *Manager) Get(ctx context.Context, ref string) (*sandboxer.Sandbox, error) {
	sb, err := m.find(ctx, sandboxer.ScopeRead, ref)
	if err != nil {
		return nil, err
	}
	return sb, nil
}

// GetChosen returns the newest sandbox, also one that has ended, that the caller's tenant has
// under an ID that it chose, itself or by a thread. Unlike Get it takes nothing else for it: no name, no part of an
// ID, no other tenant's. NotFound: there never was one. Failed: its record is damaged.
func (m *Manager) GetChosen(ctx context.Context, id string) (*sandboxer.Sandbox, error) {
	p, err := may(ctx, sandboxer.ScopeRead)
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

// find is Get for a principal that needs scope. With the error about a damaged record
// comes what is left of that.
func (m *Manager) find(ctx context.Context, scope sandboxer.Scope, ref string) (*sandboxer.Sandbox, error) {
	p, err := may(ctx, scope)
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
	if ref != "" && checkName(ref) == nil {
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

// findID is find for an ID: the one that the sandbox's tenant knows it by or, where none is
// meant, the one that its objects carry. It returns nothing where there is none. Without a tenant
// it looks at those of all.
func (m *Manager) findID(ctx context.Context, tenant, id string) (*sandboxer.Sandbox, error) {
	exact, err := m.store.Sandbox(ctx, id)
	switch {
	case exact == nil && !isKind(err, sandboxer.NotFound):
		return nil, err
	case exact != nil && tenant != "" && exact.Tenant != tenant: // somebody else's
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
		// Ended ones count: who destroys one twice must not meet another tenant's.
		tenants, terr := m.store.TenantsOfShown(ctx, id)
		switch {
		case terr != nil:
			return nil, terr
		case len(tenants) > 1:
			return nil, sandboxer.E(sandboxer.Conflict, nil, "%q means several sandboxes: %s", id, join(refsOf(tenants, id))).
				WithHint("say whose: TENANT/ID")
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

// refsOf says in full what id means to each of tenants.
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
			name, hint = sb.Ref(), "say whose: TENANT/ID"
		}
		if sb.Name != "" {
			name += " (" + sb.Name + ", " + sb.Tenant + ")"
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return sandboxer.E(sandboxer.Conflict, nil, "%q means several sandboxes: %s", ref, join(names)).
		WithHint("%s", hint)
}

// withLastUse completes a record read from the store with what is only in memory.
func (m *Manager) withLastUse(sb *sandboxer.Sandbox) *sandboxer.Sandbox {
	if at, _ := m.usage.last(sb.ID); sb.State == sandboxer.Running && at.After(sb.UsedAt) {
		sb.UsedAt = at
	}
	return sb
}

// List pages through sandboxes, newest first. Without the admin scope only the
// caller's tenant is listed.
func (m *Manager) List(ctx context.Context, q sandboxer.Query) ([]*sandboxer.Sandbox, string, error) {
	p, err := may(ctx, sandboxer.ScopeRead)
	if err != nil {
		return nil, "", err
	}
	if !p.Can(sandboxer.ScopeAdmin) {
		if q.Tenant != "" && q.Tenant != p.Tenant {
			return nil, "", nil
		}
		q.Tenant = p.Tenant
	}
	if err := checkPage(q.Limit); err != nil {
		return nil, "", err
	}
	for _, s := range q.States {
		if !s.Valid() {
			return nil, "", sandboxer.E(sandboxer.Invalid, nil, "%q is not a state%s", s, didYouMean(string(s), strings.Split(join(sandboxer.States()), ", "))).
				WithHint("the states are: %s", join(sandboxer.States()))
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

// Wait returns the sandbox once it is in one of states; without states, once it is on
// its way to none. It fails with the sandbox's own failure, or with Conflict, when it
// has ended in another state, and with ctx's error when ctx ends first.
func (m *Manager) Wait(ctx context.Context, ref string, states ...sandboxer.State) (*sandboxer.Sandbox, error) {
	sb, err := m.find(ctx, sandboxer.ScopeRead, ref)
	if err != nil {
		return nil, err
	}
	if len(states) == 0 {
		states = []sandboxer.State{sandboxer.Warm, sandboxer.Running, sandboxer.Paused, sandboxer.Terminated}
	}
	return m.waitState(ctx, sb, states...)
}

// waitState is Wait for one generation.
func (m *Manager) waitState(ctx context.Context, sb *sandboxer.Sandbox, states ...sandboxer.State) (*sandboxer.Sandbox, error) {
	ctx, cancel := m.untilClosed(ctx)
	defer cancel(nil)
	changed, unsubscribe := m.notifier.subscribe(sb.ID)
	defer unsubscribe()
	for {
		sb, err := m.store.SandboxGeneration(ctx, sb.ID, sb.Generation)
		if err != nil {
			return nil, err
		}
		if slices.Contains(states, sb.State) {
			return m.withLastUse(sb), nil
		}
		if sb.State == sandboxer.Terminated || sb.State == sandboxer.Terminating && !slices.Contains(states, sandboxer.Terminated) {
			if err := failure(sb); err != nil {
				return sb, err
			}
			return sb, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s (%s) and will not become %s", sb.Shown(), sb.State, sb.Reason, join(states))
		}
		if err := wait(ctx, changed); err != nil {
			return nil, err
		}
	}
}
