// Package notes keeps the notes of extensions (sandboxer.Notes) in files.
//
// A note is the file KEY.note, for its owner alone. It has "note", a byte for the form, the name of the key that it is
// sealed with (8 bytes), the nonce (12), and the value sealed by AES-256-GCM. The note's key is authenticated with it, so that
// no note can be put in the place of another. Each extension has a sealing key of its own, derived from the
// installation's. Locks are files in the directory lock.
package notes

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// Store implements sandboxer.Notes in one directory.
type Store struct {
	dir, extension string
	key            []byte
	head           []byte // magic, form and name of the key: how each file begins
	seal           cipher.AEAD
}

var _ sandboxer.Notes = (*Store)(nil)

const (
	dirName  = "notes" // in the extension's directory
	lockName = "lock"  // in that
	suffix   = ".note"

	magic   = "note"
	form    = 1
	keySize = 32
	idSize  = 8
)

// New returns the notes of an extension, below its private directory. installation is the installation's key. It makes
// nothing: the first write makes the directory.
func New(dir, extension string, installation []byte) *Store {
	s, err := WithKey(dir, extension, derive(installation, "sandboxer notes of "+extension))
	if err != nil {
		panic(err) // the key has the right length
	}
	return s
}

// WithKey is New for an extension in another process, which has got its key (Key). Kind: Invalid for an invalid key.
func WithKey(dir, extension string, key []byte) (*Store, error) {
	if len(key) != keySize {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the key that seals the notes of %s has %d bytes; want %d", extension, len(key), keySize)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "the key that seals the notes of %s cannot be used", extension)
	}
	s := &Store{dir: filepath.Join(dir, dirName), extension: extension, key: key, head: append([]byte{magic[0], magic[1], magic[2], magic[3], form}, derive(key, "name")[:idSize]...)}
	if s.seal, err = cipher.NewGCM(block); err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "the key that seals the notes of %s cannot be used", extension)
	}
	_ = wholefile.Sweep(s.dir) // drafts of processes that died are harmless
	return s, nil
}

// Key returns the key that seals the notes n, for the same extension in another process; nil if n has none.
func Key(n sandboxer.Notes) []byte {
	if s, ok := n.(*Store); ok {
		return s.key
	}
	return nil
}

func derive(key []byte, purpose string) []byte {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(purpose))
	return mac.Sum(nil)
}

// keyPattern matches keys: the names of files without a path.
var keyPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

func isKey(key string) bool {
	return len(key) <= sandboxer.MaxNoteKeyBytes && keyPattern.MatchString(key)
}

func check(key string) error {
	if !isKey(key) {
		return sandboxer.E(sandboxer.Invalid, nil, "%.60q is not a key of a note: want 1 to %d letters, digits, dots, hyphens and underscores", key, sandboxer.MaxNoteKeyBytes)
	}
	return nil
}

func (s *Store) file(key string) string { return filepath.Join(s.dir, key+suffix) }

func (s *Store) failed(err error, what, key string) error {
	return sandboxer.E(sandboxer.Unavailable, err, "note %s of %s cannot be %s", key, s.extension, what).
		WithHint("check that the server's account can use %s, and that its disk has room", s.dir)
}

// Get implements sandboxer.Notes.
func (s *Store) Get(_ context.Context, key string) (sandboxer.Note, error) {
	if err := check(key); err != nil {
		return sandboxer.Note{}, err
	}
	data, err := read(s.file(key), int64(len(s.head)+s.seal.NonceSize()+sandboxer.MaxNoteBytes+s.seal.Overhead()))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return sandboxer.Note{}, sandboxer.E(sandboxer.NotFound, nil, "%s has no note %s", s.extension, key)
	case errors.Is(err, errForm):
		return sandboxer.Note{}, Damaged(s, key, err)
	case err != nil:
		return sandboxer.Note{}, s.failed(err, "read", key)
	}
	return s.open(key, data)
}

var errForm = errors.New("this is no note")

// read returns the content of a regular file of at most that many bytes.
func read(name string, most int64) ([]byte, error) {
	fi, err := os.Lstat(name) // before it is opened: opening a pipe waits
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() || fi.Size() > most {
		return nil, errForm
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		err = errForm
	}
	return data, err
}

