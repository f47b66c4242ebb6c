package composefile

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/override"
	"github.com/compose-spec/compose-go/v2/types"
	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
)

// importedPrefix begins the names of services of other files that are only there to be
// extended. No service of a file can be called so: see serviceName.
const importedPrefix = "_extended."

// open reads another compose file, name below the workspace, with what it includes, and
// with what its services extend. Its paths are relative to the directory dir.
func (l *load) open(ctx context.Context, name, dir string) (map[string]any, error) {
	config, err := l.raw(name, nil)
	if err != nil {
		return nil, err
	}
	services, _ := config["services"].(map[string]any)
	extended := extended{dir, map[string]any{}}
	for service, s := range services {
		if strings.HasPrefix(service, importedPrefix) {
			l.refuse([]string{"services", service}, "%q is not a valid name of a service", service)
		}
		if s, ok := s.(map[string]any); ok {
			if err := l.extend(ctx, extended, name, dir, []string{"services", service}, s); err != nil {
				return nil, err
			}
		}
	}
	maps.Copy(services, extended.services)
	if config, err = l.include(ctx, name, dir, config); err != nil {
		return nil, err
	}
	return config, l.failure()
}

// A tag of a file says that its value at a place, or nothing if reset is set, replaces
// the values of other files there, which would otherwise be merged.
type tag struct {
	at    []string
	reset bool
}

// parent is the mapping that has the last key of a place; nil if something else than a mapping is on the way.
func parent(m map[string]any, at []string) map[string]any {
	for _, key := range at[:len(at)-1] {
		m, _ = m[key].(map[string]any)
	}
	return m
}

// tagged writes a file with its tags, at places below mappings.
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

// raw reads and parses one file. Its places are noted below prefix.
func (l *load) raw(name string, prefix []string) (map[string]any, error) {
	if len(l.files) == maxMerged {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%s includes or extends too many files: the maximum is %d", l.files[0], maxMerged)
	}
	text, err := l.read(name)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "the compose file %s cannot be read: %s", name, reason(err))
	}
	l.reading = len(l.files)
	l.files, l.texts = append(l.files, name), append(l.texts, text)
	config, err := l.parse(text, prefix)
	if err != nil {
		return nil, err
	}
	for _, t := range l.tags[name] {
		if len(prefix) > 0 && t.at[0] == prefix[0] {
			l.refuse(t.at, "the tags !reset and !override are not supported in a file whose services are extended")
		} else if len(prefix) == 0 && parent(config, t.at) == nil {
			l.refuse(t.at, "the tags !reset and !override are not supported within lists")
		}
	}
	return config, l.failure()
}

// extended are copies of services of other files that services of one file extend.
type extended struct {
	dir      string         // of that file's paths, and so of theirs
	services map[string]any // by names with importedPrefix
}

// extend changes a service that extends one of another file so that it extends a copy of that one instead.
// The service is at the place at of the file name, whose paths are relative to the directory dir. A
// service that is a copy itself extends copies only.
func (l *load) extend(ctx context.Context, to extended, name, dir string, at []string, s map[string]any) error {
	e, ok := s["extends"].(map[string]any)
	if one, isName := s["extends"].(string); isName {
		e, ok = map[string]any{"service": one}, true
	}
	copied := at[0] != "services"
	if !ok || e["file"] == nil && !copied {
		return nil
	}
	at = append(slices.Clip(at), "extends")
	file := name
	if e["file"] != nil {
		said, _ := e["file"].(string)
		var err error
		if file, err = l.beside(dir, said); err == nil {
			_, err = l.stat(file)
		}
		if err != nil {
			l.refuse(append(at, "file"), "%q cannot be read: %s", said, reason(err))
			return nil
		}
		if file == name && !copied {
			delete(e, "file")
			return nil
		}
	}
	service, _ := e["service"].(string)
	if service == "" || strings.Contains(service, "$") {
		l.refuse(at, "names no service")
		return nil
	}
	imported, err := l.imported(ctx, to, file, service)
	if err != nil {
		return err
	}
	if imported == "" {
		l.refuse(at, "%s has no service %q", file, service)
		return nil
	}
	s["extends"] = map[string]any{"service": imported}
	return nil
}

