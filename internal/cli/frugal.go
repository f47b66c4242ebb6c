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
		still  = 512 << 10 // allocated since the last look, while nobody asks for anything
		stills = 3         // looks at which that was so, before memory is given back
		little = 8 << 20   // allocated since the last look, by somebody who does little
		while  = 30        // looks after which it is given back all the same
		unused = 8 << 20   // worth giving back

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
	// Whoever asks once in a while would pay each time for what was given back: collecting
	// garbage, memory that is cleared, pages that are found again.
	quiet, since := 0, 0
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
		quiet, since = quiet+1, since+1
		if allocs-allocated >= still {
			quiet = 0
		}
		if allocs-allocated < little && (quiet >= stills || since >= while || !started) {
			if free+garbage > unused || !started {
				debug.FreeOSMemory()
				metrics.Read(look)
				allocs = look[2].Value.Uint64()
			}
			if pagesOfFiles() > ofFile {
				givePagesBack()
			}
			started, since = true, 0
		}
		allocated = allocs
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
