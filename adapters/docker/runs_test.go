package docker

import (
	"archive/tar"
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// TestWhatRunsInside checks docs/reference/what-runs-inside.md, with the programs of this
// machine.
func TestWhatRunsInside(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give containers this machine's programs")
	}
	en := engines["docker"](t)
	const image = "sandboxer-test-machine:1"
	imp := exec.Command("docker", "import", "-", image)
	imp.Env = append(os.Environ(), "DOCKER_HOST="+en.address)
	imp.Stdin = machineTar(t)
	if out, err := imp.CombinedOutput(); err != nil {
		t.Fatalf("docker import: %v: %s", err, out)
	}
	en.image = "engine:" + image
	o := en.options(t, "runs")
	o.config["memory"] = 2 << 30
	e := o.opened(t)
	n := 0
	buildtest.Inside(t, "ext.docker", func(t *testing.T, script string) (int, string) {
		n++
		h := up(t, e, order("runs"+string(rune('a'+n)), o, func(s *sandboxer.Spec) {
			s.Vouched = append(s.Vouched, sandboxer.RestrictedMounts)
			s.Mounts = []sandboxer.Mount{{Source: "/usr", Target: "/usr", ReadOnly: true}}
		}))
		out := &capture.First{Max: 1 << 20}
		x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Stdout: out, Stderr: out})
		if err != nil {
			t.Fatal(err)
		}
		return x.Code, out.String()
	})
}

// machineTar is a root file system that needs only this machine's /usr.
func machineTar(t *testing.T) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(h tar.Header, content string) {
		h.Size = int64(len(content))
		err := w.WriteHeader(&h)
		if err == nil {
			_, err = w.Write([]byte(content))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"usr/", "etc/", "root/", "run/", "var/", "mnt/"} {
		put(tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755}, "")
	}
	for _, d := range []string{"tmp/", "var/tmp/"} {
		put(tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o1777}, "")
	}
	for _, d := range []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"} {
		if to, err := os.Readlink("/" + d); err == nil {
			put(tar.Header{Name: d, Typeflag: tar.TypeSymlink, Linkname: to}, "")
		}
	}
	put(tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n")
	put(tar.Header{Name: "etc/group", Typeflag: tar.TypeReg, Mode: 0o644}, "root:x:0:\nnogroup:x:65534:\n")
	put(tar.Header{Name: "etc/nsswitch.conf", Typeflag: tar.TypeReg, Mode: 0o644}, "hosts: files dns\n")
	// Links to programs of /usr, and settings that they need to start.
	for _, dir := range []string{"/etc/alternatives", "/etc/java-17-openjdk", "/etc/ld.so.conf.d", "/etc/ld.so.cache", "/etc/postgresql-common", "/etc/chromium.d"} {
		_ = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
			if err != nil {
				return nil
			}
			switch {
			case d.Type()&fs.ModeSymlink != 0:
				if to, err := os.Readlink(p); err == nil {
					put(tar.Header{Name: p[1:], Typeflag: tar.TypeSymlink, Linkname: to}, "")
				}
			case d.Type().IsRegular():
				if data, err := os.ReadFile(p); err == nil {
					put(tar.Header{Name: p[1:], Typeflag: tar.TypeReg, Mode: 0o644}, string(data))
				}
			}
			return nil
		})
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}
