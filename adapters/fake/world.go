package fake

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// world is what the extension needs of the thing behind it. World implements it in
// this process, Remote in another. Every method takes and returns plain data.
type world interface {
	fault(context.Context, faultQuery) (Fault, error)
	create(context.Context, createRequest) (Object, error)
	find(context.Context, query) (Object, error)
	remove(context.Context, query) ([]Object, error)
	list(context.Context, listing) ([]Object, error)
	save(context.Context, saving) (sandboxer.Snapshot, error)
	drop(context.Context, dropping) (none, error)
	saves(ctx context.Context, owner string) ([]sandboxer.FoundSnapshot, error)
	unreachable(ctx context.Context, hosts []string) ([]string, error)
	news(context.Context, newsQuery) (news, error)
	pause(context.Context, pausing) (none, error)
	renew(context.Context, renewal) (none, error)
	network(context.Context, rewiring) (none, error)
	claim(context.Context, claim) (Object, error)
	spend(context.Context, spending) (none, error)
	oomKill(ctx context.Context, id string) (none, error)
	agent(context.Context, agentQuery) (socket string, err error)
}

type (
	none       struct{}
	faultQuery struct {
		Verb Verb
		ID   string
	}
	// createRequest is what create gets. Env and Stamp travel apart, because a Spec keeps its own
	// out of JSON.
	createRequest struct {
		Spec     sandboxer.Spec
		Env      map[string]string
		Stamp    []byte
		Host     string
		Snapshot string
		From     string // directory with what a checkpoint held
		Capacity int
		Mounts   mounts.Settings
		Own      []string // the broker's own directories
		Late     time.Duration
		Twice    bool
	}
	// query names a sandbox: of any owner if that is empty, and of any generation (the
	// newest, where there must be one) if that is 0. It is looked for on Host, or else on
	// all, and not found for certain only if those of Hosts that count can be reached.
	query struct {
		Owner, ID  string
		Generation int
		Host       string
		Hosts      []string
		Use        bool // make its directory if nobody did so far
	}
	listing struct {
		Owner string
		Lag   time.Duration
	}
	saving struct {
		Of query
		ID string
	}
	dropping struct{ Owner, ID string }
	// newsQuery asks for what happened after the entry After of the log, or for the last entry there is if that
	// is negative.
	newsQuery struct {
		Owner string
		After int
	}
	news struct {
		IDs  []string
		Last int // entry of the log
	}
	pausing struct {
		Of query
		On bool
	}
	rewiring struct {
		Of     query
		Policy sandboxer.NetworkPolicy
	}
	claim struct {
		Of    query
		Spec  sandboxer.Spec
		Env   map[string]string
		Stamp []byte
	}
	renewal struct {
		Of    query
		Until time.Time
	}
	spending struct {
		Of  query
		CPU time.Duration
	}
)

// Object is one sandbox as the world knows it.
type Object struct {
	Ref       string            `json:"ref"` // sandboxer.ExternalName, and a suffix for a duplicate
	Spec      sandboxer.Spec    `json:"spec"`
	Env       map[string]string `json:"env,omitempty"`
	Host      string            `json:"host"`
	Dir       string            `json:"dir"` // its root directory; made when first used
	CreatedAt time.Time         `json:"created_at"`
	RemovedAt time.Time         `json:"removed_at,omitzero"`
	Fuse      time.Time         `json:"fuse,omitzero"`
	Paused    bool              `json:"paused,omitempty"`
	Exited    string            `json:"exited,omitempty"` // how the main process ended; empty while it runs
	OOMKilled bool              `json:"oom_killed,omitempty"`
	CPU       time.Duration     `json:"cpu,omitempty"`     // of finished commands
	Claimed   string            `json:"claimed,omitempty"` // by which order; it may have failed midway
	Stamp     []byte            `json:"stamp,omitempty"`
	Agent     string            `json:"agent,omitempty"`  // the socket of its agent; empty while none runs
	Mounts    *Namespace        `json:"mounts,omitempty"` // where what it mounts is seen; nil where it mounts nothing

	used bool
}

