package composefile

import (
	"fmt"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// importedPrefix begins the names of services of other files that are only there to be
// extended. No service of a file can be called so: see serviceName.
const importedPrefix = "x-sandboxer.extended."

// open reads one more compose file, name below the workspace, with what it includes, and
// with what services of it extend. Its paths become those of the first file's directory.
func (l *load) open(name string) (map[string]any, error) {
	config, rel, err := l.raw(name, nil)
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
	if err := l.include(config, includes, rel); err != nil {
		return nil, err
	}
	return config, l.verdict()
}

// raw reads and parses one file. Its places are noted below prefix. rel is its directory,
// seen from that of the first.
func (l *load) raw(name string, prefix []string) (config map[string]any, rel string, err error) {
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
	if rel, err = filepath.Rel(l.base, path.Dir(name)); err != nil {
		return nil, "", err
	}
	if rel = filepath.ToSlash(rel); rel != "." {
		l.rebase(config, prefix, rel)
	}
	return config, rel, l.verdict()
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
		if config, _, err = l.raw(file, []string{file}); err != nil {
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

// include adds to config what its key include names.
func (l *load) include(config map[string]any, includes any, rel string) error {
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
		file := ""
		switch one := one.(type) {
		case string:
			file = one
		case map[string]any:
			for key := range one {
				if key != "path" {
					refuse("%s is not supported: an included file has its own directory, and the variables of this one", key)
				}
			}
			switch p := one["path"].(type) {
			case string:
				file = p
			case []any:
				if len(p) == 1 {
					file, _ = p[0].(string)
				} else {
					refuse("a path of several files is not supported")
				}
			}
		}
		name, err := l.beside(path.Join(rel, file))
		if file == "" || path.IsAbs(file) || strings.HasPrefix(file, "~") {
			name, err = l.beside(file)
		}
		if err != nil {
			refuse("%q cannot be included: %s", file, err)
			continue
		}
		if _, err := l.stat(name); err != nil {
			refuse("%q cannot be included: %s", file, reason(err))
			continue
		}
		if dir := path.Dir(name); dir != l.base {
			if _, err := l.root.Lstat(path.Join(dir, ".env")); err == nil {
				refuse("%q cannot be included: a .env of its own is beside it, and the file has one set of variables here", file)
				continue
			}
		}
		if slices.Contains(l.files, name) && l.included[name] == nil {
			refuse("%q cannot be included: it includes itself", file)
			continue
		}
		other := l.included[name]
		if other == nil {
			if other, err = l.open(name); err != nil {
				return err
			}
			l.included[name] = other
		}
		for kind, v := range other {
			objects, ok := v.(map[string]any)
			if !ok || strings.HasPrefix(kind, "x-") {
				continue
			}
			mine, _ := config[kind].(map[string]any)
			if mine == nil {
				mine = map[string]any{}
				config[kind] = mine
			}
			for n, o := range objects {
				if there, twice := mine[n]; twice && !reflect.DeepEqual(there, o) {
					l.refuse([]string{kind, n}, "is in %s too, which is included", name)
					continue
				}
				mine[n] = o
			}
		}
	}
	return nil
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
