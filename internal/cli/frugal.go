package cli

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// frugal keeps the memory of a server close to what it uses, until ctx ends. A thousand
// commands that are waited for are nearly all stacks, and half of the memory would be room
// for garbage that they do not make.
func frugal(ctx context.Context) {
	const (
		every  = time.Second
		idle   = 8 << 20 // allocated since the last look, by somebody who does little
		unused = 8 << 20 // worth giving back

		// Of the program's file. More is there after every burst; to have it back from the
		// page cache takes less than a millisecond.
		ofFile = 16 << 20
	)
	look := []metrics.Sample{
		{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/stacks:bytes"}, {Name: "/gc/heap/allocs:bytes"},
		{Name: "/memory/classes/heap/free:bytes"}, {Name: "/memory/classes/heap/objects:bytes"},
	}
	percent, allocated := 100, uint64(0)
	started := false
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		metrics.Read(look)
		live, stacks, allocs, free, objects := look[0].Value.Uint64(), look[1].Value.Uint64(), look[2].Value.Uint64(), look[3].Value.Uint64(), look[4].Value.Uint64()
		if p := gcPercent(live + stacks); p < percent*9/10 || p > percent*10/9 {
			debug.SetGCPercent(p)
			percent = p
		}
		// Starting took more than staying does, and so did a burst that is over.
		garbage := objects - min(objects, live)
		if allocs-allocated < idle && (free+garbage > unused || !started) {
			debug.FreeOSMemory()
			started = true
			metrics.Read(look)
			allocs = look[2].Value.Uint64()
		}
		allocated = allocs
		if pagesOfFiles() > ofFile {
			givePagesBack()
		}
	}
}

// gcPercent is how much garbage there may be beside so many bytes in use, in percent of
// them: of few as much again, of many less, but never so little that collecting it is all
// that is done.
func gcPercent(used uint64) int {
	const few, room = 16 << 20, 10 << 20
	if used <= few {
		return 100
	}
	return int(max(100*room/used, 15))
}
