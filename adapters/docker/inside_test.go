package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
	"github.com/sand-boxer/sandboxer/internal/images/registrytest"
	"github.com/sand-boxer/sandboxer/internal/notes"
)

func order(id string, o options, change ...func(*sandboxer.Spec)) sandboxer.Spec {
	s := sandboxer.Spec{ID: id, Generation: 1, Owner: o.owner, Place: "one", Vouched: []string{"image", "repo", "host"}}
	for _, f := range change {
		f(&s)
	}
	return s
}

// up makes a sandbox that is torn down when the test ends.
func up(t *testing.T, e *extension, s sandboxer.Spec) sandboxer.Handle {
	t.Helper()
	t.Cleanup(func() {
		c, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if _, err := e.Teardown(c, sandboxer.Handle{SandboxID: s.ID}); err != nil {
			t.Errorf("Teardown(%s): %v", s.ID, err)
		}
	})
	h, err := e.Provision(t.Context(), s)
	if err == nil {
		_, err = e.WaitReady(t.Context(), h)
	}
	if err != nil {
		t.Fatalf("Provision(%s): %v (%s)", s.ID, err, sandboxer.HintOf(err))
	}
	return h
}

func run(t *testing.T, e *extension, h sandboxer.Handle, script string) string {
	t.Helper()
	var out, errs bytes.Buffer
	x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Stdout: &out, Stderr: &errs})
	if err != nil || x.Code != 0 {
		t.Fatalf("%s: %+v, %v, %s", script, x, err, &errs)
	}
	return strings.TrimSpace(out.String())
}

func wantKind(t *testing.T, err error, want sandboxer.Kind, words ...string) {
	t.Helper()
	if sandboxer.KindOf(err) != want {
		t.Errorf("error %v is %q; want %q", err, sandboxer.KindOf(err), want)
	}
	for _, w := range words {
		if said := sandboxer.Message(err) + " " + sandboxer.HintOf(err); !strings.Contains(said, w) {
			t.Errorf("%q does not say %q", said, w)
		}
	}
}

// raw calls the engine directly.
func (en testEngine) raw(t *testing.T, method, path, body string) string {
	t.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", strings.TrimPrefix(en.address, "unix://"))
	}}}
	r, err := http.NewRequestWithContext(t.Context(), method, "http://engine/v1.40"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	res, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode >= 300 {
		t.Fatalf("%s %s: %s, %v, %s", method, path, res.Status, err, data)
	}
	return string(data)
}

