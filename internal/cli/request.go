package cli

import (
	"cmp"
	"context"
	"errors"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// requestOptions are the flags of a request for a sandbox.
type requestOptions struct {
	profile, image, offer   string // offer is the positional [PROFILE|IMAGE]
	inputs, labels          []string
	env                     envFlags
	secrets                 []string
	name, ttl, host         string
	idle, onIdle, onTTL     string
	cpus, memory, disk, net string
	pids                    int64
	maxCost, key            string
	thread                  string
	user                    string
	consumer, consumerKind  string
	consumerMeta, mounts    []string
	command                 []string
	noMain                  bool // run: command is executed, it is not the main process

	req       api.CreateSandbox // what the flags ask for (build)
	elsewhere error             // why a server of another machine cannot be asked that; nil if it can
}

func (o *requestOptions) register(f *factory, c *cobra.Command) {
	fl := c.Flags()
	o.registerCommon(c)
	fl.StringVar(&o.profile, "profile", "", "`PROFILE` to create from (SANDBOXER_PROFILE)")
	fl.StringVar(&o.image, "image", "", "`IMAGE` in the notation of the backend")
	fl.StringArrayVar(&o.inputs, "input", nil, "the profile's argument `KEY=VALUE`; a local directory is made absolute")
	fl.StringArrayVar(&o.secrets, "secret", nil, "environment variable that has the value of a secret, `VARIABLE=NAME`")
	fl.StringVar(&o.cpus, "cpus", "", "`NUMBER` of processors: 2, 0.5")
	fl.StringVar(&o.memory, "memory", "", "memory, a `SIZE`: 512MiB, 2GiB")
	fl.StringVar(&o.disk, "disk", "", "disk space, a `SIZE`: 4GiB")
	fl.Int64Var(&o.pids, "pids", 0, "`NUMBER` of processes and threads")
	fl.StringVar(&o.net, "net", "", "network `POLICY`: none, public or allow:host,…")
	fl.StringArrayVar(&o.mounts, "mount", nil, "make a path of the server's machine visible inside: `SRC:DST[:ro]`, or type=bind,source=SRC,target=DST[,readonly]; SRC is made absolute. In gVisor, file locks do not work across it: let one side write, and keep no database in it")
	fl.StringVar(&o.thread, "thread", "", "make the sandbox of this thread, which always has the same ID: `[USER/]ID`")
	complete(c, "net", "none", "public", "allow:")
	_ = c.RegisterFlagCompletionFunc("profile", f.completeProfiles)
}

// registerCommon registers the flags that create and restore share.
func (o *requestOptions) registerCommon(c *cobra.Command) {
	fl := c.Flags()
	o.env.bind(fl)
	fl.StringArrayVar(&o.labels, "label", nil, "label `KEY=VALUE`")
	fl.StringVar(&o.name, "name", "", "`NAME`, unique among your live sandboxes")
	fl.StringVar(&o.host, "host", "", "`HOST` of the extension to run on")
	fl.StringVar(&o.maxCost, "max-cost", "", "refuse if it would cost more than `CREDITS` (SANDBOXER_MAX_COST)")
	fl.StringVar(&o.consumer, "consumer", "", "`NAME` of the consumer: a person, an agent, a service")
	fl.StringVar(&o.consumerKind, "consumer-kind", "", "`KIND` of the consumer: agent, ci, user")
	fl.StringArrayVar(&o.consumerMeta, "consumer-meta", nil, "more about the consumer: `KEY=VALUE`")
	fl.StringVar(&o.key, "idempotency-key", "", "one `KEY` makes one sandbox, however often it is sent")
	fl.StringVar(&o.ttl, "ttl", "", "`LIFETIME`: 30m, 1h30m, 2d, or idle: as long as it is used")
	fl.StringVar(&o.idle, "idle", "", "`DURATION` without use after which --on-idle applies: 10m; at most the profile's")
	fl.StringVar(&o.onIdle, "on-idle", "", "`ACTION` after --idle: destroy or pause")
	fl.StringVar(&o.onTTL, "on-ttl", "", "`ACTION` when it expires: destroy or pause")
	complete(c, "on-idle", "destroy", "pause")
	complete(c, "on-ttl", "destroy", "pause")
}

// registerUser is the flag for the sandbox's user where -u is not the command's.
func (o *requestOptions) registerUser(c *cobra.Command) {
	c.Flags().StringVarP(&o.user, "user", "u", "", "`USER` or uid[:gid] that runs its commands and owns the workspace")
}

// split parses "[PROFILE|IMAGE] [-- CMD…]".
func (o *requestOptions) split(f *factory, cmd *cobra.Command, args []string) error {
	dash := cmd.ArgsLenAtDash()
	if dash < 0 {
		dash = len(args)
	}
	if dash > 1 {
		e := invalid("%s takes one profile or image; %q is too much", cmd.CommandPath(), args[1])
		line, first, rest := cmd.CommandPath()+switches(cmd), sshrun.Quote(args[0]), sshrun.Quote(args[1:dash]...)
		if c := f.whatLoads(); !looksLikeImage(args[0]) && c != nil {
			if _, err := c.Profile(args[0]); err != nil { // the first word of the command, or the short name of an image
				return e.WithHint("put -- before the command: %[1]s -- %[2]s %[3]s; if %[2]s is an image: %[1]s --image %[2]s -- %[3]s", line, first, rest)
			}
		}
		return e.WithHint("put -- before the command: %s %s -- %s", line, first, rest)
	}
	if dash == 1 {
		o.offer = args[0]
		if o.offer != "" && o.profile != "" && o.image != "" {
			return invalid("%q is a profile or an image, and --profile and --image are given too", o.offer)
		}
	}
	o.command = args[dash:]
	return nil
}

// switches are the flags without a value that were given to cmd, as they were typed. A value may be a secret, so
// that no hint repeats one.
func switches(cmd *cobra.Command) string {
	short, long := "", ""
	cmd.LocalFlags().VisitAll(func(fl *pflag.Flag) {
		switch {
		case !fl.Changed || fl.Value.Type() != "bool" || fl.Value.String() != "true":
		case fl.Shorthand != "":
			short += fl.Shorthand
		default:
			long += " --" + fl.Name
		}
	})
	if short != "" {
		short = " -" + short
	}
	return short + long
}

// refused is the error of the server for the request for name, with a hint for users of Docker if name is no
// profile: it may be the short name of an image.
func (o *requestOptions) refused(ctx context.Context, f *factory, s *session, name string, err error) error {
	if unread := f.unread(ctx, s, name, err); unread != err {
		return unread
	}
	if o.offer == "" || o.offer != name || sandboxer.KindOf(err) != sandboxer.Invalid {
		return err
	}
	if _, perr := s.Profile(ctx, name); !errors.Is(perr, sandboxer.NotFound) {
		return err
	}
	hint := "if it is an image: --image " + sshrun.Quote(name)
	if more := sandboxer.HintOf(err); more != "" {
		hint += "; " + more
	}
	return sandboxer.E(sandboxer.Invalid, err, "%s", sandboxer.Message(err)).WithHint("%s", hint)
}

// looksLikeImage distinguishes references and paths from the names of profiles.
func looksLikeImage(s string) bool { return strings.ContainsAny(s, "/:@") }

// build makes the request of the flags and finds faults in them, before anything
// is started for it. It is called once: so the request that was checked is sent, and a
// file named by a flag may be a pipe.
func (o *requestOptions) build(f *factory) (err error) {
	o.req, err = o.request(f)
	return err
}

// requestFor is the request for the server of s.
func (o *requestOptions) requestFor(s *session) (api.CreateSandbox, error) {
	if o.elsewhere != nil && s.elsewhere() {
		return api.CreateSandbox{}, o.elsewhere
	}
	return o.req, nil
}

func (o *requestOptions) request(f *factory) (api.CreateSandbox, error) {
	set, err := f.settings()
	if err != nil {
		return api.CreateSandbox{}, err
	}
	r := api.CreateSandbox{Profile: o.profile, Image: o.image, User: o.user, Name: o.name, Host: o.host, Key: o.key}
	switch {
	case o.offer == "":
	case looksLikeImage(o.offer) || o.profile != "":
		if o.image != "" {
			return r, invalid("the image is given twice: %q and --image %q", o.offer, o.image)
		}
		r.Image = o.offer
	default:
		r.Profile = o.offer
	}
	if r.Profile == "" {
		r.Profile = set.get("profile")
	}
	if r.Inputs, err = keyValues("--input", o.inputs); err != nil {
		return r, err
	}
	if o.elsewhere, err = localInputs(r.Inputs); err != nil {
		return r, err
	}
	if repo := r.Inputs["repo"]; filepath.IsAbs(repo) {
		for _, said := range repoWarnings(repo) {
			f.warn("--input repo: %s", said)
		}
	}
	if r.Labels, err = keyValues("--label", o.labels); err != nil {
		return r, err
	}
	if r.Consumer, err = o.consumedBy(); err != nil {
		return r, err
	}
	if r.Thread, err = parseThread(o.thread); err != nil {
		return r, err
	}
	var elsewhere error
	if r.Mounts, elsewhere, err = parseMounts(o.mounts); err != nil {
		return r, err
	}
	o.elsewhere = cmp.Or(o.elsewhere, elsewhere)
	if r.Env, err = o.env.read(f.env); err != nil {
		return r, err
	}
	if r.Secrets, err = keyValues("--secret", o.secrets); err != nil {
		return r, err
	}
	for variable := range r.Secrets {
		if !isEnvName(variable) {
			return r, invalid("--secret: %q is not the name of an environment variable", variable).WithHint("write VARIABLE=NAME")
		}
	}
	if !o.noMain {
		r.Command = o.command
	}
	if o.ttl != "" {
		d, err := parseTTL(o.ttl)
		if err != nil {
			return r, err
		}
		r.TTL = d
	}
	if o.idle != "" {
		if r.Idle, err = parseDuration("--idle", o.idle); err != nil {
			return r, err
		}
	}
	r.OnIdle, r.OnTTL = sandboxer.ExpiryAction(o.onIdle), sandboxer.ExpiryAction(o.onTTL)
	if r.Limits, err = o.limits(); err != nil {
		return r, err
	}
	if r.Network, err = parseNetwork(o.net); err != nil {
		return r, err
	}
	r.MaxCost, err = f.maxCost(o.maxCost)
	return r, err
}

// maxCost is what the flag --max-cost or the setting allows; 0 means anything.
func (f *factory) maxCost(flag string) (sandboxer.Credits, error) {
	set, err := f.settings()
	if err != nil {
		return 0, err
	}
	text := cmp.Or(flag, set.get("max_cost"))
	if text == "" {
		return 0, nil
	}
	c, err := sandboxer.ParseCredits(text)
	if err != nil {
		return 0, invalid("--max-cost: %s", sandboxer.Message(err))
	}
	if c <= 0 {
		return 0, invalid("--max-cost: %q is not a positive amount", text)
	}
	return c, nil
}

// consumedBy is the consumer of the sandbox.
func (o *requestOptions) consumedBy() (c sandboxer.Consumer, err error) {
	c = sandboxer.Consumer{ID: o.consumer, Kind: o.consumerKind}
	if c.Meta, err = keyValues("--consumer-meta", o.consumerMeta); err != nil {
		return c, err
	}
	flag := ""
	switch {
	case c.ID != "":
	case c.Kind != "":
		flag = "--consumer-kind"
	case c.Meta != nil:
		flag = "--consumer-meta"
	}
	if flag != "" {
		return c, invalid("%s is given without --consumer", flag).WithHint("say who it is: --consumer ID")
	}
	return c, nil
}

func (o *requestOptions) limits() (l sandboxer.Limits, err error) {
	if o.cpus != "" {
		n, err := strconv.ParseFloat(o.cpus, 64)
		milli := math.Round(n * 1000)
		if err != nil || !(milli >= 1 && milli <= 1e9) {
			return l, invalid("--cpus: %q is not a number of processors", o.cpus).WithHint("write for example 2 or 0.5")
		}
		l.MilliCPU = int64(milli)
	}
	if l.MemoryBytes, err = parseSize("--memory", o.memory); err != nil {
		return l, err
	}
	if l.DiskBytes, err = parseSize("--disk", o.disk); err != nil {
		return l, err
	}
	if o.pids < 0 {
		return l, invalid("--pids: %d is not a number of processes", o.pids)
	}
	l.PIDs = o.pids
	return l, l.Check()
}

// interrupts counts the user's interrupts. Its channel receives each one.
func interrupts() (<-chan os.Signal, func()) {
	ch := make(chan os.Signal, 4)
	signal.Notify(ch, os.Interrupt, syscall.SIGTERM)
	return ch, func() { signal.Stop(ch) }
}

// await shows the progress of a sandbox that is being created and returns it when it
// runs, or the error it failed with.
func await(ctx context.Context, s *session, p *progress, sb *api.Sandbox) (*api.Sandbox, error) {
	if sb.State == sandboxer.Running {
		return sb, nil
	}
	if p.mode != "none" && sb.State == sandboxer.Creating {
		for ev, err := range s.Follow(ctx, api.EventQuery{Sandbox: refOf(sb)}) {
			if err != nil {
				break // Wait below says what is the matter
			}
			if ev.Generation != sb.Generation {
				continue
			}
			p.step(ev)
			if ev.Type == sandboxer.EventState && ev.To != sandboxer.Creating {
				break
			}
		}
	}
	return s.Wait(ctx, refOf(sb), sandboxer.Running)
}

// refOf names sb to the server. Two tenants may have chosen the same ID.
func refOf(sb *api.Sandbox) string {
	if len(sb.ID) == 8 && (sb.Thread == sandboxer.Thread{}) { // the broker's choice, or as good as that
		return sb.ID
	}
	return sb.Addr()
}

// ready ends the progress of a create with its one line.
func (p *progress) ready(ctx context.Context, s *session, sb *api.Sandbox) {
	if p.mode == "none" {
		return
	}
	p.changes(sb)
	p.route(sb)
	parts := []string{"ready in " + p.took()}
	if by := isolation(ctx, s, sb); by != "" {
		parts = append(parts, string(by))
	}
	parts = append(parts, strings.TrimPrefix(sb.Extension, "ext."))
	cost := sandboxer.Credits(0)
	if sb.Quote != nil {
		cost = sb.Quote.Amount.Std()
	}
	last := "$" + cost.String()
	if !sb.ExpiresAt.IsZero() {
		last += " · expires " + sb.ExpiresAt.Local().Format("15:04")
	}
	p.done("%s", strings.Join(append(parts, last), "  "))
}

// isolation is the isolation of sb: its profile names it, or its extension has only one. "" if it is not known.
func isolation(ctx context.Context, s *session, sb *api.Sandbox) sandboxer.Isolation {
	if prof, err := s.Profile(ctx, sb.Profile); err == nil && prof.Isolation != "" {
		return prof.Isolation
	}
	list, err := s.Extensions(ctx)
	if err != nil {
		return ""
	}
	for _, e := range list.Items {
		if e.ID == sb.Extension && len(e.Isolation) == 1 {
			return e.Isolation[0]
		}
	}
	return ""
}

// changes prints where the sandbox differs from the request.
func (p *progress) changes(sb *api.Sandbox) {
	const shown = 3 // a file that was made for another machine has dozens
	said := changes(sb)
	for _, c := range said[:min(len(said), shown)] {
		p.note("changed: %s", c)
	}
	if more := len(said) - shown; more > 0 {
		p.note("changed: %d more; see them with: sandboxer get %s", more, sb.ID)
	}
}

// route says that the first candidate did not make sb, and what the one says that did.
func (p *progress) route(sb *api.Sandbox) {
	if len(sb.Route) == 0 || sb.Route[0].Verdict == sandboxer.RouteChosen {
		return
	}
	text := "it is on " + sb.Extension
	if q := sb.Quote; q != nil && q.ByBackend && q.Detail != "" {
		text += ": " + q.Detail
	}
	p.note("%s (%s: %s)", text, sb.Route[0].Extension, sb.Route[0].Reason)
}

func states(words []string) ([]sandboxer.State, error) {
	var out []sandboxer.State
	for _, list := range words {
		for w := range strings.SplitSeq(list, ",") {
			st := sandboxer.State(strings.TrimSpace(w))
			if !st.Valid() {
				e := invalid("%q is not a state", w)
				return nil, e.WithHint("want one of: %s", join(sandboxer.States(), ", "))
			}
			if !slices.Contains(out, st) {
				out = append(out, st)
			}
		}
	}
	return out, nil
}
