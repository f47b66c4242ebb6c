//go:build linux

package main

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/sand-boxer/sandboxer/internal/checkpoint"
	"github.com/sand-boxer/sandboxer/internal/measure"
)

const (
	ckptTools  = "tar | zstd -1"
	ckptFirst  = "checkpoint: tree of 5,000 files, first"
	ckptSecond = "checkpoint: tree of 5,000 files, 10 changed"
	ckptStream = "checkpoint: tree of 5,000 files, as a stream"
	ckptAdded  = "checkpoint: stored after 10 changes, of the first"
)

// checkpoints saves a tree of 5,000 files and 200 MB beside tar and zstd, whose output
// is made as durable as a checkpoint is.
func (b *bench) checkpoints(ctx context.Context) error {
	if _, err := exec.LookPath("zstd"); err != nil {
		b.r.skip("checkpoints: no zstd to compare with")
		return nil
	}
	dir := b.path("checkpoints")
	tree := filepath.Join(dir, "tree")
	src := rand.NewChaCha8([32]byte{1})
	rnd := rand.New(src)
	name := func(i int) string { return filepath.Join(tree, fmt.Sprintf("d%02d/f%04d", i%50, i)) }
	text := make([]byte, 1<<20)
	for i := range text {
		text[i] = "etaoin shrdlu\n(){}"[rnd.IntN(18)]
	}
	files := b.count(5000, 50)
	for i := range files {
		data := make([]byte, 20_000+rnd.IntN(40_000))
		if i%2 == 0 {
			_, _ = src.Read(data)
		} else {
			copy(data, text[rnd.IntN(len(text)-len(data)):])
		}
		if err := errors.Join(os.MkdirAll(filepath.Dir(name(i)), 0o755), os.WriteFile(name(i), data, 0o644)); err != nil {
			return err
		}
	}
	save := func(s *checkpoint.Store, id string) (*checkpoint.Manifest, error) {
		cmd := exec.CommandContext(ctx, "tar", "--sort=name", "-C", tree, "-cf", "-", ".")
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			return nil, err
		}
		m, err := s.Save(ctx, id, checkpoint.Meta{}, out, checkpoint.SaveOptions{})
		return m, errors.Join(err, cmd.Wait())
	}
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	arm := func(name string, sample func(ctx context.Context, to *Set) error) Arm {
		return Arm{Name: name, To: b.to, Sample: sample}
	}
	// as is an arm that saves into a place of its own, with what it does then.
	as := func(name string, e checkpoint.Encoding, then func(s *checkpoint.Store, first *checkpoint.Manifest, to *Set) error) Arm {
		return arm(name, func(_ context.Context, to *Set) error {
			at := filepath.Join(dir, string(e))
			place, err := checkpoint.OpenDir(at)
			if err != nil {
				return err
			}
			s, err := checkpoint.New(place, key, checkpoint.Options{Encoding: e, SpoolDir: dir})
			if err == nil {
				begin := time.Now()
				var first *checkpoint.Manifest
				if first, err = save(s, "first"); err == nil {
					to.Took(name, time.Since(begin))
					err = then(s, first, to)
				}
			}
			return errors.Join(err, place.Close(), os.RemoveAll(at))
		})
	}
	_, err := interleave(ctx, measure.Plan{Rounds: min(b.rounds, 11), Within: b.within, Each: turnTimeout},
		arm(ckptTools, func(ctx context.Context, to *Set) error {
			took, _, _, err := command(ctx, nil, "sh", "-c", `tar -C "$1" -cf - . | zstd -1 -q -f -o "$2" && sync "$2"`, "sh", tree, filepath.Join(dir, "tar.zst"))
			to.Took(ckptTools, took)
			return err
		}),
		as(ckptFirst, checkpoint.Chunks, func(s *checkpoint.Store, first *checkpoint.Manifest, to *Set) error {
			for i := range 10 {
				if err := os.WriteFile(name(i*(files/11)), fmt.Appendf(nil, "changed %d", rnd.Uint64()), 0o644); err != nil {
					return err
				}
			}
			begin := time.Now()
			second, err := save(s, "second")
			if err != nil {
				return err
			}
			to.Took(ckptSecond, time.Since(begin))
			to.Add(ckptAdded, "%", 100*float64(second.Stored)/float64(first.Stored))
			return nil
		}),
		as(ckptStream, checkpoint.Stream, func(*checkpoint.Store, *checkpoint.Manifest, *Set) error { return nil }))
	if err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

func (b *bench) checkpointBars() {
	m := b.r.median
	b.r.most(ckptFirst+" / "+ckptTools, m(ckptFirst)/m(ckptTools), 1.2, "x")
	b.r.most(ckptAdded, m(ckptAdded), 1, "%")
}
