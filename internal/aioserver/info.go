package aioserver

import (
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// apiVersion is the version of the API that is answered.
const apiVersion = "1.9.4"

// run runs a small script of ours and returns what it printed.
func (c *call) run(script string) (string, error) {
	out := &printed{most: maxPrinted}
	_, err := c.s.opts.Sandboxes.Exec(c.ctx(), c.sb.ID, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Env: map[string]string{"LC_ALL": "C"}, Stdout: out})
	if err != nil {
		return "", commandError(err)
	}
	return out.String(), nil
}

// infoScript asks what clients want to know, a name and a value a line. It starts no process except uname and id,
// and no subshell, since each would be another process.
const infoScript = `echo "home=$HOME"; echo "tz=$TZ"; printf 'workspace='; pwd
printf 'system='; uname -s -r -m 2>/dev/null || echo
printf 'user='; id -un 2>/dev/null || id -u 2>/dev/null || echo
for t in python3 python pip3 pip uv node npm npx bash git curl wget jq rg find grep sed awk tar unzip make gcc; do
	printf 'tool=%s ' "$t"; command -v "$t" 2>/dev/null || echo
done; :`

type toolSpec struct {
	Ver   *string  `json:"ver"`
	Bin   *string  `json:"bin"`
	Alias []string `json:"alias"`
}

type tool struct {
	Name        string  `json:"name"`
	Description *string `json:"description"`
}

type toolCategory struct {
	Category string `json:"category"`
	Tools    []tool `json:"tools"`
}

type sandboxInfo struct {
	envelope
	HomeDir   string `json:"home_dir"`
	Workspace string `json:"workspace"`
	Version   string `json:"version"`
	Detail    detail `json:"detail"`
}

type detail struct {
	System struct {
		OS            string   `json:"os"`
		OSVersion     string   `json:"os_version"`
		Arch          string   `json:"arch"`
		User          string   `json:"user"`
		HomeDir       string   `json:"home_dir"`
		Workspace     string   `json:"workspace"`
		Timezone      string   `json:"timezone"`
		OccupiedPorts []string `json:"occupied_ports"`
	} `json:"system"`
	Runtime struct {
		Python []toolSpec `json:"python"`
		NodeJS []toolSpec `json:"nodejs"`
	} `json:"runtime"`
	Utils []toolCategory `json:"utils"`
}

// sandbox describes the inside. To clients an answer to this request means readiness, so that every
// answer comes from a command that ran.
func (c *call) sandbox() error {
	said, err := c.run(infoScript)
	if err != nil {
		return err
	}
	out := sandboxInfo{envelope: envelope{Success: true}, Version: apiVersion}
	out.Detail = detail{Utils: []toolCategory{}}
	sys, rt := &out.Detail.System, &out.Detail.Runtime
	sys.OccupiedPorts, rt.Python, rt.NodeJS = []string{}, []toolSpec{}, []toolSpec{}
	values := map[string]string{}
	utils := toolCategory{Category: "commands", Tools: []tool{}}
	for line := range strings.Lines(said) {
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		if name != "tool" {
			values[name] = value
			continue
		}
		name, bin, _ := strings.Cut(value, " ")
		if bin == "" { // it is not there
			continue
		}
		switch spec := (toolSpec{Bin: &bin, Alias: []string{name}}); name {
		case "python3", "python", "pip3", "pip", "uv":
			rt.Python = append(rt.Python, spec)
		case "node", "npm", "npx":
			rt.NodeJS = append(rt.NodeJS, spec)
		default:
			utils.Tools = append(utils.Tools, tool{Name: name})
		}
	}
	if values["system"] == "" && values["workspace"] == "" {
		return sandboxer.E(sandboxer.Failed, nil, "the shell inside the sandbox prints nothing about itself").WithHint("use an image with sh")
	}
	out.Detail.Utils = append(out.Detail.Utils, utils)
	orElse := func(s, other string) string {
		if s == "" {
			return other
		}
		return s
	}
	out.HomeDir, out.Workspace = orElse(values["home"], "/"), values["workspace"]
	if f := strings.Fields(values["system"]); len(f) == 3 {
		sys.OS, sys.OSVersion, sys.Arch = f[0], f[1], f[2]
	}
	sys.OS = orElse(sys.OS, "Linux")
	sys.User, sys.HomeDir, sys.Workspace, sys.Timezone = values["user"], out.HomeDir, out.Workspace, orElse(values["tz"], "UTC")
	return c.send(200, out)
}
