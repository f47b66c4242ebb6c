package sandboxer

import "context"

// Notes are the private records of one extension: small values by key, such as the host of a sandbox. Later processes
// find them again, and all processes of this installation share them. The broker offers them in Env.
//
// Values are sealed with the installation's key: without it they cannot be read, or changed unnoticed. A write is
// whole: if the process ends meanwhile, the note has the former value or the new one. A write that returned nil outlives
// a crash of the machine.
//
// A key has 1 to MaxNoteKeyBytes characters a-z, A-Z, 0-9, ".", "_" and "-". It begins with a letter or a digit. Kinds of
// every method: Invalid for another key, Unavailable if the notes cannot be read or written, and the errors of ctx.
// Methods are safe for concurrent use, also by several processes.
type Notes interface {
	// Get returns the note at key. Kinds: NotFound if there is none; Unavailable also for a note that is damaged or was
	// sealed with another key.
	Get(ctx context.Context, key string) (Note, error)
	// Put writes value to the note at key, which it makes if there is none. Kinds: Invalid for more than MaxNoteBytes;
	// Exhausted if the extension has MaxNotes notes.
	Put(ctx context.Context, key string, value []byte) error
	// Swap is Put under the condition that the note still has version, or that there is none if version is empty.
	// Otherwise it changes nothing. Kinds: those of Put; Conflict if the condition fails.
	Swap(ctx context.Context, key, version string, value []byte) error
	// Delete removes the note at key. Absence is success.
	Delete(ctx context.Context, key string) error
	// List returns the keys of all notes, sorted.
	List(ctx context.Context) ([]string, error)

	// Lock waits until no other caller holds a lock of key, and returns a function that releases it and must be called once.
	// The lock also ends with the process. It needs no note at key, and does not block reading and writing one. If ctx
	// is done already, Lock does not wait: it takes a lock that is free.
	Lock(ctx context.Context, key string) (unlock func(), err error)
	// RLock is Lock for callers that share the lock with each other. It waits only for holders by Lock.
	RLock(ctx context.Context, key string) (unlock func(), err error)
}

// A Note is one value of Notes.
type Note struct {
	Value []byte
	// Version is never empty. Every write gives the note another version, which no note of that key had before.
	Version string
}

// Bounds of Notes. If several callers make notes at the same moment, there may be a few more than MaxNotes.
const (
	MaxNoteKeyBytes = 200
	MaxNoteBytes    = 16 << 10 // of one value
	MaxNotes        = 16 << 10 // of one extension
)
