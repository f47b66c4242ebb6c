package checkpoint

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/sand-boxer/sandboxer"
)

func TestExportImport(t *testing.T) {
	for _, from := range encodings {
		for _, to := range encodings {
			t.Run(string(from)+" to "+string(to), func(t *testing.T) {
				a := newStore(t, newDir(t), Options{Encoding: from})
				m := save(t, a, "one", archive(t, tree(t)...))
				var file bytes.Buffer
				if err := a.Export(t.Context(), "one", &file); err != nil {
					t.Fatal(err)
				}
				b, err := New(newDir(t), testKey(2), Options{Encoding: to, SpoolDir: t.TempDir()})
				if err != nil {
					t.Fatal(err)
				}
				_, err = b.Import(t.Context(), bytes.NewReader(file.Bytes()), ImportOptions{})
				wantKind(t, err, sandboxer.Denied)
				if !strings.Contains(err.Error(), string(a.Key())) {
					t.Errorf("Import = %v; want the signer's key named", err)
				}
				accept := ImportOptions{Accept: []KeyID{a.Key()}}
				for range 2 {
					got, err := b.Import(t.Context(), bytes.NewReader(file.Bytes()), accept)
					if err != nil {
						t.Fatal(err)
					}
					if got.Digest != m.Digest || got.Signer != a.Key() {
						t.Errorf("imported %s by %s; want %s by %s", got.Digest, got.Signer, m.Digest, a.Key())
					}
				}
				if !bytes.Equal(readAll(t, b, "one"), readAll(t, a, "one")) {
					t.Error("the payloads differ")
				}
				// It travels on, and who trusts the key needs no word.
				var again bytes.Buffer
				if err := b.Export(t.Context(), "one", &again); err != nil {
					t.Fatal(err)
				}
				c, err := New(newDir(t), testKey(3), Options{Encoding: to, Trusted: []KeyID{a.Key()}, SpoolDir: t.TempDir()})
				if err != nil {
					t.Fatal(err)
				}
				if _, err := c.Import(t.Context(), &again, ImportOptions{}); err != nil {
					t.Fatal(err)
				}
				save(t, b, "two", noise(t, 1))
				var two bytes.Buffer
				if err := b.Export(t.Context(), "two", &two); err != nil {
					t.Fatal(err)
				}
				save(t, a, "two", noise(t, 2))
				_, err = a.Import(t.Context(), &two, ImportOptions{Accept: []KeyID{b.Key()}})
				wantKind(t, err, sandboxer.Conflict)
			})
		}
	}
}

// An export is a .tar.zst for everybody else.
func TestExportIsTar(t *testing.T) {
	if _, err := exec.LookPath("zstd"); err != nil {
		t.Skip("no zstd")
	}
	s := newStore(t, newDir(t), Options{})
	save(t, s, "one", archive(t, item{name: "d/hello", body: "hello"}))
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "one.tar.zst"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Export(t.Context(), "one", f); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	cmd := exec.CommandContext(t.Context(), "tar", "--zstd", "-xf", "one.tar.zst")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "d/hello")); string(got) != "hello" {
		t.Errorf("hello = %q, %v", got, err)
	}
}

// A file that was changed anywhere, or cut anywhere, is not imported.
func TestImportChanged(t *testing.T) {
	s := newStore(t, newDir(t), Options{})
	save(t, s, "one", archive(t, tree(t)[3:]...))
	var file bytes.Buffer
	if err := s.Export(t.Context(), "one", &file); err != nil {
		t.Fatal(err)
	}
	good := file.Bytes()
	dst := newStore(t, newDir(t), Options{})
	refused := func(what string, at int, data []byte) {
		t.Helper()
		_, err := dst.Import(t.Context(), bytes.NewReader(data), ImportOptions{})
		if k := sandboxer.KindOf(err); k != sandboxer.Invalid && k != sandboxer.Unsupported && k != sandboxer.Denied {
			// What zstd does not look at may change; then it is what was exported.
			if m, e := dst.Get(t.Context(), "one"); err == nil && e == nil && m.Digest != "" {
				dst = newStore(t, newDir(t), Options{})
				return
			}
			t.Errorf("%s at byte %d: %v; want it refused", what, at, err)
		}
	}
	for at := 0; at < len(good); at += 1 + len(good)/150 {
		data := bytes.Clone(good)
		data[at] ^= 0x10
		refused("changed", at, data)
		refused("cut", at, good[:at])
	}
	// A payload that is signed for, with other bytes: the manifest of one, the files of another.
	save(t, s, "two", noise(t, 3))
	var two bytes.Buffer
	if err := s.Export(t.Context(), "two", &two); err != nil {
		t.Fatal(err)
	}
	split := func(b []byte) int { return 8 + int(uint32(b[4])|uint32(b[5])<<8|uint32(b[6])<<16) }
	mixed := append(bytes.Clone(good[:split(good)]), two.Bytes()[split(two.Bytes()):]...)
	_, err := dst.Import(t.Context(), bytes.NewReader(mixed), ImportOptions{})
	wantKind(t, err, sandboxer.Invalid)
	// And one with a bomb behind an honest manifest.
	var zeros bytes.Buffer
	w, err := zstd.NewWriter(&zeros)
	if err != nil {
		t.Fatal(err)
	}
	for range 64 {
		_, _ = w.Write(make([]byte, 1<<20))
	}
	_ = w.Close()
	_, err = dst.Import(t.Context(), bytes.NewReader(append(bytes.Clone(good[:split(good)]), zeros.Bytes()...)), ImportOptions{})
	wantKind(t, err, sandboxer.Invalid)
}

