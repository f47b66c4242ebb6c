package sqlstore

import (
	"context"
	"errors"
	"os"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/sand-boxer/sandboxer"
)

// code returns SQLite's extended result code in err's chain, or 0.
func code(err error) int {
	var e *sqlite.Error
	if errors.As(err, &e) {
		return e.Code()
	}
	return 0
}

// isFull reports whether err says that there is no room on the disk. (The shared
// memory file of the log grows when a database is opened or its log lengthens.)
func isFull(err error) bool {
	c := code(err)
	return c == sqlite3.SQLITE_FULL || c == sqlite3.SQLITE_IOERR_SHMSIZE
}

func isCorrupt(err error) bool {
	c := code(err) & 0xff
	return c == sqlite3.SQLITE_CORRUPT || c == sqlite3.SQLITE_NOTADB
}

// isDamage reports whether err, met while opening the database in file, says that its
// content is damaged. Not all damage has a code of its own: for a header that
// asks for another format SQLite returns an ordinary error, or one as if the database were
// read-only.
func isDamage(err error, file string) bool {
	var own *sandboxer.Error
	if errors.As(err, &own) {
		return false
	}
	switch code(err) & 0xff {
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FORMAT:
		return true
	case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN:
		f, ferr := os.OpenFile(file, os.O_RDWR, 0)
		if ferr == nil {
			f.Close()
		}
		return ferr == nil
	}
	return false
}

// isTaken reports whether a unique index refused the row.
func isTaken(err error) bool { return code(err) == sqlite3.SQLITE_CONSTRAINT_UNIQUE }

// breaksTransaction reports whether err can have ended the whole transaction, or
// leaves no hope for the rest of it.
func breaksTransaction(err error) bool {
	c := code(err) & 0xff
	return c != 0 && c != sqlite3.SQLITE_CONSTRAINT && c != sqlite3.SQLITE_MISMATCH && c != sqlite3.SQLITE_TOOBIG
}

// wrap gives an error of the database its Kind; what says what was being done.
func wrap(err error, what string) error {
	var own *sandboxer.Error
	if err == nil || errors.As(err, &own) {
		return err
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return sandboxer.E(sandboxer.KindOf(err), err, "could not %s: the caller left or the time ran out", what)
	}
	if isFull(err) {
		return sandboxer.E(sandboxer.Exhausted, err, "could not %s: the disk that holds the broker's data is full, and the space kept in reserve is used up", what).
			WithHint("free some space on it; until then sandboxes can be listed, and nothing can be changed")
	}
	switch code(err) & 0xff {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL:
		e := sandboxer.E(sandboxer.Unavailable, err, "could not %s: another program has locked the database", what)
		e.RetryAfter = time.Second
		return e.WithHint("close the program that has the database open, then try again")
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return sandboxer.E(sandboxer.Failed, err, "could not %s: the database is damaged", what).
			WithHint("stop the server and start it again: it checks the database and names the newest backup")
	case sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM,
		sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT:
		return sandboxer.E(sandboxer.Unavailable, err, "could not %s: the database cannot be used", what).
			WithHint("look at the disk and the permissions of the data directory")
	case sqlite3.SQLITE_TOOBIG:
		return sandboxer.E(sandboxer.Invalid, err, "could not %s: a value is too big for the database", what)
	}
	return sandboxer.E(sandboxer.Internal, err, "could not %s", what)
}

// errFull refuses something new while the reserve is used for existing sandboxes.
func errFull() error {
	return sandboxer.E(sandboxer.Exhausted, nil, "the disk that holds the broker's data is full").
		WithHint("free some space; sandboxes can still be listed and destroyed, and creating works again when there is space")
}

func errClosed() error {
	return sandboxer.E(sandboxer.Unavailable, nil, "the store is closed")
}
