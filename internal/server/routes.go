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
	ID string `path:"id" maxLength:"256" doc:"ID, unique beginning of one (3 characters or more), or name; of whichever tenant: TENANT/ID, escaped as TENANT%2FID"`
}

// InPage is the paging of a list.
type InPage struct {
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" doc:"Items of a page; default 100"`
	Cursor string `query:"cursor" maxLength:"1024" doc:"next_cursor of the page before"`
}

// answer is a sandbox with the status and the place that belong to it.
type answer struct {
	Status   int
	Location string `header:"Location"`
	Applied  string `header:"Preference-Applied"`
	Body     api.Sandbox
}

// routes registers everything; the description at /openapi.yaml is made of it.
func (s *Server) routes() {
	const read, write, admin = sandboxer.ScopeRead, sandboxer.ScopeWrite, sandboxer.ScopeAdmin
	s.api = s.newAPI()

	o := op("createSandbox", "POST", "/v1/sandboxes", write, "sandboxes", "Create a sandbox")
	o.DefaultStatus = http.StatusCreated
	o.Description += " Answers 201 when the sandbox is running, 200 when it is one that another request made (found). The work goes on if the client hangs up; the same Idempotency-Key finds it again."
	o.Responses["202"] = &huma.Response{Description: "Written down; creating (Prefer: respond-async)", Content: s.content(api.Sandbox{})}
	o.Responses["200"] = &huma.Response{Description: "It is there already, or was made by another request meanwhile", Content: s.content(api.Sandbox{})}
	routeJSON(s, o, s.create)

	route(s, op("listSandboxes", "GET", "/v1/sandboxes", read, "sandboxes", "List sandboxes, newest first"), s.list)
	o = op("getSandbox", "GET", "/v1/sandboxes/{id}", read, "sandboxes", "Get a sandbox, perhaps waiting for a state")
	route(s, o, s.get)
	o = op("destroySandbox", "DELETE", "/v1/sandboxes/{id}", write, "sandboxes", "Destroy a sandbox")
	o.Description += " Accepted in every state; destroying what is terminated is success."
	o.Responses["202"] = &huma.Response{Description: "Written down; the teardown goes on", Content: s.content(api.Sandbox{})}
	route(s, o, s.destroy)
	routeJSON(s, op("extendSandbox", "POST", "/v1/sandboxes/{id}/extend", write, "sandboxes", "Move the expiry"), s.extend)
	o = op("setNetwork", "PUT", "/v1/sandboxes/{id}/network", write, "sandboxes", "Change what a running sandbox may reach")
	o.Description += " Within what its profile allows. Open connections that are not allowed any more are cut."
	routeJSON(s, o, s.setNetwork)
	route(s, op("getStats", "GET", "/v1/sandboxes/{id}/stats", read, "sandboxes", "Measure the sandbox"), s.stats)
	routeJSON(s, op("plan", "POST", "/v1/plan", write, "sandboxes", "What a create would lead to and cost; creates nothing"), s.plan)

	s.snapshotRoutes()

	routeJSON(s, op("exec", "POST", "/v1/sandboxes/{id}/exec", write, "exec", "Run a command to its end, output bounded"), s.run)
	o = op("execStream", "GET", "/v1/sandboxes/{id}/exec", write, "exec", "Run a command with its streams over a WebSocket")
	o.DefaultStatus = http.StatusSwitchingProtocols
	o.Description += " WebSocket subprotocol `" + api.ExecProtocol + "`; docs/api.md describes the messages."
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

	route(s, op("listPorts", "GET", "/v1/sandboxes/{id}/ports", read, "ports", "List the ports that are declared, published, open or listened on"), s.listPorts)
	o = op("openPort", "PUT", "/v1/sandboxes/{id}/ports/{port}", write, "ports", "Let the port proxy serve a port")
	o.Description += " Until it is closed or the sandbox ends. Private: visitors need a key or a signed URL."
	route(s, o, s.openPort)
	o = op("closePort", "DELETE", "/v1/sandboxes/{id}/ports/{port}", write, "ports", "Close a port to the port proxy; its signed URLs end for good")
	route(s, o, s.closePort)
	routeJSON(s, op("signPort", "POST", "/v1/sandboxes/{id}/ports/{port}/url", write, "ports", "Make a signed URL, with which anybody may use an open port"), s.signPort)
	route(s, op("revokePort", "POST", "/v1/sandboxes/{id}/ports/{port}/revoke", write, "ports", "End the signed URLs of a port, which stays open"), s.revokePort)
	o = op("connectPort", "GET", "/v1/sandboxes/{id}/ports/{port}/connect", write, "ports", "Open a byte stream to a TCP port inside")
	o.DefaultStatus = http.StatusSwitchingProtocols
	o.Description += " WebSocket subprotocol `" + api.PortProtocol + "`: binary messages are bytes, an empty one ends its direction."
	route(s, o, s.connectPort)

	o = op("connectAgent", "GET", "/v1/sandboxes/{id}/agent", write, "agent", "Open a byte stream to the agent inside")
	o.DefaultStatus = http.StatusSwitchingProtocols
	o.Description += " WebSocket subprotocol `" + api.AgentProtocol + "`: as the stream to a port, with the agent's wire on it. Only for extensions with the capability agent."
	route(s, o, s.connectAgent)

	o = op("sandboxEvents", "GET", "/v1/sandboxes/{id}/events", read, "events", "The history of a sandbox, or its events as they happen")
	route(s, s.describeEvents(o), s.sandboxEvents)
	o = op("events", "GET", "/v1/events", read, "events", "The history of every sandbox, or events as they happen")
	route(s, s.describeEvents(o), s.events)

	route(s, op("listProfiles", "GET", "/v1/profiles", read, "catalogue", "List profiles"), s.profiles)
	route(s, op("getProfile", "GET", "/v1/profiles/{id}", read, "catalogue", "Get a profile"), s.profile)
	route(s, op("listExtensions", "GET", "/v1/extensions", read, "catalogue", "List extensions"), s.extensions)
	route(s, op("probeExtension", "POST", "/v1/extensions/{id}/probe", read, "catalogue", "Ask an extension what it can take now"), s.probe)

	s.poolRoutes()
	s.cacheRoutes()

	o = op("createKey", "POST", "/v1/keys", admin, "keys", "Make an API key; its token is shown this one time")
	o.DefaultStatus = http.StatusCreated
	routeJSON(s, o, s.createKey)
	route(s, op("listKeys", "GET", "/v1/keys", admin, "keys", "List API keys"), s.keys)
	route(s, op("revokeKey", "DELETE", "/v1/keys/{id}", admin, "keys", "Revoke an API key and end its streams"), s.revokeKey)

	route(s, op("getBalance", "GET", "/v1/credits", read, "credits", "The balance of a tenant"), s.balance)
	routeJSON(s, op("grantCredits", "POST", "/v1/credits/grants", admin, "credits", "Grant credits to a tenant"), s.grant)
	route(s, op("listEntries", "GET", "/v1/credits/entries", read, "credits", "The ledger, oldest first"), s.entries)

	route(s, op("listQuotas", "GET", "/v1/quotas", read, "quotas", "What a tenant has and may have"), s.quotas)

	route(s, op("audit", "GET", "/v1/audit", admin, "operation", "Check the invariants"), s.audit)
	route(s, op("listQuarantine", "GET", "/v1/quarantine", admin, "operation", "List what is ours and unknown to the database, which was restored or lost its latest writes"), s.quarantine)
	o = op("forgetSandbox", "POST", "/v1/sandboxes/{id}/forget", admin, "operation", "Give up a sandbox whose host is gone for good")
	o.Description += " Only one that could not be removed. What may remain is in cleanup.kept, and named by the audit."
	route(s, o, s.forget)
	routeJSON(s, op("adoptSandbox", "POST", "/v1/sandboxes/{id}/adopt", admin, "operation", "Make a record anew for a quarantined sandbox"), s.adopt)
	route(s, op("sweep", "POST", "/v1/sweep", admin, "operation", "Run one pass of the sweep now"), s.sweep)
	route(s, op("getStatus", "GET", "/v1/status", read, "operation", "The server, and who it takes the caller for"), s.status)

	o = op("reload", "POST", "/v1/reload", admin, "operation", "Read the profiles anew")
	o.Description += " All or nothing: with a fault in any file nothing changes. Sandboxes that exist keep what they were made with."
	route(s, o, s.reload)

	o = openOp("health", "GET", "/healthz", "operation", "Whether the server answers")
	o.Metadata["quiet"] = true
	o.Responses["200"] = plain("ok", "text/plain")
	route(s, o, raw(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		io.WriteString(w, "ok\n")
		// Who asks has no key: how many, and not which.
		if all, down := s.extensionIDs(r.Context()); len(down) > 0 {
			fmt.Fprintf(w, "degraded: %d of %d extensions cannot be used\n", len(down), len(all))
		}
		if at := s.opts.WentBack; time.Since(at) < 24*time.Hour {
			fmt.Fprintf(w, "the database went back: noticed at %s\n", at.UTC().Format(time.RFC3339))
		}
	}))
	o = op("metrics", "GET", "/metrics", admin, "operation", "Metrics in the Prometheus text format")
	o.Metadata["quiet"] = true
	o.Responses["200"] = plain("metrics", "text/plain")
	route(s, o, raw(s.metrics.handler(s.count, s.extensionIDs).ServeHTTP))
	o = openOp("openapi", "GET", "/openapi.yaml", "operation", "This description")
	o.Responses["200"] = plain("OpenAPI 3.1", "application/yaml")
	route(s, o, raw(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/yaml")
		w.Write(s.doc)
	}))
	s.finish()
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

// allowNewFields lets answers grow: what is not part of a request may have further fields
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

func streamed(ctx context.Context, h http.HandlerFunc) *huma.StreamResponse {
	w, r := edge.Exchange(ctx)
	return &huma.StreamResponse{Body: func(huma.Context) { h(w, r) }}
}

func listOf[T any](items []T, next string) *reply[api.List[T]] {
	if items == nil {
		items = []T{}
	}
	return &reply[api.List[T]]{Body: api.List[T]{SchemaVersion: api.SchemaVersion, Items: items, NextCursor: next}}
}
