package catalog

import (
	"encoding/json"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
)

// programForm is the part of an extension's file about its program, if it is one (adapter process).
type programForm struct {
	Command     []string      `yaml:"command" text:"any" nonempty:"true" help:"The program that the extension is, and its arguments; a path with a slash is relative to the file."`
	Connect     string        `yaml:"connect" format:"service" help:"Address of an extension that runs as a service, in place of command: unix:/path, or tls:host:port."`
	TLS         tlsForm       `yaml:"tls" help:"Certificates for a service by TLS, in PEM; required for it. Paths are relative to the file."`
	Path        []string      `yaml:"path" nonempty:"true" unique:"true" help:"Directories with Python modules, relative to the file. The file's own directory comes last; the working directory is never used."`
	Python      string        `yaml:"python" format:"line" help:"Python interpreter of a class, 3.9 or newer (python3)."`
	SDK         string        `yaml:"sdk" format:"line" help:"Directory with the Python package sandboxer to use instead of the program's own."`
	RunAs       string        `yaml:"run_as" format:"user" help:"User whose rights the program has; without it the server's. Only a server that runs as root can use another user."`
	Env         []string      `yaml:"env" format:"env" nonempty:"true" unique:"true" help:"Variables of the server's environment that the program gets, in addition to PATH, HOME, LANG, TZ and similar ones."`
	Concurrency int           `yaml:"concurrency" min:"1" max:"256" help:"Calls of a class at the same time (16)."`
	Limits      programLimits `yaml:"limits" help:"Bounds of the program, not of its sandboxes."`
}

// scriptLine is the first line of a script that is an extension.
const scriptLine = "#!/usr/bin/env -S sandboxer extension serve-script /bin/sh"

type tlsForm struct {
	CA   string `yaml:"ca" format:"line" help:"File with the authorities that sign the service's certificate."`
	Cert string `yaml:"cert" format:"line" help:"File with the server's client certificate."`
	Key  string `yaml:"key" format:"line" help:"File with the key of cert."`
	Name string `yaml:"name" format:"line" help:"The name in the service's certificate; without it the host of connect."`
}

type programLimits struct {
	Memory int64 `yaml:"memory" unit:"bytes" min:"16MiB" help:"Memory for data of each of its processes, such as 512MiB."`
	PIDs   int64 `yaml:"pids" min:"1" help:"Processes and threads of the user of run_as."`
}

// programKeys are the keys of a programForm.
func programKeys() []string {
	var names []string
	for _, f := range fieldsOf(reflect.TypeFor[programForm]()) {
		names = append(names, f.name)
	}
	return names
}

// check finds faults that no single key shows. isClass says that the handler is module:Class.
func (p programForm) check(d *decoder, isClass bool) {
	has := func(name string) bool { return d.places[name].key != nil }
	only := func(when string, names ...string) {
		for _, name := range names {
			if has(name) {
				d.faultKey(name, "", "this has an effect only with %s", when)
			}
		}
	}
	switch {
	case has("command") && has("connect"):
		d.faultKey("connect", "", "the extension is started by command already")
	case isClass && has("command"):
		d.faultKey("command", "", "the handler is a class, which needs no command: write handler: process")
	case isClass && has("connect"):
		d.faultKey("connect", "", "the handler is a class, which is no service: write handler: process")
	case !isClass && !has("command") && !has("connect"):
		d.fault("handler", "", "the adapter process needs a command or connect, or a class as module:Class")
	}
	if len(p.Command) > 0 && p.Command[0] == "" {
		d.fault("command[0]", "", "the name of a program cannot be empty")
	}
	if !isClass {
		only("a class as handler", "path", "python", "sdk", "concurrency")
	}
	byTLS := strings.HasPrefix(p.Connect, "tls:")
	if !byTLS {
		only("connect: tls:…", "tls")
	}
	for _, name := range []string{"ca", "cert", "key"} {
		if byTLS && !has("tls."+name) {
			at := "tls"
			if !has("tls") {
				at = "connect"
			}
			d.faultKey(at, "", "a service by TLS needs tls.%s: both sides show certificates", name)
		}
	}
	if has("connect") {
		only("command or a class: a service has the rights and limits that it was started with", "run_as", "env", "limits")
	}
}

