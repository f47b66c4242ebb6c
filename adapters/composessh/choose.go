package composessh

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosts"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// A capacity is the room on one host.
type capacity struct {
	h        *host
	free     int
	used     int
	diskFree int64   // bytes, the least of where sandboxes and where images go; -1 if it is not known
	load     float64 // processes that run or wait, for each processor
}

// full says why the host takes no sandbox, "" if it does.
func (o *capacity) full(minFree int64) string {
	switch {
	case o.h.draining:
		return o.h.Name() + " is being drained"
	case o.free == 0:
		return fmt.Sprintf("%s has %d of %d", o.h.Name(), o.used, o.h.capacity)
	case o.diskFree >= 0 && o.diskFree < minFree:
		return fmt.Sprintf("%s has %d MiB of disk left", o.h.Name(), o.diskFree>>20)
	}
	return ""
}

// busy is the load from which on a host is used only if all are as busy.
const busy = 2

// better sorts capacities: hosts that are not busy first, then by room.
func better(a, b *capacity) int {
	rank := func(o *capacity) int {
		if o.load >= busy {
			return 1
		}
		return 0
	}
	return cmp.Or(rank(a)-rank(b), b.free-a.free, strings.Compare(a.h.Name(), b.h.Name()))
}

// capacityScript prints how many sandboxes are below $1, kilobytes free there and in $3, the load
// and how many processors there are; it fails if the engine $2 does not answer.
const capacityScript = `
cd -- "$1" || exit; n=0; for d in sbx-*; do [ ! -d "$d" ] || n=$((n+1)); done; echo $n
{ df -Pk . "$3" 2>/dev/null || df -Pk . 2>/dev/null; } | awk 'NR > 1 && (m == "" || $4 < m) { m = $4 } END { print m == "" ? -1 : m }'
cut -d' ' -f1 /proc/loadavg 2>/dev/null || echo 0
grep -c ^processor /proc/cpuinfo 2>/dev/null || echo 1
[ "$2" != docker ] || docker version --format . >/dev/null`

const (
	// restTime is how long a create waits for further hosts once one has room.
	restTime = 300 * time.Millisecond
	// slowTime is how long a host that did not answer by then is not waited for.
	slowTime = time.Minute
)

// capacities returns the room on those hosts. With hurry it does not wait for hosts that
// take longer than restTime, or that did so lately.
func (e *extension) capacities(ctx context.Context, names []string, hurry bool) ([]*capacity, error) {
	type answer struct {
		name string
		o    *capacity
		err  error
	}
	answers := make(chan answer, len(names))
	asking, cancel := context.WithCancel(ctx)
	defer cancel()
	awaited := map[string]bool{}
	for _, name := range names {
		awaited[name] = true
	}
	for _, name := range names {
		go func() {
			var o *capacity
			h, err := e.use(asking, name)
			if err == nil {
				o, err = e.capacityOf(asking, h)
			}
			if err == nil {
				e.noteAnswer(name, true)
			}
			answers <- answer{name, o, err}
		}()
	}
	var offers []*capacity
	var failed error
	var enough <-chan time.Time
	for len(awaited) > 0 && (enough == nil || !e.allSlow(awaited)) {
		select {
		case a := <-answers:
			delete(awaited, a.name)
			if a.err != nil {
				failed = a.err
				if !hurry || ctx.Err() != nil {
					continue
				}
				e.noteAnswer(a.name, false)
				continue
			}
			offers = append(offers, a.o)
			if hurry && enough == nil && a.o.full(e.cfg.MinFree) == "" {
				enough = time.After(restTime)
			}
		case <-enough:
			for name := range awaited {
				e.noteAnswer(name, false)
			}
		}
	}
	if len(offers) == 0 {
		return nil, failed
	}
	slices.SortFunc(offers, func(a, b *capacity) int { return strings.Compare(a.h.Name(), b.h.Name()) })
	return offers, nil
}

// noteAnswer notes whether a host answered in time.
func (e *extension) noteAnswer(name string, inTime bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if inTime {
		delete(e.slow, name)
	} else {
		e.slow[name] = time.Now()
	}
}

// allSlow reports whether none of the hosts answered in time lately.
func (e *extension) allSlow(names map[string]bool) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for name := range names {
		if at, ok := e.slow[name]; !ok || time.Since(at) > slowTime {
			return false
		}
	}
	return true
}

