package sqlstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Backups are files of the data directory: those made before a migration, which are
// kept, and the regular ones. Only the newest regular ones are kept.
const (
	regularPrefix = "sandboxer-backup-"
	backupSuffix  = ".db"
	backupTime    = "20060102T150405.000Z"
)

// Backup is one backup of a database.
type Backup struct {
	File string
	At   time.Time
	Size int64
}

// BackUp copies the database of dir, which may be in use by another process, into one
// file: file, or, if that is "", a new one in dir, where the newest keep ones are then
// kept (0 keeps all). The copy is checked before it appears under its name, and
// readable by its owner only. Kinds: NotFound without a database, Conflict when file
// exists, Failed for a database that is damaged, Exhausted when the disk has no room for
// a copy in addition to the reserve.
func BackUp(ctx context.Context, dir, file string, keep int) (Backup, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Backup{}, sandboxer.E(sandboxer.Invalid, err, "%q is not a directory", dir)
	}
	at := time.Now().UTC()
	regular := file == ""
	if regular {
		file = filepath.Join(dir, regularPrefix+at.Format(backupTime)+backupSuffix)
	}
	if _, err := os.Lstat(file); err == nil {
		return Backup{}, sandboxer.E(sandboxer.Conflict, nil, "%s exists already", file).WithHint("choose another name")
	}
	db := filepath.Join(dir, dbFile)
	st, err := os.Stat(db)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Backup{}, sandboxer.E(sandboxer.NotFound, err, "the data directory %s has no database", dir)
	case err != nil:
		return Backup{}, sandboxer.E(sandboxer.Unavailable, err, "cannot inspect the database %s", db)
	}
	if free, err := freeBytes(file); err == nil && free < st.Size()+slack {
		return Backup{}, sandboxer.E(sandboxer.Exhausted, nil, "the disk has %d bytes left, too few for a backup of %d", free, st.Size()).
			WithHint("free some space, or back up to another disk: sandboxer backup FILE")
	}
	draft := file + ".new"
	defer os.Remove(draft)
	if err := copyDatabase(ctx, db, draft); err != nil {
		return Backup{}, err
	}
	if err := publish(draft, file); err != nil {
		return Backup{}, err
	}
	if regular && keep > 0 {
		if err := prune(dir, keep); err != nil {
			return Backup{}, err
		}
	}
	st, err = os.Stat(file)
	if err != nil {
		return Backup{}, sandboxer.E(sandboxer.Unavailable, err, "cannot inspect the backup %s", file)
	}
	return Backup{File: file, At: at, Size: st.Size()}, nil
}

// copyDatabase writes a consistent, checked copy of the database in file to draft.
func copyDatabase(ctx context.Context, file, draft string) error {
	if err := os.Remove(draft); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Unavailable, err, "cannot remove an unfinished backup")
	}
	f, err := os.OpenFile(draft, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) // SQLite would make it readable for all
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "cannot make the backup %s", draft)
	}
	db, err := open(file, "rw", "", 1)
	if err != nil {
		return err
	}
	defer db.Close()
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", draft); err != nil {
		return wrap(err, "back up the database")
	}
	return verify(ctx, draft)
}

// verify reads all of a backup, which no other process uses. Failed says what is wrong.
func verify(ctx context.Context, file string) error {
	bad := func(cause error) error {
		return sandboxer.E(sandboxer.Failed, cause, "%s is damaged or not a backup of sandboxer's database", file).
			WithHint("take another one; sandboxer-backup-*.db in the data directory are the regular ones")
	}
	db, err := open(file, "ro", "_pragma=immutable(1)", 1)
	if err != nil {
		return err
	}
	defer db.Close()
	var id int64
	if err := db.QueryRowContext(ctx, "PRAGMA application_id").Scan(&id); err != nil {
		return bad(err)
	}
	if id != applicationID {
		return bad(fmt.Errorf("application ID %#x", id))
	}
	var result string
	if err := db.QueryRowContext(ctx, "PRAGMA integrity_check(1)").Scan(&result); err != nil {
		return bad(err)
	}
	if result != "ok" {
		return bad(errors.New(result))
	}
	return nil
}

