package sandboxer

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// A ReadyCheck is what a profile wants of a sandbox before its user gets it, once its
// extension says that it is ready: that it answers an HTTP request, or that a command inside
// ends with 0. The zero ReadyCheck wants nothing. The broker asks, at once and then again and
// again, until it holds or Timeout is over.
type ReadyCheck struct {
	HTTP    ReadyHTTP     `json:"http,omitzero"`
	Command []string      `json:"command,omitempty"`    // run as the sandbox's default user in the workspace
	Timeout time.Duration `json:"timeout_ns,omitempty"` // of all asking; DefaultReadyTimeout if zero, at most MaxReadyTimeout
}

// ReadyHTTP is a GET request, and what has to be answered. Redirects are not followed.
type ReadyHTTP struct {
	Port   int    `json:"port,omitempty"`   // inside; 0 means the sandbox's own URL (Reachability.URL)
	Path   string `json:"path,omitempty"`   // with its query; "/" if empty
	Status int    `json:"status,omitempty"` // this one and no other; 200 if zero
}

// The time that a sandbox has to answer as its ReadyCheck wants. The longest is well within
// the time after which a sandbox that is not finished is given up.
const (
	DefaultReadyTimeout = 30 * time.Second
	MaxReadyTimeout     = 20 * time.Minute
)

// WithDefaults returns r with what it leaves out filled in.
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

// Asks reports whether r wants anything.
func (r ReadyCheck) Asks() bool { return r.HTTP != (ReadyHTTP{}) || len(r.Command) > 0 }

// Check refuses, as Invalid, what cannot be asked.
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
		return E(Invalid, nil, "no request is answered with the status %d in the end: want 200 to 599", h.Status)
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

// Lacks says what an extension with the capabilities can would need for r to be asked: "" if it
// can be. Whether its sandboxes have a URL of their own is known when there is one.
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
