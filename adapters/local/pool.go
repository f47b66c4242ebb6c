//go:build linux

package local

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"

	"gvisor.dev/gvisor/runsc/version"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// A warm sandbox has only the environment that every sandbox has. Its claim writes its own
// variables to claim.json, and gives them to every command from then on: gVisor cannot
// change the environment of a first process.
const claimFile = "claim.json"

// Basis implements sandboxer.Pooler.
func (e *extension) Basis(ctx context.Context, spec sandboxer.Spec) (string, error) {
	if _, err := e.check(spec); err != nil {
		return "", err
	}
	skel, err := e.skeleton()
	if err != nil {
		return "", err
	}
	mounts, err := e.openSources(spec)
	if err != nil {
		return "", err
	}
	defer closeSources(mounts)
	basis := "gvisor " + version.Version() + " skeleton " + skel.digest // the agent is part of it
	for _, m := range mounts {                                          // as it is now: another one may have the same name tomorrow
		i, err := m.ID()
		if err != nil {
			return "", sandboxer.E(sandboxer.Unavailable, err, "cannot inspect mount %s", m.Mount.Source)
		}
		basis += " mount " + i
	}
	if spec.Image != "" {
		img, err := e.images.get(ctx, spec.Image, spec.Vouches(sandboxer.RestrictedImage))
		if err != nil {
			return "", err
		}
		defer img.release()
		config, err := json.Marshal(img.config)
		if err != nil {
			return "", sandboxer.E(sandboxer.Internal, err, "the configuration of image %q cannot be encoded", spec.Image)
		}
		basis += " image " + filepath.Base(img.path) + " " + string(config)
	}
	return basis, nil
}

// Claim implements sandboxer.Pooler. If a claim has work to do, the record says first that
// it has begun, and last that it is done: a sandbox with an interrupted claim is of no
// use.
func (e *extension) Claim(ctx context.Context, h sandboxer.Handle, spec sandboxer.Spec) (sandboxer.Handle, error) {
	src, err := e.check(spec)
	if err = cmp.Or(err, e.checkMounts(spec)); err != nil {
		return h, err
	}
	policy, err := e.policy(spec.Network)
	if err != nil {
		return h, err
	}
	b, unlock, err := e.alone(ctx, h)
	if err != nil {
		return h, err
	}
	defer unlock()
	name := b.name
	rec, err := e.record(name)
	if err != nil {
		return h, err
	}
	digest := spec.ClaimDigest()
	switch {
	case rec.Claim == "" && !rec.Warm, rec.Claim != "" && rec.Claim != digest:
		return h, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is not a warm sandbox that can be claimed", name)
	case !rec.Warm:
		return h, nil
	case rec.Claim != "" || !rec.Ready:
		return h, sandboxer.E(sandboxer.Unavailable, nil, "sandbox %s was not completed", name)
	case networked(spec.Network) != networked(rec.Network):
		return h, sandboxer.E(sandboxer.Unsupported, nil, "a warm sandbox keeps its network mode")
	}
	rec.Claim, rec.Network = digest, spec.Network
	later := !rec.Fuse.IsZero() && (spec.Fuse.IsZero() || spec.Fuse.After(rec.Fuse))
	if later {
		rec.Fuse = spec.Fuse
	}
	// A claim that brings nothing is done once it is recorded.
	rec.Warm = later || src != (source{}) || len(rec.Main) > 0
	if len(spec.Env) > 0 {
		err = e.writeClaim(name, spec.Env)
	} else if err = os.Remove(e.dir("box", name, claimFile)); errors.Is(err, fs.ErrNotExist) {
		err = nil // it exists if a claim died before it was in the record
	}
	if err == nil {
		err = e.writeRecord(name, rec)
	}
	if err != nil {
		return h, diskError(err, "recording the claim")
	}
	b.mu.Lock()
	link := b.net
	b.mu.Unlock()
	if link != nil {
		link.SetPolicy(policy)
	}
	b.give(spec.Env)
	if !rec.Warm {
		return h, nil
	}
	if later {
		if err := b.setFuse(ctx, rec.Fuse); err != nil {
			return h, err
		}
	}
	if src != (source{}) {
		if err := b.fill(ctx, src); err != nil {
			return h, err
		}
	}
	if err := b.startMain(ctx, rec.Main, rec.MainDir); err != nil {
		return h, err
	}
	rec.Warm = false
	if err := e.writeRecord(name, rec); err != nil {
		return h, diskError(err, "writing the sandbox's record")
	}
	return h, nil
}

func (e *extension) writeClaim(name string, env map[string]string) error {
	data, err := json.Marshal(env)
	if err != nil {
		return err
	}
	return wholefile.Replace(e.dir("box", name, claimFile), data)
}

func (e *extension) claimedEnv(name string) (map[string]string, error) {
	var env map[string]string
	err := readJSON(e.dir("box", name, claimFile), &env)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // the claim brought nothing
	}
	return env, err
}

// give adds a claim's variables to the environment of commands.
func (b *liveSandbox) give(env map[string]string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.given = maps.Clone(env)
	all := mergeEnv(nil, b.c.Spec.Process.Env)
	for k, v := range env {
		all = mergeEnv(all, []string{k + "=" + v})
	}
	b.env = all
}

// givenEnv is the environment of a command of the agent: env over a claim's variables.
func (b *liveSandbox) givenEnv(env map[string]string) map[string]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.given) == 0 {
		return env
	}
	all := maps.Clone(b.given)
	maps.Copy(all, env)
	return all
}
