package aioserver

import (
	"net/http"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// route is one path that is served.
type route struct {
	serve func(*call) error
	lacks []string // see call
}

// async are options of commands that go on after their answer.
var async = []string{"async_mode", "timeout"}

// routes are the served routes, by method and path. Sessions are closed by a path with their ID; see below.
var routes = map[string]route{
	"GET /v1/sandbox": {serve: (*call).sandbox},

	"POST /v1/shell/exec":            {serve: (*call).shellExec, lacks: async},
	"POST /v1/shell/sessions/create": {serve: (*call).shellCreate},

	"POST /v1/bash/exec":            {serve: (*call).bashExec, lacks: async},
	"POST /v1/bash/sessions/create": {serve: (*call).bashCreate, lacks: []string{"snapshot_path"}},

	"POST /v1/file/read":    {serve: (*call).fileRead, lacks: []string{"sudo"}},
	"POST /v1/file/write":   {serve: (*call).fileWrite},
	"POST /v1/file/find":    {serve: (*call).fileFind},
	"POST /v1/file/grep":    {serve: (*call).fileGrep, lacks: []string{"include", "exclude", "context_before", "context_after", "multiline", "offset", "type"}},
	"POST /v1/file/list":    {serve: (*call).fileList, lacks: []string{"file_types", "max_depth", "include_permissions", "sort_by", "sort_desc"}},
	"GET /v1/file/download": {serve: (*call).fileDownload},
}

// unserved lists what else the image serves, by the beginning of its path, and what to use instead.
var unserved = []struct{ prefix, what, instead string }{
	{"/auth", "auth", "the URL of a sandbox has its token in it: nothing else is needed"},
	{"/tickets", "tickets", "the URL of a sandbox has its token in it: nothing else is needed"},
	{"/v1/browser", "browser", "start a browser in the sandbox by /v1/bash/exec, from an image that has one"},
	{"/v1/display", "display", "a sandbox has no screen"},
	{"/v1/jupyter", "jupyter", "run the interpreter by /v1/bash/exec"},
	{"/v1/nodejs", "nodejs", "run the interpreter by /v1/bash/exec"},
	{"/v1/code", "code", "run the interpreter by /v1/bash/exec"},
	{"/v1/mcp", "mcp", "start the server in the sandbox by /v1/bash/exec"},
	{"/v1/skills", "skills", "read and write their files by /v1/file"},
	{"/v1/proxy", "proxy", "what a sandbox may reach is its profile's network policy"},
	{"/v1/util", "util", "start a converter in the sandbox by /v1/bash/exec"},
	{"/v1/file/watch", "file/watch", "list the directory again by /v1/file/list"},
	{"/v1/file/replace", "file/replace", "read the file, and write it by /v1/file/write"},
	{"/v1/file/search", "file/search", "search the file by /v1/file/grep"},
	{"/v1/file/glob", "file/glob", "use /v1/file/find"},
	{"/v1/file/upload", "file/upload", "write the file by /v1/file/write, with the encoding base64"},
	{"/v1/file/str_replace_editor", "file/str_replace_editor", "read the file, and write it by /v1/file/write"},
	{"/v1/sandbox/packages", "sandbox/packages", "run pip or npm by /v1/bash/exec"},
	{"/v1/sandbox/hooks", "sandbox/hooks", "run the command before the sandbox is destroyed"},
	{"/v1/sandbox/observe", "sandbox/observe", "measure it: sandboxer stats ID"},
	{"/v1/shell/terminal-url", "shell/terminal-url", "open a terminal with: sandboxer shell ID"},
	{"/v1/shell/ws", "shell/ws", "open a terminal with: sandboxer shell ID"},
	{"/v1/shell/view", "shell/view", "the answer of /v1/shell/exec has the output"},
	{"/v1/shell/wait", "shell/wait", "the answer of /v1/shell/exec comes when the command has ended"},
	{"/v1/shell/write", "shell/write", "give the input in the command: printf … | command"},
	{"/v1/shell/kill", "shell/kill", "close the session, or end the request: the command ends with it"},
	{"/v1/shell/sessions", "shell/sessions", "create a session by its ID, and close it by DELETE with its ID"},
	{"/v1/bash/output", "bash/output", "the answer of /v1/bash/exec has the output"},
	{"/v1/bash/write", "bash/write", "give the input in the command: printf … | command"},
	{"/v1/bash/kill", "bash/kill", "close the session, or end the request: the command ends with it"},
	{"/v1/bash/sessions", "bash/sessions", "create a session by its ID, and close it by its ID"},
}

// route serves the request.
func (c *call) route() error {
	p, method := c.r.URL.Path, c.r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	if r, ok := routes[method+" "+p]; ok {
		if accept := c.r.Header.Get("Accept"); strings.HasPrefix(accept, "text/event-stream") && !strings.Contains(accept, ",") {
			return sandboxer.E(sandboxer.Unsupported, nil, "%s answers in one piece here, not as a stream of events", p).
				WithHint("leave the header Accept out")
		}
		c.lacks = r.lacks
		return r.serve(c)
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
		WithHint("docs/reference/sandbox-api.md lists the routes")
}
