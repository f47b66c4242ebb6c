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
	return newGroup("snapshot", "Save sandboxes, and look after what was saved", []string{"snapshots", "snap"},
		newCmdSnapshotCreate(f, nil), newCmdSnapshotLs(f, nil), newCmdSnapshotTree(f, nil), newCmdSnapshotGet(f, nil), newCmdSnapshotDiff(f, nil),
		newCmdSnapshotExport(f, nil), newCmdSnapshotImport(f, nil), newCmdSnapshotRm(f, nil), newCmdSnapshotAdopt(f, nil))
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
			unconfirmed := ""
			if s.Unconfirmed {
				unconfirmed = "the database went back to when it was being saved; kept until it is dropped"
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
				{"dropped", moment(s.DroppedAt, ago)}, {"unconfirmed", unconfirmed}, {"damaged", s.Damaged},
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

func newCmdSnapshotCreate(f *factory, runF func(context.Context, *snapshotCreateOptions) error) *cobra.Command {
	o := &snapshotCreateOptions{refOptions: refOptions{f: f}}
	var native, portable, both bool
	var ttl string
	c := &cobra.Command{
		Use: "create SANDBOX", Short: "Save a running sandbox, which goes on running",
		Long: "Save a running sandbox, which goes on running, and print the snapshot's ID once it is sealed: read back and verified.\n\n" +
			"A native snapshot is the extension's own: fast, perhaps with memory, restored by that extension alone. A portable one\n" +
			"keeps the workspace's files, which any extension can restore, and volumes where the sandbox was ordered so. Without a flag it is native where the extension can.",
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
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return snapshotCreateRun(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.StringVar(&o.req.Name, "name", "", "`name`, unique among your snapshots")
	fl.BoolVar(&native, "native", false, "the extension's own form")
	fl.BoolVar(&portable, "portable", false, "the workspace's files, for any extension")
	fl.BoolVar(&both, "both", false, "both forms")
	fl.StringVar(&ttl, "ttl", "", "drop it after this `duration`; without it never")
	return c
}

func snapshotCreateRun(ctx context.Context, o *snapshotCreateOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	snap, err := s.Snapshot(ctx, o.ref, o.req)
	if err != nil {
		return err
	}
	return printOne(o.f, snap, snapshotID())
}

type snapshotLsOptions struct {
	f *factory
	q api.SnapshotQuery
}

func (o *snapshotLsOptions) register(f *factory, c *cobra.Command) {
	fl := c.Flags()
	fl.StringVar(&o.q.Sandbox, "sandbox", "", "only of this `sandbox`")
	fl.BoolVarP(&o.q.All, "all", "a", false, "also those that the broker made for a pause or a fork")
	fl.StringVar(&o.q.Tenant, "tenant", "", "only of this `tenant`, for administrators")
	_ = c.RegisterFlagCompletionFunc("sandbox", f.completeSandboxes)
}

func newCmdSnapshotLs(f *factory, runF func(context.Context, *snapshotLsOptions) error) *cobra.Command {
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
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return snapshotLsRun(cmd.Context(), o)
		},
	}
	o.register(f, c)
	c.Flags().StringVar(&o.q.Parent, "parent", "", "only of sandboxes restored from this `snapshot`")
	c.Flags().StringArrayVar(&states, "state", nil, "only in this `state`; several with commas")
	pageFlags(c, &o.q.Limit, &o.q.Cursor)
	complete(c, "state", strings.Fields(join(sandboxer.SnapshotStates(), " "))...)
	_ = c.RegisterFlagCompletionFunc("parent", f.completeSnapshots)
	return c
}

func snapshotLsRun(ctx context.Context, o *snapshotLsOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	l, err := s.Snapshots(ctx, o.q)
	if err != nil {
		return err
	}
	return printList(o.f, pointers(l), snapshotView())
}

func newCmdSnapshotTree(f *factory, runF func(context.Context, *snapshotLsOptions) error) *cobra.Command {
	o := &snapshotLsOptions{f: f}
	c := &cobra.Command{
		Use: "tree", Short: "Show which snapshot came from which", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if runF != nil {
				return runF(cmd.Context(), o)
			}
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

func newCmdSnapshotGet(f *factory, runF func(context.Context, *refOptions) error) *cobra.Command {
	o := &refOptions{f: f}
	return &cobra.Command{
		Use: "get SNAPSHOT", Aliases: []string{"show", "inspect"}, Short: "Show a snapshot",
		Args: wants(1, 1, "one snapshot: its ID, the beginning of it, or its name"), ValidArgsFunction: f.completeSnapshot,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return snapshotGetRun(cmd.Context(), o)
		},
	}
}

func snapshotGetRun(ctx context.Context, o *refOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	snap, err := s.GetSnapshot(ctx, o.ref)
	if err != nil {
		return err
	}
	return printOne(o.f, snap, snapshotView())
}

type snapshotDiffOptions struct {
	f             *factory
	before, after string
}

func newCmdSnapshotDiff(f *factory, runF func(context.Context, *snapshotDiffOptions) error) *cobra.Command {
	o := &snapshotDiffOptions{f: f}
	return &cobra.Command{
		Use: "diff BEFORE AFTER", Short: "Compare the files of two portable snapshots", Args: wants(2, 2, "two snapshots"),
		ValidArgsFunction: f.completeSnapshots,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.before, o.after = args[0], args[1]
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return snapshotDiffRun(cmd.Context(), o)
		},
	}
}

func snapshotDiffRun(ctx context.Context, o *snapshotDiffOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	d, err := s.DiffSnapshots(ctx, o.before, o.after)
	if err != nil {
		return err
	}
	l := pointers(&api.List[api.SnapshotChange]{SchemaVersion: d.SchemaVersion, Items: d.Items})
	return printList(o.f, l, view[*api.SnapshotChange]{
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
	})
}

type snapshotFileOptions struct {
	refOptions
	file          string
	name, profile string
	accept        []string
}

func newCmdSnapshotExport(f *factory, runF func(context.Context, *snapshotFileOptions) error) *cobra.Command {
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
			if runF != nil {
				return runF(cmd.Context(), o)
			}
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
	// What breaks off must not look like a whole export.
	tmp, err := os.CreateTemp(filepath.Dir(o.file), "."+filepath.Base(o.file)+"-*")
	if err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "%s cannot be written", o.file)
	}
	defer os.Remove(tmp.Name())
	if _, err := io.Copy(tmp, r); err != nil {
		return errors.Join(err, tmp.Close())
	}
	if err := errors.Join(tmp.Chmod(0o600), tmp.Sync(), tmp.Close()); err != nil {
		return sandboxer.E(sandboxer.Exhausted, err, "%s cannot be written", o.file)
	}
	if err := wholefile.Publish(tmp.Name(), o.file); err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "%s cannot be written", o.file)
	}
	return nil
}

