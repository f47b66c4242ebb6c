package backend

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// execFiles is a Filer for backends that can only run commands. It needs a POSIX
// shell and the tools busybox has (cat, chmod, find, mkdir, mv, readlink, rm, stat,
// wc) inside.
//
// Names travel as arguments of a fixed script, never as part of one, so that no name
// can become a command. What a script prints is unambiguous for every name: a name
// has no slash and no NUL, and those are what separates.
type execFiles struct{ exec sandboxer.Execer }

// How the scripts end, besides 0 and what their tools say on stderr.
const (
	exitMissing  = 44
	exitIsDir    = 45
	exitNotDir   = 46
	exitDenied   = 47
	exitNoTools  = 48
	exitNoParent = 49
	exitNotFile  = 50
)

const readScript = `
[ -e "$1" ] || exit 44
[ -d "$1" ] && exit 45
[ -f "$1" ] || exit 50
[ -r "$1" ] || exit 47
printf + && exec cat "$1"`

// ReadFile opens a file once the script has found it: the + before its content says
// that it did.
func (f execFiles) ReadFile(ctx context.Context, h sandboxer.Handle, name string) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancel(ctx)
	pr, pw := io.Pipe()
	r := &execReader{PipeReader: pr, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		pw.CloseWithError(f.run(ctx, h, sandboxer.Cmd{Stdout: pw}, name, readScript, name))
	}()
	if _, err := io.ReadFull(pr, make([]byte, 1)); err != nil {
		r.Close()
		if err == io.EOF {
			return nil, sandboxer.E(sandboxer.Failed, nil, "%s: the shell inside the sandbox said nothing", name)
		}
		return nil, err
	}
	return r, nil
}

type execReader struct {
	*io.PipeReader
	cancel context.CancelFunc
	done   chan struct{}
}

func (r *execReader) Close() error {
	r.cancel()
	r.PipeReader.Close()
	<-r.done
	return nil
}

// The file appears under its name once it is complete; $3 makes the name until then
// unique.
const writeScript = `
[ -d "$1" ] && exit 45
d=${1%/*}/
mkdir -p "$d" || exit
t=$d.sandboxer-$3
trap 'rm -f "$t"' EXIT
cat >"$t" && chmod "$2" "$t" && wc -c <"$t" && mv -f "$t" "$1"`

func (f execFiles) WriteFile(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
	// An Execer may take a source that fails for one that ends, so its failure stops
	// the script, and the bytes are counted at both ends.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	src := &source{r: r, failed: cancel}
	unique := rand.Text()
	var out bytes.Buffer
	err := f.run(ctx, h, sandboxer.Cmd{Stdin: src, Stdout: &out}, name, writeScript,
		name, fmt.Sprintf("%o", mode.Perm()), unique)
	if err != nil && ctx.Err() != nil { // the shell was killed before it could clean up
		c, stop := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer stop()
		f.run(c, h, sandboxer.Cmd{}, name, `rm -f "$1"`, path.Join(path.Dir(name), ".sandboxer-"+unique))
	}
	n, failed := src.end()
	if failed != nil {
		return sandboxer.E(cmp.Or(kindIfKnown(failed), sandboxer.Invalid), failed, "%s: its new content could not be read", name)
	}
	if err != nil {
		return err
	}
	if got := strings.TrimSpace(out.String()); got != strconv.FormatInt(n, 10) {
		return sandboxer.E(sandboxer.Failed, nil, "%s: %d bytes were sent, %q arrived", name, n, got)
	}
	return nil
}

// kindIfKnown is KindOf without the presumption that what is unknown is a bug.
func kindIfKnown(err error) sandboxer.Kind {
	if k := sandboxer.KindOf(err); k != sandboxer.Internal {
		return k
	}
	return ""
}

const statFormat = `%f %s %Y %u %g %U %G`

const statScript = `
[ -e "$1" ] || [ -L "$1" ] || exit 44
stat -c '` + statFormat + `' "$1" || exit
if [ -L "$1" ]; then readlink "$1"; fi`

func (f execFiles) StatFile(ctx context.Context, h sandboxer.Handle, name string) (sandboxer.FileInfo, error) {
	var out bytes.Buffer
	if err := f.run(ctx, h, sandboxer.Cmd{Stdout: &out}, name, statScript, name); err != nil {
		return sandboxer.FileInfo{}, err
	}
	line, target, _ := strings.Cut(out.String(), "\n")
	fi, rest, err := parseStat(line)
	if err != nil || rest != "" {
		return fi, sandboxer.E(sandboxer.Failed, err, "%s: stat inside the sandbox answered %q", name, line)
	}
	fi.Path, fi.Target = name, strings.TrimSuffix(target, "\n")
	return fi, nil
}

