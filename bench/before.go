//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/measure"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// beside is an older build and this one, measured in one run by turns: sample by sample, in a
// new order each time.
type beside struct {
	Before  *build   `json:"before"`
	Now     *build   `json:"now"`
	Changes []Change `json:"changes"`
}

// build is the programs of one tree, which are asked through the API and the command line that
// all builds have.
type build struct {
	Bin      string `json:"bin"`
	Revision string `json:"revision,omitempty"` // of the tree that Bin is in, if it is in one
	Metrics  Set    `json:"metrics"`

	broker *broker
}

const (
	vmProfile      = "profile.bench-vm"
	composeProfile = "profile.compose-e2e"

	warmServer   = "server, its pool of two full: resident"
	overCompose  = "compose-ssh: exec true, one request"
	overMachine  = "vm-packer: exec true, one request"
	saysVersion  = "sandboxer version"
	sizeOf       = "size of " // a program
	besidePool   = 2          // warm sandboxes of each build
	execsPerLife = 4          // commands for one create: they are short
)

// beside compares the build of -before with that of -bin.
func (b *bench) beside(ctx context.Context) error {
	if err := errors.Join(b.findImage(), b.findDocker(ctx)); err != nil {
		return err
	}
	profiles := map[string]string{
		poolProfile: b.pooled(besidePool),
		vmProfile:   fmt.Sprintf("id: %s\nextension: ext.vm-packer\nisolation: process\nrequires: [exec, files]\nttl: 30m\n", vmProfile),
	}
	if b.image != "" {
		profiles[imageProfile] = like(imageProfile, "image: tar:"+b.image)
	}
	x := &beside{Before: &build{Bin: b.before}, Now: &build{Bin: b.bin}}
	for _, y := range []*build{x.Before, x.Now} {
		if err := checkPrograms(y.Bin); err != nil {
			return err
		}
		y.Revision = revision(ctx, y.Bin)
	}
	routed := maps.Clone(profiles)
	routed[routeProfile] = oneCandidate()
	err := b.withServer(ctx, x.Before.Bin, "o", profiles, func(before *broker) error {
		return b.withServer(ctx, x.Now.Bin, "n", routed, func(now *broker) error {
			x.Before.broker, x.Now.broker = before, now
			return b.takeTurns(ctx, []*build{x.Before, x.Now})
		})
	})
	x.Changes = Compare(&x.Before.Metrics, &x.Now.Metrics)
	b.r.Beside = x
	return err
}

// takeTurns measures builds side by side, one thing after the other.
func (b *bench) takeTurns(ctx context.Context, builds []*build) error {
	for _, x := range builds { // what fills pools is in nobody's way
		if err := x.broker.fill(ctx, poolProfile, besidePool); err != nil {
			return err
		}
	}
	if err := b.rest(ctx, settleTime); err != nil {
		return err
	}
	for _, x := range builds {
		x.Metrics.Add(warmServer, "MB", float64(rss(x.broker.pid()))/1e6)
		fi, err := os.Stat(filepath.Join(x.Bin, "sandboxer"))
		if err != nil {
			return err
		}
		x.Metrics.Add(sizeOf+"sandboxer", "MB", float64(fi.Size())/1e6)
	}
	if err := b.alternate(ctx, b.plan(2*b.rounds), builds, func(ctx context.Context, x *build, to *Set) error {
		took, cpu, _, err := command(ctx, nil, filepath.Join(x.Bin, "sandboxer"), "version")
		to.Took(saysVersion, took)
		to.Took(saysVersion+": CPU", cpu)
		return err
	}); err != nil {
		return err
	}
	profiles := []struct{ id, name, exec string }{{plainProfile, viaAPI, apiRun}}
	if b.image != "" {
		profiles = append(profiles, struct{ id, name, exec string }{imageProfile, viaAPIImage, apiImageRun})
	}
	for _, p := range profiles {
		if err := b.alternate(ctx, b.plan(b.rounds), builds, func(ctx context.Context, x *build, to *Set) error {
			return x.broker.life(ctx, to, p.id, p.name)
		}); err != nil {
			return err
		}
		execs := []timedExec{{p.exec, once}}
		if p.id == plainProfile {
			execs = append(execs, timedExec{apiStream, streamed})
		}
		if err := b.execsBeside(ctx, builds, min(b.rounds, 10), execs, func(ctx context.Context, x *build) (string, error) {
			return x.broker.create(ctx, p.id)
		}); err != nil {
			return err
		}
	}
	// An older build has no routes: there it is the same sandbox by its extension.
	if err := b.alternate(ctx, b.plan(b.rounds), builds, func(ctx context.Context, x *build, to *Set) error {
		profile := plainProfile
		if x == builds[1] {
			profile = routeProfile
		}
		return x.broker.life(ctx, to, profile, viaRoute)
	}); err != nil {
		return err
	}
	if err := b.alternate(ctx, b.plan(b.rounds), builds, func(ctx context.Context, x *build, to *Set) error {
		return x.broker.claim(ctx, to, besidePool)
	}); err != nil {
		return err
	}
	for _, p := range profiles {
		if err := b.idleBeside(ctx, builds, p.id, "idle "+p.name+idleMemory); err != nil {
			return err
		}
	}
	return b.sshBeside(ctx, builds)
}

