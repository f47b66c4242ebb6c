package cli

import (
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// Requests without a key are let in only where the operator says that no proxy leads to the server: nothing that a request has
// or lacks proves it.
func TestAnonymousTakesNoProxy(t *testing.T) {
	set := func(pairs ...string) *settings {
		s := &settings{}
		for i := 0; i < len(pairs); i += 2 {
			s.all = append(s.all, setting{Key: pairs[i], Value: pairs[i+1]})
		}
		return s
	}
	for _, c := range []struct {
		settings []string
		o        serveOptions
		refused  string
	}{
		{nil, serveOptions{insecure: true}, ""},
		{[]string{"deerflow_anonymous", "false"}, serveOptions{}, ""},
		{[]string{"deerflow_anonymous", "true"}, serveOptions{}, "no setting says that there is no proxy"},
		{[]string{"deerflow_anonymous", "true", "deerflow_no_proxy", "false"}, serveOptions{}, "no setting says that there is no proxy"},
		{[]string{"deerflow_anonymous", "true", "deerflow_no_proxy", "true"}, serveOptions{}, ""},
		{[]string{"deerflow_anonymous", "true", "deerflow_no_proxy", "true", "deerflow_public_url", "http://127.0.0.1:8080"}, serveOptions{}, ""},
		{[]string{"deerflow_anonymous", "true", "deerflow_no_proxy", "true", "deerflow_public_url", "https://s.example.org"}, serveOptions{}, "deerflow_public_url"},
		{[]string{"deerflow_anonymous", "true", "deerflow_no_proxy", "true"}, serveOptions{insecure: true}, "insecure"},
		{[]string{"deerflow_anonymous", "true", "deerflow_no_proxy", "true"}, serveOptions{hosts: []string{"s.example.org"}}, "hosts"},
	} {
		err := checkAnonymous(set(c.settings...), &c.o)
		if (err == nil) != (c.refused == "") || err != nil && (sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(err.Error(), c.refused) || sandboxer.HintOf(err) == "") {
			t.Errorf("%v, %+v: %v; want %q", c.settings, c.o, err, c.refused)
		}
	}
}
