//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/measure"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

const (
	composeUp   = "compose over ssh: create to ready"
	composeDown = "compose over ssh: destroy"
	composeSix  = "compose over ssh: six at once, create to ready"
	handUp      = "by hand over ssh: docker compose up --wait"
	handDown    = "by hand over ssh: docker compose down -v -t 0"
	handSix     = "by hand over ssh: docker compose up --wait, six at once"

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

// dockerfile takes so many seconds of work in a step that depends on nonce.
const dockerfile = `FROM %s
ENV NONCE=%s
COPY . /app
RUN sleep %d && echo "$NONCE" >/built
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

// oneService has one service, in the image %s.
const oneService = `services:
  web: {image: %s, command: [sleep, "100000"], healthcheck: {test: ["CMD", "true"], interval: 1s}}
`

// composeProjects measures compose projects on a host on loopback, through the broker and as
// somebody does who types the commands into a connection of ssh that is open already,
// into a directory where the project is already.
func (b *bench) composeProjects(ctx context.Context) error {
	return b.withSSH(composeStep, func(h *harness) error { return b.projects(ctx, h) })
}

// composeHost starts an SSH server on which docker compose is the engine that the bench uses.
// Without one, or without the compose plugin, the step is left out.
func (h *harness) composeHost() (*sshtest.Server, error) {
	plugin := filepath.Join(h.b.bin, "docker-compose")
	if h.b.docker == nil {
		h.Skip("no Docker engine")
	}
	if _, err := os.Stat(plugin); err != nil {
		h.Fatalf("%v (scripts/setup.sh builds it)", err)
	}
	s := sshtest.Start(h, sshtest.Options{Silent: true, Env: []string{"DOCKER_HOST=" + os.Getenv("DOCKER_HOST")}})
	plugins := filepath.Join(s.Dir, ".docker", "cli-plugins")
	if err := os.MkdirAll(plugins, 0o755); err != nil {
		return nil, err
	}
	return s, os.Symlink(plugin, filepath.Join(plugins, "docker-compose"))
}

// writeProject makes a compose project of a file.
func writeProject(dir, file string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "compose.yaml"), []byte(file), 0o644)
}

func (b *bench) projects(ctx context.Context, h *harness) error {
	s, err := h.composeHost()
	if err != nil {
		return err
	}
	dir := filepath.Join(s.Dir, "project")
	if err := writeProject(dir, fmt.Sprintf(composeFile, b.docker.name)); err != nil {
		return err
	}
	t := s.Target()
	rec := sshrun.Record{Name: "bench", Addr: t.Addr, Port: t.Port, IdentityFile: t.IdentityFile, HostKeys: t.HostKeys, State: sshrun.Active, AddedAt: time.Now()}
	registry := sshrun.NewRegistry(filepath.Join(b.broker.dir, "data", "hosts"))
	if err := registry.Put(rec); err != nil {
		return err
	}
	ssh, err := h.login(ctx, t)
	if err != nil {
		return err
	}
	// there runs a command in a directory of the host.
	there := func(ctx context.Context, dir, line string) (time.Duration, error) {
		took, _, _, err := command(ctx, nil, append(slices.Clone(ssh), t.Addr, "cd "+sshrun.Quote(dir)+" && "+line)...)
		return took, err
	}

	hand := func(ctx context.Context, project string, args ...string) (time.Duration, error) {
		return there(ctx, dir, sshrun.Quote(append([]string{"docker", "compose", "-p", project}, args...)...))
	}
	handDownAll := func(project string) (time.Duration, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		return hand(ctx, project, "down", "-v", "-t", "0")
	}
	create := func(ctx context.Context) (id string, took time.Duration, err error) {
		start := time.Now()
		sb, err := b.broker.Create(ctx, api.CreateSandbox{Profile: composeProfile, Inputs: map[string]string{"repo": dir}})
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
	local, copied := b.path("builds"), filepath.Join(s.Dir, "builds")
	write := func(nonce string) error {
		err := os.MkdirAll(local, 0o755)
		for _, name := range []string{"web", "api", "worker"} {
			err = errors.Join(err, os.MkdirAll(filepath.Join(local, name), 0o755),
				os.WriteFile(filepath.Join(local, name, "main.txt"), []byte(name+" "+nonce), 0o644),
				os.WriteFile(filepath.Join(local, name, "Dockerfile"), fmt.Appendf(nil, dockerfile, b.docker.name, name+nonce, b.count(1, 0)), 0o644))
		}
		return errors.Join(err, os.WriteFile(filepath.Join(local, "compose.yaml"), []byte(buildFile), 0o644))
	}
	nonces := 0
	// builds is one project built for the first time and again, by one of two ways.
	builds := func(to *Set, up func() (time.Duration, func() (time.Duration, error), error), cold, warm, gone string) error {
		nonces++
		if err := write(fmt.Sprint(os.Getpid(), "-", nonces)); err != nil {
			return err
		}
		for _, what := range []string{cold, warm} {
			took, down, err := up()
			if err != nil {
				return err
			}
			to.Took(what, took)
			if took, err = down(); err != nil {
				return err
			}
			to.Took(gone, took)
		}
		return nil
	}
	var arms []Arm
	arm := func(name string, sample func(ctx context.Context, to *Set) error) {
		arms = append(arms, Arm{Name: name, To: b.to, Sample: sample})
	}
	arm(buildWarm, func(ctx context.Context, to *Set) error {
		return builds(to, func() (time.Duration, func() (time.Duration, error), error) {
			start := time.Now()
			sb, err := b.broker.Create(ctx, api.CreateSandbox{Profile: composeProfile, Inputs: map[string]string{"repo": local}})
			if err != nil {
				return 0, nil, err
			}
			return time.Since(start), func() (time.Duration, error) { return destroy(sb.ID) }, nil
		}, buildCold, buildWarm, buildDown)
	})
	arm(handWarm, func(ctx context.Context, to *Set) error {
		in := func(args ...string) (time.Duration, error) {
			return there(ctx, copied, "DOCKER_BUILDKIT=0 "+sshrun.Quote(append([]string{"docker", "compose", "-p", "built"}, args...)...))
		}
		return builds(to, func() (time.Duration, func() (time.Duration, error), error) {
			start := time.Now()
			_, _, _, err := command(ctx, nil, "rsync", "-a", "--delete", "-e", sshrun.Quote(ssh...), local+"/", t.Addr+":"+copied)
			if err == nil {
				_, err = in("up", "-d", "--build", "--wait")
			}
			took := time.Since(start)
			if err != nil {
				return 0, nil, errors.Join(err, func() error { _, err := in("down", "-v", "-t", "0"); return err }())
			}
			down := []string{"down", "-v"} // waits ten seconds for each service before it kills it
			if b.once {
				down = append(down, "-t", "0")
			}
			return took, func() (time.Duration, error) { return in(down...) }, nil
		}, handCold, handWarm, handGone)
	})
	arm(withDead, func(ctx context.Context, to *Set) error {
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
		to.Took(withDead, took)
		_, err = destroy(id)
		return errors.Join(err, registry.Remove(away.Name))
	})
	arm(composeUp, func(ctx context.Context, to *Set) error {
		id, took, err := create(ctx)
		if err != nil {
			return err
		}
		gone, err := destroy(id)
		to.Took(composeUp, took)
		to.Took(composeDown, gone)
		return err
	})
	arm(handUp, func(ctx context.Context, to *Set) error {
		took, err := hand(ctx, "hand", "up", "-d", "--wait")
		gone, derr := handDownAll("hand")
		to.Took(handUp, took)
		to.Took(handDown, gone)
		return errors.Join(err, derr)
	})
	abreast := b.count(6, 2)
	// together makes the calls of f at once.
	together := func(f func(i int) error) (time.Duration, error) {
		took, failed := measure.Load{Count: abreast}.Run(ctx, f)
		return took, errors.Join(append(failed, ctx.Err())...)
	}
	// six is an arm that has a turn in every third round.
	six := func(name string, sample func(ctx context.Context, to *Set) error) {
		round := 0
		arm(name, func(ctx context.Context, to *Set) error {
			if round++; round%3 != 1 {
				return nil
			}
			return sample(ctx, to)
		})
	}
	six(composeSix, func(ctx context.Context, to *Set) error {
		ids := make([]string, abreast)
		took, err := together(func(i int) (err error) { ids[i], _, err = create(ctx); return err })
		_, derr := together(func(i int) error {
			if ids[i] == "" {
				return nil
			}
			_, err := destroy(ids[i])
			return err
		})
		to.Took(composeSix, took)
		return errors.Join(err, derr)
	})
	six(handSix, func(ctx context.Context, to *Set) error {
		took, err := together(func(i int) error { _, err := hand(ctx, fmt.Sprintf("hand%d", i), "up", "-d", "--wait"); return err })
		_, derr := together(func(i int) error { _, err := handDownAll(fmt.Sprintf("hand%d", i)); return err })
		to.Took(handSix, took)
		return errors.Join(err, derr)
	})
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
		rounds = b.count(3, 1)
	}
	_, err = interleave(ctx, measure.Plan{Rounds: rounds, Within: b.within, Each: turnTimeout}, arms...)
	return err
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
