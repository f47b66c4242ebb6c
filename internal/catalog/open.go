package catalog

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
)

// checkConfig decodes a config block into a copy of the adapter's defaults, so that
// its faults show without opening anything. References to secrets are only checked
// for their form.
func checkConfig(d *decoder, a sandboxer.Adapter, config yaml.Node) {
	if a.Config == nil {
		if len(config.Content) > 0 {
			d.faultKey("config", "", "adapter %q takes no configuration", a.Kind)
		}
		return
	}
	v := reflect.New(reflect.TypeOf(a.Config).Elem())
	v.Elem().Set(reflect.ValueOf(a.Config).Elem())
	before := len(d.src.faults)
	d.config(v.Elem(), config)
	if len(d.src.faults) == before {
		d.validate(v.Interface())
	}
}

// config decodes a block, or its absence, over v.
func (d *decoder) config(v reflect.Value, config yaml.Node) {
	key := d.places["config"].key
	if config.Kind == 0 || config.Tag == "!!null" {
		// Required fields are missed in an empty block as well.
		config = yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
		if key == nil {
			key = d.places["handler"].key
		}
		config.Line, config.Column = 1, 1
		if key != nil {
			config.Line, config.Column = key.Line, key.Column
		}
	}
	d.value(v, &config, key, "config", rule{}, 1)
}

// validate asks the configuration itself. An error that begins with the name of a
// field is reported at that field.
func (d *decoder) validate(cfg any) {
	c, ok := cfg.(interface{ Validate() error })
	if !ok {
		return
	}
	err := c.Validate()
	if err == nil {
		return
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			d.wrong(err)
		}
		return
	}
	d.wrong(err)
}

// wrong records what is wrong with the configuration, at the place whose name the message begins with.
func (d *decoder) wrong(err error) {
	at, msg := "config", errorText(err)
	if name, rest, ok := strings.Cut(msg, ": "); ok {
		for _, name := range []string{"config." + name, name} {
			if _, known := d.places[name]; known {
				at, msg = name, rest
				break
			}
		}
	}
	if d.places[at] == (place{}) {
		d.places[at] = d.places["handler"]
	}
	if hint := sandboxer.HintOf(err); hint != "" {
		msg += " (" + hint + ")"
	}
	d.fault(at, "", "%s", msg)
}

var secretPattern = lazyRegexp(`^\$\{(?:env:[A-Za-z_][A-Za-z0-9_]*|file:/[^}]+|secret:` + secretNamePattern + `)\}$`)

// A secrets returns the operator's secret of that name from the database; nil where there is no database.
type secrets func(name string) (sandboxer.Secret, error)

func cutSecret(ref string) (kind, name string) {
	kind, name, _ = strings.Cut(strings.TrimSuffix(strings.TrimPrefix(ref, "${"), "}"), ":")
	return kind, name
}

// resolve reads the secret that ref stands for. Kinds: Unavailable when it does not exist.
func (stored secrets) resolve(ref string) (sandboxer.Secret, error) {
	kind, name := cutSecret(ref)
	switch {
	case kind == "secret" && stored == nil:
		return "", sandboxer.E(sandboxer.Unavailable, nil, "secret %s is kept by a server, and none runs here", name)
	case kind == "secret":
		return stored(name)
	case kind == "env":
		if s := os.Getenv(name); s != "" {
			return sandboxer.Secret(s), nil
		}
		return "", sandboxer.E(sandboxer.Unavailable, nil, "the environment variable %s is not set", name)
	}
	st, err := os.Stat(name)
	if err == nil && !st.Mode().IsRegular() {
		return "", sandboxer.E(sandboxer.Unavailable, nil, "%s is not a regular file", name)
	}
	var data []byte
	if err == nil {
		var f *os.File
		if f, err = os.Open(name); err == nil {
			data, err = io.ReadAll(io.LimitReader(f, maxSecret+1))
			f.Close()
		}
	}
	var pe *os.PathError
	switch s := strings.TrimRight(string(data), "\r\n"); {
	case errors.As(err, &pe):
		return "", sandboxer.E(sandboxer.Unavailable, nil, "the secret in %s cannot be read: %s", name, pe.Err)
	case err != nil:
		return "", sandboxer.E(sandboxer.Unavailable, err, "the secret in %s cannot be read", name)
	case len(data) > maxSecret:
		return "", sandboxer.E(sandboxer.Unavailable, nil, "the secret in %s is longer than 64 KiB", name)
	case s == "":
		return "", sandboxer.E(sandboxer.Unavailable, nil, "the secret in %s is empty", name)
	default:
		return sandboxer.Secret(s), nil
	}
}

