package composefile

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/compose-spec/compose-go/v2/dotenv"
	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/template"
	"github.com/compose-spec/compose-go/v2/types"
	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
)

// Bounds of what is read. They are far above what people write.
const (
	maxFile   = 1 << 20 // bytes of a compose file, and of each file that one names
	maxNodes  = 50_000  // YAML nodes with every alias followed
	maxDepth  = 60
	maxUnits  = 60 // containers of a project
	maxPinned = 64 // files and directories that are copied out of the workspace
)

// Names are those under which a compose file is looked for, in this order.
var Names = []string{"compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml"}

// Options say how a file is read.
type Options struct {
	File     string            // below the directory; empty means the first of Names that is there
	Profiles []string          // profiles to enable
	Env      map[string]string // for ${…}, before the file .env of the directory
}

// A Project is a compose file that was accepted.
type Project struct {
	File     string // as it is called below the directory
	Services []Service
	Networks []string // each needs a subnet
	Volumes  []string
	Builds   []Build
	Binds    []Bind   // what of the workspace is mounted
	Copies   []Bind   // what is mounted from a copy instead, made before anything runs
	Files    []File   // what has to lie beside the workspace
	Notes    []string // what differs from the file, for people

	model    *types.Project
	mounted  map[string][]mount // Files that a service has mounted, read-only
	copied   map[string]string  // name of the copy, by source
	internal map[string]bool    // networks that are internal anyway
}

type mount struct{ file, target string }

// A Service is what others must know of one.
type Service struct {
	Name     string
	Replicas int
	OneShot  bool // it is done once it ended with 0
	Healthy  bool // it has a health check
	Ports    []Port
	// Workspace is where it has the workspace mounted, "" if it has not.
	Workspace string
	Volumes   map[string]string // where it has named volumes mounted, by the volume's name
}

// A Port is one that the file publishes.
type Port struct {
	Target    int
	Published int // as the file has it; 0 if it leaves it open
	Protocol  string
}

// A Build is an image that has to be made.
type Build struct {
	Service    string
	Context    string // below the workspace
	Dockerfile string // below the workspace; empty means Dockerfile in the context
	Inline     string // the Dockerfile itself, one of Files, instead
	Args       map[string]string
	Labels     map[string]string
	Target     string
	Platform   string
	NoCache    bool
	Pull       bool
}

// A Bind is a part of the workspace, which is a directory unless File is set.
type Bind struct {
	Source string // below the workspace, "." for all of it
	File   bool
	Copy   string // name of the copy, for Copies
}

// A File lies beside the workspace.
type File struct {
	Name    string
	Mode    fs.FileMode
	Content []byte
}

// ImageOf is the image that the file names for a service.
func (p *Project) ImageOf(service string) string { return p.model.Services[service].Image }

// Waits reports whether a service is to be started only once another is healthy or done.
func (p *Project) Waits() bool {
	for _, s := range p.model.Services {
		for _, d := range s.DependsOn {
			if d.Condition != "" && d.Condition != types.ServiceConditionStarted {
				return true
			}
		}
	}
	return false
}

// Load reads the compose file of the directory dir. Invalid: there is none, it cannot
// be read, or it asks for what is not given; each finding is a line of the message, with
// file and line.
func Load(ctx context.Context, dir string, o Options) (*Project, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "%s is not a directory that can be read", dir)
	}
	defer root.Close()
	name := o.File
	if name == "" {
		for _, n := range Names {
			if _, err := root.Lstat(n); err == nil {
				name = n
				break
			}
		}
		if name == "" {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s has no compose file", dir).
				WithHint("it is looked for as %s; the input file names another", strings.Join(Names, ", "))
		}
	}
	if !filepath.IsLocal(name) {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the compose file %q is not below the repository", name)
	}
	name = path.Clean(filepath.ToSlash(name))
	l := &load{root: root, file: name, env: map[string]string{}, lines: map[string]int{}}
	return l.project(ctx, o)
}

type load struct {
	root  *os.Root
	file  string
	base  string // directory of the file, "." for the workspace itself
	env   map[string]string
	lines map[string]int
	nodes int
	found []finding
}

type finding struct {
	line int
	text string
}

