package engine

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A terminal's first sizes are passed on again, as a change; later ones once.
func TestFirstSizes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		sizes := make(chan sandboxer.WinSize)
		began := make(chan struct{})
		to := repeatFirstSizes(ctx, sizes, began)
		var at []time.Time
		heard := func(d time.Duration) (all []sandboxer.WinSize) {
			for end := time.After(d); ; {
				select {
				case s := <-to:
					all, at = append(all, s), append(at, time.Now())
				case <-end:
					return all
				}
			}
		}
		early, late := sandboxer.WinSize{Cols: 123, Rows: 45}, sandboxer.WinSize{Cols: 80, Rows: 24}
		sizes <- early
		got := heard(time.Minute) // the host is busy
		if len(got) != 1 {
			t.Errorf("before the first output, a size is passed on as %v", got)
		}
		close(began)
		got = append(got, heard(10*time.Second)...)
		if len(got) < 3 || got[0] != early || got[len(got)-1] != early {
			t.Errorf("a size at the beginning is passed on as %v", got)
		}
		for i := 1; i < len(got); i++ {
			if got[i] == got[i-1] {
				t.Errorf("%v: no change", got)
			}
			if d := at[i].Sub(at[i-1]); d < sizeSeen {
				t.Errorf("%v is changed after %v, before anybody may have seen it", got[i-1], d)
			}
		}
		sizes <- late
		if got := heard(10 * time.Second); len(got) != 1 || got[0] != late {
			t.Errorf("a later size is passed on as %v", got)
		}
	})
}
