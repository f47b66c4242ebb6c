package vmpacker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

const placeVersion = 1

// A place says where one sandbox is, in its handle. The place of a managed machine is also a
// note, written before anything is made and kept until nothing is left, with the machine's
// changing state. It holds no secret.
type place struct {
	V          int           `json:"v"`
	ID         string        `json:"id"`
	Generation int           `json:"generation"`
	Owner      string        `json:"owner"`
	Kind       string        `json:"kind"`
	Host       string        `json:"host"` // what the caller calls the machine
	Target     sshrun.Target `json:"target"`
	Base       string        `json:"base"`
	User       string        `json:"user,omitempty"`
	Ports      []int         `json:"ports,omitempty"`

	// Untouched says, in notes of earlier versions, that nothing was done on the machine to
	// attach to.
	Untouched bool `json:"untouched,omitempty"`

	Shape *shape `json:"shape,omitempty"` // of a machine of its own
	State state  `json:"state,omitzero"`

	at       string // the broker's name of the place (extension.Place); as Host if empty
	partial  bool   // it was found on its machine, and the data there was not read
	capacity int
	tools    []string
}

// The kinds of place.
const attached = "attached"

// key names the place within this installation.
func (p *place) key() string { return p.ID + ".g" + strconv.Itoa(p.Generation) }

// mark is in the environment of the sandbox's processes.
func (p *place) mark() string { return sandboxer.ExternalName(p.Owner, p.ID, p.Generation) }

func (p *place) handle() sandboxer.Handle {
	data, err := json.Marshal(p)
	if err != nil {
		panic(err) // strings and numbers only
	}
	return sandboxer.Handle{SandboxID: p.ID, Generation: p.Generation, Host: cmp.Or(p.at, p.Host), Ref: p.mark(), Data: data}
}

// remember writes the note of a managed machine to the disk.
func (e *extension) remember(ctx context.Context, p *place) error {
	data, err := json.Marshal(p)
	if err != nil {
		return sandboxer.E(sandboxer.Internal, err, "where sandbox %s is placed does not encode", p.ID)
	}
	return e.env.Notes.Put(ctx, p.key(), data)
}

func (e *extension) forget(ctx context.Context, p *place) error {
	return e.env.Notes.Delete(ctx, p.key())
}

// recall reads one note. NotFound: there is none.
func (e *extension) recall(ctx context.Context, id string, generation int) (*place, error) {
	return e.read(ctx, (&place{ID: id, Generation: generation}).key())
}

func (e *extension) read(ctx context.Context, key string) (*place, error) {
	n, err := e.env.Notes.Get(ctx, key)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return nil, missing(key)
	}
	if err != nil {
		return nil, err
	}
	var p place
	err = p.decode(n.Value)
	if err == nil && (p.key() != key || p.Owner != e.env.Owner) {
		err = errors.New("it is about another sandbox")
	}
	if err != nil && sandboxer.KindOf(err) != sandboxer.Unavailable {
		err = notes.Damaged(e.env.Notes, key, err)
	}
	if err != nil {
		return nil, err
	}
	return &p, nil
}

func (p *place) decode(data []byte) error {
	var head struct {
		V int `json:"v"`
	}
	if _, err := strictjson.DecodeStored(data, &head); err == nil && head.V > placeVersion { // whatever else it contains
		// Not Unsupported: a teardown then waits for the upgrade.
		return sandboxer.E(sandboxer.Unavailable, nil, "the note on where a sandbox is was written by a newer sandboxer (version %d; this program knows %d)", head.V, placeVersion).
			WithHint("upgrade this program")
	}
	if _, err := strictjson.DecodeStored(data, p); err != nil {
		return err
	}
	if p.V != placeVersion {
		return errors.New("it is of version " + strconv.Itoa(p.V))
	}
	if p.Kind == managed && p.Shape == nil {
		p.Shape = &shape{} // only its process is known
	}
	return errors.Join(sandboxer.CheckID(p.ID), checkBase(p.Base))
}

// noted returns every note.
func (e *extension) noted(ctx context.Context) (all []*place, err error) {
	keys, err := e.env.Notes.List(ctx)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, key := range keys {
		p, err := e.read(ctx, key)
		switch {
		case sandboxer.KindOf(err) == sandboxer.NotFound: // removed meanwhile
		case err != nil:
			errs = append(errs, err)
		default:
			all = append(all, p)
		}
	}
	return all, errors.Join(errs...)
}