// Backups lists the backups in dir, newest first.
func Backups(dir string) []Backup {
	entries, _ := os.ReadDir(dir)
	var out []Backup
	for _, e := range entries {
		name := e.Name()
		if !strings.HasSuffix(name, backupSuffix) || !strings.HasPrefix(name, backupPrefix) && !strings.HasPrefix(name, regularPrefix) {
			continue
		}
		if st, err := e.Info(); err == nil {
			out = append(out, Backup{File: filepath.Join(dir, name), At: st.ModTime(), Size: st.Size()})
		}
	}
	slices.SortFunc(out, func(a, b Backup) int { return cmp.Or(b.At.Compare(a.At), strings.Compare(b.File, a.File)) })
	return out
}

// newestBackup returns the most recent backup in dir, or "".
func newestBackup(dir string) string {
	if all := Backups(dir); len(all) > 0 {
		return all[0].File
	}
	return ""
}

// prune removes all but the newest keep regular backups.
func prune(dir string, keep int) error {
	all := slices.DeleteFunc(Backups(dir), func(b Backup) bool { return !strings.HasPrefix(filepath.Base(b.File), regularPrefix) })
	for _, b := range all[min(keep, len(all)):] {
		if err := os.Remove(b.File); err != nil {
			return sandboxer.E(sandboxer.Unavailable, err, "cannot remove the old backup %s", b.File)
		}
	}
	return nil
}

// Restore replaces the database of dir by a backup; backup "" means the
// newest valid one. The former database is kept next to it, with the suffix that
// Restore returns, or "" if there was none. A crash in between leaves a directory that
// OpenSQLite refuses and Restore can be repeated on. Kinds: Conflict when a process uses
// dir, NotFound without a backup, Failed for one that is damaged.
func Restore(ctx context.Context, dir, backup string) (restored, suffix string, err error) {
	if dir, err = filepath.Abs(dir); err != nil {
		return "", "", sandboxer.E(sandboxer.Invalid, err, "%q is not a directory", dir)
	}
	if err := prepareDir(dir); err != nil {
		return "", "", err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return "", "", err
	}
	defer lock.Close()
	if backup != "" {
		if err := verify(ctx, backup); err != nil {
			return "", "", err
		}
	} else {
		var bad error
		for _, b := range Backups(dir) {
			if bad = verify(ctx, b.File); bad == nil {
				backup = b.File
				break
			}
		}
		if bad != nil {
			return "", "", bad
		}
		if backup == "" {
			return "", "", sandboxer.E(sandboxer.NotFound, nil, "the data directory %s holds no backup", dir).
				WithHint("name a backup of your own: sandboxer backup restore FILE")
		}
	}
	file, draft := filepath.Join(dir, dbFile), filepath.Join(dir, newDBFile)
	if err := copyFile0600(backup, draft); err != nil {
		return "", "", sandboxer.E(sandboxer.Unavailable, err, "the backup %s cannot be copied", backup)
	}
	if err := writeMark(dir, restoredMark()); err != nil {
		return "", "", sandboxer.E(sandboxer.Unavailable, err, "%s cannot be written", filepath.Join(dir, markFile))
	}
	suffix = "-before-restore-" + time.Now().UTC().Format(backupTime)
	moved := false
	for _, part := range []string{"-shm", "-wal", ""} { // a log without its database is recognized as damage
		switch err := os.Rename(file+part, file+suffix+part); {
		case err == nil:
			moved = true
		case !errors.Is(err, fs.ErrNotExist):
			return "", "", sandboxer.E(sandboxer.Unavailable, err, "%s cannot be moved away", file+part)
		}
	}
	if !moved {
		suffix = ""
	}
	// A restored database is not in WAL mode; OpenSQLite switches it.
	return backup, suffix, publish(draft, file)
}

func copyFile0600(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Sync(), out.Close())
}
