package catalog

import (
	"encoding"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// Bounds on one document, against aliases that multiply and nesting that overflows.
const (
	maxValues = 20_000
	maxDepth  = 64
)

// place is the position of one value of a document.
type place struct{ key, value *yaml.Node }

// decoder fills Go values from nodes and records every fault on the way; it never
// stops at the first.
type decoder struct {
	src    *source
	places map[string]place
	visits int
	// secret returns the value of a reference to a secret; nil leaves the
	// reference itself, for checks that must work without the secrets.
	secret  func(ref string) (sandboxer.Secret, error)
	missing []error // secrets that are not there
	// resolved says that the document contains secrets themselves.
	resolved bool
}

var nodeType = reflect.TypeFor[yaml.Node]()

func newDecoder(src *source) *decoder {
	return &decoder{src: src, places: make(map[string]place)}
}

// fault records a fault at the value of path, or at its key when the value is
// missing or large.
func (d *decoder) fault(path, suggestion, format string, args ...any) {
	p := d.places[path]
	n := p.value
	if p.key != nil && (n == nil || n.Kind != yaml.ScalarNode && n.Kind != yaml.AliasNode || n.Value == "" && n.Tag == "!!null") {
		n = p.key
	}
	if n == nil {
		d.src.at(1, 1, 1, path, suggestion, format, args...)
		return
	}
	d.src.node(n, path, suggestion, format, args...)
}

// faultKey records a fault at the key of path.
func (d *decoder) faultKey(path, suggestion, format string, args ...any) {
	if k := d.places[path].key; k != nil {
		d.src.node(k, path, suggestion, format, args...)
		return
	}
	d.fault(path, suggestion, format, args...)
}

// value decodes n into v, which holds the default.
func (d *decoder) value(v reflect.Value, n, key *yaml.Node, path string, r rule, depth int) {
	d.places[path] = place{key, n}
	if d.visits++; d.visits > maxValues {
		if d.visits == maxValues+1 {
			d.fault(path, "", "the document has more than %d values, aliases expanded", maxValues)
		}
		return
	}
	if depth > maxDepth {
		d.fault(path, "", "nested too deeply")
		return
	}
	if n.Kind == yaml.AliasNode {
		n = n.Alias // its faults are reported where it is used: d.places has the alias
	}
	if n.Style&yaml.TaggedStyle != 0 && n.Tag != "!!str" && n.Tag != "!!int" && n.Tag != "!!float" && n.Tag != "!!bool" && n.Tag != "!!map" && n.Tag != "!!seq" {
		d.fault(path, "", "the tag %s is not accepted", n.Tag)
		return
	}
	t := v.Type()
	switch sc := scalarOf(t, r); {
	case sc != nil:
		d.scalar(v, sc, n, path, r)
	case t == nodeType:
		if n.Kind != yaml.MappingNode && n.Tag != "!!null" {
			d.fault(path, "", "expected a mapping of settings, got %s", got(n))
			return
		}
		v.Set(reflect.ValueOf(*n))
	case t.Kind() == reflect.Pointer:
		p := reflect.New(t.Elem())
		if !v.IsNil() {
			p.Elem().Set(v.Elem())
		}
		d.value(p.Elem(), n, key, path, r, depth)
		v.Set(p)
	case n.Tag == "!!null" && t.Kind() != reflect.Interface:
		// A key whose children are all commented out.
		if r.required || r.nonempty {
			d.fault(path, "", "expected %s, got nothing", composite(t))
		}
	case t.Kind() == reflect.Struct:
		d.structure(v, n, path, r, depth)
	case t.Kind() == reflect.Slice:
		d.list(v, n, path, r, depth)
	case t.Kind() == reflect.Map && t.Key().Kind() == reflect.String:
		d.dict(v, n, path, r, depth)
	case t.Kind() == reflect.Interface && t.NumMethod() == 0:
		d.free(v, n, path, depth)
	default:
		panic(fmt.Sprintf("catalog: a field of type %s cannot be read from YAML", t))
	}
}

func (d *decoder) scalar(v reflect.Value, sc *scalar, n *yaml.Node, path string, r rule) {
	if sc.secret {
		if n.Kind != yaml.ScalarNode || !d.resolved && !secretPattern.MatchString(n.Value) {
			d.src.hideAll(n)
			what := got(n)
			if n.Kind == yaml.ScalarNode && n.Tag != "!!null" {
				what = "the secret itself"
			}
			d.fault(path, "", "expected %s, got %s", sc.want, what)
			return
		}
		if d.secret == nil {
			v.SetString(n.Value)
			return
		}
		s, err := d.secret(n.Value)
		if err != nil {
			d.missing = append(d.missing, sandboxer.E(sandboxer.KindOf(err), nil, "%s: %s", path, sandboxer.Message(err)))
			return
		}
		v.SetString(string(s))
		return
	}
	if n.Kind != yaml.ScalarNode || !slices.Contains(sc.tags, n.Tag) {
		suggestion := ""
		if n.Kind == yaml.ScalarNode && slices.Contains(sc.tags, "!!str") && n.Tag != "!!null" {
			if _, ok := sc.parse(n.Value); ok {
				suggestion = `"` + n.Value + `"`
			}
		}
		if suggestion != "" {
			d.fault(path, "", "expected %s, got %s: put it in quotes", sc.want, got(n))
			return
		}
		d.fault(path, sc.guess(n.Value, r), "expected %s, got %s", sc.want, got(n))
		return
	}
	if strings.ContainsRune(n.Value, 0) {
		d.fault(path, "", "text may not contain a NUL character")
		return
	}
	x, ok := sc.parse(n.Value)
	switch {
	case !ok && sc.words != nil:
		d.fault(path, suggest.Nearest(n.Value, sc.words), "unknown %s %s: expected %s", sc.want, got(n), listed(sc.words, "or"))
		return
	case !ok && r.format == "secret": // a value in place of a name
		d.src.hideAll(n)
		d.fault(path, "", "expected %s: the name of a secret, never its value", sc.want)
		return
	case !ok:
		d.fault(path, sc.guess(n.Value, r), "expected %s, got %s", sc.want, got(n))
		return
	}
	if want, ok := r.bounds(sc, x); !ok {
		d.fault(path, "", "expected %s, got %s", want, got(n))
		return
	}
	if u, ok := v.Addr().Interface().(encoding.TextUnmarshaler); ok {
		if err := u.UnmarshalText([]byte(n.Value)); err != nil {
			d.fault(path, "", "%s", errorText(err))
		}
		return
	}
	if i, ok := x.(int64); ok && (v.CanInt() && v.OverflowInt(i) || v.CanUint() && (i < 0 || v.OverflowUint(uint64(i)))) {
		d.fault(path, "", "%s is out of range", n.Value)
		return
	}
	v.Set(reflect.ValueOf(x).Convert(v.Type()))
}

// guess proposes a value where the form is almost right.
func (sc *scalar) guess(text string, r rule) string {
	if f := formats[r.format]; f.prefix != "" && f.matches(f.prefix+text) {
		return f.prefix + text
	}
	if r.unit == "bytes" {
		i := strings.IndexFunc(text, func(c rune) bool { return c != '.' && (c < '0' || c > '9') })
		if i <= 0 {
			return ""
		}
		unit := strings.ToLower(strings.TrimSpace(text[i:]))
		for _, u := range []string{"KiB", "MiB", "GiB", "TiB"} {
			if l := strings.ToLower(u); unit == l || unit == l[:1] || unit == l[:2] {
				return text[:i] + u
			}
		}
		for _, u := range []string{"kB", "MB", "GB", "TB"} {
			if unit == strings.ToLower(u) {
				return text[:i] + u
			}
		}
	}
	switch strings.ToLower(text) {
	case "yes", "y", "on":
		text = "true"
	case "no", "n", "off":
		text = "false"
	}
	if sc.schema.Type == "boolean" && (text == "true" || text == "false") {
		return text
	}
	if r.format == "abspath" && text != "" && formats["abspath"].matches("/"+text) {
		return "/" + text
	}
	return ""
}

func (d *decoder) structure(v reflect.Value, n *yaml.Node, path string, r rule, depth int) {
	fields := fieldsOf(v.Type())
	if r.short != nil && n.Kind == yaml.ScalarNode {
		f := fields[0]
		if !slices.Contains(r.short, n.Value) {
			d.fault(path, suggest.Nearest(n.Value, r.short), "expected %s or a mapping, got %s", strings.Join(r.short, ", "), got(n))
			return
		}
		v.FieldByIndex(f.index).SetString(n.Value)
		return
	}
	if n.Kind != yaml.MappingNode {
		d.fault(path, "", "expected %s, got %s", composite(v.Type()), got(n))
		return
	}
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.name
	}
	var present, guessed []string
	d.pairs(n, path, func(name, path string, key, val *yaml.Node) {
		i := slices.Index(names, name)
		if i < 0 || key.Tag == "!!merge" {
			d.hideUnder(path, val)
			d.places[path] = place{key, val}
			if key.Tag == "!!merge" {
				d.faultKey(path, "", "merge keys are not accepted: write the fields out")
				return
			}
			s := elsewhere(name, v.Type())
			if near := suggest.Nearest(name, names); near != "" {
				s = near
			}
			guessed = append(guessed, s)
			if path == "mode" && v.Type() == reflect.TypeFor[extensionForm]() {
				d.faultKey(path, "", "modes no longer exist: remove this line. A script of mode call needs a new first line: %s", scriptLine)
				return
			}
			d.faultKey(path, s, "unknown field")
			return
		}
		present = append(present, name)
		d.value(v.FieldByIndex(fields[i].index), val, key, path, fields[i], depth+1)
	})
	for _, f := range fields {
		replaced := slices.ContainsFunc(f.unless, func(name string) bool { return slices.Contains(present, name) })
		if f.required && !replaced && !slices.Contains(present, f.name) && !slices.Contains(guessed, f.name) {
			d.places[join(path, f.name)] = d.places[path]
			p := d.places[path]
			at := p.value
			if p.key != nil {
				at = p.key
			} else if len(at.Content) > 0 {
				at = at.Content[0]
			}
			instead := ""
			if len(f.unless) > 0 {
				instead = ": give it, or else " + listed(f.unless, "or")
			}
			d.src.node(at, join(path, f.name), "", "required, but missing%s", instead)
		}
	}
}

