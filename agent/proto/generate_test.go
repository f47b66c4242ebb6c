// Package proto holds the agent's wire. It has no code of its own.
package proto

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

//go:generate ./generate.sh

// TestGenerated generates the code again and compares it with the committed one.
func TestGenerated(t *testing.T) {
	if _, err := exec.LookPath("protoc"); err != nil {
		t.Skip("protoc is not installed (Debian: protobuf-compiler)")
	}
	dir := t.TempDir()
	if out, err := exec.Command("./generate.sh", dir).CombinedOutput(); err != nil {
		if bytes.Contains(out, []byte("google/protobuf/timestamp.proto: File not found")) {
			t.Skip("protoc does not find the .proto files that come with it (Debian: libprotobuf-dev)")
		}
		t.Fatalf("%v\n%s", err, out)
	}
	files, _ := filepath.Glob("*/*.pb.go")
	more, _ := filepath.Glob("*/*/*.connect.go")
	files = append(files, more...)
	if len(files) != 4 {
		t.Errorf("generated files %q; want 4", files)
	}
	for _, f := range files {
		want, err := os.ReadFile(filepath.Join(dir, f))
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(f)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is not what its .proto says: run go generate ./agent/proto (%v)", f, err)
		}
	}
}
