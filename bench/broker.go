//go:build linux

package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/local"
	"github.com/sand-boxer/sandboxer/api"
)

// broker is a `sandboxer serve` process of our own and a client of it.
type broker struct {
	*api.Client
	dir    string // data, socket, log, configuration
	socket string
	cmd    *exec.Cmd
	died   chan struct{}
	owner  string
}

const (
	plainProfile = "profile.local"
	imageProfile = "profile.bench-image"
	poolProfile  = "profile.bench-pool"
)

// like is a profile that says what profile.local says, and more.
func like(id, more string) string {
	return fmt.Sprintf("id: %s\nextension: ext.local\nisolation: gvisor\nrequires: [exec, files]\nnetwork: none\nlimits:\n  disk: 8GiB\nttl: 30m\n%s\n", id, more)
}

// startBroker starts the server in dir, with profiles and extensions of its own by their IDs, and
// settings by the name config.
func startBroker(ctx context.Context, bin, dir string, files map[string]string) (*broker, error) {
	b := &broker{dir: dir, socket: filepath.Join(dir, "api.sock"), died: make(chan struct{})}
	for id, text := range files {
		in := filepath.Join(dir, "profiles")
		switch {
		case id == "config":
			in = dir
		case strings.HasPrefix(id, "ext."):
			in = filepath.Join(dir, "extensions")
		}
		if err := errors.Join(os.MkdirAll(in, 0o755), os.WriteFile(filepath.Join(in, id+".yaml"), []byte(text), 0o644)); err != nil {
			return nil, err
		}
	}
	log, err := os.OpenFile(filepath.Join(dir, "server.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	b.cmd = exec.Command(filepath.Join(bin, "sandboxer"), "serve", "--log-level", "warn")
	b.cmd.Env = b.env()
	b.cmd.Stdout, b.cmd.Stderr = log, log
	// An interrupt of the terminal is ours to handle: the server has work to do first.
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGTERM}
	if err := b.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { _ = b.cmd.Wait(); close(b.died) }()
	if b.Client, err = api.New("unix://"+b.socket, api.Options{}); err != nil {
		return b, err
	}
	for deadline := time.Now().Add(time.Minute); ; {
		st, err := b.Status(ctx)
		if err == nil {
			b.owner = st.Owner
			return b, nil
		}
		select {
		case <-b.died:
			return b, fmt.Errorf("the server did not start: %s", b.said())
		case <-ctx.Done():
			return b, ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return b, fmt.Errorf("the server does not answer: %w", err)
		}
	}
}

// started reports whether there is a server to close.
func (b *broker) started() bool { return b != nil && b.cmd.Process != nil }

// withServer calls do with a server of its own, which ends after it.
func (b *bench) withServer(ctx context.Context, bin, dir string, files map[string]string, do func(*broker) error) (err error) {
	br, err := startBroker(ctx, bin, b.path(dir), files)
	if br.started() {
		defer func() { err = errors.Join(err, br.close()) }()
	}
	if err == nil {
		err = do(br)
	}
	if err != nil && br.started() && br.said() != "" {
		b.say(fmt.Sprintf("the server of %s said:\n%s", bin, br.said()))
	}
	return err
}

// env is the environment of the server, and of commands for it.
func (b *broker) env() []string {
	return append(withoutSettings(os.Environ()), "SANDBOXER_HOME="+b.dir)
}

// command runs the command line of the server's build.
func (b *broker) command(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, b.cmd.Path, args...)
	cmd.Env = b.env()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", cmd, err, bytes.TrimSpace(out))
	}
	return nil
}

// sandboxPIDs are gVisor's processes of a sandbox that was never resumed.
func (b *broker) sandboxPIDs(id string) []int {
	return gvisor(filepath.Join(b.stateDir(), "run"))[id+"-g1"]
}

// withoutSettings is env without what would configure the server otherwise.
func withoutSettings(env []string) []string {
	var out []string
	for _, kv := range env {
		if !strings.HasPrefix(kv, "SANDBOXER_") {
			out = append(out, kv)
		}
	}
	return out
}

func (b *broker) pid() int          { return b.cmd.Process.Pid }
func (b *broker) cgroups() []string { return cgroups(b.owner) }

// stateDir is where ext.local keeps its state.
func (b *broker) stateDir() string { return filepath.Join(b.dir, "data", "extensions", "ext.local") }

// said is the end of the server's log.
func (b *broker) said() string {
	data, _ := os.ReadFile(filepath.Join(b.dir, "server.log"))
	return string(bytes.TrimSpace(data[max(0, len(data)-2000):]))
}

