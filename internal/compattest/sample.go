package compattest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// CheckSamples tests read, which decodes a stored form as the product does, with every sample
// of it that is kept in testdata/samples/<name>, oldest first: read must accept each, and keep all its
// fields, except those named in gone, which only former versions had. The
// last one must be equal to is, a value of today's form whose fields are all set.
//
// With SANDBOXER_UPDATE_FORMS set it adds is if that differs. Former samples
// stay unchanged for as long as they are to be read.
func CheckSamples(t testing.TB, name string, is any, read func([]byte) (any, error), gone ...string) {
	t.Helper()
	if at := unset(reflect.ValueOf(is), "it"); at != "" {
		t.Errorf("the sample of %s leaves out %s", name, at)
	}
	now, err := json.MarshalIndent(is, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	now = append(now, '\n')
	dir := "testdata/samples/" + name
	files, _ := testdata.ReadDir(dir)
	var last []byte
	for _, f := range files {
		if last, err = testdata.ReadFile(dir + "/" + f.Name()); err != nil {
			t.Fatal(err)
		}
		v, err := read(last)
		if err != nil {
			t.Errorf("%s/%s cannot be read: %v", name, f.Name(), err)
			continue
		}
		again, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		if lost := missing(decoded(t, last), decoded(t, again), "it", gone); lost != "" {
			t.Errorf("%s/%s: %s", name, f.Name(), lost)
		}
	}
	if bytes.Equal(last, now) {
		return
	}
	if os.Getenv(updateForms) == "" {
		t.Errorf("the last sample of %s is not what is stored today: add one with %s=1 go test -run TestFormOf ./...", name, updateForms)
		return
	}
	module, err := moduleDir()
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(module, "internal/compattest", dir)
	err = os.MkdirAll(to, 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(to, fmt.Sprintf("%02d.json", len(files)+1)), now, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func decoded(t testing.TB, data []byte) (v any) {
	t.Helper()
	if err := strictjson.Decode(data, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// missing says which parts of want, which was decoded from JSON, are not in have, except fields named in gone.
func missing(want, have any, at string, gone []string) string {
	switch want := want.(type) {
	case map[string]any:
		h, ok := have.(map[string]any)
		if !ok {
			return at + " is lost"
		}
		for k, v := range want {
			if slices.Contains(gone, k) {
				continue
			}
			if lost := missing(v, h[k], at+"."+k, gone); lost != "" {
				return lost
			}
		}
	case []any:
		h, ok := have.([]any)
		if !ok || len(h) != len(want) {
			return at + " is lost"
		}
		for i, v := range want {
			if lost := missing(v, h[i], fmt.Sprintf("%s[%d]", at, i), gone); lost != "" {
				return lost
			}
		}
	default:
		if want != have {
			return fmt.Sprintf("%s is %v; want %v", at, have, want)
		}
	}
	return ""
}

// unset names a field within v that is not set; "" if there is none.
func unset(v reflect.Value, at string) string {
	if v.Kind() == reflect.Invalid || v.IsZero() {
		return at
	}
	switch v.Kind() {
	case reflect.Pointer:
		return unset(v.Elem(), at)
	case reflect.Slice, reflect.Array:
		if v.Len() == 0 {
			return at
		}
		return unset(v.Index(0), at+"[]")
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Type().Field(i)
			if f.Tag.Get("json") == "-" || !f.IsExported() {
				continue
			}
			if at := unset(v.Field(i), at+"."+f.Name); at != "" {
				return at
			}
		}
	}
	return ""
}
