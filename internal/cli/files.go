package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/api"
)

// filesOptions are those of the commands below files.
type filesOptions struct {
	refOptions
	paths []string
	mode  fs.FileMode
	most  int64 // bytes that come out
}

type filesRun = func(context.Context, *session, *filesOptions) error

func newCmdFiles(f *factory) *cobra.Command {
	sub := func(use, short string, least, most int, what string, run filesRun) *cobra.Command {
		return newCmdFilesX(f, use, short, least, most, what, run, nil)
	}
	put := sub("put ID PATH", "Write stdin to a file", 2, 2, "a sandbox and a path", filesPutRun)
	return newGroup("files", "Files inside a sandbox", []string{"file"},
		sub("ls ID [PATH]", "List a directory", 1, 2, "a sandbox and at most one path", filesLsRun),
		sub("cat ID PATH…", "Write files to stdout", 2, -1, "a sandbox and paths", filesCatRun),
		put,
		sub("rm ID PATH…", "Remove files and directories; absence is success", 2, -1, "a sandbox and paths", filesRmRun),
		sub("mkdir ID PATH…", "Make directories and their parents", 2, -1, "a sandbox and paths", filesMkdirRun),
		sub("mv ID FROM TO", "Rename a file or directory", 3, 3, "a sandbox and two paths", filesMvRun),
		sub("stat ID PATH", "Describe a file", 2, 2, "a sandbox and a path", filesStatRun),
	)
}

func newCmdFilesX(f *factory, use, short string, least, most int, what string, run filesRun, runF func(context.Context, *filesOptions) error) *cobra.Command {
	o := &filesOptions{refOptions: refOptions{f: f}}
	var mode, limit string
	c := &cobra.Command{
		Use: use, Short: short, Args: wants(least, most, what), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			o.ref, o.paths = args[0], args[1:]
			if mode != "" {
				if o.mode, err = api.ParseMode(mode); err != nil {
					return err
				}
			}
			if limit != "" {
				if o.most, err = parseSize("--max-size", limit); err != nil {
					return err
				}
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			s, err := f.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer s.close()
			if err := o.absolute(cmd.Context(), s); err != nil {
				return err
			}
			return run(cmd.Context(), s, o)
		},
	}
	switch c.Name() {
	case "put":
		c.Flags().StringVar(&mode, "mode", "", "permission `bits` in octal (default 0644)")
	case "cat":
		c.Flags().StringVar(&limit, "max-size", maxOut, "most `bytes` that come out of a sandbox, with their unit")
	}
	return c
}

// absolute completes relative paths with the workspace.
func (o *filesOptions) absolute(ctx context.Context, s *session) (err error) {
	for i, p := range o.paths {
		if o.paths[i], err = inside(ctx, s, o.ref, p); err != nil {
			return err
		}
	}
	return nil
}

// inside is a path in a sandbox, relative ones counted from its workspace.
func inside(ctx context.Context, s *session, ref, p string) (string, error) {
	if path.IsAbs(p) {
		return path.Clean(p), nil
	}
	sb, err := s.Get(ctx, ref)
	if err != nil {
		return "", err
	}
	base := sb.Workspace
	if base == "" {
		base = sb.Reachability.RemoteDir
	}
	if base == "" {
		return "", invalid("%q is relative, and sandbox %s names no workspace", p, sb.ID).WithHint("write the path from the root: /%s", p)
	}
	return path.Join(base, p), nil
}

