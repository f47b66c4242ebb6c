package sqlstore

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// roleEnv makes this test binary play another process: "write" writes until it is
// killed, "hold" opens the directory and waits.
const (
	roleEnv = "SANDBOXER_TEST_ROLE"
	dirEnv  = "SANDBOXER_TEST_DIR"
)

// child plays the part that roleEnv names and reports whether there was one.
func child() bool {
	role, dir := os.Getenv(roleEnv), os.Getenv(dirEnv)
	if role == "" {
		return false
	}
	s, err := OpenSQLite(context.Background(), dir, Options{Reserve: 1 << 20})
	if err != nil {
		fmt.Println("failed", err)
		return true
	}
	defer s.Close()
	switch role {
	case "hold":
		fmt.Println("ready")
		io.Copy(io.Discard, os.Stdin)
	case "write":
		writeForEver(s)
	}
	return true
}

// writeForEver makes sandboxes with an entry and an event each from several
// goroutines and prints what was acknowledged.
func writeForEver(s *Store) {
	var out sync.Mutex
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for {
				id := sandboxer.NewID()
				for version := int64(1); version <= 3; version++ {
					sb := benchSandbox(id)
					sb.Version = version - 1
					sb.State = sandboxer.Running
					w := sandboxer.Writes{
						Entries: []sandboxer.Entry{{Key: fmt.Sprint(id, "/", version), Tenant: "acme", SandboxID: id, Generation: 1, Type: sandboxer.EntryHold, Amount: -1}},
						Events:  []sandboxer.Event{{Tenant: "acme", SandboxID: id, Generation: 1, Type: sandboxer.EventStep}},
					}
					write := s.UpdateSandbox
					if version == 1 {
						write = s.CreateSandbox
					}
					if err := write(context.Background(), sb, w); err != nil {
						fmt.Println("failed", err)
						os.Exit(1)
					}
					out.Lock()
					fmt.Println("ok", id, sb.Version)
					out.Unlock()
				}
			}
		})
	}
	wg.Wait()
}

// start runs this binary in a role.
func start(t *testing.T, role, dir string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), roleEnv+"="+role, dirEnv+"="+dir)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe() // the child ends with us
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stdin.Close() })
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return cmd, bufio.NewScanner(stdout)
}

// TestKill kills a writing process at random moments: what was acknowledged is
// there, and what is there is whole.
func TestKill(t *testing.T) {
	dir := t.TempDir()
	acknowledged := map[string]int64{} // versions by ID
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	for round := range 20 {
		cmd, lines := start(t, "write", dir)
		var killed atomic.Bool
		// Counting acknowledgements rather than time reaches every phase on machines
		// of any speed; the random delay then moves the blow within a commit.
		strike := 1 + rng.IntN(150)
		delay := time.Duration(rng.IntN(3000)) * time.Microsecond
		for n := 0; lines.Scan(); {
			var id string
			var version int64
			if _, err := fmt.Sscanf(lines.Text(), "ok %s %d", &id, &version); err != nil {
				if killed.Load() {
					break // a torn line was not acknowledged
				}
				t.Fatalf("round %d: the writer said %q", round, lines.Text())
			}
			if version > 3 || len(id) != 8 {
				t.Fatalf("round %d: the writer said %q", round, lines.Text())
			}
			acknowledged[id] = max(acknowledged[id], version)
			if n++; n == strike {
				time.AfterFunc(delay, func() { killed.Store(true); cmd.Process.Kill() })
			}
		}
		cmd.Wait()
		if !killed.Load() {
			t.Fatalf("round %d: the writer ended by itself", round)
		}
		checkDatabase(t, dir, acknowledged)
	}
	t.Logf("%d sandboxes acknowledged in 20 lives", len(acknowledged))
}

// checkDatabase opens dir and compares it with what was acknowledged and with itself.
func checkDatabase(t *testing.T, dir string, acknowledged map[string]int64) {
	t.Helper()
	s := openTest(t, dir)
	if !s.WentBack().IsZero() {
		t.Error("a database whose process was killed counts as one that went back")
	}
	defer s.Close()
	ask := func(query string) (n int64) {
		t.Helper()
		if err := s.readers.QueryRow(query).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	var result string
	if err := s.readers.QueryRow("PRAGMA integrity_check").Scan(&result); err != nil || result != "ok" {
		t.Fatalf("integrity_check: %s, %v", result, err)
	}
	stored := map[string]int64{}
	rows, err := s.readers.Query("SELECT id, version FROM sandboxes")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var sum int64
	for rows.Next() {
		var id string
		var version int64
		if err := rows.Scan(&id, &version); err != nil {
			t.Fatal(err)
		}
		stored[id] = version
		sum += version
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	for id, version := range acknowledged {
		if stored[id] < version {
			t.Errorf("sandbox %s was acknowledged at version %d; stored: %d", id, version, stored[id])
		}
	}
	// Every version came with one entry and one event, and the sums follow the entries.
	for what, n := range map[string]int64{
		"entries":    ask("SELECT count(*) FROM entries"),
		"events":     ask("SELECT count(*) FROM events"),
		"balance":    -ask("SELECT balance FROM balances WHERE tenant = 'acme'"),
		"open holds": ask("SELECT sum(amount) FROM open_holds"),
	} {
		if n != sum {
			t.Errorf("%s: %d; the versions of all sandboxes make %d", what, n, sum)
		}
	}
	if n := ask("SELECT count(*) FROM sandboxes s WHERE version <> (SELECT count(*) FROM entries e WHERE e.sandbox_id = s.id)"); n != 0 {
		t.Errorf("%d sandboxes have not as many entries as versions", n)
	}
}

// TestSecondProcess opens a directory that another process uses.
func TestSecondProcess(t *testing.T) {
	dir := t.TempDir()
	cmd, lines := start(t, "hold", dir)
	if !lines.Scan() || lines.Text() != "ready" {
		t.Fatalf("the holder said %q", lines.Text())
	}
	_, err := OpenSQLite(t.Context(), dir, Options{})
	if sandboxer.KindOf(err) != sandboxer.Conflict {
		t.Fatalf("OpenSQLite = %v; want a conflict", err)
	}
	for _, want := range []string{dir, fmt.Sprintf("process %d (", cmd.Process.Pid), "sqlstore.test"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not name %q", err, want)
		}
	}
	if hint := sandboxer.HintOf(err); !strings.Contains(hint, fmt.Sprintf("kill %d", cmd.Process.Pid)) || !strings.Contains(hint, "socket") {
		t.Errorf("hint %q does not say what to do", hint)
	}
	cmd.Process.Kill()
	cmd.Wait()
	openTest(t, dir) // the lock died with its holder
}
