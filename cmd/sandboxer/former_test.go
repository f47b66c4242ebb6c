//go:build linux

package main

import (
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/compattest"
)

// A server starts on what a former one left, knows all of it, restores what is portable, and
// tears down what there was, and its audit finds nothing.
func TestFormerInstallations(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: the sandboxes were made by root")
	}
	bin := programs(t)
	for _, f := range compattest.Fixtures(t) {
		t.Run(f.Name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "sbx") // gVisor's sockets need a short name
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
			f.Install(t, dir)
			// What waits for its fuse or a second look is none of this test's: the destroys below settle it.
			in := serve(t, bin, 4096, nil, "SANDBOXER_DATA_DIR="+dir+"/"+compattest.DataDir, "SANDBOXER_CONFIG_DIR="+dir+"/"+compattest.ConfigDir)
			paused, err := in.client.List(t.Context(), api.SandboxQuery{States: []sandboxer.State{sandboxer.Paused}})
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, sb := range paused.Items {
				names = append(names, sb.Name)
			}
			slices.Sort(names)
			if !slices.Equal(names, slices.Sorted(slices.Values(f.Paused))) {
				t.Errorf("%q are paused; want %q", names, f.Paused)
			}
			if len(f.Snapshots) > 0 {
				in.must("restore", "base", "--kind", "portable", "--name", "copy")
				files := map[string]string{}
				for line := range strings.Lines(in.must("exec", "copy", "--", "sh", "-c", `cd /workspace && find . -type f -exec sha256sum {} +`)) {
					sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
					files[path.Clean(name)] = sum
				}
				if !maps.Equal(files, f.Workspace) {
					t.Errorf("the copy has %v; want %v", files, f.Workspace)
				}
				if got := in.must("exec", "copy", "--", "sh", "-c", `cd /workspace; readlink link; stat -c %a d/e d/run; echo $SECRET`); got != "f\n750\n755\nof-the-fixture" {
					t.Errorf("the copy's link, modes and environment are %q", got)
				}
				in.must("snapshot", "create", "copy", "--native", "--name", "again")
				in.must("restore", "again", "--name", "second")
				if got := in.must("exec", "second", "--", "cat", "/workspace/f"); got != "kept" {
					t.Errorf("what came of it, restored from memory, has %q", got)
				}
				in.must("destroy", "copy", "second")
			}
			for _, name := range slices.Concat(f.Running, f.Paused) {
				// Its time may be over, or it may be found to be gone, at any moment.
				if err := in.run("destroy", name); err != nil {
					if sb, err := in.client.List(t.Context(), api.SandboxQuery{Name: name}); err != nil || len(sb.Items) > 0 {
						t.Errorf("%s cannot be destroyed: %v", name, err)
					}
				}
			}
			for _, name := range f.Snapshots {
				in.must("snapshot", "rm", name)
			}
			if live := in.must("ls", "-q"); live != "" {
				t.Errorf("still there: %s", live)
			}
			in.must("accept") // most fixtures have no mark, and count as a database that went back
			in.must("audit")  // fails with findings
		})
	}
}