// A Namespace is a mount namespace.
type Namespace struct {
	Path  string `json:"path"`  // by which every process of this machine opens it
	Inode uint64 `json:"inode"` // which it has then; else it is another

	file *os.File // by which the world keeps it
}

// key names the object in the world: Ref does on its host.
func (o Object) key() string { return o.Ref + "@" + o.Host }

func (o Object) handle() sandboxer.Handle {
	return sandboxer.Handle{SandboxID: o.Spec.ID, Generation: o.Spec.Generation, Host: o.Host, Ref: o.Ref}
}

// inner is the workspace's path as the sandbox calls it.
func (o Object) inner() string {
	if o.Spec.Workspace != "" {
		return o.Spec.Workspace
	}
	return "/workspace"
}

// workspace is the same on the machine.
func (o Object) workspace() string { return filepath.Join(o.Dir, o.inner()) }

// World holds sandboxes: an engine, a cluster, an account of a hosted service. Its
// methods are safe for concurrent use. Live, Log, Inject, Forgive and Kill are for
// tests.
type World struct {
	faults *faults
	wg     sync.WaitGroup // late creations and main processes
	stop   chan struct{}

	mu        sync.Mutex // one thing happens at a time
	closed    bool
	base      string // directory of everything; made when first used
	made      int
	agents    int
	objects   map[string]*Object // by key
	byID      map[string][]*Object
	removed   []Object  // not long ago, for listings that lag
	burnsAt   time.Time // the earliest fuse; zero if none
	snapshots map[string]saved
	away      map[string]bool // hosts that cannot be reached
	log       []Entry
	logged    chan struct{} // closed with the next entry of the log
	file      *os.File      // of the durable log; nil without
}

// NewWorld returns an empty world. Close it if commands or files are used in it.
func NewWorld() *World {
	return &World{
		faults:    newFaults(nil),
		stop:      make(chan struct{}),
		base:      filepath.Join(os.TempDir(), "sandboxer-fake-"+strings.ToLower(rand.Text())),
		objects:   map[string]*Object{},
		byID:      map[string][]*Object{},
		snapshots: map[string]saved{},
		away:      map[string]bool{},
		logged:    make(chan struct{}),
	}
}

// saved is a snapshot as the world keeps it.
type saved struct {
	sandboxer.Snapshot
	owner      string
	of         string
	generation int
	stamp      []byte
}

// Snapshots returns the IDs of the snapshots there are.
func (w *World) Snapshots() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Sorted(maps.Keys(w.snapshots))
}

// Close destroys everything in the world.
func (w *World) Close() error {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return nil
	}
	w.closed = true
	close(w.stop)
	var errs []error
	for _, o := range w.sorted() {
		errs = append(errs, w.destroy(o, "close"))
	}
	errs = append(errs, os.RemoveAll(w.base))
	if w.file != nil {
		errs = append(errs, w.file.Close())
	}
	w.mu.Unlock()
	w.wg.Wait()
	return errors.Join(errs...)
}

// Live returns what exists, oldest first.
func (w *World) Live() []Object {
	found, _ := w.list(context.Background(), listing{})
	return found
}

// Inject makes things go wrong from now on.
func (w *World) Inject(faults ...Fault) { w.faults.add(faults...) }

// Forgive takes back what Inject did and no call has met yet.
func (w *World) Forgive() { w.faults.clear() }

// SetAway has a host be out of reach, or back. What is on it goes on.
func (w *World) SetAway(host string, away bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.away[host] = away
}

// unreachable returns those of the hosts that cannot be reached.
func (w *World) unreachable(_ context.Context, hosts []string) ([]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.outOfReach(hosts), nil
}

