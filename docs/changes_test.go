package docs_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

var sentenceEnd = regexp.MustCompile("[.!?][`\"”)]*(?: |$)")

// checkChange returns what is wrong with a file of changes/unreleased, whose form
// changes/README.md describes.
func checkChange(text string) error {
	head, rest, _ := strings.Cut(text, "\n")
	if !slices.Contains([]string{"Added", "Changed", "Fixed", "Security"}, head) {
		return fmt.Errorf("the first line is %q, not Added, Changed, Fixed or Security", head)
	}
	body, ok := strings.CutPrefix(rest, "\n")
	if !ok {
		return errors.New("the second line is not empty")
	}
	if !strings.HasSuffix(body, "\n") {
		return errors.New("the last line has no end")
	}
	body = strings.TrimSuffix(body, "\n")
	for _, line := range strings.Split(body, "\n") {
		if line == "" || line != strings.TrimSpace(line) || strings.HasPrefix(line, "- ") || strings.HasPrefix(line, "#") {
			return fmt.Errorf("the line %q is not one of plain sentences", line)
		}
	}
	one := strings.ReplaceAll(body, "\n", " ")
	ends := sentenceEnd.FindAllStringIndex(one, -1)
	if len(ends) == 0 || ends[len(ends)-1][1] != len(one) {
		return errors.New("the text does not end with a sentence")
	}
	if len(ends) > 3 {
		return fmt.Errorf("the text has %d sentences, at most three are allowed", len(ends))
	}
	return nil
}

func TestUnreleasedChanges(t *testing.T) {
	names, err := filepath.Glob("../changes/unreleased/*.md") // none without the directory
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		text := read(t, name)
		if err := checkChange(text); err != nil {
			t.Errorf("%s: %v (changes/README.md describes the form)", name, err)
		}
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join("..", m[1])); err != nil {
				t.Errorf("%s links to %s, as from CHANGELOG.md: %v", name, m[1], err)
			}
		}
	}
}

func TestFormOfChanges(t *testing.T) {
	for _, good := range []string{
		"Fixed\n\n`cp` keeps modes.\n",
		"Security\n\nOne thing. Another\nthing of `ext.local`. See [it](docs/how-to/ports.md).\n",
	} {
		if err := checkChange(good); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
	for _, bad := range []string{
		"", "\n", "Fixed\n", "Fixed\n\n", "fixed\n\nA thing.\n", "Removed\n\nA thing.\n", "Fixed\nA thing.\n", "Fixed\n\nA thing.",
		"Fixed\n\nA thing\n", "Fixed\n\n\nA thing.\n", "Fixed\n\n- A thing.\n", "Fixed\n\nOne.\n\nTwo.\n", "Fixed\n\nOne. Two. Three. Four.\n",
	} {
		if checkChange(bad) == nil {
			t.Errorf("%q has the form", bad)
		}
	}
}

// TestMakeChangelog: a release puts the changes above the last one, and removes their files.
func TestMakeChangelog(t *testing.T) {
	for _, tool := range []string{"sh", "awk", "git"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	dir := t.TempDir()
	run := func(args ...string) (string, error) {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		for _, v := range os.Environ() {
			if !strings.HasPrefix(v, "GIT_") {
				cmd.Env = append(cmd.Env, v)
			}
		}
		cmd.Env = append(cmd.Env, "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	put := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	git := func(args ...string) {
		t.Helper()
		if out, err := run(append([]string{"git"}, args...)...); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	script := filepath.Join("scripts", "changelog.sh")
	put(script, read(t, filepath.Join("..", script)))
	before := "# Changelog\n\nAn intro.\n\n## 0.1.0 (2026-11-28)\n\n### Added\n\n- All.\n"
	put("CHANGELOG.md", before)
	refused := func(version, want string) {
		t.Helper()
		out, err := run("sh", script, version)
		if err == nil || !strings.Contains(out, want) {
			t.Errorf("version %q: %v, %q instead of %q", version, err, out, want)
		}
		if got := read(t, filepath.Join(dir, "CHANGELOG.md")); got != before {
			t.Errorf("version %q was refused and changed CHANGELOG.md:\n%s", version, got)
		}
	}
	refused("0.2.0", "has no changes")
	put("changes/unreleased/notes.txt", "not a change\n")
	refused("0.2.0", "has no changes")

	put("changes/unreleased/b.md", "Fixed\n\nSecond fix.\nIt has `a\\nb` & two lines.\n")
	put("changes/unreleased/a.md", "Fixed\n\nFirst fix.\n")
	put("changes/unreleased/c.md", "Security\n\nA hole is closed.\n")
	put("changes/unreleased/z.md", "Added\n\nA feature.\n")
	git("init", "-q")
	git("add", ".")
	git("-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "changes")

	refused("", "give a version")
	refused("next", "give a version")
	refused("0.1.0", "already has a section 0.1.0")
	put("changes/unreleased/d.md", "Removed\n\nA thing.\n")
	refused("0.2.0", "d.md: the first line must be")
	put("changes/unreleased/d.md", "Added\n\nA file that git does not know.\n")
	refused("0.2.0", "d.md")
	if err := os.Remove(filepath.Join(dir, "changes/unreleased/d.md")); err != nil {
		t.Fatal(err)
	}

	first := time.Now().UTC().Format(time.DateOnly)
	if out, err := run("sh", script, "0.2.0"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	expect := func(day string) string {
		section := "## 0.2.0 (" + day + ")\n\n### Added\n\n- A feature.\n\n### Fixed\n\n- First fix.\n- Second fix.\n  It has `a\\nb` & two lines.\n\n### Security\n\n- A hole is closed.\n\n"
		return strings.Replace(before, "## 0.1.0", section+"## 0.1.0", 1)
	}
	// The day may end while the script runs.
	got, last := read(t, filepath.Join(dir, "CHANGELOG.md")), time.Now().UTC().Format(time.DateOnly)
	if got != expect(first) && got != expect(last) {
		t.Errorf("CHANGELOG.md is now:\n%s\ninstead of:\n%s", got, expect(last))
	}
	left, err := os.ReadDir(filepath.Join(dir, "changes/unreleased"))
	if err != nil || len(left) != 1 || left[0].Name() != "notes.txt" {
		t.Errorf("changes/unreleased has %v, %v", left, err)
	}
	if out, err := run("git", "status", "--porcelain", "--", "changes"); err != nil || strings.Count(out, "D  ") != 4 {
		t.Errorf("git status: %v\n%s", err, out)
	}
}
