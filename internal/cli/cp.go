package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

type cpOptions struct {
	f        *factory
	src, dst place
	bounds   cpBounds
}

// cpBounds limits the data that cp takes out of a sandbox, which is not trusted.
type cpBounds struct {
	size  int64 // bytes of all files
	files int   // files, directories and links
	idle  time.Duration
}

// A place is one side of cp: a path in a sandbox, a path here, or the standard
// stream.
type place struct {
	ref, path string
	stdio     bool
}

func parsePlace(s string) place {
	if s == "-" {
		return place{stdio: true}
	}
	if ref, p, ok := strings.Cut(s, ":"); ok && ref != "" && !strings.Contains(ref, "/") && ref != "." {
		return place{ref: ref, path: p}
	}
	return place{path: s}
}

func newCmdCp(f *factory) *cobra.Command {
	o := &cpOptions{f: f}
	var size, idle string
	c := &cobra.Command{
		Use: "cp SRC DST", Short: "Copy files and directories into or out of a sandbox",
		Long: "Copy a file or a directory between this machine and a sandbox, written ID:PATH; - is stdin or stdout. Relative\n" +
			"paths in a sandbox count from its workspace. A DST that is a directory, or ends in /, gets the copy put into it.\n" +
			"Write ./a:b for a local name with a colon. Directories are copied with the tar of the sandbox. A link that you\n" +
			"name is followed; links in a directory stay links. Sockets, pipes and devices are left out, and a warning names them.\n\n" +
			"A copy out of a sandbox has limits: --max-size, --max-files, and --max-idle without a byte. When it exceeds one, or\n" +
			"breaks off, a new DST is removed; the error names an existing one as incomplete.",
		Example: "  sandboxer cp . 7k2m:src\n  sandboxer cp 7k2m:/var/log/app.log -",
		Args:    wants(2, 2, "a source and a destination"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.src, o.dst = parsePlace(args[0]), parsePlace(args[1])
			if (o.src.ref == "") == (o.dst.ref == "") {
				return invalid("one of %s and %s must be in a sandbox, written ID:PATH, and the other not", args[0], args[1])
			}
			var err error
			if o.bounds.size, err = parseSize("--max-size", size); err != nil {
				return err
			}
			if o.bounds.idle, err = parseDuration("--max-idle", idle); err != nil {
				return err
			}
			if o.bounds.files <= 0 {
				return invalid("--max-files must be at least 1")
			}
			return cpRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&size, "max-size", maxOut, "maximum to copy out of a sandbox, a `SIZE` with its unit")
	c.Flags().IntVar(&o.bounds.files, "max-files", 1_000_000, "maximum `NUMBER` of files, directories and links to copy out of a sandbox")
	c.Flags().StringVar(&idle, "max-idle", "5m", "end a copy out of a sandbox after this `DURATION` without a byte")
	return c
}

// watched gives a copy an end: it is cancelled when seen was not called for idle.
func watched(ctx context.Context, ref string, idle time.Duration) (_ context.Context, seen, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(idle, func() {
		cancel(sandboxer.E(sandboxer.Timeout, nil, "nothing came out of sandbox %s for %s", ref, api.Duration(idle)).
			WithHint("wait longer with --max-idle"))
	})
	return ctx, func() { timer.Reset(idle) }, func() {
		timer.Stop()
		cancel(nil)
	}
}

// reason is why ctx ended, if we ended it, and otherwise err.
func reason(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && sandboxer.KindOf(cause) == sandboxer.Timeout {
		return cause
	}
	return err
}

// A seeing calls seen for all data that passes.
type seeing struct {
	r    io.Reader
	w    io.Writer
	seen func()
}

func (s seeing) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	s.seen()
	return n, err
}

func (s seeing) Write(b []byte) (int, error) {
	s.seen()
	return s.w.Write(b)
}

func cpRun(ctx context.Context, o *cpOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	if o.src.ref == "" {
		return copyIn(ctx, o, s)
	}
	return copyOut(ctx, o, s)
}

