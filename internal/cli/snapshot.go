package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

func newCmdSnapshot(f *factory) *cobra.Command {
	return newGroup("snapshot", "Snapshots: save, restore and manage them", []string{"snapshots", "snap"},
		newCmdSnapshotCreate(f, snapshotCreateRun), newCmdSnapshotLs(f), newCmdSnapshotTree(f), newCmdSnapshotGet(f), newCmdSnapshotDiff(f),
		newCmdSnapshotExport(f), newCmdSnapshotImport(f), newCmdSnapshotRm(f))
}

func snapshotView() view[*api.Snapshot] {
	return view[*api.Snapshot]{
		cols: []string{"ID", "NAME", "SANDBOX", "KIND", "MEMORY", "STATE", "SIZE", "CREATED", "EXPIRES"},
		wide: []string{"PARENT", "PROFILE", "EXTENSION", "PURPOSE", "TENANT", "MESSAGE"},
		row: func(s *api.Snapshot) []string {
			return []string{s.ID, s.Name, s.SandboxID, string(s.Kind), yesNo(s.Memory), string(s.State), size(s.Bytes), ago(s.CreatedAt), until(s.ExpiresAt),
				s.Parent, strings.TrimPrefix(s.Profile, "profile."), s.Extension, string(s.Purpose), s.Tenant, s.Message}
		},
		name: func(s *api.Snapshot) string { return s.ID },
		detail: func(s *api.Snapshot) [][2]string {
			files := ""
			if s.Digest != "" {
				files = fmt.Sprintf("%d, %s unpacked", s.Files, size(s.Size))
			}
			stored := ""
			if s.Stored > 0 {
				stored = size(s.Stored)
			}
			of := s.SandboxID
			if s.Generation > 0 {
				of += fmt.Sprintf(", generation %d", s.Generation)
			}
			return [][2]string{
				{"id", s.ID}, {"name", s.Name}, {"state", string(s.State)}, {"message", s.Message}, {"kind", string(s.Kind)}, {"purpose", string(s.Purpose)},
				{"memory", yesNo(s.Memory)}, {"quiesced", yesNo(s.Quiesced)}, {"sandbox", of}, {"parent", s.Parent},
				{"profile", s.Profile}, {"extension", s.Extension}, {"host", s.Host}, {"tenant", s.Tenant}, {"size", size(s.Bytes)}, {"stored", stored}, {"files", files}, {"volumes", strings.Join(s.Volumes, ", ")}, {"digest", s.Digest},
				{"created", moment(s.CreatedAt, ago)}, {"sealed", moment(s.SealedAt, ago)}, {"expires", moment(s.ExpiresAt, until)},
				{"dropped", moment(s.DroppedAt, ago)}, {"damaged", s.Damaged},
				{"last error", retriedText(s.LastError, s.Retries, s.RetryAt)},
			}
		},
	}
}

// snapshotID shows a snapshot by its bare ID.
func snapshotID() view[*api.Snapshot] {
	v := snapshotView()
	v.detail = nil
	return v
}

type snapshotCreateOptions struct {
	refOptions
	req api.CreateSnapshot
}

