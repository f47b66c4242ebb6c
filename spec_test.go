package sandboxer_test

import (
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestSpecCheck: extensions get no spec with a part that no sandbox can have.
func TestSpecCheck(t *testing.T) {
	sound := func() sandboxer.Spec {
		return sandboxer.Spec{ID: "abcdefgh", Generation: 1, Owner: "test", Workspace: "/workspace", Env: map[string]string{"A": "b=c"},
			Ports: []int{1, 65535}, Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"a.example"}}}
	}
	if err := sound().Check(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*sandboxer.Spec){
		"no ID":                 func(s *sandboxer.Spec) { s.ID = "" },
		"generation 0":          func(s *sandboxer.Spec) { s.Generation = 0 },
		"no owner":              func(s *sandboxer.Spec) { s.Owner = "" },
		"name of a variable":    func(s *sandboxer.Spec) { s.Env = map[string]string{"A=B": "c"} },
		"NUL in a variable":     func(s *sandboxer.Spec) { s.Env = map[string]string{"A": "b\x00"} },
		"port 0":                func(s *sandboxer.Spec) { s.Ports = []int{80, 0} },
		"port 65536":            func(s *sandboxer.Spec) { s.Ports = []int{65536} },
		"negative limit":        func(s *sandboxer.Spec) { s.Limits.MilliCPU = -1 },
		"unknown network mode":  func(s *sandboxer.Spec) { s.Network = sandboxer.NetworkPolicy{Mode: "sometimes"} },
		"list with public":      func(s *sandboxer.Spec) { s.Network.Mode = sandboxer.NetworkPublic },
		"mount over everything": func(s *sandboxer.Spec) { s.Mounts = []sandboxer.Mount{{Source: "/srv", Target: "/"}} },
	} {
		s := sound()
		if change(&s); sandboxer.KindOf(s.Check()) != sandboxer.Invalid {
			t.Errorf("%s: %v; want invalid", name, s.Check())
		}
	}
}