func newCmdSnapshotImport(f *factory, runF func(context.Context, *snapshotFileOptions) error) *cobra.Command {
	o := &snapshotFileOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "import FILE", Short: "Make a snapshot of an exported file", Args: wants(1, 1, "one file, or - for the standard input"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.file = args[0]
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return snapshotImportRun(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.StringVar(&o.name, "name", "", "`name`, unique among your snapshots")
	fl.StringVar(&o.profile, "profile", "", "`profile` to restore it on, where the one it was made of does not exist here")
	fl.StringArrayVar(&o.accept, "accept", nil, "trust this `signer` for once, as the refusal names it")
	_ = c.RegisterFlagCompletionFunc("profile", f.completeProfiles)
	return c
}

func snapshotImportRun(ctx context.Context, o *snapshotFileOptions) error {
	in := io.Reader(o.f.io.in)
	if o.file != "-" {
		file, err := os.Open(o.file)
		if err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "%s cannot be read", o.file)
		}
		defer file.Close()
		in = file
	}
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	snap, err := s.ImportSnapshot(ctx, o.name, o.profile, o.accept, in)
	if err != nil {
		return err
	}
	return printOne(o.f, snap, snapshotID())
}

type snapshotRmOptions struct {
	f    *factory
	refs []string
}

func newCmdSnapshotRm(f *factory, runF func(context.Context, *snapshotRmOptions) error) *cobra.Command {
	o := &snapshotRmOptions{f: f}
	return &cobra.Command{
		Use: "rm SNAPSHOT…", Aliases: []string{"drop", "delete"}, Short: "Drop snapshots; what was restored from them lives on",
		Args: wants(1, -1, "one or more snapshots"), ValidArgsFunction: f.completeSnapshots,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.refs = args
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return snapshotRmRun(cmd.Context(), o)
		},
	}
}