// metrics asks the server for its measurements, by name with labels.
func (b *broker) metrics() (map[string]float64, error) {
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", b.socket)
	}}
	resp, err := (&http.Client{Transport: tr, Timeout: time.Minute}).Get("http://localhost/metrics")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	out := map[string]float64{}
	sc := bufio.NewScanner(resp.Body)
	for sc.Scan() {
		if i := strings.LastIndexByte(sc.Text(), ' '); i > 0 && sc.Text()[0] != '#' {
			if v, err := strconv.ParseFloat(sc.Text()[i+1:], 64); err == nil {
				out[sc.Text()[:i]] = v
			}
		}
	}
	return out, sc.Err()
}

// close destroys what is left, stops the server and removes its directory.
func (b *broker) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	if b.Client != nil && b.owner != "" {
		if l, err := b.List(ctx, api.SandboxQuery{Limit: sandboxer.MaxPage}); err == nil {
			for _, sb := range l.Items {
				if sb.State != sandboxer.Terminated {
					_, err := b.Destroy(ctx, sb.ID, true)
					errs = append(errs, err)
				}
			}
		}
		b.Client.Close()
	}
	_ = b.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-b.died:
	case <-ctx.Done():
		errs = append(errs, errors.New("the server did not stop and was killed"))
		_ = b.cmd.Process.Kill()
		<-b.died
	}
	errs = append(errs, sweepUp(b.stateDir(), b.owner), os.RemoveAll(b.dir))
	return errors.Join(errs...)
}

// create makes a sandbox that stays.
func (b *broker) create(ctx context.Context, profile string) (string, error) {
	sb, err := b.Create(ctx, api.CreateSandbox{Profile: profile})
	if err != nil {
		return "", fmt.Errorf("creating a sandbox of %s: %w", profile, err)
	}
	return sb.ID, nil
}

// run runs true in the sandbox, as one request.
func (b *broker) run(ctx context.Context, id string) error {
	res, err := b.Run(ctx, id, api.Exec{Args: []string{"true"}})
	if err == nil && res.Code != 0 {
		err = fmt.Errorf("true exits with %d: %s", res.Code, res.Stderr)
	}
	return err
}

// exec runs a command with its streams in the sandbox.
func (b *broker) exec(ctx context.Context, id string, cmd sandboxer.Cmd) error {
	x, err := b.Exec(ctx, id, cmd)
	if err == nil && x.Code != 0 {
		err = fmt.Errorf("%s exits with %d", cmd.Args[0], x.Code)
	}
	return err
}

// life measures a sandbox from nothing to nothing.
func (b *broker) life(ctx context.Context, to *Set, profile, what string) error {
	cpu := treeCPU(b.pid())
	begin := time.Now()
	id, err := b.create(ctx, profile)
	if err != nil {
		return err
	}
	created := time.Now()
	if err := b.run(ctx, id); err != nil {
		return err
	}
	ran := time.Now()
	if _, err := b.Destroy(ctx, id, true); err != nil {
		return err
	}
	gone := time.Now()
	to.Took(what+": create to first exec", ran.Sub(begin))
	to.Took(what+": create", created.Sub(begin))
	to.Took(what+": first exec", ran.Sub(created))
	to.Took(what+": destroy", gone.Sub(ran))
	to.Took(what+": whole life", gone.Sub(begin))
	to.Spent(what+": whole life", treeCPU(b.pid())-cpu)
	return nil
}

// direct is ext.local without broker and API: what they add shows in the comparison.
type direct struct {
	dir   string
	owner string
	ext   sandboxer.Extension
	n     int
}

func openDirect(ctx context.Context, bin, dir string) (*direct, error) {
	d := &direct{dir: dir, owner: sandboxer.NewID()}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	var err error
	d.ext, err = local.Adapter.Open(ctx, sandboxer.Env{
		Extension: "ext.local", Owner: d.owner, Dir: dir, Log: slog.New(slog.DiscardHandler),
		Decode: func(v any) error {
			c := v.(*local.Config)
			c.Runner, c.Agent = filepath.Join(bin, "sandboxer-runner"), filepath.Join(bin, "sandboxer-agent")
			return nil
		},
	})
	return d, err
}

func (d *direct) spec(image string) sandboxer.Spec {
	d.n++
	s := sandboxer.Spec{ID: fmt.Sprintf("bench-%d", d.n), Generation: 1, Owner: d.owner, Limits: sandboxer.Limits{DiskBytes: 8 << 30}}
	if image != "" {
		s.Image, s.Vouched = "tar:"+image, []string{sandboxer.RestrictedImage}
	}
	return s
}

func (d *direct) exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) error {
	x, err := d.ext.(sandboxer.Execer).Exec(ctx, h, cmd)
	if err == nil && x.Code != 0 {
		err = fmt.Errorf("%s exits with %d", cmd.Args[0], x.Code)
	}
	return err
}