// refuse notes that what stands at the place is not given.
func (l *load) refuse(at []string, format string, args ...any) {
	l.found = append(l.found, finding{l.line(at), strings.Join(at, ".") + ": " + fmt.Sprintf(format, args...)})
}

// line returns where the place is, or the nearest place around it that is known.
func (l *load) line(at []string) int {
	for n := len(at); n > 0; n-- {
		if line := l.lines[strings.Join(at[:n], "\x00")]; line > 0 {
			return line
		}
	}
	return 1
}

func (l *load) verdict() error {
	if len(l.found) == 0 {
		return nil
	}
	slices.SortStableFunc(l.found, func(a, b finding) int { return cmp.Compare(a.line, b.line) })
	var b strings.Builder
	shown := map[string]bool{}
	for _, f := range l.found {
		text := fmt.Sprintf("%s:%d: %s", l.file, f.line, f.text)
		if !shown[text] && len(shown) < 20 {
			if shown[text] = true; b.Len() > 0 {
				b.WriteByte('\n')
			}
			b.WriteString(text)
		}
	}
	return sandboxer.E(sandboxer.Invalid, nil, "%s", b.String()).
		WithHint("docs/compose-ssh.md lists what a compose file may ask for")
}

// read returns a regular file of the workspace to which no link leads.
func (l *load) read(name string) ([]byte, error) {
	fi, err := l.stat(name)
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", name)
	}
	f, err := l.root.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("%s is larger than %d bytes", name, maxFile)
	}
	return data, err
}

// stat looks at a name below the workspace without following any link.
func (l *load) stat(name string) (fs.FileInfo, error) {
	var fi fs.FileInfo
	at := ""
	for part := range strings.SplitSeq(path.Clean(name), "/") {
		at = path.Join(at, part)
		var err error
		if fi, err = l.root.Lstat(at); err != nil {
			return nil, err
		}
		if fi.Mode().Type() == fs.ModeSymlink {
			return nil, fmt.Errorf("%s is a symbolic link", at)
		}
	}
	return fi, nil
}

// below makes a path of the file one below the workspace.
func (l *load) below(p string) (string, error) {
	switch {
	case p == "":
		return "", errors.New("it is empty")
	case strings.HasPrefix(p, "~"):
		return "", errors.New("it leads to a home directory")
	case path.IsAbs(p):
		return "", errors.New("it is a path of the host")
	case strings.ContainsAny(p, "\x00\n\r\\:"):
		return "", errors.New("it has characters that are not for paths")
	}
	p = path.Join(l.base, p)
	if p == ".." || strings.HasPrefix(p, "../") {
		return "", errors.New("it leads out of the workspace")
	}
	return p, nil
}

func (l *load) project(ctx context.Context, o Options) (*Project, error) {
	l.base = path.Dir(l.file)
	text, err := l.read(l.file)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "the compose file %s cannot be read: %s", l.file, reason(err))
	}
	if _, err := l.root.Lstat(path.Join(l.base, ".env")); err == nil {
		data, err := l.read(path.Join(l.base, ".env"))
		if err == nil {
			var vars map[string]string
			vars, err = dotenv.ParseWithLookup(bytes.NewReader(data), func(k string) (string, bool) { v, ok := o.Env[k]; return v, ok })
			maps.Copy(l.env, vars)
		}
		if err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, err, "%s cannot be read", path.Join(l.base, ".env"))
		}
	}
	maps.Copy(l.env, o.Env)

	config, err := l.parse(text)
	if err != nil {
		return nil, err
	}
	dir, err := filepath.Abs(filepath.Join(l.root.Name(), filepath.FromSlash(l.base)))
	if err != nil {
		return nil, err
	}
	unset := map[string]bool{}
	model, err := loader.LoadWithContext(ctx, types.ConfigDetails{
		WorkingDir:  dir,
		ConfigFiles: []types.ConfigFile{{Filename: l.file, Config: config}},
		Environment: l.env,
	}, func(lo *loader.Options) {
		lo.SetProjectName("sandbox", true)
		lo.SkipInclude = true
		lo.ResolvePaths = false
		lo.SkipNormalization = true
		lo.SkipConsistencyCheck = true // accept does that, and knows lines
		lo.SkipResolveEnvironment = true
		lo.SkipResolveLabels = true
		lo.MaxNodeVisits = maxNodes
		lo.Profiles = o.Profiles
		lo.ResourceLoaders = []loader.ResourceLoader{none{}}
		lo.Interpolate.Substitute = func(t string, lookup template.Mapping) (string, error) {
			for name, v := range template.ExtractVariables(map[string]any{"": t}, template.DefaultPattern) {
				if _, ok := lookup(name); !ok && v.DefaultValue == "" && v.PresenceValue == "" && !v.Required && plain(t, name) {
					unset[name] = true
				}
			}
			return template.SubstituteWithOptions(t, lookup, template.WithoutLogging)
		}
	})
	if cerr := ctx.Err(); cerr != nil {
		return nil, cerr
	}
	if err != nil {
		said := strings.ReplaceAll(strings.ReplaceAll(err.Error(), l.root.Name()+string(filepath.Separator), ""), "\n", " ")
		l.found = append(l.found, finding{l.guess(err.Error()), l.redact(said)})
		return nil, l.verdict()
	}
	for _, name := range slices.Sorted(maps.Keys(unset)) {
		use := max(bytes.Index(text, []byte("${"+name)), bytes.Index(text, []byte("$"+name)), 0)
		line := 1 + bytes.Count(text[:use], []byte("\n"))
		l.found = append(l.found, finding{line, fmt.Sprintf("the variable %s is not set: give it a value with --env %s=…, in .env, or a default in the file", name, name)})
	}
	return l.accept(model)
}

