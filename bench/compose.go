//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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

	buildCold = "compose over ssh, three builds: create to ready, nothing built before"
	buildWarm = "compose over ssh, three builds: create to ready, layers there"
	buildDown = "compose over ssh, three builds: destroy"
	handCold  = "by hand over ssh, three builds: rsync and up --build --wait, nothing built before"
	handWarm  = "by hand over ssh, three builds: rsync and up --build --wait, layers there"
	handGone  = "by hand over ssh, three builds: docker compose down -v"
	withDead  = "compose over ssh: create to ready, with a second host that is dead"
)

// buildFile has three services that are built, of directories of their own, one of which ends
// only when it is killed, as most programs do that were not written for containers.
const buildFile = `services:
  web: {build: web, volumes: [".:/src"], healthcheck: {test: ["CMD", "true"], interval: 1s}, depends_on: [api, worker]}
  api: {build: api, volumes: ["data:/data"]}
  worker: {build: worker, volumes: ["data:/data"]}
volumes: {data: {}}
`

// dockerfile takes a second of work in a step that depends on nonce.
const dockerfile = `FROM %s
ENV NONCE=%s
COPY . /app
RUN sleep 1 && echo "$NONCE" >/built
CMD ["sleep", "100000"]
`

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
	registry := sshrun.NewRegistry(filepath.Join(b.broker.dir, "data", "hosts"))
	if err := registry.Put(rec); err != nil {
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
	// What is built lies in a directory here, and is copied as people do it.
	local, there := b.path("builds"), filepath.Join(s.Dir, "builds")
	write := func(nonce string) error {
		err := os.MkdirAll(local, 0o755)
		for _, name := range []string{"web", "api", "worker"} {
			err = errors.Join(err, os.MkdirAll(filepath.Join(local, name), 0o755),
				os.WriteFile(filepath.Join(local, name, "main.txt"), []byte(name+" "+nonce), 0o644),
				os.WriteFile(filepath.Join(local, name, "Dockerfile"), fmt.Appendf(nil, dockerfile, b.docker.name, name+nonce), 0o644))
		}
		return errors.Join(err, os.WriteFile(filepath.Join(local, "compose.yaml"), []byte(buildFile), 0o644))
	}
	nonces := 0
	// builds is one project built for the first time and again, by one of two ways.
	builds := func(up func() (time.Duration, func() (time.Duration, error), error), cold, warm, gone string) error {
		nonces++
		if err := write(fmt.Sprint(os.Getpid(), "-", nonces)); err != nil {
			return err
		}
		for _, what := range []string{cold, warm} {
			took, down, err := up()
			if err != nil {
				return err
			}
			b.r.took(what, took)
			if took, err = down(); err != nil {
				return err
			}
			b.r.took(gone, took)
		}
		return nil
	}
	one := map[string]func() error{
		buildWarm: func() error {
			return builds(func() (time.Duration, func() (time.Duration, error), error) {
				start := time.Now()
				sb, err := b.broker.Create(ctx, api.CreateSandbox{Profile: "profile.compose-e2e", Inputs: map[string]string{"repo": local}})
				if err != nil {
					return 0, nil, err
				}
				return time.Since(start), func() (time.Duration, error) { return destroy(sb.ID) }, nil
			}, buildCold, buildWarm, buildDown)
		},
		handWarm: func() error {
			in := func(args ...string) (time.Duration, error) {
				line := "DOCKER_BUILDKIT=0 " + sshrun.Quote(append([]string{"docker", "compose", "-p", "built"}, args...)...)
				took, _, _, err := command(ctx, nil, append(append([]string{"ssh"}, login...), t.Addr, "cd "+sshrun.Quote(there)+" && "+line)...)
				return took, err
			}
			return builds(func() (time.Duration, func() (time.Duration, error), error) {
				start := time.Now()
				_, _, _, err := command(ctx, nil, "rsync", "-a", "--delete", "-e", sshrun.Quote(append([]string{"ssh"}, login...)...), local+"/", t.Addr+":"+there)
				if err == nil {
					_, err = in("up", "-d", "--build", "--wait")
				}
				took := time.Since(start)
				if err != nil {
					return 0, nil, errors.Join(err, func() error { _, err := in("down", "-v", "-t", "0"); return err }())
				}
				return took, func() (time.Duration, error) { return in("down", "-v") }, nil
			}, handCold, handWarm, handGone)
		},
		withDead: func() error {
			dead, err := net.Listen("tcp", "127.0.0.1:0") // it takes connections and never speaks
			if err != nil {
				return err
			}
			defer dead.Close()
			away := rec
			away.Name, away.Port = "away", dead.Addr().(*net.TCPAddr).Port
			if err := registry.Put(away); err != nil {
				return err
			}
			id, took, err := create(ctx)
			if err != nil {
				return errors.Join(err, registry.Remove(away.Name))
			}
			b.r.took(withDead, took)
			_, err = destroy(id)
			return errors.Join(err, registry.Remove(away.Name))
		},
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
		ways = append(ways, buildWarm, handWarm, withDead)
		if i%2 == 1 {
			slices.Reverse(ways)
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
	b.r.most(buildWarm+" / by hand", m(buildWarm)/m(handWarm), 1.1, "x")
	b.r.most(buildCold+" / by hand", m(buildCold)/m(handCold), 1.3, "x")
	b.r.most(buildDown+" / by hand", m(buildDown)/m(handGone), 0.5, "x")
	b.r.most(withDead+" / without", m(withDead)/m(composeUp), 1.2, "x")
}
