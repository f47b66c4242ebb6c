package strictjson

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"
)

type embedded struct {
	Deep string `json:"deep"`
}

type doc struct {
	embedded
	Name  string         `json:"name"`
	List  []embedded     `json:"list"`
	By    map[string]doc `json:"by"`
	At    time.Time      `json:"at"`
	Plain int
	Never string `json:"-"`
}

func TestDecode(t *testing.T) {
	for in, want := range map[string]string{
		`{"name":"a","deep":"b","list":[{"deep":"c"}],"by":{"Any":{"name":"x"}},"at":"2020-01-01T00:00:00Z","Plain":1}`: "",
		`{"Name":"a"}`:                    `unknown field "Name"`,
		`{"name":"a","name":"b"}`:         `"name" is given twice`,
		`{"name":"a","n\u0061me":"b"}`:    `"name" is given twice`,
		`{"list":[{"Deep":"c"}]}`:         `unknown field "Deep"`,
		`{"by":{"a":{"list":[{"x":1}]}}}`: `unknown field "x"`,
		`{"by":{"a":{},"a":{}}}`:          `"a" is given twice`,
		`{"plain":1}`:                     `unknown field "plain"`,
		`{"Never":"x"}`:                   `unknown field "Never"`,
		`{} {}`:                           "follows",
		"{\"name\":\"\xff\"}":             "UTF-8",
		strings.Repeat("[", 200) + strings.Repeat("]", 200): "nested",
		`{"name":`:   "EOF",
		`{"name":1}`: "cannot unmarshal",
	} {
		var d doc
		err := Decode([]byte(in), &d)
		if want == "" && (err != nil || d.Name != "a" || d.Deep != "b" || d.Plain != 1) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, %+v; want %q", in, err, d, want)
		}
	}
}

// What is stored may have been written by a newer version, but means one thing only.
func TestDecodeStored(t *testing.T) {
	for in, want := range map[string]string{
		`{"name":"a","later":{"x":[1],"Name":2},"list":[{"deep":"c","more":1},{"more":2}]}`: "later more",
		`{"name":"a","by":{"later":{"then":1}}}`:                                            "then",
		`{"name":"a","1":0,"2":0,"3":0,"4":0,"5":0,"6":0,"7":0,"8":0,"9":0,"10":0,"11":0}`:  "1 2 3 4 5 6 7 8 9 10",
		`{"name":"a","Name":"b"}`:                 `!"name" is written "Name"`,
		`{"name":"a","plain":1}`:                  `!"Plain" is written "plain"`,
		`{"name":"a","name":"b"}`:                 `!"name" is given twice`,
		`{"name":"a","later":1,"later":2}`:        `!"later" is given twice`,
		`{"name":"a","later":{"x":1,"\u0078":2}}`: `!"x" is given twice`,
		`{"name":"a","list":[{"DEEP":"x"}]}`:      `!"deep" is written "DEEP"`,
		`{"name":"a","list":[{"deep":"x"}]} {}`:   `!follows`,
		`{"name":"a","later":` + deep(200) + `}`:  `!nested`,
		`{"name":"a","li\u017ft":[{"deep":"x"}]}`: `!"list" is written`,
		`{"name":"a","later":"` + "\xff" + `"}`:   `!UTF-8`,
		`{"name":"a","Never":"x"}`:                "Never",
	} {
		var d doc
		newer, err := DecodeStored([]byte(in), &d)
		if want, bad := strings.CutPrefix(want, "!"); bad {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%.80s: %v; want %q", in, err, want)
			}
		} else if err != nil || strings.Join(newer, " ") != want || d.Name != "a" || d.Never != "" {
			t.Errorf("%.80s: %q, %v, %+v; want %q", in, newer, err, d, want)
		}
	}
}

func deep(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }

// twice reports, with a decoder of tokens, whether an object has a name twice.
func twice(dec *json.Decoder) bool {
	token, err := dec.Token()
	if err != nil {
		return false
	}
	found := false
	switch token {
	case json.Delim('['):
		for dec.More() {
			found = twice(dec) || found
		}
		_, _ = dec.Token()
	case json.Delim('{'):
		seen := map[string]bool{}
		for dec.More() {
			name, _ := dec.Token()
			found = found || seen[name.(string)]
			seen[name.(string)] = true
			found = twice(dec) || found
		}
		_, _ = dec.Token()
	}
	return found
}

// FuzzCheck: the way through a document agrees with the library's tokens.
func FuzzCheck(f *testing.F) {
	for _, s := range []string{`{"a":1,"a":2}`, `[{"a":[1,2,{"b":null}]}, "x\\\"y", -1.5e9,true ]`, `{"a":{"a":1},"b":{"a":1}}`, "{ \"\\u0061\" : \"}\" ,\n\"a\":[] }", `"a" "b"`, `{"a\\":1,"a\\":2}`, `1`, ``, ` [ ] `} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		err := Check(data)
		if !json.Valid(data) {
			if err == nil {
				t.Fatal("what is no JSON passes")
			}
			return
		}
		dec := json.NewDecoder(bytes.NewReader(data))
		want := twice(dec)
		if _, end := dec.Token(); end != io.EOF {
			t.Fatal("the reference stopped early")
		}
		switch {
		case err == nil && want:
			t.Errorf("%q passes", data)
		case err != nil && !want && !strings.Contains(err.Error(), "UTF-8") && !strings.Contains(err.Error(), "nested"):
			t.Errorf("%q: %v", data, err)
		}
		var d doc
		_ = Decode(data, &d) // does not panic
	})
}

// TestLearnedOnce: what is known of a type is learned once, not with each record: that took ten
// times as long as the record.
func TestLearnedOnce(t *testing.T) {
	type inner struct{ A, B, C, D, E, F, G, H string }
	type record struct {
		A, B, C, D, E, F, G, H inner
		I, J                   []inner
	}
	data, err := json.Marshal(record{I: make([]inner, 2)})
	if err != nil {
		t.Fatal(err)
	}
	allocs := func(decode func(*record) error) float64 {
		return testing.AllocsPerRun(20, func() {
			if err := decode(new(record)); err != nil {
				t.Fatal(err)
			}
		})
	}
	plain := allocs(func(r *record) error { return json.Unmarshal(data, r) })
	strict := allocs(func(r *record) error { _, err := DecodeStored(data, r); return err })
	if strict > plain+10 {
		t.Errorf("a record takes %.0f allocations; encoding/json alone %.0f", strict, plain)
	}
}

// BenchmarkDecode is a document of many small objects, as a list of files is.
func BenchmarkDecode(b *testing.B) {
	data := []byte(`{"list":[` + strings.Repeat(`{"deep":"0123456789"},`, 100_000) + `{"deep":"x"}]}`)
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		var d doc
		if err := Decode(data, &d); err != nil {
			b.Fatal(err)
		}
	}
}
