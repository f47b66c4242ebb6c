package composessh

import (
	"regexp"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestWhy: the error for a project that does not start has the engine's words, whatever the compose
// program makes of them.
func TestWhy(t *testing.T) {
	for name, compose := range map[string]string{"docker": current(t), "podman": "podman-compose"} {
		t.Run(name, func(t *testing.T) {
			onlyLong(t, compose)
			t.Parallel()
			r := newRig(t, compose, 1)
			e := r.opened(t, "why-"+name)
			for id, c := range map[string]struct{ file, say string }{
				"image":  {`services: {main: {image: "registry.invalid/no/such:1"}}`, `starting the service main on host host-1 failed: .*lookup registry.invalid`},
				"binary": {`services: {main: {image: ` + image + `, command: [nosuchprogram]}}`, `starting the service main on host host-1 failed: .*exec: "nosuchprogram": executable file not found`},
				"of-two": {`services: {main: {image: ` + image + `, command: [sleep, "86400"]}, two: {image: ` + image + `, command: [nosuchprogram], environment: {SECRET: the-secret-value}}}`,
					`starting the service(s| two) on host host-1 failed: .*exec: "nosuchprogram": executable file not found`},
				"user":   {`services: {main: {image: ` + image + `, command: [sleep, "86400"], user: nobodyatall}}`, `starting the service main on host host-1 failed: .*unable to find user nobodyatall`},
				"base":   {`services: {main: {build: {context: ., dockerfile_inline: "FROM registry.invalid/no/such:1\nRUN true\n"}}}`, `building main on host host-1 failed: .*lookup registry.invalid`},
				"step":   {`services: {main: {build: {context: ., dockerfile_inline: "FROM ` + image + `\nRUN nosuchprogram\n"}}}`, `building main on host host-1 failed: .*nosuchprogram: not found`},
				"health": {`services: {main: {image: ` + image + `, command: [sleep, "86400"], environment: {SECRET: the-secret-value}, healthcheck: {test: [CMD, sh, -c, "echo no page; echo $$SECRET; exit 1"], interval: 200ms, retries: 2}}}`, `the health check of the service main fails: no page; …`},
				"awaited": {`services: {main: {image: ` + image + `, command: [sleep, "86400"], depends_on: {other: {condition: service_completed_successfully}}}, other: {image: ` + image + `, command: [sh, -c, "echo why >&2; exit 3"]}}`,
					`the service other ended with exit status 3; its last output: why`},
			} {
				s := order(id, repo(t, c.file, nil))
				teardown(t, e, s.ID)
				h, err := e.put(t.Context(), s)
				if err == nil {
					_, err = e.WaitReady(t.Context(), h)
				}
				said := sandboxer.Message(err)
				if sandboxer.KindOf(err) != sandboxer.Failed || !regexp.MustCompile(c.say).MatchString(said) {
					t.Errorf("%s: it says %q; want %q", id, said, c.say)
				}
				for _, not := range []string{"the-secret-value", "Creating", "Starting", "exit code: ", "no container with name"} {
					if strings.Contains(said, not) {
						t.Errorf("%s: %q is in %q", id, not, said)
					}
				}
			}
		})
	}
}
