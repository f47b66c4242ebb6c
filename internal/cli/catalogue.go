package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/catalog"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// catalogOptions are the options of commands about the catalogue.
type catalogOptions struct {
	f     *factory
	kind  string // catalog.KindProfile or KindExtension
	name  string
	files []string
}

func newCmdProfile(f *factory) *cobra.Command {
	return newGroup("profile", "Kinds of sandbox that users can create: list, check and write them", []string{"profiles"},
		newCmdCatalogLs(f, catalog.KindProfile), newCmdCatalogShow(f, catalog.KindProfile),
		newCmdCatalogValidate(f, catalog.KindProfile), newCmdProfileInit(f), newCmdProfileSchema(f))
}

func newCmdExtension(f *factory) *cobra.Command {
	return newGroup("extension", "Configured backends: list, check and probe them", []string{"ext", "extensions"},
		newCmdCatalogLs(f, catalog.KindExtension), newCmdCatalogShow(f, catalog.KindExtension),
		newCmdCatalogValidate(f, catalog.KindExtension), newCmdExtensionProbe(f), newCmdExtensionNew(f), newCmdExtensionTest(f), newCmdExtensionServeScript(f))
}

func newCmdCatalogLs(f *factory, kind string) *cobra.Command {
	o := &catalogOptions{f: f, kind: kind}
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the " + kind + "s of the server, or of this machine's files if none runs", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return catalogLsRun(cmd.Context(), o)
		},
	}
}

func profileView() view[*api.Profile] {
	return view[*api.Profile]{
		cols: []string{"PROFILE", "TITLE", "EXTENSION", "ISOLATION", "TTL"},
		wide: []string{"NETWORK", "LIMITS", "PRICE"},
		row: func(p *api.Profile) []string {
			price := ""
			if p.Price != nil {
				price = fmt.Sprintf("$%s/h + $%s", p.Price.PerHour, p.Price.Setup)
			}
			return []string{p.ID, p.Title, strings.Join(p.Extensions(), ", "), string(p.Isolation), ttlText(p.TTL), networkText(p.Network), limitsText(p.Limits), price}
		},
		name: func(p *api.Profile) string { return p.ID },
		detail: func(p *api.Profile) [][2]string {
			price, pool := "", ""
			if p.Pool != nil {
				pool = fmt.Sprintf("%d ready, each for at most %s", p.Pool.Size, durationText(p.Pool.MaxAge))
			}
			if p.Price != nil {
				price = fmt.Sprintf("$%s per hour, $%s once", p.Price.PerHour, p.Price.Setup)
			}
			return [][2]string{
				{"id", p.ID}, {"title", p.Title}, {"description", p.Description}, {"extension", p.Extension}, {"route", routeText(p.Route)},
				{"isolation", string(p.Isolation)}, {"requires", join(p.Requires, ", ")}, {"image", p.Image},
				{"command", strings.Join(p.Command, " ")}, {"environment", strings.Join(p.Env, ", ")}, {"labels", pairs(p.Labels)}, {"secrets", strings.Join(p.Secrets, ", ")},
				{"limits", limitsText(p.Limits)}, {"largest limits", limitsText(p.MaxLimits)}, {"network", networkText(p.Network)}, {"mounts", mountsText(p.Mounts)}, {"ports", portsText(p.Ports)},
				{"workspace", p.Workspace}, {"user", p.User}, {"inputs", pairs(p.Inputs)},
				{"ttl", ttlText(p.TTL)}, {"longest ttl", durationText(p.MaxTTL)}, {"idle", durationText(p.Idle)}, {"on idle", string(p.OnIdle)},
				{"on ttl", string(p.OnTTL)}, {"on cost", string(p.OnCost)}, {"pause depth", string(p.PauseDepth)}, {"longest pause", durationText(p.MaxPaused)}, {"auto resume", ifSo(p.AutoResume)},
				{"max", countText(p.Max)}, {"wait", durationText(p.Wait)},
				{"ready when", readyText(p.Ready)}, {"pool", pool}, {"price", price}, {"built in", ifSo(p.Builtin)},
			}
		},
	}
}

