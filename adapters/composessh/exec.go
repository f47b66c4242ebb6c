package composessh

import (
	"cmp"
	"context"
	"errors"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/hosts"
)

// Services implements sandboxer.Serviced.
func (e *extension) Services(ctx context.Context, h sandboxer.Handle) ([]string, error) {
	_, m, err := e.find(ctx, h)
	if err != nil {
		return nil, err
	}
	return m.names(), nil
}

// names are those of the services, the default one first.
func (m *meta) names() []string {
	names := []string{m.Service}
	for _, s := range m.Services {
		if s.Name != m.Service {
			names = append(names, s.Name)
		}
	}
	return names
}

// Exec implements sandboxer.Execer.
func (e *extension) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	exit, err := e.exec(ctx, h, cmd)
	if errors.Is(err, engine.ErrNotFound) { // what was known of it is not so any more
		if exit, err = e.exec(ctx, h, cmd); errors.Is(err, engine.ErrNotFound) {
			err = hosts.Missing(h.SandboxID)
		}
	}
	return exit, err
}

// exec runs a command in the cached container of its service. NotFound, with
// engine.ErrNotFound as the cause: that container is gone, and is not cached any more.
func (e *extension) exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	service := m.service(cmp.Or(cmd.Service, m.Service))
	if service == nil {
		return sandboxer.Exit{}, sandboxer.E(sandboxer.Invalid, nil, "sandbox %s has no service %q", m.ID, cmp.Or(cmd.Service, m.Service)).WithHint("it has %s", strings.Join(m.names(), ", "))
	}
	id, err := ho.container(ctx, m, service.Name)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	cmd.User, cmd.Dir = cmp.Or(cmd.User, m.User), cmp.Or(cmd.Dir, service.Workspace)
	if exit, err, ok := e.execByAgent(ctx, ho, m, id, cmd); ok {
		return exit, err
	}
	exit, err := ho.engine.Exec(ctx, id, cmd)
	return exit, e.notRunning(m, err)
}

// notRunning says in terms of the sandbox why its container takes no command. NotFound, with
// engine.ErrNotFound as the cause: it is gone, and not cached any more. Other errors stay.
func (e *extension) notRunning(m *meta, err error) error {
	var ended *engine.EndedError
	switch {
	case errors.Is(err, engine.ErrNotFound):
		e.forgetSandbox(m.Name)
	case errors.Is(err, engine.ErrPaused):
		return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is paused", m.ID).WithHint("resume it first: sandboxer resume %s", m.ID)
	case errors.As(err, &ended):
		return sandboxer.E(sandboxer.NotFound, nil, "the service for commands has ended in sandbox %s (%s)", m.ID, ended.Status)
	}
	return err
}

// container returns the container of a service.
func (h *host) container(ctx context.Context, m *meta, service string) (string, error) {
	id, err := h.engine.Find(ctx, m.Name, service)
	if err == nil && id == "" {
		err = noContainer(m, service)
	}
	return id, err
}

func noContainer(m *meta, service string) error {
	return sandboxer.E(sandboxer.NotFound, nil, "sandbox %s no longer has a container of the service %s", m.ID, service)
}