// TestInside checks the defaults from inside, and the engine's description of a sandbox.
func TestInside(t *testing.T) {
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			o := en.options(t, "inside")
			e := o.opened(t)
			const canary = "canary-in-the-environment"
			h := up(t, e, order("inside", o, func(s *sandboxer.Spec) {
				s.Env = map[string]string{"TOKEN": canary}
				s.Ports = []int{8080}
			}))
			if got := run(t, e, h, "echo $TOKEN"); got != canary {
				t.Errorf("TOKEN is %q", got)
			}
			caps := uint64(0)
			for _, c := range []int{29, 0, 1, 3, 4, 5, 10, 31, 6, 8, 7, 18} { // guestCapabilities, by their numbers in linux/capability.h
				caps |= 1 << c
			}
			for field, want := range map[string]string{"CapBnd": fmt.Sprintf("%016x", caps), "CapEff": fmt.Sprintf("%016x", caps), "NoNewPrivs": "1", "Seccomp": "2"} {
				if got := run(t, e, h, "sed -n 's/^"+field+":[[:space:]]*//p' /proc/self/status"); got != want {
					t.Errorf("%s of a command is %s; want %s", field, got, want)
				}
			}
			if got := run(t, e, h, "tr '\\0' ' ' </proc/1/cmdline"); !strings.HasPrefix(got, agentPath+" init ") {
				t.Errorf("process 1 is %q", got)
			}
			for what, script := range map[string]string{
				"a device of the host can be opened":      "for d in /dev/*; do [ ! -b $d ] || echo $d; done; [ ! -e /dev/kvm ] && [ ! -e /dev/mem ] || echo kvm",
				"a device can be made":                    "! mknod /tmp/m c 1 1 2>/dev/null || echo made",
				"something can be mounted":                "mkdir -p /tmp/m && ! mount -t tmpfs none /tmp/m 2>/dev/null || echo mounted",
				"the agent's program can be replaced":     "! { echo x >" + agentPath + "; } 2>/dev/null && ! rm " + agentPath + " 2>/dev/null && ! mv " + agentDir + " /gone 2>/dev/null || echo replaced",
				"processes of the host can be seen":       "[ $(ls -d /proc/[0-9]* | wc -l) -lt 12 ] || ls -d /proc/[0-9]*",
				"the kernel's settings can be changed":    "! { echo 1 >/proc/sys/kernel/panic; } 2>/dev/null || echo changed",
				"a socket of an engine is there":          "for s in /var/run/docker.sock /run/docker.sock /run/podman/podman.sock; do [ ! -e $s ] || echo $s; done",
				"swap can be used":                        "for f in /sys/fs/cgroup/memory.swap.max /sys/fs/cgroup/memory/memory.memsw.limit_in_bytes; do [ ! -e $f ] || case $(cat $f) in 0|268435456) ;; *) cat $f;; esac; done",
				"/dev/shm is not half of the memory":      "[ $(df -k /dev/shm | awk 'END { print $2 }') = 131072 ] || df -k /dev/shm",
				"the host name is nobody's":               "grep -q \"^127.0.1.1.*$(hostname)\" /etc/hosts || cat /etc/hosts",
				"the limit of processes is not the usual": "for f in /sys/fs/cgroup/pids.max /sys/fs/cgroup/pids/pids.max; do [ ! -e $f ] || [ $(cat $f) = 2048 ] || cat $f; done",
			} {
				if got := run(t, e, h, script); got != "" {
					t.Errorf("%s: %q", what, got)
				}
			}

			// Callers that may inspect containers or images do not see the environment.
			snap, err := e.Snapshot(t.Context(), h, "inside-snapshot")
			if err != nil {
				t.Fatal(err)
			}
			defer e.DropSnapshot(context.WithoutCancel(t.Context()), snap)
			told := en.raw(t, "GET", "/containers/"+h.Ref+"/json", "")
			for what, text := range map[string]string{
				"a container": told, "all containers": en.raw(t, "GET", "/containers/json?all=1", ""), "an image": en.raw(t, "GET", "/images/"+e.snapshotName("inside-snapshot")+"/json", ""),
			} {
				if strings.Contains(text, canary) {
					t.Errorf("what the engine tells of %s has the environment in it", what)
				}
			}
			var c struct {
				HostConfig struct {
					Privileged, PublishAllPorts           bool
					PidMode, IpcMode, UTSMode, UsernsMode string
					Memory, MemorySwap                    int64
					Devices                               []any
					Binds                                 []string
					LogConfig                             struct {
						Type   string
						Config map[string]string
					}
					SecurityOpt []string
				}
			}
			if err := json.Unmarshal([]byte(told), &c); err != nil {
				t.Fatal(err)
			}
			hc := c.HostConfig
			if hc.Privileged || hc.PublishAllPorts || len(hc.Devices) > 0 || slices.Contains([]string{hc.PidMode, hc.IpcMode, hc.UTSMode, hc.UsernsMode}, "host") {
				t.Errorf("the container is %+v", hc)
			}
			if hc.Memory != 256<<20 || hc.MemorySwap != hc.Memory {
				t.Errorf("memory %d, with swap %d; want both 256 MiB", hc.Memory, hc.MemorySwap)
			}
			if name == "docker" && (hc.LogConfig.Type != "json-file" || hc.LogConfig.Config["max-size"] != "1m") {
				t.Errorf("the log is not bounded: %+v", hc.LogConfig)
			}
			for _, opt := range hc.SecurityOpt {
				if strings.Contains(opt, "unconfined") || strings.Contains(opt, "disable") {
					t.Errorf("security option %q", opt)
				}
			}
			r, err := e.WaitReady(t.Context(), h)
			if err != nil || len(r.Ports) != 1 || r.Ports[0].Port != 8080 || r.Host != "one" {
				t.Errorf("WaitReady: %+v, %v", r, err)
			}

			// No process connects to the agent of a sandbox on this machine, and at most one to that of another machine's idle
			// sandbox.
			const leading = `n=0; for p in /proc/[0-9]*; do case $(tr '\0' ' ' <$p/cmdline 2>/dev/null) in "` + agentPath + ` connect"*) n=$((n+1));; esac; done; echo $n`
			if n := run(t, e, h, leading); n != "0" {
				t.Errorf("%s processes lead to the agent", n)
			}
			e.agents.Drop(e.name(h.SandboxID, h.Generation))
			here := e.hosts["one"].socket
			e.hosts["one"].socket = ""
			defer func() { e.hosts["one"].socket = here }()
			for range 3 {
				run(t, e, h, "cat </dev/null")
			}
			for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
				n := run(t, e, h, leading)
				if n == "1" {
					break
				}
				if time.Now().After(end) {
					t.Fatalf("%s processes lead to the agent", n)
				}
			}
		})
	}
}