// places returns where the sandbox of h may be: as noted here, as fully described by its
// handle, or as found on the machine that the handle names, or else on every known machine.
// Machines that could not be asked are an error, in addition to what the others have.
func (e *extension) places(ctx context.Context, h sandboxer.Handle) ([]*place, error) {
	var mine []*place
	if h.Generation > 0 {
		p, err := e.recall(ctx, h.SandboxID, h.Generation)
		if err == nil {
			return []*place{p}, nil
		}
		if sandboxer.KindOf(err) != sandboxer.NotFound {
			return nil, err
		}
	} else {
		all, err := e.noted(ctx)
		if err != nil {
			return nil, err
		}
		for _, p := range all {
			if p.ID == h.SandboxID {
				mine = append(mine, p)
			}
		}
	}
	if len(h.Data) == 0 {
		found, err := e.search(ctx, h)
		for _, p := range found {
			if !slices.ContainsFunc(mine, func(m *place) bool { return m.key() == p.key() }) {
				mine = append(mine, p)
			}
		}
		return mine, err
	}
	if len(mine) > 0 {
		return mine, nil
	}
	p, err := e.placeOf(h)
	if err != nil {
		return nil, err
	}
	if p.ID != h.SandboxID || p.Owner != e.env.Owner || h.Generation > 0 && p.Generation != h.Generation {
		return nil, nil
	}
	return []*place{p}, nil
}

// unasked returns where the sandbox of h may be, without asking a machine.
func (e *extension) unasked(ctx context.Context, h sandboxer.Handle) ([]*place, error) {
	if p, err := e.recall(ctx, h.SandboxID, h.Generation); err == nil || sandboxer.KindOf(err) != sandboxer.NotFound {
		return []*place{p}, err
	}
	if len(h.Data) > 0 || h.Host == "" {
		if len(h.Data) == 0 {
			return nil, nil
		}
		p, err := e.placeOf(h)
		return []*place{p}, err
	}
	if h.Host == thisMachine && !e.isConfigured(h.Host) {
		return []*place{{ID: h.SandboxID, Generation: h.Generation, Owner: e.env.Owner, Kind: managed, Host: h.Host}}, nil
	}
	p, err := e.named(h.Host)
	if err != nil {
		return nil, err
	}
	p.ID, p.Generation, p.Owner, p.Kind = h.SandboxID, h.Generation, e.env.Owner, attached
	return []*place{p}, nil
}

// placeOf returns the place in a handle.
func (e *extension) placeOf(h sandboxer.Handle) (*place, error) {
	var p place
	if err := p.decode(h.Data); sandboxer.KindOf(err) == sandboxer.Unavailable {
		return nil, err
	} else if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "the handle of sandbox %s cannot be read", h.SandboxID)
	}
	p.at = h.Host
	return &p, nil
}

// one returns where h's sandbox was placed, without asking the machine if that is known.
func (e *extension) one(ctx context.Context, h sandboxer.Handle) (*place, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	all, err := e.places(ctx, h)
	if len(all) == 0 {
		return nil, cmp.Or(err, missing(h.SandboxID))
	}
	newest := all[0]
	for _, p := range all {
		if p.Generation > newest.Generation {
			newest = p
		}
	}
	return newest, e.complete(ctx, newest)
}

// Place implements sandboxer.Placer: the machine that the spec names, or this one for a
// managed machine. A machine to attach to is called by its alias, or else by its target, with
// further inputs behind a question mark: this name alone is enough to find it again (named).
func (e *extension) Place(_ context.Context, spec sandboxer.Spec, avoid []string) (string, error) {
	p, err := e.resolve(spec)
	if err != nil {
		return "", err
	}
	if slices.Contains(avoid, p.at) {
		return "", sandboxer.E(sandboxer.Unavailable, nil, "sandbox %s can be made on %s only", spec.ID, p.Host).
			WithHint("name another machine, or make room on this one")
	}
	return p.at, nil
}

// more are the inputs behind the question mark of a place.
var more = []string{"ssh_target", "ssh_port", "tunnel_port", "workspace_dir"}

// placeName is the broker's name of the machine that inputs describe, with the alias if there
// is one.
func (e *extension) placeName(alias string, in map[string]string) string {
	name := cmp.Or(alias, in["ssh_target"])
	q := url.Values{}
	for _, k := range more {
		if v := in[k]; v != "" && (k != "ssh_target" || v != name) {
			q.Set(k, v)
		}
	}
	if alias == "" && plainName.MatchString(name) { // an alias could have this name, too
		q.Set("ssh_target", name)
		q.Set("workspace_dir", cmp.Or(in["workspace_dir"], e.cfg.WorkspaceDir))
	}
	if len(q) == 0 {
		return name
	}
	return name + "?" + strings.ReplaceAll(q.Encode(), "%2F", "/")
}

// named returns the machine to attach to with that placeName.
func (e *extension) named(name string) (*place, error) {
	alias, query, _ := strings.Cut(name, "?")
	q, err := url.ParseQuery(query)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "%q does not name a machine", name)
	}
	in := map[string]string{}
	for _, k := range more {
		in[k] = q.Get(k)
	}
	m, err := e.lead(alias, in)
	if err != nil {
		return nil, err
	}
	return &place{Host: alias, Target: m.target, Base: m.base, at: name}, nil
}

