package fake

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// Checkpoint implements sandboxer.Checkpointer. The processes go on meanwhile.
func (e *Extension) Checkpoint(ctx context.Context, h sandboxer.Handle, begin func(sandboxer.Contents) io.Writer) error {
	return e.at(ctx, VerbCheckpoint, h, "the checkpoint", func(root *os.Root, o Object) error {
		var c sandboxer.Contents
		if v := o.Spec.Inputs["volume"]; v != "" {
			if _, err := root.Lstat(path.Join(o.archived(""), sandboxer.VolumesDir)); err == nil {
				return sandboxer.E(sandboxer.Conflict, nil, "the workspace contains %s, a name that checkpoints use for volumes", sandboxer.VolumesDir)
			}
			c.Volumes = []string{v}
		}
		out := tar.NewWriter(begin(c))
		err := packAll(ctx, out, root, o.archived(""), "")
		for _, v := range c.Volumes {
			if err == nil {
				err = packAll(ctx, out, root, path.Join("volumes", v), path.Join(sandboxer.VolumesDir, v))
			}
		}
		return errors.Join(err, out.Close())
	})
}

// packAll adds what is below base to out, below the name under, which is in it, too,
// unless it is empty.
func packAll(ctx context.Context, out *tar.Writer, root *os.Root, base, under string) error {
	return fs.WalkDir(root.FS(), base, func(name string, _ fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		rel := path.Join(under, strings.TrimPrefix(strings.TrimPrefix(name, base), "/"))
		if err != nil || rel == "" {
			return err
		}
		return pack(out, root, name, rel)
	})
}

// ProvisionFrom implements sandboxer.Checkpointer.
func (e *Extension) ProvisionFrom(ctx context.Context, spec sandboxer.Spec, c sandboxer.Contents, r io.Reader) (h sandboxer.Handle, err error) {
	if err := e.check(spec); err != nil {
		return h, err
	}
	if len(c.Volumes) > 0 && !slices.Equal(c.Volumes, []string{spec.Inputs["volume"]}) {
		return h, sandboxer.E(sandboxer.Unsupported, nil, "the checkpoint has the volumes %s, but the sandbox has no volume of that name", strings.Join(c.Volumes, ", "))
	}
	dir, err := os.MkdirTemp("", "fake-checkpoint-")
	if err != nil {
		return h, err
	}
	defer os.RemoveAll(dir)
	if err := os.Mkdir(filepath.Join(dir, "workspace"), 0o777); err != nil {
		return h, err
	}
	root, err := os.OpenRoot(filepath.Join(dir, "workspace"))
	if err != nil {
		return h, err
	}
	defer root.Close()
	if err := errors.Join(root.Chmod(".", 0o777), unpack(root, contextReader{ctx, r}, len(c.Volumes) > 0)); err != nil {
		return h, fileError(err, "the checkpoint")
	}
	if len(c.Volumes) > 0 {
		err := os.Rename(filepath.Join(dir, "workspace", sandboxer.VolumesDir), filepath.Join(dir, "volumes"))
		if err != nil {
			return h, sandboxer.E(sandboxer.Invalid, err, "the checkpoint has no volumes in it")
		}
		if err := os.Remove(filepath.Join(dir, "workspace", path.Dir(sandboxer.VolumesDir))); err != nil && !errors.Is(err, fs.ErrExist) {
			return h, err
		}
	}
	return e.provision(ctx, VerbProvisionFrom, createRequest{Spec: spec, From: dir})
}

// moveIn gives o what from holds: its workspace, and its volumes if it has any.
func moveIn(from string, o *Object) error {
	if err := o.use(); err != nil {
		return err
	}
	err := os.Remove(o.workspace())
	if err == nil {
		err = os.Rename(filepath.Join(from, "workspace"), o.workspace())
	}
	volumes := filepath.Join(from, "volumes")
	if _, serr := os.Stat(volumes); err != nil || serr != nil {
		return err
	}
	return errors.Join(os.RemoveAll(filepath.Join(o.Dir, "volumes")), os.Rename(volumes, filepath.Join(o.Dir, "volumes")))
}