// elsewhere finds a field of that name one level down: "limits.memory" for "memory".
func elsewhere(name string, t reflect.Type) string {
	for _, f := range fieldsOf(t) {
		ft := t.FieldByIndex(f.index).Type
		if ft.Kind() != reflect.Struct || ft == nodeType || scalarOf(ft, f) != nil {
			continue
		}
		for _, g := range fieldsOf(ft) {
			if g.name == name || g.name == name+"s" {
				return f.name + "." + g.name
			}
		}
	}
	return ""
}

// pairs calls f for every key of a mapping, once.
func (d *decoder) pairs(n *yaml.Node, path string, f func(name, path string, key, val *yaml.Node)) {
	seen := make(map[string]*yaml.Node)
	for i := 0; i+1 < len(n.Content) && !d.src.full(); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			d.src.node(key, path, "", "a key must be text, not %s", got(key))
			continue
		}
		if first, ok := seen[key.Value]; ok {
			d.hideUnder(path, val)
			d.src.node(key, join(path, key.Value), "", "duplicate key, first at %d:%d", first.Line, first.Column)
			continue
		}
		seen[key.Value] = key
		f(key.Value, join(path, key.Value), key, val)
	}
}

func (d *decoder) list(v reflect.Value, n *yaml.Node, path string, r rule, depth int) {
	if n.Kind != yaml.SequenceNode {
		d.fault(path, "", "expected a list, got %s", got(n))
		return
	}
	if r.nonempty && len(n.Content) == 0 {
		d.fault(path, "", "expected at least one element")
	}
	out := reflect.MakeSlice(v.Type(), 0, min(len(n.Content), maxValues))
	seen := make(map[any]bool)
	for i, c := range n.Content {
		if d.visits > maxValues || d.src.full() {
			return
		}
		e := reflect.New(v.Type().Elem()).Elem()
		p := fmt.Sprintf("%s[%d]", path, i)
		d.value(e, c, nil, p, r.element(), depth+1)
		if r.unique && !e.IsZero() { // a zero one has a fault already
			if seen[e.Interface()] {
				d.fault(p, "", "%v is listed twice", e.Interface())
			}
			seen[e.Interface()] = true
		}
		out = reflect.Append(out, e)
	}
	v.Set(out)
}