func (w *World) outOfReach(hosts []string) (names []string) {
	for _, h := range hosts {
		if w.away[h] {
			names = append(names, h)
		}
	}
	return names
}

// reach fails if one of the hosts that q is about cannot be reached.
func (w *World) reach(q query) error {
	hosts := q.Hosts
	if q.Host != "" {
		hosts = []string{q.Host}
	}
	if names := w.outOfReach(hosts); len(names) > 0 {
		return hostAway(names)
	}
	return nil
}

func hostAway(names []string) *sandboxer.Error {
	return sandboxer.E(sandboxer.Unavailable, nil, "host %s cannot be reached", strings.Join(names, ", ")).WithHint("bring it back")
}

// Kill removes sandbox id, of every generation, as if it had crashed.
func (w *World) Kill(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range slices.Clone(w.byID[id]) {
		w.destroy(o, OpKill)
	}
}

// OOMKill ends sandbox id, of every generation, as a memory limit would: its processes
// are killed, and what remains of it tells why.
func (w *World) OOMKill(id string) error {
	_, err := w.oomKill(context.Background(), id)
	return err
}

func (w *World) oomKill(_ context.Context, id string) (none, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range w.byID[id] {
		o.OOMKilled = true
		if err := kill(o.cookie()); o.used && err != nil {
			return none{}, err
		}
		if err := w.note(w.entry(o, OpOOMKill)); err != nil {
			return none{}, err
		}
	}
	return none{}, nil
}

// newsTime is how long news waits for some: less than remoteTime.
const newsTime = 5 * time.Second

func (w *World) news(ctx context.Context, q newsQuery) (n news, err error) {
	timer := time.NewTimer(newsTime)
	defer timer.Stop()
	for {
		w.mu.Lock()
		n.Last = len(w.log)
		if q.After >= 0 {
			for _, e := range w.log[min(q.After, len(w.log)):] {
				if e.Owner == q.Owner && e.SandboxID != "" && slices.Contains(newsworthy, e.Op) && !slices.Contains(n.IDs, e.SandboxID) {
					n.IDs = append(n.IDs, e.SandboxID)
				}
			}
		}
		logged := w.logged
		w.mu.Unlock()
		if q.After < 0 || len(n.IDs) > 0 {
			return n, nil
		}
		select {
		case <-logged:
		case <-timer.C:
			return n, nil
		case <-ctx.Done():
			return n, ctx.Err()
		case <-w.stop:
			return n, sandboxer.E(sandboxer.Unavailable, nil, "the fake world has ended")
		}
	}
}

// newsworthy is what Notify tells of.
var newsworthy = []Op{OpKill, OpOOMKill, OpFuse, OpRemove, OpPause, OpResume}

