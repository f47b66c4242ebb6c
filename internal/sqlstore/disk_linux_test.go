package sqlstore

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// smallDisk mounts a file system of a few megabytes.
func smallDisk(t *testing.T, megabytes int) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount a small file system")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm,mode=0700", megabytes)); err != nil {
		t.Skipf("cannot mount a small file system here: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// fillDisk writes until nothing more fits and returns the file.
func fillDisk(t *testing.T, dir string) string {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "filler"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for block := make([]byte, 1<<20); len(block) > 0; {
		if _, err = f.Write(block); err != nil {
			block = block[:len(block)/2]
		}
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	return f.Name()
}

// end takes sb to its end in the three transactions of a destroy.
func end(t *testing.T, s *Store, sb *sandboxer.Sandbox) error {
	for i := range 3 {
		sb.State = sandboxer.Terminating
		if i == 2 {
			sb.State = sandboxer.Terminated
		}
		err := s.UpdateSandbox(t.Context(), sb, sandboxer.Writes{
			Events:  []sandboxer.Event{{Tenant: "acme", SandboxID: sb.ID, Generation: 1, Type: sandboxer.EventState}},
			Entries: []sandboxer.Entry{{Key: fmt.Sprint(sb.ID, i), Tenant: "acme", SandboxID: sb.ID, Generation: 1, Type: sandboxer.EntryPost, Amount: 1}},
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func TestDiskFull(t *testing.T) {
	dir := smallDisk(t, 40)
	data := filepath.Join(dir, "data")
	options := Options{Reserve: 8 << 20}
	s, err := OpenSQLite(t.Context(), data, options)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { s.Close() }()
	var all []*sandboxer.Sandbox
	create := func() error {
		sb := benchSandbox(fmt.Sprint("s", len(all)))
		err := s.CreateSandbox(t.Context(), sb, sandboxer.Writes{})
		if err == nil {
			all = append(all, sb)
		}
		return err
	}
	for range 300 {
		if err := create(); err != nil {
			t.Fatal(err)
		}
	}
	reserve := filepath.Join(data, reserveFile)
	if st, err := os.Stat(reserve); err != nil || st.Size() != options.Reserve {
		t.Fatalf("no reserve: %v, %v", st, err)
	}

	filler := fillDisk(t, dir)
	for err = nil; err == nil && len(all) < 20_000; {
		err = create()
	}
	if sandboxer.KindOf(err) != sandboxer.Exhausted || sandboxer.HintOf(err) == "" {
		t.Fatalf("creating on a full disk: %v; want exhausted with a hint", err)
	}
	t.Logf("%d sandboxes fitted before the disk was full", len(all))
	if st, err := os.Stat(reserve); err != nil || st.Size() != options.Reserve/8 {
		t.Errorf("the reserve was not given up but for what one write may need: %v", err)
	}

	// A restart on the full disk changes nothing.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, err = OpenSQLite(t.Context(), data, options); err != nil {
		t.Fatalf("opening on a full disk: %v", err)
	}
	for _, sb := range all {
		if _, err := s.Sandbox(t.Context(), sb.ID); err != nil {
			t.Fatalf("reading on a full disk: %v", err)
		}
		if err := end(t, s, sb); err != nil {
			t.Fatalf("destroying on a full disk: %v", err)
		}
	}
	if err := create(); sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("creating on a full disk: %v; want exhausted", err)
	}

	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if err := create(); err != nil {
		t.Errorf("creating with room on the disk: %v", err)
	}
	if st, err := os.Stat(reserve); err != nil || st.Size() != options.Reserve {
		t.Errorf("the reserve was not laid in again: %v", err)
	}
}

// TestDiskFullWithoutReserve shows what the reserve is for.
func TestDiskFullWithoutReserve(t *testing.T) {
	dir := smallDisk(t, 40)
	s, err := OpenSQLite(t.Context(), filepath.Join(dir, "data"), Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var all []*sandboxer.Sandbox
	for i := range 500 {
		sb := benchSandbox(fmt.Sprint("s", i))
		if err := s.CreateSandbox(t.Context(), sb, sandboxer.Writes{}); err != nil {
			t.Fatal(err)
		}
		all = append(all, sb)
	}
	filler := fillDisk(t, dir)
	ended := 0
	for _, sb := range all {
		if err = end(t, s, sb); err != nil {
			break
		}
		ended++
	}
	if sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Fatalf("%d of %d sandboxes could be destroyed, then: %v; want exhausted", ended, len(all), err)
	}
	t.Logf("%d of %d sandboxes could be destroyed", ended, len(all))
	if err := s.CreateSandbox(t.Context(), benchSandbox("late"), sandboxer.Writes{}); sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("creating on a full disk: %v; want exhausted", err)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if err := end(t, s, all[len(all)-1]); err != nil {
		t.Errorf("with room on the disk: %v", err)
	}
}

// TestOpenOnFullDisk fills the disk while the database is not in use.
func TestOpenOnFullDisk(t *testing.T) {
	dir := smallDisk(t, 40)
	data := filepath.Join(dir, "data")
	options := Options{Reserve: 8 << 20}
	s, err := OpenSQLite(t.Context(), data, options)
	if err != nil {
		t.Fatal(err)
	}
	sb := benchSandbox("a")
	if err := s.CreateSandbox(t.Context(), sb, sandboxer.Writes{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	fillDisk(t, dir)
	s, err = OpenSQLite(t.Context(), data, options)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := end(t, s, sb); err != nil {
		t.Errorf("destroying on a full disk: %v", err)
	}
	if err := s.CreateSandbox(t.Context(), benchSandbox("b"), sandboxer.Writes{}); sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("creating on a full disk: %v; want exhausted", err)
	}
}

// TestFullDiskTakesReserve: others take whatever the reserve gives up, and a server is
// killed. The next one starts, ends what is there, and refuses what is new.
func TestFullDiskTakesReserve(t *testing.T) {
	dir := smallDisk(t, 40)
	data := filepath.Join(dir, "data")
	options := Options{Reserve: 8 << 20}
	s, err := OpenSQLite(t.Context(), data, options)
	if err != nil {
		t.Fatal(err)
	}
	var all []*sandboxer.Sandbox
	for i := range 600 {
		sb := benchSandbox(fmt.Sprint("s", i))
		if err := s.CreateSandbox(t.Context(), sb, sandboxer.Writes{}); err != nil {
			t.Fatal(err)
		}
		all = append(all, sb)
	}
	// The files as they are at a kill: the log has what the database does not.
	killed := func() {
		t.Helper()
		fillDisk(t, dir)
		files := map[string][]byte{}
		for _, name := range []string{dbFile, dbFile + "-wal", markFile} {
			if files[name], err = os.ReadFile(filepath.Join(data, name)); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(dir, "filler")); err != nil {
			t.Fatal(err)
		}
		for name, content := range files {
			if err := os.WriteFile(filepath.Join(data, name), content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		fillDisk(t, dir)
		if s, err = OpenSQLite(t.Context(), data, options); err != nil {
			t.Fatalf("the start: %v", err)
		}
		fillDisk(t, dir)
		for n := 0; err == nil && n < 10_000; n++ { // the log may have room
			err = s.CreateSandbox(t.Context(), benchSandbox(sandboxer.NewID()), sandboxer.Writes{})
		}
		if sandboxer.KindOf(err) != sandboxer.Exhausted {
			t.Fatalf("creating on a full disk: %v; want exhausted", err)
		}
		fillDisk(t, dir)
	}
	defer func() { s.Close() }()
	for range 3 {
		killed()
		for range 20 {
			if err := end(t, s, all[0]); err != nil {
				t.Fatalf("destroying on a full disk: %v", err)
			}
			all = all[1:]
			fillDisk(t, dir)
		}
	}
	// Without a reserve a server starts, and says so.
	if err := os.Remove(filepath.Join(data, reserveFile)); err != nil {
		t.Fatal(err)
	}
	killed()
	for err = nil; err == nil && len(all) > 0; all = all[1:] {
		err = end(t, s, all[0])
	}
	if sandboxer.KindOf(err) != sandboxer.Exhausted || !strings.Contains(err.Error(), "used up") {
		t.Errorf("without room: %v", err)
	}
	killed()
	if _, err := s.Sandbox(t.Context(), all[len(all)-1].ID); err != nil {
		t.Errorf("reading: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, "filler")); err != nil {
		t.Fatal(err)
	}
	if err := s.CreateSandbox(t.Context(), benchSandbox("late"), sandboxer.Writes{}); err != nil {
		t.Errorf("creating with room: %v", err)
	}
}

func TestNetworkFileSystems(t *testing.T) {
	for magic, want := range map[int64]string{unix.NFS_SUPER_MAGIC: "NFS", 0xFE534D42: "SMB", 0xFF534D42: "CIFS", unix.FUSE_SUPER_MAGIC: "FUSE", unix.TMPFS_MAGIC: "", unix.EXT4_SUPER_MAGIC: "", unix.BTRFS_SUPER_MAGIC: ""} {
		if got := remoteFilesystems[magic]; got != want {
			t.Errorf("file system %#x is %q; want %q", magic, got, want)
		}
	}
}