// alternate samples one thing of the builds by turns.
func (b *bench) alternate(ctx context.Context, p measure.Plan, builds []*build, sample func(ctx context.Context, x *build, to *Set) error) error {
	var arms []Arm
	for _, x := range builds {
		arms = append(arms, Arm{Name: x.Bin, To: &x.Metrics, Sample: func(ctx context.Context, to *Set) error { return sample(ctx, x, to) }})
	}
	_, err := interleave(ctx, p, arms...)
	return err
}

// timedExec is a way to run a command that does nothing, and the name of its series.
type timedExec struct {
	name string
	run  func(ctx context.Context, b *broker, id string) error
}

func once(ctx context.Context, b *broker, id string) error { return b.run(ctx, id) }

func streamed(ctx context.Context, b *broker, id string) error {
	return b.exec(ctx, id, sandboxer.Cmd{Args: []string{"true"}})
}

// execsBeside runs commands in so many sandboxes of each build, one after the other: commands
// of one sandbox have in common what makes it faster or slower than the next.
func (b *bench) execsBeside(ctx context.Context, builds []*build, sandboxes int, execs []timedExec, create func(ctx context.Context, x *build) (string, error)) error {
	plan := b.plan(max(1, b.rounds*execsPerLife/sandboxes))
	plan.Round = nil
	for range sandboxes {
		if err := b.execsOfOne(ctx, plan, builds, execs, create); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) execsOfOne(ctx context.Context, plan measure.Plan, builds []*build, execs []timedExec, create func(ctx context.Context, x *build) (string, error)) error {
	ids := map[*build]string{}
	for _, x := range builds {
		id, err := create(ctx, x)
		if err != nil {
			return fmt.Errorf("%s: %w", x.Bin, err)
		}
		defer func() { _, _ = x.broker.Destroy(context.WithoutCancel(ctx), id, true) }()
		ids[x] = id
	}
	for _, e := range execs {
		if err := b.alternate(ctx, plan, builds, func(ctx context.Context, x *build, to *Set) error {
			begin := time.Now()
			err := e.run(ctx, x.broker, ids[x])
			to.Took(e.name, time.Since(begin))
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// idleBeside makes as many sandboxes of each build, by turns, lets them do nothing for a while,
// and looks at each.
func (b *bench) idleBeside(ctx context.Context, builds []*build, profile, name string) error {
	p := b.plan(b.each())
	p.WarmUp, p.Within = 0, 0 // as many looks as sandboxes
	ids := map[*build][]string{}
	defer func() {
		for x, made := range ids {
			for _, id := range made {
				_, _ = x.broker.Destroy(context.WithoutCancel(ctx), id, true)
			}
		}
	}()
	if err := b.alternate(ctx, p, builds, func(ctx context.Context, x *build, _ *Set) error {
		id, err := x.broker.create(ctx, profile)
		if err != nil {
			return err
		}
		ids[x] = append(ids[x], id)
		return x.broker.run(ctx, id)
	}); err != nil {
		return err
	}
	if err := b.rest(ctx, settleTime); err != nil {
		return err
	}
	next := map[*build]int{}
	return b.alternate(ctx, p, builds, func(_ context.Context, x *build, to *Set) error {
		pids := x.broker.sandboxPIDs(ids[x][next[x]])
		if next[x]++; len(pids) == 0 {
			return errors.New("the processes of a sandbox are not to be found")
		}
		to.Add(name, "MB", float64(memoryOf(pids))/1e6)
		return nil
	})
}

// sshBeside measures commands on a host on loopback: in a workspace on it, and in a compose
// project.
func (b *bench) sshBeside(ctx context.Context, builds []*build) error {
	err := b.withSSH(beforeStep+", vm-packer", func(h *harness) error {
		return b.hostBeside(ctx, builds, sshtest.Start(h, sshtest.Options{Silent: true}), overMachine, func(i int, host string) api.CreateSandbox {
			return api.CreateSandbox{Profile: vmProfile, Inputs: map[string]string{"vm": host, "workspace_dir": b.path("w" + strconv.Itoa(i))}}
		})
	})
	if err != nil {
		return err
	}
	return b.withSSH(beforeStep+", compose-ssh", func(h *harness) error {
		s, err := h.composeHost()
		if err != nil {
			return err
		}
		project := b.path("one")
		if err := writeProject(project, fmt.Sprintf(oneService, b.docker.name)); err != nil {
			return err
		}
		return b.hostBeside(ctx, builds, s, overCompose, func(_ int, host string) api.CreateSandbox {
			return api.CreateSandbox{Profile: composeProfile, Host: host, Inputs: map[string]string{"repo": project}}
		})
	})
}

// hostBeside has each build know the server as a host, makes sandboxes there, and runs commands
// in them by turns. What is on the host is gone at the end, as the host is.
func (b *bench) hostBeside(ctx context.Context, builds []*build, s *sshtest.Server, name string, request func(i int, host string) api.CreateSandbox) error {
	host, _, _ := strings.Cut(name, ":")
	t := s.Target()
	places := map[*build]int{}
	for i, x := range builds {
		err := x.broker.command(ctx, "host", "add", host, t.Addr, "--port", strconv.Itoa(t.Port), "--identity", t.IdentityFile, "--yes")
		if err != nil {
			return err
		}
		places[x] = i
	}
	return b.execsBeside(ctx, builds, min(b.rounds, 5), []timedExec{{name, once}}, func(ctx context.Context, x *build) (string, error) {
		sb, err := x.broker.Create(ctx, request(places[x], host))
		if err != nil {
			return "", err
		}
		return sb.ID, nil
	})
}

// besideBars holds this build to the older one.
func (b *bench) besideBars() {
	if b.r.Beside == nil {
		return
	}
	for _, c := range b.r.Beside.Changes {
		switch c.Name {
		case viaAPI + ": create to first exec", viaAPIImage + ": create to first exec", apiRun, apiStream, apiImageRun, claimFirst,
			"idle " + viaAPI + idleMemory, "idle " + viaAPIImage + idleMemory, overCompose, overMachine, viaRoute + ": create":
			b.r.most(c.Name+", now / before", c.Value, 1.05, "x")
		case saysVersion:
			b.r.most(c.Name+", now / before", c.Value, 1.1, "x")
		case sizeOf + "sandboxer":
			b.r.most(c.Name+", now / before", c.Value, 1.25, "x")
		}
	}
}

// checkPrograms reports what is missing of a build.
func checkPrograms(bin string) error {
	for _, name := range programs {
		if _, err := os.Stat(filepath.Join(bin, name)); err != nil {
			return fmt.Errorf("%w (build it, or name its directory with -bin or -before)", err)
		}
	}
	return nil
}
