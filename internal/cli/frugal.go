package cli

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// frugal keeps the memory of a server close to what it uses, until ctx ends. The memory of a thousand
// waiting commands is nearly all stacks, and half of it would be room
// for garbage that they do not make.
func frugal(ctx context.Context) {
	const (
		every  = time.Second
		still  = 512 << 10 // allocated since the last look, without requests
		stills = 3         // looks at which that was so, before memory is given back
		little = 8 << 20   // allocated since the last look, with few requests
		while  = 30        // looks after which it is given back all the same
		unused = 8 << 20   // worth giving back

		// Of the program's file. After every burst there is more of it; to read it back from the
		// page cache takes less than a millisecond.
		ofFile = 16 << 20
	)
	look := []metrics.Sample{
		{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/stacks:bytes"}, {Name: "/gc/heap/allocs:bytes"},
		{Name: "/memory/classes/heap/free:bytes"}, {Name: "/memory/classes/heap/objects:bytes"},
	}
	percent, allocated := 100, uint64(0)
	started := false
	// An occasional request would pay for that each time: collecting
	// garbage, clearing memory, finding pages again.
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
		// The start took more than is needed now, and so did a past burst.
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

// gcPercent is how much garbage there may be in addition to used bytes, in percent of
// them: with few bytes in use as much again, with many less, but never so little that the program does
// nothing but collect it.
func gcPercent(used uint64) int {
	const few, room = 16 << 20, 10 << 20
	if used <= few {
		return 100
	}
	return int(max(100*room/used, 15))
}
