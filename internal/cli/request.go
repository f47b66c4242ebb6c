package cli

import (
	"bufio"
	"cmp"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// requestOptions are the flags with which a sandbox is asked for.
type requestOptions struct {
	profile, image, offer   string // offer is the positional [PROFILE|IMAGE]
	inputs, labels          []string
	env                     envFlags
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
	fl.StringVar(&o.profile, "profile", "", "`profile` to create from (SANDBOXER_PROFILE)")
	fl.StringVar(&o.image, "image", "", "`image` in the backend's terms")
	fl.StringArrayVar(&o.inputs, "input", nil, "the profile's argument `key=value`; a local directory is made absolute")
	o.env.bind(fl)
	fl.StringArrayVar(&o.labels, "label", nil, "label `key=value`")
	fl.StringVar(&o.name, "name", "", "`name`, unique among your live sandboxes")
	fl.StringVar(&o.ttl, "ttl", "", "`lifetime`: 30m, 1h30m, 2d, or idle: as long as it is used")
	o.registerIdle(c)
	fl.StringVar(&o.host, "host", "", "`place` among those the extension has")
	fl.StringVar(&o.cpus, "cpus", "", "processors: `2`, 0.5")
	fl.StringVar(&o.memory, "memory", "", "memory: `512MiB`, 2GiB")
	fl.StringVar(&o.disk, "disk", "", "disk space: `4GiB`")
	fl.Int64Var(&o.pids, "pids", 0, "processes and threads")
	fl.StringVar(&o.net, "net", "", "network: none, public or `allow:host,…`")
	fl.StringVar(&o.maxCost, "max-cost", "", "refuse if it would cost more `credits` (SANDBOXER_MAX_COST)")
	fl.StringArrayVar(&o.mounts, "mount", nil, "make a path of the server's machine visible inside: `SRC:DST[:ro]`, or type=bind,source=SRC,target=DST[,readonly]; SRC is made absolute")
	fl.StringVar(&o.thread, "thread", "", "the sandbox of this thread, always under the same ID: `[USER/]ID`")
	fl.StringVar(&o.consumer, "consumer", "", "`who` asks: a person, an agent, a service")
	fl.StringVar(&o.consumerKind, "consumer-kind", "", "`kind` of the consumer: agent, ci, user")
	fl.StringArrayVar(&o.consumerMeta, "consumer-meta", nil, "more about the consumer: `key=value`")
	fl.StringVar(&o.key, "idempotency-key", "", "one `key` makes one sandbox, however often it is sent")
	complete(c, "net", "none", "public", "allow:")
	_ = c.RegisterFlagCompletionFunc("profile", f.completeProfiles)
}

// registerIdle is the flags that say what becomes of a sandbox that nobody uses, and of one whose
// time is over.
func (o *requestOptions) registerIdle(c *cobra.Command) {
	fl := c.Flags()
	fl.StringVar(&o.idle, "idle", "", "how long `nobody` may use it until --on-idle is done: 10m; at most the profile's")
	fl.StringVar(&o.onIdle, "on-idle", "", "what happens then: `destroy` or pause")
	fl.StringVar(&o.onTTL, "on-ttl", "", "what happens when its time is over: `destroy` or pause")
	complete(c, "on-idle", "destroy", "pause")
	complete(c, "on-ttl", "destroy", "pause")
}

// registerUser is the flag for the sandbox's user where -u is not the command's.
func (o *requestOptions) registerUser(c *cobra.Command) {
	c.Flags().StringVarP(&o.user, "user", "u", "", "`user`, or uid[:gid], of its commands, who also owns the workspace")
}

// split takes apart "[PROFILE|IMAGE] [-- CMD…]".
func (o *requestOptions) split(cmd *cobra.Command, args []string) error {
	dash := cmd.ArgsLenAtDash()
	if dash < 0 {
		dash = len(args)
	}
	if dash > 1 {
		return invalid("%s takes one profile or image; %q is too much", cmd.CommandPath(), args[1]).
			WithHint("put -- before the command: %s %s -- %s", cmd.CommandPath(), args[0], strings.Join(args[1:], " "))
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

// looksLikeImage tells references and paths from the names of profiles.
func looksLikeImage(s string) bool { return strings.ContainsAny(s, "/:@") }

// build makes the request of the flags and finds what is wrong with them, before anything
// is started for it. It is called once: what is checked is what is sent, and what the
// flags name may be a pipe.
func (o *requestOptions) build(f *factory) (err error) {
	o.req, err = o.request(f)
	return err
}

// requestFor is the request for the server of s.
func (o *requestOptions) requestFor(s *session) (api.CreateSandbox, error) {
	if !s.local && o.elsewhere != nil {
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
	cost := o.maxCost
	if cost == "" {
		cost = set.get("max_cost")
	}
	if cost != "" {
		c, err := sandboxer.ParseCredits(cost)
		if err != nil {
			return r, invalid("--max-cost: %s", sandboxer.Message(err))
		}
		if c <= 0 {
			return r, invalid("--max-cost: %q is not a positive amount", cost)
		}
		r.MaxCost = c
	}
	return r, nil
}

// consumedBy is who the sandbox is attributed to.
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

// parseThread reads [USER/]ID. A user may have slashes, an ID has none.
func parseThread(s string) (t sandboxer.Thread, err error) {
	if s == "" {
		return t, nil
	}
	t.ID = s
	if i := strings.LastIndexByte(s, '/'); i >= 0 {
		if t.User, t.ID = s[:i], s[i+1:]; t.User == "" {
			return t, invalid("--thread: %q names no user before the slash", s).WithHint("write USER/ID, or ID alone")
		}
	}
	if _, err := t.SandboxID(); err != nil {
		return t, invalid("--thread: %s", sandboxer.Message(err))
	}
	return t, nil
}

// parseMounts reads SRC:DST[:ro], or what --mount of other tools takes. A relative source is one
// of this machine, which the server has to share: elsewhere says so of the first. An absolute one
// is the server's to find.
func parseMounts(list []string) (mounts []sandboxer.Mount, elsewhere, err error) {
	for _, v := range list {
		m, err := parseMount(v)
		if err != nil {
			return nil, nil, err
		}
		if !path.IsAbs(m.Target) {
			return nil, nil, invalid("--mount: %q is not an absolute path inside the sandbox", m.Target)
		}
		src := m.Source
		full := inHome(src)
		if !filepath.IsAbs(src) {
			if _, err := os.Stat(full); err != nil {
				return nil, nil, sandboxer.E(sandboxer.Invalid, err, "--mount: %s cannot be mounted", src)
			}
			if elsewhere == nil {
				elsewhere = invalid("--mount: %s is a path of this machine, and the server is on another", src).
					WithHint("give an absolute path of the server's machine, or copy the files in later: sandboxer cp")
			}
		}
		abs, err := filepath.Abs(full)
		if err == nil && !filepath.IsAbs(src) { // the server follows no links, and this one is the user's own
			abs, err = filepath.EvalSymlinks(abs)
		}
		if err != nil {
			return nil, nil, sandboxer.E(sandboxer.Invalid, err, "--mount: %q cannot be made absolute", src)
		}
		m.Source, m.Target = abs, path.Clean(m.Target)
		mounts = append(mounts, m)
	}
	return mounts, elsewhere, nil
}

// parseMount reads one. What has a key=value before any colon is a list of these.
func parseMount(v string) (m sandboxer.Mount, err error) {
	first, _, _ := strings.Cut(v, ",")
	key, _, isList := strings.Cut(first, "=")
	if !isList || strings.ContainsAny(key, ":/.~") {
		src, rest, _ := strings.Cut(v, ":")
		dst, mode, has := strings.Cut(rest, ":")
		if src == "" || dst == "" || has && mode != "ro" && mode != "rw" {
			return m, invalid("--mount: %q is neither SRC:DST[:ro] nor type=bind,source=SRC,target=DST[,readonly]", v)
		}
		return sandboxer.Mount{Source: src, Target: dst, ReadOnly: mode == "ro"}, nil
	}
	fields, err := csv.NewReader(strings.NewReader(v)).Read()
	if err != nil {
		return m, invalid("--mount: %q is not a list of key=value: %v", v, err)
	}
	for _, f := range fields {
		key, value, has := strings.Cut(f, "=")
		var to *string
		switch key {
		case "type":
			if value != "bind" {
				return m, invalid("--mount: %q is not a type of mount that there is", value).WithHint("the type is bind")
			}
			continue
		case "source", "src":
			to = &m.Source
		case "target", "dst", "destination":
			to = &m.Target
		case "readonly", "ro":
			if m.ReadOnly = true; has {
				if m.ReadOnly, err = strconv.ParseBool(value); err != nil {
					return m, invalid("--mount: %s=%q is neither true nor false", key, value)
				}
			}
			continue
		default:
			return m, invalid("--mount: there is no %q", key).WithHint("write type=bind,source=SRC,target=DST, and readonly if it should be")
		}
		if *to != "" {
			return m, invalid("--mount: the %s is given twice in %q", key, v)
		}
		*to = value
	}
	if m.Source == "" || m.Target == "" {
		return m, invalid("--mount: %q has no source or no target", v).WithHint("write type=bind,source=SRC,target=DST, and readonly if it should be")
	}
	return m, nil
}

// inHome puts the user's home directory in the place of a leading ~/, which a shell
// leaves alone behind key= and before a colon.
func inHome(name string) string {
	if rest, ok := strings.CutPrefix(name, "~/"); ok {
		if home, err := os.UserHomeDir(); err == nil {
			return filepath.Join(home, rest)
		}
	}
	return name
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

// parseSize reads sizes as the catalogue does, always with a unit, and also the short
// units that other tools take: m and g without an i count in powers of 1024 there and here.
func parseSize(flag, s string) (int64, error) {
	if s == "" {
		return 0, nil
	}
	digits := strings.TrimRight(s, "BKMGTbkmgti ")
	unit, ok := sizeUnit(strings.TrimSpace(s[len(digits):]))
	n, err := strconv.ParseFloat(digits, 64)
	if err == nil && digits == s {
		return 0, invalid("%s: %q has no unit", flag, s).WithHint("write %sMiB or %sGiB, or %sB for bytes", s, s, s)
	}
	n *= unit
	if !ok || err != nil || strings.Trim(digits, "0123456789.") != "" || !(n >= 1 && n <= 1<<53) || n != math.Trunc(n) {
		return 0, invalid("%s: %q is not a size", flag, s).WithHint("write for example 512MiB or 2GiB")
	}
	return int64(n), nil
}

func sizeUnit(u string) (float64, bool) {
	switch u {
	case "":
		return 0, false
	case "B", "b":
		return 1, true
	}
	power := float64(strings.IndexByte("kmgt", u[0]|0x20) + 1)
	switch rest := u[1:]; {
	case power == 0:
	case rest == "" || rest == "iB" || rest == "ib":
		return math.Pow(1024, power), true
	case rest == "B" || rest == "b":
		return math.Pow(1000, power), true
	}
	return 0, false
}

// parseDuration reads Go's durations, optionally led by whole days.
func parseDuration(flag, s string) (time.Duration, error) {
	bad := invalid("%s: %q is not a duration", flag, s).WithHint("write a number with a unit: 30m, 1h30m, 90s, 2d")
	rest, days := s, time.Duration(0)
	if d, r, ok := strings.Cut(s, "d"); ok {
		n, err := strconv.ParseUint(d, 10, 16)
		if err != nil {
			return 0, bad
		}
		days, rest = time.Duration(n)*24*time.Hour, r
	}
	var d time.Duration
	if rest != "" || days == 0 {
		var err error
		if d, err = time.ParseDuration(rest); err != nil || strings.ContainsAny(rest, "+-") {
			return 0, bad
		}
	}
	if d += days; d <= 0 {
		return 0, invalid("%s: %q is not a positive duration", flag, s).WithHint("write for example 30m")
	}
	return d, nil
}

// parseTTL reads a time to live: a duration, or idle.
func parseTTL(s string) (time.Duration, error) {
	if s == sandboxer.TTLIdleText {
		return sandboxer.TTLIdle, nil
	}
	return parseDuration("--ttl", s)
}

// parseNetwork reads none, public or allow:a,b.
func parseNetwork(s string) (*sandboxer.NetworkPolicy, error) {
	mode, list, has := strings.Cut(s, ":")
	switch {
	case s == "":
		return nil, nil
	case s == string(sandboxer.NetworkNone), s == string(sandboxer.NetworkPublic):
		return &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkMode(s)}, nil
	case mode == string(sandboxer.NetworkAllow) && has && list != "":
		return &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: strings.Split(list, ",")}, nil
	}
	return nil, invalid("--net: %q is not a network policy", s).WithHint("want none, public or allow:host,…")
}

func keyValues(flag string, list []string) (map[string]string, error) {
	var m map[string]string
	for _, kv := range list {
		k, v, ok := strings.Cut(kv, "=")
		if !ok || k == "" {
			return nil, invalid("%s: %q is not of the form key=value", flag, kv)
		}
		if _, twice := m[k]; twice {
			return nil, invalid("%s: %q is given twice", flag, k)
		}
		if m == nil {
			m = map[string]string{}
		}
		m[k] = v
	}
	return m, nil
}

// localInputs makes the paths of local directories among the inputs absolute: the
// server has another working directory. One on another machine has not got them at all,
// which elsewhere says of the first.
func localInputs(inputs map[string]string) (elsewhere, err error) {
	for _, k := range slices.Sorted(maps.Keys(inputs)) {
		v := inputs[k]
		rel := v == "." || v == ".." || strings.HasPrefix(v, "./") || strings.HasPrefix(v, "../")
		if full := inHome(v); full != v {
			v, rel = full, true
		}
		if !rel {
			if k != "repo" || filepath.IsAbs(v) || strings.Contains(v, ":") {
				continue
			}
			if st, err := os.Stat(v); err != nil || !st.IsDir() {
				continue
			}
		}
		abs, err := filepath.Abs(v)
		if err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, err, "--input %s: %q cannot be made absolute", k, v)
		}
		if st, err := os.Stat(abs); err != nil || !st.IsDir() {
			return nil, sandboxer.E(sandboxer.Invalid, err, "--input %s: %s is not a directory", k, v)
		}
		if elsewhere == nil {
			elsewhere = invalid("--input %s: %s is a directory of this machine, and the server is on another", k, v).
				WithHint("give a git URL, or copy the files in later: sandboxer cp")
		}
		inputs[k] = abs
	}
	return elsewhere, nil
}

// envFlags are the flags that set an environment.
type envFlags struct {
	vars, files []string
}

func (e *envFlags) bind(fl *pflag.FlagSet) {
	fl.StringArrayVarP(&e.vars, "env", "e", nil, "environment `NAME=value`, or NAME to pass on yours")
	fl.StringArrayVar(&e.files, "env-file", nil, "`file` with lines NAME=value")
}

// read returns what the flags set. A file may be a pipe, which can be read once.
func (e *envFlags) read(lookup func(string) (string, bool)) (map[string]string, error) {
	return environment(lookup, e.vars, e.files)
}

// maxEnvFile is the most that a file of variables may hold, in bytes.
const maxEnvFile = 1 << 20

// environment merges files and flags; the flags win. A name without a value passes
// on the caller's, if there is one.
func environment(lookup func(string) (string, bool), flags, files []string) (map[string]string, error) {
	env := map[string]string{}
	add := func(where, kv string) error {
		k, v, ok := strings.Cut(kv, "=")
		if !isEnvName(k) {
			return invalid("%s: %q is not the name of an environment variable", where, k).WithHint("write NAME=value, or NAME to pass on yours")
		}
		if !ok {
			if v, ok = lookup(k); !ok {
				return nil
			}
		}
		env[k] = v
		return nil
	}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, err, "--env-file: %s cannot be read", name)
		}
		all := &io.LimitedReader{R: f, N: maxEnvFile + 1}
		sc := bufio.NewScanner(all)
		sc.Buffer(nil, maxEnvFile+1)
		for n := 1; sc.Scan(); n++ {
			line := strings.TrimSuffix(sc.Text(), "\r")
			if t := strings.TrimSpace(line); t == "" || t[0] == '#' {
				continue
			}
			if err := add(fmt.Sprintf("%s:%d", name, n), strings.TrimLeft(line, " \t")); err != nil {
				f.Close()
				return nil, err
			}
		}
		if all.N == 0 {
			f.Close()
			return nil, invalid("--env-file: %s holds more than %d bytes", name, maxEnvFile)
		}
		if err := errors.Join(sc.Err(), f.Close()); err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, err, "--env-file: %s cannot be read", name)
		}
	}
	for _, kv := range flags {
		if err := add("--env", kv); err != nil {
			return nil, err
		}
	}
	if len(env) == 0 {
		return nil, nil
	}
	return env, nil
}

func isEnvName(s string) bool {
	for i := range len(s) {
		c := s[i]
		if c != '_' && (c|0x20 < 'a' || c|0x20 > 'z') && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}

// interrupts counts what the user types to get out. Its channel receives each one.
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

// refOf names sb to the server. Of two tenants, each can have chosen the same ID.
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
	parts := []string{"ready in " + p.took()}
	if prof, err := s.Profile(ctx, sb.Profile); err == nil && prof.Isolation != "" {
		parts = append(parts, string(prof.Isolation))
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

// changes says what became of a request otherwise than it asked.
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