func (w *World) fault(_ context.Context, q faultQuery) (Fault, error) {
	f, ok := w.faults.take(q.Verb, q.ID)
	if !ok {
		return f, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return f, w.note(Entry{Op: OpFault, SandboxID: q.ID, Note: string(q.Verb)})
}

func (w *World) create(_ context.Context, or createRequest) (Object, error) {
	or.Spec.Env = or.Env
	if or.Late > 0 {
		w.wg.Go(func() {
			select {
			case <-time.After(or.Late):
			case <-w.stop:
				return
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			w.make(or, OpLate)
		})
		return Object{}, sandboxer.E(sandboxer.Unavailable, nil, "the fake was told to lose the answer")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	o, err := w.make(or, OpCreate)
	if err == nil && or.Twice {
		_, err = w.add(or, o.Ref+"-again", OpCreate)
	}
	return o, err
}

// make finds the object of or, or adds it.
func (w *World) make(or createRequest, op Op) (Object, error) {
	w.burn()
	if w.away[or.Host] {
		err := hostAway([]string{or.Host})
		err.Untouched = true
		return Object{}, err
	}
	ref := sandboxer.ExternalName(or.Spec.Owner, or.Spec.ID, or.Spec.Generation)
	if o, ok := w.objects[Object{Ref: ref, Host: or.Host}.key()]; ok {
		return *o, w.note(w.entry(o, OpFound))
	}
	if or.Capacity > 0 && len(w.objects) >= or.Capacity {
		return Object{}, sandboxer.E(sandboxer.Exhausted, nil, "the fake is full: it takes %d sandboxes", or.Capacity)
	}
	return w.add(or, ref, op)
}

func (w *World) add(or createRequest, ref string, op Op) (Object, error) {
	if w.closed {
		return Object{}, sandboxer.E(sandboxer.Unavailable, nil, "the fake world has ended")
	}
	w.made++
	o := &Object{
		Ref: ref, Spec: or.Spec, Env: maps.Clone(or.Env), Host: or.Host, CreatedAt: time.Now(), Fuse: or.Spec.Fuse, Stamp: or.Stamp,
		Dir: filepath.Join(w.base, fmt.Sprintf("%s.%d", ref, w.made)),
	}
	if err := w.populate(o, or); err != nil {
		return Object{}, errors.Join(err, w.clear(o))
	}
	w.objects[o.key()] = o
	w.byID[o.Spec.ID] = append(w.byID[o.Spec.ID], o)
	w.fuse(o)
	return *o, w.note(w.entry(o, op))
}

// populate gives o what its spec asks for besides an empty directory.
func (w *World) populate(o *Object, or createRequest) error {
	snapshot, from := or.Snapshot, or.From
	if snapshot != "" {
		if s, ok := w.snapshots[snapshot]; !ok || s.owner != o.Spec.Owner {
			return sandboxer.E(sandboxer.NotFound, nil, "there is no snapshot %s", snapshot)
		}
		if _, err := copyTree(w.snapshotDir(snapshot), o.Dir); err != nil {
			return sandboxer.E(sandboxer.Failed, err, "snapshot %s could not be copied", snapshot)
		}
	}
	if from != "" {
		if err := moveIn(from, o); err != nil {
			return sandboxer.E(sandboxer.Failed, err, "the checkpoint could not be put in place")
		}
	}
	if err := o.mounted(mounts.Opener{Settings: or.Mounts, Extension: "the fake", Own: or.Own}); err != nil {
		return err
	}
	if o.Spec.Warm {
		return nil
	}
	if repo := o.Spec.Inputs["repo"]; repo != "" && snapshot == "" && from == "" {
		if err := o.use(); err != nil {
			return err
		}
		if _, err := copyTree(repo, o.workspace()); err != nil {
			return sandboxer.E(sandboxer.Failed, err, "input repo: %s could not be copied", repo)
		}
		if uid, gid, ok := o.user(); ok {
			if err := filepath.WalkDir(o.workspace(), func(name string, _ fs.DirEntry, err error) error {
				return errors.Join(err, os.Lchown(name, uid, gid))
			}); err != nil {
				return sandboxer.E(sandboxer.Failed, err, "the copy of %s could not be given to %s", repo, o.Spec.User)
			}
		}
	}
	if len(o.Spec.Command) == 0 {
		return nil
	}
	if err := o.use(); err != nil {
		return err
	}
	c, err := newCommand(*o, sandboxer.Cmd{Args: o.Spec.Command})
	if se := (*sandboxer.StartError)(nil); errors.As(err, &se) {
		return sandboxer.E(sandboxer.Failed, se, "the main command could not be started: %v", se)
	}
	if err != nil {
		return err
	}
	if err := c.start(); err != nil {
		return sandboxer.E(sandboxer.Failed, err, "the main command %q could not be started", o.Spec.Command[0])
	}
	w.wg.Go(func() {
		exit := c.wait()
		w.mu.Lock()
		defer w.mu.Unlock()
		o.Exited = fmt.Sprintf("exit %d", exit.Code)
		o.CPU += c.cpu()
	})
	return nil
}

// use makes the directory of o.
func (o *Object) use() error {
	if o.used {
		return nil
	}
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		return sandboxer.E(sandboxer.Unsupported, err, "the fake runs commands on Linux only: it knows its processes by /proc")
	}
	// A command may run as another user: it must be able to pass and to write.
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the fake cannot make a directory")
	}
	for _, dir := range []string{filepath.Dir(o.Dir), o.Dir} {
		if err := os.Chmod(dir, 0o755); err != nil {
			return err
		}
	}
	fresh := false
	if _, err := os.Stat(o.workspace()); err != nil {
		fresh = true
	}
	if err := os.MkdirAll(o.workspace(), 0o755); err != nil {
		return err
	}
	if v := o.Spec.Inputs["volume"]; v != "" {
		if err := os.MkdirAll(filepath.Join(o.Dir, "volumes", v), 0o755); err != nil {
			return err
		}
	}
	o.used = true
	if fresh {
		return os.Chmod(o.workspace(), 0o777)
	}
	return nil
}

func (w *World) find(_ context.Context, q query) (Object, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.burn()
	o, err := w.newest(q)
	if err != nil {
		return Object{}, err
	}
	if q.Use && o.OOMKilled {
		return *o, sandboxer.E(sandboxer.NotFound, nil, "sandbox %s used more memory than its limit and was killed", q.ID)
	}
	if q.Use {
		err = o.use()
	}
	return *o, err
}

// newest returns what q names, the highest generation if there are several.
func (w *World) newest(q query) (*Object, error) {
	all := w.matching(q)
	if len(all) == 0 {
		if err := w.reach(q); err != nil {
			return nil, err
		}
		return nil, sandboxer.E(sandboxer.NotFound, nil, "there is no sandbox %s", q.ID)
	}
	return slices.MaxFunc(all, func(a, b *Object) int { return a.Spec.Generation - b.Spec.Generation }), nil
}

func (w *World) matching(q query) (found []*Object) {
	for _, o := range w.byID[q.ID] {
		if (q.Owner == "" || o.Spec.Owner == q.Owner) && (q.Generation == 0 || o.Spec.Generation == q.Generation) &&
			(q.Host == "" || o.Host == q.Host) && !w.away[o.Host] {
			found = append(found, o)
		}
	}
	return found
}

func (w *World) remove(_ context.Context, q query) (removed []Object, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.matching(q)
	for _, o := range all {
		if err := w.destroy(o, OpRemove); err != nil {
			return removed, err
		}
		removed = append(removed, *o)
	}
	if err := w.reach(q); err != nil {
		return removed, err
	}
	if len(all) == 0 {
		return nil, w.note(Entry{Op: OpAbsent, Owner: q.Owner, SandboxID: q.ID, Generation: q.Generation})
	}
	return removed, nil
}

// destroy ends o's processes, removes its files and forgets it.
func (w *World) destroy(o *Object, op Op) error {
	if err := w.clear(o); err != nil {
		return err
	}
	delete(w.objects, o.key())
	w.byID[o.Spec.ID] = slices.DeleteFunc(w.byID[o.Spec.ID], func(p *Object) bool { return p == o })
	if len(w.byID[o.Spec.ID]) == 0 {
		delete(w.byID, o.Spec.ID)
	}
	o.RemovedAt = time.Now()
	for len(w.removed) > 0 && time.Since(w.removed[0].RemovedAt) > time.Hour {
		w.removed = w.removed[1:]
	}
	w.removed = append(w.removed, *o)
	return w.note(w.entry(o, op))
}

func (w *World) clear(o *Object) error {
	if !o.used {
		return nil
	}
	if err := kill(o.cookie()); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "processes of %s cannot be ended", o.Ref)
	}
	o.unmount()
	if err := os.RemoveAll(o.Dir); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the files of %s cannot be removed", o.Ref)
	}
	return nil
}

