package checkpoint

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/blake3"

	"github.com/sand-boxer/sandboxer"
)

func testKey(n byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{n}, ed25519.SeedSize))
}

func newDir(t testing.TB) *Dir {
	t.Helper()
	d, err := OpenDir(filepath.Join(t.TempDir(), "store"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func newStore(t testing.TB, b Blobs, o Options) *Store {
	t.Helper()
	if o.SpoolDir == "" {
		o.SpoolDir = t.TempDir()
	}
	s, err := New(b, testKey(1), o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func wantKind(t *testing.T, err error, kinds ...sandboxer.Kind) {
	t.Helper()
	if !slices.Contains(kinds, sandboxer.KindOf(err)) {
		t.Fatalf("error = %v (%s); want %v", err, sandboxer.KindOf(err), kinds)
	}
}

// item is one entry of an archive made for a test.
type item struct {
	name string
	kind byte // 0: a file
	body string
	link string
	mode int64 // 0: 0644, or 0755
	pax  map[string]string
	hdr  func(*tar.Header)
}

func archive(t testing.TB, items ...item) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, i := range items {
		h := &tar.Header{Name: i.name, Typeflag: i.kind, Size: int64(len(i.body)), Linkname: i.link, Mode: i.mode, PAXRecords: i.pax,
			ModTime: time.Unix(1_700_000_000, 0), Format: tar.FormatPAX}
		if i.kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o644
			if i.kind == tar.TypeDir {
				h.Mode = 0o755
			}
		}
		if i.kind == tar.TypeXGlobalHeader {
			h = &tar.Header{Typeflag: i.kind, Name: i.name, PAXRecords: i.pax}
		}
		if i.hdr != nil {
			i.hdr(h)
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatalf("%s: %v", i.name, err)
		}
		if _, err := io.WriteString(w, i.body); err != nil {
			t.Fatalf("%s: %v", i.name, err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func readAll(t testing.TB, s *Store, id string) []byte {
	t.Helper()
	_, r, err := s.Open(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(r)
	if err = errors.Join(err, r.Close()); err != nil {
		t.Fatal(err)
	}
	return data
}

func paths(m *Manifest) string {
	var p []string
	for _, f := range m.Files {
		s := f.Path
		switch f.Type {
		case TypeDir:
			s += "/"
		case TypeSymlink:
			s += "->" + f.Link
		case TypeHardlink:
			s += "=" + f.Link
		}
		p = append(p, s)
	}
	return strings.Join(p, " ")
}

var encodings = []Encoding{Chunks, Stream}

// tree is an archive with everything that is allowed, in canonical order.
func tree(t testing.TB) []item {
	big := make([]byte, 3<<20)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range big {
		big[i] = byte(r.Uint32())
	}
	copy(big[1<<20:], make([]byte, 1<<20))
	return []item{
		{name: "./", kind: tar.TypeDir},
		{name: "./a/", kind: tar.TypeDir, mode: 0o700},
		{name: "./a/big", body: string(big)},
		{name: "./a/empty"},
		{name: "./a/x", body: "x", mode: 0o755},
		{name: "./a-b", body: "sorted behind a/x"},
		{name: "./link", kind: tar.TypeSymlink, link: "a/x"},
		{name: "./" + strings.Repeat("long/", 60) + "name", body: "deep"},
		{name: "./z-hard", kind: tar.TypeLink, link: "./a/x"},
		{name: "./zwölf", body: "12"},
	}
}

func TestSaveAndOpen(t *testing.T) {
	for _, e := range encodings {
		t.Run(string(e), func(t *testing.T) {
			s := newStore(t, newDir(t), Options{Encoding: e})
			items := tree(t)
			in := archive(t, items...)
			meta := Meta{Source: Source{Sandbox: "sb-1", Extension: "ext.local"}, Root: "/workspace", Quiesced: true, Excludes: []string{"*.o"}}
			m, err := s.Save(t.Context(), "one", meta, bytes.NewReader(in), SaveOptions{})
			if err != nil {
				t.Fatal(err)
			}
			want := "a/ a/big a/empty a/x a-b link->a/x "
			for i := 1; i <= 60; i++ {
				want += strings.Repeat("long/", i) + " "
			}
			want += strings.Repeat("long/", 60) + "name z-hard=a/x zwölf"
			if got := paths(m); got != want {
				t.Errorf("files = %s\nwant    %s", got, want)
			}
			got, err := s.Get(t.Context(), "one")
			if err != nil {
				t.Fatal(err)
			}
			if got.Source != meta.Source || !got.Quiesced || got.Root != "/workspace" || got.Digest != m.Digest || got.Signer != s.Key() {
				t.Errorf("manifest = %+v; want what was said when it was saved", got)
			}
			data := readAll(t, s, "one")
			if int64(len(data)) != m.Payload.Size {
				t.Errorf("payload has %d bytes; the manifest says %d", len(data), m.Payload.Size)
			}
			for _, f := range m.Files {
				if f.Type == TypeFile && f.Path == "a/x" && string(data[f.Data:f.Data+f.Size]) != "x" {
					t.Errorf("a/x is not at offset %d", f.Data)
				}
			}
			for name, want := range map[string]string{"a/x": "x", "z-hard": "x", "/a/empty": "", "zwölf": "12", "a/big": items[2].body} {
				_, r, err := s.OpenFile(t.Context(), "one", name)
				if err != nil {
					t.Fatal(err)
				}
				body, err := io.ReadAll(r)
				if err = errors.Join(err, r.Close()); err != nil || string(body) != want {
					t.Errorf("OpenFile(%q) = %d bytes, %v; want %d", name, len(body), err, len(want))
				}
			}
			_, _, err = s.OpenFile(t.Context(), "one", "link")
			wantKind(t, err, sandboxer.Invalid)
			_, _, err = s.OpenFile(t.Context(), "one", "nowhere")
			wantKind(t, err, sandboxer.NotFound)

			// Another store in the same place, another order, the same bytes.
			again := newStore(t, s.blobs, Options{Encoding: e})
			rand.New(rand.NewPCG(3, 4)).Shuffle(len(items), func(i, j int) { items[i], items[j] = items[j], items[i] })
			slices.SortStableFunc(items, func(a, b item) int { // a hard link comes after its file
				return map[bool]int{a.kind == tar.TypeLink: 1, b.kind == tar.TypeLink: -1}[true]
			})
			m2, err := again.Save(t.Context(), "two", meta, bytes.NewReader(archive(t, items...)), SaveOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if m2.Payload.Digest != m.Payload.Digest {
				t.Errorf("the same tree in another order has the digest %s; want %s", m2.Payload.Digest, m.Payload.Digest)
			}
			if e == Chunks && m2.Stored > m.Stored/20 {
				t.Errorf("the second checkpoint of the same tree stored %d bytes; the first %d", m2.Stored, m.Stored)
			}
			list, err := again.List(t.Context())
			if err != nil || len(list) != 2 || list[0].ID != "two" || list[1].Payload.Digest != m.Payload.Digest || list[0].Files != nil {
				t.Errorf("List = %v, %v; want two and one", list, err)
			}
			_, err = again.Save(t.Context(), "one", meta, bytes.NewReader(in), SaveOptions{})
			wantKind(t, err, sandboxer.Conflict)
			if pins, _ := s.blobs.List(t.Context(), pinPrefix); len(pins) != 0 {
				t.Errorf("pins are left: %v", pins)
			}
			if pend, _ := s.blobs.List(t.Context(), pendingPrefix); len(pend) != 0 {
				t.Errorf("pending records are left: %v", pend)
			}
			// Canonical means: what comes out goes in unchanged.
			m3, err := s.Save(t.Context(), "three", meta, bytes.NewReader(data), SaveOptions{})
			if err != nil || m3.Payload.Digest != m.Payload.Digest {
				t.Errorf("the canonical tar saved again: %v; want the same digest", err)
			}
			if err := s.Drop(t.Context(), "one"); err != nil {
				t.Fatal(err)
			}
			_, _, err = s.Open(t.Context(), "one")
			wantKind(t, err, sandboxer.NotFound)
			_, err = s.Save(t.Context(), "one", meta, bytes.NewReader(in), SaveOptions{})
			wantKind(t, err, sandboxer.Conflict)
		})
	}
}

// GNU tar is what most sandboxes have; what it packs, in any order, comes back whole.
func TestRealTar(t *testing.T) {
	if _, err := exec.LookPath("tar"); err != nil {
		t.Skip("no tar")
	}
	src := t.TempDir()
	r := rand.New(rand.NewPCG(7, 7))
	for i := range 300 {
		dir := filepath.Join(src, fmt.Sprintf("d%d", r.IntN(20)), fmt.Sprintf("e%d", r.IntN(5)))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		data := make([]byte, r.IntN(20000))
		for i := range data {
			data[i] = byte(r.IntN(20))
		}
		name := filepath.Join(dir, fmt.Sprintf("f%d", i))
		if err := os.WriteFile(name, data, 0o600+fs.FileMode(r.IntN(8)*8)); err != nil {
			t.Fatal(err)
		}
		if i%20 == 0 {
			if err := errors.Join(os.Link(name, filepath.Join(src, fmt.Sprintf("%c-hard-%d", 'a'+r.IntN(26), i))),
				os.Symlink("f"+fmt.Sprint(i), filepath.Join(dir, fmt.Sprintf("s%d", i)))); err != nil {
				t.Fatal(err)
			}
		}
	}
	s := newStore(t, newDir(t), Options{})
	digests := map[string]bool{}
	for i, args := range [][]string{{"--sort=name"}, {"--sort=none"}, {"--sort=inode"}, {"--format=ustar"}} {
		cmd := exec.CommandContext(t.Context(), "tar", append(args, "-C", src, "-cf", "-", ".")...)
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		m, err := s.Save(t.Context(), fmt.Sprint(i), Meta{}, out, SaveOptions{})
		if err = errors.Join(err, cmd.Wait()); err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		digests[m.Payload.Digest] = true
	}
	if len(digests) != 1 {
		t.Errorf("%d digests of one tree", len(digests))
	}
	_, rd, err := s.Open(t.Context(), "1")
	if err != nil {
		t.Fatal(err)
	}
	dst := t.TempDir()
	unpack(t, rd, dst)
	if err := rd.Close(); err != nil {
		t.Fatal(err)
	}
	if a, b := listing(t, src), listing(t, dst); a != b {
		t.Errorf("the tree differs:\n%s\nwant\n%s", b, a)
	}
}

// unpack unpacks a tar below dir, as people do it.
func unpack(t testing.TB, r io.Reader, dir string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "tar", "-C", dir, "-xpf", "-")
	cmd.Stdin = r
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// listing describes a tree with contents.
func listing(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		fi, err := e.Info()
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		fmt.Fprintf(&b, "%s %v", rel, fi.Mode())
		switch {
		case e.Type().IsRegular():
			data, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, " %d %x", fi.ModTime().Unix(), sum(data))
		case e.Type() == fs.ModeSymlink:
			to, _ := os.Readlink(p)
			b.WriteString(" " + to)
		default:
			fmt.Fprintf(&b, " %d", fi.ModTime().Unix())
		}
		b.WriteString("\n")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func sum(b []byte) string { return digest(blake3.Sum256(b)) }

func TestCanceled(t *testing.T) {
	for _, e := range encodings {
		s := newStore(t, newDir(t), Options{Encoding: e})
		ctx, cancel := context.WithCancel(t.Context())
		r, w := io.Pipe()
		go func() {
			_, _ = w.Write(archive(t, tree(t)...)[:2<<20])
			cancel()
			_, _ = w.Write(make([]byte, 1<<20))
		}()
		_, err := s.Save(ctx, "one", Meta{}, r, SaveOptions{})
		_ = r.Close()
		wantKind(t, err, sandboxer.Canceled)
		if _, err := s.Get(t.Context(), "one"); sandboxer.KindOf(err) != sandboxer.NotFound {
			t.Errorf("Get after a canceled Save = %v; want NotFound", err)
		}
	}
}
