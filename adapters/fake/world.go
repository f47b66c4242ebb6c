package fake

import (
	"context"
	"crypto/rand"
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
	ended(context.Context, query) (Object, error)
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
	return sandboxer.E(sandboxer.Unavailable, nil, "host %s cannot be reached", strings.Join(names, ", ")).WithHint("make the host available again")
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
		return Object{}, sandboxer.E(sandboxer.Unavailable, nil, "the fake is configured to lose the answer")
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
		Ref: ref, Spec: or.Spec, Env: maps.Clone(or.Env), Host: or.Host, CreatedAt: time.Now(), Fuse: or.Spec.Fuse,
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
			return sandboxer.E(sandboxer.Failed, err, "the checkpoint could not be unpacked")
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

// ended returns the last object that q names of those that were removed within the last hour.
func (w *World) ended(_ context.Context, q query) (Object, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range slices.Backward(w.removed) {
		if o.Spec.ID == q.ID && o.Spec.Owner == q.Owner && (q.Generation == 0 || o.Spec.Generation == q.Generation) {
			return o, nil
		}
	}
	return Object{}, sandboxer.E(sandboxer.NotFound, nil, "there was no sandbox %s", q.ID)
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
