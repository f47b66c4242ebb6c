package manager

import (
	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// A box is one sandbox, by its record as it was last read or written. Its methods change the record and the
// objects outside, and bring sb up to date.
type box struct {
	m  *Manager
	sb *sandboxer.Sandbox
}

// work is what a job does with its sandbox.
type work struct {
	box
	j *job
}

// backed is work with the backend of the sandbox, which can be used.
type backed struct {
	work
	b *backend.Backend
}

func (m *Manager) box(sb *sandboxer.Sandbox) box { return box{m, sb} }

func (bx box) in(j *job) work { return work{bx, j} }

func (wk work) on(b *backend.Backend) backed { return backed{wk, b} }
