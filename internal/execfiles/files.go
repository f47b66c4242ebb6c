// Package execfiles works on files inside sandboxes, and on archives of them, where all that there is are
// commands: by scripts for a POSIX shell, which have the tools busybox has.
package execfiles

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

// Files is a sandboxer.Filer for backends that can only run commands. It needs a POSIX
// shell and the tools busybox has (cat, chmod, find, mkdir, mv, readlink, rm, stat,
// wc) inside.
//
// Names travel as arguments of a fixed script, never as part of one, so that no name
// can become a command. What a script prints is unambiguous for every name: a name
// has no slash and no NUL, and those are what separates.
type Files struct{ Exec sandboxer.Execer }

// How the scripts end, besides 0 and what their tools say on stderr.
const (
	exitMissing  = 44
	exitIsDir    = 45
	exitNotDir   = 46
	exitDenied   = 47
	ExitNoTools  = 48 // the image lacks what files take
	exitNoParent = 49
	exitNotFile  = 50
	exitKernel   = 51
)

// ours ends a script about what lies in /proc or /sys, by whatever path.
const ours = `ours() { case $(stat -f -c %t "$1" 2>/dev/null) in 9fa0|62656572|27e0eb|63677270|64626720|74726163) exit 51; esac; }
`

const readableScript = ours + `ours "$1"
[ -e "$1" ] || exit 44
[ -d "$1" ] && exit 45
[ -f "$1" ] || exit 50
[ -r "$1" ] || exit 47
`

const readScript = readableScript + `printf + && exec cat "$1"`

// Readable is nil where there is a file of that name that ReadFile would read, for backends that have
// another way to its content.
func (f Files) Readable(ctx context.Context, h sandboxer.Handle, name string) error {
	return f.run(ctx, h, sandboxer.Cmd{}, name, readableScript, name)
}

