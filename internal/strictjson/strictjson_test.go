package strictjson

import (
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
		strings.Repeat("[", 200):          "nested",
		`{"name":`:                        "EOF",
		`{"name":1}`:                      "cannot unmarshal",
	} {
		var d doc
		err := Decode([]byte(in), &d)
		if want == "" && (err != nil || d.Name != "a" || d.Deep != "b" || d.Plain != 1) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, %+v; want %q", in, err, d, want)
		}
	}
}