func newCmdSnapshotCreate(f *factory, run func(context.Context, *snapshotCreateOptions) error) *cobra.Command {
	o := &snapshotCreateOptions{refOptions: refOptions{f: f}}
	var native, portable, both bool
	var ttl string
	c := &cobra.Command{
		Use: "create SANDBOX", Short: "Save a running sandbox, which keeps running",
		Long: "Save a running sandbox, which keeps running, and print the snapshot's ID once it is sealed: read back and verified.\n\n" +
			"A native snapshot is the extension's own: fast, perhaps with memory, restored by that extension alone. A portable one\n" +
			"keeps the workspace's files, which any extension can restore, and volumes if the sandbox's inputs select them. The default\n" +
			"is native if the extension supports it.",
		Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			switch {
			case both || native && portable:
				o.req.Kind = sandboxer.SnapshotBoth
			case native:
				o.req.Kind = sandboxer.SnapshotNative
			case portable:
				o.req.Kind = sandboxer.SnapshotPortable
			}
			if ttl != "" {
				d, err := parseDuration("--ttl", ttl)
				if err != nil {
					return err
				}
				o.req.TTL = d
			}
			return run(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.StringVar(&o.req.Name, "name", "", "`NAME`, unique among your snapshots")
	fl.BoolVar(&native, "native", false, "the extension's own form")
	fl.BoolVar(&portable, "portable", false, "the workspace's files, for any extension")
	fl.BoolVar(&both, "both", false, "both forms")
	fl.StringVar(&ttl, "ttl", "", "drop it after this `DURATION` (default: never)")
	return c
}

func snapshotCreateRun(ctx context.Context, o *snapshotCreateOptions) error {
	return shown(ctx, o.f, snapshotID(), func(ctx context.Context, s *session) (*api.Snapshot, error) { return s.Snapshot(ctx, o.ref, o.req) })
}

type snapshotLsOptions struct {
	f *factory
	q api.SnapshotQuery
}

func (o *snapshotLsOptions) register(f *factory, c *cobra.Command) {
	fl := c.Flags()
	fl.StringVar(&o.q.Sandbox, "sandbox", "", "only of this `SANDBOX`")
	fl.BoolVarP(&o.q.All, "all", "a", false, "also those that the broker made for a pause or a fork")
	fl.StringVar(&o.q.Tenant, "tenant", "", "only of this `TENANT`, for administrators")
	_ = c.RegisterFlagCompletionFunc("sandbox", f.completeSandboxes)
}

func newCmdSnapshotLs(f *factory) *cobra.Command {
	o := &snapshotLsOptions{f: f}
	var states []string
	c := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List snapshots, newest first", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, s := range states {
				for w := range strings.SplitSeq(s, ",") {
					st := sandboxer.SnapshotState(strings.TrimSpace(w))
					if !st.Valid() {
						return invalid("--state: %q is not a state of snapshots", w).WithHint("the states are: %s", join(sandboxer.SnapshotStates(), ", "))
					}
					o.q.States = append(o.q.States, st)
				}
			}
			if err := checkLimit(o.q.Limit); err != nil {
				return err
			}
			return listed(cmd.Context(), f, snapshotView(), func(ctx context.Context, s *session) (*api.List[api.Snapshot], error) { return s.Snapshots(ctx, o.q) })
		},
	}
	o.register(f, c)
	c.Flags().StringVar(&o.q.Parent, "parent", "", "only of sandboxes restored from this `SNAPSHOT`")
	c.Flags().StringArrayVar(&states, "state", nil, "only in this `STATE`; several with commas")
	pageFlags(c, &o.q.Limit, &o.q.Cursor)
	complete(c, "state", strings.Fields(join(sandboxer.SnapshotStates(), " "))...)
	_ = c.RegisterFlagCompletionFunc("parent", f.completeSnapshots)
	return c
}

func newCmdSnapshotTree(f *factory) *cobra.Command {
	o := &snapshotLsOptions{f: f}
	c := &cobra.Command{
		Use: "tree", Short: "Show which snapshot came from which", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return snapshotTreeRun(cmd.Context(), o)
		},
	}
	o.register(f, c)
	return c
}

// snapshotTreeRun prints every snapshot below the one that its sandbox was restored
// from. In the other formats it is the list, which has the parents.
func snapshotTreeRun(ctx context.Context, o *snapshotLsOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	all := &api.List[api.Snapshot]{SchemaVersion: api.SchemaVersion}
	q := o.q
	q.Limit = sandboxer.MaxPage
	for sn, err := range api.All(func(cursor string) (*api.List[api.Snapshot], error) {
		q.Cursor = cursor
		return s.Snapshots(ctx, q)
	}) {
		if err != nil {
			return err
		}
		all.Items = append(all.Items, sn)
	}
	l := pointers(all)
	tree := snapshotView()
	l.Items, tree.row = treeOf(l.Items, tree.row)
	return printList(o.f, l, tree)
}