// plain reports whether t uses the variable without an operator.
func plain(t, name string) bool {
	t = strings.ReplaceAll(t, "$$", "")
	if strings.Contains(t, "${"+name+"}") {
		return true
	}
	_, after, ok := strings.Cut(t, "$"+name)
	return ok && (after == "" || !isNameByte(after[0]))
}

func isNameByte(b byte) bool {
	return b == '_' || '0' <= b && b <= '9' || 'a' <= b && b <= 'z' || 'A' <= b && b <= 'Z'
}

// redact blanks out values of the environment, which may be secrets.
func (l *load) redact(s string) string {
	for _, v := range l.env {
		if len(v) > 3 {
			s = strings.ReplaceAll(s, v, "…")
		}
	}
	return s
}

// guess finds the line of a place that a message names, services.web.image.
func (l *load) guess(said string) int {
	best, line := 0, 1
	for at, n := range l.lines {
		for _, dotted := range []string{strings.ReplaceAll(at, "\x00", "."), strings.ReplaceAll(at, "\x00", " ")} {
			if len(at) > best && strings.Contains(said, dotted) {
				best, line = len(at), n
			}
		}
	}
	if _, after, ok := strings.Cut(said, "service \""); ok {
		name, _, _ := strings.Cut(after, "\"")
		if n := l.lines["services\x00"+name]; n > 0 && best == 0 {
			line = n
		}
	}
	return line
}

// reason is an error without the names of this machine's directories.
func reason(err error) string {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err.Error()
	}
	return err.Error()
}

// parse reads YAML into maps and remembers where everything stood.
func (l *load) parse(text []byte) (map[string]any, error) {
	bad := func(line int, format string, args ...any) error {
		return sandboxer.E(sandboxer.Invalid, nil, "%s:%d: %s", l.file, max(line, 1), fmt.Sprintf(format, args...))
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		line := 1
		if _, after, ok := strings.Cut(err.Error(), "line "); ok {
			digits, _, _ := strings.Cut(after, ":")
			line, _ = strconv.Atoi(digits)
		}
		return nil, bad(line, "this is not YAML: %s", strings.ReplaceAll(strings.TrimPrefix(err.Error(), "yaml: "), "\n", " "))
	}
	var more yaml.Node
	if err := dec.Decode(&more); err != io.EOF {
		return nil, bad(more.Line, "there is a second document, which would be merged into the first")
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return nil, bad(1, "a compose file is a mapping")
	}
	v, err := l.value(doc.Content[0], nil, 0)
	if err != nil {
		return nil, err
	}
	config := v.(map[string]any)
	for key := range config {
		switch {
		case key == "services" || key == "networks" || key == "volumes" || key == "configs" || key == "secrets":
		case key == "name", strings.HasPrefix(key, "x-"):
		case key == "version":
			delete(config, key) // says nothing any more
		case key == "include":
			l.refuse([]string{key}, "other files are not included; use one file")
		default:
			l.refuse([]string{key}, "is not supported")
		}
	}
	services, _ := config["services"].(map[string]any)
	for name, s := range services {
		if s, ok := s.(map[string]any); ok {
			if e, ok := s["extends"].(map[string]any); ok && e["file"] != nil {
				l.refuse([]string{"services", name, "extends", "file"}, "other files are not read; extend a service of the same file")
			}
		}
	}
	return config, l.verdict()
}

