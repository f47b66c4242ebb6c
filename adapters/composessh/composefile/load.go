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
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"regexp"
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

// Overrides are the names of files that are merged over one that was found by its name: the
// first that exists.
var Overrides = []string{"compose.override.yml", "compose.override.yaml", "docker-compose.override.yml", "docker-compose.override.yaml"}

// maxMerged is how many files are read as compose files, at most.
const maxMerged = 50

// Options say how a file is read.
type Options struct {
	// File is below the directory. Empty means those of the variable COMPOSE_FILE, or the
	// first existing one of Names with the first of Overrides.
	File     string
	Profiles []string          // profiles to enable; nil means those of COMPOSE_PROFILES
	Env      map[string]string // for ${…}, before the file .env of the directory
	// HostGateway lets services reach the host by names that extra_hosts maps to
	// host-gateway.
	HostGateway bool
}

// A Project is a compose file that was accepted.
type Project struct {
	File     string // as it is called below the directory
	Services []Service
	Networks []string // each needs a subnet
	Volumes  []string
	Builds   []Build
	Binds    []Bind   // what of the workspace is mounted, and of directories that on the way which must stay, too
	Copies   []Bind   // what is mounted from a copy instead, made before anything runs
	Files    []File   // files to put next to the workspace
	Notes    []string // what differs from the file, for people

	model    *types.Project
	mounted  map[string][]mount             // Files that a service has mounted, read-only
	copied   map[string]string              // name of the copy, by source
	internal map[string]bool                // networks that are internal anyway
	addrs    map[string]map[netip.Addr]bool // that services have chosen, by network
}

type mount struct{ file, target string }

// A Service is the part of a service that other code needs.
type Service struct {
	Name     string
	Replicas int
	OneShot  bool // it is done once it ended with 0
	MayEnd   bool // nothing is wrong if it ended with 0: the file does not have it started again then
	Restarts int  // how often in a row it is started again after it failed, as the file has it; at most maxRestarts
	Healthy  bool // it has a health check
	Ports    []Port
	// Workspace is where it has the workspace mounted, "" if it does not mount it.
	Workspace string
	Volumes   map[string]string // where it has named volumes mounted, by the volume's name
}

// A Port is a port that the file publishes.
type Port struct {
	Target    int
	Published int // as the file has it; 0 if it leaves it open
	Protocol  string
}

// A Build is an image that has to be made.
type Build struct {
	Service    string
	Context    string // below the workspace
	Dockerfile []byte // what it says; it is given with the build
	Ignore     []byte // what an ignore file of its own, next to it, leaves out of the context; nil if there is none
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

// A File is kept next to the workspace.
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
// be read, or it uses what is not allowed; each finding is a line of the message, with
// file and line.
func Load(ctx context.Context, dir string, o Options) (*Project, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "%s is not a directory that can be read", dir)
	}
	defer root.Close()
	l := &load{
		root: root, env: map[string]string{}, places: map[string]place{}, unset: map[string]bool{},
		gateway: o.HostGateway, others: map[string]map[string]any{}, tags: map[string][]tag{},
	}
	files, err := l.choose(dir, o)
	if err != nil {
		return nil, err
	}
	if o.Profiles == nil {
		for name := range strings.SplitSeq(l.env["COMPOSE_PROFILES"], ",") {
			if name = strings.TrimSpace(name); name != "" {
				o.Profiles = append(o.Profiles, name)
			}
		}
	}
	return l.project(ctx, files, o)
}

// choose returns the files to merge, in their order, and sets the
// variables: those of the request, of the .env of the directory if it was searched for the
// files, and of the one next to the first file. The former take precedence, as in compose.
func (l *load) choose(dir string, o Options) (files []string, err error) {
	maps.Copy(l.env, o.Env)
	if o.File != "" {
		files = []string{o.File}
	} else {
		if l.env, err = l.dotenv(l.env, "."); err != nil {
			return nil, err
		}
		if files, err = l.look(dir); err != nil {
			return nil, err
		}
	}
	for i, name := range files {
		if !filepath.IsLocal(name) {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "the compose file %q is not below the repository", name)
		}
		files[i] = path.Clean(filepath.ToSlash(name))
	}
	if l.base = path.Dir(files[0]); o.File != "" || l.base != "." {
		l.env, err = l.dotenv(l.env, l.base)
	}
	if _, ok := l.env["PWD"]; !ok { // which shells set for compose
		l.env["PWD"] = "."
	}
	return files, err
}

