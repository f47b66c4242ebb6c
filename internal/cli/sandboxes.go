package cli

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// sandboxID shows a sandbox by its bare ID, so that ID=$(sandboxer create) works.
func sandboxID() view[*api.Sandbox] {
	v := sandboxView()
	v.detail = nil
	return v
}

func sandboxView() view[*api.Sandbox] {
	return view[*api.Sandbox]{
		cols: []string{"ID", "NAME", "PROFILE", "STATE", "CREATED", "EXPIRES", "COST"},
		wide: []string{"EXTENSION", "HOST", "TENANT", "GENERATION", "LABELS", "MESSAGE"},
		row: func(sb *api.Sandbox) []string {
			expires := until(sb.ExpiresAt)
			state := string(sb.State)
			if sb.Damaged != "" {
				state = strings.TrimSpace(state + " (damaged)")
			}
			if !sb.State.Live() || sb.State == sandboxer.Terminating {
				expires = ""
				if sb.Reason != "" {
					state += " (" + string(sb.Reason) + ")"
				}
			}
			if !sb.Unresponsive.IsZero() {
				state += " (unresponsive)"
			}
			if sb.Unconfirmed != "" {
				state += " (unconfirmed)"
			}
			return []string{sb.ID, sb.Name, strings.TrimPrefix(sb.Profile, "profile."), state, ago(sb.CreatedAt), expires,
				costText(sb), sb.Extension, sb.Host, sb.Tenant, fmt.Sprint(sb.Generation), pairs(sb.Labels), sb.Message}
		},
		name: func(sb *api.Sandbox) string { return sb.ID },
		detail: func(sb *api.Sandbox) [][2]string {
			unconfirmed := ""
			if sb.Unconfirmed != "" {
				unconfirmed = "it waited in a pool when the database went back, and may belong to a tenant since then; kept until it is destroyed"
			}
			var cleanup []string
			if c := sb.Cleanup; c != nil {
				if c.Forgotten {
					cleanup = append(cleanup, "given up: nothing was removed")
				}
				for _, part := range []struct {
					what string
					list []string
				}{{"removed", c.Removed}, {"kept", c.Kept}, {"warning", c.Warnings}} {
					for _, x := range part.list {
						cleanup = append(cleanup, part.what+" "+x)
					}
				}
			}
			var ports []string
			for _, p := range sb.Reachability.Ports {
				ports = append(ports, strings.TrimSpace(fmt.Sprintf("%d %s %s", p.Port, p.Addr, p.URL)))
			}
			return [][2]string{
				{"id", sb.ID}, {"object id", sb.ObjectID}, {"generation", fmt.Sprint(sb.Generation)}, {"name", sb.Name}, {"state", string(sb.State)},
				{"unresponsive", moment(sb.Unresponsive, ago)}, {"unconfirmed", unconfirmed}, {"damaged", sb.Damaged}, {"reason", string(sb.Reason)}, {"message", sb.Message},
				{"fault", string(sb.Fault)}, {"hint", sb.Hint}, {"profile", sb.Profile}, {"extension", sb.Extension},
				{"backend name", sb.Ref}, {"tenant", sb.Tenant}, {"thread", threadText(sb.Thread)}, {"consumer", consumerText(sb.Consumer)},
				{"inputs", pairs(sb.Inputs)}, {"image", sb.Image}, {"command", strings.Join(sb.Command, " ")}, {"labels", pairs(sb.Labels)}, {"secrets", secretsText(sb.Secrets)},
				{"limits", limitsText(sb.Limits)}, {"network", networkText(sb.Network)}, {"mounts", mountsText(sb.Mounts)}, {"user", sb.User},
				{"host", cmp.Or(sb.Reachability.Host, sb.Host)}, {"workspace", cmp.Or(sb.Reachability.RemoteDir, sb.Workspace)}, {"ssh", sb.Reachability.SSH},
				{"compose project", sb.Reachability.ComposeProject}, {"url", sb.Reachability.URL}, {"declared ports", portsText(sb.Ports)}, {"ports", strings.Join(ports, "\n")},
				{"changed", strings.Join(changes(sb), "\n")}, {"details", pairs(details(sb))},
				{"price", quoteText(sb.Quote)}, {"max cost", maxCostText(sb.MaxCost)}, {"cost", costText(sb)}, {"metered", usageText(sb.Usage)},
				{"created", moment(sb.CreatedAt, ago)}, {"provisioned", moment(sb.ProvisionedAt, ago)}, {"ready", moment(sb.ReadyAt, ago)}, {"last used", moment(sb.UsedAt, ago)},
				{"paused", pauseText(sb)}, {"paused before", durationText(sb.PausedFor)}, {"resumed", moment(sb.ResumedAt, ago)}, {"route", choicesText(sb.Route)}, {"debts", debtsText(sb.Debts)}, {"restored from", restoredText(sb)},
				{"idle", durationText(sb.Idle)}, {"on idle", string(sb.OnIdle)}, {"on ttl", string(sb.OnTTL)},
				{"expires", moment(sb.ExpiresAt, until)}, {"ending", moment(sb.EndingAt, ago)}, {"ended", moment(sb.EndedAt, ago)},
				{"last error", retriedText(sb.LastError, sb.Retries, sb.RetryAt)}, {"cleanup", strings.Join(cleanup, "\n")},
			}
		},
	}
}