// burn destroys what is past its fuse.
func (w *World) burn() {
	now := time.Now()
	if w.burnsAt.IsZero() || now.Before(w.burnsAt) {
		return
	}
	w.burnsAt = time.Time{}
	for _, o := range w.sorted() {
		if o.Fuse.IsZero() || now.Before(o.Fuse) || w.destroy(o, OpFuse) != nil {
			w.fuse(o)
		}
	}
}

// fuse takes note of when o burns.
func (w *World) fuse(o *Object) {
	if !o.Fuse.IsZero() && (w.burnsAt.IsZero() || o.Fuse.Before(w.burnsAt)) {
		w.burnsAt = o.Fuse
	}
}

// sorted returns the live objects, oldest first.
func (w *World) sorted() []*Object {
	return slices.SortedFunc(maps.Values(w.objects), func(a, b *Object) int {
		if c := a.CreatedAt.Compare(b.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.Ref, b.Ref)
	})
}

func (w *World) list(_ context.Context, l listing) (found []Object, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.burn()
	asOf := time.Now().Add(-l.Lag)
	for _, o := range w.sorted() {
		if (l.Owner == "" || o.Spec.Owner == l.Owner) && !o.CreatedAt.After(asOf) && (l.Owner == "" || !w.away[o.Host]) {
			found = append(found, *o)
		}
	}
	for _, o := range w.removed {
		if (l.Owner == "" || o.Spec.Owner == l.Owner) && !o.CreatedAt.After(asOf) && o.RemovedAt.After(asOf) && !w.away[o.Host] {
			found = append(found, o)
		}
	}
	if l.Owner == "" {
		return found, nil // a test looks
	}
	return found, w.note(Entry{Op: OpList, Owner: l.Owner, Live: len(found)})
}