// look returns the files of the directory that compose reads if none is named.
func (l *load) look(dir string) ([]string, error) {
	if list := l.env["COMPOSE_FILE"]; list != "" {
		files := strings.Split(list, cmp.Or(l.env["COMPOSE_PATH_SEPARATOR"], ":"))
		if len(files) > maxMerged {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "COMPOSE_FILE names %d files: the maximum is %d", len(files), maxMerged)
		}
		return files, nil
	}
	first := func(names []string) []string {
		for _, n := range names {
			if _, err := l.root.Lstat(n); err == nil {
				return []string{n}
			}
		}
		return nil
	}
	found := first(Names)
	if found == nil {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%s has no compose file", dir).
			WithHint("the server looks for %s; to use another file: --input file=PATH", strings.Join(Names, ", "))
	}
	return append(found, first(Overrides)...), nil
}

// dotenv returns env plus what the file .env of a directory of the workspace sets,
// if there is one.
func (l *load) dotenv(env map[string]string, dir string) (map[string]string, error) {
	name := path.Join(dir, ".env")
	if _, err := l.root.Stat(name); errors.Is(err, fs.ErrNotExist) {
		return env, nil // also where a link leads nowhere
	}
	vars, err := l.variables(env, name)
	if err != nil {
		return env, sandboxer.E(sandboxer.Invalid, err, "%s cannot be read", name)
	}
	return vars, nil
}

// variables returns env plus what a file of variables sets.
func (l *load) variables(env map[string]string, name string) (map[string]string, error) {
	data, err := l.read(name)
	if err != nil {
		return nil, err
	}
	vars, err := dotenv.ParseWithLookup(bytes.NewReader(data), func(k string) (string, bool) { v, ok := env[k]; return v, ok })
	if err != nil {
		return nil, err
	}
	for k, v := range vars {
		if _, set := env[k]; !set {
			l.values = append(l.values, v)
		}
	}
	maps.Copy(vars, env)
	return vars, nil
}

type load struct {
	root    *os.Root
	files   []string          // the compose file, what is merged over it, and what these include and extend
	texts   [][]byte          // of them
	reading int               // which of them
	base    string            // directory of the first, "." for the workspace itself
	env     map[string]string // of what is being read
	places  map[string]place  // where the model's places stood, by their keys
	nodes   int
	gateway bool // host-gateway is the host

	within []string                  // files that are being included
	others map[string]map[string]any // files whose services are extended
	tags   map[string][]tag          // of each file
	values []string                  // of variables: they may be secrets
	found  []finding
	unset  map[string]bool // variables of the files that have no value, and so are empty
}

// A place is a line of one of the files.
type place struct {
	file, line int
}

func (p place) compare(q place) int {
	return cmp.Or(cmp.Compare(p.file, q.file), cmp.Compare(p.line, q.line))
}

func (l *load) show(p place) string { return fmt.Sprintf("%s:%d", l.files[p.file], max(p.line, 1)) }

type finding struct {
	place
	text string
}

// refuse notes that the value at the place is not allowed.
func (l *load) refuse(at []string, format string, args ...any) {
	l.refuseAt(l.place(at), at, format, args...)
}

// refuseAt is refuse for a value whose place is known to be elsewhere.
func (l *load) refuseAt(p place, at []string, format string, args ...any) {
	l.found = append(l.found, finding{p, strings.Join(at, ".") + ": " + fmt.Sprintf(format, args...)})
}

// place returns the place of at, or the nearest known place around it.
func (l *load) place(at []string) place {
	best := place{line: 1}
	for n := 1; n <= len(at); n++ {
		p, known := l.places[strings.Join(at[:n], "\x00")]
		if known && p.file < best.file {
			break // an element of a list that a later file has, too: merged, it may be another
		}
		if known {
			best = p
		}
	}
	return best
}

// mark notes the place of at. If several files set a value, the last one counts, and for
// a mapping, which is merged from all of them, the first.
func (l *load) mark(at []string, line int, n *yaml.Node) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	key := strings.Join(at, "\x00")
	if old, known := l.places[key]; !known || old.file == l.reading || n.Kind != yaml.MappingNode {
		l.places[key] = place{l.reading, line}
	}
}

func (l *load) failure() error {
	if len(l.found) == 0 {
		return nil
	}
	slices.SortStableFunc(l.found, func(a, b finding) int { return a.compare(b.place) })
	var lines []string
	if note := l.empty(); note != "" { // whence other findings may come
		lines = append(lines, l.files[0]+": "+note)
	}
	for _, f := range l.found {
		text := l.show(f.place) + ": " + f.text
		if !slices.Contains(lines, text) && len(lines) < 20 {
			lines = append(lines, text)
		}
	}
	return sandboxer.E(sandboxer.Invalid, nil, "%s", strings.Join(lines, "\n")).
		WithHint("docs/reference/compose-ssh.md lists the supported keys of compose files")
}

