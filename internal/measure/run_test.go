package measure

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// backAndForth is an order that turns round by round.
func backAndForth() func(int) []int {
	n := 0
	return func(arms int) []int {
		out := make([]int, arms)
		for i := range out {
			out[i] = i
		}
		if n++; n%2 == 0 {
			slices.Reverse(out)
		}
		return out
	}
}

func TestInterleave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var turns []string
		var rounds []int
		counted := map[string][]time.Duration{}
		arm := func(name string, d time.Duration) Arm {
			return Arm{Name: name, Sample: func(_ context.Context, counts bool) error {
				turns = append(turns, name)
				begin := time.Now()
				time.Sleep(d)
				if counts {
					counted[name] = append(counted[name], time.Since(begin))
				}
				return nil
			}}
		}
		p := Plan{Rounds: 3, WarmUp: 1, Order: backAndForth(), Round: func(n int) error { rounds = append(rounds, n); return nil }}
		n, err := p.Interleave(t.Context(), arm("a", 10*time.Millisecond), arm("b", 20*time.Millisecond))
		if n != 3 || err != nil {
			t.Fatalf("%d rounds, %v", n, err)
		}
		if got := strings.Join(turns, ""); got != "abbaabba" {
			t.Errorf("turns %s", got)
		}
		if !slices.Equal(rounds, []int{1, 2, 3}) {
			t.Errorf("rounds %v", rounds)
		}
		// What warmed up does not count.
		for name, want := range map[string]time.Duration{"a": 10 * time.Millisecond, "b": 20 * time.Millisecond} {
			if got := counted[name]; !slices.Equal(got, []time.Duration{want, want, want}) {
				t.Errorf("%s: %v", name, got)
			}
		}
	})
}

func TestInterleaveIsRandom(t *testing.T) {
	first := map[string]int{}
	turn := 0
	arm := func(name string) Arm {
		return Arm{Name: name, Sample: func(context.Context, bool) error {
			if turn++; turn%2 == 1 {
				first[name]++
			}
			return nil
		}}
	}
	if n, err := (Plan{Rounds: 200}).Interleave(t.Context(), arm("a"), arm("b")); n != 200 || err != nil {
		t.Fatal(n, err)
	}
	if first["a"] < 50 || first["b"] < 50 { // once in 10^13 runs
		t.Errorf("first: %v", first)
	}
}

func TestInterleaveEnds(t *testing.T) {
	stop := errors.New("stop")
	for _, tt := range []struct {
		name   string
		plan   Plan
		sample func(turn int) error // takes a second
		rounds int
		turns  int
		says   string // "" for success
	}{
		{"at its count", Plan{Rounds: 4}, func(int) error { return nil }, 4, 4, ""},
		{"in time", Plan{Rounds: MaxRounds, Within: 3 * time.Second}, func(int) error { return nil }, 3, 3, ""},
		{"the time for warming up is not counted", Plan{Rounds: MaxRounds, WarmUp: 5, Within: 3 * time.Second}, func(int) error { return nil }, 3, 8, ""},
		{"one round at least", Plan{Rounds: 2, Within: time.Nanosecond}, func(int) error { return nil }, 1, 1, ""},
		{"when nobody has a turn", Plan{Rounds: 9}, func(n int) error {
			if n == 3 {
				return ErrDone
			}
			return nil
		}, 3, 3, ""},
		{"with a failure", Plan{Rounds: 9}, func(n int) error {
			if n == 3 {
				return stop
			}
			return nil
		}, 2, 3, "arm: stop"},
		{"with a failure while warming up", Plan{Rounds: 9, WarmUp: 1}, func(int) error { return stop }, 0, 1, "arm: stop"},
		{"before a round that may not be", Plan{Rounds: 9, Round: func(n int) error {
			if n == 2 {
				return stop
			}
			return nil
		}}, func(int) error { return nil }, 1, 1, "stop"},
		{"no rounds", Plan{}, nil, 0, 0, "0 rounds"},
		{"too many rounds", Plan{Rounds: MaxRounds + 1}, nil, 0, 0, "want 1 to 10000"},
		{"too many to warm up", Plan{Rounds: 1, WarmUp: MaxRounds + 1}, nil, 0, 0, "10001 to warm up"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				turns := 0
				n, err := tt.plan.Interleave(t.Context(), Arm{Name: "arm", Sample: func(context.Context, bool) error {
					time.Sleep(time.Second)
					turns++
					return tt.sample(turns)
				}})
				if n != tt.rounds || turns != tt.turns || (err == nil) != (tt.says == "") || err != nil && !strings.Contains(err.Error(), tt.says) {
					t.Errorf("%d rounds, %d turns, %v; want %d, %d, %q", n, turns, err, tt.rounds, tt.turns, tt.says)
				}
			})
		})
	}
}