// routeText describes the extensions that may serve a profile, one a line.
func routeText(r *api.Route) string {
	if r == nil {
		return ""
	}
	lines := []string{"policy " + string(r.Policy)}
	if r.Prefer != "" {
		lines[0] += ", prefers " + string(r.Prefer)
	}
	for _, c := range r.Candidates {
		what := []string{c.Extension}
		add := func(name, value string) {
			if value != "" {
				what = append(what, name+" "+value)
			}
		}
		add("image", c.Image)
		add("at most", limitsText(c.Limits))
		if c.Network != nil {
			add("network", networkText(*c.Network))
		}
		add("inputs", pairs(c.Inputs))
		if c.Price != nil {
			add("price", fmt.Sprintf("$%s per hour, $%s once", c.Price.PerHour, c.Price.Setup))
		}
		lines = append(lines, strings.Join(what, ", "))
	}
	return strings.Join(lines, "\n")
}

// countText is n, or nothing where none is set.
func countText(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}

// readyText describes the check that a sandbox must pass before its user gets it.
func readyText(r *api.ReadyCheck) string {
	if r == nil {
		return ""
	}
	var what []string
	if h := r.HTTP; h != nil {
		at := "its URL"
		if h.Port != 0 {
			at = "port " + strconv.Itoa(h.Port)
		}
		what = append(what, fmt.Sprintf("GET %s at %s answers %d", h.Path, at, h.Status))
	}
	if len(r.Command) > 0 {
		what = append(what, strings.Join(r.Command, " ")+" ends with 0")
	}
	return strings.Join(what, " and ") + ", within " + durationText(r.Timeout)
}

func extensionView() view[*api.Extension] {
	inputs := func(e *api.Extension) string {
		var names []string
		for _, in := range e.Inputs {
			names = append(names, in.Name)
		}
		return strings.Join(names, ",")
	}
	failing := func(e *api.Extension) string {
		if e.FailingUntil.IsZero() {
			return ""
		}
		return "it failed several times in a row; routes skip it until " + e.FailingUntil.Local().Format(time.TimeOnly)
	}
	problem := func(e *api.Extension) string {
		if e.Problem == "" || e.RetryAt.IsZero() {
			return e.Problem
		}
		return e.Problem + "; tried again at " + e.RetryAt.Local().Format(time.TimeOnly)
	}
	return view[*api.Extension]{
		cols: []string{"EXTENSION", "TITLE", "ADAPTER", "ISOLATION", "PRICING", "PROBLEM"},
		wide: []string{"CAPABILITIES", "INPUTS"},
		row: func(e *api.Extension) []string {
			return []string{e.ID, e.Title, e.Adapter, join(e.Isolation, ","), string(e.Pricing), cmp.Or(problem(e), failing(e)), join(e.Capabilities, ","), inputs(e)}
		},
		name: func(e *api.Extension) string { return e.ID },
		detail: func(e *api.Extension) [][2]string {
			var ins []string
			for _, in := range e.Inputs {
				line := in.Name + "  " + in.Help
				if in.Name == sandboxer.AnyInput {
					line = in.Name + "  any other: " + in.Help
				}
				if in.Required {
					line += " (required)"
				}
				if in.OneOf != "" {
					line += fmt.Sprintf(" (%s: one of %s is required, or a host or an image)", in.OneOf, strings.Join(alternatives(e.Inputs, in.OneOf), ", "))
				}
				if in.Restricted {
					line += " (restricted)"
				}
				if in.Default != "" {
					line += fmt.Sprintf(" (default %q)", in.Default)
				}
				ins = append(ins, line)
			}
			return [][2]string{
				{"id", e.ID}, {"title", e.Title}, {"adapter", e.Adapter}, {"handler", e.Handler}, {"isolation", join(e.Isolation, ", ")},
				{"pricing", string(e.Pricing)}, {"max", countText(e.Max)}, {"capabilities", join(e.Capabilities, ", ")}, {"inputs", strings.Join(ins, "\n")}, {"runtime", e.Runtime}, {"notices", strings.Join(e.Notices, "\n")}, {"problem", problem(e)}, {"failing", failing(e)},
			}
		},
	}
}

// alternatives are the names of the inputs of a group (sandboxer.Input, OneOf).
func alternatives(inputs []sandboxer.Input, group string) (names []string) {
	for _, in := range inputs {
		if in.OneOf == group {
			names = append(names, in.Name)
		}
	}
	return names
}

// ofServer reports whether to ask a server about the catalogue. Without one the
// answer comes from this machine's files, as far as they can give it.
func (o *catalogOptions) ofServer(ctx context.Context) (*session, error) {
	ok, err := o.f.running(ctx)
	if err != nil || !ok {
		return nil, err
	}
	return o.f.connect(ctx)
}