// imported returns the name of a copy of a service of another file; "" if there is none.
func (l *load) imported(ctx context.Context, to extended, file, service string) (string, error) {
	config := l.others[file]
	if config == nil {
		var err error
		if config, err = l.raw(file, []string{file}); err != nil {
			return "", err
		}
		l.others[file] = config
	}
	services, _ := config["services"].(map[string]any)
	s, ok := services[service].(map[string]any)
	if !ok {
		return "", nil
	}
	name := fmt.Sprint(importedPrefix, slices.Index(l.files, file), ".", service)
	if to.services[name] != nil {
		return name, nil
	}
	s = maps.Clone(s)
	to.services[name] = s // before what it extends itself, which may be it
	extends := s["extends"]
	delete(s, "extends")
	alone := types.ConfigFile{Filename: file, Config: map[string]any{"services": map[string]any{service: s}}}
	model, err := l.model(ctx, []types.ConfigFile{alone}, path.Dir(file), to.dir, func(lo *loader.Options) { lo.SkipDefaultValues = true })
	if err != nil {
		return "", l.said(ctx, file, errors.New(strings.ReplaceAll(err.Error(), "services.", file+".services.")))
	}
	services, _ = model["services"].(map[string]any)
	if s, _ = services[service].(map[string]any); s == nil {
		s = map[string]any{}
	}
	if extends != nil {
		s["extends"] = extends
	}
	to.services[name] = s
	return name, l.extend(ctx, to, file, path.Dir(file), []string{file, "services", service}, s)
}

// include merges config, of the file name with paths of the directory dir, over what its key
// include names: each a project of its own, with its own variables.
func (l *load) include(ctx context.Context, name, dir string, config map[string]any) (map[string]any, error) {
	includes, ok := config["include"]
	if delete(config, "include"); !ok || includes == nil {
		return config, nil
	}
	where := l.place([]string{"include"}) // before what is included says that, too
	refuse := func(format string, args ...any) { l.refuseAt(where, []string{"include"}, format, args...) }
	list, ok := includes.([]any)
	if !ok {
		refuse("is not a list")
		return config, nil
	}
	for _, one := range list {
		i, err := l.inclusion(one, dir)
		if err != nil {
			refuse("%s", err)
			continue
		}
		other, err := l.included(ctx, i, dir)
		if err != nil {
			return nil, err
		}
		all := map[string]any{}
		for _, kind := range []string{"services", "networks", "volumes", "configs", "secrets"} {
			mine, _ := config[kind].(map[string]any)
			if objects, _ := other[kind].(map[string]any); len(objects) > 0 {
				maps.DeleteFunc(objects, func(name string, o any) bool { m, twice := mine[name]; return twice && reflect.DeepEqual(m, o) })
				all[kind] = objects
			}
		}
		for _, t := range l.tags[name] {
			if len(t.at) > 2 {
				delete(parent(all, t.at), t.at[len(t.at)-1])
			}
		}
		if config, err = safely(func() (map[string]any, error) { return override.Merge(all, config) }); err != nil {
			refuse("%s cannot be merged: %s", i.files[0], l.redact(err.Error()))
			return nil, l.failure()
		}
	}
	return config, nil
}

// An inclusion is one element of include.
type inclusion struct {
	files []string // below the workspace, merged
	dir   string   // of their paths
	env   map[string]string
}

