package sandboxer

import (
	"context"
	"encoding/json"
	"log/slog"
)

// An Adapter opens extensions of one kind. It is a value in the table of package adapters. The
// catalogue checks files against what it declares, and the registry publishes it.
type Adapter struct {
	Kind      string         // the name written as `handler:`
	Title     string         // one line
	Help      string         // one paragraph
	Handlers  []string       // other accepted handlers: the Python paths of older extension files
	Isolation []Isolation    // levels that this adapter really gives
	Pricing   []PricingModel // models its backends can have
	// Capabilities are what an extension of this adapter can do on a fully equipped machine. A
	// configuration may have fewer (Narrower).
	Capabilities []Capability
	Inputs       []Input // keys that its sandboxes accept; any other key is refused
	// Runtime is the version of the sandbox runtime if that is part of this program. Saved memory can
	// only be restored by the same version. Empty: not bound to a version.
	Runtime string
	Config  any // pointer to a config struct with the defaults, for schemas; nil means no config

	// Open returns a ready extension. Kinds: Invalid for a wrong configuration; Unavailable if this
	// machine lacks something, with the thing to install in the message; NotFound if the configuration
	// names no backend and this machine has none. If the extension implements io.Closer, it is closed
	// when the program exits. Close must not touch sandboxes.
	Open func(ctx context.Context, env Env) (Extension, error)

	// Known, if set, marks the extensions of this adapter as Describers. It returns the last
	// description of an extension without opening it or asking a backend, as long as that description
	// cannot have changed. known is false if there is none: the extension's file is then checked when
	// the extension is opened.
	Known func(env Env) (d Description, known bool)
}

// Env is what the broker gives an adapter when it opens an extension.
type Env struct {
	Extension string       // "ext.<name>"
	Owner     string       // ID of this installation; put it on every outside object
	Dir       string       // private state directory (0700), kept between runs, unique to the extension
	Own       []string     // the broker's own directories, Dir and Hosts included; no sandbox may see any of them
	Hosts     string       // directory with the host records of this installation; shared and read-only
	Log       *slog.Logger // for messages to the operator
	// Recorded returns the handles of the extension's sandboxes that have not ended by their records. A
	// handle may have only an ID, a generation and perhaps a host. An extension that uses hosts which
	// its configuration does not list finds them this way. It is nil if no records are kept. It must
	// not be called before Open has returned.
	Recorded func(ctx context.Context) ([]Handle, error)
	// Prices are the rows of the price book, for an adapter of this program that quotes by them.
	Prices []PriceRow
	// Notes keep the extension's private records, and locks for them. An extension in another process (package
	// extension) has them too: the hello carries the key that seals them, and the process keeps them in Dir itself. They
	// are nil if the server there is older than they are.
	Notes Notes
	// Secret returns the value of a secret that is kept sealed in the database, with the version in ref, or the newest. In
	// a `config:` block ${secret:NAME} stands for one of the operator's. It is nil if no secrets are kept, and in an
	// extension in another process. Kinds: NotFound, Failed if it cannot be opened any more, Unavailable.
	Secret func(ctx context.Context, ref SecretRef) (Secret, error)
	// Decode fills a config struct from the file's `config:` block and keeps the values of fields that
	// the block leaves out. Unknown keys and wrong types fail with file, line and column.
	Decode func(v any) error

	// Program holds the file's settings for an extension that runs as a separate process.
	Program Program
	// Config returns the `config:` block as a JSON object, for an extension that reads the block
	// itself. With secrets set, references to secrets are replaced by their values; Kind Unavailable if
	// a secret is missing. Config is nil if the extension has no file.
	Config func(secrets bool) (json.RawMessage, error)
}

// A Program says how to run an extension as a separate process (adapter process), as written in the
// extension's file. Paths are absolute.
type Program struct {
	Handler     string     // module:Class; empty if Command or Connect is set
	Command     []string   // the executable and its arguments
	Connect     string     // unix:/path or tls:host:port of a running service
	TLS         ProgramTLS // for a Connect with tls:
	Path        []string   // search path for Python modules, in this order
	Python      string     // interpreter; empty means python3
	SDK         string     // directory with the Python package sandboxer; empty means the one in this program
	RunAs       string     // user to run as; empty means the broker's user
	Env         []string   // names of the broker's environment variables that are passed on, added to a few harmless ones
	Concurrency int        // concurrent calls of a class; 0 means its default
	MemoryBytes int64      // 0 means no limit
	PIDs        int64      // processes and threads; 0 means no limit
	Dir         string     // directory of the file
}

// ProgramTLS names the PEM files for a TLS connection to a service.
type ProgramTLS struct {
	CA   string // authority that signs the service's certificate
	Cert string // client certificate of the broker
	Key  string // private key of Cert
	Name string // name in the service's certificate; empty means the host of Connect
}

// Typed completes an Adapter for a plain config struct. For each extension it copies the defaults,
// decodes the file into the copy, and calls its Validate method if *C has one.
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
