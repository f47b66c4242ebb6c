package notes

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/compattest"
)

// Of this program started again: what it does, and in which directory.
const (
	envRole = "NOTES_ROLE"
	envDir  = "NOTES_DIR"
)

func TestMain(m *testing.M) {
	switch dir := os.Getenv(envDir); os.Getenv(envRole) {
	case "":
		os.Exit(m.Run())
	case "count":
		count(opened(dir))
	case "rewrite":
		rewrite(opened(dir))
	case "hold":
		unlock, err := opened(dir).Lock(context.Background(), "held")
		fatal(err)
		held = unlock
		fmt.Println("held")
		select {}
	}
}

// held keeps the lock's file from being closed by the garbage collector.
var held func()

func fatal(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

var installation = bytes.Repeat([]byte{7}, 32)

func opened(dir string) *Store { return New(dir, "ext.test", installation) }

func again(t *testing.T, role, dir string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), envRole+"="+role, envDir+"="+dir)
	return cmd
}

func wantKind(t *testing.T, err error, k sandboxer.Kind) {
	t.Helper()
	if sandboxer.KindOf(err) != k {
		t.Errorf("%v (%s); want %s", err, sandboxer.KindOf(err), k)
	}
}

func names(t *testing.T, dir string) (out []string) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, d := range all {
		out = append(out, d.Name())
	}
	return out
}

