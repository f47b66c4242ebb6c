package server

import (
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// Names that are not UTF-8 come and go through the API.
func TestNamesThatAreNotUTF8(t *testing.T) {
	r := newRig(t)
	_, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	sb, ctx := r.create(c, api.CreateSandbox{}), t.Context()
	const dir, file, moved = "/workspace/d\xfe", "/workspace/d\xfe/f\xff", "/workspace/d\xfe/g\xff"
	if err := c.MakeDir(ctx, sb.ID, dir); err != nil {
		t.Fatal(err)
	}
	if err := c.WriteFile(ctx, sb.ID, file, 0, strings.NewReader("text")); err != nil {
		t.Fatal(err)
	}
	if fi, err := c.StatFile(ctx, sb.ID, file); err != nil || fi.Name() != file || fi.Size != 4 {
		t.Errorf("stat %q, %v", fi.Name(), err)
	}
	if err := c.MoveFile(ctx, sb.ID, file, moved); err != nil {
		t.Error(err)
	}
	var got []string
	for fi, err := range c.ListFiles(ctx, sb.ID, dir) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fi.Name())
	}
	if !slices.Equal(got, []string{moved}) {
		t.Errorf("listed %q", got)
	}
	f, err := c.ReadFile(ctx, sb.ID, moved)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	for _, name := range []string{moved, dir} {
		if err := c.RemoveFile(ctx, sb.ID, name); err != nil {
			t.Error(err)
		}
	}
	if _, err := c.StatFile(ctx, sb.ID, dir); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("after the removal: %v", err)
	}
}
