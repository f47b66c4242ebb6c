package extensiontest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// owned: the user of a sandbox works in its workspace, and owns what the broker puts
// there.
func (s *suite) owned(t *testing.T) {
	if !s.enforces(Owned) {
		t.Skip("the workspace is not made for the sandbox's user")
	}
	b := s.opened
	if !b.Can(sandboxer.CanExec) {
		t.Skip("cannot look inside: the extension has no exec")
	}
	sp := s.spec()
	sp.User = s.User
	sb := s.upSpec(t, b, sp)
	root := sb.dir(t)
	if got, want := sb.sh(t, "id -u"), sb.sh(t, `id -u "$1"`, s.User); got != want {
		t.Errorf("commands run as %s; want %s", got, want)
	}
	sb.sh(t, `mkdir made && : >made/file && rm -r made`)
	if err := b.WriteFile(ctx(t), sb.h, root+"/put/there", 0o600, strings.NewReader("brought\n")); err != nil {
		t.Fatal(describe(err))
	}
	if err := b.MakeDir(ctx(t), sb.h, root+"/new/dir"); err != nil {
		t.Fatal(describe(err))
	}
	if got := sb.sh(t, `cat put/there && echo more >>put/there && cat put/there && : >new/dir/file && : >put/next`); got != "brought\nbrought\nmore" {
		t.Errorf("the user reads %q", got)
	}
	var packed bytes.Buffer
	if err := b.Archive(ctx(t), sb.h, root+"/put", &packed); err != nil {
		t.Fatal(describe(err))
	}
	if err := b.Unarchive(ctx(t), sb.h, root+"/copied", &packed); err != nil {
		t.Fatal(describe(err))
	}
	sb.sh(t, `echo more >>copied/there && : >copied/next`)
}

