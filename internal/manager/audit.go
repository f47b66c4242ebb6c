package manager

import (
	"context"

	"github.com/sand-boxer/sandboxer"
)

// Audit compares the books with themselves and with every backend.
func (m *Manager) Audit(ctx context.Context) (Audit, error) {
	return Audit{}, sandboxer.E(sandboxer.Unsupported, nil, "not built yet")
}
