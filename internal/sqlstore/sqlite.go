package sqlstore

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pressly/goose/v3"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// The files of a data directory. The database has companions with the suffixes -wal
// and -shm while it is in use.
const (
	dbFile       = "sandboxer.db"
	newDBFile    = "sandboxer.db.new" // a database that is not complete yet
	reserveFile  = "reserve"
	lockFile     = "lock"
	backupPrefix = "sandboxer-before-"
)

// applicationID marks a database as ours ("sbxr").
const applicationID = 0x73627872

// oldestSQLite is the first release without the error that could damage a database
// while its log was being restarted.
const oldestSQLite = "3.51.3"

// DefaultReserve is the space that OpenSQLite keeps back for when the disk is
// full.
const DefaultReserve = 64 << 20

//go:embed migrations/sqlite/*.sql
var migrations embed.FS

// Options adjust a store; the zero value is ready to use.
type Options struct {
	Log     *slog.Logger // nil discards
	Reserve int64        // bytes kept back for a full disk; 0 means DefaultReserve, negative none
	Beside  []string     // files of dir that are made after the database: where one is and that is not, it is missing
}

// OpenSQLite opens the database in dir, making both if they do not exist. dir is
// readable by its owner only, must be on a local disk, and is used by one process
// at a time.
//
// An existing database is checked, and copied into one file before its schema is
// changed. A database that is damaged or missing is never replaced by an empty one.
// Kinds: Conflict when another process uses dir (the message says which), Failed
// when the database is damaged, Invalid for a dir that cannot be used, Exhausted when
// the disk is full, Unavailable for other disk errors.
func OpenSQLite(ctx context.Context, dir string, opts Options) (*Store, error) {
	schema, err := fs.Sub(migrations, "migrations/sqlite")
	if err != nil {
		return nil, err
	}
	return openSQLite(ctx, dir, opts, schema)
}

func openSQLite(ctx context.Context, dir string, opts Options, schema fs.FS) (*Store, error) {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	switch {
	case opts.Reserve == 0:
		opts.Reserve = DefaultReserve
	case opts.Reserve < 0:
		opts.Reserve = 0
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "%q is not a directory", dir)
	}
	if err := prepareDir(dir); err != nil {
		return nil, err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	s, err := openLocked(ctx, dir, opts, schema, false)
	for gave := true; isFull(err) && gave; {
		gave, _ = giveUp(filepath.Join(dir, reserveFile), opts.Reserve)
		s, err = openLocked(ctx, dir, opts, schema, !gave)
	}
	if err != nil {
		lock.Close()
		if isDamage(err, filepath.Join(dir, dbFile)) {
			return nil, damaged(dir, err)
		}
		return nil, wrap(err, "open the database in "+dir)
	}
	s.lock, s.dir = lock, dir
	return s, nil
}

// openLocked opens the database of a directory that this process has locked. frugal says that
// the disk has no room for a write: then writes that the next start can repeat are left out.
func openLocked(ctx context.Context, dir string, opts Options, schema fs.FS, frugal bool) (_ *Store, err error) {
	file := filepath.Join(dir, dbFile)
	if err := createIfNew(ctx, dir, schema, opts.Beside); err != nil {
		return nil, err
	}
	db, err := open(file, "rw", "_pragma=synchronous(FULL)&_pragma=wal_autocheckpoint(2000)", 1)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			db.Close()
		}
	}()
	if err := check(ctx, db, dir); err != nil {
		return nil, err
	}
	// A database that was restored from a backup is not in WAL mode yet.
	var mode string
	if err := db.QueryRowContext(ctx, "PRAGMA journal_mode = WAL").Scan(&mode); err != nil {
		return nil, err
	}
	if err := migrate(ctx, db, dir, schema, opts.Log); err != nil {
		return nil, err
	}
	now, wentBack, err := checkMark(ctx, db, dir, opts.Log, frugal)
	if isFull(err) {
		// The log can be reused from its beginning.
		if _, cerr := db.ExecContext(ctx, "PRAGMA wal_checkpoint(PASSIVE)"); cerr == nil {
			now, wentBack, err = checkMark(ctx, db, dir, opts.Log, frugal)
		}
	}
	if err != nil {
		return nil, err
	}
	revoked, err := openRevocations(ctx, db, dir, opts.Log)
	if err != nil {
		return nil, err
	}
	readers, err := open(file, "rw", "_query_only=1", 4)
	if err != nil {
		return nil, err
	}
	conn, err := db.Conn(ctx)
	if err != nil {
		readers.Close()
		return nil, err
	}
	s := &Store{
		db:       db,
		wentBack: wentBack,
		revoked:  revoked,
		marker:   newMarker(dir, opts.Log, now),
		readers:  readers,
		writer:   newWriter(conn, openReserve(filepath.Join(dir, reserveFile), opts.Reserve, opts.Log)),
	}
	return s, nil
}