// TestStrangers: objects of others are neither touched nor treated as ours.
func TestStrangers(t *testing.T) {
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			o := en.options(t, "strangers")
			e := o.opened(t)
			s := order("taken", o)
			_, image, _ := strings.Cut(en.image, ":")
			id, err := e.hosts["one"].api.CreateContainer(t.Context(), e.name(s.ID, 1), engine.ContainerConfig{Image: image, Entrypoint: []string{"true"}})
			if err != nil {
				t.Fatal(err)
			}
			defer e.hosts["one"].api.RemoveContainer(context.WithoutCancel(t.Context()), id)
			_, err = e.Provision(t.Context(), s)
			wantKind(t, err, sandboxer.Conflict, "not ours", "docker rm")
			if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: s.ID}); err != nil {
				t.Error(err)
			}
			if l, err := e.IsAlive(t.Context(), sandboxer.Handle{SandboxID: s.ID, Generation: 1}); l != sandboxer.Gone || err != nil {
				t.Errorf("IsAlive of somebody else's = %s, %v", l, err)
			}
			if _, err := e.hosts["one"].api.InspectContainer(t.Context(), id); err != nil {
				t.Errorf("the stranger's container: %v", err)
			}

			// Nor objects of another extension of the same installation.
			dir := t.TempDir()
			other, err := Adapter.Open(t.Context(), sandboxer.Env{Extension: "ext.other", Owner: o.owner, Dir: dir, Notes: notes.New(dir, "ext.other", []byte(o.owner)), Decode: func(v any) error {
				c := v.(*Config)
				c.Engines, c.Image, c.Agent = e.cfg.Engines, e.cfg.Image, e.cfg.Agent
				return nil
			}})
			if err != nil {
				t.Fatal(err)
			}
			defer other.(io.Closer).Close()
			h := up(t, e, order("mine", o))
			for h := range other.(sandboxer.Lister).ListRunning(t.Context(), o.owner) {
				t.Errorf("another extension lists %+v", h)
			}
			if _, err := other.Teardown(t.Context(), sandboxer.Handle{SandboxID: "mine"}); err != nil {
				t.Error(err)
			}
			run(t, e, h, "true")
		})
	}
}

// testImage is an image of this machine's busybox, with a main command, a user and a directory.
func testImage(t *testing.T) v1.Image {
	t.Helper()
	box := enginetest.BusyboxTar(t)
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(box)), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf.OS, cf.Architecture = "linux", runtime.GOARCH
	cf.Config = v1.Config{Entrypoint: []string{"sh", "-c"}, Cmd: []string{"echo $WHO >main; exec sleep 1000"}, User: "nobody:nogroup", WorkingDir: "/srv/app",
		Env: []string{"WHO=image", "PATH=/bin"}, ExposedPorts: map[string]struct{}{"8080/tcp": {}, "53/udp": {}}}
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	return img
}