// dict decodes a map over a copy of v's content, since defaults are shared.
func (d *decoder) dict(v reflect.Value, n *yaml.Node, path string, r rule, depth int) {
	if n.Kind != yaml.MappingNode {
		d.fault(path, "", "expected a mapping, got %s", got(n))
		return
	}
	out := reflect.MakeMap(v.Type())
	for it := v.MapRange(); it.Next(); {
		out.SetMapIndex(it.Key(), it.Value())
	}
	d.pairs(n, path, func(name, path string, key, val *yaml.Node) {
		d.places[path] = place{key, val}
		f, checked := formats[r.keys]
		if key.Tag == "!!merge" {
			d.faultKey(path, "", "merge keys are not accepted: write the fields out")
			return
		}
		if checked && !f.matches(name) || strings.ContainsRune(name, 0) {
			d.faultKey(path, "", "a bad name: expected %s", f.want)
			return
		}
		e := reflect.New(v.Type().Elem()).Elem()
		k := reflect.ValueOf(name).Convert(v.Type().Key())
		if old := out.MapIndex(k); old.IsValid() {
			e.Set(old)
		}
		d.value(e, val, key, path, r.element(), depth+1)
		out.SetMapIndex(k, e)
	})
	v.Set(out)
}

// free decodes a value whose form only its reader knows.
func (d *decoder) free(v reflect.Value, n *yaml.Node, path string, depth int) {
	switch n.Kind {
	case yaml.MappingNode:
		m := reflect.New(reflect.TypeFor[map[string]any]()).Elem()
		d.dict(m, n, path, rule{}, depth)
		v.Set(m)
	case yaml.SequenceNode:
		s := reflect.New(reflect.TypeFor[[]any]()).Elem()
		d.list(s, n, path, rule{}, depth)
		v.Set(s)
	default:
		var t reflect.Type
		switch n.Tag {
		case "!!null":
			v.SetZero()
			return
		case "!!bool":
			t = reflect.TypeFor[bool]()
		case "!!int":
			t = reflect.TypeFor[int64]()
		case "!!float":
			t = reflect.TypeFor[float64]()
			if strings.Trim(n.Value, "+-0123456789_") == "" { // too large for one, and not to be rounded
				t = reflect.TypeFor[int64]()
			}
		default:
			v.Set(reflect.ValueOf(n.Value))
			return
		}
		e := reflect.New(t).Elem()
		d.scalar(e, scalarOf(t, rule{}), n, path, rule{})
		v.Set(e)
	}
}

