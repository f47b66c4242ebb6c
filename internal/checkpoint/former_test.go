package checkpoint

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/compattest"
)

// What former builds saved is read, byte for byte, exported and imported.
func TestFormerCheckpoints(t *testing.T) {
	tried := 0
	for _, f := range compattest.Fixtures(t) {
		if len(f.Snapshots) == 0 {
			continue
		}
		tried++
		t.Run(f.Name, func(t *testing.T) {
			dir := t.TempDir()
			f.Install(t, dir)
			data := filepath.Join(dir, compattest.DataDir, "snapshots")
			key, err := LoadKey(data)
			if err != nil {
				t.Fatal(err)
			}
			blobs, err := OpenDir(filepath.Join(data, "store"))
			if err != nil {
				t.Fatal(err)
			}
			defer blobs.Close()
			s, err := New(blobs, key, Options{SpoolDir: t.TempDir()})
			if err != nil {
				t.Fatal(err)
			}
			all, err := s.List(t.Context())
			if err != nil || len(all) == 0 {
				t.Fatalf("%d checkpoints: %v", len(all), err)
			}
			for _, m := range all {
				checkFormer(t, s, m.ID, f.Workspace)
				for _, encoding := range []Encoding{Chunks, Stream} {
					copied := newStore(t, newDir(t), Options{Encoding: encoding, Trusted: []KeyID{ID(key)}})
					var file bytes.Buffer
					if err := s.Export(t.Context(), m.ID, &file); err != nil {
						t.Fatal(err)
					}
					if _, err := copied.Import(t.Context(), &file, ImportOptions{}); err != nil {
						t.Fatalf("%s, imported as %s: %v", m.ID, encoding, err)
					}
					checkFormer(t, copied, m.ID, f.Workspace)
				}
			}
			if _, err := s.GC(t.Context()); err != nil {
				t.Error(err)
			}

			// A changed byte is found in these as in any other.
			packs := compattest.Glob(t, true, data, "store", "packs", "*")
			for _, name := range packs {
				b, err := os.ReadFile(name)
				if err != nil {
					t.Fatal(err)
				}
				b[len(b)/2] ^= 1
				if err := errors.Join(os.Remove(name), os.WriteFile(name, b, 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			for _, m := range all {
				if _, err := readFormer(t.Context(), s, m.ID); sandboxer.KindOf(err) != sandboxer.Failed {
					t.Errorf("changed: %v", err)
				}
			}
		})
	}
	if tried < 5 {
		t.Errorf("%d fixtures have checkpoints", tried)
	}
}

func checkFormer(t *testing.T, s *Store, id string, want map[string]string) {
	t.Helper()
	got, err := readFormer(t.Context(), s, id)
	if err != nil {
		t.Errorf("%s is refused: %v (%s)", id, err, sandboxer.HintOf(err))
		return
	}
	if !maps.Equal(got, want) {
		t.Errorf("%s has %v; want %v", id, got, want)
	}
	for name := range want {
		_, r, err := s.OpenFile(t.Context(), id, name)
		if err != nil {
			t.Errorf("%s in %s: %v", name, id, err)
			continue
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, r); err != nil || hex.EncodeToString(sum.Sum(nil)) != want[name] {
			t.Errorf("%s in %s: %v, or another content", name, id, err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}

// readFormer reads all of a checkpoint to its end and returns the digests of its files.
func readFormer(ctx context.Context, s *Store, id string) (map[string]string, error) {
	_, r, err := s.Open(ctx, id)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	got := map[string]string{}
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		switch h.Typeflag {
		case tar.TypeReg:
			sum := sha256.New()
			if _, err := io.Copy(sum, in); err != nil {
				return nil, err
			}
			got[path.Clean(h.Name)] = hex.EncodeToString(sum.Sum(nil))
		case tar.TypeLink:
			got[path.Clean(h.Name)] = got[path.Clean(h.Linkname)]
		}
	}
	_, err = io.Copy(io.Discard, r) // what follows the archive's end is verified, too
	return got, err
}

// What a newer program wrote is said to be that, whatever it has that is not known here, and
// nothing of it is deleted.
func TestNewerFormats(t *testing.T) {
	blobs := newDir(t)
	s := newStore(t, blobs, Options{})
	save := func(id string) {
		t.Helper()
		if _, err := s.Save(t.Context(), id, Meta{}, bytes.NewReader(archive(t, item{name: "f", body: "kept"})), SaveOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	newer := func(t *testing.T, err error, says string) {
		t.Helper()
		wantKind(t, err, sandboxer.Unsupported)
		said := sandboxer.Message(err) + "\n" + sandboxer.HintOf(err)
		for _, w := range []string{"newer sandboxer", says, "upgrade"} {
			if !strings.Contains(said, w) {
				t.Errorf("%q does not say %q", said, w)
			}
		}
	}
	replace := func(id string, change func(rec map[string]any)) {
		t.Helper()
		data, err := s.getBytes(t.Context(), checkpointPrefix+id, maxRecord)
		if err != nil {
			t.Fatal(err)
		}
		var rec map[string]any
		if err := json.Unmarshal(data, &rec); err != nil {
			t.Fatal(err)
		}
		change(rec)
		if data, err = json.Marshal(rec); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(blobs.Delete(t.Context(), checkpointPrefix+id), s.putBytes(t.Context(), checkpointPrefix+id, data)); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("record", func(t *testing.T) {
		save("a")
		replace("a", func(rec map[string]any) {
			rec["format"], rec["unheard"], rec["payload"] = "sandboxer.checkpoint.record/2", map[string]any{"of": 1}, "elsewhere"
		})
		_, err := s.Get(t.Context(), "a")
		newer(t, err, "sandboxer.checkpoint.record/2")
		if _, err := s.GC(t.Context()); sandboxer.KindOf(err) != sandboxer.Unsupported {
			t.Errorf("a collection: %v; want nothing deleted as long as it cannot know what is needed", err)
		}
	})
	t.Run("manifest in its record", func(t *testing.T) {
		save("b")
		replace("b", func(rec map[string]any) {
			head := rec["head"].(map[string]any)
			head["format"], head["unheard"] = "sandboxer.checkpoint/2", true
		})
		_, err := s.Get(t.Context(), "b")
		newer(t, err, "sandboxer.checkpoint/2")
	})
	t.Run("manifest", func(t *testing.T) {
		_, err := decodeManifest([]byte(`{"format":"sandboxer.checkpoint/2","files":{"in":"another form"}}`))
		newer(t, err, "sandboxer.checkpoint/2")
	})
	t.Run("export", func(t *testing.T) {
		env := `{"format":"sandboxer.checkpoint.export/12","manifest":[],"why":"unheard of"}`
		body := s.enc.EncodeAll([]byte(env), nil)
		file := append([]byte{0x5B, 0x2A, 0x4D, 0x18, byte(len(body)), 0, 0, 0}, body...)
		_, err := s.Import(t.Context(), bytes.NewReader(file), ImportOptions{})
		newer(t, err, "sandboxer.checkpoint.export/12")
	})
	t.Run("what says nothing is damaged", func(t *testing.T) {
		save("c")
		replace("c", func(rec map[string]any) { delete(rec, "format") })
		_, err := s.Get(t.Context(), "c")
		wantKind(t, err, sandboxer.Failed)
	})
	t.Run("another program's is not newer", func(t *testing.T) {
		_, err := decodeManifest([]byte(`{"format":"theirs/7"}`))
		wantKind(t, err, sandboxer.Unsupported)
		if strings.Contains(err.Error(), "newer") {
			t.Error(err)
		}
	})
}

func TestFormOfCheckpoint(t *testing.T) {
	compattest.CheckForm(t, "checkpoint-record", compattest.Shape(recordFormat, record{}))
	compattest.CheckForm(t, "checkpoint-manifest", compattest.Shape(Format, Manifest{}))
	compattest.CheckForm(t, "checkpoint-export", compattest.Shape(envelopeFormat, envelope{}))

	// The key, and names of what a store is made of.
	dir := t.TempDir()
	if _, err := LoadKey(dir); err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(filepath.Join(dir, KeyFile))
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(key), "\n")
	compattest.CheckForm(t, "checkpoint-store", strings.Join([]string{KeyFile + " " + first, "ed25519 " + string(ID(ed25519.NewKeyFromSeed(make([]byte, 32)))),
		packPrefix, indexPrefix, streamPrefix, pendingPrefix, checkpointPrefix, dropPrefix, pinPrefix, condemnedPrefix, packMagic}, "\n"))
}
