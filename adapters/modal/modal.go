// Package modal makes sandboxes at Modal, by the vendor's own client for Go. It is the only package that imports that client.
//
// A sandbox is one of Modal's second generation, in gVisor. Its tags and its name say whose it is, and package hosted finds it by
// them. Our agent is copied into it and does all work there. It is reached over the standard streams of a command that Modal
// runs: no port of the sandbox is open.
package modal

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"time"

	modal "github.com/modal-labs/modal-client/go"
	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/hosted"
)

// Config is the extension's `config:` block.
type Config struct {
	Key         sandboxer.Secret     `yaml:"key" json:"key,omitempty" help:"The account's token, as ID:SECRET: ak-…:as-…."`
	Credential  sandboxer.Credential `yaml:"credential" json:"credential,omitzero" help:"The secret that is the token in its place, in the same form."`
	App         string               `yaml:"app" json:"app,omitempty" format:"line" help:"App of the account to which the sandboxes belong; it is made if it is missing."`
	Environment string               `yaml:"environment" json:"environment,omitempty" format:"line" help:"Environment of the account; empty means the account's default."`
	URL         string               `yaml:"url" json:"url,omitempty" help:"Another server that speaks Modal's protocol, as https://host, or http:// with a loopback address; empty means Modal's."`
	Image       string               `yaml:"image" json:"image,omitempty" format:"line" help:"Image of sandboxes for which neither profile nor caller names one, of a registry that Modal reaches. It needs a shell, cat, chmod, mkdir and mv."`
	MilliCPU    int64                `yaml:"milli_cpu" json:"milli_cpu,omitempty" min:"125" max:"64000" help:"Limit of sandboxes that ask for none, in thousandths of a virtual processor."`
	Memory      int64                `yaml:"memory" json:"memory,omitempty" unit:"bytes" min:"128MiB" max:"336GiB" help:"Memory limit of sandboxes that ask for none."`
	Settle      time.Duration        `yaml:"settle" json:"settle,omitempty" min:"0s" max:"5m" help:"How long after a create without an answer the listing may not show the sandbox yet."`
	Agent       string               `yaml:"agent" json:"agent,omitempty" help:"Path of sandboxer-agent for linux/amd64; empty means next to the running program."`
}

// server is where Modal's control plane is.
const server = "https://api.modal.com:443"

// Validate implements the check of sandboxer.Typed.
func (c *Config) Validate() error {
	if err := hosted.CheckURL(c.URL); c.URL != "" && err != nil {
		return sandboxer.E(sandboxer.Invalid, nil, "url: %s", sandboxer.Message(err))
	}
	if _, _, err := token(c.Key); c.Key != "" && err != nil {
		return sandboxer.E(sandboxer.Invalid, nil, "key: %s", sandboxer.Message(err))
	}
	return nil
}

// tokens are the keys: both parts of a token are of no use without each other, so that one secret holds them.
var tokens = regexp.MustCompile(`^\s*(ak-[!-9;-~]+):(as-[!-~]+)\s*$`)

// token is the place where a key becomes what a request carries. Kind: Invalid for a key that is none.
func token(key sandboxer.Secret) (id, secret string, err error) {
	parts := tokens.FindStringSubmatch(key.Reveal())
	if parts == nil {
		return "", "", sandboxer.E(sandboxer.Invalid, nil, "want the token's ID and its secret, with a colon between them: ak-…:as-…")
	}
	return parts[1], parts[2], nil
}

const inputRepo = "repo"

// Adapter is what package adapters lists.
var Adapter = sandboxer.Typed(sandboxer.Adapter{
	Kind:      "modal",
	Title:     "Sandboxes of Modal",
	Help:      "Makes sandboxes in gVisor at Modal, a hosted service. It needs a key of an account there, which pays for them.",
	Handlers:  []string{"sandboxer.extensions.modal"},
	Isolation: []sandboxer.Isolation{sandboxer.IsolationProcess, sandboxer.IsolationContainer, sandboxer.IsolationGVisor},
	Pricing:   []sandboxer.PricingModel{sandboxer.PricingMetered},
	Capabilities: []sandboxer.Capability{
		sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanDial, sandboxer.CanProbe, sandboxer.CanDiscover, sandboxer.CanList,
		sandboxer.CanSnapshot, sandboxer.CanQuote, sandboxer.CanStats, sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch,
	},
	Inputs: []sandboxer.Input{{Name: inputRepo, Help: "absolute path of a directory on the server's machine, which is copied into the workspace", Restricted: true}},
}, Config{App: "sandboxer", Image: "debian:stable-slim", MilliCPU: 1000, Memory: 1 << 30, Settle: 10 * time.Second}, open)

