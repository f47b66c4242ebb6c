package server

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// maxJSON bounds a JSON request body. Raw bodies (files) are not bounded here.
const maxJSON = 1 << 20

// opTypes are the Go types of an operation's bodies, for the contract test.
type opTypes struct{ in, out reflect.Type }

// strictCasing keeps "Profile" from being accepted for "profile".
var strictCasing = sync.OnceFunc(func() { huma.ValidateStrictCasing = true })

// newAPI prepares huma: it parses parameters and generates the description. The
// bodies, the errors and the authentication are done here.
func (s *Server) newAPI() huma.API {
	strictCasing()
	problem := edge.ProblemType
	cfg := huma.Config{
		OpenAPI: &huma.OpenAPI{
			OpenAPI: "3.1.0",
			Info: &huma.Info{
				Title: "sandboxer", Version: "v1",
				Description: "Sandboxes of any kind behind one interface. Durations are Go duration strings (\"30m\"), money is a decimal string " +
					"of credits (\"0.12\"), sizes are bytes, times are RFC 3339 in UTC. Every failure is an RFC 9457 problem. " +
					"Clients of the Unix socket that run as the server's user need no key.",
			},
			Servers: []*huma.Server{
				{URL: "http://localhost:8080", Description: "The TCP listener of a server: serve --listen, or up --listen"},
				{URL: "http://localhost", Description: "The Unix socket of a server, under any name: curl --unix-socket"},
			},
			Components: &huma.Components{
				Schemas:         schemas(),
				SecuritySchemes: map[string]*huma.SecurityScheme{"key": {Type: "http", Scheme: "bearer", BearerFormat: "sbx_key_<id>_<secret>"}},
			},
		},
		Formats:                      map[string]huma.Format{"application/json": huma.DefaultJSONFormat, "json": huma.DefaultJSONFormat},
		DefaultFormat:                "application/json",
		RejectUnknownQueryParameters: true,
		Transformers:                 []huma.Transformer{s.transform},
	}
	a := huma.NewAPI(cfg, mount{s})
	schema := cfg.Components.Schemas.Schema(reflect.TypeFor[api.Problem](), true, "")
	cfg.Components.Responses = map[string]*huma.Response{"Problem": {
		Description: "What failed, why, and what to do",
		Content:     map[string]*huma.MediaType{problem: {Schema: schema, Example: exampleOf(reflect.TypeFor[api.Problem]())}},
	}}
	return a
}

// schemas has the descriptions of the bodies: requests by their names in package api,
// and their durations and money as the text that they write.
func schemas() huma.Registry {
	names := map[reflect.Type]string{
		typeOf[api.CreateSandbox](): "CreateSandbox", typeOf[api.RestoreSnapshot](): "RestoreSnapshot", typeOf[api.ForkSandbox](): "ForkSandbox",
		typeOf[api.CreateSnapshot](): "CreateSnapshot", typeOf[api.ExtendSandbox](): "ExtendSandbox", typeOf[api.PauseSandbox](): "PauseSandbox",
		typeOf[api.ResumeSandbox](): "ResumeSandbox",
		typeOf[api.NewKey]():        "NewKey",
	}
	r := huma.NewMapRegistry("#/components/schemas/", func(t reflect.Type, hint string) string {
		if name := names[t]; name != "" {
			return name
		}
		return huma.DefaultSchemaNamer(t, hint)
	})
	r.RegisterTypeAlias(typeOf[time.Duration](), typeOf[api.Duration]())
	r.RegisterTypeAlias(typeOf[sandboxer.Credits](), typeOf[api.Credits]())
	return r
}

// mount puts huma's operations on the mux, with who may use them.
type mount struct{ s *Server }

// ServeHTTP is part of huma.Adapter, and never called: requests come by the edge.
func (m mount) ServeHTTP(http.ResponseWriter, *http.Request) {
	panic("server: a request that did not come by the edge")
}