func snapshotRmRun(ctx context.Context, o *snapshotRmOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	l := &api.List[*api.Snapshot]{SchemaVersion: api.SchemaVersion, Items: []*api.Snapshot{}}
	var failed error
	for _, ref := range o.refs {
		snap, err := s.DropSnapshot(ctx, ref)
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		l.Items = append(l.Items, snap)
	}
	if len(o.refs) == 1 && failed == nil {
		return printOne(o.f, l.Items[0], snapshotID())
	}
	switch format := o.f.format(); {
	case format == "table" || format == "wide":
		for _, snap := range l.Items {
			if err := printOne(o.f, snap, snapshotID()); err != nil {
				return err
			}
		}
	case len(l.Items) > 0:
		if err := printList(o.f, l, snapshotView()); err != nil {
			return err
		}
	}
	return failed
}

type snapshotAdoptOptions struct {
	refOptions
	adopt api.AdoptSnapshot
}

func newCmdSnapshotAdopt(f *factory, runF func(context.Context, *snapshotAdoptOptions) error) *cobra.Command {
	o := &snapshotAdoptOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "adopt ID", Short: "Make a record anew for a snapshot that the database lost", Args: wants(1, 1, "one snapshot"),
		Long: "After a restored backup, or lost writes, snapshots that are younger than the database are kept and named by\n" +
			"'sandboxer audit', those that sandboxes were paused to as well. Adopt one, and it can be restored. Whose it is and what it was\n" +
			"made from is in the stamp of a native one; a portable one needs --tenant. 'sandboxer snapshot rm ID' drops one instead.",
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return snapshotAdoptRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.adopt.Name, "name", "", "`name`, unique among the tenant's snapshots")
	c.Flags().StringVar(&o.adopt.Tenant, "tenant", "", "whose it becomes, if it has no stamp: a `tenant`")
	c.Flags().StringVar(&o.adopt.Profile, "profile", "", "what it was made from, if it does not say: a `profile`")
	_ = c.RegisterFlagCompletionFunc("profile", f.completeProfiles)
	return c
}

func snapshotAdoptRun(ctx context.Context, o *snapshotAdoptOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	snap, err := s.AdoptSnapshot(ctx, o.ref, o.adopt)
	if err != nil {
		return err
	}
	o.f.progress().done("%s is tenant %s's", snap.ID, snap.Tenant)
	return printOne(o.f, snap, snapshotID())
}

type restoreOptions struct {
	refOptions
	order  requestOptions
	kind   string
	detach bool

	req api.RestoreSnapshot // what the flags ask for (build)
}

func newCmdRestore(f *factory, runF func(context.Context, *restoreOptions) error) *cobra.Command {
	o := &restoreOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "restore SNAPSHOT", Short: "Make a sandbox from a snapshot",
		Long: "Make a sandbox from a snapshot and print its ID. It has an ID, a time to live and labels of its own; its environment is\n" +
			"the source's, with what --env adds. On a profile of another extension, and with other inputs or on another host than its\n" +
			"source, the portable form is restored.",
		Args: wants(1, 1, "one snapshot"), ValidArgsFunction: f.completeSnapshot,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if err := o.build(); err != nil {
				return err
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return restoreRun(cmd.Context(), o)
		},
	}
	fl, or := c.Flags(), &o.order
	fl.StringVar(&or.profile, "profile", "", "another `profile` to restore on")
	fl.StringVar(&o.kind, "kind", "", "restore this `form`: native or portable")
	fl.StringArrayVar(&or.inputs, "input", nil, "another argument `key=value` than the source's, or key= for none; a local directory is made absolute")
	fl.StringVar(&or.host, "host", "", "`place` among those the extension has")
	or.env.bind(fl)
	fl.StringArrayVar(&or.labels, "label", nil, "label `key=value`")
	fl.StringVar(&or.name, "name", "", "`name`, unique among your live sandboxes")
	fl.StringVar(&or.ttl, "ttl", "", "`lifetime`: 30m, 1h30m, 2d, or idle: as long as it is used")
	or.registerIdle(c)
	fl.StringVar(&or.maxCost, "max-cost", "", "refuse if it would cost more `credits` (SANDBOXER_MAX_COST)")
	fl.StringVar(&or.consumer, "consumer", "", "`who` asks: a person, an agent, a service")
	fl.StringVar(&or.consumerKind, "consumer-kind", "", "`kind` of the consumer: agent, ci, user")
	fl.StringArrayVar(&or.consumerMeta, "consumer-meta", nil, "more about the consumer: `key=value`")
	fl.StringVar(&or.key, "idempotency-key", "", "one `key` makes one sandbox, however often it is sent")
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