// costText is what sb cost, as far as that is known.
func costText(sb *api.Sandbox) string {
	if sb.Billing != "" {
		return string(sb.Billing)
	}
	return "$" + sb.Cost.String()
}

// usageText is what the backend's meter read last.
func usageText(u *api.Usage) string {
	if u == nil {
		return ""
	}
	text := fmt.Sprintf("$%s, cpu_ns %d, mib_ms %d, rx_bytes %d, tx_bytes %d", u.Cost, u.CPU, u.MiBMillis, u.RxBytes, u.TxBytes)
	if !u.Final {
		text += ", not final"
	}
	return text + ", at " + u.At.UTC().Format(time.RFC3339)
}

func maxCostText(most api.Credits) string {
	if most == 0 {
		return ""
	}
	return "$" + most.String()
}

func threadText(t sandboxer.Thread) string {
	if t.ID == "" {
		return ""
	}
	return t.User + "/" + t.ID
}

// retriedText is the error of a step that is being retried.
func retriedText(lastError string, retries int, at time.Time) string {
	var parts []string
	if lastError != "" {
		parts = append(parts, lastError)
	}
	if retries > 0 {
		parts = append(parts, fmt.Sprintf("attempt %d", retries))
	}
	if !at.IsZero() {
		parts = append(parts, "tried again at "+at.Local().Format(time.TimeOnly))
	}
	return strings.Join(parts, "; ")
}

// changes are the parts of the request that the adapter left out or changed.
func changes(sb *api.Sandbox) []string {
	said := sb.Reachability.Extra[sandboxer.ExtraChanged]
	if said == "" {
		return nil
	}
	return strings.Split(said, "; ")
}

// details are the adapter's further values on how a sandbox is reached.
func details(sb *api.Sandbox) map[string]string {
	out := maps.Clone(sb.Reachability.Extra)
	delete(out, sandboxer.ExtraChanged)
	return out
}

// printMade writes sandboxes that a command made or ended: the bare IDs for people and
// scripts, as sandboxID does for one.
func printMade(f *factory, l *api.List[api.Sandbox]) error {
	if format := f.format(); format != "table" && format != "wide" {
		return printList(f, pointers(l), sandboxView())
	}
	for i := range l.Items {
		if _, err := fmt.Fprintln(f.io.out, clean(l.Items[i].ID)); err != nil {
			return err
		}
	}
	return nil
}

func pointers[T any](l *api.List[T]) *api.List[*T] {
	out := &api.List[*T]{SchemaVersion: l.SchemaVersion, Items: []*T{}, NextCursor: l.NextCursor}
	for i := range l.Items {
		out.Items = append(out.Items, &l.Items[i])
	}
	return out
}

