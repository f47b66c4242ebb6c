package sqlstore

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// revokedFile lists the API keys that were revoked, one per line, each with a checksum. A
// database that is restored from a backup does not make them valid again.
const revokedFile = "revoked"

type revocations struct {
	mu   sync.Mutex
	file string
	ids  map[string]bool
}

func revokedLine(id string) string {
	return fmt.Sprintf("%s %08x\n", id, crc32.ChecksumIEEE([]byte(id)))
}

// openRevocations revokes again the keys that the list in dir has and the database does not know, and
// adds to the list those that it lacks.
func openRevocations(ctx context.Context, db *sql.DB, dir string, log *slog.Logger) (*revocations, error) {
	r := &revocations{file: filepath.Join(dir, revokedFile), ids: map[string]bool{}}
	f, err := os.Open(r.file)
	switch {
	case err == nil:
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			id, _, _ := strings.Cut(lines.Text(), " ")
			if lines.Text()+"\n" != revokedLine(id) {
				log.Warn("a line of the list of revoked API keys is damaged", "file", r.file)
				continue
			}
			r.ids[id] = true
		}
		if err := errors.Join(lines.Err(), f.Close()); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "%s cannot be read", r.file)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, sandboxer.E(sandboxer.Unavailable, err, "%s cannot be read", r.file)
	}
	rows, err := db.QueryContext(ctx, `SELECT id, revoked_at FROM api_keys`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var again, missing []string
	for rows.Next() {
		var id string
		var at int64
		if err := rows.Scan(&id, &at); err != nil {
			return nil, err
		}
		switch revoked := at != micros(time.Time{}); {
		case revoked && !r.ids[id]:
			missing = append(missing, id)
		case !revoked && r.ids[id]:
			again = append(again, id)
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	for _, id := range again {
		if _, err := db.ExecContext(ctx, `UPDATE api_keys SET revoked_at = ? WHERE id = ?`, micros(time.Now()), id); err != nil {
			return nil, err
		}
		log.Warn("an API key that was revoked came back with an older database; it is revoked again", "key", id)
	}
	if len(missing) > 0 {
		if err := r.add(missing...); err != nil {
			log.Warn("revoked API keys cannot be noted outside of the database", "err", err)
		}
	}
	return r, nil
}

// add makes it durable that the keys are revoked.
func (r *revocations) add(ids ...string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	text := ""
	for _, id := range ids {
		if !r.ids[id] {
			text += revokedLine(id)
		}
	}
	if text == "" {
		return nil
	}
	f, err := os.OpenFile(r.file, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err == nil {
		if st, serr := f.Stat(); serr == nil && st.Size() > 0 { // a line that was cut short is none
			last := make([]byte, 1)
			if _, err := f.ReadAt(last, st.Size()-1); err == nil && last[0] != '\n' {
				text = "\n" + text
			}
		}
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Sync(), f.Close(), wholefile.SyncDir(filepath.Dir(r.file)))
	}
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the list of revoked API keys, %s, cannot be written", r.file).
			WithHint("look at the disk and the permissions of the data directory")
	}
	for _, id := range ids {
		r.ids[id] = true
	}
	return nil
}
