// Package catalog reads what an installation has: extensions (configured
// backends) and profiles (named kinds of sandbox), from YAML files in layers.
//
// It is strict. Every fault in every file is found in one pass and reported with
// file, line, column, the offending line and, where something similar exists, what
// was probably meant; nothing unknown is ignored and nothing ambiguous is guessed.
// The promises of files are checked against what the adapters declare, so that a
// profile that loads is a profile that can be requested.
//
// The JSON Schemas (Schema), the registry's documents (Registry) and the starter
// profile (Init) are made from the same types that the files are read into.
package catalog

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/prices"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// BuiltIn is the name of the layer of files that came with the program.
const BuiltIn = "built-in"

// A Layer is one place with catalogue files. Later layers win: a file whose ID an
// earlier layer also has replaces that one as a whole.
type Layer struct {
	Name string // "built-in", "system", "user", …: shown as the origin
	// FS holds extensions/*.yaml and profiles/*.yaml (or .yml), quotas.yaml, prices.yaml and sinks.yaml. Nil holds
	// nothing.
	FS   fs.FS
	Root string // shown before the names of files of FS
	// Files are single files in addition to FS, by their path on this machine. A file is an
	// extension if its name begins with "ext.", its directory is called "extensions", or
	// it has a handler or the ID of an extension; otherwise a profile.
	Files []string
}

// Dir is the layer of a directory with the subdirectories extensions and profiles.
// A directory that does not exist is an empty layer.
func Dir(name, dir string) Layer { return Layer{Name: name, FS: os.DirFS(dir), Root: dir} }

// Origin says which file declares something.
type Origin struct {
	Layer string `json:"layer"`
	File  string `json:"file"`
}

// ExtensionFile is one declared extension with the adapter that opens it.
type ExtensionFile struct {
	ID        string
	Title     string
	Handler   string // as written
	Isolation []sandboxer.Isolation
	Pricing   sandboxer.PricingModel
	Max       int // sandboxer.Room.ExtensionMax
	Adapter   sandboxer.Adapter
	Origin    Origin
	Replaces  []Origin // what earlier layers said under this ID, nearest first

	file    *file
	config  yaml.Node
	program sandboxer.Program
	// said is the extension's own description, nil if it has none or it is not known yet. All copies share it: an
	// extension that cannot be opened with the others is asked later.
	said *atomic.Pointer[sandboxer.Description]
}

// Info describes the extension before it is opened: by its own description, or else with all capabilities
// that its adapter can have.
func (e ExtensionFile) Info() sandboxer.ExtensionInfo {
	said := sandboxer.Description{Title: e.Adapter.Title, Capabilities: e.Adapter.Capabilities, Inputs: e.Adapter.Inputs, Runtime: e.Adapter.Runtime}
	if d := e.said.Load(); d != nil {
		said = *d
		said.Title = cmp.Or(said.Title, e.Adapter.Title)
		said.Capabilities = slices.DeleteFunc(slices.Clone(said.Capabilities), func(c sandboxer.Capability) bool { return !slices.Contains(sandboxer.Capabilities(), c) })
	}
	return sandboxer.ExtensionInfo{
		ID: e.ID, Title: cmp.Or(e.Title, said.Title), Adapter: e.Adapter.Kind, Handler: e.Handler,
		Isolation: e.Isolation, Pricing: e.Pricing, Max: e.Max, Runtime: said.Runtime,
		Capabilities: append([]sandboxer.Capability{}, said.Capabilities...),
		Inputs:       append([]sandboxer.Input{}, said.Inputs...),
	}
}

// Same reports whether o says the same as e.
func (e ExtensionFile) Same(o ExtensionFile) bool {
	return e.ID == o.ID && e.Origin == o.Origin && slices.Equal(e.file.src.lines, o.file.src.lines)
}

