package aioserver

import (
	"net/http"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// routes is what is served, by method and path.
var routes = map[string]func(*call) error{
	"GET /v1/sandbox":                 (*call).sandbox,
	"GET /v1/sandbox/packages/python": (*call).pythonPackages,
	"GET /v1/sandbox/packages/nodejs": (*call).nodePackages,

	"POST /v1/shell/exec":            (*call).shellExec,
	"POST /v1/shell/view":            (*call).shellView,
	"POST /v1/shell/wait":            (*call).shellWait,
	"POST /v1/shell/write":           (*call).shellWrite,
	"POST /v1/shell/kill":            (*call).shellKill,
	"POST /v1/shell/sessions/create": (*call).shellCreate,
	"POST /v1/shell/sessions/update": (*call).shellUpdate,
	"GET /v1/shell/sessions/stats":   (*call).shellStats,
	"GET /v1/shell/sessions":         (*call).shellSessions,
	"DELETE /v1/shell/sessions":      func(c *call) error { return c.closeSession(shellKind, "") },

	"POST /v1/bash/exec":            (*call).bashExec,
	"POST /v1/bash/output":          (*call).bashOutput,
	"POST /v1/bash/write":           (*call).bashWrite,
	"POST /v1/bash/kill":            (*call).bashKill,
	"GET /v1/bash/sessions":         (*call).bashSessions,
	"POST /v1/bash/sessions/create": (*call).bashCreate,

	"POST /v1/file/read":               (*call).fileRead,
	"POST /v1/file/write":              (*call).fileWrite,
	"POST /v1/file/replace":            (*call).fileReplace,
	"POST /v1/file/search":             (*call).fileSearch,
	"POST /v1/file/find":               (*call).fileFind,
	"POST /v1/file/grep":               (*call).fileGrep,
	"POST /v1/file/glob":               (*call).fileGlob,
	"POST /v1/file/list":               (*call).fileList,
	"POST /v1/file/upload":             (*call).fileUpload,
	"GET /v1/file/download":            (*call).fileDownload,
	"POST /v1/file/str_replace_editor": (*call).fileEdit,

	"POST /v1/code/execute": (*call).codeExecute,
	"GET /v1/code/info":     (*call).codeInfo,
}

// unserved is what the image has besides, by the beginning of its path, and what to do instead.
var unserved = []struct{ prefix, what, instead string }{
	{"/auth", "auth", "the URL of a sandbox has its token in it: nothing else is needed"},
	{"/tickets", "tickets", "the URL of a sandbox has its token in it: nothing else is needed"},
	{"/v1/browser", "browser", "start a browser in the sandbox by /v1/bash/exec, from an image that has one"},
	{"/v1/display", "display", "a sandbox has no screen"},
	{"/v1/jupyter", "jupyter", "run code by /v1/code/execute"},
	{"/v1/nodejs", "nodejs", "run code by /v1/code/execute, with the language javascript"},
	{"/v1/mcp", "mcp", "start the server in the sandbox by /v1/bash/exec"},
	{"/v1/skills", "skills", "read and write their files by /v1/file"},
	{"/v1/proxy", "proxy", "what a sandbox may reach is its profile's network policy"},
	{"/v1/util", "util", "start a converter in the sandbox by /v1/bash/exec"},
	{"/v1/file/watch", "file/watch", "list the directory again by /v1/file/list"},
	{"/v1/sandbox/hooks", "sandbox/hooks", "run the command before the sandbox is destroyed"},
	{"/v1/sandbox/observe", "sandbox/observe", "measure it: sandboxer stats ID"},
	{"/v1/shell/terminal-url", "shell/terminal-url", "open a terminal with: sandboxer shell ID"},
	{"/v1/shell/ws", "shell/ws", "open a terminal with: sandboxer shell ID"},
}

// route serves the request.
func (c *call) route() error {
	p, method := c.r.URL.Path, c.r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	if f := routes[method+" "+p]; f != nil {
		if accept := c.r.Header.Get("Accept"); strings.HasPrefix(accept, "text/event-stream") && !strings.Contains(accept, ",") {
			return sandboxer.E(sandboxer.Unsupported, nil, "%s answers in one piece here, not as a stream of events", p).
				WithHint("leave the header Accept out, and poll with /v1/bash/output or /v1/shell/view")
		}
		return f(c)
	}
	if id, ok := strings.CutPrefix(p, "/v1/shell/sessions/"); ok && id != "" && method == http.MethodDelete {
		return c.closeSession(shellKind, id)
	}
	if id, ok := strings.CutPrefix(p, "/v1/bash/sessions/"); ok && method == http.MethodPost {
		if id, ok := strings.CutSuffix(id, "/close"); ok && id != "" {
			return c.closeSession(bashKind, id)
		}
	}
	var allow []string
	for pattern := range routes {
		if m, at, _ := strings.Cut(pattern, " "); at == p {
			allow = append(allow, m)
		}
	}
	if len(allow) > 0 {
		slices.Sort(allow)
		c.w.Header().Set("Allow", strings.Join(allow, ", "))
		return &statusError{error: sandboxer.E(sandboxer.Invalid, nil, "%s has no method %s", p, method).WithHint("it has: %s", strings.Join(allow, ", ")), status: http.StatusMethodNotAllowed}
	}
	for _, u := range unserved {
		if p == u.prefix || strings.HasPrefix(p, u.prefix+"/") {
			return sandboxer.E(sandboxer.Unsupported, nil, "%s is not served by sandboxer: sandboxes have no %s of their own", p, u.what).WithHint("%s", u.instead)
		}
	}
	return sandboxer.E(sandboxer.NotFound, nil, "there is nothing at %s", firstRunes(strings.ToValidUTF8(p, "?"), min(len([]rune(p)), 200))).
		WithHint("docs/sandbox-api.md lists what there is")
}