func newCmdFork(f *factory, runF func(context.Context, *forkOptions) error) *cobra.Command {
	o := &forkOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "fork ID", Short: "Make copies of a running sandbox, which goes on running",
		Long: "Make copies of a running sandbox, which goes on running: its files, and its processes where the extension saves memory.\n" +
			"All copies are made, or none.",
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
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return forkRun(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.IntVarP(&o.count, "count", "n", 1, "how `many`, 1 to 100")
	fl.StringArrayVarP(&o.order.env.vars, "env", "e", nil, "environment `NAME=value`, or NAME to pass on yours")
	fl.StringArrayVar(&o.order.labels, "label", nil, "label `key=value`")
	fl.StringVar(&o.order.ttl, "ttl", "", "`lifetime` of each: 30m, 1h30m, 2d, or idle: as long as it is used")
	fl.StringVar(&o.key, "idempotency-key", "", "one `key` makes one set of copies, however often it is used")
	fl.StringVar(&o.order.maxCost, "max-cost", "", "refuse if one would cost more `credits` (SANDBOXER_MAX_COST)")
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

func newCmdPause(f *factory, runF func(context.Context, *pauseOptions) error) *cobra.Command {
	o := &pauseOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "pause ID", Short: "Pause a running sandbox: it costs nothing until it is resumed",
		Long: "Pause a running sandbox. It keeps its ID and its place; running time and the time to live stop.\n\n" +
			"  freeze  its processes stand still, its memory stays occupied: instant\n" +
			"  disk    memory and files are saved, its memory is given back\n" +
			"  files   files are saved, its processes end",
		Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if d := sandboxer.PauseDepth(o.depth); d != "" && !slices.Contains(sandboxer.PauseDepths(), d) {
				return invalid("--depth: %q is not a depth of pausing", o.depth).WithHint("the depths are: %s", join(sandboxer.PauseDepths(), ", "))
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return pauseRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.depth, "depth", "", "`how` deep: freeze, disk or files; without it as the profile says, or what the extension can")
	complete(c, "depth", strings.Fields(join(sandboxer.PauseDepths(), " "))...)
	return c
}

func pauseRun(ctx context.Context, o *pauseOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	sb, err := s.Pause(ctx, o.ref, api.PauseSandbox{Depth: sandboxer.PauseDepth(o.depth)})
	if err != nil {
		return err
	}
	return printOne(o.f, sb, sandboxID())
}

func newCmdResume(f *factory, runF func(context.Context, *pauseOptions) error) *cobra.Command {
	o := &pauseOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "resume ID", Short: "Let a paused sandbox go on", Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			if o.ttl != "" {
				d, err := parseDuration("--ttl", o.ttl)
				if err != nil {
					return err
				}
				o.until = d
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return resumeRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.ttl, "ttl", "", "`lifetime` from now; without it what was left goes on")
	return c
}

func resumeRun(ctx context.Context, o *pauseOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	sb, err := s.Resume(ctx, o.ref, api.ResumeSandbox{TTL: o.until})
	if err != nil {
		return err
	}
	return printOne(o.f, sb, sandboxID())
}

func (f *factory) completeSnapshot(cmd *cobra.Command, args []string, toComplete string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return f.completeSnapshots(cmd, args, toComplete)
}

func (f *factory) completeSnapshots(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(context.Background(), completeWithin)
	defer cancel()
	s, err := f.connect(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer s.close()
	l, err := s.Snapshots(ctx, api.SnapshotQuery{})
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []cobra.Completion
	for _, snap := range l.Items {
		about := string(snap.Kind) + " of " + snap.SandboxID
		for _, word := range []string{snap.ID, snap.Name} {
			if word != "" && !slices.Contains(args, word) {
				out = append(out, cobra.CompletionWithDesc(word, about))
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// pauseText says how a sandbox stands still, or nothing.
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