// ReadFile opens a file once the script has found it: the + before its content says
// that it did.
func (f Files) ReadFile(ctx context.Context, h sandboxer.Handle, name string) (io.ReadCloser, error) {
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

func (f Files) WriteFile(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
	// An Execer may take a source that fails for one that ends, so its failure stops
	// the script, and the bytes are counted at both ends.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	src := &source{r: r, failed: cancel}
	unique := rand.Text()
	out := bounded{most: maxPart}
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
	return arrived(name, out.String(), n)
}

const adoptScript = `
[ -d "$1" ] && exit 45
mkdir -p "${1%/*}/" && chmod "$2" "$3" && wc -c <"$3" && mv -f "$3" "$1"`

// Adopt makes the file draft, which another way has brought inside, the file of that name, as WriteFile would
// have it. It is refused if it has not size bytes.
func (f Files) Adopt(ctx context.Context, h sandboxer.Handle, draft, name string, mode fs.FileMode, size int64) error {
	out := bounded{most: maxPart}
	if err := f.run(ctx, h, sandboxer.Cmd{Stdout: &out}, name, adoptScript, name, fmt.Sprintf("%o", mode.Perm()), draft); err != nil {
		return err
	}
	return arrived(name, out.String(), size)
}

// arrived compares what wc said of a new file with what was sent.
func arrived(name, said string, sent int64) error {
	if got := strings.TrimSpace(said); got != strconv.FormatInt(sent, 10) {
		return sandboxer.E(sandboxer.Failed, nil, "%s: %d bytes were sent, %.40q arrived", name, sent, got)
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

const statScript = ours + `d=${1%/*}; ours "${d:-/}"
[ -e "$1" ] || [ -L "$1" ] || exit 44
stat -c '` + statFormat + `' "$1" || exit
if [ -L "$1" ]; then readlink "$1"; fi`

func (f Files) StatFile(ctx context.Context, h sandboxer.Handle, name string) (sandboxer.FileInfo, error) {
	out := bounded{most: maxPart}
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
const listScript = ours + `ours "$1"
[ -d "$1" ] || { [ -e "$1" ] && exit 46; exit 44; }
cd "$1" 2>/dev/null && [ -r . ] || exit 47
command -v find >/dev/null && command -v stat >/dev/null && command -v readlink >/dev/null || exit 48
find . ! -name . -prune -exec stat -c '` + statFormat + ` %n' {} + 2>/dev/null
printf '\000'
find . ! -name . -prune -type l -exec sh -c '
	for f do printf "%s\000" "$f"; readlink "$f"; printf "\000"; done' sh {} + 2>/dev/null
exit 0`

func (f Files) ListFiles(ctx context.Context, h sandboxer.Handle, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		for {
			l := &listing{dir: dir, after: after, limit: pageFiles}
			err := f.run(ctx, h, sandboxer.Cmd{Stdout: l}, dir, listScript, dir)
			if l.err != nil {
				err = l.err
			}
			var page []sandboxer.FileInfo
			if err == nil {
				page, err = l.end()
			}
			if err != nil {
				yield(sandboxer.FileInfo{}, err)
				return
			}
			for _, fi := range page {
				if !yield(fi, nil) {
					return
				}
				after = path.Base(fi.Path)
			}
			if !l.cut {
				return
			}
		}
	}
}

const makeDirScript = `
[ -e "$1" ] && [ ! -d "$1" ] && exit 46
mkdir -p "$1"`

func (f Files) MakeDir(ctx context.Context, h sandboxer.Handle, dir string) error {
	return f.run(ctx, h, sandboxer.Cmd{}, dir, makeDirScript, dir)
}

// mv would move into a directory that exists.
const moveScript = `
[ -e "$1" ] || [ -L "$1" ] || exit 44
[ -d "$2" ] && exit 45
[ -d "$1" ] && [ ! -L "$1" ] && [ -e "$2" ] && exit 46
[ -d "${2%/*}/" ] || exit 49
mv -f "$1" "$2"`

func (f Files) MoveFile(ctx context.Context, h sandboxer.Handle, from, to string) error {
	return f.run(ctx, h, sandboxer.Cmd{}, from, moveScript, from, to)
}

func (f Files) RemoveFile(ctx context.Context, h sandboxer.Handle, name string) error {
	if name == "/" {
		return sandboxer.E(sandboxer.Invalid, nil, "the sandbox's root cannot be removed")
	}
	return f.run(ctx, h, sandboxer.Cmd{}, name, `rm -rf "$1"`, name)
}

// run runs a script on the file name and gives its end a kind.
func (f Files) run(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd, name, script string, args ...string) error {
	stderr := bounded{most: 4 << 10, drop: true}
	cmd.Args = append([]string{"sh", "-c", script, "sh"}, args...)
	cmd.Env = map[string]string{"LC_ALL": "C"} // their messages are read below
	cmd.Dir = "/"
	cmd.Stderr = &stderr
	x, err := f.Exec.Exec(ctx, h, cmd)
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
	case exitKernel:
		return sandboxer.E(sandboxer.Denied, nil, "%s is the kernel's, not a file: it is not served", name).WithHint("read it by a command: cat")
	case exitDenied:
		return sandboxer.E(sandboxer.Denied, nil, "%s may not be read inside the sandbox", name)
	case ExitNoTools, sandboxer.ExitNotExecutable, sandboxer.ExitNotFound:
		return sandboxer.E(sandboxer.Unsupported, said, "the sandbox's image lacks the tools that working on its files takes").
			WithHint("use an image with sh and coreutils or busybox")
	}
	switch {
	case says("No space left", "quota exceeded"):
		return sandboxer.E(sandboxer.Exhausted, said, "%s: the sandbox's disk is full", name)
	case says("an't fork", "annot fork", "Resource temporarily unavailable"):
		return sandboxer.E(sandboxer.Exhausted, said, "%s: the sandbox has no process left to work on it", name)
	case says("Permission denied", "Operation not permitted", "Read-only file system"):
		return sandboxer.E(sandboxer.Denied, said, "%s may not be changed inside the sandbox", name)
	case says("Not a directory", "File exists", "Is a directory"):
		return sandboxer.E(sandboxer.Invalid, said, "%s: a part of the path is not a directory", name)
	case says("File name too long"):
		return sandboxer.E(sandboxer.Invalid, said, "%s: the name is too long", name)
	}
	return sandboxer.E(sandboxer.Failed, said, "%s: the shell inside the sandbox ended with %d", name, x.Code)
}

// bounded keeps the beginning of what a guest prints. More than that fails, unless it is
// to be dropped.
type bounded struct {
	bytes.Buffer
	most int
	drop bool
}

func (b *bounded) Write(p []byte) (int, error) {
	fits := min(len(p), b.most-b.Len())
	b.Buffer.Write(p[:fits])
	if fits < len(p) && !b.drop {
		return fits, sandboxer.E(sandboxer.Failed, nil, "the shell inside the sandbox says more than it has to")
	}
	return len(p), nil
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

// A listing reads what listScript prints about dir, and keeps the first files after one.
type listing struct {
	dir, after string
	limit      int

	got   []sandboxer.FileInfo
	cut   bool // there are more
	bytes int64
	err   error

	part   []byte // that has not come to its end
	record []byte // an entry, which goes on in the next line if that has no slash
	links  map[string]int
	link   *int // of got: whose target comes next; -1 if that is not kept
}

const (
	pageFiles  = 1000
	maxPart    = 64 << 10 // bytes of a name or target
	maxListing = 4 << 30  // bytes, of ten million files and more
)

// parseList reads the whole of what listScript printed.
func parseList(dir, out string) ([]sandboxer.FileInfo, error) {
	l := &listing{dir: dir, limit: len(out)}
	if _, err := l.Write([]byte(out)); err != nil {
		return nil, err
	}
	return l.end()
}

func (l *listing) bad(err error) error {
	return sandboxer.E(sandboxer.Failed, err, "%s: the shell inside the sandbox lists it in a way that cannot be read", l.dir)
}

func (l *listing) Write(p []byte) (int, error) {
	if l.err == nil {
		l.err = l.read(p)
	}
	if l.err != nil {
		return 0, l.err
	}
	return len(p), nil
}

func (l *listing) read(p []byte) error {
	if l.bytes += int64(len(p)); l.bytes > maxListing {
		return l.bad(errors.New("it has no end"))
	}
	for len(p) > 0 {
		ends := "\n\x00"
		if l.links != nil {
			ends = "\x00"
		}
		i := bytes.IndexAny(p, ends)
		if i < 0 {
			i = len(p)
		}
		if l.part = append(l.part, p[:i]...); len(l.part)+len(l.record) > maxPart {
			return l.bad(errors.New("a name is too long"))
		}
		if i == len(p) {
			return nil
		}
		err := l.piece(p[i] == 0)
		if err != nil {
			return err
		}
		l.part, p = l.part[:0], p[i+1:]
	}
	return nil
}

// piece takes what is in part, a line of the entries or, after those, a name or target.
func (l *listing) piece(nul bool) error {
	if l.links != nil {
		return l.linked()
	}
	switch {
	case nul && len(l.part) == 0:
	case bytes.IndexByte(l.part, '/') >= 0:
		if err := l.entry(); err != nil {
			return err
		}
		l.record = append(l.record, l.part...)
	case len(l.record) == 0:
		return l.bad(fmt.Errorf("it begins with %q", l.part))
	default: // the rest of a name with a line end
		l.record = append(append(l.record, '\n'), l.part...)
	}
	if !nul {
		return nil
	}
	err := l.entry()
	l.shrink()
	l.links = map[string]int{}
	for i, fi := range l.got {
		l.links["./"+path.Base(fi.Path)] = i
	}
	return err
}

// entry takes the record that is complete.
func (l *listing) entry() error {
	if len(l.record) == 0 {
		return nil
	}
	fi, name, err := parseStat(string(l.record))
	name, ok := strings.CutPrefix(name, "./")
	if err != nil || !ok || name == "" || name == "." || name == ".." || strings.Contains(name, "/") {
		return l.bad(errors.Join(err, fmt.Errorf("record %q", l.record)))
	}
	l.record = l.record[:0]
	if name > l.after {
		fi.Path = path.Join(l.dir, name)
		if l.got = append(l.got, fi); len(l.got) > 2*l.limit {
			l.shrink()
		}
	}
	return nil
}

func (l *listing) shrink() {
	slices.SortFunc(l.got, func(a, b sandboxer.FileInfo) int { return strings.Compare(a.Path, b.Path) })
	if len(l.got) > l.limit {
		l.got, l.cut = l.got[:l.limit], true
	}
}

func (l *listing) linked() error {
	if l.link == nil {
		i, ok := l.links[string(l.part)]
		if !ok {
			i = -1
		}
		l.link = &i
		return nil
	}
	if *l.link >= 0 {
		l.got[*l.link].Target = strings.TrimSuffix(string(l.part), "\n")
	}
	l.link = nil
	return nil
}

func (l *listing) end() ([]sandboxer.FileInfo, error) {
	if l.links == nil || l.link != nil || len(l.part) > 0 {
		return nil, l.bad(errors.New("cut off"))
	}
	return l.got, nil
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
