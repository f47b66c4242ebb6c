package catalog

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// schema is the part of JSON Schema (2020-12) that files need.
type schema struct {
	Dialect       string             `json:"$schema,omitempty"`
	Title         string             `json:"title,omitempty"`
	Description   string             `json:"description,omitempty"`
	Type          any                `json:"type,omitempty"` // string or []string
	Enum          []string           `json:"enum,omitempty"`
	Default       any                `json:"default,omitempty"`
	Pattern       string             `json:"pattern,omitempty"`
	Minimum       *float64           `json:"minimum,omitempty"`
	Maximum       *float64           `json:"maximum,omitempty"`
	AnyOf         []*schema          `json:"anyOf,omitempty"`
	Items         *schema            `json:"items,omitempty"`
	MinItems      int                `json:"minItems,omitempty"`
	UniqueItems   bool               `json:"uniqueItems,omitempty"`
	Properties    map[string]*schema `json:"properties,omitempty"`
	Required      []string           `json:"required,omitempty"`
	PropertyNames *schema            `json:"propertyNames,omitempty"`
	Additional    any                `json:"additionalProperties,omitempty"` // *schema or false
}

const dialect = "https://json-schema.org/draft/2020-12/schema"

// The kinds of file that Schema describes.
const (
	KindProfile   = "profile"
	KindExtension = "extension"
	KindQuotas    = "quotas"
	KindPrices    = "prices"
	KindSinks     = "sinks"
)

// Schema returns the JSON Schema of a kind of file, indented. It accepts what the
// loader accepts and rejects faults in the form of a file;
// only the loader finds faults that involve other files or several fields at once.
// Kinds: NotFound.
func Schema(kind string) ([]byte, error) {
	var s *schema
	switch kind {
	case KindProfile:
		s = schemaOf(reflect.TypeFor[profileForm](), rule{required: true}, reflect.Value{})
		s.Title = "sandboxer profile"
		s.Description = "A named offer to users: profiles/profile.<slug>.yaml"
	case KindExtension:
		s = schemaOf(reflect.TypeFor[extensionForm](), rule{required: true}, reflect.Value{})
		s.Title = "sandboxer extension"
		s.Description = "A configured backend: extensions/ext.<name>.yaml"
	case KindQuotas:
		s = schemaOf(reflect.TypeFor[quotasForm](), rule{required: true}, reflect.Value{})
		s.Title = "sandboxer quotas"
		s.Description = "Quotas of tenants: quotas.yaml"
	case KindPrices:
		s = schemaOf(reflect.TypeFor[pricesForm](), rule{required: true}, reflect.Value{})
		s.Title = "sandboxer prices"
		s.Description = "The price book: prices.yaml"
	case KindSinks:
		s = schemaOf(reflect.TypeFor[sinksForm](), rule{required: true}, reflect.Value{})
		s.Title = "sandboxer sinks"
		s.Description = "Receivers of usage rows: sinks.yaml"
	default:
		return nil, sandboxer.E(sandboxer.NotFound, nil, "there is no schema %q: there are %s, %s, %s, %s and %s", clip(kind), KindExtension, KindProfile, KindQuotas, KindPrices, KindSinks)
	}
	s.Dialect = dialect
	return indented(s)
}

// ConfigSchema returns the JSON Schema of an adapter's config block with its
// defaults, or nil if it takes none.
func ConfigSchema(a sandboxer.Adapter) ([]byte, error) {
	s := configSchema(a)
	if s == nil {
		return nil, nil
	}
	return indented(s)
}

func configSchema(a sandboxer.Adapter) *schema {
	if a.Config == nil {
		return nil
	}
	v := reflect.ValueOf(a.Config).Elem()
	return schemaOf(v.Type(), rule{}, v)
}

func indented(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	err := e.Encode(v)
	return b.Bytes(), err
}