func fileView() view[*api.FileInfo] {
	owner := func(x *api.FileInfo) string {
		if x.Group == "" {
			return x.Owner
		}
		return x.Owner + ":" + x.Group
	}
	name := func(x *api.FileInfo) string {
		if x.Target != "" {
			return path.Base(x.Path) + " -> " + x.Target
		}
		return path.Base(x.Path)
	}
	return view[*api.FileInfo]{
		cols: []string{"MODE", "OWNER", "SIZE", "MODIFIED", "NAME"},
		row: func(x *api.FileInfo) []string {
			return []string{x.FileMode().String(), owner(x), fmt.Sprint(x.Size), x.ModTime.Local().Format("2006-01-02 15:04:05"), name(x)}
		},
		name: func(x *api.FileInfo) string { return x.Path },
		detail: func(x *api.FileInfo) [][2]string {
			return [][2]string{{"path", x.Path}, {"type", x.Type}, {"size", fmt.Sprintf("%d (%s)", x.Size, size(x.Size))}, {"mode", x.Mode},
				{"owner", owner(x)}, {"modified", x.ModTime.Local().Format(time.RFC3339)}, {"target", x.Target}}
		},
	}
}

func filesLsRun(ctx context.Context, s *session, o *filesOptions) error {
	if len(o.paths) == 0 {
		p, err := inside(ctx, s, o.ref, ".")
		if err != nil {
			return err
		}
		o.paths = []string{p}
	}
	l := &api.List[*api.FileInfo]{SchemaVersion: api.SchemaVersion, Items: []*api.FileInfo{}}
	for fi, err := range s.ListFiles(ctx, o.ref, o.paths[0]) {
		if err != nil {
			return err
		}
		l.Items = append(l.Items, &fi)
	}
	return printList(o.f, l, fileView())
}

// maxOut is how much comes out of a sandbox, whose word is a stranger's, unless somebody
// says otherwise.
const maxOut = "64GiB"

// pour writes a file of a sandbox as it is, and returns how long it was. One of more than most bytes is
// cut off there.
func pour(ctx context.Context, s *session, w io.Writer, ref, p string, most int64) (int64, error) {
	r, err := s.ReadFile(ctx, ref, p)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(w, io.LimitReader(r, most))
	if err == nil && n == most {
		var more [1]byte
		var k int
		for k == 0 && err == nil {
			k, err = r.Read(more[:])
		}
		if k > 0 {
			r.Close()
			return n, sandboxer.E(sandboxer.Exhausted, nil, "%s:%s is cut off: what comes out takes more than --max-size", ref, p).
				WithHint("raise --max-size, if you trust it")
		}
		if err == io.EOF {
			err = nil
		}
	}
	if cerr := r.Close(); err == nil { // a reader that failed says so again
		err = cerr
	}
	return n, err
}

func filesCatRun(ctx context.Context, s *session, o *filesOptions) error {
	left := o.most
	for _, p := range o.paths {
		n, err := pour(ctx, s, o.f.io.stdout, o.ref, p, left)
		if err != nil {
			return err
		}
		left -= n
	}
	return nil
}

func filesPutRun(ctx context.Context, s *session, o *filesOptions) error {
	return s.WriteFile(ctx, o.ref, o.paths[0], o.mode, o.f.io.in)
}

func filesRmRun(ctx context.Context, s *session, o *filesOptions) error {
	for _, p := range o.paths {
		if err := s.RemoveFile(ctx, o.ref, p); err != nil {
			return err
		}
	}
	return nil
}

func filesMkdirRun(ctx context.Context, s *session, o *filesOptions) error {
	for _, p := range o.paths {
		if err := s.MakeDir(ctx, o.ref, p); err != nil {
			return err
		}
	}
	return nil
}

func filesMvRun(ctx context.Context, s *session, o *filesOptions) error {
	return s.MoveFile(ctx, o.ref, o.paths[0], o.paths[1])
}

func filesStatRun(ctx context.Context, s *session, o *filesOptions) error {
	fi, err := s.StatFile(ctx, o.ref, o.paths[0])
	if err != nil {
		return err
	}
	return printOne(o.f, fi, fileView())
}

type cpOptions struct {
	f        *factory
	src, dst place
	bounds   cpBounds
}

// cpBounds is what a sandbox may bring out by cp: its word is a stranger's.
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

