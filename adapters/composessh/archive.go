package composessh

import (
	"archive/tar"
	"cmp"
	"context"
	"errors"
	"io"
	"path"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/safetar"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// below returns the path of dir, a path inside, below the workspace.
func (m *meta) below(dir string) (string, error) {
	if dir == "" {
		return ".", nil
	}
	if s := m.service(m.Service); s != nil && s.Workspace != "" {
		if rest, ok := strings.CutPrefix(dir+"/", strings.TrimSuffix(s.Workspace, "/")+"/"); ok {
			return cmp.Or(strings.TrimSuffix(rest, "/"), "."), nil
		}
	}
	return "", sandboxer.E(sandboxer.Unsupported, nil, "only the workspace can be archived, and %s is not below it", dir).
		WithHint("pack it inside: sandboxer exec %s -- tar -C %s -cf - .", m.ID, dir)
}

// workspace is the directory rel below root, a workspace; messages call it dir.
func workspace(root, rel, dir string) sshrun.Subdir {
	return sshrun.Subdir{Root: root, Dir: rel, RootName: "the workspace", Name: cmp.Or(dir, "the workspace")}
}

// archiveError adds to an error of the archive of d what an account here can do about it.
func (e *extension) archiveError(h *host, d sshrun.Subdir, err error) error {
	_, said, ok := sshrun.ExitOf(err)
	var denied *sandboxer.Error
	switch {
	case !ok:
		return err
	case errors.As(err, &denied) && denied.Kind == sandboxer.Denied:
		return denied.WithHint("let the services write as that account's user, or give sandboxer an account that may read their files")
	}
	return e.failed(h, "the archive of "+d.Name, said, nil)
}

// Archive implements sandboxer.Archiver. It reads on the host, so that images need no
// tools; the services go on meanwhile.
func (e *extension) Archive(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return err
	}
	rel, err := m.below(dir)
	if err != nil {
		return err
	}
	return e.archive(ctx, ho, m, rel, dir, w)
}

// archive writes the directory rel below the workspace as a tar; messages call it dir.
func (e *extension) archive(ctx context.Context, ho *host, m *meta, rel, dir string, w io.Writer) error {
	d := workspace(path.Join(ho.known.root, m.Name, "repo"), rel, dir)
	return e.archiveError(ho, d, ho.Archive(ctx, d, w))
}

// Unarchive implements sandboxer.Archiver. The services are paused while files are written
// on the host, so that none of them can replace a checked directory by a link.
func (e *extension) Unarchive(ctx context.Context, h sandboxer.Handle, dir string, r io.Reader) (err error) {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return err
	}
	rel, err := m.below(dir)
	if err != nil {
		return err
	}
	thaw, err := e.freeze(ctx, ho, m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, thaw()) }()
	return e.refill(ctx, ho, path.Join(ho.known.root, m.Name, "repo"), rel, dir, m.Places, r)
}

// refill gives the directory rel below the workspace root exactly the content of
// the tar r; messages call it dir. places are those below root that must keep their
// type: directories, which are emptied but kept, and files, with true.
func (e *extension) refill(ctx context.Context, ho *host, root, rel, dir string, places map[string]bool, r io.Reader) error {
	stay := map[string]bool{}
	var keep []string
	for p, file := range places {
		if rest, in := strings.CutPrefix(p, strings.TrimPrefix(rel+"/", "./")); in {
			stay[rest] = file
			if !file {
				keep = append(keep, rest)
			}
		}
	}
	pr, pw := io.Pipe()
	checked := make(chan error, 1)
	go func() {
		err := filterTar(r, pw, stay)
		checked <- err
		pw.CloseWithError(err)
	}()
	d := workspace(root, rel, dir)
	err := ho.Replace(ctx, d, keep, pr)
	unread := errors.New("the caller no longer reads the data")
	pr.CloseWithError(unread)
	select {
	case cerr := <-checked:
		if cerr != nil && ctx.Err() == nil && (err == nil || !errors.Is(cerr, unread)) {
			return cerr // the host knows only that its input ended
		}
	case <-ctx.Done():
	}
	return e.archiveError(ho, d, err)
}

// filterTar passes on the files of a tar of a workspace. The tar program that unpacks it
// trusts it, so filterTar applies the rules of package safetar.
// Paths in stay keep their type there, which is a file if true, or are missing.
func filterTar(r io.Reader, w io.Writer, stay map[string]bool) error {
	in, out := safetar.NewReader(r, safetar.Rules{OutsideLinks: true, SkipSpecial: true}), tar.NewWriter(w)
	for {
		hdr, err := in.Next()
		if err == io.EOF {
			return out.Close()
		}
		if err != nil {
			return err
		}
		name := hdr.Name
		if name == "." {
			continue
		}
		if file, mounted := stay[name]; mounted && hdr.Typeflag != tar.TypeDir && (!file || hdr.Typeflag != tar.TypeReg) {
			return sandboxer.E(sandboxer.Invalid, nil, "%q is mounted in a service and must keep its type, directory or file; the archive changes it", name)
		} else if mounted && file && hdr.Typeflag == tar.TypeDir {
			return sandboxer.E(sandboxer.Invalid, nil, "%q is mounted in a service and must stay a file; the archive has a directory of this name", name)
		}
		if err := copyEntry(out, in, &tar.Header{Name: name, Linkname: hdr.Linkname, Mode: hdr.Mode & 0o777}, hdr); err != nil {
			return err
		}
	}
}

// copyEntry writes as, completed from hdr, and its contents from in.
func copyEntry(out *tar.Writer, in io.Reader, as, hdr *tar.Header) error {
	as.Typeflag, as.ModTime, as.Format = hdr.Typeflag, hdr.ModTime.Truncate(time.Second), tar.FormatGNU
	switch hdr.Typeflag {
	case tar.TypeReg:
		as.Size = hdr.Size
	case tar.TypeDir:
		as.Name += "/"
	}
	if err := out.WriteHeader(as); err != nil {
		return err
	}
	_, err := io.Copy(out, in)
	return err
}
