package composefile

import (
	"context"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/override"
	"github.com/compose-spec/compose-go/v2/tree"
	"github.com/compose-spec/compose-go/v2/types"
	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
)

// importedPrefix begins the names of services of other files that are only there to be
// extended. No service of a file can be called so: see serviceName.
const importedPrefix = "x-sandboxer.extended."

// open reads one more compose file, name below the workspace, with what it includes, and
// with what services of it extend. Its paths are of the directory dir, and become those of
// the first file's.
func (l *load) open(ctx context.Context, name, dir string) (map[string]any, error) {
	config, rel, err := l.raw(name, dir, nil)
	if err != nil {
		return nil, err
	}
	former := l.reading
	l.reading = len(l.files) - 1
	defer func() { l.reading = former }()
	services, _ := config["services"].(map[string]any)
	for service, s := range services {
		if s, ok := s.(map[string]any); ok {
			if err := l.extend(name, []string{"services", service}, s, false); err != nil {
				return nil, err
			}
		}
	}
	includes := config["include"]
	delete(config, "include")
	if err := l.include(ctx, config, l.tags[name], includes, rel); err != nil {
		return nil, err
	}
	return config, l.failure()
}

// A tag of a file says that what stands at a place there, or nothing if reset is set, takes
// the place of what other files have there, where they would be merged.
type tag struct {
	at    []string
	reset bool
}

// mapped reports whether only mappings lead to a place.
func mapped(config map[string]any, at []string) bool {
	v := any(config)
	for _, key := range at {
		m, ok := v.(map[string]any)
		if !ok {
			return false
		}
		v = m[key]
	}
	return true
}

// tagged writes a file with its tags, at places to which mappings lead.
func tagged(config map[string]any, tags []tag) ([]byte, error) {
	var doc yaml.Node
	if err := doc.Encode(config); err != nil {
		return nil, err
	}
	for _, t := range tags {
		n := &doc
		for _, key := range t.at {
			k := 0
			for k < len(n.Content) && n.Content[k].Value != key {
				k += 2
			}
			if k == len(n.Content) { // a key that is to be reset
				n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: key}, &yaml.Node{Kind: yaml.ScalarNode, Value: "null"})
			}
			n = n.Content[k+1]
		}
		if n.Tag = "!override"; t.reset {
			n.Tag = "!reset"
		}
	}
	return yaml.Marshal(&doc)
}

// raw reads and parses one file, whose paths are of the directory dir. Its places are noted
// below prefix. rel is dir, seen from the first file's.
func (l *load) raw(name, dir string, prefix []string) (config map[string]any, rel string, err error) {
	if len(l.files) == maxMerged {
		return nil, "", sandboxer.E(sandboxer.Invalid, nil, "%s and what belongs to it are more than %d files", l.files[0], maxMerged)
	}
	text, err := l.read(name)
	if err != nil {
		return nil, "", sandboxer.E(sandboxer.Invalid, err, "the compose file %s cannot be read: %s", name, reason(err))
	}
	former := l.reading
	l.reading = len(l.files)
	defer func() { l.reading = former }()
	l.files, l.texts = append(l.files, name), append(l.texts, text)
	if config, err = l.parse(text, prefix); err != nil {
		return nil, "", err
	}
	for _, t := range l.tags[name] {
		if len(prefix) > 0 && t.at[0] == prefix[0] {
			l.refuse(t.at, "the tags !reset and !override are not supported in a file of which services are extended")
		} else if len(prefix) == 0 && !mapped(config, t.at) {
			l.refuse(t.at, "the tags !reset and !override are not supported within lists")
		}
	}
	if rel, err = filepath.Rel(l.base, dir); err != nil {
		return nil, "", err
	}
	if rel = filepath.ToSlash(rel); rel != "." {
		l.rebase(config, prefix, rel)
	}
	return config, rel, l.failure()
}

// extend has a service that stands at the place at of file name, and extends one of another
// file, extend a copy of that. With all it does so with one of the same file, too.
func (l *load) extend(name string, at []string, s map[string]any, all bool) error {
	e, ok := s["extends"].(map[string]any)
	if one, isName := s["extends"].(string); isName {
		e, ok = map[string]any{"service": one}, true
	}
	if !ok || e["file"] == nil && !all {
		return nil
	}
	at = append(slices.Clip(at), "extends")
	from := name
	if e["file"] != nil {
		file, _ := e["file"].(string)
		var err error
		if from, err = l.beside(file); err == nil {
			_, err = l.stat(from)
		}
		if err != nil {
			l.refuse(append(at, "file"), "%q cannot be read: %s", file, reason(err))
			return nil
		}
		if from == name && !all {
			delete(e, "file")
			return nil
		}
	}
	service, _ := e["service"].(string)
	if service == "" || strings.Contains(service, "$") {
		l.refuse(at, "names no service")
		return nil
	}
	imported, err := l.imported(from, service)
	if err != nil {
		return err
	}
	if imported == "" {
		l.refuse(at, "%s has no service %q", from, service)
		return nil
	}
	s["extends"] = map[string]any{"service": imported}
	return nil
}

