package measure

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// MaxRounds bounds a plan: percentiles do not get better beyond it.
const MaxRounds = 10_000

// Arm is one of the things that take turns.
type Arm struct {
	Name string
	// Sample takes one sample, or several that belong together; while warming up they do not
	// count. [ErrDone] ends the turns of this arm, any other error ends all.
	Sample func(ctx context.Context, counts bool) error
}

// ErrDone says that an arm takes no further turn. Samples that it took count.
var ErrDone = errors.New("no further turn")

// Plan is how arms take turns.
type Plan struct {
	Rounds int               // every arm once in each; 1 to MaxRounds
	WarmUp int               // rounds before those, whose samples do not count
	Within time.Duration     // no further round begins later than this after the first; 0 means any time
	Each   time.Duration     // the deadline of one turn; 0 leaves it to the arm
	Order  func(n int) []int // of the arms in one round; random if nil
	// Round, if it is not nil, is called before each round that counts, and an error of it
	// ends all. n counts from 1.
	Round func(n int) error
}

// Interleave lets the arms take turns, one at a time, and returns how many rounds were
// whole: fewer than planned when Within was over or no arm had a further turn. When ctx ends
// or a turn fails, its error is returned.
func (p Plan) Interleave(ctx context.Context, arms ...Arm) (rounds int, err error) {
	if p.Rounds < 1 || p.Rounds > MaxRounds || p.WarmUp < 0 || p.WarmUp > MaxRounds {
		return 0, fmt.Errorf("%d rounds after %d to warm up: want 1 to %d, and not more to warm up", p.Rounds, p.WarmUp, MaxRounds)
	}
	if p.Order == nil {
		p.Order = rand.Perm
	}
	done := make([]bool, len(arms))
	left := len(arms)
	var began time.Time
	for n := 1 - p.WarmUp; n <= p.Rounds && left > 0; n++ {
		if n == 1 {
			began = time.Now()
		}
		if n > 1 && p.Within > 0 && time.Since(began) >= p.Within {
			break
		}
		if n > 0 && p.Round != nil {
			if err := p.Round(n); err != nil {
				return rounds, err
			}
		}
		for _, i := range p.Order(len(arms)) {
			if err := ctx.Err(); err != nil {
				return rounds, err
			}
			if done[i] {
				continue
			}
			switch err := p.turn(ctx, arms[i], n > 0); {
			case errors.Is(err, ErrDone):
				done[i] = true
				left--
			case err != nil:
				return rounds, fmt.Errorf("%s: %w", arms[i].Name, err)
			}
		}
		if n > 0 {
			rounds = n
		}
	}
	return rounds, ctx.Err()
}

func (p Plan) turn(ctx context.Context, a Arm, counts bool) error {
	if p.Each == 0 {
		return a.Sample(ctx, counts)
	}
	tctx, cancel := context.WithTimeout(ctx, p.Each)
	defer cancel()
	err := a.Sample(tctx, counts)
	if err != nil && tctx.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("it took longer than %s: %w", p.Each, err)
	}
	return err
}

// Load is many things at the same time.
type Load struct {
	Count int           // how many
	Width int           // at a time; 0 means all at once
	Every time.Duration // between two that are started; 0 starts one as soon as there is room
}

// Run calls do with 0 to Count-1 and returns, when all have ended, how long that took and
// the errors, in no order. After ctx has ended it starts no further one, and waits for those
// that it has started.
func (l Load) Run(ctx context.Context, do func(i int) error) (took time.Duration, failed []error) {
	var mu sync.Mutex // guards failed
	var wg sync.WaitGroup
	width := l.Width
	if width <= 0 {
		width = max(l.Count, 1)
	}
	room := make(chan struct{}, width)
	begin := time.Now()
	for i := range l.Count {
		if i > 0 && l.Every > 0 && !sleepUntil(ctx, begin.Add(time.Duration(i)*l.Every)) {
			break
		}
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		wg.Go(func() {
			defer func() { <-room }()
			if err := do(i); err != nil {
				mu.Lock()
				failed = append(failed, err)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return time.Since(begin), failed
}

// Sleep waits for d, or until ctx ends, whose error it then returns.
func Sleep(ctx context.Context, d time.Duration) error {
	if !sleepUntil(ctx, time.Now().Add(d)) {
		return ctx.Err()
	}
	return nil
}

func sleepUntil(ctx context.Context, at time.Time) bool {
	t := time.NewTimer(time.Until(at))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