func (w *World) snapshotDir(id string) string { return filepath.Join(w.base, "snapshots", id) }

func (w *World) save(_ context.Context, s saving) (sandboxer.Snapshot, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if filepath.Base(s.ID) != s.ID || s.ID == "." || s.ID == ".." {
		return sandboxer.Snapshot{}, sandboxer.E(sandboxer.Invalid, nil, "%q is not a snapshot ID", s.ID)
	}
	if old, ok := w.snapshots[s.ID]; ok {
		return old.Snapshot, nil
	}
	w.burn()
	o, err := w.newest(s.Of)
	if err != nil {
		return sandboxer.Snapshot{}, err
	}
	if err := o.use(); err != nil {
		return sandboxer.Snapshot{}, err
	}
	if !o.Paused {
		defer thaw(o.cookie())
		if err := freeze(o.cookie()); err != nil {
			return sandboxer.Snapshot{}, err
		}
	}
	dir := w.snapshotDir(s.ID)
	n, err := copyTree(o.Dir, dir)
	if err != nil {
		os.RemoveAll(dir)
		return sandboxer.Snapshot{}, sandboxer.E(sandboxer.Unavailable, err, "the files of %s could not be copied", o.Ref)
	}
	snap := sandboxer.Snapshot{SnapshotID: s.ID, Bytes: n, Quiesced: true}
	w.snapshots[s.ID] = saved{snap, o.Spec.Owner, o.Spec.ID, o.Spec.Generation, o.Stamp}
	e := w.entry(o, OpSnapshot)
	e.Note = s.ID
	return snap, w.note(e)
}

func (w *World) saves(_ context.Context, owner string) (found []sandboxer.FoundSnapshot, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(w.snapshots)) {
		if s := w.snapshots[id]; s.owner == owner {
			found = append(found, sandboxer.FoundSnapshot{Snapshot: s.Snapshot, Whole: true, SandboxID: s.of, Generation: s.generation, Stamp: s.stamp})
		}
	}
	return found, nil
}