func open(ctx context.Context, env sandboxer.Env, cfg Config) (sandboxer.Extension, error) {
	keys, err := hosted.NeedKeys(ctx, env, cfg.Key, cfg.Credential)
	if err == nil {
		err = checkServer(cfg)
	}
	if err != nil {
		return nil, err
	}
	x := &extension{cfg: cfg, Sandboxes: hosted.Sandboxes{Env: env, Keys: keys, Settle: cfg.Settle}}
	x.accounts.connect = func(key sandboxer.Secret) (*modal.Client, error) { return connect(cfg, key) }
	x.List, x.Get, x.Delete = x.list, x.get, x.remove
	x.Capabilities.Open = x.openAgent
	if ctx, known := keys.Operator(ctx); known { // so that a listing shows a key that is none
		_, done, err := x.enter(ctx)
		if err != nil {
			return nil, err
		}
		done()
	}
	return x, nil
}

// throttleWait bounds how long the client follows a server that tells it to wait; without a bound it follows for ever.
const throttleWait = 20 * time.Second

func (c *Config) server() string { return cmp.Or(strings.TrimSuffix(c.URL, "/"), server) }

// checkServer refuses an environment variable by which the client would send keys elsewhere.
func checkServer(cfg Config) error {
	if v := os.Getenv("MODAL_SERVER_URL"); v != "" && v != cfg.server() {
		return sandboxer.E(sandboxer.Unavailable, nil, "the server's environment variable MODAL_SERVER_URL names another server than the extension's file").
			WithHint("unset the variable, or write the URL into the extension's file, as config: url")
	}
	return nil
}

// connect returns a client. It reads no file of the account that runs the server, and sends nothing yet.
func connect(cfg Config, key sandboxer.Secret) (*modal.Client, error) {
	id, secret, err := token(key)
	if err != nil {
		return nil, err
	}
	p := &modal.ClientParams{TokenID: id, TokenSecret: secret, Environment: cfg.Environment, MaxThrottleWait: new(throttleWait), Logger: slog.New(slog.DiscardHandler)}
	alloc(&p.Config)
	name := cmp.Or(os.Getenv("MODAL_PROFILE"), "sandboxer") // which is looked up in our settings, not in a file
	settings := (*p.Config)[name]
	settings.ServerURL, settings.Active = cfg.server(), true
	(*p.Config)[name] = settings
	client, err := modal.NewClientWithOptions(p)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "Modal's client cannot be made")
	}
	return client, nil
}

// alloc makes a map of a type that only its own package can name.
func alloc[M ~map[K]V, K comparable, V any](p **M) { *p = &M{} }

// refusals are the kinds of the answers by which Modal refuses a request and changes nothing. After any other failure it is not
// known whether something was done.
var refusals = map[codes.Code]sandboxer.Kind{
	codes.InvalidArgument:    sandboxer.Invalid,
	codes.NotFound:           sandboxer.NotFound,
	codes.FailedPrecondition: sandboxer.Unavailable, // another change is under way
	codes.Aborted:            sandboxer.Unavailable,
	codes.ResourceExhausted:  sandboxer.Exhausted,
	codes.Unimplemented:      sandboxer.Unsupported,
}

// codeOf is the code of an error of the client, which has types of its own for some.
func codeOf(err error) codes.Code {
	switch {
	case is[modal.NotFoundError](err):
		return codes.NotFound
	case is[modal.InvalidError](err):
		return codes.InvalidArgument
	case is[modal.AlreadyExistsError](err):
		return codes.AlreadyExists
	case is[modal.ConflictError](err):
		return codes.FailedPrecondition
	case is[modal.ResourceExhaustedError](err):
		return codes.ResourceExhausted
	}
	if s, ok := status.FromError(err); ok {
		return s.Code()
	}
	return codes.Unknown
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

const (
	maxText  = 500       // of what Modal says in an error, in bytes
	maxAfter = time.Hour // of what it says when to try again
)

// failure gives an error of the client its kind.
func failure(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	code := codeOf(err)
	if code == codes.Unauthenticated || code == codes.PermissionDenied {
		return hosted.Refused(ctx, err.Error())
	}
	kind, refused := refusals[code]
	if !refused {
		e := sandboxer.E(sandboxer.Unavailable, err, "Modal does not answer: %s", capture.Text(err.Error(), maxText))
		return e.WithHint("check that the server reaches Modal, and try again later")
	}
	e := sandboxer.E(kind, err, "Modal refuses the request (%s): %s", code, capture.Text(err.Error(), maxText))
	if kind == sandboxer.Unavailable || kind == sandboxer.Exhausted {
		e.WithHint("try again later").RetryAfter = retryAfter(err)
	}
	return sandboxer.Untouched(e)
}

// retryAfter is when to try again, in Modal's words.
func retryAfter(err error) time.Duration {
	s, _ := status.FromError(err)
	for _, d := range s.Details() {
		if p, ok := d.(*pb.RPCRetryPolicy); ok {
			return time.Duration(min(max(float64(p.GetRetryAfterSecs()), 0), maxAfter.Seconds()) * float64(time.Second))
		}
	}
	return 0
}
