package checkpoint

import (
	"context"
	"crypto/rand"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A Collection is what GC did.
type Collection struct {
	Deleted   int   // dropped checkpoints
	Bytes     int64 // of the packs and streams that were deleted
	Condemned int   // packs and streams that a later run will delete
	Kept      int   // dropped checkpoints that are still needed
}

// GC deletes unneeded objects in two steps. It marks objects that are unneeded and older than the
// grace period; from then on no new checkpoint uses them. It deletes those that were marked a grace
// period ago and are still unneeded. A dropped checkpoint is deleted a grace
// period after the drop, unless it is pinned. So it takes GC three runs, each a grace
// period after the one before, until the last byte of a dropped checkpoint is gone.
//
// It may be stopped at any point and run by several brokers at once. If it cannot read
// a record or a pin it deletes nothing.
//
// Why a new checkpoint never loses what it has in common with old ones: it stores a
// pending record first and then looks for marks; GC marks first and then looks for
// pending records. One of the two sees the other.
func (s *Store) GC(ctx context.Context) (Collection, error) {
	c := collector{Store: s, begun: time.Now(), lists: map[string][]Blob{}}
	for _, step := range []func(context.Context) error{c.list, c.checkpoints, c.objects} {
		if err := step(ctx); err != nil {
			return c.done, err
		}
	}
	return c.done, s.blobs.Tidy(ctx, c.now.Add(-max(s.o.Grace, time.Minute)))
}

// A collector is one run of GC.
type collector struct {
	*Store
	begun   time.Time // on our clock
	now     time.Time // on the store's
	lists   map[string][]Blob
	pinned  map[string]bool
	expired []string // pins

	// What the remaining checkpoints need.
	chunks  map[id]bool
	streams map[string]bool

	done Collection
}

// old reports whether b is older than so many grace periods.
func (c *collector) old(b Blob, times time.Duration) bool {
	return c.now.Sub(b.Time) >= times*c.o.Grace
}

// remove deletes objects, as long as the listing can be trusted.
func (c *collector) remove(ctx context.Context, names ...string) error {
	if c.o.Grace > 0 && time.Since(c.begun) > c.o.Grace/2 {
		return sandboxer.E(sandboxer.Timeout, nil, "the garbage collection took longer than half the grace period and ended early").
			WithHint("run it again, or set a longer grace period")
	}
	for _, name := range names {
		if err := c.blobs.Delete(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// list reads the names of all objects.
func (c *collector) list(ctx context.Context) (err error) {
	if c.now, err = c.Store.now(ctx); err != nil {
		return err
	}
	// The order of these lists makes it safe: marks before records, drops
	// before pins, pending records before sealed ones.
	for _, prefix := range []string{condemnedPrefix, dropPrefix, pinPrefix, packPrefix, indexPrefix, streamPrefix, pendingPrefix, checkpointPrefix} {
		if c.lists[prefix], err = c.blobs.List(ctx, prefix); err != nil {
			return err
		}
	}
	c.pinned, c.expired, err = pins(c.lists[pinPrefix], c.now)
	return err
}

// checkpoints deletes the dropped ones, and learns what the others need.
func (c *collector) checkpoints(ctx context.Context) error {
	sealed := map[string]Blob{}
	for _, b := range c.lists[checkpointPrefix] {
		sealed[strings.TrimPrefix(b.Name, checkpointPrefix)] = b
	}
	dead, err := c.dropped(ctx, sealed)
	if err != nil {
		return err
	}
	c.chunks, c.streams = map[id]bool{}, map[string]bool{}
	var stale []string
	for _, b := range c.lists[pendingPrefix] {
		if c.old(b, 1) {
			stale = append(stale, b.Name) // its Save has ended, or will not seal it any more
			continue
		}
		if err := c.mark(ctx, b.Name, c.chunks, c.streams); err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
			return err
		}
	}
	for _, b := range sealed {
		if err := c.mark(ctx, b.Name, c.chunks, c.streams); err != nil {
			if sandboxer.KindOf(err) == sandboxer.NotFound {
				continue // deleted by another run: it is unneeded
			}
			return err
		}
	}
	for _, b := range dead {
		if err := c.remove(ctx, b.Name); err != nil {
			return err
		}
		c.done.Deleted++
	}
	return c.remove(ctx, append(stale, c.expired...)...)
}

// dropped takes the checkpoints that are to be deleted out of sealed, and returns them.
func (c *collector) dropped(ctx context.Context, sealed map[string]Blob) (dead []Blob, err error) {
	for _, d := range c.lists[dropPrefix] {
		id := strings.TrimPrefix(d.Name, dropPrefix)
		b, there := sealed[id]
		switch {
		case !there:
			// The drop outlives its checkpoint for so long that no other run can still
			// mistake a new checkpoint of that ID for the old one.
			if c.old(d, 4) {
				if err := c.remove(ctx, d.Name); err != nil {
					return nil, err
				}
			}
		case c.pinned[id]:
			c.done.Kept++
		case c.old(d, 1):
			dead = append(dead, b)
			delete(sealed, id)
		}
	}
	return dead, nil
}

// needed are the names of the packs and streams that the checkpoints need.
func (c *collector) needed(ctx context.Context) (map[string]bool, error) {
	all := c.Store.chunks
	if err := all.refresh(ctx); err != nil {
		return nil, err
	}
	needed := map[string]bool{}
	for name := range c.streams {
		needed[name] = true
	}
	all.mu.RLock()
	defer all.mu.RUnlock()
	for pack, places := range all.packs {
		for _, p := range places {
			if c.chunks[p.id] {
				needed[packPrefix+pack] = true
				break
			}
		}
	}
	return needed, nil
}

// objects marks the unneeded packs and streams, and deletes those that were marked before.
func (c *collector) objects(ctx context.Context) error {
	needed, err := c.needed(ctx)
	if err != nil {
		return err
	}
	marks := map[string]Blob{}
	for _, b := range c.lists[condemnedPrefix] {
		marks[strings.TrimPrefix(b.Name, condemnedPrefix)] = b
	}
	there := map[string]bool{}
	objects := append(c.lists[packPrefix], c.lists[streamPrefix]...)
	for _, b := range objects {
		there[b.Name] = true
	}
	for _, b := range c.lists[indexPrefix] {
		if name := packPrefix + strings.TrimPrefix(b.Name, indexPrefix); !there[name] {
			there[name] = true
			objects = append(objects, Blob{Name: name, Time: b.Time}) // an index that lost its pack
		}
	}
	for _, b := range objects {
		since, marked := marks[b.Name]
		switch {
		case needed[b.Name]:
		case marked && c.old(since, 1):
			// The mark is deleted last: it shows that something may be left.
			names := []string{b.Name, since.Name}
			if pack, ok := strings.CutPrefix(b.Name, packPrefix); ok {
				names = []string{indexPrefix + pack, b.Name, since.Name}
			}
			if err := c.remove(ctx, names...); err != nil {
				return err
			}
			c.done.Bytes += b.Size
		case !marked && c.old(b, 1):
			err := c.putBytes(ctx, condemnedPrefix+b.Name, mark)
			if err != nil && sandboxer.KindOf(err) != sandboxer.Conflict {
				return err
			}
			c.done.Condemned++
		case marked:
			c.done.Condemned++
		}
	}
	for name, since := range marks { // of a run that ended before it removed the mark
		if !there[name] && c.old(since, 1) {
			if err := c.remove(ctx, since.Name); err != nil {
				return err
			}
		}
	}
	return nil
}

// now asks the store for the time: objects are dated by its clock, not by ours.
func (s *Store) now(ctx context.Context) (time.Time, error) {
	name := clockPrefix + rand.Text()
	if err := s.putBytes(ctx, name, mark); err != nil {
		return time.Time{}, err
	}
	b, err := s.blobs.Stat(ctx, name)
	late, stop := outlast(ctx)
	defer stop()
	if e := s.blobs.Delete(late, name); err == nil {
		err = e
	}
	if err != nil {
		return time.Time{}, err
	}
	// An earlier run that ended here may have left objects.
	list, err := s.blobs.List(ctx, clockPrefix)
	for _, l := range list {
		if err == nil && b.Time.Sub(l.Time) > time.Hour {
			err = s.blobs.Delete(ctx, l.Name)
		}
	}
	return b.Time, err
}

// pins returns the checkpoints that are pinned, and the pins that have run out.
func pins(list []Blob, now time.Time) (pinned map[string]bool, expired []string, err error) {
	pinned = map[string]bool{}
	for _, b := range list {
		parts := strings.Split(strings.TrimPrefix(b.Name, pinPrefix), "/")
		if len(parts) != 3 {
			return nil, nil, damaged(nil, "%s is not a pin", b.Name)
		}
		until, err := strconv.ParseInt(parts[2], 10, 64)
		if err != nil || until < 0 {
			return nil, nil, damaged(err, "%s is not a pin", b.Name)
		}
		if until == 0 || now.Before(time.Unix(until, 0)) {
			pinned[parts[0]] = true
		} else {
			expired = append(expired, b.Name)
		}
	}
	return pinned, expired, nil
}

// mark notes what a record needs.
func (s *Store) mark(ctx context.Context, name string, chunks map[id]bool, streams map[string]bool) error {
	data, err := s.getBytes(ctx, name, maxRecord)
	if err != nil {
		return err
	}
	parts := strings.Split(name, "/") // checkpoints/<id>, or pending/<id>/<random>
	rec, err := s.decodeRecord(parts[1], data)
	if err != nil {
		return fmt.Errorf("nothing is deleted as long as %s cannot be read: %w", name, err)
	}
	for _, p := range []part{rec.Manifest, rec.Payload} {
		for ids := p.Chunks; len(ids) > 0; ids = ids[32:] {
			chunks[id(ids[:32])] = true
		}
		if p.Stream != "" {
			streams[p.Stream] = true
		}
	}
	return nil
}