// treeOf puts children behind their parents, oldest first, and indents the IDs that row
// shows.
func treeOf(items []*api.Snapshot, row func(*api.Snapshot) []string) ([]*api.Snapshot, func(*api.Snapshot) []string) {
	known := map[string]bool{}
	for _, it := range items {
		known[it.ID] = true
	}
	children := map[string][]*api.Snapshot{}
	for _, it := range slices.Backward(items) { // they come newest first
		parent := it.Parent
		if !known[parent] {
			parent = ""
		}
		children[parent] = append(children[parent], it)
	}
	out := []*api.Snapshot{}
	lead := map[string]string{}
	shown := map[string]bool{"": true} // each once, whatever a server says
	var walk func(id, indent string)
	walk = func(id, indent string) {
		for i, c := range children[id] {
			if shown[c.ID] {
				continue
			}
			shown[c.ID] = true
			branch, below := "├─ ", "│  "
			if i == len(children[id])-1 {
				branch, below = "└─ ", "   "
			}
			if id == "" {
				branch, below = "", ""
			}
			lead[c.ID] = indent + branch
			out = append(out, c)
			walk(c.ID, indent+below)
		}
	}
	walk("", "")
	return out, func(s *api.Snapshot) []string {
		cells := row(s)
		cells[0] = lead[s.ID] + cells[0]
		return cells
	}
}

func newCmdSnapshotGet(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "get SNAPSHOT", Aliases: []string{"show", "inspect"}, Short: "Show a snapshot",
		Args: wants(1, 1, "one snapshot: its ID, the beginning of it, or its name"), ValidArgsFunction: f.completeSnapshot,
		RunE: func(cmd *cobra.Command, args []string) error {
			return shown(cmd.Context(), f, snapshotView(), func(ctx context.Context, s *session) (*api.Snapshot, error) { return s.GetSnapshot(ctx, args[0]) })
		},
	}
}

func newCmdSnapshotDiff(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "diff BEFORE AFTER", Short: "Compare the files of two portable snapshots", Args: wants(2, 2, "two snapshots"),
		ValidArgsFunction: f.completeSnapshots,
		RunE: func(cmd *cobra.Command, args []string) error {
			return listed(cmd.Context(), f, changeView(), func(ctx context.Context, s *session) (*api.List[api.SnapshotChange], error) {
				d, err := s.DiffSnapshots(ctx, args[0], args[1])
				if err != nil {
					return nil, err
				}
				return &api.List[api.SnapshotChange]{SchemaVersion: d.SchemaVersion, Items: d.Items}, nil
			})
		},
	}
}

func changeView() view[*api.SnapshotChange] {
	return view[*api.SnapshotChange]{
		cols: []string{"CHANGE", "BEFORE", "AFTER", "PATH"},
		row: func(c *api.SnapshotChange) []string {
			before, after := size(c.Before), size(c.After)
			if c.Change == "added" {
				before = ""
			}
			if c.Change == "removed" {
				after = ""
			}
			return []string{c.Change, before, after, c.Path}
		},
		name: func(c *api.SnapshotChange) string { return c.Path },
	}
}

type snapshotFileOptions struct {
	refOptions
	file          string
	name, profile string
	accept        []string
}

func newCmdSnapshotExport(f *factory) *cobra.Command {
	o := &snapshotFileOptions{refOptions: refOptions{f: f}}
	return &cobra.Command{
		Use: "export SNAPSHOT FILE", Short: "Write a portable snapshot to a file",
		Long: "Write a portable snapshot to FILE, or to the standard output if that is -. The file is an ordinary .tar.zst with a signed\n" +
			"manifest, which snapshot import reads on this and on other installations.",
		Args: wants(2, 2, "a snapshot and a file"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, toComplete string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return nil, cobra.ShellCompDirectiveDefault
			}
			return f.completeSnapshot(cmd, args, toComplete)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref, o.file = args[0], args[1]
			return snapshotExportRun(cmd.Context(), o)
		},
	}
}

