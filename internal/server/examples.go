package server

import (
	"reflect"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

func typeOf[T any]() reflect.Type { return reflect.TypeFor[T]() }

// exampleOf returns the example of a body of type t in the description.
func exampleOf(t reflect.Type) any {
	for _, e := range examples() {
		if reflect.TypeOf(e) == t {
			return e
		}
	}
	return nil
}

// examples are one value of every body.
func examples() []any {
	at := time.Date(2026, 11, 21, 9, 0, 0, 0, time.UTC)
	sb := api.Sandbox{
		SchemaVersion: api.SchemaVersion, ID: "7k2mq0xa", Generation: 1, Name: "build", Tenant: "default",
		Profile: "profile.local", Extension: "ext.local", Host: "localhost", State: sandboxer.Running,
		Consumer: sandboxer.Consumer{ID: "ci-42", Kind: "ci"}, Inputs: map[string]string{"repo": "/src/app"},
		Labels: map[string]string{"branch": "main"}, Limits: sandboxer.Limits{MilliCPU: 2000, MemoryBytes: 2 << 30},
		Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkNone}, Workspace: "/workspace",
		Reachability: sandboxer.Reachability{Host: "localhost", RemoteDir: "/workspace"},
		Quote:        &api.Quote{Amount: 120_000, PerHour: 240_000, Duration: api.Duration(30 * time.Minute)},
		Version:      3, CreatedAt: at, ProvisionedAt: at.Add(80 * time.Millisecond), ReadyAt: at.Add(90 * time.Millisecond), UsedAt: at.Add(time.Minute), ExpiresAt: at.Add(30 * time.Minute),
	}
	sink := api.Sink{Name: "fin-hub", URL: "https://fin-hub.example.org/usage", Keys: []string{"fin-hub-key"}, Declared: true, Seq: 17}
	event := api.Event{Seq: 42, At: at, SandboxID: sb.ID, Generation: 1, Tenant: "default", Type: sandboxer.EventState,
		From: sandboxer.Creating, To: sandboxer.Running, Actor: "key:k1"}
	profile := api.Profile{ID: "profile.local", Title: "A sandbox on this machine", Extension: "ext.local", Isolation: sandboxer.IsolationGVisor,
		Requires: []sandboxer.Capability{sandboxer.CanExec}, Env: []string{"CI"}, TTL: api.TTL(30 * time.Minute),
		MaxTTL: api.Duration(24 * time.Hour), OnTTL: sandboxer.ExpiryPause, MaxPaused: api.Duration(72 * time.Hour), AutoResume: true,
		Pool: &api.ProfilePool{Size: 4, MaxAge: api.Duration(time.Hour)}, Price: &api.Price{PerHour: 240_000}}
	extension := api.Extension{ID: "ext.local", Title: "This machine", Adapter: "local", Handler: "local",
		Isolation: []sandboxer.Isolation{sandboxer.IsolationGVisor}, Pricing: sandboxer.PricingSelfHosted,
		Capabilities: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles},
		Inputs:       []sandboxer.Input{{Name: "repo", Help: "directory or git URL that becomes the workspace"}}}
	key := api.Key{ID: "k1", Name: "ci", Tenant: "default", Scopes: []sandboxer.Scope{sandboxer.ScopeRead, sandboxer.ScopeWrite}, CreatedAt: at}
	secret := api.Secret{Name: "registry-token", Version: 2, Versions: 2, CreatedAt: at}
	entry := api.Entry{Key: "7k2mq0xa/1/hold", Tenant: "default", SandboxID: sb.ID, Generation: 1, Type: sandboxer.EntryHold, Amount: -120_000, At: at}
	file := api.FileInfo{Path: "/workspace/go.mod", Type: api.TypeFile, Size: 120, Mode: "0644", ModTime: at, Owner: "root", Group: "root"}
	yes := true
	port := api.SandboxPort{Port: 8080, Declared: true, Open: true, Listening: &yes, Proxy: "https://8080-7k2mq0xa.ports.example.org/"}
	snap := api.Snapshot{SchemaVersion: api.SchemaVersion, ID: "snap-7k2mq0xa4t9c", Name: "base", Tenant: "default", SandboxID: sb.ID, Generation: 1,
		Profile: sb.Profile, Extension: sb.Extension, Kind: sandboxer.SnapshotNative, State: sandboxer.SnapshotSealed, Memory: true, Quiesced: true,
		Bytes: 48 << 20, CreatedAt: at, SealedAt: at.Add(time.Second)}
	return []any{
		sb,
		snap,
		page(snap),
		api.PauseSandbox{Depth: sandboxer.PauseDisk},
		api.ResumeSandbox{TTL: 30 * time.Minute},
		api.ForkSandbox{Count: 3, TTL: 30 * time.Minute},
		api.Forked{SchemaVersion: api.SchemaVersion, Items: []api.Sandbox{sb}},
		api.CreateSnapshot{Name: "base", Kind: sandboxer.SnapshotBoth},
		api.RestoreSnapshot{Name: "copy", TTL: 30 * time.Minute, Env: map[string]string{"CI": "1"}},
		api.SnapshotDiff{SchemaVersion: api.SchemaVersion, Items: []api.SnapshotChange{{Path: "src/main.go", Change: "changed", Before: 120, After: 180}}},
		page(sb),
		api.CreateSandbox{Profile: "profile.local", Inputs: map[string]string{"repo": "/src/app"}, Name: "build", TTL: 30 * time.Minute,
			Consumer: sandboxer.Consumer{ID: "ci-42", Kind: "ci"}, Env: map[string]string{"CI": "1"}, MaxCost: 500_000},
		sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"*.example.org:443"}},
		api.ExtendSandbox{TTL: time.Hour},
		page(api.Quarantined{ID: sb.ID, Generation: 1, Extension: "ext.local", Host: "localhost", Since: sb.CreatedAt, Until: sb.ExpiresAt,
			Why: "the database does not know it: the database was restored from a backup, or lost its latest writes"}),
		api.Plan{SchemaVersion: api.SchemaVersion, Profile: "profile.local", Extension: "ext.local", TTL: api.TTL(30 * time.Minute),
			Quote: *sb.Quote, Inputs: sb.Inputs, Env: []string{"CI"}, Workspace: "/workspace"},
		api.Exec{Args: []string{"uname", "-s"}, Timeout: api.Duration(time.Minute)},
		api.ExecResult{Stdout: "Linux\n", Took: api.Duration(12 * time.Millisecond)},
		api.MakeDir{Path: "/workspace/out"},
		api.MoveFile{From: "/workspace/a", To: "/workspace/b"},
		file,
		page(file),
		port,
		page(port),
		api.SignPort{TTL: api.Duration(time.Hour)},
		api.PortURL{URL: "https://8080-7k2mq0xa.ports.example.org/?sbx_token=sbx_port_AQ", Token: "sbx_port_AQ", ExpiresAt: at.Add(time.Hour)},
		api.Stats{At: at, CPU: api.Duration(1500 * time.Millisecond), MemoryBytes: 12 << 20, MemoryLimit: 2 << 30, DiskBytes: 4 << 20, PIDs: 3},
		event,
		page(event),
		profile,
		page(profile),
		page(extension),
		page(api.Pool{Profile: profile.ID, Extension: "ext.local", Size: 4, Ready: 4, Claimed: new(int64(40)), Cold: new(int64(2))}),
		api.Caches{SchemaVersion: api.SchemaVersion, Items: []api.Cache{{Extension: "ext.compose-ssh", Host: "build-1", Name: "shop/web", Tenant: "default", Bytes: 73400320, UsedAt: at}}},
		api.DrainedPool{Profile: profile.ID, Removed: 4},
		api.HostCapacity{Free: 12, Hosts: []string{"localhost"}, Attrs: map[string]string{"platform": "systrap"}},
		api.NewKey{Name: "ci", Tenant: "default", Scopes: key.Scopes, TTL: 720 * time.Hour},
		api.CreatedKey{Token: "sbx_key_k1_0123456789abcdefghjkmnpqrs", Key: key},
		page(key),
		api.SetSecret{Value: "…"},
		secret,
		page(secret),
		api.Balance{Tenant: "default", Balance: 10_000_000},
		page(api.Quota{Tenant: "default", Resources: []api.QuotaResource{{Resource: sandboxer.QuotaSandboxes, Used: 3, Limit: new(int64(20))}, {Resource: sandboxer.QuotaDisk, Used: 6 << 30}}}),
		api.Grant{Tenant: "default", Amount: 10_000_000, Key: "invoice-2026-11", Note: "November"},
		page(entry),
		page(api.NewUsageRow(sandboxer.UsageRow{Seq: 17, Key: "sbx:7k2mq0xa:g1:usage", Type: sandboxer.UsageSettled, At: at.Add(time.Hour), Tenant: "default", SandboxID: sb.ID, Generation: 1,
			Profile: "profile.local", Extension: "ext.local", From: at, Until: at.Add(30 * time.Minute), Ran: 30 * time.Minute, Charged: 80_000, Cost: 80_000, Final: true})),
		sink,
		page(sink),
		api.Replay{Since: at},
		api.Drop{Rows: []int64{12, 13}},
		api.Audit{SchemaVersion: api.SchemaVersion, Checked: 12, Violations: []api.Violation{}},
		api.Sweep{Seen: 3, Expired: 1, Torndown: 1},
		api.Reload{Added: []string{"profile.web"}, Changed: []string{}, Removed: []string{}, Unchanged: 5, Restart: []string{}},
		api.Status{SchemaVersion: api.SchemaVersion, Version: "v0.1.0", Owner: "main", PID: 4242, StartedAt: at, Uptime: api.Duration(time.Hour),
			Tenant: "default", Actor: "unix:1000", Scopes: sandboxer.Scopes(), Sandboxes: map[sandboxer.State]int{sandboxer.Running: 1}, Extensions: 1},
		api.Problem{Type: "urn:sandboxer:problem:not_found", Title: "Not found", Status: 404, Code: sandboxer.NotFound,
			Detail: `sandbox "7k2mq0xa" does not exist`, Hint: "list what exists with: sandboxer ls", RequestID: "x3k9q2m7"},
	}
}

func page[T any](items ...T) api.List[T] {
	return api.List[T]{SchemaVersion: api.SchemaVersion, Items: items}
}
