package checkpoint

import (
	"context"
	"io"
	"time"
)

// Blobs is a place for objects, each written once. Names are made of letters, digits,
// '.', '_', '-' and '/', never begin or end with '/', and have no empty, "." or ".."
// component; no object is empty. Methods are safe for concurrent use, also by several processes; an object
// that one process has put is visible to all at once.
//
// Kinds of error: NotFound for a missing object, Conflict for one that exists
// already, Exhausted when there is no room, Denied when the credentials do not suffice,
// Unavailable when it may work later.
type Blobs interface {
	// Put stores the content of r under name, unless there is such an object: Conflict. Once
	// it returns nil the object is complete and durable; before that, and after an
	// error, no reader sees any part of it. An error may be inconclusive: the object may
	// be there nevertheless. r is read to its end; an error of r fails the Put.
	Put(ctx context.Context, name string, r io.Reader) error
	// Get reads n bytes of the object from offset off; n < 0 means up to its end.
	Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error)
	// Stat describes the object.
	Stat(ctx context.Context, name string) (Blob, error)
	// List returns all objects whose names begin with prefix, in no special order.
	List(ctx context.Context, prefix string) ([]Blob, error)
	// Delete removes the object; absence is success.
	Delete(ctx context.Context, name string) error
	// Tidy removes the remains of Puts that were interrupted before the given time.
	Tidy(ctx context.Context, before time.Time) error
}

// Blob describes an object. Time is when it was put, by the store's clock.
type Blob struct {
	Name string
	Size int64
	Time time.Time
}
