package sqlstore

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// A database that is restored from a backup, copied back, or loses its log looks like any
// other. Therefore a mark outside of it says which database was used last, and how far
// it had come at least. A database that is another, or is not as far, went back.

// markFile is the mark, in the data directory.
const markFile = "mark"

// markEvery is how long after a commit the mark is written, and so the minimum time between
// two writes of it. A loss of less than that is not noticed.
const markEvery = time.Second

// A mark says that the database of the epoch had committed the event of number position.
type mark struct {
	epoch    string
	position int64
}

// restoredMark is a mark that every database is behind: Restore leaves it.
func restoredMark() mark { return mark{epoch: "restored", position: math.MaxInt64} }

// String is the content of the file: one short line, with a checksum, always of the same length.
func (m mark) String() string {
	s := fmt.Sprintf("sandboxer mark 1 %-26s %020d", m.epoch, m.position)
	return fmt.Sprintf("%s %08x\n", s, crc32.ChecksumIEEE([]byte(s)))
}

// readMark reads the mark in dir. An unreadable or damaged mark becomes one that no
// database matches; ok is false if there is none.
func readMark(dir string) (m mark, ok bool) {
	b, err := os.ReadFile(filepath.Join(dir, markFile))
	if errors.Is(err, fs.ErrNotExist) {
		return mark{}, false
	}
	if _, serr := fmt.Sscanf(string(b), "sandboxer mark 1 %s %d ", &m.epoch, &m.position); err != nil || serr != nil || m.String() != string(b) {
		return mark{}, true
	}
	return m, true
}

// writeMark makes m durable. It is written in place, so that a full disk has room for it; a
// crash in between leaves a damaged mark, and the database then counts as one that went
// back, which ends nothing.
func writeMark(dir string, m mark) error {
	file := filepath.Join(dir, markFile)
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return wholefile.Write(file, []byte(m.String()))
	}
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(m.String()), 0)
	return errors.Join(err, f.Sync(), f.Close())
}

// checkMark compares the database with the mark and begins a new epoch in both. wentBack is when the
// database was found to have gone back, now or before, unless that was accepted since. If frugal, a
// database that did not go back keeps its epoch, and nothing is written.
func checkMark(ctx context.Context, db *sql.DB, dir string, log *slog.Logger, frugal bool) (now mark, wentBack time.Time, err error) {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return mark{}, time.Time{}, err
	}
	defer tx.Rollback()
	var epoch, former string
	var at int64
	if err := tx.QueryRowContext(ctx, `SELECT epoch, former, went_back_at FROM installation`).Scan(&epoch, &former, &at); err != nil {
		return mark{}, time.Time{}, err
	}
	var position int64
	err = tx.QueryRowContext(ctx, `SELECT seq FROM sqlite_sequence WHERE name = 'events'`).Scan(&position)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return mark{}, time.Time{}, err
	}
	last, marked := readMark(dir)
	// An interrupted start has begun an epoch in the database alone.
	same := marked && last.epoch != "" && (last.epoch == epoch || last.epoch == former) && last.position <= position
	back := !same && (marked || epoch != "")
	why := "it is older than the mark"
	switch {
	case !marked:
		why = "the mark is missing"
	case last.epoch == "":
		why = "the mark cannot be read"
	case last == restoredMark():
		why = "it was restored"
	case last.position <= position:
		why = "it is not the one that was used last"
	}
	now = mark{epoch: rand.Text(), position: position}
	if frugal && same {
		if at != 0 {
			wentBack = fromMicros(at)
		}
		return mark{epoch: epoch, position: position}, wentBack, nil
	}
	if back {
		epoch, at = "", time.Now().UnixMicro()
		if err := markOlder(ctx, tx, fromMicros(at)); err != nil {
			return mark{}, time.Time{}, err
		}
		told := []any{at, "", "", 0, "", string(sandboxer.EventWarning), "", "", "", "start", "the database went back (" + why + "): no deadline counts until an administrator accepts it: sandboxer accept"}
		if err := tx.QueryRowContext(ctx, insertEvent, told...).Scan(&now.position); err != nil {
			return mark{}, time.Time{}, err
		}
	}
	if _, err := tx.ExecContext(ctx, `UPDATE installation SET epoch = ?, former = ?, went_back_at = ?`, now.epoch, epoch, at); err != nil {
		return mark{}, time.Time{}, err
	}
	if err := tx.Commit(); err != nil {
		return mark{}, time.Time{}, err
	}
	if err := writeMark(dir, now); err != nil {
		log.Warn("a database that goes back would not be noticed: the mark cannot be written", "file", filepath.Join(dir, markFile), "err", err)
	}
	if at != 0 {
		wentBack = fromMicros(at)
	}
	if back {
		log.Warn("the database went back: no deadline counts until an administrator accepts it: sandboxer accept", "why", why, "event", position)
	}
	return now, wentBack, nil
}