func (m mount) Handle(op *huma.Operation, handler func(huma.Context)) {
	access, _ := op.Metadata["access"].(edge.Access)
	quiet, _ := op.Metadata["quiet"].(bool)
	m.s.mux.Handle(edge.Route{Pattern: op.Method + " " + op.Path, Access: access, Quiet: quiet, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		for _, p := range op.Parameters { // huma would take the first
			if p.In == "query" && p.Schema.Type != huma.TypeArray && len(q[p.Name]) > 1 {
				edge.Fail(w, r, sandboxer.E(sandboxer.Invalid, nil, "the query parameter %q is given %d times, and takes one value", p.Name, len(q[p.Name])).
					WithHint("leave out all of them except one"))
				return
			}
		}
		handler(&humaCall{humaContext: humago.NewContext(op, r, w)})
	})})
}

// humaCall lets transform correct the status that huma gives bad parameters.
type humaCall struct {
	humaContext
	status int
}

type humaContext huma.Context

func (c *humaCall) SetStatus(status int) {
	if c.status != 0 {
		status = c.status
	}
	c.humaContext.SetStatus(status)
}

// transform turns huma's own complaints, which are all about parameters, and ours
// into a Problem.
func (s *Server) transform(ctx huma.Context, _ string, v any) (any, error) {
	switch e := v.(type) {
	case *failure:
		return e.p, nil
	case *huma.ErrorModel:
		p := edge.Problem(ctx.Context(), s.badParameters(ctx.Operation(), e))
		if c, ok := ctx.(*humaCall); ok {
			c.status = p.Status
		}
		return p, nil
	}
	return v, nil
}

func (s *Server) badParameters(op *huma.Operation, e *huma.ErrorModel) error {
	if e.Status >= 500 {
		return sandboxer.E(sandboxer.Internal, e, "the answer could not be written")
	}
	var faults []string
	var hint string
	for _, d := range e.Errors {
		loc, name, _ := strings.Cut(d.Location, ".")
		switch {
		case d.Message == "unknown query parameter":
			faults = append(faults, fmt.Sprintf("%q is not a query parameter of %s %s", name, op.Method, op.Path))
			var known []string
			for _, p := range op.Parameters {
				if p.In == "query" {
					known = append(known, p.Name)
				}
			}
			hint = didYouMean(name, known)
		case strings.HasPrefix(d.Message, "required "):
			faults = append(faults, fmt.Sprintf("the %s parameter %q is missing", loc, name))
		default:
			faults = append(faults, fmt.Sprintf("%s parameter %q: %s", loc, name, d.Message))
		}
	}
	if len(faults) == 0 {
		faults = []string{e.Detail}
	}
	err := sandboxer.E(sandboxer.Invalid, nil, "%s", strings.Join(faults, "; "))
	err.Hint = cmp.Or(hint, inDescription)
	return err
}

func didYouMean(name string, known []string) string {
	if n := suggest.Nearest(name, known); n != "" {
		return fmt.Sprintf("did you mean %q?", n)
	}
	if len(known) == 0 {
		return "it has none"
	}
	slices.Sort(known)
	return "it has: " + strings.Join(known, ", ")
}

// none is the input or output of an operation that has none.
type none struct{}

// reply is an answer with a JSON body.
type reply[T any] struct{ Body T }

// op describes a route that needs scope.
func op(id, method, path string, scope sandboxer.Scope, tag, summary string) huma.Operation {
	o := newOperation(id, method, path, tag, summary)
	o.Metadata = map[string]any{"access": edge.Needs(scope)}
	o.Extensions = map[string]any{"x-scope": scope}
	o.Security = []map[string][]string{{"key": {}}}
	o.Description = fmt.Sprintf("Needs the scope `%s`.", scope)
	return o
}

// openOp describes a route that anyone may use.
func openOp(id, method, path, tag, summary string) huma.Operation {
	o := newOperation(id, method, path, tag, summary)
	o.Metadata = map[string]any{"access": edge.Anyone()}
	o.Security = []map[string][]string{{}} // said, and not forgotten
	return o
}