func copyIn(ctx context.Context, o *cpOptions, s *session) error {
	ref := o.dst.ref
	dst, err := inside(ctx, s, ref, o.dst.path)
	if err != nil {
		return err
	}
	into := o.dst.path == "" || strings.HasSuffix(o.dst.path, "/")
	fi, err := leadsTo(ctx, s, ref, dst)
	switch {
	case err == nil:
		if into && fi.Type == api.TypeFile {
			return sandboxer.E(sandboxer.Conflict, nil, "%s:%s is a file, not a directory", ref, dst)
		}
		into = into || fi.Type == api.TypeDir
	case !errors.Is(err, sandboxer.NotFound):
		return err
	default:
		if _, err := s.Get(ctx, ref); err != nil {
			return err
		}
	}
	if o.src.stdio {
		if into {
			return invalid("stdin has no file name, and %s is a directory", dst).WithHint("write the name of the file: %s:%s", ref, path.Join(dst, "NAME"))
		}
		return s.WriteFile(ctx, ref, dst, 0, o.f.io.in)
	}
	st, err := os.Stat(o.src.path)
	if err != nil {
		return fileError(err, "%s cannot be read", o.src.path)
	}
	if into {
		abs, err := filepath.Abs(o.src.path)
		if err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "%s cannot be made absolute", o.src.path)
		}
		// As with cp -r: "dir/." means what is in it.
		if base := filepath.Base(o.src.path); !st.IsDir() || base != "." {
			dst = path.Join(dst, filepath.Base(abs))
			if fi, err = leadsTo(ctx, s, ref, dst); err != nil && !errors.Is(err, sandboxer.NotFound) {
				return err
			}
		}
	}
	if !st.IsDir() {
		if !st.Mode().IsRegular() {
			return invalid("%s is neither a file nor a directory", o.src.path)
		}
		f, err := os.Open(o.src.path)
		if err != nil {
			return fileError(err, "%s cannot be read", o.src.path)
		}
		defer f.Close()
		if err := s.WriteFile(ctx, ref, dst, st.Mode().Perm(), f); err != nil {
			return err
		}
		exit, err := s.Exec(ctx, ref, sandboxer.Cmd{Args: []string{"touch", "-m", "-d", fmt.Sprintf("@%d", st.ModTime().Unix()), dst}, Dir: "/"})
		if err != nil || exit.Code != 0 {
			o.f.warn("%s is copied with the present time: touch in the sandbox failed", o.src.path)
		}
		return nil
	}
	tree := dst
	if fi == nil { // what breaks off must not look like a whole copy
		tree = path.Join(path.Dir(dst), ".sandboxer-"+rand.Text())
	}
	if err := copyTreeIn(ctx, o, s, tree); err != nil {
		if fi == nil {
			c, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			_ = s.RemoveFile(c, ref, tree)
			return err
		}
		var e *sandboxer.Error
		if errors.As(err, &e) {
			more := *e
			more.Msg += "; what is in " + ref + ":" + dst + " is incomplete"
			return &more
		}
		return err
	}
	if fi == nil {
		return s.MoveFile(ctx, ref, tree, dst)
	}
	return nil
}

// copyTreeIn unpacks a directory of this machine with the sandbox's tar.
func copyTreeIn(ctx context.Context, o *cpOptions, s *session, dst string) error {
	ref := o.dst.ref
	if err := s.MakeDir(ctx, ref, dst); err != nil {
		return err
	}
	r, w := io.Pipe()
	packed := make(chan error, 1)
	var skipped agent.Skipped
	go func() {
		var err error
		skipped, err = agent.Tar(w, o.src.path)
		w.CloseWithError(err)
		packed <- err
	}()
	complaint := &capture.First{Max: 2000}
	exit, err := s.Exec(ctx, ref, sandboxer.Cmd{Args: []string{"tar", "-x", "-p", "-f", "-", "-C", dst}, Dir: "/", Stdin: r, Stderr: complaint})
	r.Close()
	perr := <-packed
	switch {
	case exit.Code == sandboxer.ExitNotFound:
		return noTar(ref)
	case perr != nil && !errors.Is(perr, io.ErrClosedPipe):
		if name, ok := fileIn(o.src.path, perr); ok {
			return fileError(perr, "%s cannot be read", name)
		}
		return sandboxer.E(sandboxer.KindOf(perr), perr, "%s cannot be packed: %v", o.src.path, perr)
	case err != nil:
		return err
	case exit.Code != 0:
		return tarFailed(ref, exit.Code, strings.TrimSpace(complaint.String()))
	}
	tellSkipped(o, skipped)
	return nil
}

