package cli

import (
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/catalog"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// A settingDef is one setting. If it is given more than
// once, the order is: flag, environment, --config-dir's file, user's file, system's
// file, built-in.
type settingDef struct {
	key   string // in config.yaml; the environment variable is SANDBOXER_<KEY>
	help  string
	path  bool // made absolute
	check func(string) error
}

func (d settingDef) env() string { return "SANDBOXER_" + strings.ToUpper(d.key) }

func settingDefs() []settingDef {
	return []settingDef{
		{key: "url", help: "server that commands talk to; empty means the one on this machine", check: checkURL},
		{key: "api_key_file", help: "file with the API key for url", path: true},
		{key: "profile", help: "profile that run and create use when you name none"},
		{key: "max_cost", help: "refuse sandboxes that would cost more credits than this", check: func(s string) error { _, err := sandboxer.ParseCredits(s); return err }},
		{key: "output", help: "format of results", check: checkOutput},
		{key: "progress", help: "how progress is shown on stderr", check: oneOf("progress mode", progressModes)},
		{key: "data_dir", help: "directory of the server on this machine for its database and state", path: true},
		{key: "backup_every", help: "how often the server backs up its database; 0 for never", check: checkSpan},
		{key: "keep_backups", help: "how many of these backups are kept", check: checkCount},
		{key: "keep_history", help: "how long ended sandboxes and old events are kept; 0 for ever", check: checkSpan},
		{key: "max_execs", help: "how many commands may run at once; a sixteenth is reserved for other tenants. The default depends on the file descriptors that the server may open", check: checkCount},
		{key: "max_streams", help: "the same for other uses of sandboxes: files, ports, events", check: checkCount},
		{key: "snapshot_store", help: "where portable snapshots are kept: s3://bucket/prefix; empty means the data directory", check: checkSnapshotStore},
		{key: "s3_endpoint", help: "URL of the object store, if it is not Amazon's", check: checkS3Endpoint},
		{key: "s3_region", help: "region of the bucket"},
		{key: "s3_credentials", help: "private file with aws_access_key_id and aws_secret_access_key; without it, the environment has AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", path: true},
		{key: "socket", help: "Unix socket of the server on this machine", path: true},
		{key: "listen", help: "TCP address on which the server also listens", check: checkListen},
		{key: "hosts", help: "names, separated by commas, by which clients may address the TCP listener"},
		{key: "tls_cert", help: "certificate of the TCP listener, a PEM file", path: true},
		{key: "tls_key", help: "its private key, a PEM file", path: true},
		{key: "insecure", help: "true allows a TCP listener without TLS that other machines can reach", check: oneOf("yes or no", []string{"true", "false"})},
		{key: "tls_ca", help: "PEM file with further authorities whose certificates are trusted for url", path: true},
		{key: "port_url", help: "address under which every open port gets a host name of its own, such as https://ports.example.org", check: checkPortURL},
		{key: "deerflow", help: "true serves the API of deer-flow's provisioner", check: oneOf("yes or no", []string{"true", "false"})},
		{key: "deerflow_profile", help: "profile of deer-flow's sandboxes"},
		{key: "deerflow_public_url", help: "address by which deer-flow reaches the server; empty means the address that it used", check: checkPublicURL},
		{key: "deerflow_user_data", help: "directory for the files of users, mounted at /mnt/user-data; if empty, these files end with the sandbox", path: true},
		{key: "deerflow_skills", help: "directory whose public and legacy skills are mounted below /mnt/skills", path: true},
		{key: "deerflow_mount_roots", help: "directories, separated by commas, from which deer-flow may mount; :ro after one means read-only", check: checkMountRoots},
		{key: "deerflow_ignore_mounts", help: "true ignores mounts of deer-flow from other directories, which are refused otherwise; for a deer-flow on another machine", check: oneOf("yes or no", []string{"true", "false"})},
		{key: "deerflow_anonymous", help: "true lets programs on this machine use that API without a key, as the tenant default; requires deerflow_no_proxy", check: oneOf("yes or no", []string{"true", "false"})},
		{key: "deerflow_no_proxy", help: "true declares that no proxy on this machine forwards to the TCP listener: its visitors would need no key", check: oneOf("yes or no", []string{"true", "false"})},
		{key: "deerflow_status_ok", help: "true answers failed file operations inside sandboxes with status 200, as newer all-in-one images do", check: oneOf("yes or no", []string{"true", "false"})},
		{key: "no_new_privileges", help: "false lets programs that the server starts gain rights by set-user-ID, such as sudo in a Packer template", check: oneOf("yes or no", []string{"true", "false"})},
		{key: "log_dir", help: "directory for the log of a server in the background", path: true},
		{key: "log_level", help: "debug, info, warn or error", check: oneOf("log level", logLevels)},
		{key: "log_format", help: "text or json", check: oneOf("log format", logFormats)},
	}
}

var (
	logLevels  = []string{"debug", "info", "warn", "error"}
	logFormats = []string{"text", "json"}
)

func oneOf(what string, words []string) func(string) error {
	return func(s string) error {
		if slices.Contains(words, s) {
			return nil
		}
		return invalid("%q is not a %s", s, what).WithHint("want one of: %s", strings.Join(words, ", "))
	}
}

func checkListen(s string) error {
	if _, port, err := net.SplitHostPort(s); err != nil || port == "" {
		return invalid("%q is not an address to listen on", s).WithHint("write host:port, for example 127.0.0.1:8080")
	}
	return nil
}

func checkURL(s string) error {
	u, err := url.Parse(s)
	if err == nil && (u.Scheme == "unix" && filepath.IsAbs(u.Path) || (u.Scheme == "http" || u.Scheme == "https") && u.Host != "") {
		return nil
	}
	return invalid("%q is not the address of a server", s).WithHint("write unix:///path/to/api.sock, http://host:port or https://host")
}

// A setting is the value that won, and where it came from.
type setting struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Origin string `json:"origin"`
}

