package manager

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// What is in use was used just now; else it is the end of the last use that counts.
func TestUsage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := newUsage()
		check := func(id string, wantBusy bool, ago time.Duration) {
			t.Helper()
			at, busy := u.last(id)
			if busy != wantBusy || time.Since(at).Round(time.Millisecond) != ago {
				t.Errorf("%s: busy %t, %s ago; want %t, %s", id, busy, time.Since(at), wantBusy, ago)
			}
		}
		if at, busy := u.last("box"); busy || !at.IsZero() {
			t.Errorf("of one never used: %s, %t", at, busy)
		}
		end1, _ := u.begin("box", u.seen())
		end2, _ := u.begin("box", u.seen())
		time.Sleep(time.Minute)
		check("box", true, 0)
		end1()
		end1() // once counts
		check("box", true, 0)
		end2()
		time.Sleep(time.Minute)
		check("box", false, time.Minute)

		endOther, _ := u.begin("other", u.seen())
		if ids := slices.Sorted(slices.Values(u.ids())); !slices.Equal(ids, []string{"box", "other"}) {
			t.Errorf("remembered: %q", ids)
		}
		time.Sleep(time.Hour)
		u.forgetUnused(time.Hour) // other is in use
		if ids := u.ids(); !slices.Equal(ids, []string{"other"}) {
			t.Errorf("remembered: %q", ids)
		}
		u.forgetUnused(0)
		check("other", true, 0)

		// A use may end after its sandbox: that brings nothing back.
		u.forget("other")
		endOther()
		if ids := u.ids(); len(ids) != 0 {
			t.Errorf("remembered: %q", ids)
		}
	})
}

func TestUsageIsConcurrent(t *testing.T) {
	u := newUsage()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 200 {
				end, _ := u.begin("box", u.seen())
				if _, busy := u.last("box"); !busy {
					t.Error("in use, and not busy")
				}
				u.ids()
				u.forgetUnused(time.Hour)
				end()
			}
		})
	}
	all.Wait()
	if _, busy := u.last("box"); busy {
		t.Error("nobody uses it any more")
	}
}

// TestUsageHold: what is used cannot be held, and what is held not be used before that is over.
func TestUsageHold(t *testing.T) {
	u := newUsage()
	end, held := u.begin("box", u.seen())
	if _, ok := u.hold("box"); ok || held != nil {
		t.Error("one that is in use is held")
	}
	end()
	release, ok := u.hold("box")
	if _, again := u.hold("box"); !ok || again {
		t.Errorf("held once %t, twice %t", ok, again)
	}
	if _, held = u.begin("box", u.seen()); held == nil {
		t.Fatal("one that is held is used")
	}
	u.forgetUnused(0) // of one that is held nothing is forgotten
	if _, still := u.begin("box", u.seen()); still == nil {
		t.Error("one that is held is used")
	}
	release()
	release() // once counts
	<-held
	if end, held = u.begin("box", u.seen()); held != nil {
		t.Error("it stays held")
	}
	end()
	// A caller that read the record before that was over has to read it again.
	release, _ = u.hold("box")
	seen := u.seen()
	release()
	if _, held = u.begin("box", seen); held == nil {
		t.Fatal("one is used whose record was read while it was held")
	}
	<-held
	if end, held = u.begin("box", u.seen()); held != nil {
		t.Fatal("one is not used whose record was read since")
	}
	seen = u.seen()
	other, _ := u.hold("other")
	other()
	if _, held = u.begin("box", seen); held != nil {
		t.Error("another's hold counts")
	}
	end()
}