// TestImages: the server fetches an image from a registry and loads it, once; the image's entry point is the main
// command, with the sandbox's environment.
func TestImages(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			reg := registrytest.New(t)
			ref := reg.Host + "/app:1"
			reg.Push(t, "app:1", testImage(t))
			o := en.options(t, "images")
			e := o.opened(t)
			s := order("app", o, func(s *sandboxer.Spec) { s.Image, s.Env = ref, map[string]string{"WHO": "sandbox"} })
			unvouched := s
			unvouched.Vouched = nil
			wantKind(t, e.check(unvouched), sandboxer.Denied, "public internet")
			var steps []string
			h, err := e.Provision(sandboxer.WithProgress(t.Context(), func(p sandboxer.Progress) { steps = append(steps, p.Step) }), s)
			if err != nil {
				t.Fatalf("%v (%s)", err, sandboxer.HintOf(err))
			}
			defer e.Teardown(context.WithoutCancel(t.Context()), h)
			if all := strings.Join(steps, "\n"); !strings.Contains(all, "pulling "+ref) || !strings.Contains(all, "loading the image into one") {
				t.Errorf("progress: %q", steps)
			}
			if got := run(t, e, h, "pwd; id -un; id -gn; echo $WHO; ls -ld . | cut -c1-10"); got != "/srv/app\nnobody\nnogroup\nsandbox\ndrwxr-xr-x" {
				t.Errorf("inside: %q", got)
			}
			for end := time.Now().Add(time.Minute); run(t, e, h, "cat main 2>/dev/null || :") != "sandbox"; time.Sleep(20 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("the image's main command does not run with the sandbox's environment")
				}
			}
			r, err := e.WaitReady(t.Context(), h)
			if err != nil || len(r.Ports) != 1 || r.Ports[0].Port != 8080 || !strings.Contains(r.Extra["image"], reg.Host+"/app@sha256:") {
				t.Errorf("WaitReady: %+v, %v", r, err)
			}
			sent := reg.Sent()
			again := up(t, e, order("again", o, func(s *sandboxer.Spec) { s.Image = ref }))
			run(t, e, again, "true")
			if reg.Sent() != sent {
				t.Errorf("a second sandbox fetched %d bytes", reg.Sent()-sent)
			}
			if gone, err := e.PruneCaches(t.Context(), ""); err != nil || len(gone) > 0 {
				t.Errorf("an image in use is pruned: %+v, %v", gone, err)
			}
			for _, h := range []sandboxer.Handle{h, again} {
				if _, err := e.Teardown(t.Context(), h); err != nil {
					t.Fatal(err)
				}
			}
			if have, err := e.Caches(t.Context(), ""); err != nil || len(have) != 1 || have[0].Bytes == 0 {
				t.Errorf("kept: %+v, %v", have, err)
			}
			e.sweep(t.Context(), e.hosts["one"])
			if have, err := e.Caches(t.Context(), ""); err != nil || len(have) != 1 {
				t.Errorf("within the bound, a sweep leaves %+v, %v; want it all", have, err)
			}
			e.cfg.Images.Keep = 1
			e.sweep(t.Context(), e.hosts["one"])
			if have, err := e.Caches(t.Context(), ""); err != nil || len(have) != 0 {
				t.Errorf("beyond the bound, a sweep leaves %+v, %v", have, err)
			}
			// A saved image needs no registry.
			file := t.TempDir() + "/saved.tar"
			if err := tarball.WriteToFile(file, mustTag(t, "saved:1"), testImage(t)); err != nil {
				t.Fatal(err)
			}
			saved := order("saved", o, func(s *sandboxer.Spec) { s.Image = "tar:" + file })
			run(t, e, up(t, e, saved), "true")
			saved.Vouched = nil
			wantKind(t, e.Admit(saved, "image"), sandboxer.Denied, "administrator")
			if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: "saved"}); err != nil {
				t.Fatal(err)
			}
			if _, err := e.PruneCaches(t.Context(), ""); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestImageThatHoldsUp: an image with passwd or group files that an engine would read without an end, or from the machine's devices, is
