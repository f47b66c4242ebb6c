package aioserver

import (
	"encoding/json"
	"path"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// apiVersion is that of the API which is answered.
const apiVersion = "1.9.4"

// run runs a small script of ours and returns what it printed, up to so many bytes.
func (c *call) run(script string, most int) (string, error) {
	out := &printed{most: most}
	_, err := c.s.opts.Sandboxes.Exec(c.ctx(), c.sb.ID, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Env: map[string]string{"LC_ALL": "C"}, Stdout: out})
	if err != nil {
		return "", (&command{end: err}).failure()
	}
	return out.String(), nil
}

// infoScript asks what clients want to know, a name and a value a line. It starts no process but uname and id,
// and no subshell, each of which is another one.
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

// sandbox says what is inside. That it can be asked is what readiness means to clients, so that every
// answer is a command that ran.
func (c *call) sandbox() error {
	said, err := c.run(infoScript, maxPrinted)
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
		return sandboxer.E(sandboxer.Failed, nil, "the shell inside the sandbox says nothing of itself").WithHint("use an image with sh")
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

// maxPackages is how long a list of packages is at most.
const maxPackages = 1 << 20

// packages answers what a package manager lists.
func (c *call) packages(what, script, missing string) error {
	if err := c.reserve(maxPackages); err != nil {
		return err
	}
	said, err := c.run(script, maxPackages)
	if err != nil {
		return err
	}
	said = strings.TrimSpace(said)
	if said == "" {
		return sandboxer.E(sandboxer.Unsupported, nil, "the sandbox has no %s that could list packages", what).WithHint("%s", missing)
	}
	var list any
	if err := strictjson.Check([]byte(said)); err == nil {
		list = json.RawMessage(said)
	} else {
		return sandboxer.E(sandboxer.Failed, err, "%s inside the sandbox does not list packages in JSON", what)
	}
	return c.answer(list)
}

func (c *call) pythonPackages() error {
	return c.packages("pip", `for p in "python3 -m pip" "pip3" "pip" "python -m pip"; do
	$p --version >/dev/null 2>&1 && exec $p list --format=json --disable-pip-version-check 2>/dev/null
done`, "use an image with Python and pip")
}

func (c *call) nodePackages() error {
	return c.packages("npm", `command -v npm >/dev/null 2>&1 && npm ls -g --json --depth=0 2>/dev/null; :`, "use an image with Node.js and npm")
}

// language is what code can be written in.
type language struct {
	name, description string
	programs          []string // the first that is there runs it
	version           string   // its argument for that
	flag              string   // what the code follows
}

var languages = []language{
	{"python", "Python, one process for each call", []string{"python3", "python"}, "--version", "-c"},
	{"javascript", "Node.js, one process for each call", []string{"node", "nodejs"}, "--version", "-e"},
}

// codeLimit is how long code may run where nobody says it, and the longest.
const (
	codeLimit    = 30
	maxCodeLimit = 3600
)

type codeRequest struct {
	Language  string   `json:"language"`
	Code      *string  `json:"code"`
	Timeout   *seconds `json:"timeout"`
	Cwd       string   `json:"cwd"`
	Stateful  bool     `json:"stateful"`
	SessionID string   `json:"session_id"`
}

type codeResult struct {
	Language  string           `json:"language"`
	Status    string           `json:"status"`
	Outputs   []map[string]any `json:"outputs"`
	Code      string           `json:"code"`
	Stdout    string           `json:"stdout"`
	Stderr    string           `json:"stderr"`
	ExitCode  *int             `json:"exit_code"`
	Traceback []string         `json:"traceback"`
	SessionID *string          `json:"session_id"`
}

func (c *call) codeExecute() error {
	var in codeRequest
	if err := c.decode(&in); err != nil {
		return err
	}
	i := slices.IndexFunc(languages, func(l language) bool { return l.name == in.Language })
	switch {
	case i < 0:
		return bad("language", "want python or javascript")
	case in.Code == nil:
		return bad("code", "it is missing")
	case len(*in.Code) > maxArgument || strings.ContainsRune(*in.Code, 0):
		return bad("code", "want at most %d bytes, none of them NUL: write more into a file, and run that", maxArgument)
	case in.Stateful || in.SessionID != "":
		return sandboxer.E(sandboxer.Unsupported, nil, "code runs in a process of its own, which nothing outlives: stateful and session_id are not served").
			WithHint("keep what the next call needs in a file")
	}
	if err := c.foresee(*in.Code, 1); err != nil {
		return err
	}
	l := languages[i]
	hard, err := limit("timeout", in.Timeout)
	if err != nil {
		return err
	}
	if hard == 0 {
		hard, _ = seconds(codeLimit).duration("")
	}
	if longest, _ := seconds(maxCodeLimit).duration(""); hard > longest {
		return bad("timeout", "want at most %d seconds", maxCodeLimit)
	}
	dir, err := c.workDir(in.Cwd, true)
	if err != nil {
		return err
	}
	const missing = "sandboxer: no interpreter"
	script := "for p in " + strings.Join(l.programs, " ") + "; do\n" +
		"command -v $p >/dev/null 2>&1 && exec $p " + l.flag + " \"$sandboxer_code\"\ndone; echo '" + missing + "' >&2; exit 127"
	text := "sandboxer_code=" + quoted(*in.Code) + "\n" + script
	cmd, _, err := c.startIn(c.implicit(bashKind), func(*session) commandSpec {
		return commandSpec{text: text, dir: dir, hard: hard, separated: true}
	})
	if err != nil {
		return err
	}
	if _, err := c.wait(cmd, 0); err != nil {
		return err
	}
	if err := cmd.failure(); err != nil {
		return err
	}
	out := codeResult{Language: l.name, Code: *in.Code, Outputs: []map[string]any{}}
	status, code := c.status(cmd, bashKind)
	out.Stdout, _ = c.readEnd(cmd.out, false, bashChars, 2)
	out.Stderr, _ = c.readEnd(cmd.err, false, bashChars, 3)
	if code != nil && *code == 127 && strings.TrimSpace(out.Stderr) == missing {
		return sandboxer.E(sandboxer.Unsupported, nil, "the sandbox has no %s to run %s with", strings.Join(l.programs, " or "), l.name).WithHint("use an image that has it")
	}
	out.ExitCode = code
	switch {
	case code == nil:
		out.Status = status
	case *code == 0:
		out.Status = "ok"
	default:
		out.Status = "error"
		out.Traceback = strings.Split(strings.TrimSuffix(out.Stderr, "\n"), "\n")
	}
	for _, s := range []struct{ name, text string }{{"stdout", out.Stdout}, {"stderr", out.Stderr}} {
		if s.text != "" {
			out.Outputs = append(out.Outputs, map[string]any{"output_type": "stream", "name": s.name, "text": s.text})
		}
	}
	return c.answer(out)
}

// quoted writes s so that a shell reads it.
func quoted(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func (c *call) codeInfo() error {
	var script strings.Builder
	for _, l := range languages {
		for _, p := range l.programs {
			script.WriteString("p=$(command -v " + p + " 2>/dev/null) && echo \"" + l.name + " $p $(" + p + " " + l.version + " 2>&1 | head -n 1)\"\n")
		}
	}
	said, err := c.run(script.String()+":", maxPrinted)
	if err != nil {
		return err
	}
	type info struct {
		Language       string            `json:"language"`
		Description    string            `json:"description"`
		RuntimeVersion *string           `json:"runtime_version"`
		DefaultTimeout int               `json:"default_timeout"`
		MaxTimeout     int               `json:"max_timeout"`
		Details        map[string]string `json:"details"`
	}
	out := struct {
		Languages []info `json:"languages"`
	}{[]info{}}
	for _, l := range languages {
		for line := range strings.Lines(said) {
			if rest, ok := strings.CutPrefix(line, l.name+" "); ok {
				bin, version, _ := strings.Cut(strings.TrimSpace(rest), " ")
				version = strings.TrimPrefix(strings.TrimPrefix(version, "Python "), "v")
				out.Languages = append(out.Languages, info{l.name, l.description, &version, codeLimit, maxCodeLimit, map[string]string{"bin": path.Clean(bin)}})
				break
			}
		}
	}
	return c.answer(out)
}