func (w *World) drop(_ context.Context, d dropping) (none, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s, ok := w.snapshots[d.ID]
	if !ok || d.Owner != "" && d.Owner != s.owner {
		return none{}, nil
	}
	if err := os.RemoveAll(w.snapshotDir(d.ID)); err != nil {
		return none{}, sandboxer.E(sandboxer.Unavailable, err, "the snapshot %s cannot be removed", d.ID)
	}
	delete(w.snapshots, d.ID)
	return none{}, w.note(Entry{Op: OpDrop, Owner: s.owner, Note: d.ID})
}

func (w *World) pause(_ context.Context, p pausing) (none, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.burn()
	o, err := w.newest(p.Of)
	if err != nil || o.Paused == p.On {
		return none{}, err
	}
	does, op := thaw, OpResume
	if p.On {
		does, op = freeze, OpPause
	}
	if err := does(o.cookie()); err != nil {
		return none{}, err
	}
	o.Paused = p.On
	return none{}, w.note(w.entry(o, op))
}

func (w *World) renew(_ context.Context, r renewal) (none, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.burn()
	o, err := w.newest(r.Of)
	if err != nil {
		return none{}, err
	}
	o.Fuse = r.Until
	w.fuse(o)
	return none{}, w.note(w.entry(o, OpRenew))
}

func (w *World) claim(_ context.Context, c claim) (Object, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.burn()
	o, err := w.newest(c.Of)
	if err != nil {
		return Object{}, err
	}
	c.Spec.Env = c.Env
	by := c.Spec.ClaimDigest()
	switch {
	case o.Claimed != "" && o.Claimed != by, o.Claimed == "" && !o.Spec.Warm:
		return Object{}, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is not a warm one", o.Ref)
	case o.Claimed == by && o.Spec.Warm:
		return Object{}, sandboxer.E(sandboxer.Unavailable, nil, "sandbox %s was not claimed to the end", o.Ref)
	case o.Claimed == by:
		return *o, w.note(w.entry(o, OpFound))
	}
	if !slices.Equal(o.Spec.Mounts, c.Spec.Mounts) || o.Mounts != nil && o.Spec.User != c.Spec.User {
		return Object{}, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s was made for other mounts", o.Ref)
	}
	o.Claimed = by
	fuse := o.Fuse
	warm := o.Spec
	o.Spec, o.Env, o.Fuse, o.Stamp = c.Spec, maps.Clone(c.Env), c.Spec.Fuse, c.Stamp
	if !fuse.IsZero() && fuse.Before(o.Fuse) {
		w.fuse(o)
	}
	if err := w.populate(o, createRequest{}); err != nil {
		o.Spec = warm
		return Object{}, err
	}
	return *o, w.note(w.entry(o, OpClaim))
}

func (w *World) network(_ context.Context, r rewiring) (none, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.burn()
	o, err := w.newest(r.Of)
	if err != nil {
		return none{}, err
	}
	o.Spec.Network = r.Policy
	return none{}, w.note(w.entry(o, OpNetwork))
}

func (w *World) spend(_ context.Context, s spending) (none, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	o, err := w.newest(s.Of)
	if err == nil {
		o.CPU += s.CPU
	}
	return none{}, err
}

// Op is what an Entry of the log tells of.
type Op string

// The entries of the log.
const (
	OpStart    Op = "start"    // the world began (its log may be older)
	OpCreate   Op = "create"   // an object came to be
	OpLate     Op = "late"     // the same, by a Late fault
	OpFound    Op = "found"    // a request met what it had made before
	OpRemove   Op = "remove"   // an object was removed by teardown
	OpKill     Op = "kill"     // … by World.Kill
	OpFuse     Op = "fuse"     // … by its fuse
	OpOOMKill  Op = "oom_kill" // its processes were killed, as a memory limit does
	OpClose    Op = "close"    // … by the end of the world
	OpAbsent   Op = "absent"   // a teardown found nothing
	OpList     Op = "list"     // somebody listed an owner's objects
	OpSnapshot Op = "snapshot" // a snapshot was saved
	OpDrop     Op = "drop"     // … and removed
	OpPause    Op = "pause"
	OpResume   Op = "resume"
	OpRenew    Op = "renew"
	OpNetwork  Op = "network"
	OpClaim    Op = "claim" // a warm object was given to its owner
	OpFault    Op = "fault" // a call met a fault
)