// settings are the configuration of this run of the program.
type settings struct {
	all        []setting
	configDirs []configDir // weakest first
	further    string      // the one of --config-dir, which is among them
}

// configDir is a directory with config.yaml, extensions/ and profiles/.
type configDir struct{ Layer, Path string }

func (s *settings) get(key string) string {
	for _, x := range s.all {
		if x.Key == key {
			return x.Value
		}
	}
	return ""
}

// given reports whether key is set anywhere.
func (s *settings) given(key string) bool {
	for _, x := range s.all {
		if x.Key == key {
			return x.Origin != builtIn
		}
	}
	return false
}

const builtIn = catalog.BuiltIn

// getenv returns an environment variable, "" if it is not set.
func (f *factory) getenv(name string) string {
	v, _ := f.env(name)
	return v
}

// settings resolves the configuration once.
func (f *factory) settings() (*settings, error) {
	if f.resolved != nil {
		return f.resolved, nil
	}
	flags := map[string][2]string{ // key → flag, value
		"url": {"--url", f.flags.url}, "data_dir": {"--data-dir", f.flags.dataDir}, "tls_ca": {"--tls-ca", f.flags.tlsCA}, "output": {"--output", f.flags.output},
		"progress": {"--progress", f.flags.progress}, "log_level": {"--log-level", f.flags.logLevel},
	}
	if f.flags.json {
		flags["output"] = [2]string{"--json", "json"}
	}
	places, err := f.places()
	if err != nil {
		return nil, err
	}
	s := &settings{configDirs: places.config, further: places.further}
	files, err := readConfigFiles(places.config)
	if err != nil {
		return nil, err
	}
	for _, d := range settingDefs() {
		x := setting{Key: d.key, Value: places.defaults[d.key], Origin: builtIn}
		for _, file := range files {
			if v, ok := file.values[d.key]; ok {
				x.Value, x.Origin = v, file.name
				if d.path && !filepath.IsAbs(v) {
					x.Value = filepath.Join(filepath.Dir(file.name), v)
				}
			}
		}
		if v := f.getenv(d.env()); v != "" {
			x.Value, x.Origin = v, d.env()
		}
		if fl := flags[d.key]; fl[1] != "" {
			x.Value, x.Origin = fl[1], fl[0]
		}
		if d.check != nil && x.Value != "" {
			if err := d.check(x.Value); err != nil {
				e := invalid("%s: %s", x.Origin, sandboxer.Message(err))
				return nil, e.WithHint("%s", sandboxer.HintOf(err))
			}
		}
		if d.path && x.Value != "" {
			abs, err := filepath.Abs(x.Value)
			if err != nil {
				return nil, sandboxer.E(sandboxer.Invalid, err, "%s: %q cannot be made absolute", x.Origin, x.Value)
			}
			x.Value = abs
		}
		s.all = append(s.all, x)
	}
	f.resolved = s
	return s, nil
}

// places are the directories of this machine that the program uses.
type places struct {
	config   []configDir // weakest first
	further  string
	defaults map[string]string
}

