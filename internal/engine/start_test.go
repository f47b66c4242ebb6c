package engine

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// Engines' messages about a command that cannot start are distinguished from a command's own.
func TestExitOf(t *testing.T) {
	const oci = "OCI runtime exec failed: exec failed: unable to start container process: "
	for said, want := range map[string]struct {
		code, verdict int
		err           error
		kind          sandboxer.Kind
	}{
		"": {code: 126},
		oci + `exec: "nosuch": executable file not found in $PATH: unknown`:                    {code: 127, verdict: 127},
		oci + `exec: "/etc/passwd": permission denied: unknown`:                                {code: 126, verdict: 126},
		oci + `exec: "/x": exec format error: unknown`:                                         {code: 126, verdict: 126},
		"Error: crun: executable file `nosuch` not found: No such file or directory":           {code: 127, verdict: 127},
		oci + `chdir to cwd ("/no") set in config.json failed: no such file or directory`:      {code: 126, kind: sandboxer.Invalid},
		"unable to find user stranger: no matching entries in passwd file":                     {code: 126, kind: sandboxer.Invalid},
		oci + "fork/exec /proc/self/fd/6: resource temporarily unavailable: unknown":           {code: 126, kind: sandboxer.Exhausted},
		"Error response from daemon: No such container: abc":                                   {code: 1, err: ErrNotFound},
		"Error response from daemon: container abc is not running":                             {code: 1, err: ErrNotFound},
		"Error: can only create exec sessions on running containers: container state improper": {code: 255, err: ErrNotFound},
		"Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?":      {code: 1, err: ErrAbsent},
		"ls: /nosuch: No such file or directory":                                               {code: 1},
		"OCI runtime exec failed, said a program":                                              {code: 3},
	} {
		err := refusal("nosuch", sandboxer.Exit{Code: want.code}, said, "/no", "stranger")
		verdict := 0
		if refused, ok := errors.AsType[*sandboxer.StartError](err); ok {
			verdict, err = refused.Exit(sandboxer.Cmd{Args: []string{"nosuch"}}).Code, nil
		}
		if verdict != want.verdict || want.err != nil && !errors.Is(err, want.err) || want.kind != "" && sandboxer.KindOf(err) != want.kind || (err != nil) != (want.err != nil || want.kind != "") {
			t.Errorf("%q with %d: %d, %v", said, want.code, verdict, err)
		}
	}
}

// Output is passed on at once unless it begins as engines begin; that is held, within a bound.
func TestGuard(t *testing.T) {
	for _, c := range []struct {
		in     []string
		passed string
		held   string
	}{
		{[]string{"hello"}, "hello", ""},
		{[]string{"Err", "or: it failed\n"}, "", "Error: it failed\n"},
		{[]string{"Err", "and more"}, "Errand more", ""},
		{[]string{"Error: one\ntwo\nthree"}, "Error: one\ntwo\nthree", ""},
		{[]string{"Error: " + strings.Repeat("x", 9<<10)}, "Error: " + strings.Repeat("x", 9<<10), ""},
	} {
		var b strings.Builder
		heard := 0
		g := &guard{w: &b, failed: func(error) {}, wrote: func() { heard++ }}
		for _, p := range c.in {
			if n, err := g.Write([]byte(p)); n != len(p) || err != nil {
				t.Errorf("%q: %d, %v", p, n, err)
			}
		}
		if b.String() != c.passed || g.held() != c.held || heard != len(c.in) {
			t.Errorf("%.60q: passed on %.60q, held %.60q", c.in, b.String(), g.held())
		}
		if err := g.release(); err != nil || b.String() != strings.Join(c.in, "") {
			t.Errorf("released: %.60q, %v", b.String(), err)
		}
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	g := &guard{w: refusing{}, failed: cancel}
	if _, err := g.Write([]byte("x")); err == nil || !errors.Is(context.Cause(ctx), errWriter) || !errors.Is(context.Cause(ctx), errRefuses) {
		t.Errorf("a reader that leaves: %v, %v", err, context.Cause(ctx))
	}
}

// Values of variables are in no list of processes, except those that would direct the
// engine's program.
func TestVariables(t *testing.T) {
	env := map[string]string{"DOCKER_HOST": "unix:///ours"}
	args := Variables("-e", map[string]string{"TOKEN": "secret", "DOCKER_HOST": "theirs", "PATH": "/bin", "ld_preload": "x", "HTTP_PROXY": "p"}, env)
	if got, want := strings.Join(args, " "), "-e DOCKER_HOST=theirs -e HTTP_PROXY=p -e PATH=/bin -e TOKEN -e ld_preload=x"; got != want {
		t.Errorf("%q; want %q", got, want)
	}
	if len(env) != 2 || env["TOKEN"] != "secret" || env["DOCKER_HOST"] != "unix:///ours" {
		t.Errorf("the program's environment: %v", env)
	}
}
