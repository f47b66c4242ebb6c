package aioserver

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// oneFile is a sandbox with one file, which calls do when it is written.
type oneFile struct {
	Sandboxes
	content string
	do      func() error
}

func (*oneFile) StatFile(_ context.Context, _, name string) (sandboxer.FileInfo, error) {
	return sandboxer.FileInfo{Path: name, Mode: 0o644}, nil
}

func (f *oneFile) WriteFile(_ context.Context, _, _ string, _ fs.FileMode, r io.Reader) error {
	if f.do != nil {
		if err := f.do(); err != nil {
			return err
		}
	}
	b, err := io.ReadAll(r)
	f.content = string(b)
	return err
}

// An edit is undone once, whatever happens meanwhile; one that could not be is undone later.
func TestUndoAtOnce(t *testing.T) {
	f := &oneFile{}
	a := &api{t: t, s: New(Options{Sandboxes: f}), sb: Sandbox{ID: "x"}, who: t.Context()}
	c := &call{s: a.s, r: a.request(), sb: a.sb, who: account{"", "x"}}
	for i := range maxEdits {
		c.remember("/f", edit{true, fmt.Sprint(i)})
	}
	const undo = `{"command":"undo_edit","path":"/f"}`
	f.do = func() error {
		f.do = nil
		for i := range maxEdits { // all that was known before has moved, or gone
			c.remember("/f", edit{true, fmt.Sprint("new", i)})
		}
		return nil
	}
	data[editResult](t, a.post("/v1/file/str_replace_editor", undo), 200)
	if want := fmt.Sprint(maxEdits - 1); f.content != want {
		t.Errorf("%q, want %q", f.content, want)
	}
	f.do = func() error { return sandboxer.E(sandboxer.Failed, nil, "broken") }
	data[fileError](t, a.post("/v1/file/str_replace_editor", undo), 500)
	f.do = nil
	for i := range maxEdits {
		data[editResult](t, a.post("/v1/file/str_replace_editor", undo), 200)
		if want := fmt.Sprint("new", maxEdits-1-i); f.content != want {
			t.Errorf("%q, want %q", f.content, want)
		}
	}
	refused(t, a.post("/v1/file/str_replace_editor", undo), 500)
	if n := a.s.memory.all.sum(); n != 0 {
		t.Errorf("%d bytes are still accounted for", n)
	}
}