const maxSecret = 64 << 10

// Env is what the adapter gets to open the extension. stateDir is the directory
// under which every extension has one of its own; log may be nil.
//
// Decode fails with Faults (Invalid) for a wrong block, and with Unavailable when a
// secret that the block refers to does not exist.
func (e ExtensionFile) Env(owner, stateDir string, log *slog.Logger) sandboxer.Env {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	env := sandboxer.Env{
		Extension: e.ID, Owner: owner, Dir: filepath.Join(stateDir, e.ID), Own: []string{filepath.Dir(stateDir)},
		Hosts: filepath.Join(filepath.Dir(stateDir), "hosts"),
		Log:   log.With("extension", e.ID), Program: e.program,
	}
	e.readWith(&env, nil)
	return env
}

// readWith lets env read the configuration, with secrets from stored.
func (e ExtensionFile) readWith(env *sandboxer.Env, stored secrets) {
	env.Decode = func(v any) error { return e.decode(v, stored) }
	env.Config = func(with bool) (json.RawMessage, error) { return e.raw(with, stored) }
}

// StoredSecrets returns the names of the operator's secrets that the configuration refers to.
func (e ExtensionFile) StoredSecrets() []string {
	var names []string
	_ = replaceSecrets(e.file.again().anything(e.config), func(ref string) string {
		if kind, name := cutSecret(ref); kind == "secret" {
			names = append(names, name)
		}
		return ref
	})
	slices.Sort(names)
	return slices.Compact(names)
}

func (e ExtensionFile) decode(v any, stored secrets) error {
	p := reflect.ValueOf(v)
	if p.Kind() != reflect.Pointer || p.IsNil() {
		return sandboxer.E(sandboxer.Internal, nil, "%s: the configuration can only be read into a pointer, not %T", e.ID, v)
	}
	d := e.file.again()
	d.secret = stored.resolve
	d.config(p.Elem(), e.config)
	if fs := d.src.take(); len(fs) > 0 {
		return fs
	}
	if len(d.missing) > 0 {
		return e.missing(d.missing)
	}
	return nil
}

// missing says which secrets do not exist.
func (e ExtensionFile) missing(which []error) error {
	texts := make([]string, len(which))
	for i, m := range which {
		texts[i] = sandboxer.Message(m)
	}
	return sandboxer.E(sandboxer.Unavailable, nil, "%s", strings.Join(texts, "; ")).
		WithHint("set it where the server runs, or change %s", e.Origin.File)
}

// Opened is one extension after the attempt to open it.
type Opened struct {
	Info sandboxer.ExtensionInfo
	Ext  sandboxer.Extension // nil if Info.Problem says why
	// Secrets are the names of the operator's secrets that its file refers to.
	Secrets []string
	// Again makes another attempt, if none has worked: what was missing may
	// exist by now. Faults of the configuration are then its Info.Problem, too.
	Again func(context.Context) Opened
}

// openTimeout bounds one extension's opening; a backend that does not answer must
// not keep the others from starting.
const openTimeout = 30 * time.Second

