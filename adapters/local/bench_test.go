//go:build linux

package local

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// BenchmarkCycle makes a sandbox, runs true in it and destroys it.
func BenchmarkCycle(b *testing.B) {
	for _, limits := range []sandboxer.Limits{{}, {MilliCPU: 2000, MemoryBytes: 1 << 30, PIDs: 512, DiskBytes: 1 << 30}} {
		b.Run(fmt.Sprintf("limits=%t", limits != sandboxer.Limits{}), func(b *testing.B) {
			needsGVisor(b)
			e := openIn(b, shortDir(b), ours("bench"))
			defer e.Close()
			for i := 0; b.Loop(); i++ {
				h, err := e.Provision(b.Context(), sandboxer.Spec{ID: fmt.Sprintf("b%d", i), Generation: 1, Owner: ours("bench"), Limits: limits})
				if err != nil {
					b.Fatal(err)
				}
				if x, err := e.Exec(b.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
					b.Fatal(x, err)
				}
				if _, err := e.Teardown(b.Context(), h); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkExec runs true in a running sandbox.
func BenchmarkExec(b *testing.B) {
	needsGVisor(b)
	e := openIn(b, shortDir(b), ours("bench"))
	defer e.Close()
	h, err := e.Provision(b.Context(), sandboxer.Spec{ID: "bench", Generation: 1, Owner: ours("bench")})
	if err != nil {
		b.Fatal(err)
	}
	defer e.Teardown(b.Context(), h)
	b.Run("parallel=1", func(b *testing.B) {
		for b.Loop() {
			if x, err := e.Exec(b.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
				b.Fatal(x, err)
			}
		}
	})
	b.Run("parallel=16", func(b *testing.B) {
		b.SetParallelism(8)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if x, err := e.Exec(b.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
					b.Fatal(x, err)
				}
			}
		})
	})
}

// BenchmarkNetwork moves data through the policy of an allow list, to and from a
// server outside, and measures the cost of a link.
func BenchmarkNetwork(b *testing.B) {
	needsGVisor(b)
	w := outside(b)
	transfer(b, w)
	e := openIn(b, shortDir(b), ours("bench"))
	defer e.Close()
	h, err := e.Provision(b.Context(), sandboxer.Spec{ID: "bench", Generation: 1, Owner: ours("bench"), Network: allow(w.host + ":9000")})
	if err != nil {
		b.Fatal(err)
	}
	defer e.Teardown(b.Context(), h)
	mib := 256
	if testing.Short() {
		mib = 16
	}
	for _, way := range []string{"push", "pull"} {
		b.Run(way, func(b *testing.B) {
			b.SetBytes(int64(mib) << 20)
			for b.Loop() {
				var out bytes.Buffer
				if x, err := e.Exec(b.Context(), h, sandboxer.Cmd{Args: []string{helpers + "/tool", way, w.host + ":9000", fmt.Sprint(mib)}, Stdout: &out}); err != nil || x.Code != 0 {
					b.Fatal(x, err, out.String())
				}
			}
		})
	}
	b.Run("link", func(b *testing.B) {
		for b.Loop() {
			n, err := e.link(h.Ref, allow(w.host))
			if err != nil {
				b.Fatal(err)
			}
			b.StopTimer()
			n.Close()
			b.StartTimer()
		}
	})
	b.Run("policy", func(b *testing.B) {
		for b.Loop() {
			if err := e.SetNetwork(b.Context(), h, allow(w.host+":9000")); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("plug", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			b.StopTimer()
			h, err := e.Provision(b.Context(), sandboxer.Spec{ID: fmt.Sprintf("plug%d", i), Generation: 1, Owner: ours("bench")})
			if err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
			if err := e.SetNetwork(b.Context(), h, allow(w.host)); err != nil {
				b.Fatal(err)
			}
			b.StopTimer()
			if _, err := e.Teardown(b.Context(), h); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	})
	b.Run("dial", func(b *testing.B) {
		ctx, cancel := context.WithCancel(b.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			e.Exec(ctx, h, sandboxer.Cmd{Args: []string{helpers + "/tool", "echo", "127.0.0.1:7000"}})
		}()
		defer func() { cancel(); <-done }()
		var dialed, answered []time.Duration
		echo := func() error {
			begin := time.Now()
			c, err := e.Dial(b.Context(), h, 7000)
			if err != nil {
				return err
			}
			dialed = append(dialed, time.Since(begin))
			defer c.Close()
			if _, err := c.Write([]byte("x")); err != nil {
				return err
			}
			_, err = c.Read(make([]byte, 1))
			answered = append(answered, time.Since(begin))
			return err
		}
		for end := time.Now().Add(time.Minute); echo() != nil; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				b.Fatal("the echo server does not come up")
			}
		}
		dialed, answered = nil, nil
		for b.Loop() {
			for range 10 {
				if err := echo(); err != nil {
					b.Fatal(err)
				}
			}
		}
		median := func(d []time.Duration) float64 {
			slices.Sort(d)
			return float64(d[len(d)/2].Nanoseconds())
		}
		b.ReportMetric(median(dialed), "dial-ns")
		b.ReportMetric(median(answered), "answer-ns")
	})
}

// transfer is the other side of the tool's push and pull.
func transfer(b *testing.B, w world) {
	l := listenIn(b, w.run, w.host+":9000")
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				r := bufio.NewReaderSize(c, 256<<10)
				var n int64
				if _, err := fmt.Fscanf(r, "%d\n", &n); err != nil {
					return
				}
				if n > 0 {
					io.CopyN(io.Discard, r, n)
					c.Write([]byte("k"))
					return
				}
				buf := make([]byte, 256<<10)
				for left := -n; left > 0; left -= int64(len(buf)) {
					if _, err := c.Write(buf[:min(left, int64(len(buf)))]); err != nil {
						return
					}
				}
			}()
		}
	}()
}
