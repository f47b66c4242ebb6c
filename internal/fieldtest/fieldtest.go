// Package fieldtest tests that conversions are complete: every input field appears in the output, field by
// field, or is named as withheld with the reason. So a field that is added and forgotten on
// its way fails a test where it is forgotten.
//
// A field is named by its path: "Spec.Limits.PIDs", "Mounts[].Source" for a field of a list's
// elements, "Ports[]" for the elements, "Env[key]" and "Env[value]" for a map. Only
// exported fields count.
package fieldtest

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// Withheld are fields that are not converted, each with the reason. A path stands for
// everything below it as well. A field that is converted after all, or does not exist, fails the
// test as a forgotten one does.
type Withheld map[string]string

// Values are two values for each field that cannot have just any. A path may end in
// a map or a list; the value is then the whole map or list.
type Values map[string][2]any

// Fill returns a T with every field set: no two to the same, and lists with two elements.
func Fill[T any](values Values) T {
	var v T
	f := filler{values: values, used: map[string]bool{}}
	f.fill(reflect.ValueOf(&v).Elem(), "")
	return v
}

// A Conversion is a conversion from an In to an Out.
type Conversion[In, Out any] struct {
	Convert  func(In) Out
	Values   Values
	Withheld Withheld
	// Unset are fields of an Out that an In does not set, each with the reason.
	Unset Withheld
}

// Check converts a filled In, and one more for each of its fields with that field changed. It
// fails for a field whose change shows nowhere in the result, or elsewhere than in the
// field of its name, and for a field of the result that is not set.
func (c Conversion[In, Out]) Check(t testing.TB) {
	t.Helper()
	used := map[string]bool{}
	build := func(change string) (map[string]string, []string) {
		var in In
		f := filler{values: c.Values, change: change, used: used}
		f.fill(reflect.ValueOf(&in).Elem(), "")
		out := reflect.ValueOf(c.Convert(in))
		return leaves(out), f.paths
	}
	before, paths := build("")
	for path := range c.Values {
		if !used[path] {
			t.Errorf("a value is given for %s, which is no field", path)
		}
	}
	names := map[string]bool{}
	for at := range before {
		names[plain(at)] = true
	}
	carried := map[string]bool{}
	for _, path := range paths {
		after, _ := build(path)
		var at []string
		for _, where := range slices.Sorted(maps.Keys(merged(before, after))) {
			if before[where] != after[where] {
				at = append(at, where)
			}
		}
		carried[path] = len(at) > 0
		if name := plain(path); len(at) > 0 && names[name] && !slices.ContainsFunc(at, func(where string) bool { return plain(where) == name }) {
			t.Errorf("%s comes out at %s, not at its own name", path, strings.Join(at, ", "))
		}
	}
	judge(t, "is dropped", carried, c.Withheld)
	judge(t, "of the result is set by nothing", set(reflect.TypeFor[Out](), before), c.Unset)
}

// Same fails for each field of in that differs in out.
func Same[T any](t testing.TB, in, out T, withheld Withheld) {
	t.Helper()
	a, b := leaves(reflect.ValueOf(in)), leaves(reflect.ValueOf(out))
	same := map[string]bool{}
	for at := range merged(a, b) {
		path := general(at)
		if was, ok := same[path]; !ok || was {
			same[path] = a[at] == b[at]
		}
	}
	judge(t, "is not what it was", same, withheld)
}

// Full fails for each field of v that is not set.
func Full(t testing.TB, v any, withheld Withheld) {
	t.Helper()
	rv := reflect.ValueOf(v)
	judge(t, "is not set", set(rv.Type(), leaves(rv)), withheld)
}

// Paths lists the fields of T.
func Paths[T any]() []string {
	var v T
	f := filler{used: map[string]bool{}}
	f.fill(reflect.ValueOf(&v).Elem(), "")
	return f.paths
}

// Named fails for a field of T that table does not name, and for a name that is not a field.
func Named[T any](t testing.TB, table map[string]string) {
	t.Helper()
	none := map[string]bool{}
	for _, path := range Paths[T]() {
		none[path] = false
	}
	judge(t, "is not named", none, table)
}

