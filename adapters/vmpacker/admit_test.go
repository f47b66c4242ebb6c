package vmpacker_test

import (
	"maps"
	"strconv"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/vmpacker"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// Callers may name what the operator configured, as it is configured. Other names are
// refused without revealing what exists; administrators and profiles may name anything.
func TestAdmit(t *testing.T) {
	o := options{Owner: "conformance", Dir: t.TempDir(), Hosts: t.TempDir(), Config: map[string]any{
		"vms": map[string]any{
			"vm":  map[string]any{"ssh_target": "ci@10.9.8.7", "ssh_port": 2200, "workspace_dir": "/work"},
			"nat": map[string]any{"ssh_target": "ci@10.9.8.7", "tunnel_port": 2201},
		},
		"targets": []string{"ci@*.example.org", "*.plain.example.org", "ssh://ci@fixed.example.org:2222"},
	}}
	e := o.must(t)
	added := sshrun.Record{Name: "added", Addr: "ci@added.example.org", HostKeys: []string{hostKey(t)}, State: sshrun.Active}
	if err := sshrun.NewRegistry(o.Hosts).Put(added); err != nil {
		t.Fatal(err)
	}
	b := backend.New("ext.vm-packer", e, backend.Options{Inputs: vmpacker.Adapter.Inputs})
	t.Cleanup(func() { b.Close() })
	in := func(kv ...string) map[string]string {
		m := map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i]] = kv[i+1]
		}
		return m
	}
	for _, c := range []struct {
		inputs map[string]string
		host   string
		ok     bool
	}{
		{in("vm", "vm"), "", true},
		{in("vm", "added"), "", true},
		{in(), "vm", true},
		{in(), "added", true},
		{in("vm", "vm", "ssh_target", "ci@10.9.8.7", "ssh_port", "2200", "workspace_dir", "/work"), "", true},
		{in("vm", "nat", "tunnel_port", "2201", "workspace_dir", "/build"), "", true},
		{in("ssh_target", "ci@a.example.org"), "", true},
		{in("ssh_target", "b.plain.example.org", "workspace_dir", "/build"), "", true},
		{in("ssh_target", "ssh://ci@fixed.example.org:2222"), "", true},
		{in("vm", "vm"), "localhost", true},
		{in("ssh_target", "ci@a.example.org"), "localhost", true},

		{in("vm", "haskell-build"), "", false},
		{in("vm", "127.0.0.1"), "", false},
		{in("vm", "haskell-build"), "localhost", false},
		{in("tunnel_port", "2201"), "", false},
		{in("tunnel_port", "22"), "localhost", false},
		{in(), "localhost", false},
		{in(), "root@127.0.0.1", false},
		{in("ssh_target", "root@127.0.0.1"), "", false},
		{in("ssh_target", "root@a.example.org"), "", false},
		{in("ssh_target", "root@b.plain.example.org"), "", false},
		{in("ssh_target", "ssh://ci@a.example.org:23"), "", false},
		{in("ssh_target", "ssh://ci@fixed.example.org:2223"), "", false},
		{in("ssh_target", "ci@a.example.org", "ssh_port", "2200"), "", false},
		{in("ssh_target", "ci@a.example.org", "tunnel_port", "2200"), "", false},
		{in("vm", "vm", "ssh_target", "ci@a.example.org", "ssh_port", "2200"), "", false},
		{in("vm", "vm", "ssh_target", "ci@a.example.org", "workspace_dir", "/work"), "", false},
		{in("vm", "vm", "ssh_port", "22"), "", false},
		{in("vm", "vm", "tunnel_port", "2200"), "", false},
		{in("vm", "nat", "ssh_port", "2201"), "", false},
		{in("vm", "nat", "tunnel_port", "22"), "", false},
		{in("vm", "vm", "workspace_dir", "/etc"), "", false},
		{in("vm", "vm", "repo", "/etc"), "", false},
	} {
		spec := order("admit", c.inputs)
		spec.Host = c.host
		_, err := b.Check(t.Context(), spec)
		if c.ok && err != nil {
			t.Errorf("%v %s: %v; want it admitted", c.inputs, c.host, err)
		} else if !c.ok {
			if sandboxer.KindOf(err) != sandboxer.Denied {
				t.Errorf("%v %s: %v; want Denied", c.inputs, c.host, err)
			}
			_, err = b.Provision(t.Context(), spec)
			if sandboxer.KindOf(err) != sandboxer.Denied {
				t.Errorf("%v %s: provisioned with %v; want Denied", c.inputs, c.host, err)
			}
		}
		profile := spec
		profile.Profile.Inputs = maps.Clone(c.inputs)
		admin := spec
		admin.Vouched = []string{"host", "repo", "ssh_port", "ssh_target", "tunnel_port", "vm", "workspace_dir"}
		for _, s := range []sandboxer.Spec{profile, admin} {
			if c.host != "" && len(s.Vouched) == 0 {
				continue // profiles name no host
			}
			if _, err := b.Check(t.Context(), s); err != nil {
				t.Errorf("%v %s, vouched for: %v", c.inputs, c.host, err)
			}
		}
	}

	// Without targets no other name is allowed.
	delete(o.Config, "targets")
	o.Dir = t.TempDir()
	b = backend.New("ext.vm-packer", o.must(t), backend.Options{Inputs: vmpacker.Adapter.Inputs})
	t.Cleanup(func() { b.Close() })
	for port := range 3 {
		_, err := b.Check(t.Context(), order("admit", in("ssh_target", "ci@a.example.org", "ssh_port", strconv.Itoa(port+21))))
		kind(t, err, sandboxer.Denied, "ssh_target")
	}
}

func hostKey(t *testing.T) string {
	t.Helper()
	_, key, _ := sshtest.NewKey(t, t.TempDir(), "host")
	return key
}