// schemaOf describes what the decoder reads into a t under r. def, if valid, is the
// default.
func schemaOf(t reflect.Type, r rule, def reflect.Value) *schema {
	if sc := scalarOf(t, r); sc != nil {
		s := sc.schema
		s.Description = r.help
		s.bound(sc, r)
		if def.IsValid() && !def.IsZero() && !sc.secret {
			s.Default = written(def, r)
		}
		return &s
	}
	s := &schema{Description: r.help}
	null := func(kind string) any {
		if r.required || r.nonempty {
			return kind
		}
		return []string{kind, "null"}
	}
	sub := func(def reflect.Value, index []int) reflect.Value {
		if !def.IsValid() {
			return def
		}
		return def.FieldByIndex(index)
	}
	switch {
	case t == nodeType:
		s.Type = null("object")
	case t.Kind() == reflect.Pointer:
		if def.IsValid() {
			def = def.Elem()
		}
		return schemaOf(t.Elem(), r, def)
	case t.Kind() == reflect.Struct:
		s.Type, s.Properties, s.Additional = null("object"), make(map[string]*schema), false
		for _, f := range fieldsOf(t) {
			s.Properties[f.name] = schemaOf(t.FieldByIndex(f.index).Type, f, sub(def, f.index))
			if f.required && len(f.unless) == 0 {
				s.Required = append(s.Required, f.name)
			}
		}
		if r.short != nil {
			long := *s
			long.Description = ""
			s = &schema{Description: r.help, AnyOf: []*schema{{Type: "string", Enum: r.short}, &long}}
		}
	case t.Kind() == reflect.Slice:
		s.Type, s.Items, s.UniqueItems = null("array"), schemaOf(t.Elem(), r.element(), reflect.Value{}), r.unique
		if r.nonempty {
			s.MinItems = 1
		}
		if def.IsValid() && def.Len() > 0 {
			s.Default = written(def, r)
		}
	case t.Kind() == reflect.Map:
		s.Type, s.Additional = null("object"), schemaOf(t.Elem(), r.element(), reflect.Value{})
		if f, ok := formats[r.keys]; ok {
			s.PropertyNames = &schema{Pattern: f.pattern.String()}
		}
		if def.IsValid() && def.Len() > 0 {
			s.Default = written(def, r)
		}
	case t.Kind() == reflect.Interface:
	default:
		panic(fmt.Sprintf("catalog: a field of type %s cannot be described", t))
	}
	return s
}

// bound states the bounds of r where JSON Schema can: on numbers.
func (s *schema) bound(sc *scalar, r rule) {
	set := func(n *schema) {
		if f, err := strconv.ParseFloat(r.min, 64); err == nil {
			n.Minimum = &f
		}
		if f, err := strconv.ParseFloat(r.max, 64); err == nil {
			n.Maximum = &f
		}
	}
	if s.Type == "integer" || s.Type == "number" {
		set(s)
	}
	for i, alt := range s.AnyOf {
		if alt.Type == "number" {
			c := *alt
			set(&c)
			s.AnyOf[i] = &c
		}
	}
}

// written is a default in the form of a file.
func written(v reflect.Value, r rule) any {
	switch x := v.Interface().(type) {
	case time.Duration:
		return sandboxer.FormatDuration(x)
	case sandboxer.Credits:
		return x.String()
	case sandboxer.Secret:
		return nil
	}
	switch {
	case r.unit == "bytes" && v.CanInt():
		return formatBytes(v.Int())
	case r.unit == "cpus" && v.CanInt():
		return float64(v.Int()) / 1000
	case v.Kind() == reflect.Slice:
		list := make([]any, v.Len())
		for i := range list {
			list[i] = written(v.Index(i), r.element())
		}
		return list
	case v.Kind() == reflect.Map:
		m := make(map[string]any, v.Len())
		for it := v.MapRange(); it.Next(); {
			m[it.Key().String()] = written(it.Value(), r.element())
		}
		return m
	case v.Kind() == reflect.Struct:
		m := make(map[string]any)
		for _, f := range fieldsOf(v.Type()) {
			m[f.name] = written(v.FieldByIndex(f.index), f)
		}
		return m
	}
	return v.Interface()
}
