package checkpoint

import (
	"archive/tar"
	"bytes"
	"io"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// Whatever goes in: it is refused as Invalid, or what comes out is canonical and holds
// no surprises.
func FuzzTar(f *testing.F) {
	// Small ones only: making an input smaller takes the time of its length squared, and
	// until that is done nothing else is tried.
	const most = 16 << 10
	seeds := 0
	add := func(data []byte) {
		if len(data) <= most {
			seeds++
			f.Add(data)
		}
	}
	for _, c := range hostile(f) {
		add(c.data)
	}
	add(archive(f, tree(f)[3:]...))
	if seeds < 30 {
		f.Fatalf("only %d archives to begin with", seeds)
	}
	spool := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > most {
			return
		}
		pass := func(data []byte) ([]byte, error) {
			var out memorySink
			c := canonicaliser{rules: Rules{Bytes: 1 << 20}, spoolDir: spool, spoolBytes: 1 << 20,
				newSink: func() sink { out = memorySink{}; return &out },
				reopen:  func(part) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(out.Bytes())), nil }}
			_, err := c.run(t.Context(), bytes.NewReader(data))
			return out.Bytes(), err
		}
		once, err := pass(data)
		if err != nil {
			wantKind(t, err, sandboxer.Invalid)
			return
		}
		twice, err := pass(bytes.Clone(once))
		if err != nil || !bytes.Equal(once, twice) {
			t.Fatalf("what is canonical does not stay so: %v", err)
		}
		tr := tar.NewReader(bytes.NewReader(once))
		for {
			h, err := tr.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("archive/tar does not read it: %v", err)
			}
			if h.Mode&^0o777 != 0 || h.Uid != 0 || h.Uname != "" {
				t.Fatalf("%q keeps too much: %+v", h.Name, h)
			}
		}
	})
}

type memorySink struct {
	bytes.Buffer
	room []byte
}

func (m *memorySink) space() ([]byte, error) {
	m.Grow(4 << 10)
	m.room = m.AvailableBuffer()
	return m.room[:cap(m.room)], nil
}

func (m *memorySink) fill(n int) error {
	_, err := m.Write(m.room[:n])
	return err
}

func (m *memorySink) finish() (part, error) { return part{}, nil }
func (m *memorySink) abort()                {}

func FuzzManifest(f *testing.F) {
	s := newStore(f, newDir(f), Options{})
	m, err := s.Save(f.Context(), "one", Meta{}, bytes.NewReader(archive(f, tree(f)[3:]...)), SaveOptions{})
	if err != nil {
		f.Fatal(err)
	}
	data, err := m.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte(`{"format":"sandboxer.checkpoint/1"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := decodeManifest(data)
		if err != nil {
			wantKind(t, err, sandboxer.Invalid, sandboxer.Unsupported)
			return
		}
		again, err := m.encode()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeManifest(again); err != nil {
			t.Fatalf("encoded again it does not decode: %v", err)
		}
		for _, x := range m.Files {
			if x.Data+x.Size > m.Payload.Size {
				t.Fatalf("%q lies outside", x.Path)
			}
		}
	})
}

func FuzzIndex(f *testing.F) {
	f.Add(append([]byte(packMagic), appendIndex(nil, []place{{offset: 8, stored: 10, size: 20}, {offset: 18, stored: 5, size: 5}})...))
	many := append([]byte(packMagic), appendIndex(nil, []place{{offset: 8, stored: 10, size: 20}, {offset: 18, stored: 5, size: 5}})...)
	many[len(many)-packFooter+7] = 0x80 // as many entries as make two, times the size of one
	f.Add(many)
	f.Fuzz(func(t *testing.T, data []byte) {
		places, err := parseIndex("x", data)
		if err != nil {
			wantKind(t, err, sandboxer.Failed)
			return
		}
		if again := append([]byte(packMagic), appendIndex(nil, places)...); !bytes.Equal(again, data) {
			t.Fatal("written again it differs")
		}
	})
}

func FuzzImport(f *testing.F) {
	s := newStore(f, newDir(f), Options{})
	if _, err := s.Save(f.Context(), "one", Meta{}, bytes.NewReader(archive(f, item{name: "a", body: "b"})), SaveOptions{}); err != nil {
		f.Fatal(err)
	}
	var file bytes.Buffer
	if err := s.Export(f.Context(), "one", &file); err != nil {
		f.Fatal(err)
	}
	f.Add(file.Bytes())
	b := newDir(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		s := newStore(t, b, Options{})
		m, err := s.Import(t.Context(), bytes.NewReader(data), ImportOptions{})
		if err != nil {
			wantKind(t, err, sandboxer.Invalid, sandboxer.Unsupported, sandboxer.Denied)
			return
		}
		if m.ID != "one" {
			t.Fatalf("a checkpoint %q that nobody signed", m.ID)
		}
	})
}