// Entry is one line of the world's log.
type Entry struct {
	Seq        int       `json:"seq"`
	At         time.Time `json:"at"`
	Op         Op        `json:"op"`
	Owner      string    `json:"owner,omitempty"`
	SandboxID  string    `json:"sandbox_id,omitempty"`
	Generation int       `json:"generation,omitempty"`
	Ref        string    `json:"ref,omitempty"`
	Host       string    `json:"host,omitempty"`
	// Live is how many objects of that owner, ID and generation there are once it
	// happened; for OpList how many were listed.
	Live int    `json:"live"`
	Note string `json:"note,omitempty"` // the verb of a fault, the ID of a snapshot
}

// Log returns everything that happened so far.
func (w *World) Log() []Entry {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.log)
}

func (w *World) entry(o *Object, op Op) Entry {
	return Entry{
		Op: op, Owner: o.Spec.Owner, SandboxID: o.Spec.ID, Generation: o.Spec.Generation, Ref: o.Ref, Host: o.Host,
		Live: len(w.matching(query{Owner: o.Spec.Owner, ID: o.Spec.ID, Generation: o.Spec.Generation})),
	}
}

// note appends e to the log; with a file it returns once the line is on the disk.
func (w *World) note(e Entry) error {
	e.Seq, e.At = len(w.log)+1, time.Now()
	w.log = append(w.log, e)
	close(w.logged)
	w.logged = make(chan struct{})
	if w.file == nil {
		return nil
	}
	line, err := json.Marshal(e)
	if err == nil {
		_, err = w.file.Write(append(line, '\n'))
	}
	if err == nil {
		err = w.file.Sync()
	}
	return err
}

// Audit reads a log as the judge of a broker and returns what the broker did wrong:
// two objects of one generation at one time, a generation made again on a host after its
// teardown there, and (if it is over) objects and snapshots that were left.
func Audit(log []Entry, over bool) (faults []string) {
	type generation struct {
		owner, id  string
		generation int
	}
	type place struct {
		generation
		host string
	}
	live, ended := map[generation]int{}, map[place]bool{}
	snapshots := map[string]bool{}
	for _, e := range log {
		k := generation{e.Owner, e.SandboxID, e.Generation}
		switch e.Op {
		case OpStart:
			clear(live) // a world does not survive its process
			clear(snapshots)
		case OpSnapshot:
			snapshots[e.Note] = true
		case OpDrop:
			delete(snapshots, e.Note)
		case OpCreate, OpLate:
			if live[k]++; live[k] > 1 {
				faults = append(faults, fmt.Sprintf("line %d: %d objects of %s/%d at one time", e.Seq, live[k], e.SandboxID, e.Generation))
			}
			if ended[place{k, e.Host}] && e.Op == OpCreate {
				faults = append(faults, fmt.Sprintf("line %d: %s/%d was made again after its teardown", e.Seq, e.SandboxID, e.Generation))
			}
		case OpRemove, OpKill, OpFuse, OpClose:
			live[k]--
			ended[place{k, e.Host}] = e.Op == OpRemove
		}
	}
	if over {
		for id := range snapshots {
			faults = append(faults, fmt.Sprintf("the snapshot %s is left", id))
		}
		for k, n := range live {
			if n > 0 {
				faults = append(faults, fmt.Sprintf("%d objects of %s/%d are left", n, k.id, k.generation))
			}
		}
	}
	slices.Sort(faults)
	return faults
}
