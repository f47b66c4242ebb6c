package sandboxer

import (
	"strings"
	"testing"
)

func TestReadyCheck(t *testing.T) {
	web := func(h ReadyHTTP) ReadyCheck { return ReadyCheck{HTTP: h} }
	for _, c := range []struct {
		check ReadyCheck
		want  string // in the error; "" is none
	}{
		{ReadyCheck{}, ""},
		{web(ReadyHTTP{Port: 65535, Path: "/a?b=c", Status: 599}), ""},
		{web(ReadyHTTP{Path: "/" + strings.Repeat("a", maxReadyPath-1)}), ""},
		{ReadyCheck{Command: []string{"a", ""}, Timeout: MaxReadyTimeout}, ""},
		{ReadyCheck{Timeout: 1}, "no effect"},
		{ReadyCheck{HTTP: ReadyHTTP{Port: 1}, Command: []string{"a"}}, "not both"},
		{web(ReadyHTTP{Port: -1}), "not a port"},
		{web(ReadyHTTP{Port: 65536}), "not a port"},
		{web(ReadyHTTP{Path: "a"}), "not the path"},
		{web(ReadyHTTP{Path: "/a b"}), "not the path"},
		{web(ReadyHTTP{Path: "/a\r\nX: y"}), "not the path"},
		{web(ReadyHTTP{Path: "/#a"}), "not the path"},
		{web(ReadyHTTP{Path: "/" + strings.Repeat("a", maxReadyPath)}), "not the path"},
		{web(ReadyHTTP{Status: 199}), "199"},
		{web(ReadyHTTP{Status: 600}), "600"},
		{ReadyCheck{Command: []string{"a"}, Timeout: -1}, "timeout"},
		{ReadyCheck{Command: []string{"a"}, Timeout: MaxReadyTimeout + 1}, "timeout"},
		{ReadyCheck{Command: []string{""}}, "empty"},
		{ReadyCheck{Command: []string{"a", "\x00"}}, "NUL"},
	} {
		err := c.check.Check()
		if c.want == "" && err != nil {
			t.Errorf("%+v: %v", c.check, err)
		} else if c.want != "" && (KindOf(err) != Invalid || !strings.Contains(Message(err), c.want)) {
			t.Errorf("%+v: %v, want %q", c.check, err, c.want)
		}
	}
	if got := web(ReadyHTTP{Port: 1}).WithDefaults(); got.Timeout != DefaultReadyTimeout || got.HTTP != (ReadyHTTP{Port: 1, Path: "/", Status: 200}) {
		t.Errorf("with defaults: %+v", got)
	}
	if got := (ReadyCheck{}).WithDefaults(); got.Asks() || got.Timeout != 0 {
		t.Errorf("nothing, with defaults: %+v", got)
	}
}