// The entries, one a line, each with the only slash of its record; a NUL; then the
// links, each a name and a target that end in a NUL. An entry that vanishes meanwhile
// is no error, so tools that are missing must be found out first.
const listScript = `
[ -d "$1" ] || { [ -e "$1" ] && exit 46; exit 44; }
cd "$1" 2>/dev/null && [ -r . ] || exit 47
command -v find >/dev/null && command -v stat >/dev/null && command -v readlink >/dev/null || exit 48
find . ! -name . -prune -exec stat -c '` + statFormat + ` %n' {} + 2>/dev/null
printf '\000'
find . ! -name . -prune -type l -exec sh -c '
	for f do printf "%s\000" "$f"; readlink "$f"; printf "\000"; done' sh {} + 2>/dev/null
exit 0`

func (f execFiles) ListFiles(ctx context.Context, h sandboxer.Handle, dir string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		var out bytes.Buffer
		err := f.run(ctx, h, sandboxer.Cmd{Stdout: &out}, dir, listScript, dir)
		var all []sandboxer.FileInfo
		if err == nil {
			all, err = parseList(dir, out.String())
		}
		if err != nil {
			yield(sandboxer.FileInfo{}, err)
			return
		}
		for _, fi := range all {
			if !yield(fi, nil) {
				return
			}
		}
	}
}

const makeDirScript = `
[ -e "$1" ] && [ ! -d "$1" ] && exit 46
mkdir -p "$1"`

func (f execFiles) MakeDir(ctx context.Context, h sandboxer.Handle, dir string) error {
	return f.run(ctx, h, sandboxer.Cmd{}, dir, makeDirScript, dir)
}

// mv would move into a directory that exists.
const moveScript = `
[ -e "$1" ] || [ -L "$1" ] || exit 44
[ -d "$2" ] && exit 45
[ -d "$1" ] && [ ! -L "$1" ] && [ -e "$2" ] && exit 46
[ -d "${2%/*}/" ] || exit 49
mv -f "$1" "$2"`

func (f execFiles) MoveFile(ctx context.Context, h sandboxer.Handle, from, to string) error {
	return f.run(ctx, h, sandboxer.Cmd{}, from, moveScript, from, to)
}

func (f execFiles) RemoveFile(ctx context.Context, h sandboxer.Handle, name string) error {
	if name == "/" {
		return sandboxer.E(sandboxer.Invalid, nil, "the sandbox's root cannot be removed")
	}
	return f.run(ctx, h, sandboxer.Cmd{}, name, `rm -rf "$1"`, name)
}

// run runs a script on the file name and gives its end a kind.
func (f execFiles) run(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd, name, script string, args ...string) error {
	var stderr bytes.Buffer
	cmd.Args = append([]string{"sh", "-c", script, "sh"}, args...)
	cmd.Env = map[string]string{"LC_ALL": "C"} // their messages are read below
	cmd.Dir = "/"
	cmd.Stderr = &stderr
	x, err := f.exec.Exec(ctx, h, cmd)
	if err != nil {
		return err
	}
	said := errors.New(strings.TrimSpace(string(stderr.Bytes()[:min(stderr.Len(), 1<<10)])))
	says := func(texts ...string) bool {
		return slices.ContainsFunc(texts, func(s string) bool { return strings.Contains(said.Error(), s) })
	}
	switch x.Code {
	case 0:
		return nil
	case exitMissing:
		return sandboxer.E(sandboxer.NotFound, nil, "%s does not exist", name)
	case exitNoParent:
		return sandboxer.E(sandboxer.NotFound, nil, "the directory that %s should be moved to does not exist", name)
	case exitIsDir:
		return sandboxer.E(sandboxer.Invalid, nil, "%s: there is a directory where a file is expected", name)
	case exitNotDir:
		return sandboxer.E(sandboxer.Invalid, nil, "%s: there is a file where a directory is expected", name)
	case exitNotFile:
		return sandboxer.E(sandboxer.Invalid, nil, "%s is not a regular file", name)
	case exitDenied:
		return sandboxer.E(sandboxer.Denied, nil, "%s may not be read inside the sandbox", name)
	case exitNoTools, 126, 127:
		return sandboxer.E(sandboxer.Unsupported, said, "the sandbox's image lacks the tools that working on its files takes").
			WithHint("use an image with sh and coreutils or busybox")
	}
	switch {
	case says("No space left", "quota exceeded"):
		return sandboxer.E(sandboxer.Exhausted, said, "%s: the sandbox's disk is full", name)
	case says("Permission denied", "Operation not permitted", "Read-only file system"):
		return sandboxer.E(sandboxer.Denied, said, "%s may not be changed inside the sandbox", name)
	case says("Not a directory", "File exists", "Is a directory"):
		return sandboxer.E(sandboxer.Invalid, said, "%s: a part of the path is not a directory", name)
	case says("File name too long"):
		return sandboxer.E(sandboxer.Invalid, said, "%s: the name is too long", name)
	}
	return sandboxer.E(sandboxer.Failed, said, "%s: the shell inside the sandbox ended with %d", name, x.Code)
}