// open is the reverse of sealed.
func (s *Store) open(key string, data []byte) (n sandboxer.Note, err error) {
	switch nonce := s.seal.NonceSize(); {
	case len(data) > len(magic) && bytes.HasPrefix(data, []byte(magic)) && data[len(magic)] > form:
		return n, sandboxer.E(sandboxer.Unavailable, nil, "note %s of %s was written by a newer sandboxer", key, s.extension).WithHint("upgrade this program")
	case len(data) < len(s.head)+nonce:
		return n, Damaged(s, key, errForm)
	case !bytes.HasPrefix(data, s.head):
		return n, Damaged(s, key, errors.New("it was sealed with another key, or it is no note"))
	default:
		at, sealed := data[len(s.head):][:nonce], data[len(s.head)+nonce:]
		if n.Value, err = s.seal.Open(nil, at, sealed, []byte(key)); err != nil {
			return n, Damaged(s, key, err)
		}
		n.Version = hex.EncodeToString(at)
		return n, nil
	}
}

func (s *Store) sealed(key string, value []byte) []byte {
	out := append(make([]byte, 0, len(s.head)+s.seal.NonceSize()+len(value)+s.seal.Overhead()), s.head...)
	nonce := make([]byte, s.seal.NonceSize())
	rand.Read(nonce)
	return s.seal.Seal(append(out, nonce...), nonce, value, []byte(key))
}

// Damaged returns the error for a note of n whose content no extension writes. Kind: Unavailable.
func Damaged(n sandboxer.Notes, key string, cause error) error {
	at := "the note"
	if s, ok := n.(*Store); ok {
		at = s.file(key)
	}
	return sandboxer.E(sandboxer.Unavailable, cause, "note %s cannot be read: it is damaged or was sealed with another key", key).
		WithHint("put back the installation's key if it was replaced; otherwise remove %s: the extension then no longer knows the object that it describes", at)
}

// Put implements sandboxer.Notes.
func (s *Store) Put(ctx context.Context, key string, value []byte) error {
	return s.write(ctx, key, value, nil)
}

// Swap implements sandboxer.Notes.
func (s *Store) Swap(ctx context.Context, key, version string, value []byte) error {
	return s.write(ctx, key, value, &version)
}

func (s *Store) write(ctx context.Context, key string, value []byte, version *string) error {
	if err := check(key); err != nil {
		return err
	}
	if len(value) > sandboxer.MaxNoteBytes {
		return sandboxer.E(sandboxer.Invalid, nil, "a note of %d bytes is too large: %s can keep %d under %s", len(value), s.extension, sandboxer.MaxNoteBytes, key)
	}
	unlock, err := s.writing(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	if version != nil {
		now, err := s.Get(ctx, key)
		if err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
			return err
		}
		if now.Version != *version {
			return sandboxer.E(sandboxer.Conflict, nil, "note %s of %s was changed meanwhile", key, s.extension)
		}
	}
	if err := s.room(key); err != nil {
		return err
	}
	data := s.sealed(key, value)
	if err := inDir(s.dir, func() error { return wholefile.Write(s.file(key), data) }); err != nil {
		return s.failed(err, "written", key)
	}
	return nil
}

// room refuses a further note if there are MaxNotes.
func (s *Store) room(key string) error {
	if _, err := os.Lstat(s.file(key)); !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	all, err := os.ReadDir(s.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return s.failed(err, "counted", key)
	}
	if n := len(all) - 1; n >= sandboxer.MaxNotes { // one entry is the directory of locks
		return sandboxer.E(sandboxer.Exhausted, nil, "%s has %d notes, and can have no more", s.extension, n).
			WithHint("destroy sandboxes of %s that are not needed", s.extension)
	}
	return nil
}

// Delete implements sandboxer.Notes.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := check(key); err != nil {
		return err
	}
	unlock, err := s.writing(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	err = os.Remove(s.file(key))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = wholefile.SyncDir(s.dir)
	}
	if err != nil {
		return s.failed(err, "removed", key)
	}
	return nil
}

// List implements sandboxer.Notes.
func (s *Store) List(context.Context) (keys []string, err error) {
	all, err := os.ReadDir(s.dir) // in order
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the notes of %s cannot be listed", s.extension).
			WithHint("check that the server's account can read %s", s.dir)
	}
	for _, d := range all {
		if key, ok := strings.CutSuffix(d.Name(), suffix); ok && isKey(key) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys) // "a.note" comes after "a-b.note", and "a" before "a-b"
	return keys, nil
}

