package server

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edge"
)

// The parameter types that others embed are exported because huma reads only
// exported fields.

// InRef is a sandbox in a path.
type InRef struct {
	ID string `path:"id" maxLength:"256" doc:"ID, unique beginning of one (3 characters or more), or name; of any tenant: TENANT/ID, escaped as TENANT%2FID"`
}

// InPage is the paging of a list.
type InPage struct {
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" doc:"Items of a page; default 100"`
	Cursor string `query:"cursor" maxLength:"1024" doc:"next_cursor of the page before"`
}

// answer is a sandbox with its HTTP status and Location.
type answer struct {
	Status   int
	Location string `header:"Location"`
	Applied  string `header:"Preference-Applied"`
	Body     api.Sandbox
}

// routes registers everything; the description at /openapi.yaml is generated from it.
func (s *Server) routes() {
	s.api = s.newAPI()
	s.sandboxRoutes()
	s.snapshotRoutes()
	s.insideRoutes()
	s.portRoutes()
	s.eventRoutes()
	s.catalogueRoutes()
	s.poolRoutes()
	s.cacheRoutes()
	s.accountRoutes()
	s.operationRoutes()
	s.publicRoutes()
	s.finish()
}

// sandboxRoutes are the life of a sandbox.
func (s *Server) sandboxRoutes() {
	const read, write = sandboxer.ScopeRead, sandboxer.ScopeWrite
	o := op("createSandbox", "POST", "/v1/sandboxes", write, "sandboxes", "Create a sandbox")
	o.DefaultStatus = http.StatusCreated
	o.Description += " Answers 201 when the sandbox is running, 200 when another request made it (found). The work continues if the client hangs up; the same Idempotency-Key finds it again."
	o.Responses["202"] = &huma.Response{Description: "Recorded; creating (Prefer: respond-async)", Content: s.content(api.Sandbox{})}
	o.Responses["200"] = &huma.Response{Description: "It exists already, or another request made it meanwhile", Content: s.content(api.Sandbox{})}
	routeJSON(s, o, s.create)

	route(s, op("listSandboxes", "GET", "/v1/sandboxes", read, "sandboxes", "List sandboxes, newest first"), s.list)
	o = op("getSandbox", "GET", "/v1/sandboxes/{id}", read, "sandboxes", "Get a sandbox; optionally wait for a state")
	route(s, o, s.get)
	o = op("destroySandbox", "DELETE", "/v1/sandboxes/{id}", write, "sandboxes", "Destroy a sandbox")
	o.Description += " Accepted in every state; destroying a terminated sandbox succeeds."
	o.Responses["202"] = &huma.Response{Description: "Recorded; the teardown continues", Content: s.content(api.Sandbox{})}
	route(s, o, s.destroy)
	routeJSON(s, op("extendSandbox", "POST", "/v1/sandboxes/{id}/extend", write, "sandboxes", "Move the expiry"), s.extend)
	o = op("setNetwork", "PUT", "/v1/sandboxes/{id}/network", write, "sandboxes", "Change the network policy of a running sandbox")
	o.Description += " Within the limits of its profile. Open connections that are no longer allowed are cut."
	routeJSON(s, o, s.setNetwork)
	route(s, op("getStats", "GET", "/v1/sandboxes/{id}/stats", read, "sandboxes", "Measure the sandbox"), s.stats)
	routeJSON(s, op("plan", "POST", "/v1/plan", write, "sandboxes", "Get the result and the price of a create; creates nothing"), s.plan)
}

// insideRoutes are commands and files inside of a sandbox.
func (s *Server) insideRoutes() {
	const read, write = sandboxer.ScopeRead, sandboxer.ScopeWrite
	routeJSON(s, op("exec", "POST", "/v1/sandboxes/{id}/exec", write, "exec", "Run a command to its end and get its output, up to a limit"), s.run)
	o := op("execStream", "GET", "/v1/sandboxes/{id}/exec", write, "exec", "Run a command with its streams over a WebSocket")
	o.DefaultStatus = http.StatusSwitchingProtocols
	o.Description += " WebSocket subprotocol `" + api.ExecProtocol + "`; docs/reference/api.md describes the messages."
	route(s, o, s.execStream)

	o = op("readFile", "GET", "/v1/sandboxes/{id}/files", read, "files", "Read a file")
	o.Responses["200"] = &huma.Response{Description: "The bytes of the file", Content: map[string]*huma.MediaType{"application/octet-stream": bytesBody()}}
	route(s, o, s.readFile)
	o = op("writeFile", "PUT", "/v1/sandboxes/{id}/files", write, "files", "Create or replace a file, making its parents")
	route(s, o, s.writeFile)
	s.describeBody(o, false, "application/octet-stream", bytesBody())
	route(s, op("removeFile", "DELETE", "/v1/sandboxes/{id}/files", write, "files", "Remove a file or a tree; absence is success"), s.removeFile)
	route(s, op("statFile", "GET", "/v1/sandboxes/{id}/files/stat", read, "files", "Describe a file"), s.statFile)
	route(s, op("listFiles", "GET", "/v1/sandboxes/{id}/files/list", read, "files", "List a directory by name"), s.listFiles)
	routeJSON(s, op("makeDir", "POST", "/v1/sandboxes/{id}/files/mkdir", write, "files", "Make a directory and its parents"), s.makeDir)
	routeJSON(s, op("moveFile", "POST", "/v1/sandboxes/{id}/files/move", write, "files", "Rename a file or directory"), s.moveFile)
}