func (d *direct) life(ctx context.Context, to *Set, image, what string) error {
	begin := time.Now()
	h, err := d.ext.Provision(ctx, d.spec(image))
	if err != nil {
		return err
	}
	if _, err := d.ext.WaitReady(ctx, h); err != nil {
		return err
	}
	if err := d.exec(ctx, h, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
		return err
	}
	ran := time.Now()
	if _, err := d.ext.Teardown(ctx, h); err != nil {
		return err
	}
	to.Took(what+": create to first exec", ran.Sub(begin))
	to.Took(what+": destroy", time.Since(ran))
	return nil
}

func (d *direct) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	if d.ext != nil {
		for h, err := range d.ext.(sandboxer.Lister).ListRunning(ctx, d.owner) {
			if err == nil {
				_, err = d.ext.Teardown(ctx, h)
			}
			errs = append(errs, err)
		}
		errs = append(errs, d.ext.(io.Closer).Close())
	}
	return errors.Join(append(errs, sweepUp(d.dir, d.owner))...)
}

// echo is a running cat that answers byte by byte.
type echo struct {
	in   *io.PipeWriter
	out  chan byte
	done chan error
}

type chanWriter chan byte

func (w chanWriter) Write(p []byte) (int, error) {
	for _, c := range p {
		w <- c
	}
	return len(p), nil
}

// startEcho runs cat by exec, which blocks until its input ends.
func startEcho(exec func(sandboxer.Cmd) error) *echo {
	r, w := io.Pipe()
	e := &echo{in: w, out: make(chan byte, 1), done: make(chan error, 1)}
	go func() {
		err := exec(sandboxer.Cmd{Args: []string{"cat"}, Stdin: r, Stdout: chanWriter(e.out)})
		r.CloseWithError(io.ErrClosedPipe)
		e.done <- err
	}()
	return e
}

// trip sends a byte and waits for it.
func (e *echo) trip() (time.Duration, error) {
	begin := time.Now()
	if _, err := e.in.Write([]byte("x")); err != nil {
		return 0, errors.Join(err, <-e.done)
	}
	select {
	case <-e.out:
		return time.Since(begin), nil
	case err := <-e.done:
		return 0, errors.Join(errors.New("cat ended"), err)
	case <-time.After(time.Minute):
		return 0, errors.New("cat does not answer")
	}
}

func (e *echo) close() error {
	e.in.Close()
	select {
	case err := <-e.done:
		return err
	case <-time.After(time.Minute):
		return errors.New("cat does not end")
	}
}

// counter counts what is written to it.
type counter int64

func (c *counter) Write(p []byte) (int, error) { *c += counter(len(p)); return len(p), nil }

// stream returns the rate of n mebibytes of output, in MB a second.
func stream(n int, exec func(sandboxer.Cmd) error) (float64, error) {
	var got counter
	begin := time.Now()
	err := exec(sandboxer.Cmd{Args: []string{"dd", "if=/dev/zero", "bs=1M", "count=" + strconv.Itoa(n)}, Stdout: &got})
	if err == nil && int(got) != n<<20 {
		err = fmt.Errorf("%d bytes arrived; want %d", got, n<<20)
	}
	return float64(got) / 1e6 / time.Since(begin).Seconds(), err
}

// applets are the programs of the image.
var applets = []string{"sh", "true", "cat", "dd", "sleep"}

// buildRoot writes a root file system of busybox into dir, and the same as an image
// and as a plain archive.
func buildRoot(busybox, dir, image, archive string) error {
	data, err := os.ReadFile(busybox)
	if err != nil {
		return err
	}
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	add := func(h tar.Header, body []byte) {
		h.Size, h.Format = int64(len(body)), tar.FormatPAX
		err = errors.Join(err, tw.WriteHeader(&h))
		_, werr := tw.Write(body)
		err = errors.Join(err, werr)
	}
	dirs := []string{"bin", "dev", "etc", "proc", "sys", "tmp", "workspace"}
	for _, d := range dirs {
		add(tar.Header{Name: d + "/", Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	add(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, data)
	for _, a := range applets {
		add(tar.Header{Name: "bin/" + a, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, nil)
	}
	add(tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:0:root:/root:/bin/sh\n"))
	if err = errors.Join(err, tw.Close(), os.WriteFile(archive, buf.Bytes(), 0o644)); err != nil {
		return err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil })
	if err != nil {
		return err
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return err
	}
	ref, err := name.NewTag("bench:latest")
	if err != nil {
		return err
	}
	if err := tarball.WriteToFile(image, ref, img); err != nil {
		return err
	}
	for _, d := range dirs {
		err = errors.Join(err, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	err = errors.Join(err, os.WriteFile(filepath.Join(dir, "bin/busybox"), data, 0o755))
	for _, a := range applets {
		err = errors.Join(err, os.Symlink("busybox", filepath.Join(dir, "bin", a)))
	}
	return err
}
