package compattest

import (
	"encoding"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// updateForms is the environment variable with which CheckForm writes the listings.
const updateForms = "SANDBOXER_UPDATE_FORMS"

// CheckForm compares a stored form with its listing, testdata/forms/<name>, line by line, and
// fails when it differs. The text is whatever describes the form: Shape for
// JSON, the statements of a schema, the names of files.
//
// With SANDBOXER_UPDATE_FORMS set it writes the listing instead.
func CheckForm(t testing.TB, name, text string) {
	t.Helper()
	text = strings.TrimSpace(text) + "\n"
	had, err := testdata.ReadFile("testdata/forms/" + name)
	if err == nil && string(had) == text {
		return
	}
	if os.Getenv(updateForms) != "" {
		dir, err := moduleDir()
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "internal/compattest/testdata/forms", name), []byte(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("wrote the listing of %s: is there a fixture of the commit before (scripts/fixture.sh)?", name)
		return
	}
	t.Errorf("the stored form of %s changed:\n%s\n"+
		"What former builds stored must stay readable, and builds before must not take it for theirs:\n"+
		"raise the format unless they read it well, add a fixture of the commit before the change with\n"+
		"    scripts/fixture.sh COMMIT\n"+
		"and update the listing with\n"+
		"    %s=1 go test -run TestFormOf ./...", name, changes(string(had), text), updateForms)
}

// moduleDir is the directory of go.mod above the test's.
func moduleDir() (string, error) {
	dir, err := os.Getwd()
	for err == nil {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", os.ErrNotExist
		}
		dir = filepath.Dir(dir)
	}
	return "", err
}

// changes lists the lines that only one of two texts has.
func changes(had, has string) string {
	var b strings.Builder
	only := func(mark, of, than string) {
		there := map[string]bool{}
		for line := range strings.Lines(than) {
			there[line] = true
		}
		for line := range strings.Lines(of) {
			if !there[line] {
				b.WriteString(mark + line)
			}
		}
	}
	only("  - ", had, has)
	only("  + ", has, had)
	if b.Len() == 0 {
		return "  the order of its lines\n"
	}
	return b.String()
}

// Shape describes how encoding/json writes the types of values: one line for each field with
// its path, its type and whether it may be absent. format, if the form has one, is the mark of
// its values.
func Shape(format string, values ...any) string {
	var b strings.Builder
	if format != "" {
		fmt.Fprintf(&b, "format %s\n", format)
	}
	for _, v := range values {
		t := reflect.TypeOf(v)
		shape(&b, t.Name(), t, nil)
	}
	return b.String()
}

func shape(b *strings.Builder, at string, t reflect.Type, in []reflect.Type) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t == reflect.TypeFor[time.Time]():
		fmt.Fprintf(b, "%s time\n", at)
		return
	case implements(t, reflect.TypeFor[json.Marshaler](), reflect.TypeFor[encoding.TextMarshaler]()):
		fmt.Fprintf(b, "%s %s\n", at, t)
		return
	}
	for _, outer := range in {
		if outer == t {
			fmt.Fprintf(b, "%s as above\n", at)
			return
		}
	}
	in = append(in[:len(in):len(in)], t)
	switch t.Kind() {
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
			if f.Tag.Get("json") == "-" || !f.IsExported() && !f.Anonymous {
				continue
			}
			if f.Anonymous && name == "" {
				shape(b, at, f.Type, in)
				continue
			}
			if name == "" {
				name = f.Name
			}
			if options != "" {
				options = "?" + strings.TrimPrefix(strings.TrimPrefix(options, "omitempty"), "omitzero")
			}
			shape(b, at+"."+name+options, f.Type, in)
		}
	case reflect.Slice, reflect.Array:
		if t.Elem().Kind() == reflect.Uint8 {
			fmt.Fprintf(b, "%s bytes\n", at)
			return
		}
		shape(b, at+"[]", t.Elem(), in)
	case reflect.Map:
		shape(b, at+"{"+t.Key().Kind().String()+"}", t.Elem(), in)
	default:
		fmt.Fprintf(b, "%s %s\n", at, t.Kind())
	}
}

func implements(t reflect.Type, any ...reflect.Type) bool {
	for _, i := range any {
		if t.Implements(i) || reflect.PointerTo(t).Implements(i) {
			return true
		}
	}
	return false
}
