//go:build linux

package local

import (
	"bytes"
	"io"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// BenchmarkArchive packs and unpacks a tree of 20,000 files of 1 KiB, and one of 500 MiB:
// with tar inside, and through the agent.
func BenchmarkArchive(b *testing.B) {
	needsGVisor(b)
	e := openIn(b, shortDir(b), ours("bench"))
	defer e.Close()
	h, err := e.Provision(b.Context(), sandboxer.Spec{ID: "bench", Generation: 1, Owner: ours("bench")})
	if err != nil {
		b.Fatal(err)
	}
	defer e.Teardown(b.Context(), h)
	for tree, script := range map[string]string{
		"small": `mkdir /tmp/small; cd /tmp/small; for d in $(seq 200); do mkdir -p a$((d%10))/b/d$d; (cd a$((d%10))/b/d$d; head -c 102400 /dev/urandom | split -b 1024 -a 3 - f); done`,
		"large": `mkdir /tmp/large; cd /tmp/large; for i in 1 2 3 4 5; do head -c 104857600 /dev/urandom >f$i; done`,
	} {
		if x, err := e.Exec(b.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", script}}); err != nil || x.Code != 0 {
			b.Fatal(x, err)
		}
		for name, ext := range map[string]sandboxer.Extension{
			"exec": struct {
				sandboxer.Extension
				sandboxer.Execer
			}{e, e},
			"agent": struct {
				sandboxer.Extension
				sandboxer.Execer
				sandboxer.Archiver
			}{e, e, e.Capabilities},
		} {
			bk := backend.New("local", ext, backend.Options{})
			var out bytes.Buffer
			b.Run(tree+"/pack/"+name, func(b *testing.B) {
				for b.Loop() {
					if err := bk.Archive(b.Context(), h, "/tmp/"+tree, io.Discard); err != nil {
						b.Fatal(err)
					}
				}
			})
			if err := bk.Archive(b.Context(), h, "/tmp/"+tree, &out); err != nil {
				b.Fatal(err)
			}
			b.Run(tree+"/unpack/"+name, func(b *testing.B) {
				for b.Loop() {
					if err := bk.Unarchive(b.Context(), h, "/tmp/to", bytes.NewReader(out.Bytes())); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