// inclusion parses an element of include of a file whose paths are relative to the directory of.
func (l *load) inclusion(one any, of string) (i inclusion, err error) {
	m, ok := one.(map[string]any)
	if !ok {
		m = map[string]any{"path": one}
	}
	for key := range m {
		if key != "path" && key != "project_directory" && key != "env_file" {
			return i, fmt.Errorf("%s is not supported", key)
		}
	}
	var said types.IncludeConfig
	if err := loader.Transform(m, &said); err != nil {
		return i, errors.New("an element must be the path of a file, or a mapping with path, project_directory and env_file")
	}
	if len(said.Path) == 0 {
		return i, errors.New("no path is named")
	}
	for _, file := range said.Path {
		name, err := l.beside(of, file)
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
	if i.dir = path.Dir(i.files[0]); said.ProjectDirectory != "" {
		if i.dir, err = l.beside(of, said.ProjectDirectory); err != nil {
			return i, fmt.Errorf("the project_directory %q cannot be used: %s", said.ProjectDirectory, reason(err))
		}
	}
	if len(said.EnvFile) == 0 {
		i.env, err = l.dotenv(l.env, i.dir)
		return i, err
	}
	i.env = l.env
	for _, file := range said.EnvFile {
		if file == "/dev/null" {
			continue
		}
		name, err := l.beside(of, file)
		if err == nil {
			i.env, err = l.variables(i.env, name)
		}
		if err != nil {
			return i, fmt.Errorf("the env_file %q cannot be read: %s", file, reason(err))
		}
	}
	return i, nil
}

// included reads an included project, with its own variables in place, for a file whose paths
// are relative to the directory of.
func (l *load) included(ctx context.Context, i inclusion, of string) (map[string]any, error) {
	env, within := l.env, l.within
	defer func() { l.env, l.within = env, within }()
	l.env, l.within = i.env, slices.Concat(within, i.files)
	files, err := l.configs(ctx, i.files, i.dir)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(files, func(f types.ConfigFile) bool { return len(f.Config)+len(f.Content) > 0 }) {
		return nil, nil // which compose takes for a mistake, where it is not included
	}
	model, err := l.model(ctx, files, i.dir, of)
	if err != nil {
		return nil, l.said(ctx, i.files[0], err)
	}
	return model, nil
}

// model returns the model that compose makes of files with paths of the directory dir, in a form
// for a file with paths of another directory: no variable is left in it.
func (l *load) model(ctx context.Context, files []types.ConfigFile, dir, of string, more ...func(*loader.Options)) (map[string]any, error) {
	if l.env["PWD"] == "." { // the first file's directory: see choose
		l.env["PWD"] = from(dir, l.base)
		defer func() { l.env["PWD"] = "." }()
	}
	model, err := safely(func() (map[string]any, error) {
		return loader.LoadModelWithContext(ctx, types.ConfigDetails{ConfigFiles: files, Environment: l.env}, append(more, l.options)...)
	})
	if err != nil {
		return nil, err
	}
	if services, _ := model["services"].(map[string]any); services != nil {
		maps.DeleteFunc(services, func(name string, _ any) bool { return strings.HasPrefix(name, importedPrefix) })
	}
	if rel := from(of, dir); rel != "." {
		rebase(model, rel)
	}
	return literal(model).(map[string]any), nil
}

// from is the path from one directory of the workspace to another one.
func from(one, other string) string {
	rel, _ := filepath.Rel(one, other) // which fails only for what is outside
	return filepath.ToSlash(rel)
}

// safely turns a panic of compose, which a file may have caused, into an error.
func safely[T any](read func() (T, error)) (v T, err error) {
	defer func() {
		if recover() != nil {
			err = errors.New("compose cannot read it")
		}
	}()
	return read()
}

// literal escapes every $ of a model, so that no variable is replaced a second time.
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

// beside is below for the path of another compose file, in one with paths of the directory dir.
func (l *load) beside(dir, file string) (string, error) {
	if strings.Contains(file, "$") {
		return "", fmt.Errorf("it must not contain variables")
	}
	return below(dir, file)
}

// rebase moves the paths of a model from the directory rel to the one that rel is in. The
// function of compose-go for that reads $HOME and follows links, so it is not used.
func rebase(model map[string]any, rel string) {
	move := func(in any, key string) {
		m, _ := in.(map[string]any)
		if p, ok := m[key].(string); ok && p != "" && !path.IsAbs(p) && !strings.HasPrefix(p, "~") && !strings.Contains(p, "://") {
			m[key] = "./" + path.Join(rel, p)
		}
	}
	each := func(in any, f func(any)) {
		switch in := in.(type) {
		case map[string]any:
			for _, v := range in {
				f(v)
			}
		case []any:
			for _, v := range in {
				f(v)
			}
		}
	}
	each(model["configs"], func(o any) { move(o, "file") })
	each(model["secrets"], func(o any) { move(o, "file") })
	each(model["services"], func(s any) {
		service, _ := s.(map[string]any)
		move(service["build"], "context")
		each(service["env_file"], func(f any) { move(f, "path") })
		each(service["volumes"], func(v any) {
			if v, _ := v.(map[string]any); v["type"] == types.VolumeTypeBind {
				move(v, "source")
			}
		})
	})
}
