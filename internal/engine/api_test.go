package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
)

// apis are the engines of tests, and the name of the test image there.
var apis = map[string]func(t testing.TB) (a *API, image string){
	"docker": func(t testing.TB) (*API, string) {
		return overUnix(t, strings.TrimPrefix(docker.Start(t), "DOCKER_HOST=unix://")), enginetest.Image
	},
	"podman": func(t testing.TB) (*API, string) {
		return overUnix(t, strings.TrimPrefix(enginetest.PodmanSocket(t), "unix://")), "localhost/" + enginetest.Image
	},
}

func overUnix(t testing.TB, socket string) *API {
	a := NewAPI(APIOptions{Name: "test", Dial: dials("unix", socket)})
	t.Cleanup(a.Close)
	return a
}

func dials(network, address string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, network, address) }
}

func TestAPI(t *testing.T) {
	for name, open := range apis {
		t.Run(name, func(t *testing.T) {
			a, image := open(t)
			ctx := t.Context()
			info, err := a.Info(ctx)
			if err != nil || info.MemTotal == 0 || info.Arch() == "" {
				t.Fatalf("Info: %+v, %v", info, err)
			}
			labels := map[string]string{"dev.sandboxer.test": t.Name()}
			c := ContainerConfig{
				Image: image, Hostname: "api-host", Entrypoint: []string{"sleep"}, Cmd: []string{"1000"}, Labels: labels,
				Healthcheck: &Healthcheck{[]string{"NONE"}},
				HostConfig: HostConfig{NetworkMode: "none", CapDrop: []string{"ALL"}, SecurityOpt: []string{"no-new-privileges"}, Memory: 64 << 20, MemorySwap: 64 << 20, PidsLimit: 64,
					Mounts: []MountConfig{{Type: "volume", Source: "api-test", Target: "/vol", ReadOnly: true, VolumeOptions: &VolumeOptions{NoCopy: true}}}},
			}
			fill := c
			fill.HostConfig.Mounts = slices.Clone(c.HostConfig.Mounts)
			fill.HostConfig.Mounts[0].ReadOnly = false
			for range 2 { // what is there is found
				if v, err := a.CreateVolume(ctx, "api-test", labels); err != nil || v.Name != "api-test" {
					t.Fatal(v, err)
				}
			}
			filler, err := a.CreateContainer(ctx, "api-fill", fill)
			if err != nil {
				t.Fatal(err)
			}
			end := context.WithoutCancel(ctx)
			defer func() {
				all, err := a.ListContainers(end, labels)
				for _, c := range all {
					err = errors.Join(err, a.RemoveContainer(end, c.ID))
				}
				vols, verr := a.ListVolumes(end, "api-test")
				for _, v := range vols {
					err = errors.Join(err, a.RemoveVolume(end, v.Name))
				}
				if len(vols) != 1 || errors.Join(err, verr) != nil {
					t.Errorf("%d volumes at the end, %v, %v; want the one", len(vols), err, verr)
				}
			}()

			// A volume is filled by way of a container that never runs.
			var file bytes.Buffer
			w := tar.NewWriter(&file)
			w.WriteHeader(&tar.Header{Name: "hello", Typeflag: tar.TypeReg, Mode: 0o755, Size: 5})
			w.Write([]byte("hello"))
			w.Close()
			if err := a.PutArchive(ctx, filler, "/vol", &file); err != nil {
				t.Fatal(err)
			}
			if err := a.GetArchive(ctx, filler, "/vol/hello", func(r io.Reader) error {
				tr := tar.NewReader(r)
				if _, err := tr.Next(); err != nil {
					return err
				}
				got, err := io.ReadAll(tr)
				if string(got) != "hello" {
					t.Errorf("read back %q", got)
				}
				return err
			}); err != nil {
				t.Fatal(err)
			}
			if err := a.RemoveContainer(ctx, filler); err != nil {
				t.Fatal(err)
			}

			id, err := a.CreateContainer(ctx, "api-test", c)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := a.CreateContainer(ctx, "api-test", c); sandboxer.KindOf(err) != sandboxer.Conflict {
				t.Errorf("a second of that name: %v; want conflict", err)
			}
			for range 2 {
				if err := a.ContainerCall(ctx, id, "start"); err != nil {
					t.Fatal(err)
				}
			}
			if err := a.RemoveVolume(ctx, "api-test"); sandboxer.KindOf(err) != sandboxer.Conflict {
				t.Errorf("removing a volume that is in use: %v; want conflict", err)
			}
			d, err := a.InspectContainer(ctx, "api-test")
			if err != nil || !d.State.Running || d.ID != id || d.Config.Labels["dev.sandboxer.test"] != t.Name() || d.HostConfig.Memory != 64<<20 {
				t.Errorf("it is %+v, %v", d, err)
			}

			var out, errs bytes.Buffer
			x, err := a.Exec(ctx, id, "0:0", []string{"sh", "-c", "cat; hostname; cat /vol/hello; echo err >&2; exit 43"}, strings.NewReader("in\n"), &out, &errs)
			if err != nil || x.Code != 43 || out.String() != "in\napi-host\nhello" || errs.String() != "err\n" {
				t.Errorf("Exec: %+v, %v, %q, %q", x, err, out.String(), errs.String())
			}
			// Ending the context ends the call, and the command's input with it.
			within, cancel := context.WithCancel(ctx)
			r, feed := io.Pipe()
			defer feed.Close()
			began := make(chan struct{}, 1)
			done := make(chan error, 1)
			go func() {
				_, err := a.Exec(within, id, "0:0", []string{"sh", "-c", "echo; cat >/dev/null; rm /tmp/here"}, r, signals(began), io.Discard)
				done <- err
			}()
			<-began
			cancel()
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("a canceled Exec: %v", err)
			}

			st, err := a.ContainerStats(ctx, id)
			if err != nil || st.MemoryBytes <= 0 || st.PIDs < 1 || st.CPU < 0 {
				t.Errorf("Stats: %+v, %v", st, err)
			}
			for _, what := range []string{"pause", "unpause"} {
				if err := a.ContainerCall(ctx, id, what); err != nil {
					t.Error(err)
				}
			}
			saved, err := a.Commit(ctx, id, "localhost/api-test", "one", map[string]string{"dev.sandboxer.test": t.Name(), "odd": "a b=c"})
			if err != nil {
				t.Fatal(err)
			}
			defer a.RemoveImage(end, "localhost/api-test:one")
			if i, err := a.InspectImage(ctx, "localhost/api-test:one"); err != nil || i.ID != saved || i.Config.Labels["odd"] != "a b=c" {
				t.Errorf("saved %q, it is %+v, %v", saved, i, err)
			}
			if all, err := a.ListImages(ctx, "localhost/api-test", labels); err != nil || len(all) != 1 || !slices.Contains(all[0].RepoTags, "localhost/api-test:one") {
				t.Errorf("images %+v, %v", all, err)
			}
			if err := a.RemoveImage(ctx, "localhost/api-test:one"); err != nil {
				t.Error(err)
			}
			for what, err := range map[string]error{
				"InspectImage": second(a.InspectImage(ctx, "localhost/api-test:one")), "InspectContainer": second(a.InspectContainer(ctx, "none")),
				"start": a.ContainerCall(ctx, "none", "start"),
			} {
				if sandboxer.KindOf(err) != sandboxer.NotFound || sandboxer.Message(err) == "" {
					t.Errorf("%s of nothing: %v; want not_found", what, err)
				}
			}
			for what, err := range map[string]error{
				"RemoveContainer": a.RemoveContainer(ctx, "none"), "RemoveImage": a.RemoveImage(ctx, "localhost/api-test:one"), "RemoveVolume": a.RemoveVolume(ctx, "none"),
			} {
				if err != nil {
					t.Errorf("%s of nothing: %v", what, err)
				}
			}
		})
	}
}