// declared reports whether an operator has named the machine, in the configuration or as a
// host of this installation.
func (e *extension) declared(name string) bool {
	if _, ok := e.cfg.VMs[name]; ok {
		return true
	}
	recs, _ := e.hosts.Hosts() // without them the machine stays unnamed
	return slices.ContainsFunc(recs, func(r sshrun.Record) bool { return r.Name == name })
}

// search looks for the sandbox of h, on its host or else everywhere.
func (e *extension) search(ctx context.Context, h sandboxer.Handle) ([]*place, error) {
	var at []*place
	var failed []error
	here := h.Host == "" || h.Host == thisMachine
	switch {
	case h.Host == "":
		var err error
		if at, err = e.known(ctx, true); err != nil {
			failed = append(failed, err)
		}
	case here && !e.isConfigured(h.Host):
	default:
		p, err := e.named(h.Host)
		if err != nil {
			return nil, err
		}
		at = append(at, p)
	}
	var found []*place
	if here {
		noted, err := e.noted(ctx)
		if err != nil {
			failed = append(failed, err)
		}
		machines, err := e.machines(e.env.Owner, noted)
		if err != nil {
			failed = append(failed, err)
		}
		found = machines
	}
	var away []string
	for a := range e.scan(ctx, at, e.env.Owner) {
		if a.err != nil {
			away = append(away, a.machine.Host)
			failed = append(failed, a.err)
		}
		found = append(found, a.found...)
	}
	found = slices.DeleteFunc(found, func(p *place) bool {
		return p.ID != h.SandboxID || h.Generation > 0 && p.Generation != h.Generation
	})
	switch {
	case ctx.Err() != nil:
		return found, ctx.Err()
	case len(failed) == 0:
		return found, nil
	case len(away) == 0:
		return found, errors.Join(failed...)
	}
	slices.Sort(away)
	err := sandboxer.E(sandboxer.Unavailable, errors.Join(failed...), "sandbox %s may be on %s, which cannot be asked: %s", h.SandboxID, strings.Join(away, ", "), sandboxer.Message(failed[len(failed)-1]))
	// A machine that only a record names may be another tenant's.
	told := slices.DeleteFunc(away, func(name string) bool { return name != h.Host && !e.declared(name) })
	if len(told) == 0 {
		told = []string{"a machine"}
	}
	err.WithPublic("sandbox %s may be on %s, which cannot be asked now", h.SandboxID, strings.Join(told, ", "))
	return found, err.WithHint("%s", cmp.Or(sandboxer.HintOf(failed[len(failed)-1]), "bring it back; a host that is gone for good: sandboxer host rm --force NAME"))
}

// thisMachine is the host of managed machines.
const thisMachine = "localhost"

// isConfigured reports whether an alias is configured for a machine to attach to.
func (e *extension) isConfigured(alias string) bool {
	_, err := e.machine(alias)
	return sandboxer.KindOf(err) != sandboxer.NotFound
}

// known returns the machines to attach to that are configured, in notes of earlier versions,
// or in records of sandboxes; with added also every host that was added. A machine from a
// request whose record is lost is not known.
func (e *extension) known(ctx context.Context, added bool) (at []*place, err error) {
	type where struct{ name, base string }
	seen := map[where]bool{}
	var errs []error
	add := func(p *place, err error) {
		switch {
		case err != nil:
			errs = append(errs, err)
		case p.Kind != managed && !p.Untouched && !seen[where{p.Target.Name, p.Base}]:
			seen[where{p.Target.Name, p.Base}] = true
			at = append(at, p)
		}
	}
	noted, err := e.noted(ctx)
	if err != nil {
		errs = append(errs, err)
	}
	for _, p := range noted {
		add(p, nil)
	}
	for _, alias := range slices.Sorted(maps.Keys(e.cfg.VMs)) {
		add(e.named(alias))
	}
	if added {
		recs, err := e.hosts.Hosts()
		if err != nil {
			errs = append(errs, err)
		}
		for _, r := range recs {
			if r.Only != sshrun.OnlyCompose {
				add(e.named(r.Name))
			}
		}
	}
	if e.env.Recorded == nil {
		return at, errors.Join(errs...)
	}
	handles, err := e.env.Recorded(ctx)
	if err != nil {
		errs = append(errs, err)
	}
	for _, h := range handles {
		switch {
		case len(h.Data) > 0:
			add(e.placeOf(h))
		case h.Host != "" && (h.Host != thisMachine || e.isConfigured(h.Host)):
			add(e.named(h.Host))
		}
	}
	return at, errors.Join(errs...)
}
