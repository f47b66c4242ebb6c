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

// statusScript prints whether the directory of $2 below $1 exists and is complete, the time, and
// the sandbox's objects of the engine $3.
var statusScript = `
cd -- "$1" || exit
name=$2 engine=$3
if [ ! -d "$name" ]; then echo none; elif [ -e "$name/up" ]; then echo up; else echo making; fi
` + engine.ListScript + `
[ ! -e "$name/up" ] || [ -s "$name/up" ] || [ -z "$ids" ] || printf '%s\n' $ids >"$name/up"
` + engine.InspectScript

// A status is the result of one look at a sandbox.
type status struct {
	dir        string // none, making or up
	at         time.Time
	containers []engine.Container           // of services
	links      map[string]*engine.Container // whose network a service has, by its name, where that is filtered
}

// network is the container that has a service's addresses and published ports.
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
		return nil, sandboxer.E(sandboxer.Unavailable, err, "host %s: the engine's answer about sandbox %s cannot be read", h.Name(), name)
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
	p, err := e.locate(ctx, h)
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound:
		return sandboxer.Gone, nil
	case err != nil:
		return sandboxer.Unknown, err
	}
	ho, err := e.use(ctx, p.host)
	if err != nil {
		return sandboxer.Unknown, err
	}
	s, err := e.status(ctx, ho, p.name)
	switch {
	case errors.Is(err, engine.ErrHangs):
		// Containers go on without their engine.
		out, serr := e.script(ctx, ho, nil, nil, standing, ho.known.root, p.name)
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