// ProfileFile is one declared profile.
type ProfileFile struct {
	sandboxer.Profile
	Origin   Origin   `json:"origin"`
	Replaces []Origin `json:"replaces,omitempty"` // what earlier layers said under this ID, nearest first

	file *file
}

// Catalog is everything that was declared, in the order of IDs.
type Catalog struct {
	Extensions []ExtensionFile
	Profiles   []ProfileFile
	Quotas     sandboxer.Quotas     // of the last layer that has any
	Prices     []sandboxer.PriceRow // the price book, of the last layer that has one
	Sinks      []sandboxer.Sink     // of usage rows, of the last layer that has any

	// Own are directories of the broker's own in addition to those of extensions, as sandboxer.Env.Own.
	Own []string

	// Notes returns the notes for an extension with that private directory, as sandboxer.Env.Notes.
	Notes func(extension, dir string) sandboxer.Notes

	// Secret is what extensions get as sandboxer.Env.Secret, and the source of ${secret:NAME} in their files; nil
	// where no secrets are kept. The code that opens them sets it.
	Secret func(ctx context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error)

	// Recorded is what extensions get as sandboxer.Env.Recorded, for the one named; nil where
	// there are no records. The code that opens them sets it.
	Recorded func(ctx context.Context, extension string) ([]sandboxer.Handle, error)
}

// StalePrices names the old rows of the price book by which extensions quote: those of a provider whose name is
// that of an extension's adapter. A built-in file of a provider has no account, and quotes for nobody.
func (c *Catalog) StalePrices(now time.Time) []string {
	used := map[string]bool{}
	for _, e := range c.Extensions {
		if e.Origin.Layer != BuiltIn {
			used[e.Adapter.Kind] = true
		}
	}
	return prices.Stale(slices.DeleteFunc(slices.Clone(c.Prices), func(r sandboxer.PriceRow) bool { return !used[r.Provider] }), now)
}

// Profile returns the profile of that name, with or without the prefix "profile.".
// Kinds: NotFound, naming the nearest one.
func (c *Catalog) Profile(name string) (ProfileFile, error) {
	return find(c.Profiles, "profile", ProfileID(name), func(p ProfileFile) string { return p.ID })
}

// Extension returns the extension of that name, with or without the prefix "ext.".
// Kinds: NotFound, naming the nearest one.
func (c *Catalog) Extension(name string) (ExtensionFile, error) {
	return find(c.Extensions, "extension", ExtensionID(name), func(e ExtensionFile) string { return e.ID })
}

func find[T any](all []T, what, id string, of func(T) string) (T, error) {
	var ids []string
	for _, x := range all {
		if of(x) == id {
			return x, nil
		}
		ids = append(ids, of(x))
	}
	var none T
	err := sandboxer.E(sandboxer.NotFound, nil, "there is no %s %q", what, clip(id))
	if near := suggest.Nearest(id, ids); near != "" {
		return none, err.WithHint("did you mean %q? see all with: sandboxer %s ls", near, what)
	}
	return none, err.WithHint("see all with: sandboxer %s ls", what)
}

// file is one file that is being checked.
type file struct {
	origin Origin
	dir    string // of this machine, in which it is; "" if it is in none
	src    *source
	dec    *decoder
}

// again returns a decoder of its own over the same text, which knows the places of the first: extensions are
// opened concurrently.
func (f *file) again() *decoder {
	return &decoder{src: &source{name: f.src.name, lines: f.src.lines}, places: maps.Clone(f.dec.places)}
}

// loader collects the files of all layers.
type loader struct {
	adapters []sandboxer.Adapter
	faults   Faults
	exts     map[string]ExtensionFile
	profiles map[string]ProfileFile
	quotas   sandboxer.Quotas
	prices   []sandboxer.PriceRow
	sinks    []sandboxer.Sink
	broken   map[string]bool // IDs whose file is faulty: no reference to them is a second fault
}