func newOperation(id, method, path, tag, summary string) huma.Operation {
	return huma.Operation{
		OperationID: id, Method: method, Path: path, Summary: summary, Tags: []string{tag},
		Responses: map[string]*huma.Response{"default": {Ref: "#/components/responses/Problem"}},
	}
}

// route registers an operation without a JSON request body.
func route[I, O any](s *Server, o huma.Operation, f func(context.Context, *I) (*O, error)) {
	types := s.types[o.OperationID]
	if b, ok := reflect.TypeFor[O]().FieldByName("Body"); ok && b.Type.Kind() != reflect.Func {
		types.out = b.Type
	}
	huma.Register(s.api, o, func(ctx context.Context, in *I) (*O, error) {
		out, err := f(ctx, in)
		if err != nil {
			return nil, &failure{edge.Problem(ctx, err)}
		}
		return out, nil
	})
	s.types[o.OperationID] = types
	if types.out != nil {
		for status, resp := range o.Responses {
			if mt := resp.Content["application/json"]; mt != nil && status != "default" {
				mt.Example = exampleOf(types.out)
			}
		}
	}
}

// routeJSON registers an operation with a JSON request body of type B.
func routeJSON[I, B, O any](s *Server, o huma.Operation, f func(context.Context, *I, B) (*O, error)) {
	t := reflect.TypeFor[B]()
	reg := s.api.OpenAPI().Components.Schemas
	ref := reg.Schema(t, true, "")
	s.types[o.OperationID] = opTypes{in: t}
	route(s, o, func(ctx context.Context, in *I) (*O, error) {
		var b B
		if err := s.readJSON(ctx, reg, ref, &b); err != nil {
			return nil, err
		}
		return f(ctx, in, b)
	})
	s.describeBody(o, true, "application/json", &huma.MediaType{Schema: ref, Example: exampleOf(t)})
}

// describeBody adds a request body to the description of a registered operation.
// Given earlier, huma would read the body itself.
func (s *Server) describeBody(o huma.Operation, required bool, contentType string, mt *huma.MediaType) {
	item := s.api.OpenAPI().Paths[o.Path]
	for _, have := range []*huma.Operation{item.Post, item.Put} {
		if have != nil && have.OperationID == o.OperationID {
			have.RequestBody = &huma.RequestBody{Required: required, Content: map[string]*huma.MediaType{contentType: mt}}
		}
	}
}

// readJSON reads the request's body strictly into v.
func (s *Server) readJSON(ctx context.Context, reg huma.Registry, schema *huma.Schema, v any) error {
	_, r := edge.Exchange(ctx)
	if ct, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || ct != "application/json" {
		got := r.Header.Get("Content-Type")
		if got == "" {
			got = "no content type"
		}
		return edge.WithStatus(http.StatusUnsupportedMediaType, sandboxer.E(sandboxer.Invalid, nil, "the request body must be JSON, not %s", got).
			WithHint("send the header Content-Type: application/json"))
	}
	body, err := edge.ReadAll(r, maxJSON, 30*time.Second)
	if err != nil {
		return err
	}
	return s.decodeJSON(ctx, body, reg, schema, v)
}

// decodeJSON bounds how many bodies the function decodeJSON decodes at a time.
func (s *Server) decodeJSON(ctx context.Context, body []byte, reg huma.Registry, schema *huma.Schema, v any) error {
	select {
	case s.decoding <- struct{}{}:
		defer func() { <-s.decoding }()
	case <-ctx.Done():
		return sandboxer.E(sandboxer.Canceled, ctx.Err(), "the client left")
	}
	return decodeJSON(body, reg, schema, v)
}