// unread is err with a hint if a server of this machine does not know the profile, and a
// file of this machine has it: the server has not read that file yet, or could not.
func (f *factory) unread(ctx context.Context, s *session, name string, err error) error {
	kind := sandboxer.KindOf(err)
	if name == "" || !s.local || s.inProcess || kind != sandboxer.Invalid && kind != sandboxer.NotFound {
		return err
	}
	if _, perr := s.Profile(ctx, name); !errors.Is(perr, sandboxer.NotFound) {
		return err
	}
	c, lerr := f.catalog()
	if p, perr := c.Profile(name); perr == nil {
		return sandboxer.E(kind, err, "%s; %s has it, which the server has not read yet", sandboxer.Message(err), p.Origin.File).
			WithHint("let the server read it: sandboxer reload")
	}
	var faults catalog.Faults
	if errors.As(lerr, &faults) {
		for _, x := range faults {
			if base := filepath.Base(x.File); strings.TrimSuffix(base, filepath.Ext(base)) == catalog.ProfileID(name) {
				return sandboxer.E(kind, err, "%s; %s has faults", sandboxer.Message(err), x.File).WithHint("see them: sandboxer profile validate")
			}
		}
	}
	return err
}

// unreadNote names the profiles of this machine that its server has in another form, or
// does not have.
func (f *factory) unreadNote(s *session, served []api.Profile) {
	if !s.local || s.inProcess {
		return
	}
	text := func(p api.Profile) string {
		p.Builtin = false // says where it is from; servers before did not
		b, _ := json.Marshal(p)
		return string(b)
	}
	has := map[string]string{}
	for _, p := range served {
		has[p.ID] = text(p)
	}
	var other []string
	for _, p := range f.whatLoads().Profiles {
		if has[p.ID] != text(api.NewProfile(p.Profile)) {
			other = append(other, p.ID+" ("+p.Origin.File+")")
		}
	}
	if len(other) > 0 {
		f.progress().note("the server has not read the present files of %s; let it read them: sandboxer reload", strings.Join(other, ", "))
	}
}

// load reads this machine's catalogue, which must be valid.
func (o *catalogOptions) load() (*catalog.Catalog, error) {
	return o.f.catalog()
}

func catalogLsRun(ctx context.Context, o *catalogOptions) error {
	s, err := o.ofServer(ctx)
	if err != nil {
		return err
	}
	var profiles *api.List[api.Profile]
	var exts *api.List[api.Extension]
	switch {
	case s == nil:
		c, err := o.load()
		if err != nil {
			return err
		}
		profiles, exts = &api.List[api.Profile]{SchemaVersion: api.SchemaVersion, Items: []api.Profile{}}, &api.List[api.Extension]{SchemaVersion: api.SchemaVersion, Items: []api.Extension{}}
		for _, p := range c.Profiles {
			profiles.Items = append(profiles.Items, api.NewProfile(p.Profile))
		}
		for _, e := range c.Extensions {
			exts.Items = append(exts.Items, e.Info())
		}
	case o.kind == catalog.KindProfile:
		defer s.close()
		if profiles, err = s.Profiles(ctx); err != nil {
			return err
		}
		defer o.f.unreadNote(s, profiles.Items)
	default:
		defer s.close()
		if exts, err = s.Extensions(ctx); err != nil {
			return err
		}
	}
	if o.kind == catalog.KindProfile {
		return printList(o.f, pointers(profiles), profileView())
	}
	return printList(o.f, pointers(exts), extensionView())
}

func newCmdCatalogShow(f *factory, kind string) *cobra.Command {
	o := &catalogOptions{f: f, kind: kind}
	c := &cobra.Command{
		Use: "show " + strings.ToUpper(kind), Aliases: []string{"get"}, Short: "Show one " + kind, Args: wants(1, 1, "the ID of one "+kind),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.name = args[0]
			return catalogShowRun(cmd.Context(), o)
		},
	}
	c.ValidArgsFunction = f.completeProfiles
	if kind == catalog.KindExtension {
		c.ValidArgsFunction = f.completeExtensions
	}
	return c
}

