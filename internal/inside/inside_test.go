package inside

import (
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
)

func TestCheck(t *testing.T) {
	for name, spec := range map[string]sandboxer.Spec{
		"few processes":     {Limits: sandboxer.Limits{PIDs: MinPIDs - 1}},
		"the agent's env":   {Env: map[string]string{agent.EnvPrefix + "X": "1"}},
		"relative":          {Workspace: "work"},
		"not clean":         {Workspace: "/work/../dev"},
		"the root":          {Workspace: "/"},
		"the agent's":       {Workspace: AgentDir + "/x"},
		"processes' own":    {Workspace: "/proc"},
		"devices":           {Workspace: "/dev/shm"},
		"kernel's settings": {Workspace: "/sys"},
	} {
		if err := Check(spec); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%s: %v; want an error of the kind Invalid", name, err)
		}
	}
	if err := Check(sandboxer.Spec{Workspace: "/devel", Env: map[string]string{"A": "1"}, Limits: sandboxer.Limits{PIDs: MinPIDs}}); err != nil {
		t.Error(err)
	}
	for _, env := range []string{"A", "=1", "A=\x00", agent.EnvPrefix + "X=1"} {
		if err := CheckImageEnv("img", []string{"B=1", env}); sandboxer.KindOf(err) != sandboxer.Failed {
			t.Errorf("%q: %v; want an error of the kind Failed", env, err)
		}
	}
	if err := CheckImageEnv("img", []string{"B=1", "C="}); err != nil {
		t.Error(err)
	}
}

func TestCapabilities(t *testing.T) {
	for _, c := range []string{"SYS_ADMIN", "SYS_RESOURCE", "NET_RAW", "MKNOD"} {
		if slices.Contains(Capabilities(), c) {
			t.Errorf("root inside has %s", c)
		}
	}
}

func TestImageMain(t *testing.T) {
	for name, tt := range map[string]struct {
		image     Image
		command   []string
		args, dir string
	}{
		"nothing":           {dir: "/"},
		"the image's own":   {image: Image{Entrypoint: []string{"entry"}, Cmd: []string{"a", "b"}, WorkingDir: "srv"}, args: "entry a b", dir: "/srv"},
		"a command":         {image: Image{Cmd: []string{"a"}, WorkingDir: "/srv"}, command: []string{"mine"}, args: "mine", dir: "/ws"},
		"for an entrypoint": {image: Image{Entrypoint: []string{"entry", "x"}, Cmd: []string{"a"}}, command: []string{"mine"}, args: "entry x mine", dir: "/"},
	} {
		args, dir := tt.image.Main(tt.command, "/ws")
		if strings.Join(args, " ") != tt.args || dir != tt.dir {
			t.Errorf("%s: %q in %s", name, args, dir)
		}
	}
	all := Image{Entrypoint: slices.Grow([]string{"entry"}, 4)}
	all.Main([]string{"x"}, "/")
	if more := all.Entrypoint[:2]; more[1] != "" {
		t.Error("the image's entry point was written to")
	}
}