func snapshotExportRun(ctx context.Context, o *snapshotFileOptions) (err error) {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	r, err := s.ExportSnapshot(ctx, o.ref)
	if err != nil {
		return err
	}
	defer r.Close()
	if o.file == "-" {
		_, err := io.Copy(o.f.io.stdout, r)
		return err
	}
	// An interrupted export must not look like a whole one.
	tmp, err := os.CreateTemp(filepath.Dir(o.file), "."+filepath.Base(o.file)+"-*")
	if err != nil {
		return fileError(err, "%s cannot be written", o.file)
	}
	defer os.Remove(tmp.Name())
	if _, err := io.Copy(tmp, r); err != nil {
		return errors.Join(err, tmp.Close())
	}
	if err := errors.Join(tmp.Chmod(0o600), tmp.Sync(), tmp.Close()); err != nil {
		return fileError(err, "%s cannot be written", o.file)
	}
	if err := wholefile.Publish(tmp.Name(), o.file); err != nil {
		return fileError(err, "%s cannot be written", o.file)
	}
	return nil
}

func newCmdSnapshotImport(f *factory) *cobra.Command {
	o := &snapshotFileOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "import FILE", Short: "Make a snapshot from an exported file", Args: wants(1, 1, "one file, or - for the standard input"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.file = args[0]
			return snapshotImportRun(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.StringVar(&o.name, "name", "", "`NAME`, unique among your snapshots")
	fl.StringVar(&o.profile, "profile", "", "`PROFILE` to restore it on, if its own does not exist here")
	fl.StringArrayVar(&o.accept, "accept", nil, "trust this `SIGNER` once; the refusal names it")
	_ = c.RegisterFlagCompletionFunc("profile", f.completeProfiles)
	return c
}

func snapshotImportRun(ctx context.Context, o *snapshotFileOptions) error {
	in := io.Reader(o.f.io.in)
	if o.file != "-" {
		file, err := os.Open(o.file)
		if err != nil {
			return fileError(err, "%s cannot be read", o.file)
		}
		defer file.Close()
		in = file
	}
	return shown(ctx, o.f, snapshotID(), func(ctx context.Context, s *session) (*api.Snapshot, error) {
		return s.ImportSnapshot(ctx, o.name, o.profile, o.accept, in)
	})
}

func newCmdSnapshotRm(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "rm SNAPSHOT…", Aliases: []string{"drop", "delete"}, Short: "Drop snapshots; sandboxes restored from them are not affected",
		Args: wants(1, -1, "one or more snapshots"), ValidArgsFunction: f.completeSnapshots,
		RunE: func(cmd *cobra.Command, args []string) error {
			return snapshotRmRun(cmd.Context(), f, args)
		},
	}
}

func snapshotRmRun(ctx context.Context, f *factory, refs []string) error {
	s, err := f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	l := &api.List[*api.Snapshot]{SchemaVersion: api.SchemaVersion, Items: []*api.Snapshot{}}
	var failed error
	for _, ref := range refs {
		snap, err := s.DropSnapshot(ctx, ref)
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		l.Items = append(l.Items, snap)
	}
	if len(refs) == 1 && failed == nil {
		return printOne(f, l.Items[0], snapshotID())
	}
	switch format := f.format(); {
	case format == "table" || format == "wide":
		for _, snap := range l.Items {
			if err := printOne(f, snap, snapshotID()); err != nil {
				return err
			}
		}
	case len(l.Items) > 0:
		if err := printList(f, l, snapshotView()); err != nil {
			return err
		}
	}
	return failed
}

type restoreOptions struct {
	refOptions
	order  requestOptions
	kind   string
	detach bool

	req api.RestoreSnapshot // what the flags ask for (build)
}

func newCmdRestore(f *factory, run func(context.Context, *restoreOptions) error) *cobra.Command {
	o := &restoreOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "restore SNAPSHOT", Short: "Make a sandbox from a snapshot",
		Long: "Make a sandbox from a snapshot and print its ID. It has its own ID, time to live and labels; its environment is the\n" +
			"source's, with --env added. With a profile of another extension, with other inputs, or on another host than the source's,\n" +
			"the portable form is restored.",
		Args: wants(1, 1, "one snapshot"), ValidArgsFunction: f.completeSnapshot,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if err := o.build(); err != nil {
				return err
			}
			return run(cmd.Context(), o)
		},
	}
	fl, or := c.Flags(), &o.order
	fl.StringVar(&or.profile, "profile", "", "another `PROFILE` to restore on")
	fl.StringVar(&o.kind, "kind", "", "restore this `FORM`: native or portable")
	fl.StringArrayVar(&or.inputs, "input", nil, "replace the source's argument: `KEY=VALUE`, or key= to remove it; a local directory is made absolute")
	or.registerCommon(c)
	fl.BoolVarP(&o.detach, "detach", "d", false, "do not wait until it is running")
	complete(c, "kind", string(sandboxer.SnapshotNative), string(sandboxer.SnapshotPortable))
	_ = c.RegisterFlagCompletionFunc("profile", f.completeProfiles)
	return c
}

