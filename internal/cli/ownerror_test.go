package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestFileErrors: the system's reason decides on kind and hint.
func TestFileErrors(t *testing.T) {
	for errno, want := range map[error]sandboxer.Kind{
		syscall.ENOENT: sandboxer.NotFound, syscall.EACCES: sandboxer.Denied, syscall.EPERM: sandboxer.Denied, syscall.EROFS: sandboxer.Denied,
		syscall.ENOSPC: sandboxer.Exhausted, syscall.EDQUOT: sandboxer.Exhausted, syscall.EEXIST: sandboxer.Conflict,
		syscall.EISDIR: sandboxer.Invalid, syscall.ENOTDIR: sandboxer.Invalid, syscall.ENAMETOOLONG: sandboxer.Invalid,
	} {
		cause := fmt.Errorf("somewhere: %w", &fs.PathError{Op: "open", Path: "/f", Err: errno})
		for _, err := range []error{fileError(cause, "%s cannot be read", "/f"), ofSystem(cause)} {
			said := sentence(err)
			if sandboxer.KindOf(err) != want || sandboxer.HintOf(err) == "" || !strings.HasPrefix(said, "/f cannot be ") || strings.Count(said, errno.Error()) != 1 {
				t.Errorf("%v: %s, %q, hint %q; want %s", errno, sandboxer.KindOf(err), said, sandboxer.HintOf(err), want)
			}
		}
		if err := unreadable(cause, "x"); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%v of a file of settings: %s", errno, sandboxer.KindOf(err))
		}
	}
	ours := invalid("too large")
	if fileError(ours, "x") != ours || ofSystem(ours) != error(ours) {
		t.Error("an error of ours was changed")
	}
	if other := errors.New("x"); ofSystem(other) != other {
		t.Error("an error that is about no file was changed")
	}
	for path, want := range map[string]string{"d": "d", ".": "d", "/tmp/x": "d", "a/b": "d: b"} {
		if name, ok := fileIn("d", &fs.PathError{Op: "open", Path: path, Err: syscall.EACCES}); name != want || !ok {
			t.Errorf("%s: %q, %v; want %q", path, name, ok, want)
		}
	}
}

// TestMissingFiles: a command that is given a file that is not there says so in its own words.
func TestMissingFiles(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]sandboxer.Kind{
		"create --env-file /nosuch":               sandboxer.NotFound,
		"create --env-file " + dir:                sandboxer.Invalid,
		"create --env-file " + file + "/x":        sandboxer.Invalid,
		"create --input repo=./nosuch":            sandboxer.NotFound,
		"create --input repo=~/../../nosuch":      sandboxer.NotFound,
		"create --mount nosuch:/dst":              sandboxer.NotFound,
		"run --env-file /nosuch -- true":          sandboxer.NotFound,
		"exec x --env-file /nosuch -- true":       sandboxer.NotFound,
		"snapshot import /nosuch":                 sandboxer.NotFound,
		"extension new demo --dir " + file + "/x": sandboxer.Invalid,
		"create --config-dir /nosuch":             sandboxer.Invalid,
		"ls --tls-ca /nosuch --url https://h":     sandboxer.Invalid,
	} {
		root := newCmdRoot(testFactory(t))
		root.SetArgs(strings.Fields(line))
		err := root.ExecuteContext(t.Context())
		said := ""
		if err != nil {
			said = sentence(err)
		}
		if sandboxer.KindOf(err) != want || sandboxer.HintOf(err) == "" || strings.Count(said, "(") != 1 || strings.Contains(said, "open ") || strings.Contains(said, "stat ") {
			t.Errorf("%s: %s, %q, hint %q; want %s", line, sandboxer.KindOf(err), said, sandboxer.HintOf(err), want)
		}
	}
}
