package cli

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/manager"
	"github.com/sand-boxer/sandboxer/internal/provisioner"
	"github.com/sand-boxer/sandboxer/internal/server"
)

// open are the routes that anyone may use, by door, and why.
var open = map[string]map[string]string{
	"REST": {
		"GET /healthz":      "whoever watches the server has no key; it names nothing",
		"GET /openapi.yaml": "it is published",
	},
	"port proxy": {
		"port proxy": "redirects to the same address with a slash, or with the token in a cookie",
	},
	"deer-flow health": {
		"GET /health": "deer-flow asks it without a key; it names nothing",
	},
}

// TestEveryDoor goes through all doors and all of their routes: no unidentified caller
// gets to a route that does not declare that anyone may use it.
func TestEveryDoor(t *testing.T) {
	b, err := newBroker(t.Context(), brokerConfig{Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	e, closeDoors := newEdge(b, edge.Options{}, server.Options{Metrics: server.NewMetrics()}, &url.URL{Scheme: "https", Host: "ports.example.org"}, &provisioner.Options{Profile: "profile.local", Anonymous: true})
	defer closeDoors()
	admin := sandboxer.WithPrincipal(t.Context(), sandboxer.Principal{Tenant: "default", Actor: "test", Scopes: sandboxer.Scopes()})
	k, _, err := b.manager.CreateKey(admin, manager.NewKey{Name: "test", Tenant: "acme", Scopes: sandboxer.Scopes()})
	if err != nil {
		t.Fatal(err)
	}
	id, _, _ := strings.Cut(strings.TrimPrefix(k.Reveal(), "sbx_key_"), "_")

	// stranger sends a request with nothing that is good, from an address of its own.
	address := 0
	stranger := func(method, host, path string, header ...string) (*httptest.ResponseRecorder, *untouched) {
		t.Helper()
		body := &untouched{Reader: strings.NewReader("{}")}
		r := httptest.NewRequestWithContext(t.Context(), method, path, body)
		if host != "" {
			r.Host = host
		}
		address++
		r.RemoteAddr = fmt.Sprintf("10.0.%d.%d:1", address/250, 1+address%250)
		r.Header.Set("Content-Type", "application/json")
		for i := 0; i+1 < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		w := httptest.NewRecorder()
		e.Handler().ServeHTTP(w, r)
		return w, body
	}
	refused := func(what string, w *httptest.ResponseRecorder, body *untouched) {
		t.Helper()
		if w.Code != http.StatusUnauthorized || w.Header().Get("WWW-Authenticate") == "" {
			t.Errorf("%s: %d %s; want 401", what, w.Code, w.Body)
		}
		if body.read {
			t.Errorf("%s: the body was read", what)
		}
	}

	var names []string
	n := 0
	for _, d := range e.Doors() {
		names = append(names, d.Name)
		for _, r := range d.Routes.Routes() {
			n++
			if !r.Access.Identified() {
				if open[d.Name][r.Pattern] == "" {
					t.Errorf("%s: anyone may use %s", d.Name, r.Pattern)
				}
				continue
			}
			if d.Name == "port proxy" || d.Name == "deer-flow sandboxes" {
				continue // below
			}
			if !slices.Contains(sandboxer.Scopes(), r.Access.Scope()) {
				t.Errorf("%s wants the scope %q, which there is not", r.Pattern, r.Access.Scope())
			}
			method, path, _ := strings.Cut(r.Pattern, " ")
			path = strings.NewReplacer("{id}", "abcdefgh", "{port}", "80", "{profile}", "test", "{name}", "token").Replace(path)
			if strings.Contains(path, "{") {
				t.Fatalf("%s has a part that the test does not know", r.Pattern)
			}
			keyHeader := map[string]string{"REST": "X-API-Key", "deer-flow provisioner": "Authorization"}[d.Name]
			bad := "sbx_key_" + id + "_guess"
			for what, header := range map[string][]string{
				"nothing": nil, "a bad key where deer-flow sends it": {"X-API-Key", bad}, "an unknown key": {"Authorization", "Bearer sbx_key_zzzzzzzz_guess"}, "a wrong secret": {"Authorization", "Bearer sbx_key_" + id + "_guess"},
				"an empty key": {"Authorization", "Bearer "}, "no key": {"Authorization", "Basic dTpw"}, "a key where it is not looked for": {keyHeader, k.Reveal()},
				"a stream": {"Connection", "Upgrade", "Upgrade", "websocket"},
			} {
				w, body := stranger(method, "", path, header...)
				refused(r.Pattern+" with "+what, w, body)
			}
		}
	}
	if slices.Sort(names); !slices.Equal(names, []string{"REST", "deer-flow health", "deer-flow provisioner", "deer-flow sandboxes", "port proxy"}) {
		t.Errorf("the doors are %q: a new one needs its part of this test", names)
	}
	if n < 60 {
		t.Errorf("only %d routes were looked at", n)
	}

	const token = "sbx_port_AQBQAAAAAQAAAAAAAAABAAAAAGAAAABhYmNkZWZnaAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
	const box = "sbx_box_AAAAAQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
	named := "80-abcdefgh.ports.example.org"
	for _, method := range []string{"GET", "POST", "PUT", "OPTIONS"} {
		for _, upgrade := range [][]string{nil, {"Connection", "Upgrade", "Upgrade", "websocket"}} {
			for _, r := range []struct {
				host, path string
				header     []string
			}{
				{"", "/p/abcdefgh/80/", nil}, {"", "/p/abcdefgh/80/x", []string{"X-Sandboxer-Token", token}}, {"", "/p/" + token + "/", nil},
				{"", "/p/abcdefgh/80/", []string{"Authorization", "Bearer sbx_key_" + id + "_guess"}},
				{named, "/", nil}, {named, "/v1/sandboxes", nil}, {named, "/healthz", nil}, {named, "/?sbx_token=" + token, nil},
				{named, "/?sbx_token=" + token, []string{"Accept", "text/html"}}, {named, "/", []string{"X-Sandboxer-Token", token}},
				{named, "/", []string{"Cookie", "__Host-sbx-port=" + token, "Sec-Fetch-Site", "same-origin"}},
				{"x.ports.example.org", "/", nil},
				{"", "/s/abcdefgh/" + box + "/v1/sandbox", nil}, {"", "/s/abcdefgh/" + box + "/v1/bash/exec", []string{"X-API-Key", k.Reveal()}},
				{"", "/s/abcdefgh/", nil}, {"", "/s/", nil}, {"", "/s/abcdefgh//v1/sandbox", []string{"Authorization", "Bearer " + k.Reveal()}},
			} {
				w, body := stranger(method, r.host, r.path, slices.Concat(r.header, upgrade)...)
				refused(method+" "+r.host+r.path+" "+strings.Join(r.header, " "), w, body)
			}
		}
	}
}

// untouched is a body that notes whether it was read.
type untouched struct {
	io.Reader
	read bool
}

func (u *untouched) Read(p []byte) (int, error) { u.read = true; return u.Reader.Read(p) }