// empty names the variables that have no value, or is empty.
func (l *load) empty() string {
	switch names := slices.Sorted(maps.Keys(l.unset)); {
	case len(names) == 0:
		return ""
	case len(names) == 1:
		return fmt.Sprintf("the variable %s is not set, and is empty (--env %[1]s=… or .env sets it)", names[0])
	default:
		return fmt.Sprintf("the variables %s are not set, and are empty (--env NAME=… or .env sets them)", strings.Join(names, ", "))
	}
}

// read returns a regular file of the workspace; no link may lead to it.
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

// stat describes a name below the workspace without following any link.
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
func (l *load) below(p string) (string, error) { return below(l.base, p) }

// below makes a path of a directory of the workspace one below the workspace.
func below(dir, p string) (string, error) {
	switch {
	case p == "":
		return "", errors.New("it is empty")
	case strings.HasPrefix(p, "~"):
		return "", errors.New("it leads to a home directory")
	case path.IsAbs(p):
		return "", errors.New("it is a path of the host")
	case strings.ContainsAny(p, "\x00\n\r\\:"):
		return "", errors.New("it contains characters that paths cannot have")
	}
	p = path.Join(dir, p)
	if p == ".." || strings.HasPrefix(p, "../") {
		return "", errors.New("it leads out of the workspace")
	}
	return p, nil
}

func (l *load) project(ctx context.Context, files []string, o Options) (*Project, error) {
	l.within = files
	configs, err := l.configs(ctx, files, l.base)
	if err != nil {
		return nil, err
	}
	model, err := safely(func() (*types.Project, error) {
		return loader.LoadWithContext(ctx, types.ConfigDetails{ConfigFiles: configs, Environment: l.env}, l.options, loader.WithProfiles(o.Profiles))
	})
	if err != nil {
		return nil, l.said(ctx, files[0], err)
	}
	for _, services := range []types.Services{model.Services, model.DisabledServices} {
		maps.DeleteFunc(services, func(name string, _ types.ServiceConfig) bool { return strings.HasPrefix(name, importedPrefix) })
	}
	return l.accept(model)
}

// configs are files with paths of the directory dir, and the files that belong to them, as compose
// loads them.
func (l *load) configs(ctx context.Context, files []string, dir string) ([]types.ConfigFile, error) {
	configs := make([]types.ConfigFile, len(files))
	for i, name := range files {
		config, err := l.open(ctx, name, dir)
		if err != nil {
			return nil, err
		}
		configs[i] = types.ConfigFile{Filename: name, Config: config}
		if tags := l.tags[name]; len(tags) > 0 {
			if configs[i].Content, err = tagged(config, tags); err != nil {
				return nil, sandboxer.E(sandboxer.Internal, err, "%s cannot be rewritten", name)
			}
			configs[i].Config = nil // it counts where it is there
		}
	}
	return configs, nil
}

// options let compose read nothing but its input, and change nothing that accept
// checks.
func (l *load) options(lo *loader.Options) {
	lo.SetProjectName("sandbox", true)
	lo.SkipInclude = true
	lo.ResolvePaths = false
	lo.SkipNormalization = true
	lo.SkipConsistencyCheck = true // accept does that, and knows lines
	lo.SkipResolveEnvironment = true
	lo.SkipResolveLabels = true
	lo.MaxNodeVisits = maxNodes
	lo.ResourceLoaders = []loader.ResourceLoader{none{}}
	lo.Interpolate.Substitute = func(t string, lookup template.Mapping) (string, error) {
		for name, v := range template.ExtractVariables(map[string]any{"": t}, template.DefaultPattern) {
			if _, ok := lookup(name); !ok && v.DefaultValue == "" && v.PresenceValue == "" && !v.Required && plain(t, name) {
				l.unset[name] = true
			}
		}
		return template.SubstituteWithOptions(t, lookup, template.WithoutLogging)
	}
}

// said turns an error of compose about a file, and about those merged over it, into a finding.
func (l *load) said(ctx context.Context, file string, err error) error {
	if cerr := ctx.Err(); cerr != nil {
		return cerr
	}
	at, known := l.guess(err.Error())
	if !known {
		at.file = slices.Index(l.files, file)
	}
	if unset := slices.Sorted(maps.Keys(l.unset)); !known && len(unset) > 0 { // what is empty is the likeliest
		at = used(l.texts, unset[0])
	}
	l.found = append(l.found, finding{at, l.redact(strings.ReplaceAll(err.Error(), "\n", " "))})
	return l.failure()
}

// used returns where a variable is first used.
func used(texts [][]byte, name string) place {
	for i, text := range texts {
		if use := max(bytes.Index(text, []byte("${"+name)), bytes.Index(text, []byte("$"+name))); use >= 0 {
			return place{i, 1 + bytes.Count(text[:use], []byte("\n"))}
		}
	}
	return place{line: 1}
}

