//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

const (
	composeStep = "compose projects over ssh"
	composeUp   = "compose over ssh: create to ready"
	composeDown = "compose over ssh: destroy"
	composeSix  = "compose over ssh: six at once, create to ready"
	handUp      = "by hand over ssh: docker compose up --wait"
	handDown    = "by hand over ssh: docker compose down -v -t 0"
	handSix     = "by hand over ssh: docker compose up --wait, six at once"
	abreast     = 6
)

// composeFile has two services with a check a second, in the image %[1]s.
const composeFile = `services:
  web:
    image: %[1]s
    command: [sleep, "100000"]
    volumes: [".:/src", "data:/data"]
    healthcheck: {test: ["CMD", "true"], interval: 1s}
  db:
    image: %[1]s
    command: [sleep, "100000"]
    volumes: ["data:/data"]
    healthcheck: {test: ["CMD", "true"], interval: 1s}
volumes: {data: {}}
`

// overCompose measures compose projects on a host on loopback, through the broker and as
// somebody does who types the commands into a connection of ssh that is open already,
// into a directory where the project is already.
func (b *bench) overCompose(ctx context.Context) (err error) {
	h := &harness{b: b}
	defer func() {
		if p := recover(); p != nil {
			s, ok := p.(stopped)
			if !ok {
				panic(p)
			}
			b.r.skip("%s: %v", composeStep, s.error)
		}
		for i := len(h.undo) - 1; i >= 0; i-- {
			h.undo[i]()
		}
	}()
	if b.docker == nil {
		b.r.skip("%s: no Docker engine", composeStep)
		return nil
	}
	plugin := filepath.Join(b.bin, "docker-compose")
	if _, err := os.Stat(plugin); err != nil {
		b.r.skip("%s: %v (scripts/setup.sh builds it)", composeStep, err)
		return nil
	}
	s := sshtest.Start(h, sshtest.Options{Silent: true, Env: []string{"DOCKER_HOST=" + os.Getenv("DOCKER_HOST")}})
	plugins, dir := filepath.Join(s.Dir, ".docker", "cli-plugins"), filepath.Join(s.Dir, "project")
	err = errors.Join(os.MkdirAll(plugins, 0o755), os.Mkdir(dir, 0o755))
	if err == nil {
		err = errors.Join(os.Symlink(plugin, filepath.Join(plugins, "docker-compose")),
			os.WriteFile(filepath.Join(dir, "compose.yaml"), fmt.Appendf(nil, composeFile, b.docker.name), 0o644))
	}
	if err != nil {
		return err
	}
	t := s.Target()
	rec := sshrun.Record{Name: "bench", Addr: t.Addr, Port: t.Port, IdentityFile: t.IdentityFile, HostKeys: t.HostKeys, State: sshrun.Active, AddedAt: time.Now()}
	if err := sshrun.NewRegistry(filepath.Join(b.broker.dir, "data", "hosts")).Put(rec); err != nil {
		return err
	}
	login := []string{"-F", "none", "-i", t.IdentityFile, "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
		"-o", "LogLevel=ERROR", "-S", b.path("c"), "-p", strconv.Itoa(t.Port)}
	if out, err := exec.CommandContext(ctx, "ssh", append(login, "-M", "-N", "-f", t.Addr)...).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	h.Cleanup(func() { exec.Command("ssh", append(login, "-O", "exit", t.Addr)...).Run() })

	hand := func(ctx context.Context, project string, args ...string) (time.Duration, error) {
		line := sshrun.Quote(append([]string{"docker", "compose", "-p", project}, args...)...)
		took, _, _, err := command(ctx, nil, append(append([]string{"ssh"}, login...), t.Addr, "cd "+sshrun.Quote(dir)+" && "+line)...)
		return took, err
	}
	handDownAll := func(project string) (time.Duration, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		return hand(ctx, project, "down", "-v", "-t", "0")
	}
	create := func(ctx context.Context) (id string, took time.Duration, err error) {
		start := time.Now()
		sb, err := b.broker.Create(ctx, api.CreateSandbox{Profile: "profile.compose-e2e", Inputs: map[string]string{"repo": dir}})
		if err != nil {
			return "", 0, err
		}
		return sb.ID, time.Since(start), nil
	}
	destroy := func(id string) (time.Duration, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		start := time.Now()
		_, err := b.broker.Destroy(ctx, id, true)
		return time.Since(start), err
	}
	one := map[string]func() error{
		composeUp: func() error {
			id, took, err := create(ctx)
			if err != nil {
				return err
			}
			gone, err := destroy(id)
			b.r.took(composeUp, took)
			b.r.took(composeDown, gone)
			return err
		},
		handUp: func() error {
			took, err := hand(ctx, "hand", "up", "-d", "--wait")
			gone, derr := handDownAll("hand")
			b.r.took(handUp, took)
			b.r.took(handDown, gone)
			return errors.Join(err, derr)
		},
	}
	// together calls f six times at once.
	together := func(f func(i int) error) (time.Duration, error) {
		var wg sync.WaitGroup
		errs := make([]error, abreast)
		start := time.Now()
		for i := range abreast {
			wg.Go(func() { errs[i] = f(i) })
		}
		wg.Wait()
		return time.Since(start), errors.Join(errs...)
	}
	six := map[string]func() error{
		composeSix: func() error {
			ids := make([]string, abreast)
			took, err := together(func(i int) (err error) { ids[i], _, err = create(ctx); return err })
			_, derr := together(func(i int) error {
				if ids[i] == "" {
					return nil
				}
				_, err := destroy(ids[i])
				return err
			})
			b.r.took(composeSix, took)
			return errors.Join(err, derr)
		},
		handSix: func() error {
			took, err := together(func(i int) error { _, err := hand(ctx, fmt.Sprintf("hand%d", i), "up", "-d", "--wait"); return err })
			_, derr := together(func(i int) error { _, err := handDownAll(fmt.Sprintf("hand%d", i)); return err })
			b.r.took(handSix, took)
			return errors.Join(err, derr)
		},
	}
	// What is done for the first time is not what is compared: the connection, the look
	// at the host.
	id, _, err := create(ctx)
	if err != nil {
		return err
	}
	if _, err := destroy(id); err != nil {
		return err
	}
	rounds := max(3, b.rounds/4)
	if b.quick {
		rounds = 3
	}
	for i := range rounds {
		ways := []string{composeUp, handUp}
		if i%3 == 0 {
			ways = append(ways, composeSix, handSix)
		}
		if i%2 == 1 {
			ways[0], ways[1] = ways[1], ways[0]
		}
		for _, w := range ways {
			do := one[w]
			if do == nil {
				do = six[w]
			}
			if err := do(); err != nil {
				return fmt.Errorf("%s: %w", w, err)
			}
		}
	}
	return nil
}

func (b *bench) composeBars() {
	m := b.r.median
	b.r.most(composeUp+" / "+handUp, m(composeUp)/m(handUp), 1.3, "x")
	b.r.most(composeSix+" / one", m(composeSix)/m(composeUp), 2.5, "x")
}