func (l *load) value(n *yaml.Node, at []string, depth int) (any, error) {
	bad := func(format string, args ...any) error {
		return sandboxer.E(sandboxer.Invalid, nil, "%s:%d: %s", l.file, n.Line, fmt.Sprintf(format, args...))
	}
	if l.nodes++; l.nodes > maxNodes {
		return nil, bad("the file has more than %d nodes, with its aliases followed", maxNodes)
	}
	if depth > maxDepth {
		return nil, bad("the file is nested more than %d deep", maxDepth)
	}
	if key := strings.Join(at, "\x00"); l.lines[key] == 0 {
		l.lines[key] = n.Line
	}
	switch n.Kind {
	case yaml.AliasNode:
		return l.value(n.Alias, at, depth+1)
	case yaml.ScalarNode:
		switch n.ShortTag() {
		case "!!str", "!!int", "!!float", "!!bool", "!!null", "!!timestamp":
		default:
			return nil, bad("the tag %s is not supported", n.Tag)
		}
		if n.ShortTag() == "!!timestamp" {
			return n.Value, nil
		}
		var v any
		if err := n.Decode(&v); err != nil {
			return nil, bad("%s", strings.ReplaceAll(err.Error(), "\n", " "))
		}
		return v, nil
	case yaml.SequenceNode:
		if n.ShortTag() != "!!seq" {
			return nil, bad("the tag %s is not supported", n.Tag)
		}
		list := make([]any, 0, len(n.Content))
		for i, c := range n.Content {
			v, err := l.value(c, append(slices.Clip(at), strconv.Itoa(i)), depth+1)
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		return list, nil
	case yaml.MappingNode:
		if n.ShortTag() != "!!map" {
			return nil, bad("the tag %s is not supported", n.Tag)
		}
		own, merged := map[string]any{}, map[string]any{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			k, c := n.Content[i], n.Content[i+1]
			if k.Kind == yaml.ScalarNode && k.ShortTag() == "!!merge" {
				if err := l.merge(c, at, depth+1, merged); err != nil {
					return nil, err
				}
				continue
			}
			if k.Kind == yaml.AliasNode {
				k = k.Alias
			}
			if k.Kind != yaml.ScalarNode {
				return nil, bad("a key is not a word")
			}
			if _, twice := own[k.Value]; twice {
				n = k
				return nil, bad("the key %q is there twice", k.Value)
			}
			below := append(slices.Clip(at), k.Value)
			l.lines[strings.Join(below, "\x00")] = k.Line
			v, err := l.value(c, below, depth+1)
			if err != nil {
				return nil, err
			}
			own[k.Value] = v
		}
		maps.Copy(merged, own)
		return merged, nil
	}
	return nil, bad("this cannot be read")
}

// merge adds to into what "<<: c" stands for.
func (l *load) merge(c *yaml.Node, at []string, depth int, into map[string]any) error {
	v, err := l.value(c, at, depth)
	if err != nil {
		return err
	}
	list, ok := v.([]any)
	if !ok {
		list = []any{v}
	}
	for _, m := range slices.Backward(list) { // of several, the first counts
		m, ok := m.(map[string]any)
		if !ok {
			return sandboxer.E(sandboxer.Invalid, nil, "%s:%d: << wants a mapping", l.file, c.Line)
		}
		maps.Copy(into, m)
	}
	return nil
}

// none keeps compose-go from reading any file.
type none struct{}

// Accept implements loader.ResourceLoader.
func (none) Accept(string) bool { return true }

// Load implements loader.ResourceLoader.
func (none) Load(_ context.Context, name string) (string, error) {
	return "", fmt.Errorf("the file %q is not read", name)
}

// Dir implements loader.ResourceLoader.
func (none) Dir(name string) string { return name }
