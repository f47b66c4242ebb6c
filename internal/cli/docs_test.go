package cli

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestDocumented checks that docs/cli.md knows every command, flag, setting and exit
// code, and that every command explains itself.
func TestDocumented(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "cli.md"))
	if err != nil {
		t.Fatal(err)
	}
	doc := string(b)
	has := func(what, text string) {
		t.Helper()
		if !strings.Contains(doc, text) {
			t.Errorf("docs/cli.md does not mention %s %s", what, text)
		}
	}
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
			has("the flag of "+c.CommandPath(), "--"+fl.Name)
		})
		for _, sub := range c.Commands() {
			if c.HasParent() {
				if line := lineOf(doc, "`"+c.Name()+" "); !strings.Contains(line, sub.Name()) {
					t.Errorf("docs/cli.md does not mention %s", sub.CommandPath())
				}
			} else if lineOf(doc, "`"+sub.Name()) == "" {
				t.Errorf("docs/cli.md does not mention %s", sub.CommandPath())
			}
			walk(sub)
		}
	}
	walk(newCmdRoot(testFactory(t)))
	for _, d := range settingDefs() {
		has("the setting", "| `"+d.key+"` | `"+d.env()+"` |")
	}
	for kind, k := range kinds {
		if lineOf(doc, "| "+strconv.Itoa(k.exit)+" |") == "" {
			t.Errorf("docs/cli.md does not explain exit code %d (%s)", k.exit, kind)
		}
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
