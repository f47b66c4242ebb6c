package docker

import (
	"context"
	"slices"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// granted are sandboxes with those capabilities.
func granted(names string) func(*sandboxer.Spec) {
	return func(s *sandboxer.Spec) { s.Inputs = map[string]string{"grants": names} }
}

const effective = "sed -n 's/^CapEff:[[:space:]]*//p' /proc/self/status"

// TestGrants: a sandbox gets configured capabilities if it names them, and no others; also if it is
// claimed or restored.
func TestGrants(t *testing.T) {
	const usual, more = "00000000a00405fb", "00000000a00c25fb" // with NET_RAW (13) and SYS_PTRACE (19)
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			o := en.options(t, "grants")
			o.config["grants"] = []string{"SYS_PTRACE", "CAP_NET_RAW"}
			e := o.opened(t)
			h := up(t, e, order("granted", o, granted("NET_RAW, CAP_SYS_PTRACE,CHOWN")))
			if got := run(t, e, h, effective); got != more {
				t.Errorf("the capabilities of a command are %s; want %s", got, more)
			}
			if name != "docker" {
				return
			}
			snap, err := e.Snapshot(t.Context(), h, "grants-snapshot")
			if err != nil {
				t.Fatal(err)
			}
			defer e.DropSnapshot(context.WithoutCancel(t.Context()), snap)
			restored, err := e.RestoreFromSnapshot(t.Context(), order("restored", o), snap)
			if err != nil {
				t.Fatal(err)
			}
			if got := run(t, e, restored, effective); got != usual {
				t.Errorf("restored without grants, the capabilities of a command are %s; want %s", got, usual)
			}
			if _, err := e.Teardown(t.Context(), restored); err != nil {
				t.Fatal(err)
			}

			warm := up(t, e, order("warm", o, granted("NET_RAW,SYS_PTRACE"), func(s *sandboxer.Spec) { s.Warm = true }))
			claim := order("warm", o)
			_, err = e.Claim(t.Context(), warm, claim)
			wantKind(t, err, sandboxer.Unsupported, "capabilities")
			granted("SYS_PTRACE,NET_RAW")(&claim)
			if warm, err = e.Claim(t.Context(), warm, claim); err != nil {
				t.Fatal(err)
			}
			if got := run(t, e, warm, effective); got != more {
				t.Errorf("claimed, the capabilities of a command are %s; want %s", got, more)
			}

			_, err = e.Provision(t.Context(), order("none", o, granted("SYS_ADMIN")))
			wantKind(t, err, sandboxer.Denied, "SYS_ADMIN", "the config of ext.docker")
			if l, err := e.IsAlive(t.Context(), sandboxer.Handle{SandboxID: "none", Generation: 1}); l != sandboxer.Gone || err != nil {
				t.Errorf("after a refusal it is %s, %v", l, err)
			}
			for _, names := range []string{"ALL", "net_raw", "NET_RAW,,SYS_PTRACE", "CAP_"} {
				wantKind(t, e.check(order("none", o, granted(names))), sandboxer.Invalid, "capability")
			}
			wantKind(t, e.Admit(order("none", o, granted("NET_RAW")), "grants"), sandboxer.Denied, "administrator")
		})
	}
	if !slices.IsSorted(capabilityNames) {
		t.Error("the names of capabilities are not sorted")
	}
	c := Config{Network: "bridge", Grants: []string{"ROOT"}}
	wantKind(t, c.Validate(), sandboxer.Invalid, "ROOT")
}