// refused before the engine reads them; otherwise, neither the create nor any teardown would ever return. So is one with a link on the
// path to the agent.
func TestImageThatHoldsUp(t *testing.T) {
	pipe, device := tar.Header{Typeflag: tar.TypeFifo, Mode: 0o644}, tar.Header{Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 5}
	link := tar.Header{Typeflag: tar.TypeSymlink, Mode: 0o777, Linkname: "../pipe"}
	images := map[string]map[string]tar.Header{
		"passwd a pipe": {"etc/passwd": pipe}, "group a pipe": {"etc/group": pipe}, "a device": {"etc/passwd": device}, "by a link": {"etc/passwd": link, "pipe": pipe},
		"the agent by a link": {".sandboxer": {Typeflag: tar.TypeSymlink, Mode: 0o777, Linkname: "/opt"}, "opt/": {Typeflag: tar.TypeDir, Mode: 0o755}},
	}
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			o := en.options(t, "holdsup")
			e := o.opened(t)
			defer e.PruneCaches(context.WithoutCancel(t.Context()), "")
			for what, files := range images {
				var packed bytes.Buffer
				w := tar.NewWriter(&packed)
				for name, head := range files {
					head.Name = name
					if err := w.WriteHeader(&head); err != nil {
						t.Fatal(err)
					}
				}
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
				layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(packed.Bytes())), nil })
				if err != nil {
					t.Fatal(err)
				}
				img, err := mutate.AppendLayers(empty.Image, layer)
				if err != nil {
					t.Fatal(err)
				}
				file := t.TempDir() + "/saved.tar"
				if err := tarball.WriteToFile(file, mustTag(t, "holds:1"), img); err != nil {
					t.Fatal(err)
				}
				s := order("holdsup", o, func(s *sandboxer.Spec) { s.Image = "tar:" + file })
				for range 2 { // also an image that was checked once
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					_, err := e.Provision(ctx, s)
					cancel()
					if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.Message(err), " of the image is ") {
						t.Fatalf("%s: %v", what, err)
					}
				}
			}
			nothingLeft(t, o)
		})
	}
}

