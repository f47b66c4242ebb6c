package catalog

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestDocs holds the guides to the code: every field has its line, every example
// loads, and every message shown is the message given.
func TestDocs(t *testing.T) {
	for _, d := range []struct {
		dir   string
		pages []string
		form  reflect.Type
	}{
		{"profiles", []string{"reference/profiles.md", "how-to/write-a-profile.md"}, reflect.TypeFor[profileForm]()},
		{"extensions", []string{"reference/extensions.md", "reference/process.md"}, reflect.TypeFor[extensionForm]()},
	} {
		text := ""
		for _, page := range d.pages {
			data, err := os.ReadFile("../../docs/" + page)
			if err != nil {
				t.Fatal(err)
			}
			text += string(data)
		}
		for _, f := range fieldsOf(d.form) {
			if !strings.Contains(text, "\n| `"+f.name+"` |") {
				t.Errorf("%s have no line for %q", d.pages, f.name)
			}
		}
		blocks := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```\n(?:\n```(?:text|console)\n(?:\\$ [^\n]*\n)?(.*?)^```\n)?").FindAllStringSubmatch(text, -1)
		if len(blocks) == 0 {
			t.Errorf("%s have no example", d.pages)
		}
		for _, b := range blocks {
			name := d.dir + "/" + regexp.MustCompile(`(?m)^id: (\S+)`).FindStringSubmatch(b[1])[1] + ".yaml"
			got := ""
			if _, err := loadOver(t, sandboxer.Builtin, map[string]string{name: b[1]}, append(adapters(), processStandIn(nil))...); err != nil {
				got = err.Error() + "\n"
			}
			if got != b[2] {
				t.Errorf("%s: %s gives\n%s\nthe page shows\n%s", d.pages, name, got, b[2])
			}
		}
	}
}

// TestDocsTags holds the table for authors to the tags that are read.
func TestDocsTags(t *testing.T) {
	data, err := os.ReadFile("../../docs/reference/extensions.md")
	if err != nil {
		t.Fatal(err)
	}
	for name := range formats {
		if name == "extension" || name == "profile" || name == "handler" {
			continue // not for settings
		}
		if !strings.Contains(string(data), "`"+name+"`") {
			t.Errorf("docs/reference/extensions.md does not name the format %q", name)
		}
	}
}
