package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sand-boxer/sandboxer"
)

// TestDocumented checks that the reference pages have every command, flag, setting, kind of error and exit code,
// and that every command has a description.
func TestDocumented(t *testing.T) {
	page := func(name string) string {
		b, err := os.ReadFile(filepath.Join("..", "..", "docs", "reference", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	doc := page("cli.md")
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Short == "" {
			t.Errorf("%s has no description", c.CommandPath())
		}
		c.LocalFlags().VisitAll(func(fl *pflag.Flag) {
			if fl.Hidden {
				return // between two processes of this program
			}
			if fl.Usage == "" {
				t.Errorf("%s --%s has no description", c.CommandPath(), fl.Name)
			}
			if !strings.Contains(doc, "--"+fl.Name) {
				t.Errorf("docs/reference/cli.md does not mention the flag --%s of %s", fl.Name, c.CommandPath())
			}
		})
		for _, sub := range c.Commands() {
			if c.HasParent() {
				if line := lineOf(doc, "`"+c.Name()+" "); !strings.Contains(line, sub.Name()) {
					t.Errorf("docs/reference/cli.md does not mention %s", sub.CommandPath())
				}
			} else if lineOf(doc, "`"+sub.Name()) == "" {
				t.Errorf("docs/reference/cli.md does not mention %s", sub.CommandPath())
			}
			walk(sub)
		}
	}
	walk(newCmdRoot(testFactory(t)))
	settings := page("settings.md")
	for _, d := range settingDefs() {
		if !strings.Contains(settings, "\n| `"+d.key+"` | `"+d.env()+"` |") {
			t.Errorf("docs/reference/settings.md has no row for the setting %s, %s", d.key, d.env())
		}
	}
	failures := page("errors.md")
	for _, kind := range sandboxer.Kinds() {
		k := kinds[kind]
		if row := fmt.Sprintf("\n| `%s` | %d | %d |", kind, k.exit, k.status); !strings.Contains(failures, row) {
			t.Errorf("docs/reference/errors.md has no row that begins with %q", row[1:])
		}
		if !strings.Contains(failures, fmt.Sprintf("\n| %d | ", k.exit)) {
			t.Errorf("docs/reference/errors.md does not explain exit code %d (%s)", k.exit, kind)
		}
	}
	if n := strings.Count(failures, "\n| `"); n != len(sandboxer.Kinds()) {
		t.Errorf("docs/reference/errors.md has %d rows of kinds; there are %d kinds", n, len(sandboxer.Kinds()))
	}
}

// lineOf returns the lines that hold text.
func lineOf(doc, text string) string {
	var out []string
	for line := range strings.Lines(doc) {
		if strings.Contains(line, text) {
			out = append(out, line)
		}
	}
	return strings.Join(out, "")
}
