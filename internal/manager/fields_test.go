package manager

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
)

// fieldRig is a manager with a profile that lets callers ask for anything.
func fieldRig(t *testing.T) *rig {
	return newRig(t, func(s *setup) {
		s.idle = true
		s.profiles = []sandboxer.Profile{
			{ID: "profile.a", Extension: "ext.fake", MaxTTL: time.Hour * 1000, Secrets: []string{"secret-a", "secret-b"}, Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}},
			{ID: "profile.b", Extension: "ext.fake", MaxTTL: time.Hour * 1000, Secrets: []string{"secret-a", "secret-b"}, Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}},
		}
		s.inputs = []sandboxer.Input{{Name: "in-a"}, {Name: "in-b"}}
	})
}

// requestValues are those of requests that cannot have just any.
var requestValues = fieldtest.Values{
	"Profile": {"profile.a", "profile.b"}, "Name": {"a", "b"}, "Inputs[key]": {"in-a", "in-b"}, "Env[key]": {"A", "B"},
	"TTL": {time.Minute, time.Hour}, "Idle": {time.Minute, time.Hour}, "OnTTL": {sandboxer.ExpiryPause, sandboxer.ExpiryDestroy},
	"OnIdle": {sandboxer.ExpiryPause, sandboxer.ExpiryDestroy}, "MaxCost": {sandboxer.Credits(7), sandboxer.Credits(8)}, "Host": {"h1", "h2"},
}

// with adds to requestValues.
func with(more fieldtest.Values) fieldtest.Values {
	out := fieldtest.Values{}
	for _, m := range []fieldtest.Values{requestValues, more} {
		for k, v := range m {
			out[k] = v
		}
	}
	return out
}

// ordered is what of a request is acted upon. Without its ID, which is another each time, and its
// digest, which changes with everything.
type ordered struct {
	Tenant, Actor, Name, Key string
	ID                       string // if it was chosen
	TTL                      time.Duration
	MaxCost                  sandboxer.Credits
	NoWaiting                bool
	As                       sandboxer.SnapshotKind
	Record                   sandboxer.Sandbox
}

func actedUpon(o *creation) ordered {
	sb := *o.record(1)
	sb.ID, sb.Spec.ID, sb.Spec.Profile = "", "", sandboxer.Profile{ID: sb.Spec.Profile.ID, Idle: sb.Spec.Profile.Idle, OnIdle: sb.Spec.Profile.OnIdle, OnTTL: sb.Spec.Profile.OnTTL}
	// These count from now.
	sb.CreatedAt, sb.ExpiresAt, sb.Spec.Fuse = time.Time{}, time.Time{}, time.Time{}
	out := ordered{Tenant: o.Tenant, Actor: o.Actor, Name: o.Name, Key: o.Key, TTL: o.TTL, MaxCost: o.MaxCost, NoWaiting: o.NoWaiting, As: o.As, Record: sb}
	out.ID = o.Shown
	return out
}

var operator = sandboxer.Principal{Tenant: sandboxer.DefaultTenant, Actor: "a", Scopes: []sandboxer.Scope{sandboxer.ScopeAdmin}}

// TestCreateFields: all that a create asks for is in its record, or is acted upon besides.
func TestCreateFields(t *testing.T) {
	r := fieldRig(t)
	fieldtest.Conversion[sandboxer.CreateRequest, any]{
		Convert: func(req sandboxer.CreateRequest) any {
			o, err := r.resolve(operator, req)
			if err != nil {
				t.Fatal(err)
			}
			return actedUpon(o)
		},
		Values: with(fieldtest.Values{
			"Network":        {&sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"a.example"}}, &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"b.example"}}},
			"Mounts":         {[]sandboxer.Mount{{Source: "/a", Target: "/b"}}, []sandboxer.Mount{{Source: "/c", Target: "/d", ReadOnly: true}}},
			"Secrets[value]": {"secret-a", "secret-b"}, "Limits.GPUs": {1, 2}, "Thread.User": {"u1", "u2"}, "Thread.ID": {"t1", "t2"},
		}),
	}.Check(t)
}