// TestDone: an arm that has no further turn does not end those of the others.
func TestDone(t *testing.T) {
	turns := map[string]int{}
	arm := func(name string, most int) Arm {
		return Arm{Name: name, Sample: func(context.Context, bool) error {
			if turns[name]++; turns[name] == most {
				return ErrDone
			}
			return nil
		}}
	}
	n, err := Plan{Rounds: 5}.Interleave(t.Context(), arm("a", 2), arm("b", 99))
	if n != 5 || err != nil || turns["a"] != 2 || turns["b"] != 5 {
		t.Errorf("%d rounds, %v, %v", n, err, turns)
	}
}

func TestTurnsHaveDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := Arm{Name: "slow", Sample: func(ctx context.Context, _ bool) error { return Sleep(ctx, time.Hour) }}
		begin := time.Now()
		_, err := Plan{Rounds: 2, Each: time.Minute}.Interleave(t.Context(), slow)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "slow: it took longer than 1m0s") || time.Since(begin) != time.Minute {
			t.Errorf("after %s: %v", time.Since(begin), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if n, err := (Plan{Rounds: 2, Each: time.Minute}).Interleave(ctx, slow); n != 0 || !errors.Is(err, context.DeadlineExceeded) || strings.Contains(err.Error(), "took longer") {
			t.Errorf("the caller's deadline: %d, %v", n, err)
		}
	})
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	turns := 0
	n, err := Plan{Rounds: 9}.Interleave(ctx, Arm{Sample: func(context.Context, bool) error {
		if turns++; turns == 3 {
			cancel()
		}
		return nil
	}})
	if n != 3 || turns != 3 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d rounds, %d turns, %v", n, turns, err)
	}
}

func TestLoad(t *testing.T) {
	for _, tt := range []struct {
		name string
		load Load
		most int           // at a time
		took time.Duration // where one takes a second
	}{
		{"nothing", Load{}, 0, 0},
		{"all at once", Load{Count: 50}, 50, time.Second},
		{"a few at a time", Load{Count: 7, Width: 3}, 3, 3 * time.Second},
		{"room for more", Load{Count: 2, Width: 3}, 2, time.Second},
		{"at a pace", Load{Count: 4, Every: 300 * time.Millisecond}, 4, 1900 * time.Millisecond},
		{"at a pace, one at a time", Load{Count: 4, Width: 1, Every: 300 * time.Millisecond}, 1, 4 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				now, most := 0, 0
				seen := map[int]int{}
				took, failed := tt.load.Run(t.Context(), func(i int) error {
					mu.Lock()
					now++
					most = max(most, now)
					seen[i]++
					mu.Unlock()
					time.Sleep(time.Second)
					mu.Lock()
					now--
					mu.Unlock()
					if i%2 == 1 {
						return errors.New("odd")
					}
					return nil
				})
				if most != tt.most || took != tt.took || len(seen) != tt.load.Count || len(failed) != tt.load.Count/2 {
					t.Errorf("%d at once, %s, %v, %d failed", most, took, seen, len(failed))
				}
			})
		})
	}
}

// TestLoadEnds: when the caller does not wait any more no further one is started, and those that run
// are waited for.
func TestLoadEnds(t *testing.T) {
	for _, load := range []Load{{Count: 9, Width: 1}, {Count: 9, Every: time.Second}} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
			defer cancel()
			var mu sync.Mutex
			started, ended := 0, 0
			load.Run(ctx, func(int) error {
				mu.Lock()
				started++
				mu.Unlock()
				time.Sleep(time.Second)
				mu.Lock()
				ended++
				mu.Unlock()
				return nil
			})
			if started != 2 || ended != 2 {
				t.Errorf("%+v: %d started, %d ended", load, started, ended)
			}
		})
	}
}
