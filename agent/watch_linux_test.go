package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// changesUntil reads changes as "op name" until one of them is last.
func changesUntil(t *testing.T, w *Watch, last string) []string {
	t.Helper()
	timer := time.AfterFunc(15*time.Second, func() { w.Close() })
	defer timer.Stop()
	var got []string
	for {
		c, err := w.Next()
		if err != nil {
			t.Fatalf("%v after %q, waiting for %q", err, got, last)
		}
		got = append(got, string(c.Op)+" "+strings.TrimPrefix(c.Path, w.dir+"/"))
		if got[len(got)-1] == last {
			return got
		}
	}
}

func TestWatch(t *testing.T) {
	a := startAgent(t)
	w, err := a.Watch(t.Context(), a.dir, true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	step := func(script, last string, want ...string) {
		t.Helper()
		if _, errs, x := a.sh("cd " + a.dir + "; set -e; " + script); x.Code != 0 {
			t.Fatalf("%s: %s", script, errs)
		}
		got := changesUntil(t, w, last)
		if want = append(want, last); !slices.Equal(got, want) {
			t.Errorf("%s: %q; want %q", script, got, want)
		}
	}
	step("echo x > f", "write f", "create f")
	step("chmod 600 f", "chmod f")
	step("mv f g", "create g", "rename f")
	step("rm g", "remove g")
	step("mkdir -p k/l/m", "create k/l/m", "create k", "create k/l")
	step("echo x > k/l/m/n", "write k/l/m/n", "create k/l/m/n")
	step("mv k q", "create q/l/m/n", "rename k", "create q", "create q/l", "create q/l/m")
	step("echo y >> q/l/m/n", "write q/l/m/n")
	for range 2 { // an upload reports only the file, new or not
		if err := a.WriteFile(t.Context(), a.dir+"/up", 0o600, strings.NewReader("x")); err != nil {
			t.Fatal(err)
		}
		if got, want := changesUntil(t, w, "write up"), []string{"create up", "write up"}; !slices.Equal(got, want) {
			t.Errorf("an upload: %q; want %q", got, want)
		}
	}
	outside := t.TempDir()
	step("mv q/l "+outside+"/l", "rename q/l")
	step("echo unseen > "+outside+"/l/m/o; echo z > end", "write end", "create end")

	t.Run("overwritten by an upload", func(t *testing.T) {
		if err := a.WriteFile(t.Context(), a.dir+"/end", 0o644, strings.NewReader("new")); err != nil {
			t.Fatal(err)
		}
		changesUntil(t, w, "write end")
	})
	t.Run("an atomic save", func(t *testing.T) {
		// That x was found by reading the new directory must not hide its replacement.
		if _, _, x := a.sh("cd " + a.dir + "; mkdir s; echo 1 > s/x"); x.Code != 0 {
			t.Fatal(x)
		}
		eventually(t, "s/x is not reported", func() bool {
			c, err := w.Next()
			return err != nil || c.Path == a.dir+"/s/x"
		})
		time.Sleep(50 * time.Millisecond)
		if _, _, x := a.sh("cd " + a.dir + "; echo 2 > s/y; mv s/y s/x; echo > s/stop"); x.Code != 0 {
			t.Fatal(x)
		}
		got := strings.Join(changesUntil(t, w, "write s/stop"), ", ")
		if !strings.HasSuffix(got, "create s/y, write s/y, rename s/y, create s/x, create s/stop, write s/stop") {
			t.Errorf("%s", got)
		}
	})
}

func TestWatchKinds(t *testing.T) {
	a := startAgent(t)
	for path, kind := range map[string]sandboxer.Kind{"/no/such": sandboxer.NotFound, "/etc/passwd": sandboxer.Invalid} {
		if _, err := a.Watch(t.Context(), path, false); sandboxer.KindOf(err) != kind {
			t.Errorf("Watch(%s): %v; want %s", path, err, kind)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	w, err := a.Watch(ctx, a.dir, false)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := w.Next(); sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Errorf("Next after cancel: %v", err)
	}
}

// TestWatchNewDirectories fills new directories as fast as it can: nothing may be lost.
func TestWatchNewDirectories(t *testing.T) {
	a := startAgent(t)
	w, err := a.Watch(t.Context(), a.dir, true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	const n = 100
	go func() {
		for i := range n {
			dir := filepath.Join(a.dir, fmt.Sprint(i), "a", "b")
			_ = os.MkdirAll(dir, 0o755)
			_ = os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o644)
		}
		_ = os.WriteFile(filepath.Join(a.dir, "stop"), []byte("x"), 0o644)
	}()
	seen := map[string]int{}
	for _, c := range changesUntil(t, w, "write stop") {
		seen[c]++
	}
	for i := range n {
		for _, name := range []string{"%d", "%d/a", "%d/a/b", "%d/a/b/f"} {
			name = "create " + fmt.Sprintf(name, i)
			if seen[name] != 1 {
				t.Errorf("%q was reported %d times", name, seen[name])
			}
		}
		if name := fmt.Sprintf("write %d/a/b/f", i); seen[name] == 0 {
			t.Errorf("%q was not reported", name)
		}
	}
}

func TestPolledWatch(t *testing.T) {
	a := startAgent(t)
	status, v := a.unary("filesystem.Filesystem/CreateWatcher", `{"path":".","recursive":true,"includeEntry":true}`)
	id, _ := v["watcherId"].(string)
	if status != 200 || id == "" {
		t.Fatalf("CreateWatcher: %d %v", status, v)
	}
	if err := os.WriteFile(filepath.Join(a.dir, "p"), []byte("12345"), 0o644); err != nil {
		t.Fatal(err)
	}
	var events []any
	eventually(t, "no write event", func() bool {
		_, v := a.unary("filesystem.Filesystem/GetWatcherEvents", `{"watcherId":"`+id+`"}`)
		more, _ := v["events"].([]any)
		events = append(events, more...)
		return strings.Contains(jsonText(events), "EVENT_TYPE_WRITE")
	})
	if text := jsonText(events); !strings.Contains(text, `"size":"5"`) || !strings.Contains(text, `"name":"p"`) {
		t.Errorf("events %s", text)
	}
	if status, v := a.unary("filesystem.Filesystem/RemoveWatcher", `{"watcherId":"`+id+`"}`); status != 200 {
		t.Errorf("RemoveWatcher: %d %v", status, v)
	}
	if status, _ := a.unary("filesystem.Filesystem/GetWatcherEvents", `{"watcherId":"`+id+`"}`); status != 404 {
		t.Errorf("after RemoveWatcher: %d", status)
	}
}