// TestPublic: a sandbox with the mode public has the engine's network if the operator allows it; otherwise
// it is refused.
func TestPublic(t *testing.T) {
	en := engines["docker"](t)
	o := en.options(t, "public")
	public := func(s *sandboxer.Spec) { s.Network = sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic} }
	refused := o.opened(t)
	refused.mayFilter = false // like a server without rights
	if !slices.Contains(refused.Without(), sandboxer.CanNetwork) {
		t.Error("networks that cannot be filtered are said to be changed")
	}
	_, err := refused.Provision(t.Context(), order("none", o, public))
	wantKind(t, err, sandboxer.Unsupported, "unfiltered_egress")
	_, err = refused.Provision(t.Context(), order("none", o, func(s *sandboxer.Spec) {
		s.Network = sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"example.org"}}
	}))
	wantKind(t, err, sandboxer.Unsupported, "filter")
	var made struct{ Id string }
	if err := json.Unmarshal([]byte(en.raw(t, "POST", "/networks/create", `{"Name":"sandboxes","Internal":true}`)), &made); err != nil {
		t.Fatal(err)
	}
	o.config["unfiltered_egress"], o.config["network"] = true, "sandboxes"
	o.dir = t.TempDir()
	e := o.opened(t)
	h := up(t, e, order("public", o, public, func(s *sandboxer.Spec) { s.Ports = []int{7777} }))
	if got := run(t, e, h, "ls /sys/class/net | grep -v lo"); got == "" {
		t.Error("it has no network")
	}
	// The addresses of its ports reach it from this machine.
	if _, err := e.StartProcess(t.Context(), h, sandboxer.ProcessSpec{Args: []string{"/bin/echoer", "0.0.0.0:7777"}}); err != nil {
		t.Fatal(err)
	}
	r, err := e.WaitReady(t.Context(), h)
	if err != nil || len(r.Ports) != 1 || r.Ports[0].Addr == "" {
		t.Fatalf("WaitReady: %+v, %v; want one port with its address", r, err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.Dial("tcp", r.Ports[0].Addr)
		if err == nil {
			c.Close()
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	en.raw(t, "DELETE", "/networks/"+made.Id, "")
}

// TestRepo: a directory of the server's machine is copied into the workspace, and belongs to the user.
func TestRepo(t *testing.T) {
	en := engines["docker"](t)
	o := en.options(t, "repo")
	e := o.opened(t)
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/hello", []byte("from here"), 0o600); err != nil {
		t.Fatal(err)
	}
	h := up(t, e, order("repo", o, func(s *sandboxer.Spec) { s.Inputs, s.User = map[string]string{"repo": dir}, "nobody" }))
	if got := run(t, e, h, "cat hello; stat -c ' %U' hello"); got != "from here nobody" {
		t.Errorf("inside: %q", got)
	}
	wantKind(t, e.check(order("none", o, func(s *sandboxer.Spec) { s.Inputs = map[string]string{"repo": "here"} })), sandboxer.Invalid, "absolute")
	_, err := e.Provision(t.Context(), order("none", o, func(s *sandboxer.Spec) { s.User = "no-such-user" }))
	wantKind(t, err, sandboxer.Invalid, "no-such-user")
	wantKind(t, e.Admit(order("none", o, func(s *sandboxer.Spec) { s.Inputs = map[string]string{"repo": dir} }), "repo"), sandboxer.Denied)
}

// TestAgentVolume: what an operator removed, or another process changed, is repaired.
func TestAgentVolume(t *testing.T) {
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			o := en.options(t, "volume")
			e := o.opened(t)
			api := e.hosts["one"].api
			first := up(t, e, order("first", o))
			if _, err := e.Teardown(t.Context(), first); err != nil {
				t.Fatal(err)
			}
			volumes, err := e.volumesOn(t.Context(), e.hosts["one"])
			if err != nil || len(volumes) != 1 {
				t.Fatalf("%+v, %v; want one", volumes, err)
			}
			if err := e.env.Notes.Delete(t.Context(), "one"); err != nil { // as of a process whose data is lost
				t.Fatal(err)
			}
			filler, err := api.CreateContainer(t.Context(), "spoils", engine.ContainerConfig{Image: strings.TrimPrefix(en.image, "engine:"), Entrypoint: []string{"true"}, HostConfig: engine.HostConfig{
				Mounts: []engine.MountConfig{{Type: "volume", Source: volumes[0].Name, Target: "/v"}}}})
			if err != nil {
				t.Fatal(err)
			}
			var spoiled bytes.Buffer
			w := tar.NewWriter(&spoiled)
			w.WriteHeader(&tar.Header{Name: agentFile, Typeflag: tar.TypeReg, Mode: 0o755, Size: 3})
			w.Write([]byte("cut"))
			w.Close()
			if err := api.PutArchive(t.Context(), filler, "/v", &spoiled); err != nil {
				t.Fatal(err)
			}
			if err := api.RemoveContainer(t.Context(), filler); err != nil {
				t.Fatal(err)
			}
			second := up(t, e, order("second", o))
			run(t, e, second, "true")
			if _, err := e.Teardown(t.Context(), second); err != nil {
				t.Fatal(err)
			}
			// Another volume that was made within the same second looks like the filled one.
			note, err := e.env.Notes.Get(t.Context(), "one")
			if err != nil {
				t.Fatal(err)
			}
			if err := api.RemoveVolume(t.Context(), volumes[0].Name); err != nil {
				t.Fatal(err)
			}
			v, err := api.CreateVolume(t.Context(), volumes[0].Name, volumes[0].Labels)
			if err != nil {
				t.Fatal(err)
			}
			if err := e.noteAgent(t.Context(), e.hosts["one"], strings.ReplaceAll(string(note.Value), volumes[0].CreatedAt, v.CreatedAt)); err != nil {
				t.Fatal(err)
			}
			third := up(t, e, order("third", o))
			run(t, e, third, "true")
			if _, err := e.Teardown(t.Context(), third); err != nil {
				t.Fatal(err)
			}

			// An engine that was killed may have lost all labels of it; a volume with other labels belongs to another owner.
			again := func(labels map[string]string) {
				t.Helper()
				if err := api.RemoveVolume(t.Context(), v.Name); err != nil {
					t.Fatal(err)
				}
				if _, err := api.CreateVolume(t.Context(), v.Name, labels); err != nil {
					t.Fatal(err)
				}
			}
			again(nil)
			fourth := up(t, e, order("fourth", o))
			run(t, e, fourth, "true")
			if _, err := e.Teardown(t.Context(), fourth); err != nil {
				t.Fatal(err)
			}
			nothingLeft(t, o)
			if _, err := api.CreateVolume(t.Context(), v.Name, map[string]string{"whose": "somebody's"}); err != nil {
				t.Fatal(err)
			}
			_, err = e.Provision(t.Context(), order("fifth", o))
			wantKind(t, err, sandboxer.Conflict, v.Name)
			e.sweep(t.Context(), e.hosts["one"])
			if err := api.RemoveVolume(t.Context(), v.Name); err != nil { // it was not touched
				t.Error(err)
			}
		})
	}
}

