package composessh

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// statusScript prints whether the directory of $2 below $1 is there and complete, the time, and
// what the engine $3 has of it.
const statusScript = `
cd -- "$1" || exit
name=$2 engine=$3
if [ ! -d "$name" ]; then echo none; elif [ -e "$name/up" ]; then echo up; else echo making; fi
` + engine.ListScript + `
[ ! -e "$name/up" ] || [ -s "$name/up" ] || [ -z "$ids" ] || printf '%s\n' $ids >"$name/up"
` + engine.InspectScript

// A status is what one look at a sandbox showed.
type status struct {
	dir        string // none, making or up
	at         time.Time
	containers []engine.Container           // of services
	links      map[string]*engine.Container // whose network a service has, by its name, where that is filtered
}

// network is the container that a service's addresses and published ports are of.
func (s *status) network(c *engine.Container) *engine.Container {
	if l := s.links[c.Service()]; l != nil {
		return l
	}
	return c
}

// status looks at a sandbox.
func (e *extension) status(ctx context.Context, h *host, name string) (*status, error) {
	out, err := h.engine.Script(ctx, nil, nil, statusScript, h.known.root, name, h.known.engine)
	if err != nil {
		return nil, err
	}
	s := &status{links: map[string]*engine.Container{}}
	var rest string
	s.dir, rest, _ = strings.Cut(out, "\n")
	if s.at, s.containers, err = engine.ParseContainers(rest); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "host %s: what the engine says of sandbox %s cannot be read", h.Name(), name)
	}
	for i := range s.containers {
		if of := s.containers[i].Config.Labels[labelLink]; of != "" {
			s.links[of] = &engine.Container{NetworkSettings: s.containers[i].NetworkSettings}
		}
	}
	s.containers = slices.DeleteFunc(s.containers, func(c engine.Container) bool { return c.Service() == "" })
	return s, nil
}

// standing prints "there" if processes of the containers of $2, whose IDs are in its
// directory below $1 since it was up, are on the host: the kernel knows without the engine.
const standing = `
cd -- "$1" && [ -s "$2/up" ] || exit 0
[ -z "$(grep -lsF -f "$2/up" /proc/[0-9]*/cgroup 2>/dev/null | head -n 1)" ] || echo there`

// IsAlive implements sandboxer.Prober.
func (e *extension) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	name, at := e.where(h)
	if at == "" {
		found, err := e.search(ctx, h)
		switch {
		case len(found) > 0:
		case err != nil:
			return sandboxer.Unknown, err
		default:
			return sandboxer.Gone, nil
		}
		name, at = found[0].name, found[0].host
	}
	if at == untouched {
		return sandboxer.Gone, nil
	}
	ho, err := e.host(at)
	if err == nil {
		err = e.look(ctx, ho)
	}
	if err != nil {
		return sandboxer.Unknown, err
	}
	s, err := e.status(ctx, ho, name)
	switch {
	case errors.Is(err, engine.ErrHangs):
		// Containers go on without their engine.
		out, serr := e.script(ctx, ho, nil, nil, standing, ho.known.root, name)
		if serr == nil && strings.TrimSpace(out) == "there" {
			return sandboxer.Unresponsive, nil
		}
		return sandboxer.Unknown, err
	case err != nil:
		return sandboxer.Unknown, err
	case len(s.containers) > 0 || s.dir == "making":
		return sandboxer.Alive, nil
	}
	return sandboxer.Gone, nil
}