// build makes the request of the flags, as requestOptions.build does.
func (o *restoreOptions) build() error {
	if err := o.order.build(o.f); err != nil {
		return err
	}
	kind := sandboxer.SnapshotKind(o.kind)
	if kind != "" && kind != sandboxer.SnapshotNative && kind != sandboxer.SnapshotPortable {
		return invalid("--kind: %q is not a form to restore", o.kind).WithHint("it is native or portable")
	}
	r := o.order.req
	o.req = api.RestoreSnapshot{
		Profile: o.order.profile, Kind: kind, Inputs: r.Inputs, Host: r.Host, Name: r.Name, TTL: r.TTL, Idle: r.Idle, OnIdle: r.OnIdle, OnTTL: r.OnTTL, Consumer: r.Consumer, Labels: r.Labels, Env: r.Env,
		MaxCost: r.MaxCost, Key: r.Key, NoWaiting: o.detach,
	}
	return nil
}

func restoreRun(ctx context.Context, o *restoreOptions) error {
	p := o.f.progress()
	defer p.stop()
	s, err := o.f.connectOrStart(ctx, p)
	if err != nil {
		return err
	}
	defer s.close()
	if _, err := o.order.requestFor(s); err != nil {
		return err
	}
	sb, err := s.Restore(ctx, o.ref, o.req)
	if err != nil {
		return o.f.unread(ctx, s, o.req.Profile, err)
	}
	p.stop()
	return printOne(o.f, sb, sandboxID())
}

type forkOptions struct {
	refOptions
	order requestOptions
	count int
	key   string

	req api.ForkSandbox // what the flags ask for
}