// markOlder marks the records of sandboxes that waited in a pool: they may be a tenant's since.
// Running sandboxes count as used at the time at, since their last use is not known.
func markOlder(ctx context.Context, tx *sql.Tx, at time.Time) error {
	return sandboxes.rewrite(ctx, tx, `state NOT IN ('terminating', 'terminated')`, func(sb *sandboxer.Sandbox) {
		switch {
		case sb.Pool != "" && sb.Tenant == "":
			sb.Unconfirmed = sandboxer.Claimed
		case sb.State == sandboxer.Running && sb.UsedAt.Before(at):
			sb.UsedAt = at
		}
	})
}

// WentBack is when the database was found, at this start or an earlier one, to be older than it had
// been; zero if it never was, or that was accepted before this start (Writes.WentBackAccepted).
func (s *Store) WentBack() time.Time { return s.wentBack }

// A marker keeps the mark behind the last commit, by about markEvery at most.
type marker struct {
	dir     string
	log     *slog.Logger
	epoch   string
	reached atomic.Int64
	wake    chan struct{} // one slot
	closing chan struct{}
	stopped chan struct{}
}

func newMarker(dir string, log *slog.Logger, now mark) *marker {
	m := &marker{dir: dir, log: log, epoch: now.epoch, wake: make(chan struct{}, 1), closing: make(chan struct{}), stopped: make(chan struct{})}
	m.reached.Store(now.position)
	go m.run(now.position)
	return m
}

// reach notes that the event of number position is durable.
func (m *marker) reach(position int64) {
	for {
		was := m.reached.Load()
		if position <= was {
			return
		}
		if m.reached.CompareAndSwap(was, position) {
			break
		}
	}
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

func (m *marker) run(written int64) {
	defer close(m.stopped)
	failed := false
	write := func() {
		position := m.reached.Load()
		if position == written {
			return
		}
		err := writeMark(m.dir, mark{m.epoch, position})
		if err != nil && !failed {
			m.log.Warn("a database that goes back would not be noticed: the mark cannot be written", "file", filepath.Join(m.dir, markFile), "err", err)
		}
		if failed = err != nil; !failed {
			written = position
		}
	}
	defer write()
	for {
		select {
		case <-m.wake:
		case <-m.closing:
			return
		}
		// Not at once: the first commit is seldom all of what a caller waits for, and
		// the next commit would wait for the disk twice.
		t := time.NewTimer(markEvery)
		select {
		case <-t.C:
			write()
		case <-m.closing:
			t.Stop()
			return
		}
	}
}

// stop writes the last position.
func (m *marker) stop() error {
	close(m.closing)
	<-m.stopped
	return nil
}

// Bind ties the database to an installation and its sealing key, the first time, and
// returns what it is tied to. check must not reveal the key; if renewed is set, check replaces
// the stored one.
func (s *Store) Bind(ctx context.Context, owner, check string, renewed bool) (ownerOf, checkOf string, err error) {
	err = s.writer.write(ctx, false, func(t *tx) error {
		if _, err := t.row(`SELECT owner, key_check FROM installation`, nil, &ownerOf, &checkOf); err != nil {
			return err
		}
		if ownerOf != "" && checkOf != "" && !renewed {
			return nil
		}
		if ownerOf == "" {
			ownerOf = owner
		}
		if checkOf == "" || renewed {
			checkOf = check
		}
		_, err := t.exec(`UPDATE installation SET owner = ?, key_check = ?`, ownerOf, checkOf)
		return err
	})
	return ownerOf, checkOf, s.withBackupHint(wrap(err, "write the database"))
}