// Load reads every file of every layer and checks it against the adapters. When
// anything is wrong it returns Faults (Kind Invalid) together with the catalogue of
// the valid files.
func Load(layers []Layer, adapters []sandboxer.Adapter) (*Catalog, error) {
	l := &loader{adapters: adapters, exts: make(map[string]ExtensionFile), profiles: make(map[string]ProfileFile),
		broken: make(map[string]bool)}
	for _, layer := range layers {
		l.layer(layer)
	}
	c := &Catalog{Quotas: l.quotas, Prices: l.prices, Sinks: l.sinks}
	for _, e := range l.exts {
		c.Extensions = append(c.Extensions, e)
	}
	for _, p := range l.profiles {
		if l.binds(p) {
			c.Profiles = append(c.Profiles, p)
		}
	}
	slices.SortFunc(c.Extensions, func(a, b ExtensionFile) int { return cmp.Compare(a.ID, b.ID) })
	slices.SortFunc(c.Profiles, func(a, b ProfileFile) int { return cmp.Compare(a.ID, b.ID) })
	if len(l.faults) > 0 {
		return c, l.faults.sorted()
	}
	return c, nil
}

func (l *loader) layer(layer Layer) {
	seen := make(map[string]Origin)
	if layer.FS != nil {
		whole := true
		for _, dir := range []string{"extensions", "profiles"} {
			entries, err := fs.ReadDir(layer.FS, dir)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				l.unreadable(filepath.Join(layer.Root, dir), err)
				whole = false
			}
			for _, e := range entries {
				name := e.Name()
				if ext := path.Ext(name); ext != ".yaml" && ext != ".yml" || strings.HasPrefix(name, ".") || e.IsDir() {
					continue
				}
				shown := path.Join(dir, name)
				if layer.Root != "" {
					shown = filepath.Join(layer.Root, dir, name)
				}
				where := ""
				if layer.Root != "" {
					where = filepath.Dir(shown)
				}
				l.read(layer.FS, path.Join(dir, name), where, Origin{layer.Name, shown}, l.kind(dir == "extensions", seen))
			}
		}
		for _, single := range []struct {
			name string
			take func(*file, *yaml.Node)
		}{{quotasFile, l.readQuotas}, {pricesFile, l.readPrices}, {sinksFile, l.readSinks}} {
			// A dangling link is a fault, and not the absence of bounds.
			if _, err := fs.Lstat(layer.FS, single.name); whole && !errors.Is(err, fs.ErrNotExist) {
				shown := single.name
				if layer.Root != "" {
					shown = filepath.Join(layer.Root, single.name)
				}
				l.read(layer.FS, single.name, "", Origin{layer.Name, shown}, single.take)
			}
		}
	}
	for _, f := range layer.Files {
		isExt := strings.HasPrefix(filepath.Base(f), extPrefix) || filepath.Base(filepath.Dir(f)) == "extensions"
		l.read(os.DirFS(filepath.Dir(f)), filepath.Base(f), filepath.Dir(f), Origin{layer.Name, f}, func(f *file, n *yaml.Node) {
			l.kind(isExt || declaresExtension(n), seen)(f, n)
		})
	}
}

// declaresExtension reports whether a file of any name can only be meant as an extension's.
func declaresExtension(n *yaml.Node) bool {
	for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
		if key, value := n.Content[i].Value, n.Content[i+1].Value; key == "handler" || key == "id" && strings.HasPrefix(value, extPrefix) {
			return true
		}
	}
	return false
}

// kind is the reader for a file that declares an extension, or a profile.
func (l *loader) kind(isExt bool, seen map[string]Origin) func(*file, *yaml.Node) {
	if isExt {
		return func(f *file, n *yaml.Node) { l.extension(f, n, seen) }
	}
	return func(f *file, n *yaml.Node) { l.profile(f, n, seen) }
}