type lsOptions struct {
	f      *factory
	q      api.SandboxQuery
	states []string
	labels []string
	thread string
	all    bool

	quarantined bool
}

func newCmdLs(f *factory) *cobra.Command {
	o := &lsOptions{f: f}
	c := &cobra.Command{
		Use: "ls", Aliases: []string{"list", "ps"}, Short: "List sandboxes, newest first", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if o.q.States, err = states(o.states); err != nil {
				return err
			}
			if o.quarantined && (o.all || o.states != nil || o.labels != nil || o.q.Profile != "" || o.q.Name != "" || o.thread != "" || o.q.Tenant != "" || o.q.Limit != 0 || o.q.Cursor != "") {
				return invalid("--quarantined goes with no other flag of ls")
			}
			if o.all {
				if o.states != nil {
					return invalid("--all and --state exclude each other")
				}
				o.q.States = sandboxer.States()
			}
			if o.q.Labels, err = keyValues("--label", o.labels); err != nil {
				return err
			}
			if o.q.Thread, err = parseThread(o.thread); err != nil {
				return err
			}
			if err := checkLimit(o.q.Limit); err != nil {
				return err
			}
			return lsRun(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.BoolVarP(&o.all, "all", "a", false, "also those that are terminated")
	fl.BoolVar(&o.quarantined, "quarantined", false, "only sandboxes that the database does not know, for administrators")
	fl.StringArrayVar(&o.states, "state", nil, "only in this `STATE`; several with commas")
	fl.StringArrayVar(&o.labels, "label", nil, "only with this label `KEY=VALUE`")
	fl.StringVar(&o.q.Profile, "profile", "", "only of this `PROFILE`")
	fl.StringVar(&o.q.Name, "name", "", "only with this `NAME`")
	fl.StringVar(&o.thread, "thread", "", "only of this thread, `[USER/]ID`")
	fl.StringVar(&o.q.Tenant, "tenant", "", "only of this `TENANT`, for administrators")
	pageFlags(c, &o.q.Limit, &o.q.Cursor)
	complete(c, "state", strings.Fields(join(sandboxer.States(), " "))...)
	_ = c.RegisterFlagCompletionFunc("profile", f.completeProfiles)
	return c
}

func pageFlags(c *cobra.Command, limit *int, cursor *string) {
	c.Flags().IntVar(limit, "limit", 0, "maximum `NUMBER` of entries (default 100)")
	c.Flags().StringVar(cursor, "cursor", "", "continue an earlier list at its `CURSOR`")
}

func checkLimit(n int) error {
	if n < 0 || n > sandboxer.MaxPage {
		return invalid("--limit: %d is not between 1 and %d", n, sandboxer.MaxPage)
	}
	return nil
}

func lsRun(ctx context.Context, o *lsOptions) error {
	if o.quarantined {
		return listed(ctx, o.f, quarantineView(), func(ctx context.Context, s *session) (*api.List[api.Quarantined], error) { return s.Quarantined(ctx) })
	}
	held := 0
	err := listed(ctx, o.f, sandboxView(), func(ctx context.Context, s *session) (*api.List[api.Sandbox], error) {
		l, err := s.List(ctx, o.q)
		if format := o.f.format(); err == nil && (format == "table" || format == "wide") {
			if qs, qerr := s.Quarantined(ctx); qerr == nil { // only administrators may ask
				held = len(qs.Items)
			}
		}
		return l, err
	})
	if err == nil && held > 0 {
		o.f.progress().note("%d more exist that the database does not know: sandboxer ls --quarantined", held)
	}
	return err
}

func quarantineView() view[*api.Quarantined] {
	return view[*api.Quarantined]{
		cols: []string{"ID", "EXTENSION", "HOST", "KEPT UNTIL"},
		wide: []string{"GENERATION", "SINCE", "WHY"},
		row: func(q *api.Quarantined) []string {
			end := "destroyed"
			if !q.Until.IsZero() {
				end = moment(q.Until, until)
			}
			return []string{q.ID, q.Extension, q.Host, end, strconv.Itoa(q.Generation), moment(q.Since, ago), q.Why}
		},
		name: func(q *api.Quarantined) string { return q.ID },
	}
}

// refOptions are the options of a command about one sandbox.
type refOptions struct {
	f   *factory
	ref string
}

func newCmdGet(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "get ID", SuggestFor: []string{"describe"}, Aliases: []string{"show", "inspect"}, Short: "Show a sandbox", Args: wants(1, 1, "one sandbox: its ID, the beginning of it, or its name"),
		ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			return shown(cmd.Context(), f, sandboxView(), func(ctx context.Context, s *session) (*api.Sandbox, error) { return s.Get(ctx, args[0]) })
		},
	}
}

