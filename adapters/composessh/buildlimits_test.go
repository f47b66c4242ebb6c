package composessh

import (
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer/adapters/composessh/composefile"
)

// A build has the memory and the processors that the operator gives it, except BuildKit's,
// which reads over them.
func TestBuildLimits(t *testing.T) {
	e := &extension{cfg: defaults}
	e.cfg.BuildMemory, e.cfg.BuildCPUs = 1<<30, 3
	p := &plan{name: "sbx", project: &composefile.Project{}}
	limits := strings.Fields("--memory 1073741824 --memory-swap 1073741824 --cpu-period 100000 --cpu-quota 300000")
	for builder, want := range map[string]bool{"": true, "buildkit": false} {
		args, _ := e.buildArgs(&host{known: &known{engine: "docker", builder: builder}}, p, job{services: []string{"web"}})
		at := slices.Index(args, "--memory")
		if got := at >= 0 && slices.Equal(args[at:min(at+len(limits), len(args))], limits); got != want {
			t.Errorf("with builder %q: %q", builder, args)
		}
	}
}