func tellSkipped(o *cpOptions, s agent.Skipped) {
	if said := s.String(); said != "" {
		o.f.warn("%s", said)
	}
}

// leadsTo describes the file that a path leads to, also if the path is a link.
func leadsTo(ctx context.Context, s *session, ref, p string) (*api.FileInfo, error) {
	for range 40 {
		fi, err := s.StatFile(ctx, ref, p)
		if err != nil || fi.Type != api.TypeSymlink {
			return fi, err
		}
		if p = path.Join(path.Dir(p), fi.Target); path.IsAbs(fi.Target) {
			p = path.Clean(fi.Target)
		}
	}
	return nil, invalid("%s:%s is a link that leads in a circle", ref, p)
}

// tarFailed explains a tar inside that failed, where the cause is a known one.
func tarFailed(ref string, code int, complaint string) error {
	for _, full := range []string{syscall.ENOSPC.Error(), syscall.EDQUOT.Error()} {
		if strings.Contains(strings.ToLower(complaint), full) {
			return sandboxer.E(sandboxer.Exhausted, nil, "sandbox %s: %s", ref, full).WithHint("remove files in it, or create one with a larger --disk")
		}
	}
	return sandboxer.E(sandboxer.Failed, nil, "tar in sandbox %s ended with %d: %s", ref, code, complaint)
}

func noTar(ref string) error {
	return sandboxer.E(sandboxer.Unsupported, nil, "sandbox %s has no tar, which copying directories needs", ref).
		WithHint("copy the files one by one, or use an image with tar")
}

func copyOut(ctx context.Context, o *cpOptions, s *session) error {
	ref := o.src.ref
	src, err := inside(ctx, s, ref, o.src.path)
	if err != nil {
		return err
	}
	fi, err := leadsTo(ctx, s, ref, src)
	if err != nil {
		return err
	}
	if o.dst.stdio {
		if fi.Type == api.TypeDir {
			return invalid("%s:%s is a directory", ref, src).WithHint("sandboxer exec %s -- tar -c -C %s .", ref, src)
		}
		_, err := pour(ctx, s, o.f.io.stdout, ref, src, o.bounds.size)
		return err
	}
	dst := o.dst.path
	into := strings.HasSuffix(dst, "/")
	if st, err := os.Stat(dst); err == nil {
		if into && !st.IsDir() {
			return sandboxer.E(sandboxer.Conflict, nil, "%s is not a directory", dst)
		}
		into = into || st.IsDir()
	}
	if into && (fi.Type != api.TypeDir || path.Base(o.src.path) != ".") {
		dst = filepath.Join(dst, path.Base(src))
	}
	if fi.Type != api.TypeDir {
		return copyFileOut(ctx, s, ref, src, dst, fi, o.bounds)
	}
	if _, err := os.Lstat(dst); err == nil {
		err := copyTreeOut(ctx, o, s, src, dst)
		var e *sandboxer.Error
		if errors.As(err, &e) {
			more := *e
			more.Msg += "; what is in " + dst + " is incomplete"
			return &more
		}
		return err
	}
	// An interrupted copy must not look like a whole one.
	if err := os.MkdirAll(filepath.Dir(filepath.Clean(dst)), 0o777); err != nil {
		return fileError(err, "the directory %s cannot be made", filepath.Dir(dst))
	}
	tmp, err := os.MkdirTemp(filepath.Dir(filepath.Clean(dst)), ".sandboxer-*")
	if err != nil {
		return fileError(err, "%s cannot be written", dst)
	}
	defer removeTree(tmp)
	tree := filepath.Join(tmp, "tree") // with the mode that the system gives, not this one's
	if err := copyTreeOut(ctx, o, s, src, tree); err != nil {
		return err
	}
	if err := os.Rename(tree, dst); err != nil {
		return fileError(err, "%s cannot be written", dst)
	}
	return nil
}

// removeTree removes a copy, including its read-only directories.
func removeTree(dir string) {
	if os.RemoveAll(dir) == nil {
		return
	}
	_ = filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if d != nil && d.IsDir() {
			_ = os.Chmod(name, 0o700)
		}
		return nil
	})
	_ = os.RemoveAll(dir)
}

