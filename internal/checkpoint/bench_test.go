package checkpoint

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// benchTree makes 5,000 files of 200 MB together; half of them do not compress.
func benchTree(b *testing.B) string {
	dir := b.TempDir()
	rnd := rand.NewChaCha8([32]byte{1})
	r := rand.New(rnd)
	words := make([]byte, 1<<20)
	for i := range words {
		words[i] = "etaoin shrdlu\n(){}"[r.IntN(18)]
	}
	for i := range 5000 {
		d := filepath.Join(dir, fmt.Sprintf("d%02d", i%50))
		if i < 50 {
			if err := os.Mkdir(d, 0o755); err != nil {
				b.Fatal(err)
			}
		}
		data := make([]byte, 20_000+r.IntN(40_000))
		if i%2 == 0 {
			_, _ = rnd.Read(data)
		} else {
			copy(data, words[r.IntN(len(words)-len(data)):])
		}
		if err := os.WriteFile(filepath.Join(d, fmt.Sprintf("f%04d", i)), data, 0o644); err != nil {
			b.Fatal(err)
		}
	}
	return dir
}

func saveTree(b *testing.B, s *Store, id, dir string, args ...string) *Manifest {
	cmd := exec.CommandContext(b.Context(), "tar", append(args, "-C", dir, "-cf", "-", ".")...)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	m, err := s.Save(b.Context(), id, Meta{}, out, SaveOptions{})
	if err = errors.Join(err, cmd.Wait()); err != nil {
		b.Fatal(err)
	}
	return m
}

// BenchmarkCheckpoint saves a tree of 5,000 files and 200 MB as it is compared with
// `tar | zstd -1` of the same round, then saves it again after ten files have changed.
func BenchmarkCheckpoint(b *testing.B) {
	if _, err := exec.LookPath("zstd"); err != nil {
		b.Skip("no zstd")
	}
	for _, e := range encodings {
		for _, sort := range []string{"name", "none"} {
			b.Run(string(e)+"/sort="+sort, func(b *testing.B) {
				dir := benchTree(b)
				var tools, first, second, restore time.Duration
				var share float64
				rnd := rand.New(rand.NewPCG(5, 6))
				for b.Loop() {
					dst := b.TempDir()
					at := time.Now()
					if out, err := exec.CommandContext(b.Context(), "sh", "-c", `tar -C "$1" -cf - . | zstd -1 -q -o "$2/x"`, "sh", dir, dst).CombinedOutput(); err != nil {
						b.Fatalf("%v: %s", err, out)
					}
					tools += time.Since(at)
					s := newStore(b, newDir(b), Options{Encoding: e})
					at = time.Now()
					m := saveTree(b, s, "one", dir, "--sort="+sort)
					first += time.Since(at)
					at = time.Now()
					_, r, err := s.Open(b.Context(), "one")
					if err != nil {
						b.Fatal(err)
					}
					unpack(b, r, b.TempDir())
					_ = r.Close()
					restore += time.Since(at)
					for i := range 10 {
						name := filepath.Join(dir, fmt.Sprintf("d%02d", i*5), fmt.Sprintf("f%04d", i*5+50*i*9))
						if err := os.WriteFile(name, fmt.Appendf(nil, "changed %d", rnd.Uint64()), 0o644); err != nil {
							b.Fatal(err)
						}
					}
					at = time.Now()
					m2 := saveTree(b, s, "two", dir, "--sort="+sort)
					second += time.Since(at)
					share += 100 * float64(m2.Stored) / float64(m.Stored)
					_ = os.RemoveAll(dst)
				}
				n := float64(b.N)
				b.ReportMetric(float64(tools.Milliseconds())/n, "tar|zstd-ms")
				b.ReportMetric(float64(first.Milliseconds())/n, "first-ms")
				b.ReportMetric(float64(first)/float64(tools), "first/tar|zstd")
				b.ReportMetric(float64(restore.Milliseconds())/n, "restore-ms")
				b.ReportMetric(float64(second.Milliseconds())/n, "second-ms")
				b.ReportMetric(share/n, "%stored-by-second")
			})
		}
	}
}
