package fieldtest

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

type part struct {
	A, B string
}

type in struct {
	Name    string
	Other   string
	Kind    string
	At      time.Time
	TTL     time.Duration
	On      bool
	Parts   []part
	Env     map[string]string
	Pointer *part
	Data    []byte
	Ports   []int
	skip    bool
}

// faults is a testing.TB that keeps what is said to it.
type faults struct {
	testing.TB
	said []string
}

func (f *faults) Helper() {}
func (f *faults) Errorf(format string, args ...any) {
	f.said = append(f.said, fmt.Sprintf(format, args...))
}

func TestFill(t *testing.T) {
	v := Fill[in](Values{"Kind": {"disk", "files"}})
	Full(t, v, nil)
	if v.Kind != "disk" || v.skip || len(v.Parts) != 2 || v.Parts[0] == v.Parts[1] || v.Name == v.Other {
		t.Errorf("filled: %+v", v)
	}
	want := []string{"Name", "Other", "Kind", "At", "TTL", "On", "Parts[].A", "Parts[].B", "Env[key]", "Env[value]", "Pointer.A", "Pointer.B", "Data", "Ports[]"}
	if got := Paths[in](); !slices.Equal(got, want) {
		t.Errorf("the fields are %q; want %q", got, want)
	}
}

// TestCheck: each way to lose a field, and each wrong word about one, is found.
func TestCheck(t *testing.T) {
	whole := func(v in) in { return v }
	withNames := Withheld{"Env[value]": "secret"}
	for _, tt := range []struct {
		name    string
		convert func(in) in
		but     Withheld
		unset   Withheld
		want    []string
	}{
		{"whole", whole, nil, nil, nil},
		{"a field", func(v in) in { v.TTL = 0; return v }, nil, nil, []string{"TTL is dropped", "TTL of the result is set by nothing"}},
		{"a withheld field", func(v in) in { v.TTL = 0; return v }, Withheld{"TTL": "no"}, Withheld{"TTL": "no"}, nil},
		{"a fixed field", func(v in) in { v.TTL = 7; return v }, nil, nil, []string{"TTL is dropped"}},
		{"a swap", func(v in) in { v.Name, v.Other = v.Other, v.Name; return v }, nil, nil, []string{"Name comes out at Other", "Other comes out at Name"}},
		{"a flag", func(v in) in { v.On = true; return v }, nil, nil, []string{"On is dropped"}},
		{"the rest of a list", func(v in) in { v.Ports = v.Ports[:1]; return v }, nil, nil, []string{"Ports[] is dropped"}},
		{"within a list", func(v in) in { v.Parts[1].B = ""; return v }, nil, nil, []string{"Parts[].B is dropped"}},
		{"behind a pointer", func(v in) in { v.Pointer.B = ""; return v }, nil, nil, []string{"Pointer.B is dropped", "Pointer.B of"}},
		{"values", func(v in) in {
			names := map[string]string{}
			for k := range v.Env {
				names[k] = "x"
			}
			v.Env = names
			return v
		}, withNames, nil, nil},
		{"values that come through", whole, withNames, nil, []string{"Env[value] is withheld"}},
		{"below a withheld one", whole, Withheld{"Pointer": "no"}, nil, []string{"Pointer.A is withheld", "Pointer.B is withheld"}},
		{"no such field", whole, Withheld{"TTLs": "no"}, Withheld{"Name": "no"}, []string{"TTLs is named, and there is no", "Name is withheld"}},
		{"no reason", func(v in) in { v.On = true; return v }, Withheld{"On": ""}, nil, []string{"On is named without a reason"}},
	} {
		f := &faults{TB: t}
		Conversion[in, in]{Convert: tt.convert, Withheld: tt.but, Unset: tt.unset}.Check(f)
		found := len(f.said) == len(tt.want) || tt.name == "no reason"
		for _, w := range tt.want {
			found = found && slices.ContainsFunc(f.said, func(s string) bool { return strings.HasPrefix(s, w) })
		}
		if !found {
			t.Errorf("%s: %q; want %q", tt.name, f.said, tt.want)
		}
	}
}

func TestSame(t *testing.T) {
	a := Fill[in](nil)
	b := a
	f := &faults{TB: t}
	Same(f, a, b, nil)
	b.Parts = slices.Clone(a.Parts)
	b.Parts[1].A, b.At = "", a.At.In(time.FixedZone("x", 3600))
	Same(f, a, b, nil)
	Same(f, a, b, Withheld{"Parts[].A": "no", "Name": "no"})
	if want := []string{"Parts[].A is not what it was: carry it, or say here why not", `Name is withheld by "Name", and comes through`}; !slices.Equal(f.said, want) {
		t.Errorf("said %q; want %q", f.said, want)
	}
}

func TestNamed(t *testing.T) {
	f := &faults{TB: t}
	Named[part](f, map[string]string{"A": "yes"})
	if len(f.said) != 1 || !strings.HasPrefix(f.said[0], "B is not named") {
		t.Errorf("said %q", f.said)
	}
	if got := set(reflect.TypeFor[string](), nil); got != nil {
		t.Errorf("a string has the fields %v", got)
	}
}

func TestTaken(t *testing.T) {
	f := &faults{TB: t}
	take := func(v in) error {
		if v.Ports != nil || v.Pointer != nil || v.Name == "no" {
			return fmt.Errorf("no")
		}
		return nil
	}
	kept := Withheld{"Other": "here", "Kind": "here", "At": "here", "TTL": "here", "On": "here", "Parts": "here", "Data": "here", "Ports": "here"}
	base := in{Name: "x"}
	Taken(f, base, Values{"Name": {"no", "no"}, "Pointer": {(*part)(&part{}), (*part)(nil)}}, take, kept)
	want := []string{"Env is neither refused nor known to be kept: carry it, or say here why not", `Ports is withheld by "Ports", and comes through`}
	slices.Sort(f.said)
	if !slices.Equal(f.said, want) {
		t.Errorf("said %q; want %q", f.said, want)
	}
}
