package cli

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

type createOptions struct {
	requestOptions
	f      *factory
	wait   string // ready or none
	dryRun bool
}

func newCmdCreate(f *factory, run func(context.Context, *createOptions) error) *cobra.Command {
	o := &createOptions{f: f}
	c := &cobra.Command{
		Use: "create [PROFILE|IMAGE] [flags] [-- CMD…]", SuggestFor: []string{"new", "start"},
		Short: "Create a sandbox that runs until it expires",
		Long: "Create a sandbox and print its ID. A server is started in the background if none runs; it ends the sandbox\n" +
			"when it expires. CMD replaces the sandbox's main process; to run a command in it, use exec.\n\n" +
			"The first interrupt stops waiting, a second one destroys the sandbox, a third leaves that to the server.",
		Example:           "  sandboxer create --profile profile.local --input repo=. --ttl 1h\n  ID=$(sandboxer create -q)",
		Annotations:       map[string]string{ownSignals: "yes"},
		ValidArgsFunction: f.completeProfiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.split(f, cmd, args); err != nil {
				return err
			}
			if err := oneOf("way to wait", []string{"ready", "none"})(o.wait); err != nil {
				return err
			}
			if err := o.build(f); err != nil {
				return err
			}
			return run(cmd.Context(), o)
		},
	}
	o.register(f, c)
	o.registerUser(c)
	c.Flags().StringVar(&o.wait, "wait", "ready", "return in this `STATE`: ready, or none to return immediately")
	c.Flags().BoolVar(&o.dryRun, "dry-run", false, "show what would be created and what it would cost, and create nothing")
	complete(c, "wait", "ready", "none")
	return c
}

func createRun(ctx context.Context, o *createOptions) error {
	if o.dryRun {
		return planRun(ctx, &planOptions{requestOptions: o.requestOptions, f: o.f})
	}
	p := o.f.progress()
	defer p.stop()
	hits, release := interrupts()
	defer release()
	request, drop := context.WithCancel(ctx) // an interrupt does not take the request back at once
	defer drop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	type result struct {
		s   *session
		sb  *api.Sandbox
		err error
	}
	made := make(chan result, 1) // the record is there
	done := make(chan result, 1) // the sandbox runs
	go func() {
		s, err := o.f.connectOrStart(ctx, p)
		if err != nil {
			done <- result{err: err}
			return
		}
		req, err := o.requestFor(s)
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			done <- result{s: s, err: err}
			return
		}
		req.NoWaiting = true
		sb, err := s.Create(request, req)
		if err != nil {
			err = o.refused(ctx, o.f, s, req.Profile, err)
		}
		found := err == nil && sb.Found
		if found {
			p.note("sandbox %s exists already: another request made it", sb.ID)
		}
		if err == nil && o.wait == "ready" {
			made <- result{s: s, sb: sb}
			if sb, err = await(ctx, s, p, sb); err == nil {
				sb.Found = found
			}
		}
		done <- result{s: s, sb: sb, err: err}
	}()

	var sb *api.Sandbox
	var s *session
	for {
		select {
		case r := <-made:
			s, sb = r.s, r.sb
		case r := <-done:
			p.stop()
			if r.s != nil {
				defer r.s.close()
			}
			if r.err != nil {
				return r.err
			}
			if o.wait == "ready" {
				p.ready(ctx, r.s, r.sb)
			}
			return printOne(o.f, r.sb, sandboxID())
		case <-hits:
			cancel()
			p.stop()
			if sb == nil { // the answer to the request names the sandbox to destroy
				var r result
				select {
				case r = <-made:
				case r = <-done:
				case <-hits:
				case <-time.After(second):
				}
				s, sb = r.s, r.sb
			}
			if sb == nil {
				if s != nil {
					s.close()
				}
				return sandboxer.E(sandboxer.Canceled, nil, "interrupted before the request was confirmed").
					WithHint("check whether there is a sandbox: sandboxer ls")
			}
			defer s.close()
			if sb.Found {
				return sandboxer.E(sandboxer.Canceled, nil, "interrupted; sandbox %s, which another request made, is left as it is", sb.ID)
			}
			return abandon(s, p, sb, hits)
		}
	}
}

// second is how long after the first interrupt of a create to wait for a second one.
const second = 2 * time.Second