func (e *extension) capacityOf(ctx context.Context, h *host) (*capacity, error) {
	out, err := h.engine.Script(ctx, nil, nil, capacityScript, h.known.root, h.known.engine, cmp.Or(h.known.data, "."))
	if err != nil {
		return nil, err
	}
	f := append(strings.Fields(out), "", "", "", "")
	o := &capacity{h: h, diskFree: -1}
	o.used, _ = strconv.Atoi(f[0])
	if k, err := strconv.ParseInt(f[1], 10, 64); err == nil && k >= 0 && k < 1<<50 {
		o.diskFree = k << 10
	}
	load, _ := strconv.ParseFloat(f[2], 64)
	processors, _ := strconv.Atoi(f[3])
	o.load = load / float64(max(1, processors))
	if o.free = max(0, h.capacity-o.used); h.draining {
		o.free = 0
	}
	return o, nil
}

// Place implements sandboxer.Placer: it returns the requested host, or the host with most room.
// A single host is not asked for its room: making the sandbox shows what it can take.
func (e *extension) Place(ctx context.Context, spec sandboxer.Spec, avoid []string) (string, error) {
	p, err := e.plan(ctx, spec)
	if err != nil {
		return "", err
	}
	h, err := e.choose(ctx, p, avoid)
	if err != nil {
		return "", err
	}
	return h.Name(), nil
}

// choose returns the host for p, none of avoid.
func (e *extension) choose(ctx context.Context, p *plan, avoid []string) (*host, error) {
	avoided := func(name string) bool { return slices.Contains(avoid, name) }
	if at, err := e.former(ctx, p.name); err != nil {
		return nil, err
	} else if at != "" && at != untouched && !avoided(at) { // an earlier version put it there
		return e.host(at)
	}
	names, err := e.candidates(p.spec.Host)
	if err != nil {
		return nil, err
	}
	all, err := e.names()
	if err != nil {
		return nil, err
	}
	if names = slices.DeleteFunc(names, avoided); len(names) == 0 {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "%s has no host for sandbox %s other than %s", e.env.Extension, p.spec.ID, strings.Join(avoid, ", ")).
			WithHint("add one: sandboxer host add NAME USER@HOST")
	}
	if len(all) == 1 {
		h, err := e.host(names[0])
		if err == nil && h.draining {
			err = sshrun.DrainingError(h.Name())
		}
		return h, err
	}
	offers, err := e.capacities(ctx, names, true)
	if err != nil {
		return nil, err
	}
	var with []*capacity
	var full []string
	for _, o := range offers {
		why := o.full(e.cfg.MinFree)
		switch {
		case o.h.draining && p.spec.Host != "":
			return nil, sshrun.DrainingError(o.h.Name())
		case why != "":
			full = append(full, why)
		default:
			with = append(with, o)
		}
	}
	if len(with) == 0 {
		return nil, sandboxer.E(sandboxer.Exhausted, nil, "no host of %s has room for another sandbox: %s", e.env.Extension, strings.Join(full, ", ")).
			WithHint("destroy unused sandboxes, free disk space, add a host, or raise a host's capacity (host add --capacity)")
	}
	slices.SortStableFunc(with, better)
	for _, o := range with { // the first that can hold it, and of none why the first cannot
		if e.fits(o.h, p) == nil {
			return o.h, nil
		}
	}
	return with[0].h, e.fits(with[0].h, p)
}

// candidates are the hosts for a sandbox that is requested on the host only, or on any if that is "".
func (e *extension) candidates(only string) ([]string, error) {
	names, err := e.names()
	switch {
	case err != nil:
		return nil, err
	case only == "":
		return names, nil
	case !slices.Contains(names, only):
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%s has no host %q", e.env.Extension, only).WithHint("it has %s", strings.Join(names, ", "))
	}
	return []string{only}, nil
}

// Capacity implements sandboxer.CapacityReporter.
func (e *extension) Capacity(ctx context.Context, only string) (sandboxer.HostCapacity, error) {
	names, err := e.candidates(only)
	if err != nil {
		return sandboxer.HostCapacity{}, err
	}
	offers, err := e.capacities(ctx, names, false)
	var rooms []hosts.Room
	for _, o := range offers {
		k := o.h.known
		about := fmt.Sprintf("%s %s, %s %s, %d of %d", k.engine, k.server, strings.Join(k.compose, " "), k.version, o.used, o.h.capacity)
		if o.h.draining {
			about += ", draining"
		}
		rooms = append(rooms, hosts.Room{Host: o.h.Name(), Free: o.free, About: about})
	}
	return hosts.Capacity(rooms), err
}