// hideUnder keeps what an extension's config has at path out of excerpts: it may have been meant for a secret.
func (d *decoder) hideUnder(path string, n *yaml.Node) {
	if strings.HasPrefix(path, "config") {
		d.src.hideAll(n)
	}
}

var plainKey = lazyRegexp(`^[A-Za-z0-9_-]+$`)

func join(path, key string) string {
	switch {
	case !plainKey.MatchString(key):
		return fmt.Sprintf("%s[%q]", path, clip(key))
	case path == "":
		return key
	}
	return path + "." + key
}

// got names a value for "expected …, got …".
func got(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case n.Kind == yaml.AliasNode:
		return "an alias"
	case n.Tag == "!!null":
		return "nothing"
	case n.Tag == "!!str":
		return fmt.Sprintf("%q", clip(n.Value))
	}
	return clip(n.Value)
}

func clip(s string) string {
	if r := []rune(s); len(r) > 48 {
		return string(r[:47]) + "…"
	}
	return s
}

// composite names what a struct, list or map is written as.
func composite(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Slice:
		return "a list"
	case reflect.Struct:
		var names []string
		for _, f := range fieldsOf(t) {
			names = append(names, f.name)
		}
		if len(names) > 5 {
			names = append(names[:4:4], "…")
		}
		return "a mapping of " + strings.Join(names, ", ")
	}
	return "a mapping"
}

func errorText(err error) string {
	if m := sandboxer.Message(err); sandboxer.KindOf(err) != sandboxer.Internal {
		return m
	}
	return err.Error()
}