// quotasFile has the quotas of tenants, pricesFile the price book, sinksFile the receivers of usage rows.
const (
	quotasFile = "quotas.yaml"
	pricesFile = "prices.yaml"
	sinksFile  = "sinks.yaml"
)

func (l *loader) readQuotas(f *file, n *yaml.Node) {
	var form quotasForm
	f.dec.value(reflect.ValueOf(&form).Elem(), n, nil, "", rule{required: true}, 0)
	l.quotas = form.quotas()
}

func (l *loader) readPrices(f *file, n *yaml.Node) {
	var form pricesForm
	f.dec.value(reflect.ValueOf(&form).Elem(), n, nil, "", rule{required: true}, 0)
	l.prices = form.rows(f.dec)
}

func (l *loader) readSinks(f *file, n *yaml.Node) {
	var form sinksForm
	f.dec.value(reflect.ValueOf(&form).Elem(), n, nil, "", rule{required: true}, 0)
	l.sinks = form.sinks(f.dec)
}

func (l *loader) unreadable(name string, err error) {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	l.faults = append(l.faults, Fault{File: name, Message: "cannot be read: " + err.Error()})
}

// read reads one file, which is in the directory dir of this machine if that is not empty.
func (l *loader) read(fsys fs.FS, name, dir string, o Origin, take func(*file, *yaml.Node)) {
	// A pipe would block for ever, a device never end.
	if st, err := fs.Stat(fsys, name); err != nil {
		l.unreadable(o.File, err)
		return
	} else if !st.Mode().IsRegular() {
		l.unreadable(o.File, errors.New("not a regular file"))
		return
	} else if st.Mode().Perm()&0o002 != 0 { // every user could decide what runs here
		l.unreadable(o.File, errors.New("everybody can write it; chmod o-w"))
		return
	}
	r, err := fsys.Open(name)
	if err != nil {
		l.unreadable(o.File, err)
		return
	}
	defer r.Close()
	data, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		l.unreadable(o.File, err)
		return
	}
	src := newSource(o.File, data)
	f := &file{origin: o, src: src, dec: newDecoder(src)}
	if dir != "" {
		if abs, err := filepath.Abs(dir); err == nil {
			f.dir = abs
		}
	}
	if n := src.parse(data); n != nil {
		take(f, n)
	}
	l.faults = append(l.faults, src.take()...)
}

// claim makes id the one of f in its layer. It reports whether f is the first.
func (f *file) claim(id string, seen map[string]Origin) bool {
	if first, ok := seen[id]; ok {
		f.dec.fault("id", "", "%s is already declared by %s", id, first.File)
		return false
	}
	seen[id] = f.origin
	return true
}

func (l *loader) extension(f *file, n *yaml.Node, seen map[string]Origin) {
	var form extensionForm
	d := f.dec
	d.value(reflect.ValueOf(&form).Elem(), n, nil, "", rule{required: true}, 0)
	if form.ID != "" && !f.claim(form.ID, seen) {
		return
	}
	if form.Handler == "" && (d.places["command"].key != nil || d.places["connect"].key != nil) {
		form.Handler = processKind
		d.places["handler"] = cmp.Or(d.places["command"], d.places["connect"])
	}
	a, ok := l.adapter(f, form.Handler)
	e := ExtensionFile{ID: form.ID, Title: form.Title, Handler: form.Handler, Isolation: form.Capabilities.IsolationLevels,
		Pricing: form.Capabilities.PricingModel, Max: form.Max, Adapter: a, Origin: f.origin, file: f, config: form.Config, said: new(atomic.Pointer[sandboxer.Description])}
	if ok {
		e.offers(d, a.Isolation, a.Pricing)
		if a.Kind == processKind {
			form.Program.check(d, strings.Contains(form.Handler, ":"))
			e.program = form.Program.program(form.Handler, f.dir)
		} else {
			for _, name := range programKeys() {
				if d.places[name].key != nil {
					d.faultKey(name, "", "the adapter %q is part of this program: only an extension that is a program of its own takes this", a.Kind)
				}
			}
		}
		if a.Known != nil {
			d.anything(form.Config) // whether it is one that can be
		} else {
			checkConfig(d, a, form.Config)
		}
	}
	old, had := l.exts[form.ID]
	if len(d.src.faults) > 0 {
		delete(l.exts, form.ID) // the earlier one must not come back in its place
		l.broken[form.ID] = true
		return
	}
	if had {
		e.Replaces = append([]Origin{old.Origin}, old.Replaces...)
	}
	delete(l.broken, form.ID)
	l.exts[form.ID] = e
}