// TestFuseMovedWhileFrozen: the agent of a paused sandbox gets its fuse at the resume, even if a crash interrupted that.
func TestFuseMovedWhileFrozen(t *testing.T) {
	o := engines["docker"](t).options(t, "fuse")
	e := o.opened(t)
	h := up(t, e, order("frozen", o))
	b, err := e.find(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	due := func(want bool) {
		t.Helper()
		if r, err := e.recall(t.Context(), b.key()); err != nil || r.FuseDue != want {
			t.Errorf("%+v, %v; want fuse_due %t", r, err, want)
		}
	}
	call := func(f func(context.Context, sandboxer.Handle) error) {
		t.Helper()
		if err := f(t.Context(), h); err != nil {
			t.Fatal(err)
		}
	}
	renew := func(ctx context.Context, h sandboxer.Handle) error { return e.Renew(ctx, h, time.Now().Add(time.Hour)) }
	call(e.Pause)
	call(renew)
	due(true)
	call(e.Resume)
	due(false)
	call(e.Pause)
	call(renew)
	call(func(ctx context.Context, _ sandboxer.Handle) error {
		return b.host.api.ContainerCall(ctx, b.container, "unpause")
	}) // and no more
	call(e.Resume)
	due(false)
}

// TestSharedAfterAKill: shared objects are removed even if the process that should have done so died, after the last sandbox had
// gone, or before the first existed.
func TestSharedAfterAKill(t *testing.T) {
	en := engines["docker"](t)
	o := en.options(t, "killed")
	api := en.options(t, "watches").opened(t).hosts["one"].api
	there := func(e *extension) (n int) {
		t.Helper()
		volumes, err := api.ListVolumes(t.Context(), e.agentVolumes())
		if err != nil {
			t.Fatal(err)
		}
		fillers, err := api.ListContainers(t.Context(), e.ours())
		if err != nil {
			t.Fatal(err)
		}
		return len(volumes) + len(fillers)
	}
	planned := func(e *extension) bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.sweeps["one"] != nil
	}
	for name, leave := range map[string]func(t *testing.T, e *extension){
		"after the last": func(t *testing.T, e *extension) {
			h, err := e.Provision(t.Context(), order("last", o))
			if err == nil {
				_, err = e.Teardown(t.Context(), h)
			}
			if err != nil {
				t.Fatal(err)
			}
		},
		"before the first": func(t *testing.T, e *extension) {
			if err := e.noteAgent(t.Context(), e.hosts["one"], ""); err != nil {
				t.Fatal(err)
			}
			labels := e.ours()
			labels[labelAgent] = strings.Repeat("0", 64)
			volume := e.agentVolume(labels[labelAgent])
			if _, err := api.CreateVolume(t.Context(), volume, labels); err != nil {
				t.Fatal(err)
			}
			if _, err := api.CreateContainer(t.Context(), volume+"-fill", engine.ContainerConfig{Image: strings.TrimPrefix(en.image, "engine:"), Entrypoint: []string{"true"}, Labels: labels, HostConfig: engine.HostConfig{
				Mounts: []engine.MountConfig{{Type: "volume", Source: volume, Target: agentDir}}}}); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := o.must(t)
			leave(t, e)
			e.mu.Lock()
			for _, s := range e.sweeps { // it dies before that
				s.Stop()
			}
			clear(e.sweeps)
			e.mu.Unlock()
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
			if there(e) == 0 {
				t.Fatal("nothing is left that could be removed")
			}
			next := o.opened(t)
			if !planned(next) {
				t.Error("the next process does not look")
			}
			next.sweep(t.Context(), next.hosts["one"])
			if n := there(next); n != 0 {
				t.Errorf("%d objects are left", n)
			}
			if err := next.Close(); err != nil {
				t.Fatal(err)
			}
			last := o.opened(t)
			if planned(last) {
				t.Error("who never had a sandbox there asks that engine, too")
			}
		})
	}
}

