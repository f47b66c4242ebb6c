package engine

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// repeatFirstSizes passes sizes of a terminal on, the first ones more than once. The engine's
// command notices changes only after it has sent the first size to the engine, and just then
// a terminal in a browser gets its true size. On a busy host that takes its time, so the beginning is counted from the
// first output, when began is closed.
func repeatFirstSizes(ctx context.Context, sizes <-chan sandboxer.WinSize, began <-chan struct{}) <-chan sandboxer.WinSize {
	to := make(chan sandboxer.WinSize)
	go func() {
		send := func(s sandboxer.WinSize) {
			select {
			case to <- s:
			case <-ctx.Done():
			}
		}
		var begun time.Time
		early := func() bool { return !begun.IsZero() && time.Since(begun) < sizeTime }
		var last sandboxer.WinSize
		var again <-chan time.Time
		for {
			select {
			case s, ok := <-sizes:
				if !ok {
					sizes = nil
					continue
				}
				send(s)
				if last = s; early() {
					again = time.After(sizeAgain)
				}
			case <-began:
				if begun, began = time.Now(), nil; last != (sandboxer.WinSize{}) {
					again = time.After(sizeAgain)
				}
			case <-again:
				other := last // what does not change is not heeded
				other.Rows++
				send(other)
				select { // nor one that is changed back before it is read
				case <-time.After(sizeSeen):
				case <-ctx.Done():
				}
				send(last)
				if again = nil; early() {
					again = time.After(2 * sizeAgain)
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return to
}

const (
	sizeTime  = 3 * time.Second // the beginning of a terminal, after its first output
	sizeAgain = time.Second
	sizeSeen  = 250 * time.Millisecond
)