type waitOptions struct {
	refOptions
	states  []sandboxer.State
	timeout time.Duration
}

func newCmdWait(f *factory) *cobra.Command {
	o := &waitOptions{refOptions: refOptions{f: f}}
	var want []string
	var timeout string
	c := &cobra.Command{
		Use: "wait ID", Short: "Wait until a sandbox is in a state", Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			o.ref = args[0]
			if o.states, err = states(want); err != nil {
				return err
			}
			if timeout != "" {
				if o.timeout, err = parseDuration("--timeout", timeout); err != nil {
					return err
				}
			}
			return waitRun(cmd.Context(), o)
		},
	}
	c.Flags().StringArrayVar(&want, "for", []string{"running"}, "the `STATE`; one of several with commas")
	c.Flags().StringVar(&timeout, "timeout", "", "give up after this `DURATION`; the sandbox keeps running")
	complete(c, "for", strings.Fields(join(sandboxer.States(), " "))...)
	return c
}

func waitRun(ctx context.Context, o *waitOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	wctx := ctx
	if o.timeout > 0 {
		var cancel context.CancelFunc
		wctx, cancel = context.WithTimeout(ctx, o.timeout)
		defer cancel()
	}
	sb, err := s.Wait(wctx, o.ref, o.states...)
	if err != nil && ctx.Err() == nil && errors.Is(wctx.Err(), context.DeadlineExceeded) {
		return sandboxer.E(sandboxer.Timeout, nil, "sandbox %s is not %s after %s; the operation continues", o.ref, join(o.states, " or "), o.timeout).
			WithHint("check its state: sandboxer get %s", o.ref)
	}
	if err != nil {
		return err
	}
	return printOne(o.f, sb, sandboxID())
}

func newCmdStats(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "stats ID", Short: "Measure a sandbox", Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			return shown(cmd.Context(), f, statsView(args[0]), func(ctx context.Context, s *session) (*api.Stats, error) { return s.Stats(ctx, args[0]) })
		},
	}
}

func statsView(ref string) view[*api.Stats] {
	of := func(n, limit int64) string {
		if limit > 0 {
			return size(n) + " of " + size(limit)
		}
		return size(n)
	}
	return view[*api.Stats]{
		name: func(*api.Stats) string { return ref },
		detail: func(st *api.Stats) [][2]string {
			cpu, processes := unknown, unknown
			if st.CPU >= 0 {
				cpu = st.CPU.String()
			}
			if st.PIDs >= 0 {
				processes = fmt.Sprint(st.PIDs)
			}
			return [][2]string{
				{"cpu time", cpu}, {"memory", of(st.MemoryBytes, st.MemoryLimit)}, {"disk", of(st.DiskBytes, st.DiskLimit)},
				{"processes", processes}, {"received", size(st.RxBytes)}, {"sent", size(st.TxBytes)},
			}
		},
	}
}

type eventsOptions struct {
	refOptions
	follow bool
	after  int64
	newest bool // the flag --after is not given
	limit  int
}

