package composessh

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
)

// TestDialByAgent: a port on the loopback of the default service is reached where the image
// is one program and nothing else; in a service without the agent it is not.
func TestDialByAgent(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 1)
	program, err := os.ReadFile(buildtest.Program(t, "internal/engine/enginetest/testdata/echo"))
	if err != nil {
		t.Fatal(err)
	}
	var image bytes.Buffer
	w := tar.NewWriter(&image)
	if err := w.WriteHeader(&tar.Header{Name: "echo", Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(program))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(program); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	const name = "sandboxer-test-echo:1"
	load := exec.Command(r.program, "import", "-", name)
	load.Env, load.Stdin = append(os.Environ(), r.engines[0]...), &image
	if out, err := load.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() {
		rm := exec.Command(r.program, "rmi", "-f", name)
		rm.Env = append(os.Environ(), r.engines[0]...)
		if out, err := rm.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	e := r.opened(t, "dial")
	h, _ := provision(t, e, order("dial", repo(t, fmt.Sprintf(`services:
  main:
    image: %s
    command: [/echo, "127.0.0.1:7000"]
  other:
    image: %[1]s
    command: [/echo, "127.0.0.1:7001"]
    ports: ["7001"]
`, name), nil)))
	deadline := time.Now().Add(time.Minute)
	for {
		ports, err := e.ListPorts(t.Context(), h)
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("ports %v, %v", ports, err)
		}
		if len(ports) == 2 {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	for range 2 { // the agent is started by the first
		c, err := e.Dial(t.Context(), h, 7000)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(c, "hello"); err != nil {
			t.Error(err)
		}
		if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Error(err)
		}
		if got, err := io.ReadAll(c); string(got) != "hello" || err != nil {
			t.Errorf("by way of the agent: %q, %v", got, err)
		}
		c.Close()
	}
	if _, err := e.Dial(t.Context(), h, 7001); sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(sandboxer.Message(err), "no nc") {
		t.Errorf("a service without the agent: %v", err)
	}
}
