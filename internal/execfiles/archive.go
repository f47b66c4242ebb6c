package execfiles

import (
	"cmp"
	"context"
	"errors"
	"io"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// Archive is a sandboxer.Archiver for backends that can only run commands. It needs a
// POSIX shell, find, mkdir, rm, rmdir and tar inside, as GNU or busybox have them.
type Archive struct{ Exec sandboxer.Execer }

// If a file changes while tar reads it, tar exits with 1 (GNU), so its output is checked.
// Files of the kernel are not archived, neither by whatever path nor below the directory.
const archiveScript = ours + `ours "$1"
[ -e "$1" ] || exit 44
[ -d "$1" ] || exit 46
cd "$1" 2>/dev/null && [ -r . ] || exit 47
command -v tar >/dev/null || exit 48
here=$(pwd -P)
set --
while read -r dev at type rest; do
	case $type in proc|sysfs|cgroup|cgroup2|debugfs|tracefs|securityfs) ;; *) continue;; esac
	case $at in "${here%/}"/*) set -- "$@" --exclude="./${at#"${here%/}"/}";; esac
done </proc/self/mounts 2>/dev/null
exec tar "$@" -cf - .`

// Archive implements sandboxer.Archiver.
func (a Archive) Archive(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := &sink{w: w, failed: cancel}
	err := a.run(ctx, h, sandboxer.Cmd{Stdout: out}, dir, archiveScript)
	if out.err != nil { // the command may not know of it
		return sandboxer.E(cmp.Or(kindIfKnown(out.err), sandboxer.Unavailable), out.err, "the archive of %s could not be written", called(dir))
	}
	return err
}

// Directories are emptied from below. Other file systems are left alone, so that
// mounts in the workspace keep their content.
const unarchiveScript = ours + `ours "$1"
[ -e "$1" ] && [ ! -d "$1" ] && exit 46
command -v tar >/dev/null && command -v find >/dev/null || exit 48
mkdir -p "$1" && cd "$1" || exit
find . -xdev ! -type d -exec rm -f {} + || exit
find . -xdev -depth -type d ! -name . -exec rmdir {} + 2>/dev/null
exec tar -xpof -`

// Unarchive implements sandboxer.Archiver.
func (a Archive) Unarchive(ctx context.Context, h sandboxer.Handle, dir string, r io.Reader) error {
	// An Execer may take a failing source for one that ends.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	src := &source{r: r, failed: cancel}
	err := a.run(ctx, h, sandboxer.Cmd{Stdin: src}, dir, unarchiveScript)
	if _, failed := src.end(); failed != nil {
		return sandboxer.E(cmp.Or(kindIfKnown(failed), sandboxer.Invalid), failed, "the archive for %s could not be read", called(dir))
	}
	return err
}

func called(dir string) string { return cmp.Or(dir, "the workspace") }

// run runs a script on dir and gives its end a kind.
func (a Archive) run(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd, dir, script string) error {
	stderr := &capture.Last{Max: 4 << 10}
	cmd.Args = []string{"sh", "-c", script, "sh", cmp.Or(dir, ".")}
	cmd.Env = map[string]string{"LC_ALL": "C"} // their messages are read below
	if dir != "" {
		cmd.Dir = "/"
	}
	cmd.Stderr = stderr
	x, err := a.Exec.Exec(ctx, h, cmd)
	if err != nil {
		return err
	}
	said := errors.New(strings.TrimSpace(stderr.String()))
	switch x.Code {
	case 0:
		return nil
	case 1:
		if onlyChanged(said.Error()) {
			return nil
		}
	case exitMissing:
		return sandboxer.E(sandboxer.NotFound, nil, "%s does not exist", called(dir))
	case exitNotDir:
		return sandboxer.E(sandboxer.Invalid, nil, "%s: there is a file where a directory is expected", called(dir))
	case exitKernel:
		return sandboxer.E(sandboxer.Denied, nil, "%s is the kernel's, and no files: it is not archived", called(dir))
	case exitDenied:
		return sandboxer.E(sandboxer.Denied, nil, "%s may not be read inside the sandbox", called(dir))
	case exitNoTools, sandboxer.ExitNotExecutable, sandboxer.ExitNotFound:
		return sandboxer.E(sandboxer.Unsupported, said, "the sandbox's image lacks the tools that archives need").
			WithHint("use an image with sh, find and tar, such as one with busybox")
	}
	says := func(texts ...string) bool {
		for _, s := range texts {
			if strings.Contains(said.Error(), s) {
				return true
			}
		}
		return false
	}
	switch {
	case says("No space left", "quota exceeded"):
		return sandboxer.E(sandboxer.Exhausted, said, "%s: the sandbox's disk is full", called(dir))
	case says("Permission denied", "Operation not permitted", "Read-only file system"):
		return sandboxer.E(sandboxer.Denied, said, "a file in %s may not be touched inside the sandbox", called(dir))
	case says("does not look like a tar", "Unexpected EOF", "short read", "invalid tar", "Skipping to next header", "bad header", "corrupted"):
		return sandboxer.E(sandboxer.Invalid, said, "the input for %s is not a whole tar archive", called(dir))
	}
	return sandboxer.E(sandboxer.Failed, said, "tar inside the sandbox ended with %d on %s", x.Code, called(dir))
}

// onlyChanged reports whether all complaints of a tar are about files that changed
// while they were read, which crash consistency allows.
func onlyChanged(said string) bool {
	for line := range strings.Lines(said) {
		line = strings.TrimSpace(line)
		if !strings.HasSuffix(line, "file changed as we read it") && !strings.HasSuffix(line, "File removed before we read it") {
			return false
		}
	}
	return said != ""
}

// sink passes on to w and remembers its failure, calling failed with it.
type sink struct {
	w      io.Writer
	failed context.CancelCauseFunc
	err    error
}

func (s *sink) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	if err != nil {
		s.err = err
		s.failed(err)
	}
	return n, err
}