// source counts what is read from r, and calls failed when that fails. An Execer may
// still be reading when the command has ended.
type source struct {
	r      io.Reader
	failed context.CancelCauseFunc

	mu  sync.Mutex
	n   int64
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n += int64(n)
	if err != nil && err != io.EOF {
		s.err = err
		s.failed(err)
	}
	return n, err
}

func (s *source) end() (n int64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.n, s.err
}

// parseStat reads what stat printed in statFormat, and returns what follows.
func parseStat(line string) (fi sandboxer.FileInfo, rest string, err error) {
	f := strings.SplitN(line, " ", 8)
	if len(f) < 7 {
		return fi, "", errors.New("too few fields")
	}
	if len(f) == 8 {
		rest = f[7]
	}
	mode, err1 := strconv.ParseUint(f[0], 16, 32)
	size, err2 := strconv.ParseInt(f[1], 10, 64)
	mtime, err3 := strconv.ParseInt(f[2], 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil {
		return fi, "", err
	}
	fi = sandboxer.FileInfo{Size: size, Mode: unixMode(uint32(mode)), ModTime: time.Unix(mtime, 0), Owner: f[5], Group: f[6]}
	if fi.Owner == "UNKNOWN" {
		fi.Owner = f[3]
	}
	if fi.Group == "UNKNOWN" {
		fi.Group = f[4]
	}
	return fi, rest, nil
}

// parseList reads what listScript printed about dir.
func parseList(dir, out string) (all []sandboxer.FileInfo, err error) {
	bad := func(err error) error {
		return sandboxer.E(sandboxer.Failed, err, "%s: the shell inside the sandbox lists it in a way that cannot be read", dir)
	}
	entries, links, ok := strings.Cut(out, "\x00")
	if !ok {
		return nil, bad(errors.New("cut off"))
	}
	targets := map[string]string{}
	for links != "" {
		name, rest, ok1 := strings.Cut(links, "\x00")
		target, rest, ok2 := strings.Cut(rest, "\x00")
		if !ok1 || !ok2 {
			return nil, bad(errors.New("cut off in the links"))
		}
		targets[strings.TrimPrefix(name, "./")] = strings.TrimSuffix(target, "\n")
		links = rest
	}
	var records []string
	if entries != "" {
		for _, line := range strings.Split(strings.TrimSuffix(entries, "\n"), "\n") {
			if strings.Contains(line, "/") {
				records = append(records, line)
			} else if len(records) > 0 { // the rest of a name with a line end
				records[len(records)-1] += "\n" + line
			} else {
				return nil, bad(fmt.Errorf("it begins with %q", line))
			}
		}
	}
	for _, record := range records {
		fi, name, err := parseStat(record)
		name, ok := strings.CutPrefix(name, "./")
		if err != nil || !ok || name == "" || name == "." || name == ".." || strings.Contains(name, "/") {
			return nil, bad(errors.Join(err, fmt.Errorf("record %q", record)))
		}
		fi.Path, fi.Target = path.Join(dir, name), targets[name]
		all = append(all, fi)
	}
	slices.SortFunc(all, func(a, b sandboxer.FileInfo) int { return strings.Compare(a.Path, b.Path) })
	return all, nil
}

// unixMode converts st_mode. The values are the same on every system a guest has.
func unixMode(m uint32) fs.FileMode {
	mode := fs.FileMode(m & 0o777)
	switch m & 0o170000 {
	case 0o040000:
		mode |= fs.ModeDir
	case 0o120000:
		mode |= fs.ModeSymlink
	case 0o010000:
		mode |= fs.ModeNamedPipe
	case 0o140000:
		mode |= fs.ModeSocket
	case 0o060000:
		mode |= fs.ModeDevice
	case 0o020000:
		mode |= fs.ModeDevice | fs.ModeCharDevice
	}
	for bit, flag := range map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if m&bit != 0 {
			mode |= flag
		}
	}
	return mode
}
