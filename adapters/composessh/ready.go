package composessh

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/hosts"
)

// settled is how long a service without a health check must have run to count as
// running.
const settled = time.Second

// restarting is how long an engine takes from the end of a service to its next start, or
// at least to reporting that it waits for that.
const restarting = 10 * time.Second

// ready says whether a sandbox is ready, and if not whether it can still become so; wait is how
// long that takes at least.
func (m *meta) ready(s *status, settle time.Duration, podman bool) (ready bool, wait time.Duration, err error) {
	ready = true
	for _, want := range m.Services {
		count := 0
		for i := range s.containers {
			c := &s.containers[i]
			if c.Service() != want.Name {
				continue
			}
			count++
			switch health := c.Health(); {
			case c.State.Status == "exited" || c.State.Status == "dead" || c.State.Status == "stopped":
				most := min(want.Restarts, restarts(podman))
				switch {
				case c.State.ExitCode == 0 && (want.OneShot || want.MayEnd && want.Name != m.Service):
					continue
				case c.State.ExitCode == 0 && want.MayEnd:
					return false, 0, sandboxer.E(sandboxer.Failed, nil, "the service %s, in which commands run, ended with exit status 0", want.Name).
						WithHint("keep it running (command: sleep infinity), or choose another service: --input service=NAME")
				case c.State.ExitCode != 0 && c.RestartCount < most && s.at.Sub(c.State.FinishedAt) < restarting:
					ready = false // the engine is about to
					continue
				}
				why := fmt.Sprintf("ended with exit status %d", c.State.ExitCode)
				if c.RestartCount > 0 {
					why += fmt.Sprintf(", after %d restarts", c.RestartCount)
				}
				if c.State.OOMKilled {
					why = "was killed because it used too much memory"
				}
				return false, 0, sandboxer.E(sandboxer.Failed, errors.New(c.State.Error), "the service %s %s", want.Name, why)
			case !c.State.Running || c.State.Paused || c.State.Status == "restarting":
				ready = false
			case want.OneShot:
				ready = false
			case health == "unhealthy":
				why := ""
				if h := c.State.Health; h != nil && len(h.Log) > 0 {
					if said := engine.OneLine(c.Redact(h.Log[len(h.Log)-1].Output)); said != "" {
						why = ": " + said
					}
				}
				return false, 0, sandboxer.E(sandboxer.Failed, nil, "the health check of the service %s fails%s", want.Name, why)
			case health == "starting":
				ready, wait = false, max(wait, c.NextCheck(s.at))
			case health == "healthy":
			default:
				if left := settle - s.at.Sub(c.State.StartedAt); left > 0 {
					ready, wait = false, max(wait, left)
				}
			}
		}
		if count < want.Replicas {
			ready = false
		}
	}
	return ready, wait, nil
}

// same reports whether a and b show the same containers, none restarted.
func same(a, b *status) bool {
	return a != nil && slices.EqualFunc(a.containers, b.containers, func(x, y engine.Container) bool { return x.ID == y.ID && x.State.StartedAt.Equal(y.State.StartedAt) })
}

// WaitReady implements sandboxer.Extension. The answer of compose does not count: it asks the
// engine, by label, until it has twice seen every service of the file running, and
// healthy where it has a check.
func (e *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (r sandboxer.Reachability, err error) {
	if err := ctx.Err(); err != nil {
		return r, err
	}
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return r, err
	}
	var last *status
	missing := 0
	checked := map[string]time.Time{}
	for {
		var s *status
		err := e.step(pLook, func() (err error) { s, err = e.status(ctx, ho, m.Name); return err })
		if err != nil {
			return r, err
		}
		if s.dir == "none" {
			return r, hosts.Missing(h.SandboxID)
		}
		if s.dir == "up" && len(s.containers) < len(m.Services) {
			if missing++; missing > 1 {
				return r, sandboxer.E(sandboxer.NotFound, nil, "containers of sandbox %s are gone from host %s", h.SandboxID, ho.Name())
			}
		} else {
			missing = 0
		}
		ready, wait, err := m.ready(s, e.settle, ho.known.engine == "podman")
		if err != nil {
			return r, e.explain(ctx, ho, s, err)
		}
		if ready && same(last, s) {
			return e.reach(ho, m), nil
		}
		if err := e.check(ctx, ho, s, checked); err != nil {
			return r, err
		}
		if ho.known.engine == "podman" {
			wait = 0 // it is this look that has Podman look
		}
		last, wait = nil, min(max(wait, 150*time.Millisecond), time.Second)
		if ready {
			last, wait = s, 50*time.Millisecond
		}
		select {
		case <-ctx.Done():
			return r, ctx.Err()
		case <-time.After(wait):
		}
	}
}

// check has Podman check the health of the services that are due: Podman does so on its own
// only where systemd runs its timers. checked is when each was checked last.
func (e *extension) check(ctx context.Context, h *host, s *status, checked map[string]time.Time) error {
	if h.known.engine != "podman" {
		return nil
	}
	var due []string
	for i := range s.containers {
		c := &s.containers[i]
		if c.State.Running && c.Health() == "starting" && c.Config.Healthcheck != nil && time.Since(checked[c.ID]) >= c.Config.Healthcheck.Interval {
			checked[c.ID] = time.Now()
			due = append(due, c.ID)
		}
	}
	if len(due) == 0 {
		return nil
	}
	_, err := e.script(ctx, h, nil, nil, `[ ! -d /run/systemd/system ] || exit 0; for i; do podman healthcheck run "$i" >/dev/null 2>&1; done; exit 0`, due...)
	return err
}

// explain adds a service's last output to its failure, without the values of its
// environment.
func (e *extension) explain(ctx context.Context, h *host, s *status, cause error) error {
	for i := range s.containers {
		c := &s.containers[i]
		if !strings.Contains(sandboxer.Message(cause), "service "+c.Service()) {
			continue
		}
		out, err := h.engine.Logs(ctx, c.ID, 5)
		if err != nil || strings.TrimSpace(out) == "" {
			continue
		}
		out = c.Redact(out)
		told := sandboxer.E(sandboxer.KindOf(cause), cause, "%s; its last output: %s", sandboxer.Message(cause), engine.OneLine(out))
		if strings.Contains(strings.ToLower(out), "no new privileges") || strings.Contains(out, "no-new-privileges") {
			return told.WithHint("services have no-new-privileges; a profile with the input new_privileges: yes lets them use sudo and similar programs")
		}
		if lacksNetwork(out) {
			return told.WithHint("%s", e.networkHint())
		}
		return told
	}
	return cause
}

func (e *extension) reach(h *host, m *meta) sandboxer.Reachability {
	t := h.Target()
	r := sandboxer.Reachability{
		Host: h.Name(), SSH: t.Paste(), RemoteDir: path.Join(h.known.root, m.Name, "repo"), ComposeProject: m.Name,
		Extra: map[string]string{"compose": strings.Join(h.known.compose, " "), "service": m.Service},
	}
	if len(m.Notes) > 0 {
		r.Extra[sandboxer.ExtraChanged] = strings.Join(m.Notes, "; ")
	}
	seen := map[int]bool{}
	add := func(port int) {
		if port > 0 && !seen[port] {
			seen[port] = true
			r.Ports = append(r.Ports, sandboxer.Port{Port: port})
		}
	}
	for _, s := range m.Services {
		for _, p := range s.Ports {
			if p.Protocol != "tcp" {
				continue
			}
			if p.Published > 0 {
				add(p.Published)
			} else {
				add(p.Target)
			}
		}
	}
	for _, p := range m.Ports {
		add(p)
	}
	return r
}