// judge compares the fields that hold with those that are listed as not holding.
func judge(t testing.TB, what string, holds map[string]bool, but Withheld) {
	t.Helper()
	used := map[string]bool{}
	for _, path := range slices.Sorted(maps.Keys(holds)) {
		entry := ""
		for e, why := range but {
			if why == "" {
				t.Errorf("%s is named without a reason", e)
			}
			if path == e || strings.HasPrefix(path, e) && strings.ContainsRune(".[", rune(path[len(e)])) {
				entry = e
			}
		}
		switch {
		case entry != "" && holds[path]:
			t.Errorf("%s is withheld by %q, and comes through", path, entry)
		case entry == "" && !holds[path]:
			t.Errorf("%s %s: carry it, or say here why not", path, what)
		}
		used[entry] = true
	}
	for e := range but {
		if !used[e] {
			t.Errorf("%s is named, and there is no such field", e)
		}
	}
}

func merged(a, b map[string]string) map[string]string {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}

// filler sets fields, the one named change to another value than else.
type filler struct {
	values Values
	change string
	used   map[string]bool // of values
	paths  []string
	n      int
}

var (
	timeType = reflect.TypeFor[time.Time]()
	rawType  = reflect.TypeFor[json.RawMessage]()

	epoch = time.Date(2031, 5, 1, 12, 0, 0, 0, time.UTC)
)

func (f *filler) fill(v reflect.Value, path string) {
	f.n++
	n := f.n
	if pair, ok := f.values[path]; ok {
		f.used[path] = true
		f.paths = append(f.paths, path)
		x := reflect.ValueOf(pair[0])
		if f.change == path {
			x = reflect.ValueOf(pair[1])
		}
		v.Set(x.Convert(v.Type()))
		return
	}
	switch {
	case v.Type() == timeType:
		v.Set(reflect.ValueOf(epoch.Add(time.Duration(n)*time.Hour + f.other(path, time.Minute))))
		return
	case v.Type() == rawType:
		v.Set(reflect.ValueOf(json.RawMessage(fmt.Sprintf(`{"n":%d}`, n+int(f.other(path, 1000))))))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if ft := v.Type().Field(i); ft.IsExported() {
				f.fill(v.Field(i), join(path, ft.Name))
			}
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		f.fill(v.Elem(), path)
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			v.SetBytes([]byte(fmt.Sprint("b", n, f.other(path, 1))))
			return
		}
		// The first is like the second, except for what changes: the change goes into the last.
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		first := filler{values: f.values, used: f.used, n: f.n + 500}
		first.fill(v.Index(0), path+"[]")
		f.fill(v.Index(1), path+"[]")
	case reflect.Array:
		for i := range v.Len() {
			f.fill(v.Index(i), path+"[]")
		}
	case reflect.Map:
		key, elem := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		f.fill(key, path+"[key]")
		f.fill(elem, path+"[value]")
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, elem)
	case reflect.String:
		v.SetString(fmt.Sprintf("s%d", n+int(f.other(path, 10_000))))
	case reflect.Bool:
		v.SetBool(f.other(path, 1) == 0)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		unit := int64(1)
		if v.Type().Name() == "Duration" {
			unit = int64(time.Minute)
		}
		v.SetInt((int64(n) + int64(f.other(path, 1))) * unit)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(n) + uint64(f.other(path, 1)))
	case reflect.Float32, reflect.Float64:
		v.SetFloat(float64(n) + float64(f.other(path, 1))/2)
	default: // a stream, a function: it is set, and cannot be distinguished from another
		f.paths = append(f.paths, path)
	}
}

