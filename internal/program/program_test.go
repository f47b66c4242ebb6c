package program

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// build makes a program for linux/arch that does nothing.
func build(t *testing.T, arch string) string {
	t.Helper()
	dir := t.TempDir()
	src := filepath.Join(dir, "main.go")
	if err := os.WriteFile(src, []byte("package main\n\nfunc main() {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "nothing-linux-"+arch)
	cmd := exec.Command("go", "build", "-trimpath", "-o", out, src)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOFLAGS=")
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	return out
}

func TestFind(t *testing.T) {
	var f Finder
	amd, arm := build(t, "amd64"), build(t, "arm64")
	for arch, file := range map[string]string{"amd64": amd, "arm64": arm} {
		p, err := f.Find("nothing", arch, file)
		if err != nil || p.Path != file || len(p.Digest) != 64 {
			t.Fatalf("%s: %+v, %v", arch, p, err)
		}
	}
	refused := func(arch, configured string, kind sandboxer.Kind, says string) {
		t.Helper()
		_, err := f.Find("nothing", arch, configured)
		if sandboxer.KindOf(err) != kind || !strings.Contains(err.Error(), says) {
			t.Errorf("Find(%s, %q): %v; want %s, %q", arch, configured, err, kind, says)
		}
	}
	refused("arm64", amd, sandboxer.Unavailable, "not for linux/arm64")
	refused("riscv64", amd, sandboxer.Unsupported, "linux/riscv64")
	refused("amd64", filepath.Join(t.TempDir(), "none"), sandboxer.Unavailable, "cannot be read")
	refused("amd64", "", sandboxer.Unavailable, "next to the running program")
	if _, err := f.Find("nothing", "amd64", ""); !strings.Contains(sandboxer.HintOf(err), "make build") {
		t.Errorf("hint %q", sandboxer.HintOf(err))
	}
}

// TestFindBeside looks where the running program is.
func TestFindBeside(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs a platform that its programs run on")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	own := build(t, runtime.GOARCH)
	beside := func(name string) string {
		to := filepath.Join(filepath.Dir(self), name)
		b, err := os.ReadFile(own)
		if err == nil {
			err = os.WriteFile(to, b, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.Remove(to) })
		return to
	}
	var f Finder
	plain := beside("nothing")
	if p, err := f.Find("nothing", runtime.GOARCH, ""); err != nil || p.Path != plain {
		t.Errorf("%+v, %v; want %s", p, err, plain)
	}
	other := map[string]string{"amd64": "arm64", "arm64": "amd64"}[runtime.GOARCH]
	if p, err := f.Find("nothing", other, ""); err == nil {
		t.Errorf("%+v for linux/%s", p, other)
	}
	named := beside("nothing-linux-" + runtime.GOARCH)
	if p, err := f.Find("nothing", runtime.GOARCH, ""); err != nil || p.Path != named {
		t.Errorf("%+v, %v; want %s", p, err, named)
	}
}

// TestDigestFollowsTheFile: what has changed has another digest, what has not is not read again.
func TestDigestFollowsTheFile(t *testing.T) {
	var f Finder
	file := build(t, "amd64")
	first, err := f.Find("nothing", "amd64", file)
	if err != nil {
		t.Fatal(err)
	}
	f.known[file] = known{f.known[file].fi, "remembered"}
	if p, _ := f.Find("nothing", "amd64", file); p.Digest != "remembered" {
		t.Errorf("%s: the digest was computed again", p.Digest)
	}
	// Of the same size and time, but another file.
	fi, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2]++
	if err := os.WriteFile(file+".new", b, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(file+".new", time.Time{}, fi.ModTime()); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
	p, err := f.Find("nothing", "amd64", file)
	if err != nil || p.Digest == first.Digest || p.Digest == "remembered" {
		t.Errorf("a replaced file: %+v, %v; was %s", p, err, first.Digest)
	}
}

func TestCheckRefusesDynamic(t *testing.T) {
	const ls = "/bin/ls"
	if out, err := exec.Command("file", "-L", ls).CombinedOutput(); err != nil || !strings.Contains(string(out), "interpreter") {
		t.Skipf("%s is not known to be linked dynamically: %v %s", ls, err, out)
	}
	err := Check(ls, runtime.GOARCH)
	if sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(err.Error(), "dynamically") || sandboxer.HintOf(err) == "" {
		t.Errorf("%s: %v", ls, err)
	}
}