// Open opens every extension, concurrently, and returns them in the order of the
// catalogue. The reason why an extension cannot work on this machine becomes its Info.Problem;
// it is listed and not used. An operator has to correct a wrong configuration: the
// error is then Faults, and opened extensions are closed again.
//
// Info.Capabilities are from the extension's description, or all that the adapter can have; code that
// wraps it knows better. Files that do not fit an extension's description are faults as others are.
func (c *Catalog) Open(ctx context.Context, owner, stateDir string, log *slog.Logger) ([]Opened, error) {
	opened := make([]Opened, len(c.Extensions))
	faults := make([]Faults, len(c.Extensions))
	var wg sync.WaitGroup
	for i, e := range c.Extensions {
		wg.Go(func() { opened[i], faults[i] = e.open(ctx, c, owner, stateDir, log, slog.LevelWarn) })
	}
	wg.Wait()
	describers := map[string]sandboxer.Describer{}
	for _, o := range opened {
		if d, ok := o.Ext.(sandboxer.Describer); ok {
			describers[o.Info.ID] = d
		}
	}
	all := FaultsOf(c.describeAll(func(e ExtensionFile) (said sandboxer.Description, ok bool) {
		d, ok := describers[e.ID]
		if ok {
			said = d.Describe()
		}
		return said, ok
	}))
	all = append(all, slices.Concat(faults...)...)
	if len(all) == 0 {
		return opened, nil
	}
	for _, o := range opened {
		if c, ok := o.Ext.(io.Closer); ok {
			c.Close()
		}
	}
	return nil, all.sorted()
}

func (e ExtensionFile) open(ctx context.Context, c *Catalog, owner, stateDir string, log *slog.Logger, level slog.Level) (Opened, Faults) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	o := Opened{Info: e.Info(), Secrets: e.StoredSecrets()}
	env := e.Env(owner, stateDir, log)
	env.Own = append(env.Own, c.Own...)
	if c.Secret != nil {
		env.Secret = c.Secret
		reads := context.WithoutCancel(ctx) // a program that is started again reads its configuration again
		e.readWith(&env, func(name string) (sandboxer.Secret, error) { return c.Secret(reads, sandboxer.SecretRef{Name: name}) })
	}
	env.Prices = c.Prices
	if c.Notes != nil {
		env.Notes = c.Notes(e.ID, env.Dir)
	}
	if c.Recorded != nil {
		env.Recorded = func(ctx context.Context) ([]sandboxer.Handle, error) { return c.Recorded(ctx, e.ID) }
	}
	err := os.MkdirAll(env.Dir, 0o700)
	if err != nil {
		err = sandboxer.E(sandboxer.Unavailable, err, "the state directory %s cannot be made", env.Dir)
	} else {
		o.Ext, err = e.Adapter.Open(ctx, env)
	}
	if err == nil {
		if d, ok := o.Ext.(sandboxer.Describer); ok {
			said := d.Describe()
			e.said.Store(&said)
			o.Info = e.Info()
		}
		return o, nil
	}
	o.Ext = nil
	var faults Faults
	switch {
	case errors.As(err, &faults):
		return o, faults
	case sandboxer.KindOf(err) == sandboxer.Invalid:
		d := e.file.again()
		d.validate(failed{err})
		return o, d.src.take()
	}
	o.Info.Problem = problem(err)
	o.Info.Capabilities = []sandboxer.Capability{}
	o.Again = func(ctx context.Context) Opened {
		again, faults := e.open(ctx, c, owner, stateDir, log, slog.LevelDebug) // the first failure was logged
		if _, ok := again.Ext.(sandboxer.Describer); ok {
			faults = e.holds()
		}
		if len(faults) > 0 {
			if c, ok := again.Ext.(io.Closer); ok {
				c.Close()
			}
			again = Opened{Info: again.Info, Secrets: o.Secrets, Again: o.Again}
			again.Info.Problem, again.Info.Capabilities = problem(faults), []sandboxer.Capability{}
		}
		return again
	}
	if e.Origin.Layer == BuiltIn && sandboxer.KindOf(err) == sandboxer.NotFound {
		level = min(level, slog.LevelInfo) // its backend is not here, and no user said that it was
	}
	env.Log.Log(ctx, level, "extension cannot be used here", "kind", sandboxer.KindOf(err), "err", err)
	return o, nil
}

// failed is a configuration that is known to be wrong.
type failed struct{ err error }

func (f failed) Validate() error { return f.err }

func problem(err error) string {
	s := sandboxer.Message(err)
	if h := sandboxer.HintOf(err); h != "" {
		s += " (" + h + ")"
	}
	return s
}