func newCmdFork(f *factory, run func(context.Context, *forkOptions) error) *cobra.Command {
	o := &forkOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "fork ID", Short: "Make copies of a running sandbox, which keeps running",
		Long: "Make copies of a running sandbox, which keeps running: of its files, and of its processes if the extension saves memory.\n" +
			"Either all copies are made or none.",
		Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if o.count < 1 || o.count > 100 {
				return invalid("--count: %d is not between 1 and 100", o.count)
			}
			if err := o.order.build(f); err != nil {
				return err
			}
			r := o.order.req
			o.req = api.ForkSandbox{Count: o.count, TTL: r.TTL, Labels: r.Labels, Env: r.Env, MaxCost: r.MaxCost, Key: o.key}
			return run(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.IntVarP(&o.count, "count", "n", 1, "`NUMBER` of copies, 1 to 100")
	fl.StringArrayVarP(&o.order.env.vars, "env", "e", nil, "environment `NAME=VALUE`, or NAME to pass on yours")
	fl.StringArrayVar(&o.order.labels, "label", nil, "label `KEY=VALUE`")
	fl.StringVar(&o.order.ttl, "ttl", "", "`LIFETIME` of each: 30m, 1h30m, 2d, or idle: as long as it is used")
	fl.StringVar(&o.key, "idempotency-key", "", "one `KEY` makes one set of copies, however often it is sent")
	fl.StringVar(&o.order.maxCost, "max-cost", "", "refuse if one would cost more than `CREDITS` (SANDBOXER_MAX_COST)")
	return c
}

func forkRun(ctx context.Context, o *forkOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	made, err := s.Fork(ctx, o.ref, o.req)
	if err != nil {
		return err
	}
	return printMade(o.f, &api.List[api.Sandbox]{SchemaVersion: made.SchemaVersion, Items: made.Items})
}

type pauseOptions struct {
	refOptions
	depth string
	ttl   string
	until time.Duration
}

func newCmdPause(f *factory, run func(context.Context, *pauseOptions) error) *cobra.Command {
	o := &pauseOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "pause ID", Short: "Pause a running sandbox: it costs nothing until it is resumed",
		Long: "Pause a running sandbox. It keeps its ID and name; running time and the time to live stop.\n\n" +
			"  freeze  its processes are frozen, its memory stays in use: instant\n" +
			"  disk    memory and files are saved, its memory is freed\n" +
			"  files   files are saved, its processes end",
		Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if d := sandboxer.PauseDepth(o.depth); d != "" && !slices.Contains(sandboxer.PauseDepths(), d) {
				return invalid("--depth: %q is not a depth of pausing", o.depth).WithHint("the depths are: %s", join(sandboxer.PauseDepths(), ", "))
			}
			return run(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.depth, "depth", "", "`DEPTH`: freeze, disk or files (default: that of the profile, or the first that the extension supports)")
	complete(c, "depth", strings.Fields(join(sandboxer.PauseDepths(), " "))...)
	return c
}

func pauseRun(ctx context.Context, o *pauseOptions) error {
	return shown(ctx, o.f, sandboxID(), func(ctx context.Context, s *session) (*api.Sandbox, error) {
		return s.Pause(ctx, o.ref, api.PauseSandbox{Depth: sandboxer.PauseDepth(o.depth)})
	})
}

func newCmdResume(f *factory, run func(context.Context, *pauseOptions) error) *cobra.Command {
	o := &pauseOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "resume ID", Short: "Resume a paused sandbox", Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if o.ttl != "" {
				d, err := parseDuration("--ttl", o.ttl)
				if err != nil {
					return err
				}
				o.until = d
			}
			return run(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.ttl, "ttl", "", "`LIFETIME` from now (default: the remaining one continues)")
	return c
}

func resumeRun(ctx context.Context, o *pauseOptions) error {
	return shown(ctx, o.f, sandboxID(), func(ctx context.Context, s *session) (*api.Sandbox, error) {
		return s.Resume(ctx, o.ref, api.ResumeSandbox{TTL: o.until})
	})
}

// pauseText describes the pause of a sandbox, or is empty.
func pauseText(sb *api.Sandbox) string {
	p := sb.Pause
	if p == nil {
		return ""
	}
	text := string(p.Depth) + " since " + moment(p.At, ago)
	if p.Cause != "" {
		text += ", " + string(p.Cause)
	}
	if p.Left > 0 {
		text += ", " + p.Left.String() + " left to live"
	}
	if p.Snapshot != "" {
		text += ", saved as " + p.Snapshot
	}
	if p.Attempts > 0 {
		text += fmt.Sprintf(", %d resumes failed", p.Attempts)
	}
	return text
}

func restoredText(sb *api.Sandbox) string {
	if sb.RestoredFrom == "" {
		return ""
	}
	return sb.RestoredFrom + " (" + string(sb.RestoredAs) + ")"
}

func ttlText(d api.TTL) string {
	if d.Std() == sandboxer.TTLIdle {
		return sandboxer.TTLIdleText
	}
	return durationText(api.Duration(d))
}

func durationText(d api.Duration) string {
	if d == 0 {
		return ""
	}
	return sandboxer.FormatDuration(d.Std())
}
