package images

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/images/registrytest"
)

// In these tests 127.0.0.1 is the public internet and every other address is not.
var internet = netip.MustParseAddr("127.0.0.1")

func publicStore(t *testing.T, change func(*Options)) *Store {
	return open(t, func(o *Options) {
		o.Reach = func(a netip.Addr) bool { return a == internet }
		o.Insecure = []string{"127.0.0.1", "127.0.0.2"}
		o.retry = time.Millisecond
		if change != nil {
			change(o)
		}
	})
}

// inside is a service at an address that is not public. It counts its connections.
func inside(t *testing.T) (addr string, met *atomic.Int32) {
	l, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	met = new(atomic.Int32)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			met.Add(1)
			io.WriteString(c, "HTTP/1.0 200 OK\r\n\r\nsecret-of-the-service")
			c.Close()
		}
	}()
	return l.Addr().String(), met
}

// closed is an address without a listener.
func closed(t *testing.T, ip string) string {
	l, err := net.Listen("tcp", ip+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// What anybody may ask for is not looked for at addresses that are not public, and the
// answer does not tell what is there.
func TestPublicAccessStaysOutside(t *testing.T) {
	service, met := inside(t)
	shut := closed(t, "127.0.0.2")
	text := func(err error, host string) string {
		return strings.ReplaceAll(fmt.Sprintf("%s|%s|%s", sandboxer.KindOf(err), sandboxer.Message(err), sandboxer.HintOf(err)), host, "HOST")
	}
	t.Run("as it is written", func(t *testing.T) {
		s := publicStore(t, nil)
		_, port, _ := net.SplitHostPort(service)
		want := ""
		for _, host := range []string{service, shut, "localhost:" + port, "x.localhost:" + port, "[::1]:" + port, "10.0.0.1", "169.254.169.254", "0.0.0.0:" + port} {
			err := s.Check(host+"/x:1", Public)
			if _, ferr := s.Find(t.Context(), host+"/x:1", Public); text(ferr, host) != text(err, host) {
				t.Errorf("%s: Check says %v, Find %v", host, err, ferr)
			}
			wantErr(t, err, sandboxer.Denied, "not a registry on the public internet")
			if got := text(err, host); want == "" {
				want = got
			} else if got != want {
				t.Errorf("%s: %s; another: %s", host, got, want)
			}
		}
	})
	t.Run("where a name leads", func(t *testing.T) {
		s := publicStore(t, nil)
		if _, err := s.public.DialContext(t.Context(), "tcp", service); err == nil || !strings.Contains(err.Error(), errNotPublic.Error()) {
			t.Errorf("dialled: %v", err)
		}
		if c, err := s.public.DialContext(t.Context(), "tcp", registrytest.New(t).Host); err != nil {
			t.Error(err)
		} else {
			c.Close()
		}
		if s.public.Proxy != nil {
			t.Error("a proxy chooses the address")
		}
	})
	reg := registrytest.New(t)
	ref := reg.Push(t, "x:1", image(t, noise(t, 1000)))
	_, err := publicStore(t, nil).Find(t.Context(), closed(t, "127.0.0.1")+"/x:1", Public)
	want := text(err, strings.Split(sandboxer.Message(err), `"`)[1])
	want = want[strings.Index(want, "cannot be pulled"):]
	lead := func(to string) map[string]func(http.ResponseWriter, *http.Request) bool {
		redirect := func(part string) func(http.ResponseWriter, *http.Request) bool {
			return func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, part) {
					http.Redirect(w, r, "http://"+to+"/v2/y", http.StatusTemporaryRedirect)
					return true
				}
				return false
			}
		}
		realm := func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="x"`, to))
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}
		return map[string]func(http.ResponseWriter, *http.Request) bool{"realm of a token": realm, "first answer": redirect("/v2/"), "manifest": redirect("/manifests/"), "blob": redirect("/blobs/")}
	}
	for _, to := range []string{service, shut} {
		for what, reply := range lead(to) {
			reg.Set(func(s *registrytest.Server) { s.Reply = reply })
			_, err := publicStore(t, nil).Find(t.Context(), ref, Public)
			got := text(err, reg.Host)
			if i := strings.Index(got, "cannot be pulled"); i < 0 || strings.ReplaceAll(got[i:], "HOST", "") != strings.ReplaceAll(strings.ReplaceAll(want, closedHost(want), ""), "HOST", "") {
				t.Errorf("%s leads to %s: %s; want %s", what, to, got, want)
			}
		}
	}
	if n := met.Load(); n > 0 {
		t.Errorf("the service inside had %d visits", n)
	}
	// An operator may.
	if _, err := publicStore(t, nil).Find(t.Context(), service+"/x:1", Operator); err == nil || met.Load() == 0 {
		t.Errorf("an operator's pull did not get there: %v", err)
	}
}

// closedHost is the host:port in an error's text.
func closedHost(text string) string {
	for f := range strings.FieldsSeq(text) {
		if strings.HasPrefix(f, "127.") {
			return strings.TrimRight(f, ",;|")
		}
	}
	return "-"
}

// Other callers cannot get, in any way, what was pulled with the operator's credentials.
func TestPublicAccessHasNoCredentials(t *testing.T) {
	const user, pass = "somebody", "hunter2-secret"
	s := publicStore(t, nil)
	reg := registrytest.New(t)
	img := image(t, noise(t, 100<<10))
	ref := reg.Push(t, "private/x:1", img)
	asked := make(chan string, 1000)
	reg.Set(func(r *registrytest.Server) {
		r.Auth, r.User, r.Password = "basic", user, pass
		r.Saw = func(q *http.Request) { asked <- q.Header.Get("Authorization") }
	})
	docker := t.TempDir()
	t.Setenv("DOCKER_CONFIG", docker)
	auth := base64.StdEncoding.EncodeToString([]byte(user + ":" + pass))
	if err := os.WriteFile(filepath.Join(docker, "config.json"), fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, reg.Host, auth), 0o600); err != nil {
		t.Fatal(err)
	}
	digest, _ := img.Digest()
	refs := []string{ref, reg.Host + "/private/x@" + digest.String()}
	refused := func(s *Store) {
		t.Helper()
		for _, ref := range refs {
			_, err := pullAs(t.Context(), s, ref, Public)
			wantErr(t, err, sandboxer.Failed, "is not public")
		}
	}
	refused(s)
	for len(asked) > 0 {
		if a := <-asked; a != "" {
			t.Errorf("asked with %q", a)
		}
	}
	for _, ref := range refs {
		if _, err := pullAs(t.Context(), s, ref, Operator); err != nil {
			t.Fatal(err)
		}
	}
	refused(s)
	_, err := openIn(t, s.dir, func(o *Options) { *o = s.opts; o.Pull = Never }).Find(t.Context(), ref, Public)
	wantErr(t, err, sandboxer.Failed, "images.pull is never")

	// The caller's own registry that names another's layers and does not have them.
	liar := registrytest.New(t)
	raw, _ := img.RawManifest()
	config, _ := img.RawConfigFile()
	id, _ := img.ConfigName()
	liar.Set(func(r *registrytest.Server) {
		r.Reply = func(w http.ResponseWriter, q *http.Request) bool {
			switch {
			case strings.Contains(q.URL.Path, "/manifests/"):
				w.Header().Set("Content-Type", string(types.DockerManifestSchema2))
				w.Write(raw)
			case strings.HasSuffix(q.URL.Path, id.Hex):
				w.Write(config)
			default:
				return false
			}
			return true
		}
	})
	if _, err := s.Find(t.Context(), liar.Host+"/x:1", Public); err != nil {
		t.Fatal(err)
	}
	if _, err = pullAs(t.Context(), s, liar.Host+"/x:1", Public); sandboxer.KindOf(err) != sandboxer.Failed {
		t.Errorf("layers that their registry does not have: %v", err)
	}

	// Listing registries vouches for them, for everybody.
	if listed := publicStore(t, func(o *Options) { o.Registries = []string{reg.Host} }); listed.Access(false) != Operator || s.Access(false) != Public || s.Access(true) != Operator {
		t.Error("who vouches is mistaken")
	}
}

// Public images are kept apart from the operator's, and kept.
func TestPublicAccessIsRemembered(t *testing.T) {
	s, reg := publicStore(t, nil), registrytest.New(t)
	ref := reg.Push(t, "x:1", image(t, noise(t, 1000)))
	for range 2 {
		if _, err := pullAs(t.Context(), s, ref, Public); err != nil {
			t.Fatal(err)
		}
	}
	manifests := 0
	for _, r := range reg.Requests() {
		if strings.Contains(r, "/manifests/") {
			manifests++
		}
	}
	if manifests != 1 {
		t.Errorf("asked %d times what it is", manifests)
	}
	for _, f := range append(files(t, s, "blobs"), files(t, s, "refs")...) {
		if !strings.HasSuffix(f, ".public") {
			t.Errorf("%s is the operator's", f)
		}
	}
}

// What a service that is no registry answers is in no error.
func TestAnswersAreNotReflected(t *testing.T) {
	const secret = "secret-of-the-service"
	status := func(code int, kind, body string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path == "/v2/" {
				return false
			}
			w.Header().Set("Content-Type", kind)
			w.WriteHeader(code)
			io.WriteString(w, body)
			return true
		}
	}
	digest := "sha256:" + strings.Repeat("1", 64)
	manifest, _ := json.Marshal(v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: v1.Descriptor{MediaType: secret, Size: 1, Digest: v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("1", 64)}}})
	index, _ := json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{{Platform: &v1.Platform{OS: secret, Architecture: secret}, Digest: v1.Hash{Algorithm: "sha256", Hex: digest[7:]}}}})
	structured := `{"errors":[{"code":"` + secret + `","message":"` + secret + `","detail":"` + secret + `"}]}`
	for name, reply := range map[string]func(http.ResponseWriter, *http.Request) bool{
		"400": status(400, "text/plain", secret), "401": status(401, "application/json", structured), "403": status(403, "application/json", structured),
		"404": status(404, "application/json", structured), "418": status(418, "text/plain", secret), "429": status(429, "application/json", structured),
		"500": status(500, "application/json", structured), "not JSON": status(200, "text/html", secret), "JSON": status(200, secret, `{"mediaType":"`+secret+`"}`),
		"a manifest": status(200, string(types.OCIManifestSchema1), string(manifest)), "an index": status(200, string(types.OCIImageIndex), string(index)),
		"a digest": func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Docker-Content-Digest", "sha256:"+secret)
			return false
		},
		"a redirect": func(w http.ResponseWriter, r *http.Request) bool {
			http.Redirect(w, r, "ftp://"+secret+"/"+secret, http.StatusFound)
			return true
		},
		"a challenge": func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("WWW-Authenticate", `Bearer realm="ftp://`+secret+`/",`+secret+`="`+secret+`"`)
			w.WriteHeader(401)
			return true
		},
		"a token": func(w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "realm") {
				io.WriteString(w, `{"answer":"`+secret+`"}`)
				return true
			}
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+r.Host+`/realm",service="x"`)
			w.WriteHeader(401)
			return true
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, reg := publicStore(t, nil), registrytest.New(t)
			reg.Set(func(r *registrytest.Server) { r.Reply = reply })
			_, err := s.Find(t.Context(), reg.Host+"/x:1", Public)
			if err == nil || strings.Contains(sandboxer.Message(err)+sandboxer.HintOf(err), secret) {
				t.Errorf("says %v", sandboxer.Message(err))
			}
		})
	}
	t.Run("a banner", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				io.WriteString(c, secret+"\r\n")
				c.Close()
			}
		}()
		for _, access := range []Access{Public, Operator} {
			_, err := publicStore(t, nil).Find(t.Context(), l.Addr().String()+"/x:1", access)
			if err == nil || strings.Contains(sandboxer.Message(err), secret) {
				t.Errorf("%q says %v", access, sandboxer.Message(err))
			}
		}
	})
}

