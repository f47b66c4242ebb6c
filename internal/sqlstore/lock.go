package sqlstore

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/filelock"
)

// lockDir makes this process the only one that uses dir, until the file it returns
// is closed or the process dies. The lock file names its holder, for the message
// that the next process shows.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "cannot open the lock file of the data directory %s", dir)
	}
	// The lock lasts as long as the file is open, and nothing else is needed of it.
	_, err = filelock.TryFile(f, filelock.Exclusive)
	if errors.Is(err, filelock.ErrHeld) {
		defer f.Close()
		pid, command := holder(f)
		if pid == 0 {
			return nil, sandboxer.E(sandboxer.Conflict, nil, "the data directory %s is in use by another process", dir).
				WithHint("use that server through its socket, or stop it first")
		}
		return nil, sandboxer.E(sandboxer.Conflict, nil, "the data directory %s is in use by process %d (%s)", dir, pid, command).
			WithHint("use that server through its socket, or stop it first: kill %d", pid)
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = fmt.Fprintf(f, "%d\n%s\n", os.Getpid(), commandLine())
	}
	if err != nil && !errors.Is(err, unix.ENOSPC) { // a full disk costs only the holder's name
		f.Close()
		return nil, sandboxer.E(sandboxer.Unavailable, err, "cannot lock the data directory %s", dir)
	}
	return f, nil
}

// holder reads who has the lock. Between taking the lock and writing its name a
// holder is unknown for a moment, and the file may still name an older one.
func holder(f *os.File) (pid int, command string) {
	for range 20 {
		b, _ := io.ReadAll(io.NewSectionReader(f, 0, 4096))
		first, rest, complete := strings.Cut(string(b), "\n")
		n, err := strconv.Atoi(first)
		if err == nil && complete && !errors.Is(unix.Kill(n, 0), unix.ESRCH) {
			return n, strings.TrimSpace(rest)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return 0, ""
}

// commandLine is the command line of this process, on one short line.
func commandLine() string {
	args := append([]string{filepath.Base(os.Args[0])}, os.Args[1:]...)
	line := strings.Join(strings.Fields(strings.Join(args, " ")), " ")
	if len(line) > 200 {
		line = line[:200] + "…"
	}
	return line
}
