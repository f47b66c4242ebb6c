//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/measure"
)

const (
	dockerExt      = "ext.docker"
	dockerProfile  = "profile.bench-docker"
	dockerPool     = "profile.bench-docker-pool"
	dockerAnswers  = "profile.bench-docker-ready"
	containersStep = "containers of an engine"

	containerUp    = "containers: create to first exec"
	containerExec  = "containers: exec true, one request"
	containerClaim = "containers: warm claim to first exec"
	containerDown  = "containers: destroy"
	containerReady = "containers: ready after the URL answers"
	containerDeath = "containers: a death is known after"
	containerSame  = "containers: 20 creates of one ID: containers"
	containerEqual = "containers: 20 creates of one ID: equal answers"
	byHandUp       = "by hand: docker run -d and docker exec"
	byHandExec     = "by hand: docker exec true"
	byHandRun      = "by hand: docker run --rm true"
	byHandDown     = "by hand: docker rm -f"
)

// asContainer is a profile of ext.docker with the bench's image, and more.
func (b *bench) asContainer(id, more string) string {
	return fmt.Sprintf("id: %s\nextension: %s\nisolation: container\nrequires: [exec, files]\nnetwork: none\nimage: tar:%s\nttl: 30m\n%s\n", id, dockerExt, b.image, more)
}

// containers measures ext.docker on the engine that the bench uses, beside the engine's own
// command line.
func (b *bench) containers(ctx context.Context) error {
	if b.docker == nil {
		b.r.skip("%s: no Docker engine", containersStep)
		return nil
	}
	const size = 2
	files := map[string]string{
		dockerExt: fmt.Sprintf("id: %s\nhandler: docker\ncapabilities:\n  isolation_levels: [container]\n  pricing_model: self-hosted\nconfig:\n  engines:\n    here: {address: %q}\n",
			dockerExt, os.Getenv("DOCKER_HOST")),
		dockerProfile: b.asContainer(dockerProfile, ""),
		dockerPool:    b.asContainer(dockerPool, fmt.Sprintf("pool:\n  size: %d", size)),
		// The file is there a moment before the server listens.
		dockerAnswers: b.asContainer(dockerAnswers, `command: [sh, -c, "sleep 0.2; : >/tmp/up; exec busybox httpd -f -p 8080 -h /tmp"]`+"\nready:\n  http: {port: 8080, path: /up}"),
		dockerOut:     b.reaching(dockerOut, dockerExt, "container"),
		localOut:      b.reaching(localOut, "ext.local", "gvisor"),
	}
	return b.withServer(ctx, b.bin, "c", files, func(br *broker) error { return b.onEngine(ctx, br, size) })
}

func (b *bench) onEngine(ctx context.Context, br *broker, size int) error {
	if err := br.fill(ctx, dockerPool, size); err != nil {
		return err
	}
	running, err := br.create(ctx, dockerProfile)
	if err != nil {
		return err
	}
	if err := b.docker.start(ctx); err != nil {
		return err
	}
	var arms []Arm
	arm := func(name string, sample func(ctx context.Context, to *Set) error) {
		arms = append(arms, Arm{Name: name, To: b.to, Sample: sample})
	}
	gone := func(ctx context.Context, id string) (time.Duration, error) {
		begin := time.Now()
		_, err := br.Destroy(context.WithoutCancel(ctx), id, true)
		return time.Since(begin), err
	}
	arm(containerUp, func(ctx context.Context, to *Set) error {
		begin := time.Now()
		id, err := br.create(ctx, dockerProfile)
		if err == nil {
			err = br.run(ctx, id)
		}
		took := time.Since(begin)
		if err != nil {
			return err
		}
		down, err := gone(ctx, id)
		to.Took(containerUp, took)
		to.Took(containerDown, down)
		return err
	})
	arm(byHandUp, func(ctx context.Context, to *Set) error {
		up, down, err := b.docker.life(ctx)
		to.Took(byHandUp, up)
		to.Took(byHandDown, down)
		return err
	})
	arm(containerExec, func(ctx context.Context, to *Set) error {
		begin := time.Now()
		err := br.run(ctx, running)
		to.Took(containerExec, time.Since(begin))
		return err
	})
	arm(byHandExec, func(ctx context.Context, to *Set) error {
		took, err := b.docker.exec(ctx)
		to.Took(byHandExec, took)
		return err
	})
	arm(containerClaim, func(ctx context.Context, to *Set) error {
		begin := time.Now()
		id, err := br.create(ctx, dockerPool)
		if err == nil {
			err = br.run(ctx, id)
		}
		if err != nil {
			return err
		}
		to.Took(containerClaim, time.Since(begin))
		if _, err := gone(ctx, id); err != nil {
			return err
		}
		return br.fill(ctx, dockerPool, size)
	})
	arm(byHandRun, func(ctx context.Context, to *Set) error {
		took, err := b.docker.run(ctx)
		to.Took(byHandRun, took)
		return err
	})
	rounds := max(5, b.rounds/2)
	if b.quick {
		rounds = b.count(3, 1)
	}
	if _, err := interleave(ctx, b.plan(rounds), arms...); err != nil {
		return err
	}
	for range b.count(max(3, rounds/4), 1) {
		if err := errors.Join(b.readyContainer(ctx, br), b.deadContainer(ctx, br), b.oneContainer(ctx, br)); err != nil {
			return err
		}
	}
	return b.egress(ctx, br)
}