func newCmdEvents(f *factory) *cobra.Command {
	o := &eventsOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "events [ID]", SuggestFor: []string{"log", "logs", "history"}, Short: "Show the events of one sandbox or of all",
		Long: "Show the newest events of one sandbox or of all, oldest first; with --after, those after an event. With -f, show new\n" +
			"events until interrupted, also after a restart of the server.", Args: wants(0, 1, "at most one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				o.ref = args[0]
			}
			if err := checkLimit(o.limit); err != nil {
				return err
			}
			o.newest = !cmd.Flags().Changed("after")
			if o.after < 0 {
				return invalid("--after: %d is not the number of an event", o.after)
			}
			return eventsRun(cmd.Context(), o)
		},
	}
	c.Flags().BoolVarP(&o.follow, "follow", "f", false, "also show new events until interrupted")
	c.Flags().Int64Var(&o.after, "after", 0, "events after this `NUMBER`, 0 for the first ones, instead of the newest")
	c.Flags().IntVar(&o.limit, "limit", 0, "maximum `NUMBER` of entries (default 100)")
	return c
}

func eventView() view[*api.Event] {
	return view[*api.Event]{
		cols: []string{"SEQ", "TIME", "SANDBOX", "TYPE", "ACTOR", "WHAT"}, // the longest column is last
		wide: []string{"TENANT", "GENERATION"},
		row: func(ev *api.Event) []string {
			return []string{fmt.Sprint(ev.Seq), ev.At.Local().Format("2006-01-02 15:04:05"), ev.SandboxID, string(ev.Type), ev.Actor, eventText(ev),
				ev.Tenant, fmt.Sprint(ev.Generation)}
		},
		name: func(ev *api.Event) string { return fmt.Sprint(ev.Seq) },
	}
}

func eventText(ev *api.Event) string {
	var s string
	if ev.Type == sandboxer.EventState {
		s = string(ev.To)
		if ev.From != "" {
			s = string(ev.From) + " → " + s
		}
		if ev.Cause != "" {
			s += " (" + string(ev.Cause) + ")"
		}
	}
	if ev.Message != "" {
		if s != "" {
			s += ": "
		}
		s += ev.Message
	}
	return s
}

func eventsRun(ctx context.Context, o *eventsOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	q := api.EventQuery{Sandbox: o.ref, After: o.after, Newest: o.newest, Limit: o.limit}
	v := eventView()
	if o.follow {
		return eventsFollow(ctx, o, s, q)
	}
	l, err := s.Events(ctx, q)
	if err != nil {
		return err
	}
	next := l.NextCursor
	if format := o.f.format(); format != "table" && format != "wide" {
		return printList(o.f, pointers(l), v)
	}
	l.NextCursor = ""
	if err := printList(o.f, pointers(l), v); err != nil {
		return err
	}
	limit := cmp.Or(o.limit, sandboxer.DefaultPage)
	switch hint := o.f.io.paint("36", "hint:"); {
	case next != "":
		fmt.Fprintf(o.f.io.err, "%s there are more: add --after %s\n", hint, next)
	case q.Newest && len(l.Items) == limit && l.Items[0].Seq > 1:
		fmt.Fprintf(o.f.io.err, "%s these are the newest %d: add --after 0 for the first ones, or a larger --limit\n", hint, limit)
	}
	return nil
}

// Pauses between the attempts of events -f to find its server again.
const (
	followAgain = 200 * time.Millisecond
	followMost  = 5 * time.Second
)

// eventsFollow shows events and follows new ones, until ctx ends or the
// limit is reached. If the server goes away it waits: the next one continues after
// the event that was shown last.
func eventsFollow(ctx context.Context, o *eventsOptions, s *session, q api.EventQuery) error {
	p := o.f.progress()
	defer p.stop()
	n := 0
	show := func(ev *api.Event) (enough bool, _ error) {
		q.After = max(q.After, ev.Seq) // progress has none
		n++
		return n == o.limit, printEvent(o.f, ev)
	}
	// From here on the server is known to exist: if it is away, wait for it.
	if _, err := s.Status(ctx); err != nil {
		return err
	}
	if q.Newest {
		l, err := s.Events(ctx, q)
		if err != nil {
			return err
		}
		for i := range l.Items {
			if enough, err := show(&l.Items[i]); enough || err != nil {
				return err
			}
		}
	}
	for pause := followAgain; ; {
		var failed error
		for ev, err := range s.Follow(ctx, q) {
			if failed = err; err != nil {
				break
			}
			pause = followAgain
			if enough, err := show(&ev); enough || err != nil {
				return err
			}
		}
		if ctx.Err() != nil {
			return nil // that is how following ends
		}
		if sandboxer.KindOf(failed) != sandboxer.Unavailable {
			return failed
		}
		if pause == followAgain {
			p.note("%s; waiting for it", sentence(failed))
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, followMost)
		case <-ctx.Done():
			return nil
		}
	}
}