// other notes a field, and returns by if the field is to change, or else 0.
func (f *filler) other(path string, by time.Duration) time.Duration {
	f.paths = append(f.paths, path)
	if f.change == path {
		return by
	}
	return 0
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// leaves are the values within v that have no fields of their own and are set, by their
// places.
func leaves(v reflect.Value) map[string]string {
	out := map[string]string{}
	walk(v, "", out)
	return out
}

func walk(v reflect.Value, at string, out map[string]string) {
	if !v.IsValid() {
		return
	}
	switch {
	case v.Type() == timeType:
		if x := v.Interface().(time.Time); !x.IsZero() {
			out[at] = x.UTC().Format(time.RFC3339Nano)
		}
		return
	case v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Uint8:
		if v.Len() > 0 {
			out[at] = string(v.Bytes())
		}
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if ft := v.Type().Field(i); ft.IsExported() {
				walk(v.Field(i), join(at, ft.Name), out)
			}
		}
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			walk(v.Elem(), at, out)
		}
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			walk(v.Index(i), fmt.Sprintf("%s[%d]", at, i), out)
		}
	case reflect.Map:
		for _, k := range v.MapKeys() {
			walk(v.MapIndex(k), fmt.Sprintf("%s[=%v]", at, k), out)
			out[fmt.Sprintf("%s[=%v]key", at, k)] = fmt.Sprint(k)
		}
	case reflect.Func, reflect.Chan:
		if !v.IsNil() {
			out[at] = "set"
		}
	default:
		if !v.IsZero() {
			out[at] = fmt.Sprint(reflectable(v))
		}
	}
}

// reflectable is v's value without its type's own text form, which may show less.
func reflectable(v reflect.Value) any {
	switch {
	case v.CanInt():
		return v.Int()
	case v.CanUint():
		return v.Uint()
	case v.CanFloat():
		return v.Float()
	case v.Kind() == reflect.Bool:
		return v.Bool()
	}
	return v.String()
}

// general is the path of the field at a place: without numbers and keys.
func general(at string) string {
	var b strings.Builder
	for {
		i := strings.IndexByte(at, '[')
		if i < 0 {
			return b.String() + at
		}
		b.WriteString(at[:i])
		end := i + strings.IndexByte(at[i:], ']') + 1
		switch inner := at[i+1 : end-1]; {
		case !strings.HasPrefix(inner, "="):
			b.WriteString("[]")
		case strings.HasPrefix(at[end:], "key"):
			b.WriteString("[key]")
			end += len("key")
		default:
			b.WriteString("[value]")
		}
		at = at[end:]
	}
}

// plain is a path in a common form: TTL, ttl and ttl_ns are one name.
func plain(at string) string {
	at = strings.TrimSuffix(general(at), "_ns")
	return strings.ToLower(strings.ReplaceAll(at, "_", ""))
}

// set says for each field of a type whether it is among the values that are set.
func set(of reflect.Type, values map[string]string) map[string]bool {
	v := reflect.New(of).Elem()
	if of.Kind() != reflect.Struct {
		return nil
	}
	f := filler{used: map[string]bool{}}
	f.fill(v, "")
	have := map[string]bool{}
	for at := range values {
		have[general(at)] = true
	}
	out := map[string]bool{}
	for _, path := range f.paths {
		out[path] = have[path]
	}
	return out
}

// Taken calls take for base with one more of its fields set, for each in turn. It fails for a
// field that is neither refused nor listed as kept: such a field would be dropped silently. A
// list or a map is set as a whole.
func Taken[T any](t testing.TB, base T, values Values, take func(T) error, kept Withheld) {
	t.Helper()
	full := Fill[T](values)
	held := map[string]bool{}
	f := filler{values: values, used: map[string]bool{}}
	f.fill(reflect.New(reflect.TypeFor[T]()).Elem(), "")
	for _, path := range f.paths {
		path, _, _ = strings.Cut(path, "[")
		one := base
		to, from := reflect.ValueOf(&one).Elem(), reflect.ValueOf(full)
		for name := range strings.SplitSeq(path, ".") {
			if to.Kind() == reflect.Pointer {
				break
			}
			to, from = to.FieldByName(name), from.FieldByName(name)
		}
		to.Set(from)
		held[path] = take(one) != nil
	}
	judge(t, "is neither refused nor known to be kept", held, kept)
}