func newCmdCp(f *factory, runF func(context.Context, *cpOptions) error) *cobra.Command {
	o := &cpOptions{f: f}
	var size, idle string
	c := &cobra.Command{
		Use: "cp SRC DST", Short: "Copy files and directories into or out of a sandbox",
		Long: "Copy a file or a directory between this machine and a sandbox, written ID:PATH; - is stdin or stdout. Relative\n" +
			"paths in a sandbox count from its workspace. A DST that is a directory, or ends in /, gets the copy put into it.\n" +
			"Write ./a:b for a local name with a colon. Directories are copied with the tar of the sandbox.\n\n" +
			"What comes out of a sandbox has bounds: --max-size, --max-files, and --max-idle without a byte. Beyond them, and when a\n" +
			"copy breaks off, a DST that was not there is not there afterwards; one that was is named as incomplete.",
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
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return cpRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&size, "max-size", maxOut, "most `bytes` that come out of a sandbox, with their unit")
	c.Flags().IntVar(&o.bounds.files, "max-files", 1_000_000, "most files, directories and links that come out of a sandbox")
	c.Flags().StringVar(&idle, "max-idle", "5m", "end a copy out of a sandbox after this `duration` without a byte")
	return c
}

// watched gives a copy an end: it is cancelled when nothing was seen for so long.
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

// reason is why ctx ended, where that was for a reason of ours, and otherwise err.
func reason(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && sandboxer.KindOf(cause) == sandboxer.Timeout {
		return cause
	}
	return err
}

// A seeing calls seen for whatever passes.
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
	fi, err := s.StatFile(ctx, ref, dst)
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
			return invalid("stdin has no name to be put into the directory %s with", dst).WithHint("write the name of the file: %s:%s", ref, path.Join(dst, "NAME"))
		}
		return s.WriteFile(ctx, ref, dst, 0, o.f.io.in)
	}
	st, err := os.Stat(o.src.path)
	if err != nil {
		return sandboxer.E(sandboxer.NotFound, err, "%s cannot be read", o.src.path)
	}
	if into {
		abs, err := filepath.Abs(o.src.path)
		if err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "%s cannot be made absolute", o.src.path)
		}
		// As with cp -r: "dir/." means what is in it.
		if base := filepath.Base(o.src.path); !st.IsDir() || base != "." {
			dst = path.Join(dst, filepath.Base(abs))
		}
	}
	if !st.IsDir() {
		if !st.Mode().IsRegular() {
			return invalid("%s is neither a file nor a directory", o.src.path)
		}
		f, err := os.Open(o.src.path)
		if err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "%s cannot be read", o.src.path)
		}
		defer f.Close()
		return s.WriteFile(ctx, ref, dst, st.Mode().Perm(), f)
	}
	if err := s.MakeDir(ctx, ref, dst); err != nil {
		return err
	}
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := agent.Tar(w, o.src.path)
		w.CloseWithError(err)
		packed <- err
	}()
	var complaint tail
	exit, err := s.Exec(ctx, ref, sandboxer.Cmd{Args: []string{"tar", "-x", "-f", "-", "-C", dst}, Dir: "/", Stdin: r, Stderr: &complaint})
	r.Close()
	perr := <-packed
	switch {
	case exit.Code == sandboxer.ExitNotFound:
		return noTar(ref)
	case perr != nil && !errors.Is(perr, io.ErrClosedPipe):
		return sandboxer.E(sandboxer.KindOf(perr), perr, "%s cannot be packed: %v", o.src.path, perr)
	case err != nil:
		return err
	case exit.Code != 0:
		return sandboxer.E(sandboxer.Failed, nil, "tar in sandbox %s ended with %d: %s", ref, exit.Code, complaint.text())
	}
	return nil
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
	fi, err := s.StatFile(ctx, ref, src)
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
		return copyFileOut(ctx, s, ref, src, dst, fi.FileMode().Perm(), o.bounds)
	}
	if _, err := os.Lstat(dst); err == nil {
		err := copyTreeOut(ctx, s, ref, src, dst, o.bounds)
		var e *sandboxer.Error
		if errors.As(err, &e) {
			more := *e
			more.Msg += "; what is in " + dst + " is incomplete"
			return &more
		}
		return err
	}
	// What breaks off must not look like a whole copy.
	if err := os.MkdirAll(filepath.Dir(filepath.Clean(dst)), 0o777); err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "%s cannot be made", filepath.Dir(dst))
	}
	tmp, err := os.MkdirTemp(filepath.Dir(filepath.Clean(dst)), ".sandboxer-*")
	if err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "%s cannot be written", dst)
	}
	defer removeTree(tmp)
	tree := filepath.Join(tmp, "tree") // with the mode that the system gives, not this one's
	if err := copyTreeOut(ctx, s, ref, src, tree, o.bounds); err != nil {
		return err
	}
	if err := os.Rename(tree, dst); err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "%s cannot be written", dst)
	}
	return nil
}