// Lock implements sandboxer.Notes.
func (s *Store) Lock(ctx context.Context, key string) (unlock func(), err error) {
	if err := check(key); err != nil {
		return nil, err
	}
	l, err := s.lock(ctx, key+".lock", filelock.Exclusive)
	if err != nil {
		return nil, err
	}
	return l.Remove, nil
}

// RLock implements sandboxer.Notes.
func (s *Store) RLock(ctx context.Context, key string) (unlock func(), err error) {
	if err := check(key); err != nil {
		return nil, err
	}
	l, err := s.lock(ctx, key+".lock", filelock.Shared)
	if err != nil {
		return nil, err
	}
	return l.Release, nil // others may share it
}

// writing is held while a note is compared and written. It is separate from Lock, whose holder writes. Several keys share
// a file, which stays: making and removing one for each write would double the work of the file system.
func (s *Store) writing(ctx context.Context, key string) (unlock func(), err error) {
	h := fnv.New32a()
	_, _ = io.WriteString(h, key)
	l, err := s.lock(ctx, fmt.Sprintf("%02d.write", h.Sum32()%writers), filelock.Exclusive)
	if err != nil {
		return nil, err
	}
	return l.Release, nil
}

// writers is the number of notes that are written at the same time, at most.
const writers = 32

func (s *Store) lock(ctx context.Context, name string, k filelock.Kind) (l *filelock.Lock, err error) {
	dir := filepath.Join(s.dir, lockName)
	err = inDir(dir, func() (err error) {
		l, err = filelock.Take(ctx, filepath.Join(dir, name), k)
		return err
	})
	switch {
	case err == nil:
		return l, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	return nil, sandboxer.E(sandboxer.Unavailable, err, "the lock %s of %s cannot be taken", name, s.extension).
		WithHint("check that the server's account can use %s, and that its disk has room", dir)
}

// inDir calls do, which needs dir, and makes dir if it is missing.
func inDir(dir string, do func() error) error {
	err := do()
	for range 3 { // another process may be removing it
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
		if err = os.MkdirAll(dir, 0o700); err == nil {
			err = do()
		}
	}
	return err
}

// Move makes notes of the files that former versions kept in dir, as KEY+suffix, and removes them. An interrupted move
// is continued: a note that exists already is newer than the file. Every extension that keeps notes calls it when it
// is opened. Kind: Unavailable, also if n is nil.
func Move(ctx context.Context, n sandboxer.Notes, dir, suffix string) error {
	if n == nil {
		return sandboxer.E(sandboxer.Unavailable, nil, "the extension cannot keep its records: it was opened without notes (Env.Notes)").
			WithHint("run it in the server itself, or with a server of this version")
	}
	if files, err := os.ReadDir(dir); errors.Is(err, fs.ErrNotExist) || err == nil && len(files) == 0 {
		return nil
	}
	unlock, err := n.Lock(ctx, "former")
	if err != nil {
		return err
	}
	defer unlock()
	files, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Unavailable, err, "%s, which has records of an earlier version, cannot be read", dir)
	}
	for _, f := range files {
		key, ok := strings.CutSuffix(f.Name(), suffix)
		if !ok || !isKey(key) {
			continue // unfinished files of a former server, or of another program
		}
		if err := move(ctx, n, key, filepath.Join(dir, f.Name())); err != nil {
			return sandboxer.E(sandboxer.Unavailable, err, "the record in %s, of an earlier version, cannot be moved to the notes: %s", filepath.Join(dir, f.Name()), sandboxer.Message(err)).
				WithHint("if it is damaged, remove it: the extension then no longer knows the object that it describes")
		}
	}
	_ = os.Remove(dir) // remaining files are harmless
	return nil
}

// maxFormer bounds a record of an earlier version, with a stamp.
const maxFormer = 256 << 10

func move(ctx context.Context, n sandboxer.Notes, key, name string) error {
	data, err := read(name, maxFormer)
	if err != nil {
		return err
	}
	if len(data) > sandboxer.MaxNoteBytes { // its stamp: a copy of the broker's record, for which notes have no room
		var fields map[string]json.RawMessage
		if _, err := strictjson.DecodeStored(data, &fields); err != nil {
			return err
		}
		delete(fields, "stamp")
		if data, err = json.Marshal(fields); err != nil {
			return err
		}
	}
	if err := n.Swap(ctx, key, "", data); err != nil && sandboxer.KindOf(err) != sandboxer.Conflict {
		return err
	}
	return os.Remove(name)
}
