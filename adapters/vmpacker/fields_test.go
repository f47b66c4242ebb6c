package vmpacker

import (
	"cmp"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// TestSpecFields: the effect of each field of a spec is known; one that could not be
// enforced is refused, on an attached machine and on a managed one.
func TestSpecFields(t *testing.T) {
	dir := t.TempDir()
	env := sandboxer.Env{Dir: dir, Extension: "ext.vm", Notes: notes.New(dir, "ext.vm", nil)}
	pool, err := sshrun.New(sshrun.Options{}) // it makes no connection
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	e := &extension{env: env, cfg: Config{Capacity: 1, WorkspaceDir: "/w"}, pool: pool, hosts: sshrun.NewRegistry(t.TempDir())}
	broker := "the broker's business"
	kept := func(more fieldtest.Withheld) fieldtest.Withheld {
		out := fieldtest.Withheld{
			"ID": "names the object", "Generation": "names the object", "Owner": "names the object", "Profile": broker, "Consumer": broker, "Tenant": broker,
			"Env": "of every command", "Labels": broker, "Ports": "in its note", "User": "of commands", "Fuse": "nobody there would keep it; the sweep is the one that ends it",
			"Warm": "nothing to prepare", "Credential": "set for a Credentialed extension alone", "Vouched": "asked by internal/backend", "Place": "the machine it is made on",
		}
		for k, v := range more {
			out[k] = v
		}
		return out
	}
	values := fieldtest.Values{"Env[key]": {"A", "A"}, "User": {"ci", "ci"}, "Network.Mode": {sandboxer.NetworkPublic, sandboxer.NetworkPublic}}
	take := func(s sandboxer.Spec) error { _, err := e.resolve(s); return cmp.Or(s.Network.Check(), err) }
	attach := sandboxer.Spec{ID: "x", Generation: 1, Owner: "test", Inputs: map[string]string{"vm": "vm"}}
	fieldtest.Taken(t, attach, values, take, kept(nil))

	e.cfg.Images = map[string]Image{"img": {}, "other": {}}
	make := sandboxer.Spec{ID: "x", Generation: 1, Owner: "test", Image: "img"}
	values["Image"] = [2]any{"other", "other"}
	values["Limits.MilliCPU"], values["Limits.MemoryBytes"] = [2]any{2000, 2000}, [2]any{1 << 30, 1 << 30}
	fieldtest.Taken(t, make, values, take, kept(fieldtest.Withheld{
		"Image": "what it is made of", "Inputs": "those that it declares", "Limits.MilliCPU": "processors of the machine", "Limits.MemoryBytes": "memory of the machine",
	}))
}