func catalogShowRun(ctx context.Context, o *catalogOptions) error {
	s, err := o.ofServer(ctx)
	if err != nil {
		return err
	}
	if s != nil {
		defer s.close()
		if o.kind == catalog.KindProfile {
			p, err := s.Profile(ctx, o.name)
			if err != nil {
				return o.f.unread(ctx, s, o.name, err)
			}
			return printOne(o.f, p, profileView())
		}
		l, err := s.Extensions(ctx)
		if err != nil {
			return err
		}
		id := catalog.ExtensionID(o.name)
		var ids []string
		for _, e := range l.Items {
			if e.ID == id {
				return printOne(o.f, &e, extensionView())
			}
			ids = append(ids, e.ID)
		}
		e := sandboxer.E(sandboxer.NotFound, nil, "there is no extension %q", id)
		if n := suggest.Nearest(id, ids); n != "" {
			return e.WithHint("did you mean %q? see all with: sandboxer extension ls", n)
		}
		return e.WithHint("see all with: sandboxer extension ls")
	}
	c, err := o.load()
	if err != nil {
		return err
	}
	if o.kind == catalog.KindProfile {
		p, err := c.Profile(o.name)
		if err != nil {
			return err
		}
		pub := api.NewProfile(p.Profile)
		return printOne(o.f, &pub, profileView())
	}
	e, err := c.Extension(o.name)
	if err != nil {
		return err
	}
	info := e.Info()
	return printOne(o.f, &info, extensionView())
}

func newCmdCatalogValidate(f *factory, kind string) *cobra.Command {
	o := &catalogOptions{f: f, kind: kind}
	return &cobra.Command{
		Use:   "validate [FILE…]",
		Short: "Check the catalogue's files, and further ones",
		Long: "Read every extension and profile of this machine, and the FILEs if any, and report all faults with file and line.\n" +
			"This starts nothing and needs no server.",
		RunE: func(cmd *cobra.Command, args []string) error {
			o.files = args
			return catalogValidateRun(cmd.Context(), o)
		},
	}
}

func catalogValidateRun(_ context.Context, o *catalogOptions) error {
	var further []catalog.Layer
	if len(o.files) > 0 {
		further = []catalog.Layer{{Name: "command line", Files: o.files}}
	}
	c, err := o.f.catalog(further...)
	var faults catalog.Faults
	if errors.As(err, &faults) && o.f.format() != "table" && o.f.format() != "wide" {
		if perr := printList(o.f, &api.List[catalog.Fault]{SchemaVersion: api.SchemaVersion, Items: faults},
			view[catalog.Fault]{name: func(x catalog.Fault) string { return x.File }}); perr != nil {
			return perr
		}
		return &exitError{kinds[sandboxer.Invalid].exit, nil}
	}
	if errors.As(err, &faults) {
		// The text about the files is the result, with nothing before it.
		fmt.Fprintln(o.f.io.err, cleanLines(faults.Error()))
		return &exitError{kinds[sandboxer.Invalid].exit, nil}
	}
	if err != nil {
		return err
	}
	if o.f.format() == "table" || o.f.format() == "wide" {
		fmt.Fprintf(o.f.io.out, "%d extensions and %d profiles are valid\n", len(c.Extensions), len(c.Profiles))
		return nil
	}
	return printList(o.f, &api.List[catalog.Fault]{SchemaVersion: api.SchemaVersion, Items: []catalog.Fault{}},
		view[catalog.Fault]{name: func(x catalog.Fault) string { return x.File }})
}

func newCmdProfileSchema(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "schema", Short: "Print the JSON Schema of profiles, for editors", Args: wants(0, 0, "no arguments"),
		RunE: func(*cobra.Command, []string) error {
			b, err := catalog.Schema(catalog.KindProfile)
			if err == nil {
				_, err = f.io.out.Write(b)
			}
			return err
		},
	}
}

func newCmdExtensionProbe(f *factory) *cobra.Command {
	o := &catalogOptions{f: f, kind: catalog.KindExtension}
	return &cobra.Command{
		Use: "probe EXTENSION", Short: "Check whether a backend works and how many sandboxes it can take", Args: wants(1, 1, "the ID of one extension"),
		ValidArgsFunction: f.completeExtensions,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.name = args[0]
			return extensionProbeRun(cmd.Context(), o)
		},
	}
}

func extensionProbeRun(ctx context.Context, o *catalogOptions) error {
	p := o.f.progress()
	defer p.stop()
	s, err := o.f.connectOrEmbed(ctx, p)
	if err != nil {
		return err
	}
	defer s.close()
	offer, err := s.Probe(ctx, o.name)
	if err != nil {
		return err
	}
	return printOne(o.f, offer, view[*api.HostCapacity]{
		name: func(*api.HostCapacity) string { return catalog.ExtensionID(o.name) },
		detail: func(of *api.HostCapacity) [][2]string {
			free := fmt.Sprintf("%d", of.Free)
			if of.Free < 0 {
				free = "no fixed number"
			}
			return [][2]string{{"extension", catalog.ExtensionID(o.name)}, {"free", free}, {"hosts", strings.Join(of.Hosts, ", ")}, {"attributes", pairs(of.Attrs)}}
		},
	})
}