// places follows the conventions of the system: fixed directories for root, XDG's
// for others, and everything below SANDBOXER_HOME if that is set.
func (f *factory) places() (*places, error) {
	p := &places{defaults: map[string]string{
		"output": "table", "progress": "auto", "log_level": "info", "log_format": "text", "profile": "profile.local",
		"deerflow_profile": "profile.deer-flow",
		"backup_every":     "1h", "keep_backups": "24", "keep_history": "30d", "no_new_privileges": "true",
	}}
	set := func(data, logs, socket string) {
		p.defaults["data_dir"], p.defaults["log_dir"], p.defaults["socket"] = data, logs, socket
	}
	const name = "sandboxer"
	home := f.getenv("SANDBOXER_HOME")
	switch {
	case home != "":
		abs, err := filepath.Abs(home)
		if err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, err, "SANDBOXER_HOME: %q cannot be made absolute", home)
		}
		p.config = append(p.config, configDir{"user", abs})
		set(filepath.Join(abs, "data"), filepath.Join(abs, "log"), filepath.Join(abs, "api.sock"))
	case os.Geteuid() == 0:
		p.config = append(p.config, configDir{"system", "/etc/" + name})
		set("/var/lib/"+name, "/var/log/"+name, "/run/"+name+"/api.sock")
	default:
		dir := func(env string, rest ...string) string {
			if v := f.getenv(env); filepath.IsAbs(v) { // XDG: a relative path is to be ignored
				return filepath.Join(v, name)
			}
			return filepath.Join(append(append([]string{f.getenv("HOME")}, rest...), name)...)
		}
		if f.getenv("HOME") == "" {
			return nil, invalid("HOME is not set").WithHint("set HOME or SANDBOXER_HOME")
		}
		data := dir("XDG_DATA_HOME", ".local", "share")
		socket := filepath.Join(data, "api.sock")
		if v := f.getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(v) {
			socket = filepath.Join(v, name, "api.sock")
		}
		p.config = append(p.config, configDir{"system", "/etc/" + name}, configDir{"user", dir("XDG_CONFIG_HOME", ".config")})
		set(data, dir("XDG_STATE_HOME", ".local", "state"), socket)
	}
	further, origin := f.flags.configDir, "--config-dir"
	if further == "" {
		further, origin = f.getenv("SANDBOXER_CONFIG_DIR"), "SANDBOXER_CONFIG_DIR"
	}
	if further != "" {
		abs, err := filepath.Abs(further)
		if err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, err, "%s: %q cannot be made absolute", origin, further)
		}
		if st, err := os.Stat(abs); err != nil {
			return nil, unreadable(err, "%s: %s cannot be read", origin, further)
		} else if !st.IsDir() {
			return nil, invalid("%s: %s is not a directory", origin, further).WithHint("name the directory that config.yaml is in")
		}
		p.config, p.further = append(p.config, configDir{origin, abs}), abs
	}
	return p, nil
}

// layers are the places of the catalogue, weakest first.
func (f *factory) layers() ([]catalog.Layer, error) {
	s, err := f.settings()
	if err != nil {
		return nil, err
	}
	layers := []catalog.Layer{{Name: builtIn, FS: f.builtin}}
	for _, d := range s.configDirs {
		layers = append(layers, catalog.Dir(d.Layer, d.Path))
	}
	return layers, nil
}

// catalog reads the catalogue of this machine, with further layers, and the descriptions that extensions that are programs gave
// when they were last open. Nothing is started. With an error it returns the valid part.
func (f *factory) catalog(further ...catalog.Layer) (*catalog.Catalog, error) {
	layers, err := f.layers()
	if err != nil {
		return &catalog.Catalog{}, err
	}
	c, err := catalog.Load(append(layers, further...), f.adapters)
	return c, catalog.Combine(err, c.Describe(f.extensionsDir()))
}

// extensionsDir has the directories of extensions.
func (f *factory) extensionsDir() string { return filepath.Join(f.resolved.get("data_dir"), extDir) }

const configFile = "config.yaml"

type configValues struct {
	name   string
	values map[string]string
}

// readConfigFiles reads config.yaml of every directory that has one; all faults of
// all files are in the one error.
func readConfigFiles(dirs []configDir) ([]configValues, error) {
	var out []configValues
	var faults catalog.Faults
	for _, d := range dirs {
		name := filepath.Join(d.Path, configFile)
		data, err := readConfigFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, unreadable(err, "%s cannot be read", name)
		}
		v, fs := parseConfig(name, data)
		faults = append(faults, fs...)
		out = append(out, configValues{name, v})
	}
	if len(faults) > 0 {
		return nil, faults
	}
	return out, nil
}

