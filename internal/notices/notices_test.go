package notices

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/sand-boxer/sandboxer"
)

func TestHub(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h Hub
		h.Tell("before")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var heard [2][]string
		var ends [2]error
		taken := make(chan struct{})
		for i := range heard {
			all := h.Listen(ctx)
			go func() {
				for id, err := range all {
					if err != nil {
						ends[i] = err
						return
					}
					heard[i] = append(heard[i], id)
					<-taken
				}
			}()
		}
		for _, id := range []string{"a", "a", "a", "b"} {
			h.Tell(id)
			synctest.Wait()
		}
		close(taken)
		synctest.Wait()
		cancel()
		synctest.Wait()
		for i := range heard {
			slices.Sort(heard[i])
			if got := fmt.Sprint(heard[i]); got != "[a a b]" || ends[i] != context.Canceled {
				t.Errorf("%s, %v", got, ends[i])
			}
		}
		if len(h.listeners) != 0 {
			t.Errorf("%d listen on", len(h.listeners))
		}
	})
}

func TestHubIsBounded(t *testing.T) {
	var h Hub
	all := h.Listen(t.Context())
	for n := range MaxWaiting + 1 {
		h.Tell(fmt.Sprint(n))
	}
	for id, err := range all {
		if sandboxer.KindOf(err) != sandboxer.Exhausted {
			t.Fatalf("%s, %v", id, err)
		}
	}
	if len(h.listeners) != 0 {
		t.Error("it listens on")
	}
}