func TestLoadKey(t *testing.T) {
	dir := t.TempDir()
	key, err := LoadKey(dir)
	if err != nil {
		t.Fatal(err)
	}
	again, err := LoadKey(dir)
	if err != nil || !key.Equal(again) {
		t.Errorf("the second LoadKey gives another key, %v", err)
	}
	path := filepath.Join(dir, KeyFile)
	if fi, err := os.Stat(path); err != nil || fi.Mode() != 0o600 {
		t.Errorf("the key has the mode %v, %v", fi.Mode(), err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("%v; want the key alone", left)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	_, err = LoadKey(dir)
	wantKind(t, err, sandboxer.Denied)
	if err := os.WriteFile(path, []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	_ = os.Chmod(path, 0o600)
	_, err = LoadKey(dir)
	wantKind(t, err, sandboxer.Invalid)
}

// seal makes the beginning of an export, before the payload, of a manifest.
func seal(t testing.TB, m *Manifest) []byte {
	t.Helper()
	data, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	key := testKey(1)
	env, err := json.Marshal(envelope{Format: envelopeFormat, Manifest: data, Signer: ID(key), Signature: sign(key, data)})
	if err != nil {
		t.Fatal(err)
	}
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedDefault))
	if err != nil {
		t.Fatal(err)
	}
	defer enc.Close()
	body := enc.EncodeAll(env, nil)
	out := binary.LittleEndian.AppendUint32(nil, skippableMagic)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(body)))
	return append(out, body...)
}

// A manifest of n directories, one in the other's place: as small as entries get.
func directories(n int) *Manifest {
	m := &Manifest{Format: Format, ID: "large", Kind: "portable", Created: time.Unix(0, 0).UTC()}
	for i := range n {
		m.Files = append(m.Files, File{Path: fmt.Sprintf("%07d", i), Type: TypeDir, Offset: int64(i) * blockSize, Mode: 0o755})
	}
	m.Payload = Payload{Digest: digest([32]byte{}), Size: int64(n+2) * blockSize}
	return m
}

// A small file must not become much memory: neither by its manifest nor by its payload.
func TestImportIsBounded(t *testing.T) {
	s := newStore(t, newDir(t), Options{})
	took := func(f func()) int64 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		f()
		runtime.ReadMemStats(&after)
		return int64(after.TotalAlloc - before.TotalAlloc)
	}
	refused := func(what string, data []byte, o ImportOptions, why string, most int64) {
		t.Helper()
		n := took(func() {
			_, err := s.Import(t.Context(), bytes.NewReader(data), o)
			wantKind(t, err, sandboxer.Invalid)
			if !strings.Contains(err.Error(), why) {
				t.Errorf("%s: %v; want %q", what, err, why)
			}
		})
		if n > most {
			t.Errorf("%s: %d bytes became %d MiB", what, len(data), n>>20)
		}
	}
	large := seal(t, directories(400_000)) // 28 MiB
	refused("a large manifest", large, ImportOptions{}, "more than 16 MiB", 128<<20)
	// With a larger bound it gets further: to the payload, which is missing.
	if _, err := s.Import(t.Context(), bytes.NewReader(large), ImportOptions{Manifest: math.MaxInt64}); err == nil || strings.Contains(err.Error(), "MiB") {
		t.Errorf("an administrator's: %v", err)
	}
	m := directories(1)
	m.Producer = strings.Repeat("x", 8<<20)
	refused("a dense manifest", seal(t, m), ImportOptions{}, "times what it was compressed", 16<<20)
	// A stranger's manifest is not looked at.
	stranger, err := New(newDir(t), testKey(2), Options{SpoolDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	most := seal(t, directories(200_000)) // 14 MiB
	if n := took(func() {
		_, err := stranger.Import(t.Context(), bytes.NewReader(most), ImportOptions{})
		wantKind(t, err, sandboxer.Denied)
	}); n > 200<<20 {
		t.Errorf("a stranger's manifest took %d MiB", n>>20)
	}
	refused("the largest manifest", most, ImportOptions{}, "", 400<<20)
	// More entries than the manifest names.
	var items []item
	for i := range 20_000 {
		items = append(items, item{name: fmt.Sprintf("%07d", i), kind: tar.TypeDir})
	}
	var payload bytes.Buffer
	w, err := zstd.NewWriter(&payload)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = w.Write(archive(t, items...))
	_ = w.Close()
	few := directories(10)
	few.Payload.Size = 1 << 40
	refused("entries that no manifest names", append(seal(t, few), payload.Bytes()...), ImportOptions{}, "more than 11 entries", 64<<20)
}
