package checkpoint

import (
	"context"
	"io"
	"strings"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// chunkIndex knows where every chunk is. Indexes of packs never change, so each is read
// once. A chunk takes some 120 bytes of memory.
type chunkIndex struct {
	s *Store

	refreshing chan struct{} // the slot of the one refresh in progress

	mu        sync.RWMutex
	packs     map[string][]place
	condemned map[string]bool
	byID      map[id]at
}

type at struct {
	pack string
	place
}

func newChunkIndex(s *Store) *chunkIndex {
	return &chunkIndex{s: s, refreshing: make(chan struct{}, 1), packs: map[string][]place{}, condemned: map[string]bool{}, byID: map[id]at{}}
}

// find returns the pack that has a chunk and will keep it: not one that is about to be
// deleted.
func (x *chunkIndex) find(i id) (pack string, ok bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	a, ok := x.byID[i]
	return a.pack, ok && !x.condemned[a.pack]
}

// locate returns where a chunk is.
func (x *chunkIndex) locate(i id) (at, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	a, ok := x.byID[i]
	return a, ok
}

func (x *chunkIndex) add(pack string, places []place) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.insert(pack, places)
}

func (x *chunkIndex) insert(pack string, places []place) {
	x.packs[pack] = places
	for _, p := range places {
		if old, ok := x.byID[p.id]; !ok || x.condemned[old.pack] {
			x.byID[p.id] = at{pack, p}
		}
	}
}

// refresh takes over the changes in the store.
func (x *chunkIndex) refresh(ctx context.Context) error {
	select {
	case x.refreshing <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-x.refreshing }()
	dead, err := x.s.names(ctx, condemnedPrefix+packPrefix)
	if err != nil {
		return err
	}
	there, err := x.s.names(ctx, indexPrefix)
	if err != nil {
		return err
	}
	// An index counts only with its pack: one may be written after a slow Save has lost
	// the pack to GC.
	packs, err := x.s.names(ctx, packPrefix)
	if err != nil {
		return err
	}
	for name := range there {
		if !packs[name] {
			delete(there, name)
		}
	}
	fresh := map[string][]place{}
	for name := range there {
		x.mu.RLock()
		_, known := x.packs[name]
		x.mu.RUnlock()
		if known {
			continue
		}
		data, err := x.s.getBytes(ctx, indexPrefix+name, maxIndex)
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			continue // deleted meanwhile
		}
		if err != nil {
			return err
		}
		if fresh[name], err = parseIndex(name, data); err != nil {
			return err
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	same := len(dead) == len(x.condemned)
	for name := range dead {
		same = same && x.condemned[name]
	}
	x.condemned = dead
	for name := range x.packs {
		if !there[name] {
			// A pack that a packer of this process has just added is missing too, if the
			// listing is older: it will be read again.
			delete(x.packs, name)
			same = false
		}
	}
	for name, places := range fresh {
		x.insert(name, places)
	}
	if !same {
		x.byID = make(map[id]at, len(x.byID))
		for name, places := range x.packs {
			x.insert(name, places)
		}
	}
	return nil
}

// names lists what begins with prefix, without it.
func (s *Store) names(ctx context.Context, prefix string) (map[string]bool, error) {
	list, err := s.blobs.List(ctx, prefix)
	if err != nil {
		return nil, err
	}
	names := make(map[string]bool, len(list))
	for _, b := range list {
		names[strings.TrimPrefix(b.Name, prefix)] = true
	}
	return names, nil
}

// getBytes reads a whole object of at most limit bytes.
func (s *Store) getBytes(ctx context.Context, name string, limit int64) ([]byte, error) {
	r, err := s.blobs.Get(ctx, name, 0, -1)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = sandboxer.E(sandboxer.Failed, nil, "the object %s is larger than %d bytes", name, limit)
	}
	return data, err
}
