package cli

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"path"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// filesOptions are the options of the commands below files.
type filesOptions struct {
	refOptions
	paths []string
	mode  fs.FileMode
	most  int64 // bytes that come out
}

type filesRun = func(context.Context, *session, *filesOptions) error

func newCmdFiles(f *factory) *cobra.Command {
	sub := func(use, short string, least, most int, what string, run filesRun) *cobra.Command {
		return newCmdFilesX(f, use, short, least, most, what, run)
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

func newCmdFilesX(f *factory, use, short string, least, most int, what string, run filesRun) *cobra.Command {
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
		c.Flags().StringVar(&mode, "mode", "", "`MODE` in octal (default: that of the existing file, else 0644)")
	case "cat":
		c.Flags().StringVar(&limit, "max-size", maxOut, "maximum to copy out of a sandbox, a `SIZE` with its unit")
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

// maxOut bounds how much comes out of a sandbox, which is not trusted, unless the user
// sets another bound.
const maxOut = "64GiB"

// pour writes a file of a sandbox unchanged, and returns its length. One of more than most bytes is
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
			return n, sandboxer.E(sandboxer.Exhausted, nil, "%s:%s is cut off: its content exceeds --max-size", ref, p).
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