// TestProfileInSpec: what a profile says of its sandboxes is in a spec that names nothing, or
// is read from the profile in it.
func TestProfileInSpec(t *testing.T) {
	r := fieldRig(t)
	read := "where it matters, from the profile that the spec has"
	fieldtest.Conversion[sandboxer.Profile, sandboxer.Spec]{
		Convert: func(p sandboxer.Profile) sandboxer.Spec {
			spec := r.site().ProfileSpec(p)
			spec.Profile = sandboxer.Profile{ID: p.ID}
			return spec
		},
		Withheld: fieldtest.Withheld{
			"Title": "for people, who see the profile", "Description": "for people, who see the profile",
			"Extension": read, "Route": "chosen from: a spec is on one extension", "Isolation": read, "Requires": read, "MaxLimits": read, "TTL": read, "MaxTTL": read, "Idle": read, "OnIdle": read, "OnTTL": read, "OnCost": read, "PauseDepth": read,
			"MaxPaused": read, "AutoResume": read, "Secrets": "what a request may name (spec.Site)", "Max": "of the profile as it is when somebody asks (roomFor)", "Wait": "of the profile as it is when somebody asks (roomFor)", "Price": read, "Ready": read, "Pool": read, "Builtin": read,
			"Inputs": "checked and merged with the caller's apart (spec.Site)",
		},
		Unset: unset[sandboxer.Spec](fieldtest.Withheld{
			"ID": "settled when it is made", "Generation": "settled when it is made", "Inputs": "see above", "Host": "the request's", "Consumer": "the request's",
			"Tenant": "the sandbox's (specFor)", "Fuse": "counts from when it is made", "Warm": "of those that wait in a pool", "Vouched": "depends on the caller",
			"Place":      "committed with the record, before it is made",
			"Credential": "the extension's, which wants none here (TestCredential)",
			"Profile":    "see above",
		}, "Profile.ID"),
	}.Check(t)
	fieldtest.Same(t, fieldtest.Fill[sandboxer.Profile](nil), r.site().ProfileSpec(fieldtest.Fill[sandboxer.Profile](nil)).Profile,
		fieldtest.Withheld{"Env": "its values are in the spec's own, which is sealed"})
	site := r.site()
	site.Profiles = []sandboxer.Profile{{ID: "profile.in", Extension: "ext.fake", Inputs: map[string]string{"in-a": "of the profile"}}}
	got, err := site.Create(operator, sandboxer.CreateRequest{Profile: "in"})
	if err != nil || got.Spec.Inputs["in-a"] != "of the profile" {
		t.Errorf("the inputs of a profile become %+v, %v", got, err)
	}
}

// unset names, for what an entry stands for, each field but those that are set.
func unset[T any](table fieldtest.Withheld, but ...string) fieldtest.Withheld {
	out := fieldtest.Withheld{}
	for _, path := range fieldtest.Paths[T]() {
		for entry, why := range table {
			if (path == entry || strings.HasPrefix(path, entry+".") || strings.HasPrefix(path, entry+"[")) && !slices.Contains(but, path) {
				out[path] = why
			}
		}
	}
	return out
}

// TestRestoreFields: all that a restore asks for is in its record, or is acted upon besides.
func TestRestoreFields(t *testing.T) {
	r := fieldRig(t)
	rec := &sandboxer.SnapshotRecord{ID: "snap-x", Tenant: sandboxer.DefaultTenant, Profile: "profile.a", Extension: "ext.fake", Kind: sandboxer.SnapshotBoth, State: sandboxer.SnapshotSealed}
	fieldtest.Conversion[RestoreRequest, any]{
		Convert: func(req RestoreRequest) any {
			if req.Kind == sandboxer.SnapshotNative {
				req.Inputs, req.Host = nil, "" // which exclude each other
			}
			o, err := r.resolveRestore(operator, rec, req, "")
			if err != nil {
				t.Fatal(err)
			}
			return actedUpon(o)
		},
		Values: with(fieldtest.Values{"Kind": {sandboxer.SnapshotPortable, sandboxer.SnapshotNative}}),
	}.Check(t)
}