func orNone[S ~string](words []S) string {
	if len(words) == 0 {
		return "none"
	}
	return listed(words, "and")
}

// processKind is the adapter that runs extension classes out of process.
const processKind = "process"

// adapter finds the adapter for a handler: the adapter of that name, the one that claims
// the module before the colon, or the one that runs any class.
func (l *loader) adapter(f *file, handler string) (sandboxer.Adapter, bool) {
	if handler == "" { // already reported
		return sandboxer.Adapter{}, false
	}
	module, _, isClass := strings.Cut(handler, ":")
	var kinds []string
	var process *sandboxer.Adapter
	for i, a := range l.adapters {
		if a.Kind == handler || slices.Contains(a.Handlers, handler) {
			return a, true
		}
		for _, h := range a.Handlers {
			if m, _, _ := strings.Cut(h, ":"); isClass && m == module {
				return a, true
			}
		}
		if a.Kind == processKind {
			process = &l.adapters[i]
		}
		kinds = append(kinds, a.Kind)
	}
	slices.Sort(kinds)
	switch {
	case !isClass:
		f.dec.fault("handler", suggest.Nearest(handler, kinds), "unknown adapter %q: this build has %s", clip(handler), orNone(kinds))
	case process == nil:
		f.dec.fault("handler", "", "this build has no adapter for the module %q, and cannot run extension classes in a process of their own: it has %s",
			clip(module), orNone(kinds))
	default:
		return *process, true
	}
	return sandboxer.Adapter{}, false
}

func (l *loader) profile(f *file, n *yaml.Node, seen map[string]Origin) {
	var form profileForm
	d := f.dec
	d.value(reflect.ValueOf(&form).Elem(), n, nil, "", rule{required: true}, 0)
	if form.ID != "" && !f.claim(form.ID, seen) {
		return
	}
	p := ProfileFile{Profile: form.profile(d), Origin: f.origin, file: f}
	p.Builtin = f.origin.Layer == BuiltIn
	if old, ok := l.profiles[form.ID]; ok {
		p.Replaces = append([]Origin{old.Origin}, old.Replaces...)
	}
	if form.ID == "" {
		return
	}
	// It is kept even when faulty, so that its references are checked as well.
	l.profiles[form.ID] = p
	l.broken[form.ID] = len(d.src.faults) > 0
}

// binds checks a profile against its extensions, once all are known, and reports whether it is sound.
func (l *loader) binds(p ProfileFile) bool {
	d := p.file.dec
	defer func() { l.faults = append(l.faults, p.file.src.take()...) }()
	all := true
	for i, id := range p.Extensions() {
		if _, ok := l.exts[id]; ok {
			continue
		}
		all = false
		if id == "" || l.broken[id] {
			continue
		}
		path := "extension"
		if p.Route != nil {
			path = candidatePath(i) + "." + path
		}
		ids := slices.Sorted(maps.Keys(l.exts))
		d.fault(path, suggest.Nearest(id, ids), "there is no extension %q: there is %s", id, orNone(ids))
	}
	if !all {
		return false
	}
	p.binds(func(id string) (ExtensionFile, bool) { e, ok := l.exts[id]; return e, ok })
	return len(p.file.src.faults) == 0 && !l.broken[p.ID]
}