// abandon handles interrupts during a create: the first prints how to go
// on, a second destroys, a third leaves.
func abandon(s *session, p *progress, sb *api.Sandbox, hits <-chan os.Signal) error {
	p.note("sandbox %s is still being created; wait for it with: sandboxer wait %s", sb.ID, sb.ID)
	p.note("interrupt again within %s to destroy it, or later: sandboxer destroy %s", second, sb.ID)
	select {
	case <-time.After(second):
		return &exitError{kinds[sandboxer.Canceled].exit, nil}
	case <-hits:
	}
	p.note("destroying %s", sb.ID)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := s.Destroy(ctx, refOf(sb), true)
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			return err
		}
		return &exitError{kinds[sandboxer.Canceled].exit, nil}
	case <-hits:
		return sandboxer.E(sandboxer.Canceled, nil, "stopped waiting; the server continues to destroy %s", sb.ID)
	}
}

type planOptions struct {
	requestOptions
	f *factory
}

func newCmdPlan(f *factory, run func(context.Context, *planOptions) error) *cobra.Command {
	o := &planOptions{f: f}
	c := &cobra.Command{
		Use:               "plan [PROFILE|IMAGE] [flags] [-- CMD…]",
		Aliases:           []string{"quote"},
		Short:             "Show the result and the price of a create without creating",
		ValidArgsFunction: f.completeProfiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.split(f, cmd, args); err != nil {
				return err
			}
			if err := o.build(f); err != nil {
				return err
			}
			return run(cmd.Context(), o)
		},
	}
	o.register(f, c)
	o.registerUser(c)
	return c
}

func planRun(ctx context.Context, o *planOptions) error {
	p := o.f.progress()
	defer p.stop()
	s, err := o.f.connectOrEmbed(ctx, p)
	if err != nil {
		return err
	}
	defer s.close()
	req, err := o.requestFor(s)
	if err != nil {
		return err
	}
	plan, err := s.Plan(ctx, req)
	if err != nil {
		return o.refused(ctx, o.f, s, req.Profile, err)
	}
	return printOne(o.f, plan, planView())
}

func planView() view[*api.Plan] {
	return view[*api.Plan]{
		name: func(p *api.Plan) string { return p.Profile },
		detail: func(p *api.Plan) [][2]string {
			return [][2]string{
				{"profile", p.Profile}, {"extension", p.Extension}, {"route", choicesText(p.Route)}, {"host", p.Host}, {"ttl", ttlText(p.TTL)},
				{"price", quoteText(&p.Quote)}, {"inputs", pairs(p.Inputs)}, {"image", p.Image}, {"command", strings.Join(p.Command, " ")},
				{"environment", strings.Join(p.Env, ", ")}, {"labels", pairs(p.Labels)}, {"limits", limitsText(p.Limits)},
				{"network", networkText(p.Network)}, {"mounts", mountsText(p.Mounts)}, {"ports", portsText(p.Ports)}, {"workspace", p.Workspace}, {"user", p.User}, {"changed", strings.Join(p.Changed, "\n")},
			}
		},
	}
}

// choicesText says what became of the candidates of a profile, one a line; nothing where there is only one.
func choicesText(choices []api.RouteChoice) string {
	if len(choices) < 2 {
		return ""
	}
	var lines []string
	for _, c := range choices {
		line := fmt.Sprintf("%s %s (%s): %s", c.Extension, c.Verdict, c.Reason, c.Detail)
		if c.Words != "" {
			line += ": " + c.Words
		}
		if c.Price != nil && c.Verdict != sandboxer.RouteRefused {
			line += ", $" + c.Price.String()
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

// debtsText is what may exist of a sandbox elsewhere, one a line.
func debtsText(debts []api.Debt) string {
	var lines []string
	for _, d := range debts {
		lines = append(lines, fmt.Sprintf("%s (%s): since %s it may exist there as generation %d, which is to be removed; %s",
			d.Extension, d.Reason, d.Since.UTC().Format(time.RFC3339), d.Generation, retriedText(d.LastError, d.Retries, d.RetryAt)))
	}
	return strings.Join(lines, "\n")
}

func quoteText(q *api.Quote) string {
	if q == nil {
		return ""
	}
	s := "$" + q.Amount.String()
	if q.Duration > 0 {
		s += " for " + durationText(q.Duration)
	}
	if q.PerHour > 0 || q.Setup > 0 {
		s += fmt.Sprintf(" ($%s per hour, $%s once)", q.PerHour, q.Setup)
	}
	if q.Detail != "" {
		s += ": " + q.Detail
	}
	return s
}
