package buildtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Inside calls run for each line of docs/reference/what-runs-inside.md, and compares the exit code with what the page says of
// the backend. Lines whose program this machine does not have are skipped.
func Inside(t *testing.T, backend string, run func(t *testing.T, script string) (code int, output string)) {
	t.Helper()
	mod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(filepath.Dir(strings.TrimSpace(string(mod))), "docs/reference/what-runs-inside.md"))
	if err != nil {
		t.Fatal(err)
	}
	column, lines := -1, 0
	for line := range strings.Lines(string(data)) {
		cells := cellsOf(line)
		if column < 0 {
			if len(cells) > 2 && cells[1] == "tried with" {
				column = slices.Index(cells, "`"+backend+"`")
			}
			continue
		}
		if len(cells) == 0 {
			break
		}
		script := strings.Trim(cells[1], "`")
		if script == "---" {
			continue
		}
		lines++
		t.Run(cells[0], func(t *testing.T) {
			for _, name := range []string{"python3", "npm", "java", "sqlite3", "redis-server", "initdb", "strace", "bwrap", "iptables", "dockerd", "sudo", "chromium"} {
				if strings.Contains(script, name) && !here(name) {
					t.Skipf("this machine has no %s", name)
				}
			}
			code, output := run(t, script)
			switch said := cells[column]; {
			case said == "works" && code != 0, said == "does not" && code == 0:
				t.Errorf("the page says %q, and it ends with %d:\n%s", said, code, output)
			case code == 127:
				t.Errorf("a program is missing:\n%s", output)
			case said != "works" && said != "does not":
				t.Errorf("the page says %q", said)
			}
		})
	}
	if lines == 0 {
		t.Fatalf("the page has no column %q", backend)
	}
}

// cellsOf splits a line of a table.
func cellsOf(line string) (cells []string) {
	line = strings.TrimSpace(line)
	if !strings.HasPrefix(line, "|") {
		return nil
	}
	line = strings.ReplaceAll(strings.Trim(line, "|"), `\|`, "\x00")
	for c := range strings.SplitSeq(line, "|") {
		cells = append(cells, strings.ReplaceAll(strings.TrimSpace(c), "\x00", "|"))
	}
	return cells
}

// here reports whether sandboxes that see this machine's /usr find the program.
func here(name string) bool {
	for _, pattern := range []string{"/usr/bin/", "/usr/sbin/", "/usr/local/bin/", "/usr/lib/postgresql/*/bin/"} {
		if found, _ := filepath.Glob(pattern + name); len(found) > 0 {
			return true
		}
	}
	return false
}