// imported returns the name of a copy of a service of another file; "" if there is none.
func (l *load) imported(file, service string) (string, error) {
	key := file + "\x00" + service
	if name := l.imports[key]; name != "" {
		return name, nil
	}
	config := l.others[file]
	if config == nil {
		var err error
		if config, _, err = l.raw(file, path.Dir(file), []string{file}); err != nil {
			return "", err
		}
		l.others[file] = config
	}
	services, _ := config["services"].(map[string]any)
	s, ok := services[service].(map[string]any)
	if !ok {
		return "", nil
	}
	name := fmt.Sprint(importedPrefix, len(l.imports))
	l.imports[key] = name // before what it extends itself, which may be it
	l.extra[name] = s
	return name, l.extend(file, []string{file, "services", service}, s, true)
}

// include adds to config, of a file in the directory rel that has these tags, what its key
// include names: each a project of its own, with its own variables. What both have is merged,
// and the file that includes counts more.
func (l *load) include(ctx context.Context, config map[string]any, tags []tag, includes any, rel string) error {
	if includes == nil {
		return nil
	}
	where := l.place([]string{"include"}) // before what is included says that, too
	refuse := func(format string, args ...any) { l.refuseAt(where, []string{"include"}, format, args...) }
	list, ok := includes.([]any)
	if !ok {
		refuse("is not a list")
		return nil
	}
	for _, one := range list {
		i, err := l.inclusion(one, rel)
		if err != nil {
			refuse("%s", err)
			continue
		}
		other, err := l.included(ctx, i)
		if err != nil {
			return err
		}
		for _, kind := range []string{"services", "networks", "volumes", "configs", "secrets"} {
			objects, _ := other[kind].(map[string]any)
			if len(objects) == 0 {
				continue
			}
			mine, _ := config[kind].(map[string]any)
			if mine == nil {
				mine = map[string]any{}
				config[kind] = mine
			}
			for n, o := range objects {
				there, twice := mine[n]
				switch {
				case !twice:
					mine[n] = o
					continue
				case reflect.DeepEqual(there, o):
					continue
				}
				for _, t := range tags {
					if o, ok := o.(map[string]any); ok && len(t.at) > 2 && t.at[0] == kind && t.at[1] == n {
						remove(o, t.at[2:])
					}
				}
				if mine[n], err = override.MergeYaml(o, there, tree.NewPath(kind, n)); err != nil {
					l.refuse([]string{kind, n}, "cannot be merged with what %s has, which is included: %s", i.files[0], err)
					mine[n] = there
				}
			}
		}
	}
	return nil
}

// An inclusion is what one element of include asks for.
type inclusion struct {
	files []string // below the workspace, merged
	dir   string   // of their paths
	env   map[string]string
}

// inclusion understands an element of include of a file in the directory rel.
func (l *load) inclusion(one any, rel string) (i inclusion, err error) {
	words := func(v any) (out []string) {
		list, ok := v.([]any)
		if !ok {
			list = []any{v}
		}
		for _, e := range list {
			s, _ := e.(string)
			out = append(out, s)
		}
		return out
	}
	of := func(file string) (string, error) {
		if file == "" || path.IsAbs(file) || strings.HasPrefix(file, "~") {
			return l.beside(file)
		}
		return l.beside(path.Join(rel, file))
	}
	var paths, envs []string
	dir := ""
	m, ok := one.(map[string]any)
	if !ok {
		m = map[string]any{"path": one}
	}
	for key, v := range m {
		switch key {
		case "path":
			paths = words(v)
		case "project_directory":
			dir, _ = v.(string)
		case "env_file":
			envs = words(v)
		default:
			return i, fmt.Errorf("%s is not supported", key)
		}
	}
	if len(paths) == 0 {
		return i, errors.New("no path is named")
	}
	for _, file := range paths {
		name, err := of(file)
		if err == nil {
			_, err = l.stat(name)
		}
		if err == nil && slices.Contains(l.within, name) {
			err = errors.New("it includes itself")
		}
		if err != nil {
			return i, fmt.Errorf("%q cannot be included: %s", file, reason(err))
		}
		i.files = append(i.files, name)
	}
	if i.dir = path.Dir(i.files[0]); dir != "" {
		if i.dir, err = of(dir); err != nil {
			return i, fmt.Errorf("the project_directory %q cannot be taken: %s", dir, reason(err))
		}
	}
	if len(envs) == 0 {
		i.env, err = l.dotenv(l.env, i.dir)
		return i, err
	}
	i.env = l.env
	for _, file := range envs {
		if file == "/dev/null" {
			continue
		}
		name, err := of(file)
		if err == nil {
			i.env, err = l.variables(i.env, name)
		}
		if err != nil {
			return i, fmt.Errorf("the env_file %q cannot be read: %s", file, reason(err))
		}
	}
	return i, nil
}