// mostPadding bounds what may follow an archive's end; GNU tar pads to 10 KiB.
const mostPadding = 1 << 20

// copyTreeOut unpacks the sandbox's tar of a directory.
func copyTreeOut(ctx context.Context, o *cpOptions, s *session, src, dst string) error {
	ref, bounds := o.src.ref, o.bounds
	var skipped agent.Skipped
	ctx, seen, stop := watched(ctx, ref, bounds.idle)
	defer stop()
	r, w := io.Pipe()
	unpacked := make(chan error, 1)
	go func() {
		err := agent.Untar(r, dst, agent.UntarOptions{Replace: true, Skipped: &skipped, Limits: agent.TarLimits{Entries: bounds.files, Bytes: bounds.size}})
		if err == nil {
			var n int64
			if n, err = io.Copy(io.Discard, io.LimitReader(r, mostPadding+1)); err == nil && n > mostPadding {
				err = sandboxer.E(sandboxer.Invalid, nil, "the data after the archive of sandbox %s does not end", ref)
			}
		}
		r.CloseWithError(err)
		unpacked <- err
	}()
	complaint := &capture.First{Max: 2000}
	exit, err := s.Exec(ctx, ref, sandboxer.Cmd{Args: []string{"tar", "-c", "-f", "-", "-C", src, "."}, Dir: "/", Stdout: seeing{w: w, seen: seen}, Stderr: complaint})
	w.Close()
	uerr := <-unpacked
	broken := uerr != nil && !errors.Is(uerr, io.ErrUnexpectedEOF) // and not just cut off
	switch {
	case exit.Code == sandboxer.ExitNotFound:
		return noTar(ref)
	case err != nil && context.Cause(ctx) != nil:
		return reason(ctx, err)
	case broken && sandboxer.KindOf(uerr) == sandboxer.Exhausted:
		return sandboxer.E(sandboxer.Exhausted, uerr, "%s:%s is not copied: %s", ref, src, sentence(uerr)).WithHint("raise --max-size or --max-files, if you trust it")
	case broken:
		if name, ok := fileIn(o.dst.path, uerr); ok {
			return fileError(uerr, "%s cannot be written", name)
		}
		return uerr
	case exit.Code != 0:
		return tarFailed(ref, exit.Code, strings.TrimSpace(complaint.String()))
	case uerr != nil:
		return uerr
	}
	if err == nil {
		tellSkipped(o, skipped)
	}
	return err
}

// copyFileOut replaces dst by the file when all of it is there.
func copyFileOut(ctx context.Context, s *session, ref, src, dst string, fi *api.FileInfo, bounds cpBounds) (err error) {
	ctx, seen, stop := watched(ctx, ref, bounds.idle)
	defer stop()
	defer func() { err = reason(ctx, err) }()
	r, err := s.ReadFile(ctx, ref, src)
	if err != nil {
		return err
	}
	defer r.Close()
	if err := os.MkdirAll(filepath.Dir(dst), 0o777); err != nil {
		return fileError(err, "the directory %s cannot be made", filepath.Dir(dst))
	}
	tmp, err := os.CreateTemp(filepath.Dir(dst), ".sandboxer-*")
	if err != nil {
		return fileError(err, "%s cannot be written", dst)
	}
	defer os.Remove(tmp.Name())
	n, err := io.Copy(tmp, io.LimitReader(seeing{r: r, seen: seen}, bounds.size+1))
	if err == nil && n > bounds.size {
		return sandboxer.E(sandboxer.Exhausted, nil, "%s:%s is not copied: it takes more than %s", ref, src, size(bounds.size)).WithHint("raise --max-size, if you trust it")
	}
	if err = errors.Join(err, tmp.Chmod(fi.FileMode().Perm()), tmp.Close(), os.Chtimes(tmp.Name(), fi.ModTime, fi.ModTime)); err != nil {
		if sandboxer.KindOf(err) == sandboxer.Internal {
			err = fileError(err, "%s cannot be written", dst)
		}
		return err
	}
	if err := os.Rename(tmp.Name(), dst); err != nil {
		return fileError(err, "%s cannot be written", dst)
	}
	return nil
}
