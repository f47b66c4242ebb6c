package compattest

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

type inner struct {
	N int `json:"n,omitempty"`
}

type outer struct {
	inner
	At     time.Time        `json:"at,omitzero"`
	Some   []inner          `json:"some"`
	By     map[string]inner `json:"by,omitempty"`
	Data   []byte
	Again  *outer `json:"again,omitempty"`
	Text   string `json:"text,string"`
	Secret string `json:"-"`
	hidden string
}

func TestShape(t *testing.T) {
	got := Shape("of/1", outer{hidden: "not stored"})
	want := strings.Join([]string{"format of/1", "outer.n? int", "outer.at? time", "outer.some[].n? int", "outer.by?{string}.n? int",
		"outer.Data bytes", "outer.again? as above", "outer.text?string string", ""}, "\n")
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestChanges(t *testing.T) {
	if got, want := changes("a int\nb string\n", "a int\nb int\nc int\n"), "  - b string\n  + b int\n  + c int\n"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if got := changes("a\nb\n", "b\na\n"); !strings.Contains(got, "order") {
		t.Error(got)
	}
}

// failing is a test that fails.
type failing struct {
	testing.TB
	said []string
}

func (f *failing) Helper()                   {}
func (f *failing) Errorf(s string, a ...any) { f.said = append(f.said, s) }

func TestCheckForm(t *testing.T) {
	t.Setenv(updateForms, "")
	f := &failing{TB: t}
	CheckForm(f, "no such form", "a int")
	if len(f.said) != 1 || !strings.Contains(f.said[0], "scripts/fixture.sh") {
		t.Errorf("a form without its listing: %q", f.said)
	}
}

func TestMissing(t *testing.T) {
	for _, tt := range []struct{ want, have, lost string }{
		{`{"a":[1,{"b":"x"}],"c":true}`, `{"a":[1,{"b":"x","new":0}],"c":true,"d":1}`, ""},
		{`{"a":[1,2]}`, `{"a":[1]}`, "it.a is lost"},
		{`{"a":{"b":1}}`, `{}`, "it.a is lost"},
		{`{"a":[{"b":1}]}`, `{"a":[{"b":2}]}`, "it.a[0].b is 2; want 1"},
		{`{"a":[{"old":1}]}`, `{"a":[{}]}`, ""},
	} {
		if got := missing(decoded(t, []byte(tt.want)), decoded(t, []byte(tt.have)), "it", []string{"old"}); got != tt.lost {
			t.Errorf("%s in %s: %q; want %q", tt.want, tt.have, got, tt.lost)
		}
	}
}

func TestUnset(t *testing.T) {
	full := outer{inner: inner{1}, At: time.Unix(1, 0), Some: []inner{{1}}, By: map[string]inner{"a": {1}}, Data: []byte("d"), Text: "t"}
	again := full
	again.Again = &full
	if got := unset(reflect.ValueOf(again), "it"); got != "it.Again.Again" {
		t.Errorf("%q is not set", got)
	}
	again.Some[0].N = 0
	if got := unset(reflect.ValueOf(again), "it"); got != "it.Some[]" {
		t.Errorf("%q is not set", got)
	}
}
