package extensiontest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"path"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// fill makes a tree in $1 with what archives get wrong: modes, links, empty files and directories,
// odd names, depth.
const fill = `
mkdir -p "$1" && cd "$1" || exit
mkdir -p empty deep/er/and/deeper 'a dir'
: >nothing
echo plain >plain; chmod 640 plain
printf '#!/bin/sh\necho ran\n' >tool; chmod 755 tool
echo secret >private; chmod 600 private
chmod 700 empty
ln -s plain link; ln -s nowhere/at/all dangling; ln -s ../deep deep/up
echo odd >'a dir/-n ; $(x) "q"'"'"
echo deep >deep/er/and/deeper/file
touch -t 202001020304.05 plain deep/er`

// look prints a tree in a form that can be compared.
const look = `
cd "$1" || exit
find . ! -name . | LC_ALL=C sort | while IFS= read -r f; do
	if [ -L "$f" ]; then echo "$f -> $(readlink "$f")"
	elif [ -d "$f" ]; then echo "$f $(stat -c '%a' "$f")/"
	else echo "$f $(stat -c '%a %s' "$f") $(cksum <"$f")"; fi
done
stat -c '%Y' plain`

func (s *suite) archive(t *testing.T) {
	inside := func(t *testing.T) *sandbox {
		t.Helper()
		sb := s.up(t)
		if !sb.b.Can(sandboxer.CanExec) {
			t.Skip("cannot look inside: the extension has no exec")
		}
		return sb
	}
	read := func(t *testing.T, sb *sandbox, dir string) []byte {
		t.Helper()
		var out bytes.Buffer
		if err := sb.b.Archive(ctx(t), sb.h, dir, &out); err != nil {
			t.Fatalf("Archive(%q): %s", dir, describe(err))
		}
		return out.Bytes()
	}

	s.test(t, "what is the kernel's", func(t *testing.T) {
		sb := inside(t)
		dir := sb.dir(t)
		sb.sh(t, `ln -s /proc/self kernels && ln -s /proc elsewhere`)
		for _, name := range []string{"/proc/1", "/proc/self", "/proc", "/sys", dir + "/kernels", dir + "/elsewhere/1"} {
			// NotFound and Unsupported: where only the sandbox's own directories can be archived.
			wantKind(t, sb.b.Archive(ctx(t), sb.h, name, io.Discard), "Archive of "+name, sandboxer.Denied, sandboxer.Unsupported, sandboxer.Invalid, sandboxer.NotFound)
		}
	})
	s.test(t, "round trip", func(t *testing.T) {
		sb := inside(t)
		dir := sb.dir(t) + "/tree"
		sb.sh(t, fill, dir)
		archive := read(t, sb, dir)
		want := sb.sh(t, look, dir)
		other := inside(t)
		other.b = s.open(t)
		to := other.dir(t) + "/not/there/yet"
		if err := other.b.Unarchive(ctx(t), other.h, to, bytes.NewReader(archive)); err != nil {
			t.Fatalf("Unarchive: %s", describe(err))
		}
		if got := other.sh(t, look, to); got != want {
			t.Errorf("the copy is\n%s\nwant\n%s", got, want)
		}
		other.sh(t, `cd "$1" && ./tool >ran && echo more >>private && rmdir empty`, to) // it is the user's
		sb.alive(t)
	})
	s.test(t, "a tar of relative names", func(t *testing.T) {
		sb := inside(t)
		dir := sb.dir(t) + "/tree"
		sb.sh(t, fill, dir)
		found := map[string]*tar.Header{}
		r := tar.NewReader(bytes.NewReader(read(t, sb, dir)))
		for {
			hdr, err := r.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if path.IsAbs(hdr.Name) || strings.Contains(hdr.Name, "..") {
				t.Errorf("the archive has the name %q", hdr.Name)
			}
			found[path.Clean(hdr.Name)] = hdr
		}
		if hdr := found["plain"]; hdr == nil || hdr.Mode&0o777 != 0o640 || hdr.Size != 6 {
			t.Errorf("plain is %+v", hdr)
		}
		if hdr := found["deep/up"]; hdr == nil || hdr.Typeflag != tar.TypeSymlink || hdr.Linkname != "../deep" {
			t.Errorf("deep/up is %+v", hdr)
		}
		if hdr := found["empty"]; hdr == nil || hdr.Typeflag != tar.TypeDir {
			t.Errorf("empty is %+v", hdr)
		}
	})
	s.test(t, "the workspace", func(t *testing.T) {
		sb := inside(t)
		sb.sh(t, "echo mine >mark")
		other := inside(t)
		if err := other.b.Unarchive(ctx(t), other.h, "", bytes.NewReader(read(t, sb, ""))); err != nil {
			t.Fatalf("Unarchive: %s", describe(err))
		}
		if got := other.sh(t, "cat mark"); got != "mine" {
			t.Errorf("mark says %q", got)
		}
		other.sh(t, "echo more >>mark; echo new >new")
	})
	s.test(t, "replaces what was there", func(t *testing.T) {
		sb := inside(t)
		sb.sh(t, "mkdir -p d/sub; echo old >d/old; echo old >d/sub/old; echo old >.hidden; ln -s d l")
		other := inside(t)
		other.sh(t, "echo new >new")
		if err := sb.b.Unarchive(ctx(t), sb.h, "", bytes.NewReader(read(t, other, ""))); err != nil {
			t.Fatalf("Unarchive: %s", describe(err))
		}
		if got := sb.sh(t, "find . ! -name ."); got != "./new" {
			t.Errorf("the workspace has %q; want new alone", got)
		}
	})
	s.test(t, "an empty directory", func(t *testing.T) {
		sb := inside(t)
		sb.sh(t, "mkdir none; mkdir some; echo x >some/x")
		dir := sb.dir(t)
		if err := sb.b.Unarchive(ctx(t), sb.h, dir+"/some", bytes.NewReader(read(t, sb, dir+"/none"))); err != nil {
			t.Fatalf("Unarchive: %s", describe(err))
		}
		if got := sb.sh(t, "find some"); got != "some" {
			t.Errorf("found %q", got)
		}
	})
	s.test(t, "padding", func(t *testing.T) { // tools fill blocks behind the end; they need not be read
		sb := inside(t)
		var in bytes.Buffer
		w := tar.NewWriter(&in)
		if err := errors.Join(w.WriteHeader(&tar.Header{Name: "one", Mode: 0o644, Size: 1}), second(w.Write([]byte("1"))), w.Close()); err != nil {
			t.Fatal(err)
		}
		in.Write(make([]byte, 4<<20))
		if err := sb.b.Unarchive(ctx(t), sb.h, "", &in); err != nil {
			t.Fatalf("Unarchive: %s", describe(err))
		}
		if got := sb.sh(t, "cat one"); got != "1" {
			t.Errorf("one says %q", got)
		}
	})
	s.test(t, "large", func(t *testing.T) {
		sb := inside(t)
		var in bytes.Buffer
		w := tar.NewWriter(&in)
		data := noise(8 << 20)
		if err := errors.Join(w.WriteHeader(&tar.Header{Name: "big", Mode: 0o644, Size: int64(len(data))}), second(w.Write(data)), w.Close()); err != nil {
			t.Fatal(err)
		}
		dir := sb.dir(t) + "/d"
		if err := sb.b.Unarchive(ctx(t), sb.h, dir, &in); err != nil {
			t.Fatalf("Unarchive: %s", describe(err))
		}
		r := tar.NewReader(bytes.NewReader(read(t, sb, dir)))
		for {
			hdr, err := r.Next()
			if err != nil {
				t.Fatalf("big is not in the archive: %v", err)
			}
			if path.Clean(hdr.Name) != "big" {
				continue
			}
			if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes came back, %v", len(got), err)
			}
			break
		}
	})
	s.test(t, "a name that leads out", func(t *testing.T) {
		sb := inside(t)
		sb.sh(t, "mkdir d")
		for _, name := range []string{"../escaped", "x/../../escaped"} {
			var in bytes.Buffer
			w := tar.NewWriter(&in)
			if err := errors.Join(w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: 1}), second(w.Write([]byte("x"))), w.Close()); err != nil {
				t.Fatal(err)
			}
			sb.b.Unarchive(ctx(t), sb.h, sb.dir(t)+"/d", &in) // refused or passed over
			if got := sb.sh(t, "ls; ls .."); strings.Contains(got, "escaped") {
				t.Errorf("%q came out of its directory: %q", name, got)
			}
		}
		sb.alive(t)
	})
	s.test(t, "what is no archive", func(t *testing.T) {
		sb := inside(t)
		err := sb.b.Unarchive(ctx(t), sb.h, sb.dir(t)+"/d", bytes.NewReader(bytes.Repeat([]byte("no tar at all "), 1000)))
		wantKind(t, err, "Unarchive of noise", sandboxer.Invalid)
		sb.sh(t, fill, sb.dir(t)+"/tree")
		whole := read(t, sb, sb.dir(t)+"/tree")
		err = sb.b.Unarchive(ctx(t), sb.h, sb.dir(t)+"/d", io.MultiReader(bytes.NewReader(whole[:len(whole)/2]), failingReader{}))
		if err == nil {
			t.Error("a source that failed midway was taken for a whole one")
		}
		sb.alive(t)
	})
	s.test(t, "a reader that fails", func(t *testing.T) {
		sb := inside(t)
		if err := sb.b.Archive(ctx(t), sb.h, "", writerFunc(func([]byte) (int, error) { return 0, errors.New("the reader left") })); err == nil {
			t.Error("the archive succeeded although its writer failed")
		}
		sb.alive(t)
	})
	s.test(t, "missing directory", func(t *testing.T) {
		sb := inside(t)
		wantKind(t, sb.b.Archive(ctx(t), sb.h, sb.dir(t)+"/none", io.Discard), "Archive", sandboxer.NotFound)
		sb.sh(t, "echo x >file")
		wantKind(t, sb.b.Archive(ctx(t), sb.h, sb.dir(t)+"/file", io.Discard), "Archive of a file", sandboxer.Invalid)
		wantKind(t, sb.b.Unarchive(ctx(t), sb.h, sb.dir(t)+"/file", strings.NewReader("")), "Unarchive into a file", sandboxer.Invalid)
	})
	s.test(t, "unknown sandbox", func(t *testing.T) {
		b := s.opened
		wantKind(t, b.Archive(ctx(t), s.unknown(), "", io.Discard), "Archive", sandboxer.NotFound)
		wantKind(t, b.Unarchive(ctx(t), s.unknown(), "", strings.NewReader("")), "Unarchive", sandboxer.NotFound)
	})
	s.test(t, "canceled", func(t *testing.T) {
		sb := inside(t)
		silence(t, func(ctx context.Context, r io.Reader) error {
			return sb.b.Unarchive(ctx, sb.h, sb.dir(t)+"/d", r)
		}, make([]byte, 100))
		sb.alive(t)
	})
}

// second is the error of a call that returns a number too.
func second[T any](_ T, err error) error { return err }

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, errors.New("the source failed") }
