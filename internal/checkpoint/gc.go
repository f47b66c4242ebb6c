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
	Kept      int   // dropped checkpoints that somebody still needs
}

// GC deletes what nothing needs, in two steps: what it finds unneeded and older than the
// grace period it marks, from when on no new checkpoint uses it; what was marked a grace
// period ago and is still not needed it deletes. A dropped checkpoint is deleted a grace
// period after the drop, unless it is pinned. So it takes GC three runs, each a grace
// period after the one before, until the last byte of a dropped checkpoint is gone.
//
// It may be stopped at any point and run by several brokers at once. If it cannot read
// a record or a pin it deletes nothing.
//
// Why a new checkpoint never loses what it has in common with old ones: it stores a
// pending record first and then looks for marks; GC marks first and then looks for
// pending records. One of the two sees the other.
func (s *Store) GC(ctx context.Context) (_ Collection, err error) {
	var done Collection
	begun := time.Now()
	now, err := s.now(ctx)
	if err != nil {
		return done, err
	}
	old := func(b Blob, times time.Duration) bool { return now.Sub(b.Time) >= times*s.o.Grace }

	// The order of these lists is what makes it safe: marks before records, drops
	// before pins, pending records before sealed ones.
	lists := map[string][]Blob{}
	for _, prefix := range []string{condemnedPrefix, dropPrefix, pinPrefix, packPrefix, indexPrefix, streamPrefix, pendingPrefix, checkpointPrefix} {
		if lists[prefix], err = s.blobs.List(ctx, prefix); err != nil {
			return done, err
		}
	}
	pinned, expired, err := pins(lists[pinPrefix], now)
	if err != nil {
		return done, err
	}
	// remove deletes, as long as what was listed can be believed.
	remove := func(names ...string) error {
		if s.o.Grace > 0 && time.Since(begun) > s.o.Grace/2 {
			return sandboxer.E(sandboxer.Timeout, nil, "the garbage collection took longer than half the grace period and ended early").
				WithHint("run it again, or set a longer grace period")
		}
		for _, name := range names {
			if err := s.blobs.Delete(ctx, name); err != nil {
				return err
			}
		}
		return nil
	}

	// Which checkpoints go, and what the others need.
	sealed := map[string]Blob{}
	for _, b := range lists[checkpointPrefix] {
		sealed[strings.TrimPrefix(b.Name, checkpointPrefix)] = b
	}
	var dead []Blob
	for _, d := range lists[dropPrefix] {
		id := strings.TrimPrefix(d.Name, dropPrefix)
		b, there := sealed[id]
		switch {
		case !there:
			// The drop outlives its checkpoint for so long that no other run can still
			// take a new checkpoint of that ID for the old one.
			if old(d, 4) {
				if err := remove(d.Name); err != nil {
					return done, err
				}
			}
		case pinned[id]:
			done.Kept++
		case old(d, 1):
			dead = append(dead, b)
			delete(sealed, id)
		}
	}
	chunks, streams := map[id]bool{}, map[string]bool{}
	var stale []string
	for _, b := range lists[pendingPrefix] {
		if old(b, 1) {
			stale = append(stale, b.Name) // its Save has ended, or will not seal it any more
			continue
		}
		if err := s.mark(ctx, b.Name, chunks, streams); err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
			return done, err
		}
	}
	for _, b := range sealed {
		if err := s.mark(ctx, b.Name, chunks, streams); err != nil {
			if sandboxer.KindOf(err) == sandboxer.NotFound {
				continue // deleted by another run: nobody needs it
			}
			return done, err
		}
	}
	for _, b := range dead {
		if err := remove(b.Name); err != nil {
			return done, err
		}
		done.Deleted++
	}
	if err := remove(append(stale, expired...)...); err != nil {
		return done, err
	}

	// Which packs hold what is needed.
	if err := s.chunks.refresh(ctx); err != nil {
		return done, err
	}
	needed := map[string]bool{}
	for name := range streams {
		needed[name] = true
	}
	s.chunks.mu.RLock()
	for pack, places := range s.chunks.packs {
		for _, p := range places {
			if chunks[p.id] {
				needed[packPrefix+pack] = true
				break
			}
		}
	}
	s.chunks.mu.RUnlock()

	marks := map[string]Blob{}
	for _, b := range lists[condemnedPrefix] {
		marks[strings.TrimPrefix(b.Name, condemnedPrefix)] = b
	}
	there := map[string]bool{}
	objects := append(lists[packPrefix], lists[streamPrefix]...)
	for _, b := range objects {
		there[b.Name] = true
	}
	for _, b := range lists[indexPrefix] {
		if name := packPrefix + strings.TrimPrefix(b.Name, indexPrefix); !there[name] {
			there[name] = true
			objects = append(objects, Blob{Name: name, Time: b.Time}) // an index that lost its pack
		}
	}
	for _, b := range objects {
		since, marked := marks[b.Name]
		switch {
		case needed[b.Name]:
		case marked && old(since, 1):
			// The mark goes last: as long as anything is left, it is seen.
			names := []string{b.Name, since.Name}
			if pack, ok := strings.CutPrefix(b.Name, packPrefix); ok {
				names = []string{indexPrefix + pack, b.Name, since.Name}
			}
			if err := remove(names...); err != nil {
				return done, err
			}
			done.Bytes += b.Size
		case !marked && old(b, 1):
			err := s.putBytes(ctx, condemnedPrefix+b.Name, mark)
			if err != nil && sandboxer.KindOf(err) != sandboxer.Conflict {
				return done, err
			}
			done.Condemned++
		case marked:
			done.Condemned++
		}
	}
	for name, since := range marks { // of a run that ended before it removed the mark
		if !there[name] && old(since, 1) {
			if err := remove(since.Name); err != nil {
				return done, err
			}
		}
	}
	return done, s.blobs.Tidy(ctx, now.Add(-max(s.o.Grace, time.Minute)))
}

// now asks the store for the time: that of the objects, whatever our own clock says.
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
	// What an earlier run left when it ended here.
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
			return nil, nil, damaged(nil, "%s is no pin", b.Name)
		}
		until, err := strconv.ParseInt(parts[2], 10, 64)
		if err != nil || until < 0 {
			return nil, nil, damaged(err, "%s is no pin", b.Name)
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