// portRoutes are the ports and the agent of a sandbox.
func (s *Server) portRoutes() {
	const read, write = sandboxer.ScopeRead, sandboxer.ScopeWrite
	route(s, op("listPorts", "GET", "/v1/sandboxes/{id}/ports", read, "ports", "List the ports that are declared, published, open or listening"), s.listPorts)
	o := op("openPort", "PUT", "/v1/sandboxes/{id}/ports/{port}", write, "ports", "Open a port at the port proxy")
	o.Description += " Until it is closed or the sandbox ends. Private: visitors need a key or a signed URL."
	route(s, o, s.openPort)
	o = op("closePort", "DELETE", "/v1/sandboxes/{id}/ports/{port}", write, "ports", "Close a port at the port proxy and revoke its signed URLs")
	route(s, o, s.closePort)
	routeJSON(s, op("signPort", "POST", "/v1/sandboxes/{id}/ports/{port}/url", write, "ports", "Make a signed URL that gives its holder access to an open port"), s.signPort)
	route(s, op("revokePort", "POST", "/v1/sandboxes/{id}/ports/{port}/revoke", write, "ports", "Revoke the signed URLs of a port, which stays open"), s.revokePort)
	o = op("connectPort", "GET", "/v1/sandboxes/{id}/ports/{port}/connect", write, "ports", "Open a byte stream to a TCP port inside")
	o.DefaultStatus = http.StatusSwitchingProtocols
	o.Description += " WebSocket subprotocol `" + api.PortProtocol + "`: binary messages are bytes, an empty one ends its direction."
	route(s, o, s.connectPort)

	o = op("connectAgent", "GET", "/v1/sandboxes/{id}/agent", write, "agent", "Open a byte stream to the agent inside")
	o.DefaultStatus = http.StatusSwitchingProtocols
	o.Description += " WebSocket subprotocol `" + api.AgentProtocol + "`: as the stream to a port, with the agent's wire on it. Only for extensions with the capability agent."
	route(s, o, s.connectAgent)
}

// eventRoutes are the history, and what happens now.
func (s *Server) eventRoutes() {
	const read = sandboxer.ScopeRead
	o := op("sandboxEvents", "GET", "/v1/sandboxes/{id}/events", read, "events", "The history of a sandbox, or its events as they happen")
	route(s, s.describeEvents(o), s.sandboxEvents)
	o = op("events", "GET", "/v1/events", read, "events", "The history of every sandbox, or events as they happen")
	route(s, s.describeEvents(o), s.events)
}

// catalogueRoutes are profiles and extensions.
func (s *Server) catalogueRoutes() {
	const read = sandboxer.ScopeRead
	route(s, op("listProfiles", "GET", "/v1/profiles", read, "catalogue", "List profiles"), s.profiles)
	route(s, op("getProfile", "GET", "/v1/profiles/{id}", read, "catalogue", "Get a profile"), s.profile)
	route(s, op("listExtensions", "GET", "/v1/extensions", read, "catalogue", "List extensions"), s.extensions)
	route(s, op("probeExtension", "POST", "/v1/extensions/{id}/probe", read, "catalogue", "Ask an extension how many sandboxes it can take now"), s.probe)
}