// removeTree removes what was copied, also directories that nobody may write to.
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

// copyTreeOut unpacks what the sandbox's tar says of a directory.
func copyTreeOut(ctx context.Context, s *session, ref, src, dst string, bounds cpBounds) error {
	ctx, seen, stop := watched(ctx, ref, bounds.idle)
	defer stop()
	r, w := io.Pipe()
	unpacked := make(chan error, 1)
	go func() {
		err := agent.Untar(r, dst, agent.UntarOptions{Replace: true, Limits: agent.TarLimits{Entries: bounds.files, Bytes: bounds.size}})
		if err == nil {
			var n int64
			if n, err = io.Copy(io.Discard, io.LimitReader(r, mostPadding+1)); err == nil && n > mostPadding {
				err = sandboxer.E(sandboxer.Invalid, nil, "what follows the archive of sandbox %s does not end", ref)
			}
		}
		r.CloseWithError(err)
		unpacked <- err
	}()
	var complaint tail
	exit, err := s.Exec(ctx, ref, sandboxer.Cmd{Args: []string{"tar", "-c", "-f", "-", "-C", src, "."}, Dir: "/", Stdout: seeing{w: w, seen: seen}, Stderr: &complaint})
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
		return uerr
	case exit.Code != 0:
		return sandboxer.E(sandboxer.Failed, nil, "tar in sandbox %s ended with %d: %s", ref, exit.Code, complaint.text())
	case uerr != nil:
		return uerr
	}
	return err
}

// copyFileOut replaces dst by the file when all of it is there.
func copyFileOut(ctx context.Context, s *session, ref, src, dst string, mode fs.FileMode, bounds cpBounds) (err error) {
	ctx, seen, stop := watched(ctx, ref, bounds.idle)
	defer stop()
	defer func() { err = reason(ctx, err) }()
	r, err := s.ReadFile(ctx, ref, src)
	if err != nil {
		return err
	}
	defer r.Close()
	if err := os.MkdirAll(filepath.Dir(dst), 0o777); err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "%s cannot be made", filepath.Dir(dst))
	}
	tmp, err := os.CreateTemp(filepath.Dir(dst), ".sandboxer-*")
	if err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "%s cannot be written", dst)
	}
	defer os.Remove(tmp.Name())
	n, err := io.Copy(tmp, io.LimitReader(seeing{r: r, seen: seen}, bounds.size+1))
	if err == nil && n > bounds.size {
		return sandboxer.E(sandboxer.Exhausted, nil, "%s:%s is not copied: it takes more than %s", ref, src, size(bounds.size)).WithHint("raise --max-size, if you trust it")
	}
	if err = errors.Join(err, tmp.Chmod(mode), tmp.Close()); err != nil {
		if sandboxer.KindOf(err) == sandboxer.Internal {
			err = sandboxer.E(sandboxer.Invalid, err, "%s cannot be written", dst)
		}
		return err
	}
	if err := os.Rename(tmp.Name(), dst); err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "%s cannot be written", dst)
	}
	return nil
}

// tail keeps the beginning of what a helper in the sandbox complains about.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p[:min(len(p), max(0, 2000-len(t.b)))]...)
	return len(p), nil
}

func (t *tail) text() string { return strings.TrimSpace(string(t.b)) }