// TestSourceInRestore: all of a source goes on in what is restored from it on its profile, or
// here stands why it does not.
func TestSourceInRestore(t *testing.T) {
	r := fieldRig(t)
	anew := "a restored sandbox has its own"
	credential := "the extension wants none here; a native form keeps it (TestCredentialOfSandbox)"
	fieldtest.Conversion[sandboxer.SnapshotRecord, any]{
		Convert: func(rec sandboxer.SnapshotRecord) any {
			var err error
			if rec.SealedEnv, err = r.sealAs(snapshotSealName(&rec), rec.Spec.Env); err != nil {
				t.Fatal(err)
			}
			prof := r.catalogue.Load().profiles[0]
			o, err := r.resolveRestore(operator, &rec, RestoreRequest{}, "")
			if err != nil {
				t.Fatalf("on %s: %v", prof.ID, err)
			}
			return actedUpon(o)
		},
		Values: fieldtest.Values{
			"Profile": {"profile.a", "profile.b"}, "Extension": {"ext.fake", "ext.fake"}, "Kind": {sandboxer.SnapshotNative, sandboxer.SnapshotPortable},
			"State": {sandboxer.SnapshotSealed, sandboxer.SnapshotSealed}, "Spec.Inputs[key]": {"in-a", "in-b"}, "Portable.Volumes": {[]string(nil), []string(nil)},
			"Spec.Network.Mode": {sandboxer.NetworkPublic, sandboxer.NetworkNone}, "Spec.Network.Allow": {[]string(nil), []string(nil)}, "Spec.Limits.GPUs": {1, 2},
			"Spec.Credential.Tenant": {"", ""}, "Spec.Credential.Name": {"", ""},
		},
		Withheld: fieldtest.Withheld{
			"Name": anew, "SandboxID": anew, "ShownID": anew, "Generation": anew, "Parent": "of the source; the restored one's is the snapshot",
			"Extension": "the profile's, which must be able to restore it (formFor)",
			"Spec.ID":   anew, "Spec.Generation": anew, "Spec.Owner": "this installation's", "Spec.Host": "where the source was asked to be; a native form stays where it was (Host)",
			"Spec.Profile": "today's profile of that name", "Spec.Consumer": anew, "Spec.Tenant": "not kept", "Spec.Labels": anew, "Spec.Fuse": anew, "Spec.Warm": anew,
			"Spec.Vouched": "asked anew of who restores it (inherited)", "Spec.Place": "not kept", "Spec.Credential.Tenant": credential, "Spec.Credential.Name": credential, "SealedEnv": "see Spec.Env, of which it is made here",
			"Purpose": "of the snapshot", "State": "what is not sealed is refused", "Message": "of the snapshot", "Native": "what the extension restores from, by the snapshot's ID", "Portable": "what is restored, by the snapshot's ID",
			"Version": "of the snapshot", "Retries": "of the snapshot", "LastError": "of the snapshot", "RetryAt": "of the snapshot", "CreatedAt": "of the snapshot", "SealedAt": "of the snapshot",
			"ExpiresAt": "of the snapshot", "DroppedAt": "of the snapshot", "Damaged": "of the snapshot",
			"Spec.Network.Allow": "goes with the mode, as a whole",
		},
	}.Check(t)
}

// TestForkFields: all that a fork asks for is asked of each copy.
func TestForkFields(t *testing.T) {
	rest := "the source's"
	fieldtest.Conversion[ForkRequest, RestoreRequest]{
		Convert:  func(req ForkRequest) RestoreRequest { return copyOf(req, 1) },
		Withheld: fieldtest.Withheld{"Count": "how many there are"},
		Unset: fieldtest.Withheld{"Idle": "the profile's", "OnIdle": "the profile's", "OnTTL": "the profile's", "Profile": rest, "Kind": "the one that was saved for it", "Inputs": rest, "Host": rest, "Name": "names are unique",
			"Consumer": "a fork names nobody", "NoWaiting": "all are waited for"},
	}.Check(t)
}