// accountRoutes are API keys, secrets, credits and quotas.
func (s *Server) accountRoutes() {
	const read, write, admin = sandboxer.ScopeRead, sandboxer.ScopeWrite, sandboxer.ScopeAdmin
	o := op("createKey", "POST", "/v1/keys", admin, "keys", "Make an API key; its token is shown only once")
	o.DefaultStatus = http.StatusCreated
	routeJSON(s, o, s.createKey)
	route(s, op("listKeys", "GET", "/v1/keys", admin, "keys", "List API keys"), s.keys)
	route(s, op("revokeKey", "DELETE", "/v1/keys/{id}", admin, "keys", "Revoke an API key and end its streams"), s.revokeKey)

	o = op("setSecret", "PUT", "/v1/secrets/{name}", write, "secrets", "Set a secret; its value cannot be read again")
	o.Description += " A value that it has already makes no new version. Sandboxes keep the version that they were created with."
	routeJSON(s, o, s.setSecret)
	route(s, op("listSecrets", "GET", "/v1/secrets", read, "secrets", "List secrets, without values"), s.secrets)
	o = op("removeSecret", "DELETE", "/v1/secrets/{name}", write, "secrets", "Remove a secret that nothing needs")
	o.Description += " Refused with 409 while a sandbox, a snapshot or the file of an extension refers to it."
	route(s, o, s.removeSecret)

	route(s, op("getBalance", "GET", "/v1/credits", read, "credits", "The balance of a tenant"), s.balance)
	routeJSON(s, op("grantCredits", "POST", "/v1/credits/grants", admin, "credits", "Grant credits to a tenant"), s.grant)
	route(s, op("listEntries", "GET", "/v1/credits/entries", read, "credits", "The ledger, oldest first"), s.entries)

	o = op("listUsage", "GET", "/v1/credits/usage", read, "credits", "What sandboxes used and cost, oldest first")
	o.Description += " One row for each sandbox that ran, written when its bill is settled, and corrections. docs/reference/usage-events.md describes them."
	route(s, o, s.usage)
	route(s, op("listSinks", "GET", "/v1/credits/sinks", admin, "credits", "List the receivers of usage rows"), s.sinks)
	route(s, op("getSink", "GET", "/v1/credits/sinks/{name}", admin, "credits", "Get a receiver with its dead letters"), s.sink)
	routeJSON(s, op("replaySink", "POST", "/v1/credits/sinks/{name}/replay", admin, "credits", "Deliver dead letters, or old rows, once more"), s.replaySink)
	o = op("dropSink", "POST", "/v1/credits/sinks/{name}/drop", admin, "credits", "Give up dead letters")
	o.Description += " A sink that is not in sinks.yaml any more is forgotten."
	routeJSON(s, o, s.dropSink)

	route(s, op("listQuotas", "GET", "/v1/quotas", read, "quotas", "Get the quotas of tenants and their use"), s.quotas)
}

// operationRoutes are for administrators, except for the status.
func (s *Server) operationRoutes() {
	const read, admin = sandboxer.ScopeRead, sandboxer.ScopeAdmin
	route(s, op("audit", "GET", "/v1/audit", admin, "operation", "Check the invariants"), s.audit)
	route(s, op("listQuarantine", "GET", "/v1/quarantine", admin, "operation", "List objects of this installation that the database does not know, because it was restored or lost its latest writes"), s.quarantine)
	o := op("forgetSandbox", "POST", "/v1/sandboxes/{id}/forget", admin, "operation", "Give up a sandbox whose host is gone for good")
	o.Description += " Only a sandbox that could not be removed. The objects that may remain are in cleanup.kept and in the audit."
	route(s, o, s.forget)
	o = op("acceptDatabase", "POST", "/v1/database/accept", admin, "operation", "Accept a database that went back in time: deadlines count again")
	o.Description += " Sandboxes that expired by their records end then; the audit names them."
	route(s, o, s.acceptDatabase)
	route(s, op("sweep", "POST", "/v1/sweep", admin, "operation", "Run one pass of the sweep now"), s.sweep)
	route(s, op("getStatus", "GET", "/v1/status", read, "operation", "Get the status of the server and the caller's identity"), s.status)

	o = op("reload", "POST", "/v1/reload", admin, "operation", "Read the profiles and quotas again")
	o.Description += " All or nothing: with a fault in any file nothing changes. Existing sandboxes keep their settings."
	route(s, o, s.reload)
}

// publicRoutes are what monitoring and tools read.
func (s *Server) publicRoutes() {
	const admin = sandboxer.ScopeAdmin
	o := openOp("health", "GET", "/healthz", "operation", "Whether the server answers")
	o.Metadata["quiet"] = true
	o.Responses["200"] = plain("ok", "text/plain")
	route(s, o, raw(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		io.WriteString(w, "ok\n")
		// The caller has no key: so the answer says how many, and not which.
		if all, down := s.extensionIDs(r.Context()); len(down) > 0 {
			fmt.Fprintf(w, "degraded: %d of %d extensions cannot be used\n", len(down), len(all))
		}
		if at := s.m.WentBack(); !at.IsZero() {
			fmt.Fprintf(w, "the database went back: noticed at %s, not accepted yet\n", at.UTC().Format(time.RFC3339))
		}
	}))
	o = op("metrics", "GET", "/metrics", admin, "operation", "Metrics in the Prometheus text format")
	o.Metadata["quiet"] = true
	o.Responses["200"] = plain("metrics", "text/plain")
	route(s, o, raw(s.metrics.handler(s.count, s.extensionInfos, s.m.Sinks).ServeHTTP))
	o = openOp("openapi", "GET", "/openapi.yaml", "operation", "This description")
	o.Responses["200"] = plain("OpenAPI 3.1", "application/yaml")
	route(s, o, raw(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/yaml")
		w.Write(s.doc)
	}))
}