// open returns a pool of at most n connections to file.
func open(file, mode, params string, n int) (*sql.DB, error) {
	name := url.URL{
		Scheme: "file",
		Path:   file,
		RawQuery: "mode=" + mode + "&_txlock=immediate&_busy_timeout=5000&_foreign_keys=1" +
			"&_pragma=temp_store(MEMORY)&_dqs=0&_defensive=1&_error_rc=1&" + params,
	}
	db, err := sql.Open("sqlite", name.String())
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(n)
	db.SetMaxIdleConns(n)
	return db, nil
}

// prepareDir makes dir, or checks that it is private and fit for a database.
func prepareDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "cannot make the data directory %s", dir).
			WithHint("choose a directory that you may write to")
	}
	fsName, err := remoteFilesystem(dir)
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "cannot inspect the data directory %s", dir)
	}
	if fsName != "" {
		return sandboxer.E(sandboxer.Invalid, nil, "the data directory %s is on a network file system (%s), where a database gets damaged", dir, fsName).
			WithHint("choose a directory on a local disk")
	}
	st, err := os.Stat(dir)
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "cannot inspect the data directory %s", dir)
	}
	if st.Mode().Perm()&0o077 == 0 {
		return nil
	}
	// To make a shared directory private would break its other users.
	names, err := os.ReadDir(dir)
	if err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "cannot read the data directory %s", dir)
	}
	ours := slices.ContainsFunc(names, func(e fs.DirEntry) bool {
		return strings.HasPrefix(e.Name(), dbFile) || strings.HasPrefix(e.Name(), backupPrefix) || strings.HasPrefix(e.Name(), regularPrefix)
	})
	if len(names) > 0 && !ours {
		return sandboxer.E(sandboxer.Invalid, nil, "the data directory %s is open to other users and holds other files", dir).
			WithHint("choose a directory of its own, or close this one: chmod 700 %s", dir)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "the data directory %s is open to other users and cannot be closed", dir).
			WithHint("choose a directory that you own")
	}
	return nil
}

// createIfNew makes an empty database if dir never had one. It becomes visible
// under its name only when it is complete, so that a database file without tables
// is always a damaged one.
func createIfNew(ctx context.Context, dir string, schema fs.FS, beside []string) error {
	file, draft := filepath.Join(dir, dbFile), filepath.Join(dir, newDBFile)
	switch _, err := os.Stat(file); {
	case err == nil:
		return nil
	case !errors.Is(err, fs.ErrNotExist):
		return sandboxer.E(sandboxer.Unavailable, err, "cannot inspect the database %s", file)
	}
	lost := newestBackup(dir) != ""
	for _, name := range append([]string{dbFile + "-wal", markFile}, beside...) {
		_, err := os.Stat(filepath.Join(dir, name))
		lost = lost || err == nil
	}
	if lost {
		return damaged(dir, errors.New("the file is missing, but others that belong to it are there"))
	}
	for _, suffix := range []string{"", "-wal", "-shm", "-journal"} {
		if err := os.Remove(draft + suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return sandboxer.E(sandboxer.Unavailable, err, "cannot remove an unfinished database")
		}
	}
	// Nothing can be lost before the rename, so only the finished file is synced.
	db, err := open(draft, "rwc", "_pragma=synchronous(OFF)", 1)
	if err != nil {
		return err
	}
	defer db.Close()
	if _, err := db.ExecContext(ctx, fmt.Sprintf("PRAGMA application_id = %d", applicationID)); err != nil {
		return err
	}
	p, err := provider(db, schema)
	if err != nil {
		return err
	}
	if _, err := p.Up(ctx); err != nil {
		return err
	}
	var mode string
	if err := db.QueryRowContext(ctx, "PRAGMA journal_mode = WAL").Scan(&mode); err != nil {
		return err
	}
	if mode != "wal" {
		return sandboxer.E(sandboxer.Invalid, nil, "the file system of %s has no shared memory, which the database needs (journal mode %s)", dir, mode).
			WithHint("choose a directory on a local disk")
	}
	if err := db.Close(); err != nil {
		return err
	}
	return publish(draft, file)
}

// publish makes the finished file from durable under its name to.
func publish(from, to string) error {
	if err := wholefile.Publish(from, to); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "cannot put %s in its place", to)
	}
	return nil
}

func writeZeros(f *os.File, size int64) error {
	zeros := make([]byte, 1<<20)
	for size > 0 {
		n, err := f.Write(zeros[:min(size, int64(len(zeros)))])
		if err != nil {
			return err
		}
		size -= int64(n)
	}
	return f.Sync()
}