// decodeJSON decodes one JSON document that satisfies schema; it refuses unknown
// fields. Kind: Invalid.
func decodeJSON(body []byte, reg huma.Registry, schema *huma.Schema, v any) error {
	if len(bytes.TrimSpace(body)) == 0 {
		return sandboxer.E(sandboxer.Invalid, nil, "the request has no body").WithHint("send at least {}")
	}
	var tree any
	if err := json.Unmarshal(body, &tree); err != nil {
		var se *json.SyntaxError
		if errors.As(err, &se) {
			before := body[:min(int(se.Offset), len(body))]
			line := 1 + bytes.Count(before, []byte("\n"))
			col := len(before) - bytes.LastIndexByte(before, '\n') - 1
			return sandboxer.E(sandboxer.Invalid, nil, "the request body is not JSON: line %d, column %d: %s", line, max(col, 1), se).WithHint(oneDocument)
		}
		return sandboxer.E(sandboxer.Invalid, nil, "the request body is not JSON: %s", err).WithHint(oneDocument)
	}
	if err := strictjson.Check(body); err != nil {
		return sandboxer.E(sandboxer.Invalid, nil, "the request body does not fit: %s", err).WithHint(oneDocument)
	}
	var res huma.ValidateResult
	path := huma.NewPathBuffer(make([]byte, 0, 64), 0)
	huma.Validate(reg, schema, path, huma.ModeWriteToServer, tree, &res)
	if len(res.Errors) > 0 {
		return badBody(reg, schema, res.Errors)
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		var e *sandboxer.Error
		if errors.As(err, &e) {
			return e
		}
		return sandboxer.E(sandboxer.Invalid, nil, "the request body does not fit: %s", strings.TrimPrefix(err.Error(), "json: ")).WithHint(inDescription)
	}
	return nil
}

const oneDocument = "send one JSON document in UTF-8, in which no name of an object is given twice"

// inDescription is the hint for faults that do not list the alternatives.
const inDescription = "the fields and parameters of every request, with their types and bounds, are at /openapi.yaml"

// badBody names every fault of a request body in one sentence.
func badBody(reg huma.Registry, schema *huma.Schema, errs []error) error {
	var faults []string
	var hint string
	for _, err := range errs {
		var d *huma.ErrorDetail
		if !errors.As(err, &d) {
			faults = append(faults, err.Error())
			continue
		}
		if d.Message == "unexpected property" {
			parent, name := "", d.Location
			if i := strings.LastIndexByte(d.Location, '.'); i >= 0 {
				parent, name = d.Location[:i], d.Location[i+1:]
			}
			faults = append(faults, fmt.Sprintf("unknown field %q", d.Location))
			if hint == "" {
				hint = didYouMean(name, properties(reg, schema, parent))
			}
			continue
		}
		if d.Location == "" {
			faults = append(faults, d.Message)
		} else {
			faults = append(faults, fmt.Sprintf("%s: %s", d.Location, d.Message))
		}
	}
	e := sandboxer.E(sandboxer.Invalid, nil, "the request body does not fit: %s", strings.Join(faults, "; "))
	e.Hint = cmp.Or(hint, inDescription)
	return e
}

// properties returns the field names of the object at path inside schema.
func properties(reg huma.Registry, s *huma.Schema, path string) []string {
	deref := func(s *huma.Schema) *huma.Schema {
		for s != nil && s.Ref != "" {
			s = reg.SchemaFromRef(s.Ref)
		}
		return s
	}
	s = deref(s)
	for step := range strings.SplitSeq(path, ".") {
		if step == "" || s == nil {
			continue
		}
		name, _, indexed := strings.Cut(step, "[")
		if name != "" {
			s = deref(s.Properties[name])
		}
		if indexed && s != nil {
			s = deref(s.Items)
		}
	}
	if s == nil {
		return nil
	}
	var names []string
	for n := range s.Properties {
		names = append(names, n)
	}
	return names
}

// failure is a Problem on its way through huma.
type failure struct{ p *api.Problem }

func (f *failure) Error() string             { return f.p.Error() }
func (f *failure) GetStatus() int            { return f.p.Status }
func (f *failure) ContentType(string) string { return edge.ProblemType }
func (f *failure) GetHeaders() http.Header   { return edge.ProblemHeaders(f.p) }