// TestSpecOfRecord: an extension gets all of a record's spec, and what is not kept in it.
func TestSpecOfRecord(t *testing.T) {
	r := fieldRig(t)
	sb := fieldtest.Fill[sandboxer.Sandbox](nil)
	env := sb.Spec.Env
	var err error
	if sb.SealedEnv, err = r.box(&sb).sealEnv(env); err != nil {
		t.Fatal(err)
	}
	sb.Spec.Env, sb.Spec.Tenant = nil, "" // as it is stored
	sb.Secrets = nil                      // see TestSecretOfSandbox
	spec, err := r.box(&sb).specFor(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	fieldtest.Full(t, spec, nil)
	want := sb.Spec
	want.Env, want.Tenant = env, sb.Tenant
	fieldtest.Same(t, want, spec, nil)
}

// TestSnapshotFields: all of a sandbox that a restore needs is in the record of its snapshot.
func TestSnapshotFields(t *testing.T) {
	now := "as it is when it is restored, anew"
	fieldtest.Conversion[sandboxer.Sandbox, any]{
		Convert: func(sb sandboxer.Sandbox) any {
			rec := *newSnapshot(&sb, sandboxer.SnapshotBoth, "")
			rec.ID, rec.CreatedAt = "", time.Time{}
			return rec
		},
		Withheld: fieldtest.Withheld{
			"Name": "a name of its own", "Thread": "a restored one has an ID of its own", "Consumer": "who asks for the restored one", "State": now, "Reason": now, "Message": now, "Fault": now, "Hint": now,
			"Spec.Env": "sealed apart (sealFor)", "Debts": now, "SealedEnv": "sealed anew for the snapshot (sealFor)", "Handle": now, "Reachability": now, "Opened": now, "Cleanup": now,
			"Quote": now, "Cost": now, "Usage": now, "Billing": now, "MaxCost": now, "Route": now, "RestoredAs": "how the source began; its parent is named", "Pause": now, "PausedFor": now, "Pool": now, "PooledAt": now,
			"Version": now, "Retries": now, "LastError": now, "AbsentSince": now, "UnresponsiveSince": now, "CreatedAt": now, "ProvisionedAt": now, "ReadyAt": now,
			"ResumedAt": now, "UsedAt": now, "Untouched": now, "ExpiresAt": now, "RetryAt": now, "EndingAt": now, "EndedAt": now, "Unconfirmed": now, "Damaged": now, "Found": now,
		},
	}.Check(t)
}

// TestPoolFields: of each thing that a create can ask for it is settled whether a sandbox that
// waits can still be given it.
func TestPoolFields(t *testing.T) {
	r := fieldRig(t)
	p := &pool{profile: r.catalogue.Load().profiles[0]}
	given := map[string]string{
		"Profile": "that of the pool", "Inputs": "brought by the claim", "Name": "of the record", "TTL": "of the record", "Idle": "of the record", "OnIdle": "of the record", "OnTTL": "of the record", "Consumer": "of the record", "Labels": "of the record",
		"Env": "brought by the claim", "MaxCost": "asked before it is claimed", "Key": "written with the claim", "NoWaiting": "how to answer",
	}
	full := reflect.ValueOf(fieldtest.Fill[sandboxer.CreateRequest](with(fieldtest.Values{
		"Network": {&sandboxer.NetworkPolicy{Mode: sandboxer.NetworkNone}, nil}, "Mounts": {[]sandboxer.Mount{{Source: "/a", Target: "/b"}}, nil}, "Limits.GPUs": {1, 2},
		"Secrets[value]": {"secret-a", "secret-b"},
	})))
	for i := range full.NumField() {
		name := full.Type().Field(i).Name
		req := sandboxer.CreateRequest{Profile: "profile.a", Idle: time.Minute} // without it on_idle means nothing
		reflect.ValueOf(&req).Elem().Field(i).Set(full.Field(i))
		o, err := r.resolve(operator, req)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if why, ok := p.whyCold(o), given[name] != ""; ok != (why == "") {
			t.Errorf("a create that names %s is refused by the pool for %q; that it can be given is said: %v", name, why, ok)
		}
		delete(given, name)
	}
	for name := range given {
		t.Errorf("%s is named, and there is no such field", name)
	}
}