// plain reports whether t uses the variable without an operator.
func plain(t, name string) bool {
	return regexp.MustCompile(`\$(\{` + name + `\}|` + name + `\b)`).MatchString(strings.ReplaceAll(t, "$$", ""))
}

// redact blanks out values of the environment, which may be secrets.
func (l *load) redact(s string) string {
	for v := range maps.Values(l.env) {
		l.values = append(l.values, v)
	}
	for _, v := range l.values {
		if len(v) > 3 {
			s = strings.ReplaceAll(s, v, "…")
		}
	}
	return s
}

// guess finds the place that a message names, such as services.web.image.
func (l *load) guess(said string) (at place, known bool) {
	best := 0
	at = place{line: 1}
	for key, p := range l.places {
		for _, dotted := range []string{strings.ReplaceAll(key, "\x00", "."), strings.ReplaceAll(key, "\x00", " ")} {
			if len(key) > best && strings.Contains(said, dotted) {
				best, at = len(key), p
			}
		}
	}
	if _, after, ok := strings.Cut(said, "service \""); ok && best == 0 {
		name, _, _ := strings.Cut(after, "\"")
		if p, known := l.places["services\x00"+name]; known {
			return p, true
		}
	}
	return at, best > 0
}

// reason is an error without the names of this machine's directories.
func reason(err error) string {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err.Error()
	}
	return err.Error()
}

// bad says why a line of the file that is being read is invalid.
func (l *load) bad(line int, format string, args ...any) error {
	return sandboxer.E(sandboxer.Invalid, nil, "%s: %s", l.show(place{l.reading, line}), fmt.Sprintf(format, args...))
}

// topLevel are the keys of a file, with those that begin with x-.
var topLevel = []string{"name", "include", "services", "networks", "volumes", "configs", "secrets"}

// parse reads YAML into maps and remembers the place of everything.
func (l *load) parse(text []byte, prefix []string) (map[string]any, error) {
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		line := 1
		if _, after, ok := strings.Cut(err.Error(), "line "); ok {
			digits, _, _ := strings.Cut(after, ":")
			line, _ = strconv.Atoi(digits)
		}
		return nil, l.bad(line, "this is not YAML: %s", strings.ReplaceAll(strings.TrimPrefix(err.Error(), "yaml: "), "\n", " "))
	}
	var more yaml.Node
	if err := dec.Decode(&more); err != io.EOF {
		return nil, l.bad(more.Line, "a second document is not supported: compose would merge it into the first")
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return nil, l.bad(1, "a compose file must be a mapping")
	}
	v, err := l.value(doc.Content[0], prefix, 0)
	if err != nil {
		return nil, err
	}
	config := v.(map[string]any)
	delete(config, "version") // says nothing any more
	for key := range config {
		if !slices.Contains(topLevel, key) && !strings.HasPrefix(key, "x-") {
			l.refuse(append(slices.Clip(prefix), key), "is not supported")
		}
	}
	return config, l.failure()
}

func (l *load) value(n *yaml.Node, at []string, depth int) (any, error) {
	bad := func(format string, args ...any) error { return l.bad(n.Line, format, args...) }
	if l.nodes++; l.nodes > maxNodes {
		return nil, bad("the file has more than %d nodes, with its aliases followed", maxNodes)
	}
	if depth > maxDepth {
		return nil, bad("the file is nested more than %d deep", maxDepth)
	}
	if p, known := l.places[strings.Join(at, "\x00")]; !known || p.file != l.reading {
		l.mark(at, n.Line, n)
	}
	if n.Tag == "!override" { // see tag: what has !reset is not looked at
		same := *n
		same.Tag = ""
		n = &same
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
			if t := tagOf(c); t == "!reset" || t == "!override" {
				return nil, bad("the tag %s of an element of a list is not supported", t)
			}
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
				return nil, bad("a key is not a string")
			}
			if _, twice := own[k.Value]; twice {
				n = k
				return nil, bad("the key %q occurs twice", k.Value)
			}
			below := append(slices.Clip(at), k.Value)
			l.mark(below, k.Line, c)
			said := tagOf(c)
			if said == "!reset" || said == "!override" {
				l.tags[l.files[l.reading]] = append(l.tags[l.files[l.reading]], tag{below, said == "!reset"})
			}
			if said == "!reset" {
				continue
			}
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

// tagOf is the tag of a node, or of the node that an alias stands for.
func tagOf(n *yaml.Node) string {
	if n.Kind == yaml.AliasNode {
		return n.Alias.Tag
	}
	return n.Tag
}

// merge adds the content that "<<: c" stands for to into.
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
			return l.bad(c.Line, "<< needs a mapping")
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
	return "", fmt.Errorf("the loader may not read the file %q", name)
}

// Dir implements loader.ResourceLoader.
func (none) Dir(name string) string { return name }