// TestNotes: what is put is there for the next process too, and gone once it is deleted.
func TestNotes(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	s := opened(dir)
	if keys, err := s.List(ctx); err != nil || len(keys) > 0 {
		t.Errorf("at first: %q, %v", keys, err)
	}
	if left := names(t, dir); len(left) > 0 {
		t.Errorf("before the first write there are %q", left)
	}
	_, err := s.Get(ctx, "a")
	wantKind(t, err, sandboxer.NotFound)
	for _, key := range []string{"a", "a-b", "a.b", "0_Z"} {
		if err := s.Put(ctx, key, []byte("value of "+key)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Put(ctx, "a", nil); err != nil {
		t.Fatal(err)
	}
	s = opened(dir)
	if keys, err := s.List(ctx); err != nil || !slices.Equal(keys, []string{"0_Z", "a", "a-b", "a.b"}) {
		t.Errorf("List = %q, %v", keys, err)
	}
	for key, want := range map[string]string{"a": "", "a-b": "value of a-b", "0_Z": "value of 0_Z"} {
		if n, err := s.Get(ctx, key); err != nil || string(n.Value) != want || n.Version == "" {
			t.Errorf("Get(%s) = %q, %v", key, n.Value, err)
		}
	}
	for _, name := range names(t, filepath.Join(dir, dirName)) {
		if fi, err := os.Stat(filepath.Join(dir, dirName, name)); err != nil || fi.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has the mode %v, %v", name, fi.Mode(), err)
		}
	}
	for range 2 {
		if err := s.Delete(ctx, "a-b"); err != nil {
			t.Error(err)
		}
	}
	_, err = s.Get(ctx, "a-b")
	wantKind(t, err, sandboxer.NotFound)
	unlock, err := s.Lock(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	unlock()
	if left, _ := filepath.Glob(filepath.Join(dir, dirName, lockName, "*.lock")); len(left) > 0 {
		t.Errorf("locks that nobody holds are left: %q", left)
	}
}

// TestSwap: a value is replaced only by callers that saw it, also if it was deleted and made again.
func TestSwap(t *testing.T) {
	ctx, s := t.Context(), opened(t.TempDir())
	wantKind(t, s.Swap(ctx, "k", "0123", []byte("x")), sandboxer.Conflict)
	if err := s.Swap(ctx, "k", "", []byte("one")); err != nil {
		t.Fatal(err)
	}
	wantKind(t, s.Swap(ctx, "k", "", []byte("x")), sandboxer.Conflict)
	first, err := s.Get(ctx, "k")
	if err != nil || string(first.Value) != "one" {
		t.Fatalf("%q, %v", first.Value, err)
	}
	if err := s.Swap(ctx, "k", first.Version, []byte("two")); err != nil {
		t.Fatal(err)
	}
	wantKind(t, s.Swap(ctx, "k", first.Version, []byte("x")), sandboxer.Conflict)
	if err := errors.Join(s.Delete(ctx, "k"), s.Put(ctx, "k", []byte("one"))); err != nil {
		t.Fatal(err)
	}
	wantKind(t, s.Swap(ctx, "k", first.Version, []byte("x")), sandboxer.Conflict)
	if n, err := s.Get(ctx, "k"); err != nil || string(n.Value) != "one" || n.Version == first.Version {
		t.Errorf("%q, %v", n.Value, err)
	}
}

// rounds is how often each process counts.
const rounds = 50

func count(s *Store) {
	ctx := context.Background()
	for n := 0; n < rounds; {
		now, err := s.Get(ctx, "n")
		if err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
			fatal(err)
		}
		i, _ := strconv.Atoi(string(now.Value))
		switch err := s.Swap(ctx, "n", now.Version, []byte(strconv.Itoa(i+1))); sandboxer.KindOf(err) {
		case "":
			n++
		case sandboxer.Conflict:
		default:
			fatal(err)
		}
	}
}

// TestProcesses: processes that count by Swap alone lose nothing.
func TestProcesses(t *testing.T) {
	dir := t.TempDir()
	const processes = 3
	var wg sync.WaitGroup
	for range processes {
		cmd := again(t, "count", dir)
		wg.Go(func() {
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	for range 2 { // and callers in one process
		wg.Go(func() { count(opened(dir)) })
	}
	wg.Wait()
	if n, err := opened(dir).Get(t.Context(), "n"); err != nil || string(n.Value) != strconv.Itoa((processes+2)*rounds) {
		t.Errorf("they counted to %s, %v", n.Value, err)
	}
}

// values are the contents that rewrite gives a note in turn.
var values = [][]byte{bytes.Repeat([]byte("a"), sandboxer.MaxNoteBytes), bytes.Repeat([]byte("b"), 3), nil}

func rewrite(s *Store) {
	for i := 0; ; i++ {
		fatal(s.Put(context.Background(), "k", values[i%len(values)]))
		if i == 0 {
			fmt.Println("begun")
		}
	}
}

// TestKilled: a writer that is killed leaves a former value or the new one, and blocks no other writer.
func TestKilled(t *testing.T) {
	dir := t.TempDir()
	s := opened(dir)
	for i := range 15 {
		cmd := again(t, "rewrite", dir)
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := out.Read(make([]byte, 16)); err != nil {
			t.Fatal(err)
		}
		for range i { // at another moment each time
			if n, err := s.Get(t.Context(), "k"); err != nil || !slices.ContainsFunc(values, func(v []byte) bool { return bytes.Equal(v, n.Value) }) {
				t.Fatalf("while it is written: %d bytes, %v", len(n.Value), err)
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		n, err := s.Get(t.Context(), "k")
		if err != nil || !slices.ContainsFunc(values, func(v []byte) bool { return bytes.Equal(v, n.Value) }) {
			t.Fatalf("after a kill: %d bytes, %v", len(n.Value), err)
		}
		if err := s.Swap(t.Context(), "k", n.Version, []byte("bbb")); err != nil {
			t.Fatal(err)
		}
	}
	drafts, err := filepath.Glob(filepath.Join(dir, dirName, ".new-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range append(drafts, filepath.Join(dir, dirName, ".new-old")) { // there need not be one
		then := time.Now().Add(-time.Hour)
		if err := errors.Join(os.WriteFile(d, nil, 0o600), os.Chtimes(d, then, then)); err != nil {
			t.Fatal(err)
		}
	}
	s = opened(dir)
	if drafts, _ = filepath.Glob(filepath.Join(dir, dirName, ".new-*")); len(drafts) > 0 {
		t.Errorf("drafts are left: %q", drafts)
	}
	if keys, err := s.List(t.Context()); err != nil || !slices.Equal(keys, []string{"k"}) {
		t.Errorf("List = %q, %v", keys, err)
	}
}

// TestSealed: neither values nor the key are in a file in the clear, and one value sealed twice looks different.
func TestSealed(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	s := opened(dir)
	secret := []byte("a secret that nobody reads")
	var had []byte
	for range 2 {
		if err := s.Put(ctx, "k", secret); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(s.file("k"))
		if err != nil || bytes.Contains(data, secret[:6]) || bytes.Contains(data, installation[:8]) || bytes.Contains(data, s.key[:8]) || bytes.Equal(data, had) {
			t.Errorf("the file has %q, %v", data, err)
		}
		had = data
	}
	for name, other := range map[string]*Store{
		"another installation": New(dir, "ext.test", bytes.Repeat([]byte{8}, 32)),
		"another extension":    New(dir, "ext.other", installation),
	} {
		_, err := other.Get(ctx, "k")
		wantKind(t, err, sandboxer.Unavailable)
		if !strings.Contains(sandboxer.HintOf(err), s.file("k")) {
			t.Errorf("%s: the hint %q does not name the file", name, sandboxer.HintOf(err))
		}
		wantKind(t, other.Swap(ctx, "k", "", nil), sandboxer.Unavailable)
	}
	same, err := WithKey(dir, "ext.test", Key(s))
	if err != nil {
		t.Fatal(err)
	}
	if n, err := same.Get(ctx, "k"); err != nil || !bytes.Equal(n.Value, secret) {
		t.Errorf("with the key that another process got: %q, %v", n.Value, err)
	}
	for _, key := range [][]byte{nil, s.key[:31], append(s.key[:32:32], 0)} {
		_, err := WithKey(dir, "ext.test", key)
		wantKind(t, err, sandboxer.Invalid)
	}
	if k := Key(nil); k != nil {
		t.Errorf("no notes have the key %x", k)
	}
}

// TestHostile: content that was not written here is an error of a kind, and can be written over and removed.
func TestHostile(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	s := opened(dir)
	if err := errors.Join(s.Put(ctx, "k", []byte("value")), s.Put(ctx, "other", []byte("value"))); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(s.file("k"))
	if err != nil {
		t.Fatal(err)
	}
	other, err := os.ReadFile(s.file("other"))
	if err != nil {
		t.Fatal(err)
	}
	hostile := map[string][]byte{
		"nothing": nil, "JSON": []byte(`{"v":1}`), "another note": other, "a newer form": []byte("note\x02 in another form"),
		"a large file": append(bytes.Clone(good), make([]byte, 1<<20)...), "only the head": good[:len(s.head)],
	}
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 1
		hostile[fmt.Sprint("a bit of byte ", i)] = bad
		hostile[fmt.Sprint("the first bytes, ", i)] = good[:i]
	}
	for name, data := range hostile {
		if err := os.WriteFile(s.file("k"), data, 0o600); err != nil {
			t.Fatal(err)
		}
		if n, err := s.Get(ctx, "k"); sandboxer.KindOf(err) != sandboxer.Unavailable || len(n.Value) > 0 || sandboxer.HintOf(err) == "" {
			t.Errorf("%s: Get = %q, %v", name, n.Value, err)
		}
		if err := s.Swap(ctx, "k", "", nil); sandboxer.KindOf(err) != sandboxer.Unavailable {
			t.Errorf("%s: Swap = %v", name, err)
		}
	}
	for name, want := range map[string]string{"a newer form": "newer sandboxer", "JSON": "damaged"} {
		if err := os.WriteFile(s.file("k"), hostile[name], 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Get(ctx, "k"); !strings.Contains(sandboxer.Message(err), want) {
			t.Errorf("%s: %v; want %q", name, err, want)
		}
	}
	if err := s.Put(ctx, "k", []byte("again")); err != nil {
		t.Error(err)
	}
	if n, err := s.Get(ctx, "k"); err != nil || string(n.Value) != "again" {
		t.Errorf("%q, %v", n.Value, err)
	}
	for _, make := range []func(name string) error{
		func(name string) error { return os.Mkdir(name, 0o700) },
		func(name string) error { return os.Symlink("/dev/zero", name) },
	} {
		if err := errors.Join(s.Delete(ctx, "k"), make(s.file("k"))); err != nil {
			t.Fatal(err)
		}
		_, err := s.Get(ctx, "k")
		wantKind(t, err, sandboxer.Unavailable)
	}
	if err := s.Delete(ctx, "k"); err != nil {
		t.Error(err)
	}

	// The directory is a file.
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s = opened(filepath.Join(dir, "file"))
	_, err = s.Get(ctx, "k")
	wantKind(t, err, sandboxer.Unavailable)
	_, err = s.List(ctx)
	wantKind(t, err, sandboxer.Unavailable)
	_, err = s.Lock(ctx, "k")
	wantKind(t, err, sandboxer.Unavailable)
	wantKind(t, s.Put(ctx, "k", nil), sandboxer.Unavailable)
	wantKind(t, s.Delete(ctx, "k"), sandboxer.Unavailable)
}

// TestKeys: a key is the name of a file, without a path.
func TestKeys(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	s := opened(dir)
	for _, key := range []string{"", ".", "..", ".a", "-a", "a/b", "../a", "a\x00", "a b", "ä", "a\n", strings.Repeat("a", sandboxer.MaxNoteKeyBytes+1)} {
		_, err := s.Get(ctx, key)
		wantKind(t, err, sandboxer.Invalid)
		wantKind(t, s.Put(ctx, key, nil), sandboxer.Invalid)
		wantKind(t, s.Swap(ctx, key, "", nil), sandboxer.Invalid)
		wantKind(t, s.Delete(ctx, key), sandboxer.Invalid)
		_, err = s.Lock(ctx, key)
		wantKind(t, err, sandboxer.Invalid)
		_, err = s.RLock(ctx, key)
		wantKind(t, err, sandboxer.Invalid)
	}
	if left := names(t, dir); len(left) > 0 {
		t.Errorf("refused keys left %q", left)
	}
	long := strings.Repeat("a", sandboxer.MaxNoteKeyBytes)
	if err := s.Put(ctx, long, nil); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(dir, dirName, "not a key.note"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if keys, err := s.List(ctx); err != nil || !slices.Equal(keys, []string{long}) {
		t.Errorf("List = %q, %v", keys, err)
	}
}

// TestBounds: neither a value nor the number of notes exceeds its bound. A full directory still takes new values of its
// notes.
func TestBounds(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	s := opened(dir)
	if err := s.Put(ctx, "k", make([]byte, sandboxer.MaxNoteBytes)); err != nil {
		t.Fatal(err)
	}
	wantKind(t, s.Put(ctx, "k", make([]byte, sandboxer.MaxNoteBytes+1)), sandboxer.Invalid)
	if n, err := s.Get(ctx, "k"); err != nil || len(n.Value) != sandboxer.MaxNoteBytes {
		t.Errorf("%d bytes, %v", len(n.Value), err)
	}
	for i := range sandboxer.MaxNotes - 1 {
		if err := os.WriteFile(s.file("n"+strconv.Itoa(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	wantKind(t, s.Put(ctx, "further", nil), sandboxer.Exhausted)
	wantKind(t, s.Swap(ctx, "further", "", nil), sandboxer.Exhausted)
	if err := errors.Join(s.Put(ctx, "k", nil), s.Delete(ctx, "n0"), s.Put(ctx, "further", nil)); err != nil {
		t.Error(err)
	}
}

// TestLock: a lock excludes other processes and callers until it is released or its holder dies, and does not block
// writing.
func TestLock(t *testing.T) {
	dir := t.TempDir()
	s := opened(dir)
	done, cancel := context.WithCancel(t.Context())
	cancel()
	cmd := again(t, "hold", dir)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	for _, lock := range []func(context.Context, string) (func(), error){s.Lock, s.RLock} {
		if _, err := lock(done, "held"); !errors.Is(err, context.Canceled) {
			t.Errorf("a lock that another process holds: %v", err)
		}
	}
	if err := s.Put(t.Context(), "held", nil); err != nil {
		t.Error(err)
	}
	if unlock, err := s.Lock(done, "free"); err != nil {
		t.Errorf("a free lock without waiting: %v", err)
	} else {
		unlock()
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	unlock, err := s.Lock(t.Context(), "held")
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() {
		unlock, err := opened(dir).RLock(t.Context(), "held")
		if err == nil {
			unlock()
		}
		got <- err
	}()
	unlock()
	if err := <-got; err != nil {
		t.Error(err)
	}
	one, err := s.RLock(done, "held")
	if err != nil {
		t.Fatal(err)
	}
	two, err := s.RLock(done, "held")
	if err != nil {
		t.Fatalf("the second to share it: %v", err)
	}
	one()
	if _, err := s.Lock(done, "held"); !errors.Is(err, context.Canceled) {
		t.Errorf("a lock that is shared: %v", err)
	}
	two()
	if unlock, err = s.Lock(done, "held"); err != nil {
		t.Fatal(err)
	}
	unlock()
}

// TestMove: files of former versions become notes once, also if a move was cut short. What cannot become one stays.
func TestMove(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	s := opened(dir)
	former := filepath.Join(dir, "box")
	write := func(name, text string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(former, 0o700), os.WriteFile(filepath.Join(former, name), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := Move(ctx, s, former, ".json"); err != nil {
		t.Errorf("without such a directory: %v", err)
	}
	large := `{"stamp":"` + strings.Repeat("A", 64<<10) + `","v":1}`
	write("a.g1.json", `{"v":1}`)
	write("b.g1.json", `{"v":1}`)
	write("large.g1.json", large)
	if err := s.Put(ctx, "b.g1", []byte("newer")); err != nil { // it was moved, and then changed
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if err := Move(ctx, opened(dir), former, ".json"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for key, want := range map[string]string{"a.g1": `{"v":1}`, "b.g1": "newer", "large.g1": `{"v":1}`} {
		if n, err := s.Get(ctx, key); err != nil || string(n.Value) != want {
			t.Errorf("%s = %.99q, %v", key, n.Value, err)
		}
	}
	if _, err := os.Stat(former); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the former directory: %v", err)
	}

	write("a.g1.json", `{"v":1}`)
	write(".new-123", "a draft")
	write("strange name.json", "{}")
	if err := Move(ctx, s, former, ".json"); err != nil {
		t.Error(err)
	}
	if left := names(t, former); !slices.Equal(left, []string{".new-123", "strange name.json"}) {
		t.Errorf("left are %q", left)
	}
	for _, text := range []string{strings.Repeat("x", sandboxer.MaxNoteBytes+1), `{"v":"` + strings.Repeat("x", sandboxer.MaxNoteBytes) + `"}`, strings.Repeat("x", maxFormer+1)} {
		write("large.json", text)
		err := Move(ctx, s, former, ".json")
		wantKind(t, err, sandboxer.Unavailable)
		if !strings.Contains(sandboxer.Message(err), filepath.Join(former, "large.json")) {
			t.Errorf("%v does not name the file", err)
		}
	}
	wantKind(t, Move(ctx, nil, former, ".json"), sandboxer.Unavailable)
}

func TestFormOfNotes(t *testing.T) {
	s := opened(t.TempDir())
	compattest.CheckForm(t, "note", fmt.Sprintf("format %d\nfile %s\nbytes %q, 1 form, %d name of the sealing key, %d nonce, then the value sealed by AES-256-GCM (%d more), authenticated with the note's key",
		form, filepath.Join(dirName, "KEY"+suffix), magic, idSize, s.seal.NonceSize(), s.seal.Overhead()))
	// What this form was sealed as once is opened by every later program.
	data, err := base64.StdEncoding.DecodeString("bm90ZQGa3j+KBz73udpjfvCe+ow3+LxTIgRfeESnsMO1cZwQIYEsHa9pY0NyF85O")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := s.open("box.g1", data); err != nil || string(n.Value) != `{"v":1}` {
		t.Errorf("a note of former builds is %q, %v", n.Value, err)
	}
}
