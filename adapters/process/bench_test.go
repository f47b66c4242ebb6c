package process_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// median is that of n samples of each of fs, taken in turns.
func medians(b *testing.B, n int, fs ...func()) []float64 {
	b.Helper()
	all := make([][]float64, len(fs))
	for range n {
		for i, f := range fs {
			began := time.Now()
			f()
			all[i] = append(all[i], float64(time.Since(began)))
		}
	}
	out := make([]float64, len(fs))
	for i, s := range all {
		slices.Sort(s)
		out[i] = s[len(s)/2]
	}
	return out
}

// BenchmarkRatios reports what the protocol costs compared with its parts, in one run:
//
//	call/bare    the time of a call relative to a bare round trip of as much JSON over the same kind of pipe
//	exec/fake    the speed of a command's output of 256 MiB relative to that of the same adapter in this process
//	exec/pipe    and relative to that of a pipe
func BenchmarkRatios(b *testing.B) {
	child, err := openProgram(b, b.TempDir(), "o", sandboxer.Program{Command: []string{self(b), "extension"}}, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer child.(io.Closer).Close()
	w := fake.NewWorld()
	defer w.Close()
	inProcess := fake.New(w, fake.Config{Owner: "o"})
	defer inProcess.Close()
	h := func(e sandboxer.Extension) sandboxer.Handle {
		spec := sandboxer.Spec{ID: "bench", Generation: 1, Owner: "o", Place: "localhost"}
		h, err := e.Provision(b.Context(), spec)
		if err != nil {
			b.Fatal(err)
		}
		return h
	}
	there, here := h(child), h(inProcess)
	defer child.Teardown(context.WithoutCancel(b.Context()), there)

	// The other end of the bare round trip reads a line, decodes it and writes one.
	bare := exec.Command(self(b), "json")
	in, err := bare.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := bare.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := bare.Start(); err != nil {
		b.Fatal(err)
	}
	defer bare.Wait()
	defer in.Close()
	answers := bufio.NewReader(out)
	asked, err := json.Marshal(map[string]any{"id": 1, "method": "is_alive", "params": map[string]any{"handle": there}})
	if err != nil {
		b.Fatal(err)
	}
	b.Run("call", func(b *testing.B) {
		m := medians(b, 2000,
			func() {
				if l, err := child.(sandboxer.Prober).IsAlive(b.Context(), there); l != sandboxer.Alive {
					b.Fatal(l, err)
				}
			},
			func() {
				if _, err := in.Write(append(asked, '\n')); err != nil {
					b.Fatal(err)
				}
				line, err := answers.ReadBytes('\n')
				var v any
				if err != nil || json.Unmarshal(line, &v) != nil {
					b.Fatal(err)
				}
			})
		b.ReportMetric(m[0]/m[1], "call/bare")
		b.ReportMetric(m[0]/1e3, "call-µs")
		b.ReportMetric(0, "ns/op")
	})

	const size = 256 << 20
	command := sandboxer.Cmd{Args: []string{"sh", "-c", "head -c 268435456 /dev/zero"}}
	through := func(e sandboxer.Extension, h sandboxer.Handle) func() {
		return func() {
			var n counter
			cmd := command
			cmd.Stdout = &n
			if x, err := e.(sandboxer.Execer).Exec(b.Context(), h, cmd); err != nil || x.Code != 0 || n != size {
				b.Fatal(x, n, err)
			}
		}
	}
	b.Run("exec", func(b *testing.B) {
		m := medians(b, 5, through(child, there), through(inProcess, here), func() {
			var n counter
			cmd := exec.Command("sh", "-c", "head -c 268435456 /dev/zero | cat")
			cmd.Stdout = &n
			if err := cmd.Run(); err != nil || n != size {
				b.Fatal(n, err)
			}
		})
		b.ReportMetric(m[1]/m[0], "exec/fake")
		b.ReportMetric(m[2]/m[0], "exec/pipe")
		b.ReportMetric(size/m[0]*1e3, "exec-MB/s")
		b.ReportMetric(0, "ns/op")
	})
}

type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}
