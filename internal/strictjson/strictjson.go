// Package strictjson reads JSON as its writer meant it or not at all: it refuses what encoding/json
// accepts, names given twice and names in another case.
package strictjson

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"
)

// maxDepth bounds how deeply values are nested.
const maxDepth = 100

// Decode reads the one document in data into v, a pointer. Unknown names, names that
// differ from a field's in case, names given twice in an object, anything after the
// document and bytes that are not UTF-8 are errors.
func Decode(data []byte, v any) error {
	if err := check(data, reflect.TypeOf(v)); err != nil {
		return err
	}
	return json.Unmarshal(data, v)
}

// DecodeStored is Decode for data that this program or another version of it has written: names
// that v does not have are a newer version's, and are returned, up to ten of them. They are lost if v
// is written again. A name that differs from one of v's in case, or is given twice, is an error all the same.
func DecodeStored(data []byte, v any) (newer []string, err error) {
	c, err := start(data)
	if err != nil {
		return nil, err
	}
	c.stored = true
	if err := c.value(0, plain(reflect.TypeOf(v))); err != nil {
		return nil, err
	}
	return c.newer, json.Unmarshal(data, v)
}

// maxNewer bounds how many names of a newer version are returned.
const maxNewer = 10

// Check reports whether data is one document without anything that Decode refuses for every
// type.
func Check(data []byte) error { return check(data, nil) }

func check(data []byte, t reflect.Type) error {
	c, err := start(data)
	if err != nil {
		return err
	}
	return c.value(0, plain(t))
}

// start returns a checker of data, which is one valid document.
func start(data []byte) (*checker, error) {
	if !utf8.Valid(data) {
		return nil, errors.New("it is not UTF-8")
	}
	if !json.Valid(data) {
		var first json.RawMessage
		if err := json.NewDecoder(bytes.NewReader(data)).Decode(&first); err != nil {
			return nil, err
		}
		return nil, errors.New("something follows the document")
	}
	return &checker{data: data}, nil
}

// A checker goes once through a valid document, and allocates next to nothing for values
// that become a struct: documents have millions of values.
type checker struct {
	data []byte
	at   int

	stored bool     // unknown names are a newer version's
	newer  []string // which
}

// object has the cached facts about a struct type.
type object struct {
	index map[string]int
	types []reflect.Type // plain
}

// objects caches facts about struct types, since a program has few: to compute them takes longer
// than to read a record.
var objects sync.Map // reflect.Type → *object

func objectOf(t reflect.Type) *object {
	if o, ok := objects.Load(t); ok {
		return o.(*object)
	}
	known := map[string]reflect.Type{}
	fields(t, known)
	o := &object{index: map[string]int{}}
	for name, t := range known {
		o.index[name] = len(o.types)
		o.types = append(o.types, plain(t))
	}
	objects.Store(t, o)
	return o
}

// next skips white space and returns the byte behind it.
func (c *checker) next() byte {
	for {
		switch b := c.data[c.at]; b {
		case ' ', '\t', '\r', '\n':
			c.at++
		default:
			return b
		}
	}
}

// text skips a text and returns what is between its quotes.
func (c *checker) text() []byte {
	c.at++
	from := c.at
	for c.data[c.at] != '"' {
		if c.data[c.at] == '\\' {
			c.at++
		}
		c.at++
	}
	c.at++
	return c.data[from : c.at-1]
}

// value goes through one value that is to become a t, which is plain; nil if that does not
// matter.
func (c *checker) value(depth int, t reflect.Type) error {
	if depth > maxDepth {
		return fmt.Errorf("it is nested more than %d deep", maxDepth)
	}
	switch c.next() {
	case '"':
		c.text()
	case '[':
		var each reflect.Type
		if t != nil && (t.Kind() == reflect.Slice || t.Kind() == reflect.Array) {
			each = plain(t.Elem())
		}
		c.at++
		for c.next() != ']' {
			if c.data[c.at] == ',' {
				c.at++
			}
			if err := c.value(depth+1, each); err != nil {
				return err
			}
		}
		c.at++
	case '{':
		return c.members(depth, t)
	default: // a number, true, false or null
		for c.at < len(c.data) && !strings.ContainsRune(",]} \t\r\n", rune(c.data[c.at])) {
			c.at++
		}
	}
	return nil
}

func (c *checker) members(depth int, t reflect.Type) error {
	var known *object
	var each reflect.Type
	var few [2]uint64 // of a struct, by the index of its fields
	seen := few[:]
	var names map[string]bool // of anything else
	switch {
	case t != nil && t.Kind() == reflect.Struct:
		known = objectOf(t)
		if n := len(known.types)/64 + 1; n > len(seen) {
			seen = make([]uint64, n)
		}
	case t != nil && t.Kind() == reflect.Map:
		each = plain(t.Elem())
	}
	c.at++
	for c.next() != '}' {
		if c.data[c.at] == ',' {
			c.at++
			c.next()
		}
		name := c.text()
		if bytes.IndexByte(name, '\\') >= 0 {
			var plain string
			if err := json.Unmarshal(c.data[c.at-len(name)-2:c.at], &plain); err != nil {
				return err
			}
			name = []byte(plain)
		}
		twice := false
		i, ok := 0, false
		if known != nil {
			if i, ok = known.index[string(name)]; !ok {
				if err := c.unknown(known, string(name)); err != nil {
					return err
				}
				each = nil
			}
		}
		if ok {
			twice = seen[i/64]&(1<<(i%64)) != 0
			seen[i/64] |= 1 << (i % 64)
			each = known.types[i]
		} else {
			if names == nil {
				names = map[string]bool{}
			}
			twice = names[string(name)]
			names[string(name)] = true
		}
		if twice {
			return fmt.Errorf("the field %.60q is given twice", name)
		}
		c.next()
		c.at++ // the colon
		if err := c.value(depth+1, each); err != nil {
			return err
		}
	}
	c.at++
	return nil
}

// unknown handles a name that a struct does not have.
func (c *checker) unknown(o *object, name string) error {
	if !c.stored {
		return fmt.Errorf("unknown field %.60q", name)
	}
	for known := range o.index {
		if strings.EqualFold(known, name) { // which encoding/json would take for it
			return fmt.Errorf("the field %.60q is written %.60q", known, name)
		}
	}
	if len(c.newer) < maxNewer && !slices.Contains(c.newer, name) {
		c.newer = append(c.newer, name)
	}
	return nil
}

var (
	unmarshaler     = reflect.TypeFor[json.Unmarshaler]()
	textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// plain is what t points to; nil if it has its own way to read JSON.
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