func second[T any](_ T, err error) error { return err }

// signals tells of the first byte that is written.
type signals chan struct{}

func (s signals) Write(p []byte) (int, error) {
	select {
	case s <- struct{}{}:
	default:
	}
	return len(p), nil
}

// TestAPIHangs: a call ends when the engine does not answer, and says so; the next ends soon, and
// all goes on when it answers again.
func TestAPIHangs(t *testing.T) {
	hung := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-hung:
			w.Write([]byte("[]"))
		case <-r.Context().Done():
		}
	}))
	defer s.Close()
	a := NewAPI(APIOptions{Name: "slow", Every: 20 * time.Millisecond, Dial: dials("tcp", s.Listener.Addr().String())})
	defer a.Close()
	for range 2 {
		_, err := a.ListContainers(t.Context(), nil)
		if !errors.Is(err, ErrHangs) || sandboxer.KindOf(err) != sandboxer.Unavailable || sandboxer.HintOf(err) == "" {
			t.Fatalf("%v; want unavailable, hanging", err)
		}
	}
	close(hung)
	if _, err := a.ListContainers(t.Context(), nil); err != nil {
		t.Errorf("once it answers: %v", err)
	}
}

// TestAPIAbsent: an engine that is not there is unavailable, at once.
func TestAPIAbsent(t *testing.T) {
	a := overUnix(t, t.TempDir()+"/none")
	if _, err := a.Info(t.Context()); !errors.Is(err, ErrAbsent) || sandboxer.KindOf(err) != sandboxer.Unavailable || sandboxer.HintOf(err) == "" {
		t.Errorf("%v; want unavailable, absent", err)
	}
}

// FuzzDemux: what an engine sends never makes more of it than there is.
func FuzzDemux(f *testing.F) {
	f.Add([]byte("\x01\x00\x00\x00\x00\x00\x00\x02hi\x02\x00\x00\x00\x00\x00\x00\x01e"))
	f.Add([]byte("\x03\x00\x00\x00\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var out, errs bytes.Buffer
		_ = demux(bytes.NewReader(data), &out, &errs)
		if out.Len()+errs.Len() > len(data) {
			t.Errorf("%d bytes out of %d", out.Len()+errs.Len(), len(data))
		}
	})
}

// TestImageVanishes gives Podman's answer to a listing of images while one was removed, which it gives about once in a thousand times.
func TestImageVanishes(t *testing.T) {
	failures := 2
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if failures > 0 {
			failures--
			w.WriteHeader(http.StatusInternalServerError)
			w.Write([]byte(`{"message": "locating item named \"manifest\" for image with ID \"40b7\" (consider removing the image to resolve the issue): file does not exist"}`))
			return
		}
		w.Write([]byte(`[{"Id": "sha256:1"}]`))
	}))
	defer s.Close()
	a := NewAPI(APIOptions{Name: "test", Dial: dials("tcp", s.Listener.Addr().String())})
	defer a.Close()
	if list, err := a.ListImages(t.Context(), "", nil); err != nil || len(list) != 1 {
		t.Errorf("got %+v, %v", list, err)
	}
	failures = 100
	if _, err := a.ListImages(t.Context(), "", nil); sandboxer.KindOf(err) != sandboxer.Failed || failures != 97 {
		t.Errorf("got %v after %d requests; want failed after 3", err, 100-failures)
	}
}
