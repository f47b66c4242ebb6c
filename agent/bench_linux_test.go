package agent

import (
	"bytes"
	"io"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func BenchmarkExecTrue(b *testing.B) {
	a := startAgent(b)
	for b.Loop() {
		if x, err := a.Exec(b.Context(), sandboxer.Cmd{Args: []string{"/bin/true"}}); err != nil || x.Code != 0 {
			b.Fatal(x, err)
		}
	}
}

func BenchmarkExecTrueParallel(b *testing.B) {
	a := startAgent(b)
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if x, err := a.Exec(b.Context(), sandboxer.Cmd{Args: []string{"/bin/true"}}); err != nil || x.Code != 0 {
				b.Fatal(x, err)
			}
		}
	})
}

const bulk = 256 << 20

func BenchmarkStdout(b *testing.B) {
	a := startAgent(b)
	b.SetBytes(bulk)
	for b.Loop() {
		var n counter
		x, err := a.Exec(b.Context(), sandboxer.Cmd{Args: []string{"head", "-c", "268435456", "/dev/zero"}, Stdout: &n})
		if err != nil || x.Code != 0 || n != bulk {
			b.Fatal(x, err, n)
		}
	}
}

func BenchmarkStdin(b *testing.B) {
	a := startAgent(b)
	b.SetBytes(bulk)
	for b.Loop() {
		x, err := a.Exec(b.Context(), sandboxer.Cmd{Args: []string{"sh", "-c", "exec cat > /dev/null"},
			Stdin: io.LimitReader(zeros{}, bulk)})
		if err != nil || x.Code != 0 {
			b.Fatal(x, err)
		}
	}
}

// BenchmarkEcho measures the round trip of one byte through a running command.
func BenchmarkEcho(b *testing.B) {
	a := startAgent(b)
	in, feed := io.Pipe()
	read, out := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := a.Exec(b.Context(), sandboxer.Cmd{Args: []string{"cat"}, Stdin: in, Stdout: out})
		done <- err
	}()
	buf := make([]byte, 1)
	for b.Loop() {
		if _, err := feed.Write(buf); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(read, buf); err != nil {
			b.Fatal(err)
		}
	}
	feed.Close()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
}

func BenchmarkUpload(b *testing.B) {
	a := startAgent(b)
	b.SetBytes(bulk)
	for b.Loop() {
		if err := a.WriteFile(b.Context(), a.dir+"/big", 0o644, io.LimitReader(zeros{}, bulk)); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDownload(b *testing.B) {
	a := startAgent(b)
	if err := a.WriteFile(b.Context(), a.dir+"/big", 0o644, io.LimitReader(zeros{}, bulk)); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(bulk)
	buf := make([]byte, 256<<10)
	for b.Loop() {
		f, err := a.ReadFile(b.Context(), a.dir+"/big")
		if err != nil {
			b.Fatal(err)
		}
		n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, buf)
		f.Close()
		if err != nil || n != bulk {
			b.Fatal(n, err)
		}
	}
}

func BenchmarkSmallFile(b *testing.B) {
	a := startAgent(b)
	for b.Loop() {
		if err := a.WriteFile(b.Context(), a.dir+"/small", 0o644, bytes.NewReader([]byte("x"))); err != nil {
			b.Fatal(err)
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

type counter int64

func (c *counter) Write(p []byte) (int, error) { *c += counter(len(p)); return len(p), nil }
