//go:build linux

package local

import (
	"crypto/md5"
	"encoding/hex"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Where dpkg and ucf, which does the same for some packages, record the original
// configuration files.
const (
	dpkgStatus = "/var/lib/dpkg/status"
	ucfHashes  = "/var/lib/ucf/hashfile"
)

// Bounds on what is copied of packages; the rest is left out.
const (
	maxDatabase = 64 << 20
	maxPackaged = 20_000
	maxConffile = 4 << 20
)

// packaged plans copies of the files of /etc that are unchanged since their package was
// installed: they reveal no more about this machine than /usr does, and programs need them.
// A changed file may hold a secret; copying it takes the setting etc. Links next to them
// are copied if they lead into /usr.
func (b *skeletonBuilder) packaged() error {
	known := map[string]string{}
	conffiles(readBounded(dpkgStatus), known)
	for line := range strings.Lines(readBounded(ucfHashes)) {
		if sum, name, ok := strings.Cut(strings.TrimSpace(line), "  "); ok {
			known[name] = sum
		}
	}
	dirs := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(known)) {
		if len(dirs) > maxPackaged || !inEtc(name) || b.seen[name] {
			continue
		}
		// No link on the way: it would lead to another file than the package's.
		if real, err := filepath.EvalSymlinks(filepath.Dir(name)); err != nil || real != filepath.Dir(name) {
			continue
		}
		if !asShipped(name, known[name]) {
			continue
		}
		fi, err := os.Lstat(name)
		if err != nil {
			continue
		}
		if err := b.file(name, fi.Mode().Perm()&^0o022, func() (io.ReadCloser, error) { return openRegular(name) }); err != nil {
			return errChanging
		}
		dirs[filepath.Dir(name)] = true
	}
	for _, dir := range slices.Sorted(maps.Keys(dirs)) {
		b.watch = append(b.watch, dir)
		entries, err := os.ReadDir(dir)
		if err != nil || dir == "/etc" {
			continue
		}
		for _, d := range entries {
			name := filepath.Join(dir, d.Name())
			if d.Type()&fs.ModeSymlink == 0 || b.seen[name] {
				continue
			}
			to, err := os.Readlink(name)
			if err != nil {
				continue
			}
			at := to
			if !filepath.IsAbs(at) {
				at = filepath.Join(dir, to)
			}
			if strings.HasPrefix(filepath.Clean(at), "/usr/") {
				if err := b.link(name, to); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// inEtc reports whether name is a file below /etc that a package may bring, and that is
// useful and safe to copy whatever a package says.
func inEtc(name string) bool {
	if !strings.HasPrefix(name, "/etc/") || filepath.Clean(name) != name {
		return false
	}
	// How this machine reaches others stays hidden, even if the file is unchanged.
	return !strings.HasPrefix(name, "/etc/ssh/") && !reservedEtc(strings.TrimPrefix(name, "/etc/"))
}

// conffiles reads from dpkg's status which configuration files are installed, with their
// original MD5 sums.
func conffiles(status string, into map[string]string) {
	inside := false
	for line := range strings.Lines(status) {
		if !strings.HasPrefix(line, " ") {
			inside = strings.HasPrefix(line, "Conffiles:")
			continue
		}
		f := strings.Fields(line)
		if inside && len(f) == 2 { // a third field marks it as obsolete
			into[f[0]] = f[1]
		}
	}
}

func asShipped(name, sum string) bool {
	r, err := openRegular(name)
	if err != nil {
		return false
	}
	defer r.Close()
	h := md5.New()
	n, err := io.Copy(h, io.LimitReader(r, maxConffile+1))
	return err == nil && n <= maxConffile && hex.EncodeToString(h.Sum(nil)) == sum
}

func readBounded(name string) string {
	f, err := os.Open(name)
	if err != nil {
		return ""
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxDatabase))
	if err != nil {
		return ""
	}
	return string(data)
}