// included reads what is included, with its own variables in place.
func (l *load) included(ctx context.Context, i inclusion) (map[string]any, error) {
	env, extra, imports, others, within := l.env, l.extra, l.imports, l.others, l.within
	defer func() { l.env, l.extra, l.imports, l.others, l.within = env, extra, imports, others, within }()
	l.env, l.extra, l.imports, l.others = i.env, map[string]any{}, map[string]string{}, map[string]map[string]any{}
	l.within = slices.Concat(within, i.files)
	details, err := l.details(ctx, i.files, i.dir)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(details.ConfigFiles, func(f types.ConfigFile) bool { return len(f.Config)+len(f.Content) > 0 }) {
		return nil, nil // which compose takes for a mistake, where it is not included
	}
	model, err := loader.LoadModelWithContext(ctx, details, l.options)
	if err != nil {
		return nil, l.said(ctx, i.files, err)
	}
	services, _ := model["services"].(map[string]any)
	for name := range l.extra {
		delete(services, name)
	}
	return literal(model).(map[string]any), nil
}

// literal has every text of what YAML can say mean itself where variables are replaced.
func literal(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			v[k] = literal(e)
		}
	case []any:
		for i, e := range v {
			v[i] = literal(e)
		}
	case string:
		return strings.ReplaceAll(v, "$", "$$")
	}
	return v
}

// remove takes what is at a place out of m.
func remove(m map[string]any, at []string) {
	for _, key := range at[:len(at)-1] {
		var ok bool
		if m, ok = m[key].(map[string]any); !ok {
			return
		}
	}
	delete(m, at[len(at)-1])
}

// beside is below for the path of another compose file.
func (l *load) beside(file string) (string, error) {
	if strings.Contains(file, "$") {
		return "", fmt.Errorf("no variable may be in it")
	}
	return l.below(file)
}

// rebase makes the paths of a file in the directory rel those of the first file's.
func (l *load) rebase(config map[string]any, prefix []string, rel string) {
	at := func(keys ...string) []string { return append(slices.Clip(prefix), keys...) }
	move := func(place []string, p string) string {
		switch {
		case strings.HasPrefix(p, "$"):
			l.refuse(place, "%q begins with a variable, and so it is not known whether it is a path of %s", p, rel)
		case p == "" || path.IsAbs(p) || strings.HasPrefix(p, "~") || strings.Contains(p, "://"):
		default:
			return "./" + path.Join(rel, p)
		}
		return p
	}
	in := func(place []string, m map[string]any, key string) {
		if p, ok := m[key].(string); ok {
			m[key] = move(append(place, key), p)
		}
	}
	for _, kind := range []string{"configs", "secrets"} {
		objects, _ := config[kind].(map[string]any)
		for name, o := range objects {
			if o, ok := o.(map[string]any); ok {
				in(at(kind, name), o, "file")
			}
		}
	}
	services, _ := config["services"].(map[string]any)
	for name, s := range services {
		s, ok := s.(map[string]any)
		if !ok {
			continue
		}
		place := func(keys ...string) []string { return append(at("services", name), keys...) }
		switch b := s["build"].(type) {
		case string:
			in(place(), s, "build")
		case map[string]any:
			if b["context"] == nil {
				b["context"] = "."
			}
			in(place("build"), b, "context")
		}
		if e, ok := s["extends"].(map[string]any); ok {
			in(place("extends"), e, "file")
		}
		in(place(), s, "env_file")
		if list, ok := s["env_file"].([]any); ok {
			for i, f := range list {
				switch f := f.(type) {
				case string:
					list[i] = move(place("env_file"), f)
				case map[string]any:
					in(place("env_file"), f, "path")
				}
			}
		}
		list, _ := s["volumes"].([]any)
		for i, v := range list {
			switch v := v.(type) {
			case string:
				if source, rest, found := strings.Cut(v, ":"); found && (strings.HasPrefix(source, ".") || strings.HasPrefix(source, "$")) {
					list[i] = move(place("volumes"), source) + ":" + rest
				}
			case map[string]any:
				if v["type"] == "bind" {
					in(place("volumes"), v, "source")
				}
			}
		}
	}
}

// clone copies what YAML can say.
func clone(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, e := range v {
			out[k] = clone(e)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, e := range v {
			out[i] = clone(e)
		}
		return out
	}
	return v
}
