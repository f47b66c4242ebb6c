package agent

import (
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestHintsCrossTheWire: the hint of a failure inside reaches the caller of the client.
func TestHintsCrossTheWire(t *testing.T) {
	r := startAgent(t)
	_, err := r.ReadFile(t.Context(), "/proc/self/status")
	if sandboxer.KindOf(err) != sandboxer.Denied || sandboxer.HintOf(err) != "read it with a command: cat" {
		t.Errorf("ReadFile: %v; hint %q", err, sandboxer.HintOf(err))
	}
	// A failure of a remote procedure has its hint in the metadata of the error.
	const hint = "100 % sure of ñ"
	failed := wireError(sandboxer.E(sandboxer.Conflict, nil, "no").WithHint("%s", hint))
	if err := r.rpcError(t.Context(), failed); sandboxer.HintOf(err) != hint {
		t.Errorf("rpcError: %v; hint %q, want %q", err, sandboxer.HintOf(err), hint)
	}
}

// TestHostileHints: a hint comes from the sandbox, and is not trusted.
func TestHostileHints(t *testing.T) {
	for hint, want := range map[string]string{
		"a%20b%0Ac":                          "a b c",
		url.PathEscape("\x1b[31mred\x00"):    "\uFFFD[31mred\uFFFD",
		strings.Repeat("x", 300):             "",
		strings.Repeat("x", 3000):            "",
		"%zz":                                "",
		"":                                   "",
		url.PathEscape("put %s and 100% in"): "put %s and 100% in",
	} {
		answer := fmt.Sprintf("HTTP/1.1 403 Forbidden\r\n%s: denied\r\n%s: %s\r\nContent-Length: 18\r\n\r\n{\"message\":\"nope\"}", kindHeader, hintHeader, hint)
		c := liar{answer: []byte(answer)}.client(t, time.Minute)
		_, err := c.ReadFile(t.Context(), "/f")
		if sandboxer.KindOf(err) != sandboxer.Denied || sandboxer.HintOf(err) != want {
			t.Errorf("%.40q: %v; hint %q, want %q", hint, err, sandboxer.HintOf(err), want)
		}
	}
}
