package inside

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

func TestFill(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a"), []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	pipe := filepath.Join(dir, "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	names, args := "", ""
	unpack := func(_ context.Context, c sandboxer.Cmd) (sandboxer.Exit, error) {
		args = strings.Join(c.Args, " ")
		for r := tar.NewReader(c.Stdin); ; {
			h, err := r.Next()
			if err == io.EOF {
				return sandboxer.Exit{}, nil
			}
			if err != nil {
				return sandboxer.Exit{}, err
			}
			names += " " + h.Name
		}
	}
	skipped, err := Fill(t.Context(), unpack, "/ws", "ci", dir)
	if err != nil || !strings.Contains(skipped, "pipe") || !strings.Contains(names, "a") || args != AgentPath+" untar --owner ci /ws" {
		t.Errorf("%s: unpacked%s, skipped %q, %v", args, names, skipped, err)
	}
	unread := func(_ context.Context, c sandboxer.Cmd) (sandboxer.Exit, error) {
		args = strings.Join(c.Args, " ")
		return sandboxer.Exit{}, nil
	}
	if _, err := Fill(t.Context(), unread, "/ws", "", dir); err != nil {
		t.Error(err)
	}
	if _, err := Fill(t.Context(), unread, "/ws", "", ""); err != nil || args != AgentPath+" untar /ws" {
		t.Errorf("%s: %v", args, err)
	}
	if _, err := Fill(t.Context(), unpack, "/ws", "", filepath.Join(dir, "nowhere")); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("%v; want an error of the kind Invalid", err)
	}
}

func TestCheckRepo(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for repo, want := range map[string]sandboxer.Kind{"": "", filepath.Dir(file): "", "here": sandboxer.Invalid, file: sandboxer.Invalid, file + "/none": sandboxer.Invalid} {
		if err := CheckRepo(sandboxer.Spec{Inputs: map[string]string{"repo": repo}}); sandboxer.KindOf(err) != want {
			t.Errorf("%q: %v; want an error of the kind %q", repo, err, want)
		}
	}
}

func TestRun(t *testing.T) {
	for said, kind := range map[string]sandboxer.Kind{
		"it is broken":                           sandboxer.Failed,
		"x: No space left on device":             sandboxer.Exhausted,
		strings.Repeat("x", 5000) + "\x1b]0;end": sandboxer.Failed,
	} {
		err := Run(t.Context(), func(_ context.Context, c sandboxer.Cmd) (sandboxer.Exit, error) {
			_, err := io.WriteString(c.Stderr, said)
			return sandboxer.Exit{Code: 3}, err
		}, "making it", sandboxer.Cmd{})
		if msg := sandboxer.Message(err); sandboxer.KindOf(err) != kind || !strings.HasPrefix(msg, "making it failed") || len(msg) > 1200 || strings.Contains(msg, "\x1b") {
			t.Errorf("%.50q: %v", said, err)
		}
	}
	wrong := errors.New("gone")
	if err := Run(t.Context(), func(context.Context, sandboxer.Cmd) (sandboxer.Exit, error) { return sandboxer.Exit{Code: 1}, wrong }, "x", sandboxer.Cmd{}); err != wrong {
		t.Errorf("%v; want %v", err, wrong)
	}
}