// An answer that is no manifest and no layer has an end, too.
func TestAnswersAreBounded(t *testing.T) {
	for name, path := range map[string]string{"the first answer": "/v2/", "a token": "/realm", "an error": "/manifests/"} {
		t.Run(name, func(t *testing.T) {
			s, reg := publicStore(t, nil), registrytest.New(t)
			var sent atomic.Int64
			reg.Set(func(r *registrytest.Server) {
				r.Reply = func(w http.ResponseWriter, q *http.Request) bool {
					if path == "/realm" && q.URL.Path != path {
						w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+q.Host+`/realm",service="x"`)
						w.WriteHeader(401)
						return true
					}
					if !strings.HasSuffix(q.URL.Path, path) && (path != "/manifests/" || !strings.Contains(q.URL.Path, path)) {
						return false
					}
					if path == "/manifests/" {
						w.WriteHeader(404)
					}
					for piece := bytes.Repeat([]byte("x"), 64<<10); ; sent.Add(int64(len(piece))) {
						if _, err := w.Write(piece); err != nil || sent.Load() > 256<<20 {
							return true
						}
					}
				}
			})
			if _, err := s.Find(t.Context(), reg.Host+"/x:1", Public); err == nil {
				t.Error("an endless answer is an image")
			}
			// What the connection holds besides is the kernel's; each attempt reads a megabyte.
			if n := sent.Load(); n > 100<<20 {
				t.Errorf("%d MiB were taken", n>>20)
			}
		})
	}
}