// printEvent writes one event of a stream, which has no end to close a bracket or to
// measure columns at.
func printEvent(f *factory, ev *api.Event) error {
	switch format := f.format(); format {
	case "table", "wide":
		v := eventView()
		cells := v.row(ev)
		if format == "table" {
			cells = cells[:len(v.cols)]
		}
		for i := range cells {
			cells[i] = clean(cells[i])
		}
		_, err := fmt.Fprintln(f.io.out, strings.Join(cells, "  "))
		return err
	case "json":
		return printJSONLine(f.io.out, ev)
	case "name":
		_, err := fmt.Fprintln(f.io.out, ev.Seq)
		return err
	default:
		return printData(f.io.out, format, ev)
	}
}

type extendOptions struct {
	refOptions
	extend api.ExtendSandbox
}

func newCmdExtend(f *factory, run func(context.Context, *extendOptions) error) *cobra.Command {
	o := &extendOptions{refOptions: refOptions{f: f}}
	var ttl string
	c := &cobra.Command{
		Use: "extend ID --ttl [+]DURATION", Short: "Move a sandbox's expiry", Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		Example: "  sandboxer extend 7k2m --ttl 1h     # an hour from now\n  sandboxer extend 7k2m --ttl +30m   # half an hour longer than before",
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			rest, add := strings.CutPrefix(ttl, "+")
			if ttl == "" {
				return invalid("--ttl is missing").WithHint("--ttl 1h counts from now, --ttl +1h from the present expiry")
			}
			d, err := parseDuration("--ttl", rest)
			if err != nil {
				return err
			}
			if add {
				o.extend.Add = d
			} else {
				o.extend.TTL = d
			}
			return run(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&ttl, "ttl", "", "`LIFETIME` from now, or with + from the present expiry")
	return c
}

func extendRun(ctx context.Context, o *extendOptions) error {
	return shown(ctx, o.f, sandboxID(), func(ctx context.Context, s *session) (*api.Sandbox, error) {
		sb, err := s.Extend(ctx, o.ref, o.extend)
		if err == nil {
			o.f.progress().done("%s expires %s", sb.ID, moment(sb.ExpiresAt, until))
		}
		return sb, err
	})
}

type destroyOptions struct {
	f      *factory
	refs   []string
	labels map[string]string
	all    bool
	yes    bool
	noWait bool
}

func newCmdDestroy(f *factory) *cobra.Command {
	o := &destroyOptions{f: f}
	var labels []string
	c := &cobra.Command{
		Use: "destroy ID…", Aliases: []string{"rm"}, SuggestFor: []string{"delete", "remove", "kill", "stop", "terminate"}, Short: "Destroy sandboxes",
		Long: "Destroy sandboxes in any state, and return when they are removed completely. On a terminal the command asks before it\n" +
			"destroys more than one; --yes confirms.",
		ValidArgsFunction: f.completeSandboxes,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			o.refs = args
			if err := wants(0, -1, "the IDs or names of sandboxes")(cmd, args); err != nil {
				return err
			}
			if o.labels, err = keyValues("--label", labels); err != nil {
				return err
			}
			many := o.all || o.labels != nil
			switch {
			case many && len(args) > 0:
				return invalid("sandboxes are given by ID or by --label and --all, not both")
			case !many && len(args) == 0:
				return invalid("%s takes the IDs or names of sandboxes", cmd.CommandPath()).WithHint("list them with: sandboxer ls")
			case many && !o.yes && !f.io.inTTY:
				return invalid("confirmation is needed to destroy them all, and stdin is not a terminal").WithHint("add --yes")
			}
			return destroyRun(cmd.Context(), o)
		},
	}
	c.Flags().StringArrayVar(&labels, "label", nil, "all with this label `KEY=VALUE`")
	c.Flags().BoolVar(&o.all, "all", false, "all your sandboxes")
	c.Flags().BoolVarP(&o.yes, "yes", "y", false, "do not ask")
	c.Flags().BoolVar(&o.noWait, "no-wait", false, "return as soon as the request is recorded")
	return c
}