// finish renders the description.
func (s *Server) finish() {
	doc := s.api.OpenAPI()
	// huma registers its own error type for every operation; ours is Problem.
	delete(doc.Components.Schemas.Map(), "ErrorModel")
	delete(doc.Components.Schemas.Map(), "ErrorDetail")
	s.allowNewFields(doc.Components.Schemas)
	y, err := doc.YAML()
	if err != nil {
		panic(err) // the description is made of constants
	}
	s.doc = y
}

// allowNewFields lets answers grow: everything except requests may have further fields
// in a later version, and a client must not refuse them.
func (s *Server) allowNewFields(reg huma.Registry) {
	strict := map[*huma.Schema]bool{}
	var mark func(*huma.Schema)
	mark = func(sc *huma.Schema) {
		for sc != nil && sc.Ref != "" {
			sc = reg.SchemaFromRef(sc.Ref)
		}
		if sc == nil || strict[sc] {
			return
		}
		strict[sc] = true
		mark(sc.Items)
		for _, p := range sc.Properties {
			mark(p)
		}
	}
	mark(reg.Schema(typeOf[api.ExecStream](), true, ""))
	for _, t := range s.types {
		if t.in != nil {
			mark(reg.Schema(t.in, true, ""))
		}
	}
	for _, sc := range reg.Map() {
		if !strict[sc] && sc.AdditionalProperties == false {
			sc.AdditionalProperties = nil
		}
	}
}

// content describes a JSON body of v's type.
func (s *Server) content(v any) map[string]*huma.MediaType {
	t := reflect.TypeOf(v)
	return map[string]*huma.MediaType{"application/json": {Schema: s.api.OpenAPI().Components.Schemas.Schema(t, true, ""), Example: exampleOf(t)}}
}

func bytesBody() *huma.MediaType {
	return &huma.MediaType{Schema: &huma.Schema{Type: "string", Format: "binary"}}
}

func plain(what, contentType string) *huma.Response {
	return &huma.Response{Description: what, Content: map[string]*huma.MediaType{contentType: {Schema: &huma.Schema{Type: "string"}}}}
}

// raw is a handler that writes its answer itself.
func raw(h http.HandlerFunc) func(context.Context, *none) (*huma.StreamResponse, error) {
	return func(ctx context.Context, _ *none) (*huma.StreamResponse, error) {
		return streamed(ctx, h), nil
	}
}

// poured answers with all bytes of f, read in sctx. Then, or on an error, it calls end.
func poured(ctx, sctx context.Context, f io.Reader, disposition string, end func()) (*huma.StreamResponse, error) {
	// The first piece is read before anything is answered: an error there still
	// gets a proper answer.
	buf := make([]byte, 128<<10)
	n, err := io.ReadAtLeast(f, buf, 1)
	if err != nil && err != io.EOF {
		defer end()
		return nil, edge.StreamError(sctx, err)
	}
	return streamed(ctx, func(w http.ResponseWriter, _ *http.Request) {
		defer end()
		// A sandbox's bytes are never shown as a page of this server.
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Disposition", disposition)
		_, err := w.Write(buf[:n])
		if err == nil {
			_, err = io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{f}, buf)
		}
		if err != nil {
			edge.Problem(ctx, edge.StreamError(sctx, err)) // to the log
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler) // the client must not take the part for the whole
		}
	}), nil
}

func streamed(ctx context.Context, h http.HandlerFunc) *huma.StreamResponse {
	w, r := edge.Exchange(ctx)
	return &huma.StreamResponse{Body: func(huma.Context) { h(w, r) }}
}

// replied is the answer with body applied to x, or err.
func replied[T, B any](body func(T) B, x T, err error) (*reply[B], error) {
	if err != nil {
		return nil, err
	}
	return &reply[B]{Body: body(x)}, nil
}

// listed is the answer with body applied to each of a page's items, or err.
func listed[T, B any](body func(T) B, page []T, next string, err error) (*reply[api.List[B]], error) {
	if err != nil {
		return nil, err
	}
	items := make([]B, len(page))
	for i, x := range page {
		items[i] = body(x)
	}
	return listOf(items, next), nil
}

func listOf[T any](items []T, next string) *reply[api.List[T]] {
	if items == nil {
		items = []T{}
	}
	return &reply[api.List[T]]{Body: api.List[T]{SchemaVersion: api.SchemaVersion, Items: items, NextCursor: next}}
}
