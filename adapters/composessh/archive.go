package composessh

import (
	"archive/tar"
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/safetar"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// below returns what dir, a place inside, is below the workspace.
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

// enter goes to $2 below the workspace $1, without being led out of it; it stays where
// it is whatever is moved there afterwards.
const enter = `
cd -P -- "$1" || exit 40
root=$(pwd -P)
# What is made belongs to whom the workspace does.
o=$(ls -nd . | awk '{ print $3 ":" $4 }')
own() { [ "$(id -u)" != 0 ] || [ "$o" = 0:0 ] || chown -h "$o" "$@"; }
[ -e "./$2" ] || [ -n "$make" ] || exit 44
[ ! -e "./$2" ] || [ -d "./$2" ] || exit 46
[ -z "$make" ] || {
	rest=$2/
	while [ -n "$rest" ]; do
		part=${rest%%/*} rest=${rest#*/}
		[ -L "$part" ] && exit 45
		[ -d "$part" ] || { mkdir -- "$part" && own -- "$part"; } || exit
		cd -P -- "$part" || exit 47
	done
	cd -P -- "$root" || exit
}
cd -P -- "./$2" 2>/dev/null || exit 47
case $(pwd -P)/ in "$root"/*) ;; *) exit 45;; esac
`

func (e *extension) archiveError(h *host, code int, dir, said string) error {
	if dir == "" {
		dir = "the workspace"
	}
	switch code {
	case 40:
		return sandboxer.E(sandboxer.NotFound, nil, "the workspace is gone from host %s", h.Name())
	case 44:
		return sandboxer.E(sandboxer.NotFound, nil, "%s does not exist", dir)
	case 45:
		return sandboxer.E(sandboxer.Invalid, nil, "%s is behind a link that leads out of the workspace", dir)
	case 46:
		return sandboxer.E(sandboxer.Invalid, nil, "%s: there is a file where a directory is expected", dir)
	case 47:
		return sandboxer.E(sandboxer.Denied, nil, "%s may not be read by the account on host %s", dir, h.Name())
	}
	if strings.Contains(said, "Permission denied") || strings.Contains(said, "Operation not permitted") {
		return sandboxer.E(sandboxer.Denied, errors.New(said), "a file in %s may not be touched by the account on host %s", dir, h.Name()).
			WithHint("let the services write as that account's user, or give sandboxer an account that may")
	}
	return e.failed(h, "the archive of "+dir, said, nil)
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

// archive writes the directory rel below the workspace, which is called dir, as a tar.
func (e *extension) archive(ctx context.Context, ho *host, m *meta, rel, dir string, w io.Writer) error {
	var said strings.Builder
	exit, err := ho.Run(ctx, sshrun.Cmd{Script: enter + `LC_ALL=C exec tar -cf - .`, Args: []string{path.Join(ho.known.root, m.Name, "repo"), rel}, Stdout: w, Stderr: engine.Last(&said)})
	if errors.Is(err, sshrun.ErrOutput) {
		return sandboxer.E(sandboxer.Unavailable, err, "the archive could not be written")
	}
	if err != nil {
		return err
	}
	if exit.Code == 1 && onlyChanged(said.String()) || exit.Code == 0 {
		return nil
	}
	return e.archiveError(ho, exit.Code, dir, said.String())
}

// onlyChanged reports whether tar complained of nothing but files that changed while
// they were read.
func onlyChanged(said string) bool {
	for line := range strings.Lines(said) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasSuffix(line, "file changed as we read it") && !strings.HasSuffix(line, "File removed before we read it") && !strings.HasSuffix(line, "socket ignored") {
			return false
		}
	}
	return said != ""
}

// Unarchive implements sandboxer.Archiver. The services stand still while files are
// written on the host: none of them can put a link where a directory was looked at.
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

// refill makes the directory rel below the workspace root, which is called dir, hold what
// the tar r holds, and nothing else. places are those below root that must stay what they
// are: directories, which are kept, though empty, and files, with true.
func (e *extension) refill(ctx context.Context, ho *host, root, rel, dir string, places map[string]bool, r io.Reader) error {
	stay := map[string]bool{}
	keep := ""
	for _, p := range slices.Sorted(maps.Keys(places)) {
		rest, in := strings.CutPrefix(p, rel+"/")
		if rel == "." {
			rest, in = p, true
		}
		if in {
			stay[rest] = places[p]
			if !places[p] {
				keep += " ! -path " + sshrun.Quote("./"+pattern.Replace(rest))
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
	var said strings.Builder
	exit, err := ho.Run(ctx, sshrun.Cmd{Script: "make=1\n" + enter + `
find . -xdev -mindepth 1 -depth` + keep + ` -delete 2>/dev/null || find . -xdev -depth ! -name .` + keep + ` ! -type d -exec rm -f {} + || exit
find . -xdev -depth ! -name .` + keep + ` -type d -exec rmdir {} + || exit
LC_ALL=C tar -xpo -f - || exit
own -R -- .`, Args: []string{root, rel}, Stdin: pr, Stderr: engine.Last(&said)})
	pr.CloseWithError(errors.New("nobody reads any more"))
	select {
	case cerr := <-checked:
		if cerr != nil && ctx.Err() == nil && (err != nil || exit.Code == 0 || sandboxer.KindOf(cerr) != sandboxer.Internal) {
			return cerr
		}
	case <-ctx.Done():
	}
	if err != nil {
		return err
	}
	if exit.Code != 0 {
		return e.archiveError(ho, exit.Code, dir, said.String())
	}
	return nil
}

// pattern protects what find -path takes for a pattern.
var pattern = strings.NewReplacer(`*`, `\*`, `?`, `\?`, `[`, `\[`, `\`, `\\`)

// filterTar passes on the files of a tar of a workspace, which is unpacked by a tar that
// believes it; so it is held to the rules of package safetar.
// What stay names, with true for files, is of its kind there or missing.
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
			return sandboxer.E(sandboxer.Invalid, nil, "%q is mounted in a service and must stay a directory or file, as it was; the archive has something else there", name)
		} else if mounted && file && hdr.Typeflag == tar.TypeDir {
			return sandboxer.E(sandboxer.Invalid, nil, "%q is mounted in a service and must stay a file; the archive has a directory there", name)
		}
		if err := copyEntry(out, in, &tar.Header{Name: name, Linkname: hdr.Linkname, Mode: hdr.Mode & 0o777}, hdr); err != nil {
			return err
		}
	}
}

// copyEntry writes as, completed by what hdr says, and the contents that in has of it.
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