// check refuses a database that is damaged, or not ours.
func check(ctx context.Context, db *sql.DB, dir string) error {
	var version string
	if err := db.QueryRowContext(ctx, "SELECT sqlite_version()").Scan(&version); err != nil {
		if isCorrupt(err) {
			return damaged(dir, err)
		}
		return err
	}
	if !versionAtLeast(version, oldestSQLite) {
		return sandboxer.E(sandboxer.Internal, nil, "this program was built with SQLite %s, which can damage databases; it needs %s or newer", version, oldestSQLite)
	}
	var id int64
	err := db.QueryRowContext(ctx, "PRAGMA application_id").Scan(&id)
	switch {
	case isCorrupt(err):
		return damaged(dir, err)
	case err != nil:
		return err
	case id != applicationID:
		return damaged(dir, fmt.Errorf("it is not a database of sandboxer (application ID %#x)", id))
	}
	rows, err := db.QueryContext(ctx, "PRAGMA quick_check(5)")
	if err != nil {
		if isCorrupt(err) {
			return damaged(dir, err)
		}
		return err
	}
	defer rows.Close()
	var faults []string
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			return err
		}
		if line != "ok" {
			faults = append(faults, line)
		}
	}
	if err := rows.Err(); isCorrupt(err) {
		faults = append(faults, err.Error())
	} else if err != nil {
		return err
	}
	if faults != nil {
		return damaged(dir, errors.New(strings.Join(faults, "; ")))
	}
	return nil
}

// damaged describes a database that must not be used, and how to recover.
func damaged(dir string, cause error) error {
	file := filepath.Join(dir, dbFile)
	backup := newestBackup(dir)
	if backup == "" {
		return sandboxer.E(sandboxer.Failed, cause, "the database %s is damaged or not sandboxer's, and the data directory holds no backup of it", file).
			WithHint("put back a copy of your own; move %s away, to begin with an empty database, only if nothing that sandboxer made exists any more", dir)
	}
	return sandboxer.E(sandboxer.Failed, cause, "the database %s is damaged or not sandboxer's; its newest backup is %s", file, backup).
		WithHint("restore it (the present database is kept): sandboxer backup restore --data-dir %s %s", dir, backup)
}

// versionAtLeast compares dotted version numbers.
func versionAtLeast(have, want string) bool {
	var h, w [3]int
	fmt.Sscanf(have, "%d.%d.%d", &h[0], &h[1], &h[2])
	fmt.Sscanf(want, "%d.%d.%d", &w[0], &w[1], &w[2])
	return slices.Compare(h[:], w[:]) >= 0
}

func provider(db *sql.DB, schema fs.FS) (*goose.Provider, error) {
	return goose.NewProvider(goose.DialectSQLite3, db, schema,
		goose.WithLogger(goose.NopLogger()), goose.WithDisableGlobalRegistry(true))
}

// migrate brings an existing database up to date, after making a backup of it.
func migrate(ctx context.Context, db *sql.DB, dir string, schema fs.FS, log *slog.Logger) error {
	p, err := provider(db, schema)
	if err != nil {
		return err
	}
	have, want, err := p.GetVersions(ctx)
	switch {
	case err != nil:
		return err
	case have > want:
		return newer(dir, have, want)
	case have == want:
		return nil
	}
	backup, err := backUpForMigration(ctx, db, dir, want)
	if err != nil {
		return err
	}
	if _, err := p.Up(ctx); err != nil {
		return sandboxer.E(sandboxer.Failed, err, "the database in %s could not be migrated from schema %d to %d", dir, have, want).
			WithHint("nothing is lost: the backup is %s; continue with the former program, and report this", backup)
	}
	log.Info("database migrated", "from", have, "to", want, "backup", backup)
	return nil
}

// newer describes a database of a newer program, and the two ways out.
func newer(dir string, have, want int64) error {
	err := sandboxer.E(sandboxer.Failed, nil, "the database in %s was written by a newer sandboxer (schema %d; this program knows %d)", dir, have, want)
	// The upgrade left a copy of the former database. There may have been several upgrades.
	for schema := want + 1; schema <= have; schema++ {
		backup := filepath.Join(dir, migrationBackupFile(schema))
		if _, missing := os.Stat(backup); missing == nil {
			return err.WithHint("upgrade this program; or restore the backup from before the upgrade, which loses later records: sandboxer backup restore --data-dir %s %s", dir, backup)
		}
	}
	return err.WithHint("upgrade this program; or restore a backup from before the newer one was used")
}

// migrationBackupFile names the backup that a migration to schema leaves.
func migrationBackupFile(schema int64) string {
	return fmt.Sprintf("%s%04d%s", backupPrefix, schema, backupSuffix)
}

// backUpForMigration copies the database, as it is before the migration to schema want, into one
// file and returns its name. A backup left by an earlier attempt at the same migration is
// replaced.
func backUpForMigration(ctx context.Context, db *sql.DB, dir string, want int64) (string, error) {
	file := filepath.Join(dir, migrationBackupFile(want))
	draft := file + ".new"
	if err := os.Remove(draft); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", sandboxer.E(sandboxer.Unavailable, err, "cannot remove an unfinished backup")
	}
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", draft); err != nil {
		os.Remove(draft)
		return "", wrap(err, "back up the database before migrating it")
	}
	return file, publish(draft, file)
}
