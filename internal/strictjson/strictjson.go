// Package strictjson reads JSON as its writer meant it or not at all: what encoding/json
// lets pass, names given twice and names in another case, is refused.
package strictjson

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"unicode/utf8"
)

// maxDepth bounds how deeply values lie in each other.
const maxDepth = 100

// Decode reads the one document in data into v, a pointer. Unknown names, names that
// differ from a field's in case, names given twice in an object, anything after the
// document and bytes that are not UTF-8 are errors.
func Decode(data []byte, v any) error {
	if err := check(data, reflect.TypeOf(v)); err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	return dec.Decode(v)
}

// Check reports whether data is one document without what Decode refuses whatever it is
// read into.
func Check(data []byte) error { return check(data, nil) }

func check(data []byte, t reflect.Type) error {
	if !utf8.Valid(data) {
		return errors.New("it is not UTF-8")
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	if err := document(dec, 0, t); err != nil {
		return err
	}
	if _, err := dec.Token(); err != io.EOF {
		return errors.New("something follows the document")
	}
	return nil
}

// document reads one value, which is to become a t; nil if that does not matter.
func document(dec *json.Decoder, depth int, t reflect.Type) error {
	token, err := dec.Token()
	if err != nil {
		return err
	}
	if depth > maxDepth {
		return fmt.Errorf("it is nested more than %d deep", maxDepth)
	}
	t = plain(t)
	switch token {
	case json.Delim('['):
		var each reflect.Type
		if t != nil && (t.Kind() == reflect.Slice || t.Kind() == reflect.Array) {
			each = t.Elem()
		}
		for dec.More() {
			if err := document(dec, depth+1, each); err != nil {
				return err
			}
		}
		_, err = dec.Token()
	case json.Delim('{'):
		var known map[string]reflect.Type
		var each reflect.Type
		if t != nil && t.Kind() == reflect.Struct {
			known = map[string]reflect.Type{}
			fields(t, known)
		} else if t != nil && t.Kind() == reflect.Map {
			each = t.Elem()
		}
		seen := map[string]bool{}
		for dec.More() {
			token, err := dec.Token()
			if err != nil {
				return err
			}
			name, _ := token.(string)
			if seen[name] {
				return fmt.Errorf("the field %.60q is given twice", name)
			}
			seen[name] = true
			if known != nil {
				var ok bool
				if each, ok = known[name]; !ok {
					return fmt.Errorf("unknown field %.60q", name)
				}
			}
			if err := document(dec, depth+1, each); err != nil {
				return err
			}
		}
		_, err = dec.Token()
	}
	return err
}

var (
	unmarshaler     = reflect.TypeFor[json.Unmarshaler]()
	textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// plain is what t points to; nil if it reads JSON in a way of its own.
func plain(t reflect.Type) reflect.Type {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == nil || reflect.PointerTo(t).Implements(unmarshaler) || reflect.PointerTo(t).Implements(textUnmarshaler) {
		return nil
	}
	return t
}

// fields collects the JSON names of a struct's fields.
func fields(t reflect.Type, known map[string]reflect.Type) {
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Tag.Get("json") == "-" {
			continue
		}
		if f.Anonymous && name == "" {
			e := f.Type
			if e.Kind() == reflect.Pointer {
				e = e.Elem()
			}
			if e.Kind() == reflect.Struct {
				fields(e, known)
				continue
			}
		}
		if !f.IsExported() {
			continue
		}
		if name == "" {
			name = f.Name
		}
		known[name] = f.Type
	}
}
