package sinks

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// A fileOutlet adds lines to the file of that name, one for each event. It makes the file if there is none.
type fileOutlet struct{ name string }

func (fileOutlet) close() {}

// deliver adds the events of batch that are not in the file yet: a process that died may have written them.
func (o fileOutlet) deliver(_ context.Context, batch []item) error {
	failed := func(err error) error { return o.failed("written", err) }
	f, err := os.OpenFile(o.name, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return failed(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return failed(err)
	}
	if !st.Mode().IsRegular() {
		return sandboxer.E(sandboxer.Unavailable, nil, "%s is not a regular file", o.name)
	}
	last, err := o.last(f, st.Size())
	if err != nil {
		return err
	}
	if i := slices.IndexFunc(batch, func(it item) bool { return it.id == last }); i >= 0 {
		batch = batch[i+1:]
	}
	if len(batch) == 0 {
		return nil
	}
	if _, err := f.Write(append(joined(batch, "\n"), '\n')); err != nil {
		return failed(err)
	}
	if err := f.Sync(); err != nil {
		return failed(err)
	}
	if st.Size() > 0 {
		return nil
	}
	dir, err := os.Open(filepath.Dir(o.name))
	if err != nil {
		return failed(err)
	}
	defer dir.Close()
	if err := dir.Sync(); err != nil {
		return failed(err)
	}
	return nil
}

// begin is how every line begins.
const begin = `{"specversion":`

// failed is the error for a file that cannot be read or written because of err.
func (o fileOutlet) failed(what string, err error) error {
	why := err
	if p, ok := errors.AsType[*fs.PathError](err); ok { // which repeats the name
		why = p.Err
	}
	return sandboxer.E(sandboxer.Unavailable, err, "the file %s cannot be %s: %v", o.name, what, why)
}

// last returns the ID of the last event in the file, and removes what a process that died has left of another one. It
// touches no file that has other content.
func (o fileOutlet) last(f *os.File, size int64) (id string, err error) {
	if size == 0 {
		return "", nil
	}
	foreign := sandboxer.E(sandboxer.Unavailable, nil, "the file %s does not end with an event; nothing is appended to it", o.name)
	from := max(0, size-2*maxBytes)
	tail := make([]byte, size-from)
	if _, err := f.ReadAt(tail, from); err != nil && err != io.EOF {
		return "", o.failed("read", err)
	}
	end := bytes.LastIndexByte(tail, '\n') + 1
	torn := tail[end:]
	if n := min(len(torn), len(begin)); string(torn[:n]) != begin[:n] || end == 0 && from > 0 {
		return "", foreign
	}
	if end > 0 {
		line := tail[bytes.LastIndexByte(tail[:end-1], '\n')+1 : end]
		var e struct {
			ID string `json:"id"`
		}
		if _, err := strictjson.DecodeStored(line, &e); err != nil || !bytes.HasPrefix(line, []byte(begin)) || e.ID == "" {
			return "", foreign
		}
		id = e.ID
	}
	if len(torn) > 0 {
		if err := f.Truncate(size - int64(len(torn))); err != nil {
			return "", o.failed("written", err)
		}
	}
	return id, nil
}
