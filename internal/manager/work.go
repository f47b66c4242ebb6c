package manager

import (
	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// A box is one sandbox, with its record as it was last read or written. Its methods change the record and the backend's
// objects, and update sb.
type box struct {
	m  *Manager
	sb *sandboxer.Sandbox
}

// work is a job on its sandbox.
type work struct {
	box
	j *job
}

// backed is work on a sandbox whose backend can be used.
type backed struct {
	work
	b *backend.Backend
}

func (m *Manager) box(sb *sandboxer.Sandbox) box { return box{m, sb} }

func (bx box) in(j *job) work { return work{bx, j} }

func (wk work) on(b *backend.Backend) backed { return backed{wk, b} }
