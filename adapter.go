package sandboxer

import (
	"context"
	"encoding/json"
	"log/slog"
)

// An Adapter opens extensions of one kind. It is a value, listed in the one table
// of package adapters; what it declares here is what the catalogue checks files
// against and what the registry publishes.
type Adapter struct {
	Kind      string         // the name written as `handler:`
	Title     string         // one line
	Help      string         // a paragraph
	Handlers  []string       // other accepted handlers: the seeds' Python paths
	Isolation []Isolation    // levels this adapter can really give
	Pricing   []PricingModel // models its backends can have
	// Capabilities are those an extension of this adapter has on a fully equipped
	// machine; a configuration may have fewer (Narrower).
	Capabilities []Capability
	Inputs       []Input // keys its sandboxes accept; any other key is refused
	// Runtime is the version of what runs its sandboxes where that is part of this program, and
	// what it saves of their memory is bound to it.
	Runtime string
	Config  any // pointer to a config struct with the defaults, for schemas; nil means no config

	// Open makes a ready extension, or fails with Invalid (configuration),
	// Unavailable (this machine lacks something; the message says what to install) or
	// NotFound (there is nothing here that it could use, and the configuration names nothing).
	// If the extension implements io.Closer it is closed at exit, which must not
	// touch its sandboxes.
	Open func(ctx context.Context, env Env) (Extension, error)

	// Known, if set, says that the extensions of this adapter are Describers. It returns what is known of one without
	// opening it or asking anybody: what it said when it was last open, as long as that cannot have
	// changed. known is false if nothing is; what files say of it is then checked when it
	// is opened.
	Known func(env Env) (d Description, known bool)
}

// Env is what the broker lends an adapter when it opens an extension.
type Env struct {
	Extension string       // "ext.<name>"
	Owner     string       // this installation; stamp it on every outside object
	Dir       string       // private state directory (0700), kept between runs, unique to the extension
	Own       []string     // the broker's own directories, of which no sandbox sees anything; Dir and Hosts are in them
	Hosts     string       // directory with the records of the hosts of this installation; shared, not to be written to
	Log       *slog.Logger // for what no caller will see
	// Recorded returns the handles of the extension's sandboxes whose records say that they
	// have not ended, also those that have nothing but ID, generation and perhaps host. An
	// extension whose places are not all in its configuration knows by them where to look.
	// nil where nobody keeps records. It must not be called before Open has returned.
	Recorded func(ctx context.Context) ([]Handle, error)
	// Decode fills a config struct from the file's `config:` block, over the values
	// already there; unknown keys and wrong types fail with file, line and column.
	Decode func(v any) error

	// Program is what the file says about running an extension that is a process of its own.
	Program Program
	// Config returns the `config:` block as a JSON object, for an extension that reads it itself.
	// secrets says whether the values of secrets stand in place of the references to them, which fails
	// with Unavailable when one is not there. nil where there is no file.
	Config func(secrets bool) (json.RawMessage, error)
}

// A Program says how to run an extension that is a process of its own (adapter process), as its
// file does. Paths are absolute.
type Program struct {
	Handler     string     // module:Class; empty if Command or Connect says what it is
	Command     []string   // the process and its arguments
	Connect     string     // unix:/path or tls:host:port of a service that runs already
	TLS         ProgramTLS // for tls:
	Mode        string     // ProgramServe, or ProgramCall
	Path        []string   // where Python modules are looked for, in this order
	Python      string     // interpreter; empty means python3
	SDK         string     // directory with the Python package sandboxer; empty means the program's own
	RunAs       string     // user whose rights it has; empty means the broker's
	Env         []string   // variables of the broker's environment that it gets besides a few harmless ones
	Concurrency int        // calls of a class at once; 0 means its default
	MemoryBytes int64      // 0 means no limit
	PIDs        int64      // processes and threads; 0 means no limit
	Dir         string     // of the file
}

// The ways in which a Program is used.
const (
	ProgramServe = "serve" // one process that speaks the extension protocol
	ProgramCall  = "call"  // a process for each call
)

// ProgramTLS are the files with which a service is reached by TLS, in PEM.
type ProgramTLS struct {
	CA   string // who signs the service's certificate
	Cert string // what the broker shows
	Key  string // of Cert
	Name string // that the service's certificate is for; empty means that of Connect
}

// Typed completes an Adapter around a plain config struct: the defaults are copied,
// the file decoded over them, and checked by Validate if *C has such a method.
func Typed[C any](a Adapter, defaults C, open func(ctx context.Context, env Env, cfg C) (Extension, error)) Adapter {
	shown := defaults
	a.Config = &shown
	a.Open = func(ctx context.Context, env Env) (Extension, error) {
		cfg := defaults
		if env.Decode != nil {
			if err := env.Decode(&cfg); err != nil {
				return nil, err
			}
		}
		if v, ok := any(&cfg).(interface{ Validate() error }); ok {
			if err := v.Validate(); err != nil {
				return nil, err
			}
		}
		return open(ctx, env, cfg)
	}
	return a
}
