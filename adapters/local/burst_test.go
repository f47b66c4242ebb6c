//go:build linux

package local

import (
	"bytes"
	"context"
	"io"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A hundred commands whose callers leave at once end, and take nothing with them: the
// sandbox answers afterwards, and nobody inside stands still.
func TestManyCancelledAtOnce(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	const n = 100
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	said, in := io.Pipe()
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			_, _ = e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo on; exec sleep 1000"}, Stdout: in})
		})
	}
	if _, err := io.ReadFull(said, make([]byte, 3*n)); err != nil {
		t.Fatal(err)
	}
	in.Close()
	begun := time.Now()
	cancel()
	wg.Wait()
	t.Logf("cancelled in %s", time.Since(begun))
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		var out bytes.Buffer
		x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "grep -l sleep /proc/[0-9]*/comm | wc -l"}, Stdout: &out})
		if err == nil && x.Code == 0 && out.String() == "0\n" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("afterwards: %q commands, %+v, %v", out.String(), x, err)
		}
	}
	if _, err := os.Stat(e.dir("box", boxName(h.SandboxID, 1), "stopped")); err == nil {
		t.Error("the sandbox is noted as standing still")
	}
}