// program returns the program that the form describes, for a file in dir; "" if it is in no directory.
func (p programForm) program(handler, dir string) sandboxer.Program {
	abs := func(path string) string {
		if path == "" || filepath.IsAbs(path) || dir == "" {
			return path
		}
		return filepath.Join(dir, path)
	}
	out := sandboxer.Program{
		Command: slices.Clone(p.Command), Connect: p.Connect, Python: p.Python, SDK: abs(p.SDK), RunAs: p.RunAs, Env: p.Env,
		Concurrency: p.Concurrency, MemoryBytes: p.Limits.Memory, PIDs: p.Limits.PIDs, Dir: dir,
		TLS: sandboxer.ProgramTLS{CA: abs(p.TLS.CA), Cert: abs(p.TLS.Cert), Key: abs(p.TLS.Key), Name: p.TLS.Name},
	}
	if strings.Contains(handler, ":") {
		out.Handler = handler
	}
	if len(out.Command) > 0 && strings.Contains(out.Command[0], "/") {
		out.Command[0] = abs(out.Command[0])
	}
	if strings.Contains(out.Python, "/") {
		out.Python = abs(out.Python)
	}
	for _, d := range p.Path {
		out.Path = append(out.Path, abs(d))
	}
	if dir != "" {
		out.Path = append(out.Path, dir)
	}
	return out
}

// raw returns the `config:` block as a JSON object. Any text that has the form of a reference to a secret is one:
// with secrets its value replaces it.
func (e ExtensionFile) raw(with bool, stored secrets) (json.RawMessage, error) {
	d := e.file.again()
	var v any = d.anything(e.config)
	if fs := d.src.take(); len(fs) > 0 {
		return nil, fs
	}
	var missing []error
	if with {
		v = replaceSecrets(v, func(ref string) string {
			s, err := stored.resolve(ref)
			if err != nil {
				missing = append(missing, err)
			}
			return string(s)
		})
	}
	if len(missing) > 0 {
		return nil, e.missing(missing)
	}
	if jsonSize(v, maxConfig) > maxConfig { // what secrets are may be large
		return nil, sandboxer.E(sandboxer.Invalid, nil, "config: with its secrets it takes more than %d bytes as JSON", maxConfig)
	}
	data, err := json.Marshal(v)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "config: it cannot be written as JSON")
	}
	return data, nil
}

// maxConfig bounds the configuration for a program, in bytes of JSON.
const maxConfig = 512 << 10

// anything decodes a block whose form is not known.
func (d *decoder) anything(config yaml.Node) map[string]any {
	m := map[string]any{}
	d.config(reflect.ValueOf(&m).Elem(), config)
	if jsonSize(m, maxConfig) > maxConfig {
		d.faultKey("config", "", "it takes more than %d bytes as JSON, aliases expanded", maxConfig)
	}
	return m
}

// jsonSize estimates how many bytes v takes as JSON, never too low; beyond most it stops counting. Aliases turn
// little into much, so the size must be known before it is written.
func jsonSize(v any, most int) (n int) {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			if n += jsonSize(k, most) + 2 + jsonSize(x, most); n > most {
				break
			}
		}
		return n + 2
	case []any:
		for _, x := range v {
			if n += 1 + jsonSize(x, most); n > most {
				break
			}
		}
		return n + 2
	case string:
		n = len(v) + 2
		for i := 0; i < len(v); i++ {
			switch c := v[i]; {
			case c < ' ' || c == '<' || c == '>' || c == '&' || c == 0x7f || c == 0xe2: // U+2028 begins with the last
				n += 5
			case c == '"' || c == '\\':
				n++
			}
		}
		return n
	}
	return 24 // a number, a boolean or nothing
}

// replaceSecrets returns v with the references to secrets replaced by what by returns.
func replaceSecrets(v any, by func(ref string) string) any {
	switch v := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, x := range v {
			out[k] = replaceSecrets(x, by)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, x := range v {
			out[i] = replaceSecrets(x, by)
		}
		return out
	case string:
		if secretPattern.MatchString(v) {
			return by(v)
		}
	}
	return v
}