// parseConfig reads a config.yaml: a mapping of known settings to single values.
func parseConfig(name string, data []byte) (map[string]string, catalog.Faults) {
	lines := strings.Split(string(data), "\n")
	var faults catalog.Faults
	fault := func(n *yaml.Node, path, suggestion, msg string) {
		f := catalog.Fault{File: name, Line: 1, Column: 1, Width: 1, Path: path, Message: msg, Suggestion: suggestion}
		if n != nil && n.Line > 0 {
			f.Line, f.Column = n.Line, n.Column
			f.Width = max(1, utf8.RuneCountInString(n.Value))
		}
		if f.Line <= len(lines) {
			f.Excerpt = strings.TrimRight(lines[f.Line-1], "\r ")
		}
		faults = append(faults, f)
	}
	var doc yaml.Node
	if err := yaml.Load(data, &doc, yaml.WithUniqueKeys(false)); err != nil {
		if strings.Contains(err.Error(), "no documents") {
			return nil, nil
		}
		var le *yaml.LoadError
		if errors.As(err, &le) {
			fault(&yaml.Node{Line: le.Mark.Line, Column: le.Mark.Column}, "", "", "not YAML: "+le.Message)
		} else {
			fault(nil, "", "", "not YAML: "+strings.TrimPrefix(err.Error(), "yaml: "))
		}
		return nil, faults
	}
	if len(doc.Content) == 0 || doc.Content[0].Tag == "!!null" {
		return nil, nil
	}
	top := doc.Content[0]
	if top.Kind != yaml.MappingNode {
		fault(top, "", "", "expected settings as key: value")
		return nil, faults
	}
	var known []string
	for _, d := range settingDefs() {
		known = append(known, d.key)
	}
	values := map[string]string{}
	for i := 0; i+1 < len(top.Content); i += 2 {
		k, v := top.Content[i], top.Content[i+1]
		_, twice := values[k.Value]
		at := slices.Index(known, k.Value)
		switch {
		case k.Value == "api_key":
			if v.Line <= len(lines) { // no excerpt may show it
				l := []rune(lines[v.Line-1])
				lines[v.Line-1] = string(l[:min(len(l), v.Column-1)]) + "***"
			}
			fault(k, k.Value, "api_key_file", "an API key does not belong into this file: keep it in a private file of its own")
		case at < 0:
			fault(k, k.Value, suggest.Nearest(k.Value, known), "unknown setting")
		case twice:
			fault(k, k.Value, "", "given twice")
		case v.Kind != yaml.ScalarNode || v.Tag == "!!null":
			fault(v, k.Value, "", "expected a single value")
		default:
			values[k.Value] = v.Value
			if d := settingDefs()[at]; d.check != nil {
				if err := d.check(v.Value); err != nil {
					msg := sandboxer.Message(err)
					if h := sandboxer.HintOf(err); h != "" {
						msg += " (" + h + ")"
					}
					fault(v, k.Value, "", msg)
				}
			}
		}
	}
	return values, faults
}

// checkGlobals refuses wrong global settings before a command begins.
func (f *factory) checkGlobals() error {
	_, err := f.settings()
	return err
}

// apiKey returns the key from the environment or the configured file. It is never a
// flag: the arguments of a process are no secret.
func (f *factory) apiKey() (sandboxer.Secret, error) {
	if v := f.getenv("SANDBOXER_API_KEY"); v != "" {
		return sandboxer.Secret(strings.TrimSpace(v)), nil
	}
	s, err := f.settings()
	if err != nil {
		return "", err
	}
	name := s.get("api_key_file")
	if name == "" {
		return "", nil
	}
	b, err := readOwnFile(name)
	if err != nil {
		return "", unreadable(err, "the API key in %s cannot be read", name)
	}
	key := strings.TrimSpace(string(b))
	if key == "" {
		return "", invalid("the API key file %s is empty", name)
	}
	return sandboxer.Secret(key), nil
}

// logger returns a logger to the process's stderr, or one that discards when quiet
// and no level was set.
func (f *factory) logger(quiet bool) (*slog.Logger, error) {
	s, err := f.settings()
	if err != nil {
		return nil, err
	}
	if quiet && !s.given("log_level") {
		return slog.New(slog.DiscardHandler), nil
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(s.get("log_level"))); err != nil {
		return nil, invalid("%q is not a log level", s.get("log_level"))
	}
	opts := &slog.HandlerOptions{Level: level}
	if s.get("log_format") == "json" {
		return slog.New(slog.NewJSONHandler(f.io.err, opts)), nil
	}
	return slog.New(slog.NewTextHandler(f.io.err, opts)), nil
}
