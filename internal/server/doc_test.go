package server

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/danielgtaylor/huma/v2"
	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

var update = flag.Bool("update", false, "write api/openapi.yaml")

const committed = "../../api/openapi.yaml"

// document is the part of the description that the tests look at.
type document struct {
	Paths map[string]map[string]struct {
		OperationID string             `yaml:"operationId"`
		Scope       string             `yaml:"x-scope"`
		Security    []yaml.Node        `yaml:"security"`
		Parameters  []docParam         `yaml:"parameters"`
		RequestBody *docBody           `yaml:"requestBody"`
		Responses   map[string]docBody `yaml:"responses"`
	} `yaml:"paths"`
}

type docParam struct {
	Name     string `yaml:"name"`
	In       string `yaml:"in"`
	Required bool   `yaml:"required"`
}

type docBody struct {
	Content map[string]struct {
		Example any `yaml:"example"`
	} `yaml:"content"`
}

// TestDescriptionIsComplete: it says where servers are, that what needs no key needs
// none, and which states there are.
func TestDescriptionIsComplete(t *testing.T) {
	b, err := os.ReadFile(committed)
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Servers    []struct{ URL string } `yaml:"servers"`
		Components struct {
			Schemas map[string]struct {
				Properties map[string]struct {
					Enum []string `yaml:"enum"`
				} `yaml:"properties"`
			} `yaml:"schemas"`
		} `yaml:"components"`
	}
	if err := yaml.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	if len(d.Servers) == 0 {
		t.Error("the description names no server")
	}
	for path, ops := range readDocument(t).Paths {
		for method, o := range ops {
			if o.OperationID != "" && len(o.Security) == 0 {
				t.Errorf("%s %s does not say whether it needs a key", method, path)
			}
		}
	}
	words := func(all any) (out []string) {
		for i := range reflect.ValueOf(all).Len() {
			out = append(out, reflect.ValueOf(all).Index(i).String())
		}
		return out
	}
	for _, tt := range []struct {
		schema, property string
		want             []string
	}{
		{"Sandbox", "state", words(sandboxer.States())}, {"Event", "from", words(sandboxer.States())}, {"Event", "to", words(sandboxer.States())},
		{"Snapshot", "state", words(sandboxer.SnapshotStates())},
	} {
		if got := d.Components.Schemas[tt.schema].Properties[tt.property].Enum; !slices.Equal(got, tt.want) {
			t.Errorf("%s.%s is one of %q; want %q", tt.schema, tt.property, got, tt.want)
		}
	}
}

func readDocument(t *testing.T) document {
	t.Helper()
	b, err := os.ReadFile(committed)
	if err != nil {
		t.Fatal(err)
	}
	var d document
	if err := yaml.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// routeTable is the list of routes in docs/reference/api.md.
func routeTable(s *Server) string {
	var rows []string
	for path, item := range s.api.OpenAPI().Paths {
		for _, op := range []*huma.Operation{item.Get, item.Post, item.Put, item.Delete} {
			if op == nil {
				continue
			}
			scope := "–"
			if v, ok := op.Extensions["x-scope"]; ok {
				scope = fmt.Sprint(v)
			}
			rows = append(rows, fmt.Sprintf("| `%s` | `%s` | %s | %s |\n", path, op.Method, scope, op.Summary))
		}
	}
	slices.Sort(rows)
	return "| path | method | scope | |\n|---|---|---|---|\n" + strings.Join(rows, "")
}

func TestRouteTable(t *testing.T) {
	const page, begin, end = "../../docs/reference/api.md", "-update -->\n", "<!-- /routes -->"
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(b), begin)
	have, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatal("docs/reference/api.md has no place for the routes")
	}
	want := routeTable(New(nil, Options{}))
	if *update {
		if err := os.WriteFile(page, []byte(head+begin+want+end+tail), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if have != want {
		t.Error("the routes in docs/reference/api.md are not the server's; run: go test ./internal/server -update")
	}
}

func TestDescriptionIsCommitted(t *testing.T) {
	s := New(nil, Options{})
	if *update {
		if err := os.WriteFile(committed, s.doc, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(committed)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, s.doc) {
		t.Error("api/openapi.yaml is not what the server generates; run: go test ./internal/server -update")
	}
	if !*update && !bytes.Equal(api.OpenAPI, have) {
		t.Error("api.OpenAPI is not the committed file")
	}
}

// Every operation of the server is in the committed description, and the other
// way round.
func TestEveryRouteIsDescribed(t *testing.T) {
	s := New(nil, Options{})
	var served, described []string
	for path, item := range s.api.OpenAPI().Paths {
		for method, op := range map[string]any{"GET": item.Get, "PUT": item.Put, "POST": item.Post, "DELETE": item.Delete} {
			if !reflect.ValueOf(op).IsNil() {
				served = append(served, method+" "+path)
			}
		}
	}
	for path, ops := range readDocument(t).Paths {
		for method, op := range ops {
			described = append(described, strings.ToUpper(method)+" "+path)
			scope := sandboxer.Scope(op.Scope)
			if scope == "" && path != "/healthz" && path != "/openapi.yaml" {
				t.Errorf("%s %s needs no key", method, path)
			}
			if scope != "" && !slices.Contains(sandboxer.Scopes(), scope) {
				t.Errorf("%s %s needs the unknown scope %q", method, path, scope)
			}
			for part := range strings.SplitSeq(path, "/") {
				if name, ok := strings.CutPrefix(part, "{"); ok {
					name = strings.TrimSuffix(name, "}")
					if !slices.ContainsFunc(op.Parameters, func(p docParam) bool { return p.Name == name && p.In == "path" && p.Required }) {
						t.Errorf("%s %s does not describe {%s}", method, path, name)
					}
				}
			}
		}
	}
	slices.Sort(served)
	slices.Sort(described)
	if !slices.Equal(served, described) {
		t.Errorf("served:\n%s\ndescribed:\n%s", strings.Join(served, "\n"), strings.Join(described, "\n"))
	}
}

// Every JSON body has an example which the Go type takes whole and gives back.
func TestExamplesRoundTrip(t *testing.T) {
	s := New(nil, Options{})
	n := 0
	check := func(where string, example any, typ reflect.Type) {
		t.Helper()
		n++
		if example == nil {
			t.Errorf("%s has no example", where)
			return
		}
		in, err := json.Marshal(example)
		if err != nil {
			t.Fatal(err)
		}
		v := reflect.New(typ)
		dec := json.NewDecoder(bytes.NewReader(in))
		dec.DisallowUnknownFields()
		if err := dec.Decode(v.Interface()); err != nil {
			t.Errorf("%s: %v\n%s", where, err, in)
			return
		}
		out, err := json.Marshal(v.Interface())
		if err != nil {
			t.Fatal(err)
		}
		var a, b any
		json.Unmarshal(in, &a)
		json.Unmarshal(out, &b)
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: %s came back as %s", where, in, out)
		}
	}
	for path, ops := range readDocument(t).Paths {
		for method, op := range ops {
			where, types := method+" "+path, s.types[op.OperationID]
			if op.RequestBody != nil {
				if c, ok := op.RequestBody.Content["application/json"]; ok {
					check(where+" request", c.Example, types.in)
				}
			}
			for status, resp := range op.Responses {
				if c, ok := resp.Content["application/json"]; ok {
					if types.out == nil {
						t.Errorf("%s has a JSON answer of an unknown type", where)
						continue
					}
					check(where+" "+status, c.Example, types.out)
				}
			}
		}
	}
	if n < 35 {
		t.Errorf("only %d bodies were checked", n)
	}
}
