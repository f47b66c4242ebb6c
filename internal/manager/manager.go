// Package manager owns every rule about the life of a sandbox: who may have one,
// what it is made from, what it costs, when it ends, and what is done after a crash.
// The edges (REST, CLI, …) only translate.
//
// A sandbox moves through its states in one function (move), by compare-and-swap in
// the store, together with its ledger entries and its event. What a state owes
// outside (state.go of the root) is paid by a job; at most one job works on a
// sandbox at a time. Whatever was left unpaid, by a crash or a failure, is found and
// finished by the sweep: there is no other recovery code.
package manager

import (
	"log/slog"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// Extension is one configured extension, opened or not.
type Extension struct {
	Info    sandboxer.ExtensionInfo
	Backend *backend.Backend // nil when Info.Problem is set
}

// Options configure a Manager. Owner and Key are required.
type Options struct {
	Owner      string        // installation name, stamped on outside objects
	Key        []byte        // 32 bytes; seals environments in the store (AES-256-GCM)
	Log        *slog.Logger  // nil discards
	SweepEvery time.Duration // default 5s
	Grace      time.Duration // default 1m: at start nothing without a record is removed before it; also minimum age of an orphan sighting
	Workers    int           // concurrent sweep actions per extension, default 8
	Creates    int           // concurrent provisions per extension, default 2*NumCPU, at least 4; others queue
}

// Manager is the one owner of sandboxes. Its methods take the principal from ctx
// (sandboxer.WithPrincipal) and are safe for concurrent use. Every error has a
// sandboxer.Kind; without a principal it is Unauthenticated, without the scope
// Denied, and a sandbox of another tenant is as absent as one that never was.
type Manager struct{}
