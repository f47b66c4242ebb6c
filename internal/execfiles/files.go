// Package execfiles works on files inside sandboxes, and on archives of them, if only commands are
// available: by scripts for a POSIX shell with the tools of busybox.
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
// Names are arguments of a fixed script, never part of one, so that no name
// can become a command. The output of a script is unambiguous for every name: a name
// has no slash and no NUL, and those are the separators.
type Files struct{ Exec sandboxer.Execer }

// The exit codes of the scripts, apart from 0 and their tools' messages on stderr.
const (
	exitMissing  = 44
	exitIsDir    = 45
	exitNotDir   = 46
	exitDenied   = 47
	exitNoTools  = 48 // the image lacks what files take
	exitNoParent = 49
	exitNotFile  = 50
	exitKernel   = 51
	exitShort    = 52
)

// ours ends a script about a file in /proc or /sys, by whatever path.
const ours = `ours() { case $(stat -f -c %t "$1" 2>/dev/null) in 9fa0|62656572|27e0eb|63677270|64626720|74726163) exit 51; esac; }
`

const readScript = ours + `ours "$1"
[ -e "$1" ] || exit 44
[ -d "$1" ] && exit 45
[ -f "$1" ] || exit 50
[ -r "$1" ] || exit 47
printf + && exec cat "$1"`

// ReadFile opens a file once the script has found it: the + before its content
// confirms that.
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
			return nil, sandboxer.E(sandboxer.Failed, nil, "%s: the shell inside the sandbox printed nothing", name)
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

// followed sets f to the file that the path $1 leads to, even if that is a dangling link, and d to its
// directory. BusyBox's readlink -f fails for such links. A draft, whose name $2 makes unique, is in d, or in /tmp where d takes none.
const followed = `
[ -d "$1" ] && exit 45
f=$1 n=0
while [ -L "$f" ] && [ $n -lt 40 ]; do
	l=$(readlink "$f" && echo x) || exit 44
	l=${l%x} n=$((n+1)); l=${l%?}
	case $l in /*) f=$l ;; *) f=${f%/*}/$l ;; esac
done
[ ! -L "$f" ] || exit 50
d=${f%/*}/ t=${f%/*}/.sandboxer-$2 tmp=/tmp/.sandboxer-$2
`

// Drafts that a killed shell has left in the directory are removed after an hour.
const draftScript = followed + `
mkdir -p "$d" || exit
for old in "$d".sandboxer-*; do
	[ ! -f "$old" ] || find "$old" -prune -type f -mmin +60 -exec rm -f {} + 2>/dev/null
done
if [ -f "$f" ] && ! (: >"$t") 2>/dev/null; then t=$tmp; fi
cat >"$t"`

// An existing file keeps its owner and, without $3, its mode. A file that has other names, is
// mounted, belongs to another user, or is in a directory that takes no draft, gets the content only.
const adoptScript = followed + `
mkdir -p "$d" || exit
if [ ! -f "$t" ]; then cp "$tmp" "$t" 2>/dev/null || t=$tmp; fi
n=$(wc -c <"$t") || exit
[ "$n" -eq "$4" ] || exit 52
[ ! -e "$f" ] || [ -f "$f" ] || exit 50
if [ ! -e "$f" ]; then chmod "${3:-644}" "$t" && mv -f "$t" "$f" || exit
else
	m=${3:-$(stat -c %a "$f")}
	if ! { [ "$t" != "$tmp" ] && [ "$(stat -c %h "$f")" = 1 ] && chown "$(stat -c %u:%g "$f")" "$t" && chmod "$m" "$t" && mv -f "$t" "$f"; } 2>/dev/null; then
		cat "$t" >"$f" && chmod "$m" "$f" || exit
	fi
fi
rm -f "$t" "$tmp"
echo "$n"`

func (f Files) WriteFile(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
	// An Execer may take a failing source for one that ends, so its failure stops
	// the script, and the bytes are counted at both ends before the draft becomes the file.
	draft, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	src := &source{r: r, failed: cancel}
	unique := rand.Text()
	err := f.run(draft, h, sandboxer.Cmd{Stdin: src}, name, draftScript, name, unique)
	n, failed := src.end()
	if failed != nil {
		err = sandboxer.E(cmp.Or(kindIfKnown(failed), sandboxer.Invalid), failed, "%s: its new content could not be read", name)
	}
	if err != nil {
		f.discard(ctx, h, name, unique)
		return err
	}
	return f.adopt(ctx, h, unique, name, mode, n)
}

// discard removes a draft, after an error.
func (f Files) discard(ctx context.Context, h sandboxer.Handle, name, unique string) {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer stop()
	_ = f.run(ctx, h, sandboxer.Cmd{}, name, followed+`rm -f "$t" "$tmp"`, name, unique)
}

// adopt makes the draft /tmp/.sandboxer-UNIQUE the file of that name. A draft of another size is refused. After an error the
// draft is removed.
func (f Files) adopt(ctx context.Context, h sandboxer.Handle, unique, name string, mode fs.FileMode, size int64) error {
	bits := ""
	if mode != 0 {
		bits = fmt.Sprintf("%o", mode.Perm())
	}
	said := bounded{most: 32}
	err := f.run(ctx, h, sandboxer.Cmd{Stdout: &said}, name, adoptScript, name, unique, bits, strconv.FormatInt(size, 10))
	if got := strings.TrimSpace(said.String()); err == nil && got != strconv.FormatInt(size, 10) { // a shell that does nothing says nothing
		err = sandboxer.E(sandboxer.Failed, nil, "%s: the sandbox did not confirm its new content", name)
	}
	if err != nil {
		f.discard(ctx, h, name, unique)
	}
	return err
}

// kindIfKnown is KindOf without the assumption that an unknown error is a bug.
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

// The entries, one per line, each with the only slash of its record; a NUL; then the
// links, each a name and a target that end in a NUL. An entry that vanishes meanwhile
// is no error, so missing tools must be found out first.
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
	case exitShort:
		return sandboxer.E(sandboxer.Failed, nil, "%s: not all of its new content arrived in the sandbox", name)
	case exitDenied:
		return sandboxer.E(sandboxer.Denied, nil, "%s may not be read inside the sandbox", name)
	case exitNoTools, sandboxer.ExitNotExecutable, sandboxer.ExitNotFound:
		return sandboxer.E(sandboxer.Unsupported, said, "the sandbox's image lacks the tools that file operations need").
			WithHint("use an image with sh and coreutils or busybox")
	}
	switch {
	case says("No space left", "quota exceeded"):
		return sandboxer.E(sandboxer.Exhausted, said, "%s: the sandbox's disk is full", name)
	case says("an't fork", "annot fork", "Resource temporarily unavailable"):
		return sandboxer.E(sandboxer.Exhausted, said, "%s: the sandbox has reached its limit of processes", name)
	case says("Permission denied", "Operation not permitted", "Read-only file system"):
		return sandboxer.E(sandboxer.Denied, said, "%s may not be changed inside the sandbox", name)
	case says("Not a directory", "File exists", "Is a directory"):
		return sandboxer.E(sandboxer.Invalid, said, "%s: a part of the path is not a directory", name)
	case says("File name too long"):
		return sandboxer.E(sandboxer.Invalid, said, "%s: the name is too long", name)
	}
	return sandboxer.E(sandboxer.Failed, said, "%s: the shell inside the sandbox ended with %d", name, x.Code)
}

// bounded keeps the beginning of a guest's output. More than that fails, unless it is
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
		return fits, sandboxer.E(sandboxer.Failed, nil, "the shell inside the sandbox prints more than expected")
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
