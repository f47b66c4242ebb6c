package images

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/images/registrytest"
)

func TestMain(m *testing.M) {
	if ref := os.Getenv("SANDBOXER_TEST_PULL"); ref != "" { // a broker that will be killed
		s, err := New(os.Getenv("SANDBOXER_TEST_STORE"), defaults())
		if err == nil {
			_, err = pull(context.Background(), s, ref)
		}
		fmt.Println(err)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func defaults() Options {
	return Options{Settings: Settings{Pull: Missing}, Keep: 1 << 30, Limits: Limits{Download: 1 << 30, Unpacked: 1 << 30, Entries: 10_000},
		InUse: func() (map[string]bool, error) { return nil, nil }, Reach: sandboxer.PublicAddr, stall: 2 * time.Second}
}

func open(t testing.TB, change func(*Options)) *Store {
	t.Helper()
	t.Setenv("HOME", t.TempDir())
	t.Setenv("DOCKER_CONFIG", "")
	return openIn(t, t.TempDir(), change)
}

func openIn(t testing.TB, dir string, change func(*Options)) *Store {
	t.Helper()
	o := defaults()
	if change != nil {
		change(&o)
	}
	s, err := New(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// pull does what an image's caller does, up to the tree.
func pull(ctx context.Context, s *Store, ref string) (*Tree, error) {
	return pullAs(ctx, s, ref, Operator)
}

func pullAs(ctx context.Context, s *Store, ref string, access Access) (*Tree, error) {
	release, err := s.Hold(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	img, err := s.Find(ctx, ref, access)
	if err != nil {
		return nil, err
	}
	paths, err := s.Pull(ctx, img)
	if err != nil {
		return nil, err
	}
	t := NewTree(s.Limits())
	return t, t.AddLayers(ctx, ref, img.Layers(paths))
}

// noise is a layer of size bytes that does not compress.
func noise(t testing.TB, size int) v1.Layer {
	t.Helper()
	b := make([]byte, size)
	r := rand.NewChaCha8([32]byte{1})
	r.Read(b)
	return layer(t, entry{tar.Header{Name: "noise", Mode: 0o644}, string(b)})
}

type entry struct {
	h       tar.Header
	content string
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if e.h.Typeflag == 0 {
			e.h.Typeflag = tar.TypeReg
		}
		e.h.Size = int64(len(e.content))
		if err := w.WriteHeader(&e.h); err != nil {
			t.Fatal(err)
		}
		io.WriteString(w, e.content)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func layer(t testing.TB, entries ...entry) v1.Layer {
	t.Helper()
	data := archive(t, entries...)
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func image(t testing.TB, layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture = "linux", runtime.GOARCH
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	return img
}

func wantErr(t testing.TB, err error, kind sandboxer.Kind, says string) {
	t.Helper()
	if sandboxer.KindOf(err) != kind || !strings.Contains(sandboxer.Message(err), says) {
		t.Errorf("got %s %v; want %s with %q", sandboxer.KindOf(err), err, kind, says)
	}
}

func files(t testing.TB, s *Store, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(s.path(dir))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestPullWithProgress(t *testing.T) {
	s, reg := open(t, nil), registrytest.New(t)
	ref := reg.Push(t, "a/b:1", image(t, noise(t, 1<<20), layer(t, entry{tar.Header{Name: "x"}, "y"})))
	var mu sync.Mutex
	var heard []sandboxer.Progress
	ctx := sandboxer.WithProgress(t.Context(), func(p sandboxer.Progress) {
		mu.Lock()
		defer mu.Unlock()
		if p.Step == "pulling "+ref {
			heard = append(heard, p)
		}
	})
	if _, err := pull(ctx, s, ref); err != nil {
		t.Fatal(err)
	}
	if len(heard) < 10 || !slices.IsSortedFunc(heard, func(a, b sandboxer.Progress) int { return int(a.Done - b.Done) }) {
		t.Errorf("progress: %v", heard)
	}
	if last := heard[len(heard)-1]; last.Done != last.Total || last.Total < 1<<20 {
		t.Errorf("the last progress is %+v", last)
	}
	reg.Requests()
	if _, err := pull(t.Context(), s, ref); err != nil {
		t.Fatal(err)
	}
	if got := reg.Requests(); len(got) > 0 {
		t.Errorf("an image that is here was asked about: %q", got)
	}
	img, err := s.Find(t.Context(), ref, Operator)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pull(t.Context(), s, img.Pinned()); err != nil || len(reg.Requests()) > 0 {
		t.Errorf("its digest %s: %v", img.Pinned(), err)
	}
}

func TestBrokenLines(t *testing.T) {
	const size = 1 << 20
	t.Run("cut", func(t *testing.T) {
		s, reg := open(t, nil), registrytest.New(t)
		ref := reg.Push(t, "x:1", image(t, noise(t, size)))
		reg.Cut = 300 << 10
		if _, err := pull(t.Context(), s, ref); err != nil {
			t.Fatal(err)
		}
		if n := reg.Sent(); n > size+64<<10 {
			t.Errorf("%d bytes were sent for a layer of %d", n, size)
		}
	})
	t.Run("cut without ranges", func(t *testing.T) {
		s, reg := open(t, nil), registrytest.New(t)
		ref := reg.Push(t, "x:1", image(t, noise(t, size)))
		reg.Cut, reg.NoRange = 300<<10, true
		_, err := pull(t.Context(), s, ref)
		wantErr(t, err, sandboxer.Unavailable, "breaks again and again")
		reg.Set(func(r *registrytest.Server) { r.Cut = 0 })
		if _, err := pull(t.Context(), s, ref); err != nil {
			t.Error(err)
		}
	})
	t.Run("stands still", func(t *testing.T) {
		s, reg := open(t, func(o *Options) { o.stall = 200 * time.Millisecond }), registrytest.New(t)
		ref := reg.Push(t, "x:1", image(t, noise(t, size)))
		reg.Set(func(r *registrytest.Server) { r.Slow = time.Second }) // a second a piece: longer than a line may stand still
		var once sync.Once
		reg.Reply = func(_ http.ResponseWriter, r *http.Request) bool {
			if r.Header.Get("Range") != "" {
				once.Do(func() { reg.Set(func(s *registrytest.Server) { s.Slow = 0 }) })
			}
			return false
		}
		if _, err := pull(t.Context(), s, ref); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("registry is away", func(t *testing.T) {
		s, reg := open(t, nil), registrytest.New(t)
		ref := reg.Push(t, "x:1", image(t, noise(t, 100)))
		n := 0
		reg.Reply = func(w http.ResponseWriter, r *http.Request) bool {
			if n++; n < 4 {
				http.Error(w, "later", http.StatusServiceUnavailable)
				return true
			}
			return false
		}
		if _, err := pull(t.Context(), s, ref); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("nobody there", func(t *testing.T) {
		s := open(t, nil)
		_, err := s.Find(t.Context(), "127.0.0.1:1/x:1", Operator)
		wantErr(t, err, sandboxer.Unavailable, "cannot be reached")
	})
	t.Run("leaving", func(t *testing.T) {
		s, reg := open(t, nil), registrytest.New(t)
		ref := reg.Push(t, "x:1", image(t, noise(t, size)))
		reg.Set(func(r *registrytest.Server) { r.Slow = time.Second })
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		start := time.Now()
		_, err := pull(ctx, s, ref)
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > 10*time.Second {
			t.Errorf("%v after %s", err, time.Since(start))
		}
	})
}

// A broker is killed while it pulls; the next one goes on where it stopped.
func TestKilledWhilePulling(t *testing.T) {
	const size = 4 << 20
	for _, damaged := range []bool{false, true} {
		t.Run(fmt.Sprintf("damaged=%v", damaged), func(t *testing.T) {
			s, reg := open(t, nil), registrytest.New(t)
			ref := reg.Push(t, "x:1", image(t, noise(t, size)))
			reg.Set(func(r *registrytest.Server) { r.Slow = 20 * time.Millisecond })
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), "SANDBOXER_TEST_PULL="+ref, "SANDBOXER_TEST_STORE="+s.dir)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			arrived := func() (n int64) {
				for _, name := range files(t, s, "partial") {
					if fi, err := os.Stat(s.path("partial", name)); err == nil {
						n += fi.Size()
					}
				}
				return n
			}
			for deadline := time.Now().Add(time.Minute); arrived() < size/8; time.Sleep(5 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatal("it does not pull")
				}
			}
			cmd.Process.Kill()
			cmd.Wait()
			left := files(t, s, "partial")
			if len(left) != 1 || len(files(t, s, "blobs")) != 0 {
				t.Fatalf("left: %q and %q", left, files(t, s, "blobs"))
			}
			partial := s.path("partial", left[0])
			before, err := os.Stat(partial)
			if err != nil {
				t.Fatal(err)
			}
			if damaged {
				f, _ := os.OpenFile(partial, os.O_WRONLY, 0)
				f.WriteAt([]byte("damage"), 1000)
				f.Close()
			}
			reg.Set(func(r *registrytest.Server) { r.Slow = 0 })
			reg.Requests()
			if _, err := pull(t.Context(), s, ref); err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(reg.Requests(), "\n"); !strings.Contains(got, fmt.Sprintf("bytes=%d-", before.Size())) {
				t.Errorf("with %d bytes here it asked: %s", before.Size(), got)
			}
			if got := files(t, s, "partial"); len(got) > 0 {
				t.Errorf("left: %q", got)
			}
		})
	}
}

func TestPullsOfOneImageAreOne(t *testing.T) {
	reg := registrytest.New(t)
	a := open(t, nil)
	b := openIn(t, a.dir, nil) // as another process would
	ref := reg.Push(t, "x:1", image(t, noise(t, 1<<20), layer(t, entry{tar.Header{Name: "x"}, "y"})))
	reg.Set(func(r *registrytest.Server) { r.Slow = 5 * time.Millisecond })
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			if _, err := pull(t.Context(), []*Store{a, b}[i%2], ref); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	seen := map[string]int{}
	for _, r := range reg.Requests() {
		seen[r]++
	}
	img, _ := a.Find(t.Context(), ref, Operator)
	for _, l := range img.manifest.Layers {
		if n := seen["GET /v2/x/blobs/"+l.Digest.String()]; n != 1 {
			t.Errorf("layer %s was fetched %d times", l.Digest, n)
		}
	}
}

func TestHostileRegistries(t *testing.T) {
	good := func(t *testing.T) v1.Image { return image(t, noise(t, 100<<10)) }
	respond := func(path, contentType string, body []byte) func(*registrytest.Server) {
		return func(s *registrytest.Server) {
			s.Reply = func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.Contains(r.URL.Path, path) {
					return false
				}
				w.Header().Set("Content-Type", contentType)
				w.Write(body)
				return true
			}
		}
	}
	changed := func(t *testing.T, img v1.Image, change func(*v1.Manifest, *v1.ConfigFile)) func(*registrytest.Server) {
		m, _ := img.Manifest()
		cf, _ := img.ConfigFile()
		m, cf = m.DeepCopy(), cf.DeepCopy()
		change(m, cf)
		config, _ := json.Marshal(cf)
		if h, _ := img.ConfigName(); m.Config.Digest == h {
			m.Config.Digest, m.Config.Size, _ = v1.SHA256(bytes.NewReader(config))
		}
		manifest, _ := json.Marshal(m)
		return func(s *registrytest.Server) {
			s.Reply = func(w http.ResponseWriter, r *http.Request) bool {
				switch {
				case strings.Contains(r.URL.Path, "/manifests/"):
					w.Header().Set("Content-Type", string(types.DockerManifestSchema2))
					w.Write(manifest)
				case strings.HasSuffix(r.URL.Path, m.Config.Digest.Hex):
					w.Write(config)
				default:
					return false
				}
				return true
			}
		}
	}
	for _, c := range []struct {
		name   string
		change func(t *testing.T, img v1.Image) func(*registrytest.Server)
		says   string
	}{
		{"layers with other digests", func(t *testing.T, img v1.Image) func(*registrytest.Server) {
			cfg, _ := img.RawConfigFile()
			id, _ := img.ConfigName()
			return func(s *registrytest.Server) {
				s.Spoil = true
				s.Reply = func(w http.ResponseWriter, r *http.Request) bool {
					if strings.HasSuffix(r.URL.Path, id.Hex) {
						w.Write(cfg)
						return true
					}
					return false
				}
			}
		}, "the registry sent a layer with the digest"},
		{"a configuration with another digest", func(t *testing.T, img v1.Image) func(*registrytest.Server) {
			id, _ := img.ConfigName()
			return respond(id.Hex, "application/json", []byte(`{"os":"linux"}`))
		}, "its configuration has the digest"},
		{"a manifest with another digest", func(t *testing.T, img v1.Image) func(*registrytest.Server) {
			raw, _ := img.RawManifest()
			return func(s *registrytest.Server) {
				s.Reply = func(w http.ResponseWriter, r *http.Request) bool {
					if !strings.Contains(r.URL.Path, "/manifests/") {
						return false
					}
					w.Header().Set("Content-Type", string(types.DockerManifestSchema2))
					w.Header().Set("Docker-Content-Digest", "sha256:"+strings.Repeat("0", 64))
					w.Write(raw)
					return true
				}
			}
		}, "the registry sent a manifest with the digest"},
		{"a huge manifest", func(*testing.T, v1.Image) func(*registrytest.Server) {
			return respond("/manifests/", string(types.DockerManifestSchema2), bytes.Repeat([]byte(" "), maxManifest+1))
		}, "its manifest has more than 4 MiB"},
		{"no manifest at all", func(*testing.T, v1.Image) func(*registrytest.Server) {
			return respond("/manifests/", "text/html", []byte("<html>"))
		}, "not JSON"},
		{"another kind of thing", func(*testing.T, v1.Image) func(*registrytest.Server) {
			return respond("/manifests/", "application/vnd.docker.distribution.manifest.v1+json", []byte("{}"))
		}, "not an image that can run"},
		{"a huge configuration", func(t *testing.T, img v1.Image) func(*registrytest.Server) {
			return changed(t, img, func(m *v1.Manifest, _ *v1.ConfigFile) {
				m.Config.Size, m.Config.Digest = maxConfig+1, v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("1", 64)}
			})
		}, "its configuration has"},
		{"a wrong DiffID", func(t *testing.T, img v1.Image) func(*registrytest.Server) {
			return changed(t, img, func(_ *v1.Manifest, cf *v1.ConfigFile) {
				cf.RootFS.DiffIDs[0].Hex = strings.Repeat("2", 64)
			})
		}, "the image's configuration says sha256:2222"},
		{"too few DiffIDs", func(t *testing.T, img v1.Image) func(*registrytest.Server) {
			return changed(t, img, func(m *v1.Manifest, _ *v1.ConfigFile) { m.Layers = append(m.Layers, m.Layers[0]) })
		}, "its manifest has 2 layers, its configuration 1"},
		{"a digest that is a path", func(t *testing.T, img v1.Image) func(*registrytest.Server) {
			return changed(t, img, func(m *v1.Manifest, _ *v1.ConfigFile) { m.Layers[0].Digest.Hex = "../../../etc/passwd" })
		}, "cannot be"},
		{"a layer larger than it says", func(t *testing.T, img v1.Image) func(*registrytest.Server) {
			return changed(t, img, func(m *v1.Manifest, _ *v1.ConfigFile) { m.Layers[0].Size = 1000 })
		}, "the registry sent a layer with the digest"},
		{"a negative size", func(t *testing.T, img v1.Image) func(*registrytest.Server) {
			return changed(t, img, func(m *v1.Manifest, _ *v1.ConfigFile) { m.Layers[0].Size = -1 })
		}, "no proper size"},
		{"too large a download", func(t *testing.T, img v1.Image) func(*registrytest.Server) {
			return changed(t, img, func(m *v1.Manifest, _ *v1.ConfigFile) { m.Layers[0].Size = 2 << 30 })
		}, "the limit is 1024 MiB"},
		{"for another machine", func(t *testing.T, img v1.Image) func(*registrytest.Server) {
			return changed(t, img, func(_ *v1.Manifest, cf *v1.ConfigFile) { cf.Architecture = "s390x" })
		}, "is for linux/s390x"},
		{"one that does not exist", func(t *testing.T, img v1.Image) func(*registrytest.Server) {
			return func(s *registrytest.Server) {
				s.Reply = func(w http.ResponseWriter, r *http.Request) bool {
					if strings.Contains(r.URL.Path, "/manifests/") {
						http.Error(w, `{"errors":[{"code":"X","message":"nothing\u001b[31m here"}]}`, 404)
						return true
					}
					return false
				}
			}
		}, "does not exist at 127.0.0.1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, reg := open(t, nil), registrytest.New(t)
			img := good(t)
			ref := reg.Push(t, "x:1", img)
			reg.Set(c.change(t, img))
			_, err := pull(t.Context(), s, ref)
			if sandboxer.KindOf(err) != sandboxer.Failed && c.name != "a wrong DiffID" || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\x1b") {
				t.Errorf("got %s %v; want %q", sandboxer.KindOf(err), err, c.says)
			}
			if left := files(t, s, "partial"); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
			if left := files(t, s, "blobs"); len(left) > 0 && c.name != "a wrong DiffID" {
				t.Errorf("left: %q", left)
			}
		})
	}
}

func TestCredentials(t *testing.T) {
	const user, pass = "somebody", "hunter2-secret"
	auth := base64.StdEncoding.EncodeToString([]byte(user + ":" + pass))
	for _, c := range []struct {
		name, kind string
		config     string // %s is the registry
		helper     string
	}{
		{"basic", "basic", `{"auths":{"%s":{"auth":"` + auth + `"}}}`, ""},
		{"token", "token", `{"auths":{"%s":{"auth":"` + auth + `"}}}`, ""},
		{"identity token", "token", `{"auths":{"%s":{"identitytoken":"` + pass + `"}}}`, ""},
		{"helper", "token", `{"credHelpers":{"%s":"sbxtest"}}`, `{"Username":"` + user + `","Secret":"` + pass + `"}`},
		{"store", "basic", `{"credsStore":"sbxtest"}%.0s`, `{"Username":"` + user + `","Secret":"` + pass + `"}`},
		{"helper with an identity token", "token", `{"credHelpers":{"%s":"sbxtest"}}`, `{"Username":"<token>","Secret":"` + pass + `"}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, reg := open(t, nil), registrytest.New(t)
			ref := reg.Push(t, "private/x:1", image(t, noise(t, 1000)))
			reg.Set(func(r *registrytest.Server) { r.Auth, r.User, r.Password = c.kind, user, pass })
			_, err := s.Find(t.Context(), ref, Operator)
			wantErr(t, err, sandboxer.Failed, "does not let us read it")
			if !strings.Contains(sandboxer.HintOf(err), "docker login "+reg.Host) {
				t.Errorf("hint %q", sandboxer.HintOf(err))
			}
			docker := t.TempDir()
			t.Setenv("DOCKER_CONFIG", docker)
			if err := os.WriteFile(filepath.Join(docker, "config.json"), fmt.Appendf(nil, c.config, reg.Host), 0o600); err != nil {
				t.Fatal(err)
			}
			if c.helper != "" {
				bin := t.TempDir()
				t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
				script := "#!/bin/sh\nread host\ncase $host in *" + reg.Host + "*) echo '" + c.helper + "';; *) echo credentials not found in native keychain; exit 1;; esac\n"
				if err := os.WriteFile(filepath.Join(bin, "docker-credential-sbxtest"), []byte(script), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := pull(t.Context(), s, ref); err != nil {
				t.Fatal(err)
			}
			// A session from before the login is authenticated again.
			reg.Set(func(r *registrytest.Server) { r.Auth = "" })
			early := openIn(t, t.TempDir(), func(o *Options) { o.Pull = Always })
			if _, err := early.Find(t.Context(), ref, Operator); err != nil {
				t.Fatal(err)
			}
			reg.Set(func(r *registrytest.Server) { r.Auth = c.kind })
			if _, err := early.Find(t.Context(), ref, Operator); err != nil {
				t.Errorf("with a session from before the login: %v", err)
			}
			reg.Set(func(r *registrytest.Server) { r.Password = "another"; r.User = "another" })
			_, err = openIn(t, t.TempDir(), nil).Find(t.Context(), ref, Operator)
			wantErr(t, err, sandboxer.Failed, "does not let us read it")
			if text := fmt.Sprintf("%v %+v", err, errors.Unwrap(err)); strings.Contains(text, pass) || strings.Contains(text, auth) {
				t.Errorf("the error tells the password: %s", text)
			}
		})
	}
}

func TestPlainHTTPOnlyWhereAllowed(t *testing.T) {
	reg := registrytest.New(t)
	reg.Push(t, "x:1", image(t, noise(t, 1000)))
	_, port, _ := net.SplitHostPort(reg.Host)
	// Any name leads to the registry.
	lead := func(s *Store) *Store {
		s.http.Proxy = nil
		s.http.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, reg.Host)
		}
		return s
	}
	for _, host := range []string{"registry.example:" + port, "10.1.2.3:" + port, "registry.local:" + port} {
		_, err := lead(open(t, nil)).Find(t.Context(), host+"/x:1", Operator)
		wantErr(t, err, sandboxer.Unavailable, "cannot be reached")
		if !strings.Contains(sandboxer.HintOf(err), "images.insecure") {
			t.Errorf("hint %q", sandboxer.HintOf(err))
		}
		if _, err := pull(t.Context(), lead(open(t, func(o *Options) { o.Insecure = []string{host} })), host+"/x:1"); err != nil {
			t.Errorf("%s, which may: %v", host, err)
		}
	}
	if got := reg.Requests(); len(got) == 0 {
		t.Error("the registry was never asked")
	}
	// A registry elsewhere cannot send us to this machine.
	asked := false
	reg.Reply = func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasPrefix(r.Host, "127.") {
			asked = true
		}
		if strings.Contains(r.URL.Path, "/blobs/") {
			http.Redirect(w, r, "http://"+reg.Host+"/secret?sig=abc", http.StatusTemporaryRedirect)
			return true
		}
		return false
	}
	far := "far.example:" + port
	_, err := lead(open(t, func(o *Options) { o.Insecure = []string{far} })).Find(t.Context(), far+"/x:1", Operator)
	wantErr(t, err, sandboxer.Unavailable, "an address of this machine")
	if asked || strings.Contains(fmt.Sprint(err), "sig=") {
		t.Errorf("it followed; or tells the address: %v", err)
	}
}

func TestPlatformsPoliciesMirrors(t *testing.T) {
	reg := registrytest.New(t)
	ours, other := image(t, noise(t, 1000)), image(t, noise(t, 2000))
	platform := func(arch, variant string) v1.Descriptor {
		return v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch, Variant: variant}}
	}
	idx := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: other, Descriptor: platform("mips", "")},
		mutate.IndexAddendum{Add: other, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "unknown", Architecture: "unknown"}}},
		mutate.IndexAddendum{Add: ours, Descriptor: platform(runtime.GOARCH, "")})
	ref := reg.Push(t, "multi:1", mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: idx}))
	want, _ := ours.Digest()
	t.Run("platform", func(t *testing.T) {
		s := open(t, nil)
		img, err := s.Find(t.Context(), ref, Operator)
		if err != nil || img.Digest != want.String() {
			t.Fatalf("got %+v, %v; want %s", img, err, want)
		}
		foreign := reg.Push(t, "foreign:1", mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: other, Descriptor: platform("mips", "")}))
		_, err = s.Find(t.Context(), foreign, Operator)
		wantErr(t, err, sandboxer.Failed, "only for linux/mips")
	})
	t.Run("policies", func(t *testing.T) {
		s := open(t, nil)
		never := openIn(t, s.dir, func(o *Options) { o.Pull = Never })
		always := openIn(t, s.dir, func(o *Options) { o.Pull = Always })
		tag := reg.Push(t, "moving:1", ours)
		_, err := never.Find(t.Context(), tag, Operator)
		wantErr(t, err, sandboxer.Failed, "images.pull is never")
		if _, err := pull(t.Context(), s, tag); err != nil {
			t.Fatal(err)
		}
		reg.Push(t, "moving:1", other)
		reg.Requests()
		for _, st := range []*Store{s, never} {
			if img, err := st.Find(t.Context(), tag, Operator); err != nil || img.Digest != want.String() {
				t.Errorf("got %v, %v", img, err)
			}
		}
		if got := reg.Requests(); len(got) > 0 {
			t.Errorf("asked %q", got)
		}
		moved, _ := other.Digest()
		if img, err := always.Find(t.Context(), tag, Operator); err != nil || img.Digest != moved.String() {
			t.Errorf("got %v, %v", img, err)
		}
		reg.Requests()
		if _, err := always.Find(t.Context(), reg.Host+"/moving@"+want.String(), Operator); err != nil || len(reg.Requests()) > 0 {
			t.Errorf("a digest: %v", err)
		}
	})
	t.Run("mirrors", func(t *testing.T) {
		mirror := registrytest.New(t)
		mirror.Push(t, "library/thing:1", ours)
		s := open(t, func(o *Options) { o.Mirrors = map[string][]string{"docker.io": {mirror.Host}, reg.Host: {mirror.Host}} })
		s.http.Proxy = nil
		if _, err := pull(t.Context(), s, "thing:1"); err != nil {
			t.Error(err)
		}
		// What the mirror does not have, or sends wrongly, comes from the registry itself.
		mirror.Set(func(m *registrytest.Server) { m.Spoil = true })
		if _, err := pull(t.Context(), s, ref); err != nil {
			t.Error(err)
		}
		both := reg.Push(t, "library/thing:2", other)
		mirror.Push(t, "library/thing:2", other)
		if _, err := pull(t.Context(), s, both); err != nil {
			t.Error(err)
		}
	})
	t.Run("allowed registries", func(t *testing.T) {
		s := open(t, func(o *Options) { o.Registries = []string{"docker.io"} })
		wantErr(t, s.Check(ref, Operator), sandboxer.Denied, "from docker.io only")
		if err := s.Check("busybox", Public); err != nil {
			t.Error(err)
		}
	})
}

func TestPrune(t *testing.T) {
	s := open(t, func(o *Options) {
		o.Keep = 250 << 10
		o.InUse = func() (map[string]bool, error) { return map[string]bool{"used.erofs": true}, nil }
	})
	make := func(name string, age time.Duration) {
		p := s.path(name)
		if err := os.WriteFile(p, bytes.Repeat([]byte("x"), 100<<10), 0o600); err != nil {
			t.Fatal(err)
		}
		when := time.Now().Add(-age)
		os.Chtimes(p, when, when)
	}
	all := func() string {
		out := ""
		filepath.WalkDir(s.dir, func(p string, d os.DirEntry, _ error) error {
			if rel, _ := filepath.Rel(s.dir, p); rel != "lock" && !d.IsDir() || strings.HasSuffix(rel, ".tmp") {
				out += rel + " "
			}
			return nil
		})
		return strings.TrimSpace(out)
	}
	make("used.erofs", 100*time.Hour)
	make("old.erofs", 50*time.Hour)
	make("new.erofs", time.Hour)
	make("blobs/older", 60*time.Hour)
	make("partial/ancient", partialAge+time.Hour)
	make("key.lock", 0)
	os.Mkdir(s.path("key.tmp"), 0o700)
	before := all()
	release, err := s.Hold(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prune(); err != nil || all() != before {
		t.Errorf("while somebody uses the store it became %s (%v)", all(), err)
	}
	release()
	if _, err := s.Prune(); err != nil {
		t.Error(err)
	}
	if got := all(); got != "new.erofs used.erofs" {
		t.Errorf("left: %s", got)
	}
}

func TestCompressions(t *testing.T) {
	raw := archive(t, entry{tar.Header{Name: "f"}, "content"})
	diff, _, _ := v1.SHA256(bytes.NewReader(raw))
	var z bytes.Buffer
	w, _ := zstd.NewWriter(&z)
	w.Write(raw)
	w.Close()
	for _, c := range []struct {
		name string
		data []byte
		kind types.MediaType
	}{{"zstd", z.Bytes(), types.OCILayerZStd}, {"plain", raw, types.OCIUncompressedLayer}, {"zstd said to be gzip", z.Bytes(), types.OCILayer}} {
		t.Run(c.name, func(t *testing.T) {
			s, reg := open(t, nil), registrytest.New(t)
			l := static.NewLayer(c.data, c.kind)
			img, err := mutate.Append(empty.Image, mutate.Addendum{Layer: l, MediaType: c.kind})
			if err != nil {
				t.Fatal(err)
			}
			cf, _ := img.ConfigFile()
			cf = cf.DeepCopy()
			cf.OS, cf.Architecture, cf.RootFS.DiffIDs = "linux", runtime.GOARCH, []v1.Hash{diff}
			if img, err = mutate.ConfigFile(img, cf); err != nil {
				t.Fatal(err)
			}
			tree, err := pull(t.Context(), s, reg.Push(t, "x:1", img))
			if err != nil || !tree.Has("/f") {
				t.Fatal(err)
			}
		})
	}
}

func TestManyLayersOfRandomImages(t *testing.T) {
	s, reg := open(t, nil), registrytest.New(t)
	img, err := random.Image(50<<10, 20)
	if err != nil {
		t.Fatal(err)
	}
	reg.Cut = 20 << 10
	cfg, _ := img.ConfigFile()
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture = "linux", runtime.GOARCH
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	if _, err := pull(t.Context(), s, reg.Push(t, "x:1", img)); err != nil {
		t.Fatal(err)
	}
}
