package sandboxer

import (
	"math"
	"reflect"
	"strings"
	"testing"
)

// TestLimits: every field is listed, none can be negative or beyond every machine, and
// what is left out bounds nothing.
func TestLimits(t *testing.T) {
	v := reflect.TypeFor[Limits]()
	if n := len((Limits{}).Each()); n != v.NumField() {
		t.Fatalf("Each lists %d of %d fields", n, v.NumField())
	}
	for i, f := range (Limits{}).Each() {
		field := v.Field(i)
		if name, _, _ := strings.Cut(field.Tag.Get("json"), ","); name != f.Name {
			t.Errorf("%s is listed as %s", name, f.Name)
		}
		set := func(n int64) (l Limits) {
			reflect.ValueOf(&l).Elem().Field(i).SetInt(n)
			return l
		}
		for _, n := range []int64{0, 1, f.Max} {
			if err := set(n).Check(); err != nil {
				t.Errorf("%s=%d: %v", f.Name, n, err)
			}
		}
		// Among them those with which a quota in microseconds overflows.
		for _, n := range []int64{-1, f.Max + 1, 92233720368547758, 184467440737095, math.MaxInt64, math.MinInt64} {
			if n > 0 && n <= f.Max {
				continue
			}
			if err := set(n).Check(); KindOf(err) != Invalid || !strings.Contains(err.Error(), f.Name) {
				t.Errorf("%s=%d: %v", f.Name, n, err)
			}
		}
		if err := set(2).Within(set(1), "it"); KindOf(err) != Invalid {
			t.Errorf("%s=2 is within 1: %v", f.Name, err)
		}
		for _, most := range []Limits{set(2), set(3), {}} {
			if err := set(2).Within(most, "it"); err != nil {
				t.Errorf("%s=2 within %+v: %v", f.Name, most, err)
			}
		}
		if got := (Limits{}).Or(set(7)); got != set(7) {
			t.Errorf("nothing or %+v is %+v", set(7), got)
		}
		if got := set(5).Or(set(7)); got != set(5) {
			t.Errorf("5 or 7 is %+v", got)
		}
	}
}