// readyContainer measures how long after a sandbox's URL answers its user gets it. Both times are of
// this machine's clock.
func (b *bench) readyContainer(ctx context.Context, br *broker) error {
	id, err := br.create(ctx, dockerAnswers)
	if err != nil {
		return err
	}
	at := time.Now()
	fi, err := br.StatFile(ctx, id, "/tmp/up")
	if err == nil {
		b.to.Took(containerReady, at.Sub(fi.ModTime))
	}
	_, derr := br.Destroy(context.WithoutCancel(ctx), id, true)
	return errors.Join(err, derr)
}

// deadContainer measures how long after a container was killed the database says so.
func (b *bench) deadContainer(ctx context.Context, br *broker) error {
	id, err := br.create(ctx, dockerProfile)
	if err != nil {
		return err
	}
	names, err := b.docker.labelled(ctx, dockerIDLabel+"="+id)
	if err == nil && len(names) != 1 {
		err = fmt.Errorf("sandbox %s has %d containers", id, len(names))
	}
	if err != nil {
		return err
	}
	if _, _, _, err := command(ctx, nil, "docker", "kill", names[0]); err != nil {
		return err
	}
	begin := time.Now()
	for {
		sb, err := br.Get(ctx, id)
		if err != nil {
			return err
		}
		if sb.State == sandboxer.Terminating || sb.State == sandboxer.Terminated {
			b.to.Took(containerDeath, time.Since(begin))
			return nil
		}
		if time.Since(begin) > 2*time.Minute {
			return fmt.Errorf("sandbox %s is %s long after its container died", id, sb.State)
		}
		if err := measure.Sleep(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
}

// oneContainer asks for one ID twenty times at once, and counts what comes of it.
func (b *bench) oneContainer(ctx context.Context, br *broker) error {
	n := b.count(20, 3)
	id := "same-" + strings.ToLower(sandboxer.NewID())
	answers := make([]string, n)
	_, failed := measure.Load{Count: n}.Run(ctx, func(i int) error {
		sb, err := br.Create(ctx, api.CreateSandbox{Profile: dockerProfile, Inputs: map[string]string{"sandbox_id": id}})
		if err == nil {
			answers[i] = fmt.Sprint(sb.ID, sb.Generation, sb.State)
		}
		return err
	})
	names, err := b.docker.labelled(ctx, dockerIDLabel+"="+id)
	equal := 0
	for _, a := range answers {
		if a != "" && a == answers[0] {
			equal++
		}
	}
	b.to.Add(containerSame, "", float64(len(names)))
	b.to.Add(containerEqual, "", float64(equal))
	_, derr := br.Destroy(context.WithoutCancel(ctx), id, true)
	return errors.Join(append(slices.Clip(failed), err, derr)...)
}

// dockerIDLabel is what ext.docker's containers carry their sandbox's ID in.
const dockerIDLabel = "dev.sandboxer.docker.id"

// labelled are the containers with a label.
func (d *docker) labelled(ctx context.Context, label string) ([]string, error) {
	_, _, ids, err := command(ctx, nil, "docker", "ps", "--all", "--quiet", "--filter=label="+label)
	return strings.Fields(ids), err
}

// life is a container by hand: started, entered once, and removed.
func (d *docker) life(ctx context.Context) (up, down time.Duration, err error) {
	name := d.name + "-life"
	begin := time.Now()
	_, _, _, err = command(ctx, nil, append(d.args("--detach", "--name="+name), "sleep", "100000")...)
	if err == nil {
		_, _, _, err = command(ctx, nil, "docker", "exec", name, "true")
	}
	up = time.Since(begin)
	down, _, _, derr := command(context.WithoutCancel(ctx), nil, "docker", "rm", "--force", name)
	return up, down, errors.Join(err, derr)
}

func (b *bench) containerBars() {
	m := b.r.median
	b.r.most(containerUp+" / by hand", m(containerUp)/m(byHandUp), 1.0, "x")
	b.r.most(containerExec+" / "+byHandExec, m(containerExec)/m(byHandExec), 0.15, "x")
	b.r.most(containerClaim+" / "+byHandRun, m(containerClaim)/m(byHandRun), 0.10, "x")
	b.r.most(containerDown+" / by hand", m(containerDown)/m(byHandDown), 1.1, "x")
	b.r.least(containerOut+" / ext.local's", m(containerOut)/m(ownOut), 0.5, "x")
	b.r.most(containerReady, m(containerReady), 100, "ms") // the longest step of asking
	b.r.most(containerDeath, m(containerDeath), 1000, "ms")
	b.r.most(containerSame, m(containerSame), 1, "")
	b.r.least(containerEqual, m(containerEqual), 20, "")
}