func (s *suite) files(t *testing.T) {
	s.test(t, "user of the sandbox", s.owned)
	sb := s.up(t)
	root := sb.dir(t)
	inside := sb.b.Can(sandboxer.CanExec)
	var made atomic.Int32
	// dir makes a fresh directory for one behaviour.
	dir := func(t *testing.T) string {
		t.Helper()
		n := made.Add(1)
		d := path.Join(root, "files", string('a'+n/26)+string('a'+n%26))
		if err := sb.b.MakeDir(ctx(t), sb.h, d); err != nil {
			t.Fatalf("MakeDir(%s): %s", d, describe(err))
		}
		return d
	}
	write := func(t *testing.T, name, content string) {
		t.Helper()
		if err := sb.b.WriteFile(ctx(t), sb.h, name, 0o644, strings.NewReader(content)); err != nil {
			t.Fatalf("WriteFile(%q): %s", name, describe(err))
		}
	}
	read := func(t *testing.T, name string) string {
		t.Helper()
		r, err := sb.b.ReadFile(ctx(t), sb.h, name)
		if err != nil {
			t.Fatalf("ReadFile(%q): %s", name, describe(err))
		}
		defer r.Close()
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatalf("reading %q: %s", name, describe(err))
		}
		return string(b)
	}
	list := func(t *testing.T, d string) (names []string) {
		t.Helper()
		for fi, err := range sb.b.ListFiles(ctx(t), sb.h, d, "") {
			if err != nil {
				t.Fatalf("ListFiles(%q): %s", d, describe(err))
			}
			if path.Dir(fi.Path) != d {
				t.Errorf("ListFiles(%q) yields the path %q", d, fi.Path)
			}
			names = append(names, path.Base(fi.Path))
		}
		return names
	}
	missing := func(t *testing.T, name string) {
		t.Helper()
		fi, err := sb.b.StatFile(ctx(t), sb.h, name)
		if sandboxer.KindOf(err) != sandboxer.NotFound {
			t.Errorf("StatFile(%q) = %+v, %s; want not_found", name, fi, describe(err))
		}
	}

	s.test(t, "round trip", func(t *testing.T) {
		for name, content := range map[string]string{
			"empty": "", "text": "hello\n", "no newline": "x", "binary": string(noise(100_000)), "zeros": strings.Repeat("\x00", 5000),
		} {
			f := dir(t) + "/f"
			write(t, f, content)
			if got := read(t, f); got != content {
				t.Errorf("%s: wrote %d bytes, read %d others", name, len(content), len(got))
			}
		}
	})

	s.test(t, "5 MiB", func(t *testing.T) {
		data := noise(5 << 20)
		f := dir(t) + "/big"
		if err := sb.b.WriteFile(ctx(t), sb.h, f, 0o600, bytes.NewReader(data)); err != nil {
			t.Fatal(describe(err))
		}
		if got := read(t, f); got != string(data) {
			t.Errorf("wrote %d bytes, read %d others", len(data), len(got))
		}
		if fi, err := sb.b.StatFile(ctx(t), sb.h, f); err != nil || fi.Size != 5<<20 {
			t.Errorf("StatFile = %+v, %v", fi, err)
		}
	})

	s.test(t, "seen by commands", func(t *testing.T) {
		if !inside {
			t.Skip("cannot look inside: the extension has no exec")
		}
		d := dir(t)
		write(t, d+"/in", "from outside\n")
		if got := sb.sh(t, `cat "$1"`, d+"/in"); got != "from outside" {
			t.Errorf("cat inside: %q", got)
		}
		sb.sh(t, `echo from inside >"$1"`, d+"/out")
		if got := read(t, d+"/out"); got != "from inside\n" {
			t.Errorf("ReadFile: %q", got)
		}
	})

	s.test(t, "replace", func(t *testing.T) {
		f := dir(t) + "/f"
		write(t, f, "a long first content")
		write(t, f, "short")
		if got := read(t, f); got != "short" {
			t.Errorf("read %q", got)
		}
	})

	s.test(t, "modes", func(t *testing.T) {
		d := dir(t)
		for _, mode := range []fs.FileMode{0o600, 0o644, 0o755, 0o777, 0o400} {
			f := d + "/" + mode.String()
			if err := sb.b.WriteFile(ctx(t), sb.h, f, mode, strings.NewReader("x")); err != nil {
				t.Fatalf("WriteFile(%s): %s", mode, describe(err))
			}
			if fi, err := sb.b.StatFile(ctx(t), sb.h, f); err != nil || fi.Mode != mode {
				t.Errorf("wrote with %s; StatFile = %s, %v", mode, fi.Mode, err)
			}
		}
		f := d + "/changed"
		write(t, f, "x")
		if err := sb.b.WriteFile(ctx(t), sb.h, f, 0o700, strings.NewReader("y")); err != nil {
			t.Fatal(describe(err))
		}
		if fi, err := sb.b.StatFile(ctx(t), sb.h, f); err != nil || fi.Mode != 0o700 {
			t.Errorf("replaced with 0700; StatFile = %s, %v", fi.Mode, err)
		}
	})

	s.test(t, "write makes parents", func(t *testing.T) {
		f := dir(t) + "/p/q/r/f"
		write(t, f, "deep")
		if got := read(t, f); got != "deep" {
			t.Errorf("read %q", got)
		}
	})

	// left waits until d holds these names and no incomplete file.
	left := func(t *testing.T, d string, want ...string) {
		t.Helper()
		var got []string
		poll(t, fmt.Sprintf("%s to hold %q", d, want), s.Patience, func() bool {
			got = list(t, d)
			return slices.Equal(got, want)
		})
		if !slices.Equal(got, want) {
			t.Errorf("%s holds %q", d, got)
		}
	}
	// cut is an upload that ends in its middle.
	cut := func(t *testing.T, name string) {
		t.Helper()
		r := io.MultiReader(bytes.NewReader(noise(100_000)), iotest.ErrReader(errors.New("the upload broke off")))
		if err := sb.b.WriteFile(ctx(t), sb.h, name, 0o644, r); err == nil {
			t.Error("WriteFile succeeded although its source failed midway")
		}
	}

	s.test(t, "a broken source changes nothing", func(t *testing.T) {
		d := dir(t)
		write(t, d+"/f", "what was there")
		cut(t, d+"/f")
		if got := read(t, d+"/f"); got != "what was there" {
			t.Errorf("a cut upload left %d bytes of %q", len(got), got[:min(len(got), 20)])
		}
		cut(t, d+"/new")
		missing(t, d+"/new")
		left(t, d, "f")
	})

	s.test(t, "a file that is replaced keeps what it is", func(t *testing.T) {
		if !inside {
			t.Skip("cannot look inside: the extension has no exec")
		}
		d := dir(t)
		owner := sb.sh(t, `cd "$1" && echo old >f && chmod 0750 f && if [ "$(id -u)" = 0 ]; then chown 7:8 f; fi; stat -c %u:%g f`, d)
		put := func(mode fs.FileMode, content string) {
			t.Helper()
			if err := sb.b.WriteFile(ctx(t), sb.h, d+"/f", mode, strings.NewReader(content)); err != nil {
				t.Fatal(describe(err))
			}
			if got := read(t, d+"/f"); got != content {
				t.Errorf("read %q; want %q", got, content)
			}
		}
		put(0, "the mode is kept")
		if got := sb.sh(t, `cd "$1" && stat -c '%a %u:%g' f`, d); got != "750 "+owner {
			t.Errorf("mode and owner are %s; want 750 %s", got, owner)
		}
		put(0o600, "the mode is given")
		if got := sb.sh(t, `cd "$1" && stat -c '%a %u:%g' f`, d); got != "600 "+owner {
			t.Errorf("mode and owner are %s; want 600 %s", got, owner)
		}
		if err := sb.b.WriteFile(ctx(t), sb.h, d+"/new", 0, strings.NewReader("x")); err != nil {
			t.Fatal(describe(err))
		}
		if fi, err := sb.b.StatFile(ctx(t), sb.h, d+"/new"); err != nil || fi.Mode != 0o644 {
			t.Errorf("a new file without a mode has %s, %v; want 0644", fi.Mode, err)
		}
		left(t, d, "f", "new")
	})

	s.test(t, "names of one file stay names of one file", func(t *testing.T) {
		if !inside {
			t.Skip("cannot make them: the extension has no exec")
		}
		d := dir(t)
		sb.sh(t, `cd "$1" && mkdir in && echo old >in/f && ln in/f hard && ln -s in/f link && ln -s in/made dangling`, d)
		for _, name := range []string{"in/f", "hard", "link"} {
			write(t, d+"/"+name, "through "+name)
			for _, other := range []string{"in/f", "hard", "link"} {
				if got := read(t, d+"/"+other); got != "through "+name {
					t.Errorf("%s was written; %s holds %q", name, other, got)
				}
			}
		}
		cut(t, d+"/hard")
		if got := read(t, d+"/in/f"); got != "through link" {
			t.Errorf("a cut upload left %d bytes", len(got))
		}
		write(t, d+"/dangling", "made")
		if got := read(t, d+"/in/made"); got != "made" {
			t.Errorf("through a link to nothing: %q", got)
		}
		left(t, d, "dangling", "hard", "in", "link")
		left(t, d+"/in", "f", "made")
	})

	s.test(t, "a silent source does not hold a call that is over", func(t *testing.T) {
		silence(t, func(ctx context.Context, r io.Reader) error {
			return sb.b.WriteFile(ctx, sb.h, dir(t)+"/f", 0o644, r)
		}, noise(100_000))
	})

	s.test(t, "stat", func(t *testing.T) {
		d := dir(t)
		write(t, d+"/f", "12345")
		fi, err := sb.b.StatFile(ctx(t), sb.h, d+"/f")
		if err != nil {
			t.Fatal(describe(err))
		}
		if fi.Path != d+"/f" || fi.Size != 5 || !fi.Mode.IsRegular() || fi.Target != "" {
			t.Errorf("a file: %+v", fi)
		}
		if age := time.Since(fi.ModTime); age < -time.Minute || age > time.Minute {
			t.Errorf("modified %s ago", age)
		}
		fi, err = sb.b.StatFile(ctx(t), sb.h, d)
		if err != nil || fi.Path != d || !fi.Mode.IsDir() {
			t.Errorf("a directory: %+v, %v", fi, err)
		}
		fi, err = sb.b.StatFile(ctx(t), sb.h, "/")
		if err != nil || fi.Path != "/" || !fi.Mode.IsDir() {
			t.Errorf("the root: %+v, %v", fi, err)
		}
	})

	s.test(t, "owner", func(t *testing.T) {
		if !inside {
			t.Skip("cannot look inside: the extension has no exec")
		}
		d := dir(t)
		sb.sh(t, `echo x >"$1"`, d+"/f")
		want := sb.sh(t, `stat -c '%U %G' "$1"`, d+"/f")
		if fi, err := sb.b.StatFile(ctx(t), sb.h, d+"/f"); err != nil || fi.Owner != "" && fi.Owner+" "+fi.Group != want {
			t.Errorf("owner and group %q %q, %v; want %q", fi.Owner, fi.Group, err, want)
		}
	})

	s.test(t, "links are described, not followed", func(t *testing.T) {
		if !inside {
			t.Skip("cannot make a link: the extension has no exec")
		}
		d := dir(t)
		write(t, d+"/f", "12345")
		sb.sh(t, `cd "$1" && ln -s f link && ln -s no/where dangling && ln -s . dirlink && ln -s "odd
target" odd`, d)
		for name, target := range map[string]string{"link": "f", "dangling": "no/where", "dirlink": ".", "odd": "odd\ntarget"} {
			fi, err := sb.b.StatFile(ctx(t), sb.h, d+"/"+name)
			if err != nil || fi.Mode.Type() != fs.ModeSymlink || fi.Target != target {
				t.Errorf("StatFile(%s) = %+v, %v; want a link to %q", name, fi, err, target)
			}
		}
		for fi, err := range sb.b.ListFiles(ctx(t), sb.h, d, "") {
			if err != nil {
				t.Fatal(describe(err))
			}
			if path.Base(fi.Path) == "odd" && (fi.Mode.Type() != fs.ModeSymlink || fi.Target != "odd\ntarget") {
				t.Errorf("ListFiles says of the link: %+v", fi)
			}
		}
		if got := read(t, d+"/link"); got != "12345" {
			t.Errorf("ReadFile through the link: %q", got)
		}
		if err := sb.b.RemoveFile(ctx(t), sb.h, d+"/link"); err != nil {
			t.Error(describe(err))
		}
		missing(t, d+"/link")
		if got := read(t, d+"/f"); got != "12345" {
			t.Errorf("removing the link changed its target: %q", got)
		}
	})

	s.test(t, "list in order", func(t *testing.T) {
		d := dir(t)
		want := []string{".hidden", "B", "a", "b", "c10", "c9", "dir"}
		for _, name := range []string{"b", "c9", "a", ".hidden", "c10", "B"} {
			write(t, d+"/"+name, "x")
		}
		write(t, d+"/dir/below", "not listed")
		if got := list(t, d); !slices.Equal(got, want) {
			t.Errorf("ListFiles = %q; want %q", got, want)
		}
		if got := list(t, "/"); len(got) == 0 || !slices.IsSorted(got) {
			t.Errorf("the root lists %q", got)
		}
		if got := list(t, dir(t)); len(got) != 0 {
			t.Errorf("an empty directory lists %q", got)
		}
	})

	s.test(t, "list can be broken off", func(t *testing.T) {
		d := dir(t)
		for _, name := range []string{"a", "b", "c"} {
			write(t, d+"/"+name, "x")
		}
		for fi, err := range sb.b.ListFiles(ctx(t), sb.h, d, "") {
			if err != nil || path.Base(fi.Path) != "a" {
				t.Errorf("first: %+v, %v", fi, err)
			}
			break
		}
	})

	s.test(t, "list from a name", func(t *testing.T) {
		d := dir(t)
		for _, name := range []string{"a", "b", "b1", "c", "\xff"} {
			write(t, d+"/"+name, "x")
		}
		for after, want := range map[string]string{"a": "b b1 c \xff", "b0": "b1 c \xff", "c": "\xff", "\xff": "", "zz": "\xff"} {
			var got []string
			for fi, err := range sb.b.ListFiles(ctx(t), sb.h, d, after) {
				if err != nil {
					t.Fatalf("ListFiles after %q: %s", after, describe(err))
				}
				got = append(got, path.Base(fi.Path))
			}
			if strings.Join(got, " ") != want {
				t.Errorf("ListFiles after %q = %q; want %q", after, got, want)
			}
		}
	})

	s.test(t, "links to names that are not UTF-8", func(t *testing.T) {
		if !inside {
			t.Skip("cannot make them: the extension has no exec")
		}
		d := dir(t)
		sb.sh(t, `cd "$1" && ln -s "$(printf 'x\377%%41')" l`, d)
		if fi, err := sb.b.StatFile(ctx(t), sb.h, d+"/l"); err != nil || fi.Target != "x\xff%41" {
			t.Errorf("StatFile = %+q, %v", fi.Target, err)
		}
		for fi, err := range sb.b.ListFiles(ctx(t), sb.h, d, "") {
			if err != nil || fi.Target != "x\xff%41" {
				t.Errorf("ListFiles = %+q, %v", fi.Target, err)
			}
		}
	})

	// The right to read files gives no access to environments or memory of processes.
	s.test(t, "nothing of the kernel's", func(t *testing.T) {
		if !inside {
			t.Skip("cannot make links: the extension has no exec")
		}
		d := dir(t)
		sb.sh(t, `cd "$1" && ln -s /proc/self/environ file && ln -s /proc/self dir && ln -s ../../../../../../proc up`, d)
		for _, name := range []string{"/proc/self/environ", "/proc/1/cmdline", "/proc/meminfo", "/sys/kernel/notes", d + "/file", d + "/dir/environ", d + "/up/version"} {
			r, err := sb.b.ReadFile(ctx(t), sb.h, name)
			if err == nil {
				r.Close()
			}
			if k := sandboxer.KindOf(err); k != sandboxer.Denied && k != sandboxer.NotFound && k != sandboxer.Invalid {
				t.Errorf("ReadFile(%q): %s", name, describe(err))
			}
		}
		for _, name := range []string{"/proc/self", "/proc", d + "/dir", d + "/up"} {
			for fi, err := range sb.b.ListFiles(ctx(t), sb.h, name, "") {
				if k := sandboxer.KindOf(err); k != sandboxer.Denied && k != sandboxer.NotFound && k != sandboxer.Invalid {
					t.Errorf("ListFiles(%q) = %+v, %s", name, fi, describe(err))
				}
				break
			}
		}
		if _, err := sb.b.StatFile(ctx(t), sb.h, "/proc/self/cwd"); sandboxer.KindOf(err) != sandboxer.Denied && sandboxer.KindOf(err) != sandboxer.NotFound {
			t.Errorf("StatFile: %s", describe(err))
		}
		if fi, err := sb.b.StatFile(ctx(t), sb.h, d+"/file"); err != nil || fi.Target != "/proc/self/environ" {
			t.Errorf("StatFile of a link = %+v, %s", fi, describe(err))
		}
	})

	s.test(t, "many files", func(t *testing.T) {
		if !inside {
			t.Skip("cannot make them quickly: the extension has no exec")
		}
		d := dir(t)
		sb.sh(t, `cd "$1" && i=1000; while [ $i -lt 3000 ]; do : >"file-with-a-longer-name-$i"; i=$((i+1)); done`, d)
		if got := list(t, d); len(got) != 2000 || !slices.IsSorted(got) {
			t.Errorf("listed %d files, sorted: %t; want 2000", len(got), slices.IsSorted(got))
		}
	})

	s.test(t, "odd names", func(t *testing.T) {
		d := dir(t)
		names := []string{" lead", "-n", "a b", "new\nline", "quote'\"", "star*?[x]", "tail ", "back\\slash", "$HOME", "ünï", "日本", "%s", "#x", "~", "\xff", "a\xfe%FE", "%FF", "cut\xe6\x97"}
		for _, name := range names {
			write(t, d+"/"+name, "content of "+name)
		}
		slices.Sort(names)
		if got := list(t, d); !slices.Equal(got, names) {
			t.Errorf("ListFiles = %q; want %q", got, names)
		}
		for _, name := range names {
			f := d + "/" + name
			if got := read(t, f); got != "content of "+name {
				t.Errorf("ReadFile(%q) = %q", name, got)
			}
			if fi, err := sb.b.StatFile(ctx(t), sb.h, f); err != nil || fi.Path != f {
				t.Errorf("StatFile(%q) = %+v, %v", name, fi, err)
			}
			if err := sb.b.MoveFile(ctx(t), sb.h, f, f+" moved"); err != nil {
				t.Errorf("MoveFile(%q): %s", name, describe(err))
			}
			if err := sb.b.RemoveFile(ctx(t), sb.h, f+" moved"); err != nil {
				t.Errorf("RemoveFile(%q): %s", name, describe(err))
			}
		}
		if got := list(t, d); len(got) != 0 {
			t.Errorf("left over: %q", got)
		}
		odd := d + "/dir\nwith 'odd' name"
		write(t, odd+"/f\n", "x")
		if got := list(t, odd); !slices.Equal(got, []string{"f\n"}) {
			t.Errorf("below %q: %q", odd, got)
		}
	})

	s.test(t, "missing", func(t *testing.T) {
		d := dir(t)
		write(t, d+"/file", "x")
		missing(t, d+"/none")
		missing(t, d+"/none/none")
		_, err := sb.b.ReadFile(ctx(t), sb.h, d+"/none")
		wantKind(t, err, "ReadFile", sandboxer.NotFound)
		_, err = sb.b.ReadFile(ctx(t), sb.h, d+"/file/below")
		wantKind(t, err, "ReadFile below a file", sandboxer.NotFound, sandboxer.Invalid)
		for _, err := range sb.b.ListFiles(ctx(t), sb.h, d+"/none", "") {
			wantKind(t, err, "ListFiles", sandboxer.NotFound)
		}
		wantKind(t, sb.b.MoveFile(ctx(t), sb.h, d+"/none", d+"/other"), "MoveFile", sandboxer.NotFound)
	})

	s.test(t, "directory and file are not the same", func(t *testing.T) {
		d := dir(t)
		write(t, d+"/file", "x")
		write(t, d+"/dir/f", "x")
		_, err := sb.b.ReadFile(ctx(t), sb.h, d+"/dir")
		wantKind(t, err, "ReadFile of a directory", sandboxer.Invalid)
		err = sb.b.WriteFile(ctx(t), sb.h, d+"/dir", 0o644, strings.NewReader("x"))
		wantKind(t, err, "WriteFile onto a directory", sandboxer.Invalid)
		err = sb.b.WriteFile(ctx(t), sb.h, d+"/file/f", 0o644, strings.NewReader("x"))
		wantKind(t, err, "WriteFile below a file", sandboxer.Invalid)
		wantKind(t, sb.b.MakeDir(ctx(t), sb.h, d+"/file"), "MakeDir over a file", sandboxer.Invalid)
		wantKind(t, sb.b.MakeDir(ctx(t), sb.h, d+"/file/sub"), "MakeDir below a file", sandboxer.Invalid)
		wantKind(t, sb.b.MoveFile(ctx(t), sb.h, d+"/file", d+"/dir"), "MoveFile of a file onto a directory", sandboxer.Invalid)
		seen := 0
		for _, err := range sb.b.ListFiles(ctx(t), sb.h, d+"/file", "") {
			wantKind(t, err, "ListFiles of a file", sandboxer.Invalid)
			seen++
		}
		if seen != 1 {
			t.Errorf("ListFiles of a file yields %d times; want one error", seen)
		}
		if got := read(t, d+"/file") + read(t, d+"/dir/f"); got != "xx" {
			t.Errorf("a refused operation changed something: %q", got)
		}
	})

	s.test(t, "make directories", func(t *testing.T) {
		d := dir(t)
		for range 2 {
			if err := sb.b.MakeDir(ctx(t), sb.h, d+"/a/b/c"); err != nil {
				t.Fatal(describe(err))
			}
		}
		if fi, err := sb.b.StatFile(ctx(t), sb.h, d+"/a/b/c"); err != nil || !fi.Mode.IsDir() {
			t.Errorf("StatFile = %+v, %v", fi, err)
		}
	})

	s.test(t, "move", func(t *testing.T) {
		d := dir(t)
		write(t, d+"/f", "moved")
		write(t, d+"/old", "replaced")
		if err := sb.b.MoveFile(ctx(t), sb.h, d+"/f", d+"/old"); err != nil {
			t.Fatal(describe(err))
		}
		missing(t, d+"/f")
		if got := read(t, d+"/old"); got != "moved" {
			t.Errorf("the target says %q", got)
		}
		write(t, d+"/tree/sub/f", "x")
		if err := sb.b.MoveFile(ctx(t), sb.h, d+"/tree", d+"/tree2"); err != nil {
			t.Fatal(describe(err))
		}
		missing(t, d+"/tree")
		if got := read(t, d+"/tree2/sub/f"); got != "x" {
			t.Errorf("in the moved tree: %q", got)
		}
	})

	s.test(t, "remove", func(t *testing.T) {
		d := dir(t)
		write(t, d+"/tree/sub/f", "x")
		write(t, d+"/treetop", "stays")
		if err := sb.b.RemoveFile(ctx(t), sb.h, d+"/tree"); err != nil {
			t.Fatal(describe(err))
		}
		missing(t, d+"/tree")
		for _, absent := range []string{d + "/tree", d + "/never/was"} {
			if err := sb.b.RemoveFile(ctx(t), sb.h, absent); err != nil {
				t.Errorf("removing what is not there: %s", describe(err))
			}
		}
		if got := read(t, d+"/treetop"); got != "stays" {
			t.Errorf("its neighbour says %q", got)
		}
	})

	s.test(t, "names must be absolute and clean", func(t *testing.T) {
		for _, name := range []string{"", "f", "./f", root + "/../f", root + "//f", root + "/f/", root + "/a\x00b"} {
			_, err := sb.b.StatFile(ctx(t), sb.h, name)
			wantKind(t, err, "StatFile of "+name, sandboxer.Invalid)
		}
	})

	s.test(t, "reading can be broken off", func(t *testing.T) {
		f := dir(t) + "/big"
		if err := sb.b.WriteFile(ctx(t), sb.h, f, 0o644, bytes.NewReader(noise(5<<20))); err != nil {
			t.Fatal(describe(err))
		}
		r, err := sb.b.ReadFile(ctx(t), sb.h, f)
		if err != nil {
			t.Fatal(describe(err))
		}
		if _, err := io.ReadFull(r, make([]byte, 1000)); err != nil {
			t.Error(describe(err))
		}
		done := make(chan error, 1)
		go func() { done <- r.Close() }()
		select {
		case <-done:
		case <-time.After(30 * time.Second):
			t.Error("Close of a half-read file hangs")
		}
		c, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = sb.b.ReadFile(c, sb.h, f)
		wantKind(t, err, "ReadFile with a canceled context", sandboxer.Canceled)
	})

	s.test(t, "unknown sandbox", func(t *testing.T) {
		h := sandboxer.Handle{SandboxID: s.spec().ID, Generation: 1}
		f := root + "/f"
		_, err := sb.b.ReadFile(ctx(t), h, f)
		wantKind(t, err, "ReadFile", sandboxer.NotFound)
		wantKind(t, sb.b.WriteFile(ctx(t), h, f, 0o644, strings.NewReader("x")), "WriteFile", sandboxer.NotFound)
		_, err = sb.b.StatFile(ctx(t), h, f)
		wantKind(t, err, "StatFile", sandboxer.NotFound)
		for _, err := range sb.b.ListFiles(ctx(t), h, root, "") {
			wantKind(t, err, "ListFiles", sandboxer.NotFound)
		}
		wantKind(t, sb.b.MakeDir(ctx(t), h, f), "MakeDir", sandboxer.NotFound)
		wantKind(t, sb.b.MoveFile(ctx(t), h, f, f+"2"), "MoveFile", sandboxer.NotFound)
		wantKind(t, sb.b.RemoveFile(ctx(t), h, f), "RemoveFile", sandboxer.NotFound)
	})
}

// silence cancels a call that reads r while r is silent.
func silence(t *testing.T, call func(ctx context.Context, r io.Reader) error, beginning []byte) {
	t.Helper()
	r, w := io.Pipe()
	defer w.Close()
	c, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		_, _ = w.Write(beginning)
		cancel()
	}()
	done := make(chan error, 1)
	go func() { done <- call(c, r) }()
	select {
	case err := <-done:
		wantKind(t, err, "a call that is canceled while its source is silent", sandboxer.Canceled)
	case <-time.After(time.Minute):
		t.Error("a call that is canceled goes on for as long as its source is silent")
	}
}