func TestConfig(t *testing.T) {
	whole := func(change func(*Config)) error {
		c := Config{Network: "bridge", Engines: map[string]Engine{}}
		change(&c)
		return c.Validate()
	}
	tcp := Engine{Address: "tcp://build:2376", CA: "/ca", Cert: "/cert", Key: "/key"}
	for _, en := range []Engine{{Address: "unix:///run/docker.sock"}, tcp, {Address: "ssh://ci@build"}, {Address: "ssh://build:2222/run/user/1000/podman.sock"}} {
		if err := whole(func(c *Config) { c.Engines["a"] = en }); err != nil {
			t.Errorf("%s: %v", en.Address, err)
		}
	}
	for _, en := range []Engine{{}, {Address: "build"}, {Address: "unix://run"}, {Address: "http://build:2375"}, {Address: "tcp://build:2375"}, {Address: "tcp://build", CA: "/ca", Cert: "/cert", Key: "/key"},
		{Address: "ssh://ci:secret@build"}, {Address: "ssh://"}, {Address: "unix:///s?x=1"}, {Address: "unix:///s", CA: "/ca"}} {
		wantKind(t, whole(func(c *Config) { c.Engines["a"] = en }), sandboxer.Invalid)
	}
	for _, n := range []string{"host", "none", "", "container:x", "a b"} {
		wantKind(t, whole(func(c *Config) { c.Network = n }), sandboxer.Invalid)
	}
	for name, ok := range map[string]bool{"busybox": true, "localhost/a/b:1": true, "sha256:abc": true, "../containers/x": false, "a//b": false, "a?x=1": false, "a/../b": false, "": false, "/a": false, "a b": false} {
		if engineImage(name) != ok {
			t.Errorf("%q as the name of an image: %t", name, !ok)
		}
	}
}

// FuzzMade: anyone can write labels.
func FuzzMade(f *testing.F) {
	f.Add(made{V: 1, User: "ci", Main: []string{"a"}}.label())
	f.Add("e30")
	f.Fuzz(func(t *testing.T, label string) {
		m, err := readMade(map[string]string{labelMade: label})
		if err == nil && m.V > madeVersion {
			t.Errorf("version %d was read", m.V)
		}
	})
}

func mustTag(t *testing.T, s string) name.Tag {
	t.Helper()
	tag, err := name.NewTag(s)
	if err != nil {
		t.Fatal(err)
	}
	return tag
}

// TestPauseAfterExec: a sandbox can be resumed, however soon its pause follows a command. A connection for a command
// may still be opening when the command has ended.
func TestPauseAfterExec(t *testing.T) {
	o := engines["docker"](t).options(t, "pauses")
	e := o.opened(t)
	h := up(t, e, order("pauses", o))
	b, err := e.find(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		var wg sync.WaitGroup
		for range 2 { // the other has the kept connection
			wg.Go(func() {
				if x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
					t.Errorf("round %d: %+v, %v", i, x, err)
				}
			})
		}
		wg.Wait()
		c, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		err := e.Pause(c, h)
		if err == nil {
			err = e.Resume(c, h)
		}
		cancel()
		if err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		// Docker gets the news of a pause from containerd after the resume, and is wrong about it for a moment. News of its
		// own command comes later.
		for end := time.Now().Add(2 * time.Minute); ; {
			x, err := b.host.api.Exec(t.Context(), b.container, agentUser, []string{"true"}, strings.NewReader(""), io.Discard, io.Discard)
			if err == nil && x.Code == 0 {
				break
			}
			if sandboxer.KindOf(err) != sandboxer.Conflict || time.Now().After(end) {
				t.Fatalf("round %d: %+v, %v", i, x, err)
			}
		}
	}
}
