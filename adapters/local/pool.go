//go:build linux

package local

import (
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

// A warm sandbox has no environment but what every sandbox has. Its claim writes down in
// claim.json what it brings, and gives it to every command from then on: gVisor cannot
// change what a first process was started with.
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
	basis := "gvisor " + version.Version() + " skeleton " + skel.digest // the agent is in it
	for _, m := range mounts {                                          // as it is now, which may be another under the same name tomorrow
		i, err := m.ID()
		if err != nil {
			return "", sandboxer.E(sandboxer.Unavailable, err, "mount %s cannot be looked at", m.Mount.Source)
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
			return "", sandboxer.E(sandboxer.Internal, err, "the configuration of image %q does not encode", spec.Image)
		}
		basis += " image " + filepath.Base(img.path) + " " + string(config)
	}
	return basis, nil
}

// Claim implements sandboxer.Pooler. The record says first that a claim has begun, and
// last that it is done, where there is anything to do in between: what was cut short there
// is of no use to anybody.
func (e *extension) Claim(ctx context.Context, h sandboxer.Handle, spec sandboxer.Spec) (sandboxer.Handle, error) {
	src, err := e.check(spec)
	if err != nil {
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
		return h, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is not a warm one that could be claimed", name)
	case !rec.Warm:
		return h, nil
	case rec.Claim != "" || !rec.Ready:
		return h, sandboxer.E(sandboxer.Unavailable, nil, "sandbox %s was not completed", name)
	case networked(spec.Network) != networked(rec.Network):
		return h, sandboxer.E(sandboxer.Unsupported, nil, "a warm sandbox keeps its network mode")
	}
	rec.Claim, rec.Network, rec.Stamp = digest, spec.Network, spec.Stamp
	later := !rec.Fuse.IsZero() && (spec.Fuse.IsZero() || spec.Fuse.After(rec.Fuse))
	if later {
		rec.Fuse = spec.Fuse
	}
	// What brings nothing is done when it is written down.
	rec.Warm = later || src != (source{}) || len(rec.Main) > 0
	if len(spec.Env) > 0 {
		err = e.writeClaim(name, spec.Env)
	} else if err = os.Remove(e.dir("box", name, claimFile)); errors.Is(err, fs.ErrNotExist) {
		err = nil // it is there if a claim died before it was in the record
	}
	if err == nil {
		err = e.writeRecord(name, rec)
	}
	if err != nil {
		return h, diskError(err, "writing the claim down")
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

// give sets what a claim brings to the environment of commands.
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

// givenEnv is what a command of the agent gets: env, over what a claim brought.
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
