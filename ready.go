package sandboxer

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// A ReadyCheck is what a profile requires of a sandbox before the caller gets it, once the extension
// reports it as ready: an HTTP request is answered, or a command inside ends with 0. The zero
// ReadyCheck requires nothing. The broker asks repeatedly, without a delay before the first attempt,
// until the check succeeds or Timeout is over.
type ReadyCheck struct {
	HTTP    ReadyHTTP     `json:"http,omitzero"`
	Command []string      `json:"command,omitempty"`    // runs as the sandbox's default user in the workspace
	Timeout time.Duration `json:"timeout_ns,omitempty"` // of all attempts; DefaultReadyTimeout if zero, at most MaxReadyTimeout
}

// ReadyHTTP is a GET request and the expected status. Redirects are not followed.
type ReadyHTTP struct {
	Port   int    `json:"port,omitempty"`   // inside; 0 means the sandbox's own URL (Reachability.URL)
	Path   string `json:"path,omitempty"`   // with its query; "/" if empty
	Status int    `json:"status,omitempty"` // expected status; 200 if zero
}

// The default and the longest ReadyCheck.Timeout. The longest is well within the time after which the
// broker gives up an unfinished sandbox.
const (
	DefaultReadyTimeout = 30 * time.Second
	MaxReadyTimeout     = 20 * time.Minute
)

// WithDefaults returns r with defaults in its empty fields.
func (r ReadyCheck) WithDefaults() ReadyCheck {
	if !r.Asks() {
		return r
	}
	r.Timeout = cmp.Or(r.Timeout, DefaultReadyTimeout)
	if r.HTTP != (ReadyHTTP{}) {
		r.HTTP.Path, r.HTTP.Status = cmp.Or(r.HTTP.Path, "/"), cmp.Or(r.HTTP.Status, 200)
	}
	return r
}

// Asks reports whether r requires anything.
func (r ReadyCheck) Asks() bool { return r.HTTP != (ReadyHTTP{}) || len(r.Command) > 0 }

// Check refuses an invalid r. Kind: Invalid.
func (r ReadyCheck) Check() error {
	h := r.HTTP
	switch {
	case !r.Asks() && r.Timeout != 0:
		return E(Invalid, nil, "a timeout has no effect without http or command")
	case h != (ReadyHTTP{}) && len(r.Command) > 0:
		return E(Invalid, nil, "want either http or command, not both")
	case h.Port < 0 || h.Port > 65535:
		return E(Invalid, nil, "%d is not a port: want 1 to 65535", h.Port)
	case h.Path != "" && !isRequestPath(h.Path):
		return E(Invalid, nil, "%.80q is not the path of a request: want / and visible ASCII characters, at most %d, without #", h.Path, maxReadyPath)
	case h.Status != 0 && (h.Status < 200 || h.Status > 599):
		return E(Invalid, nil, "%d is not a final status of HTTP: want 200 to 599", h.Status)
	case r.Timeout < 0 || r.Timeout > MaxReadyTimeout:
		return E(Invalid, nil, "a timeout of %s: want at most %s", FormatDuration(r.Timeout), FormatDuration(MaxReadyTimeout))
	case len(r.Command) > 0 && r.Command[0] == "":
		return E(Invalid, nil, "the name of a program cannot be empty")
	case slices.ContainsFunc(r.Command, func(a string) bool { return strings.ContainsRune(a, 0) }):
		return E(Invalid, nil, "an argument of the command contains a NUL byte")
	}
	return nil
}

// maxReadyPath bounds ReadyHTTP.Path.
const maxReadyPath = 1024

func isRequestPath(p string) bool {
	return len(p) <= maxReadyPath && p[0] == '/' && !strings.ContainsFunc(p, func(c rune) bool { return c <= ' ' || c > '~' || c == '#' })
}

// Lacks returns the capabilities that an extension with the capabilities can is missing for r; "" if
// none. Whether its sandboxes have a URL is known only when there is a sandbox.
func (r ReadyCheck) Lacks(can []Capability) string {
	has := func(c Capability) bool { return slices.Contains(can, c) }
	switch {
	case len(r.Command) > 0 && !has(CanExec):
		return string(CanExec)
	case r.HTTP.Port != 0 && !has(CanDial) && !has(CanExpose) && !has(CanExec):
		return "all of dial, expose and exec"
	}
	return ""
}