func destroyRun(ctx context.Context, o *destroyOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	if o.all || o.labels != nil {
		q := api.SandboxQuery{Labels: o.labels, Limit: sandboxer.MaxPage}
		st, err := s.Status(ctx)
		if err != nil {
			return err
		}
		q.Tenant = st.Tenant // --all means the caller's own ones, also for an administrator
		for sb, err := range everySandbox(ctx, s, q) {
			if err != nil {
				return err
			}
			o.refs = append(o.refs, refOf(&sb))
		}
		if len(o.refs) == 0 {
			none := "there is no sandbox"
			if o.labels != nil {
				none += " with the label " + pairs(o.labels)
			}
			fmt.Fprintf(o.f.io.err, "%s: nothing was destroyed\n", clean(none))
		}
	}
	if len(o.refs) > 1 && !o.yes && o.f.io.inTTY {
		ok, err := ask(o.f.io, "Destroy %d sandboxes (%s)?", len(o.refs), strings.Join(o.refs, ", "))
		if err != nil {
			return err
		}
		if !ok {
			return sandboxer.E(sandboxer.Canceled, nil, "nothing was destroyed")
		}
	}
	p := o.f.progress()
	defer p.stop()
	type result struct {
		sb  *api.Sandbox
		err error
	}
	results := make([]result, len(o.refs))
	slots := make(chan struct{}, 8)
	var wg sync.WaitGroup
	for i, ref := range o.refs {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			sb, err := s.Destroy(ctx, ref, !o.noWait)
			results[i] = result{sb, err}
		})
	}
	wg.Wait()
	list := &api.List[api.Sandbox]{SchemaVersion: api.SchemaVersion, Items: []api.Sandbox{}}
	var first error
	for i, r := range results {
		if r.err != nil {
			if first == nil {
				first = r.err
			} else {
				p.note("%s: %s", o.refs[i], sentence(r.err))
			}
			continue
		}
		list.Items = append(list.Items, *r.sb)
		switch {
		case r.sb.State != sandboxer.Terminated:
			p.done("%s is being destroyed", r.sb.ID)
		default:
			p.done("destroyed %s in %s · cost %s", r.sb.ID, p.took(), costText(r.sb))
		}
		if r.sb.Cleanup != nil {
			for _, w := range r.sb.Cleanup.Warnings {
				p.note("%s: %s", r.sb.ID, w)
			}
		}
	}
	if err := printMade(o.f, list); err != nil {
		return err
	}
	return first
}

// everySandbox is every page of a list.
func everySandbox(ctx context.Context, s *session, q api.SandboxQuery) iter.Seq2[api.Sandbox, error] {
	return api.All(func(cursor string) (*api.List[api.Sandbox], error) {
		q.Cursor = cursor
		return s.List(ctx, q)
	})
}

// ask asks a yes-or-no question on the terminal; no is the default.
func ask(std *streams, format string, args ...any) (bool, error) {
	fmt.Fprintf(std.err, "%s [y/N] ", clean(fmt.Sprintf(format, args...)))
	line, err := bufio.NewReader(std.in).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return false, sandboxer.E(sandboxer.Canceled, err, "no answer could be read")
	}
	answer := strings.ToLower(strings.TrimSpace(line))
	return answer == "y" || answer == "yes", nil
}
