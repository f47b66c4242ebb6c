package process

import (
	"context"

	"github.com/sand-boxer/sandboxer"
)

type caller struct{ s *supervisor }

func (c caller) call(ctx context.Context, method string, params, result any, token string) error {
	return sandboxer.E(sandboxer.Unsupported, nil, "not yet")
}
func (c caller) expect(token string) (<-chan arrival, func()) { return nil, func() {} }

func (s *supervisor) describeByCall(ctx context.Context) (d sandboxer.Description, err error) {
	return d, sandboxer.E(sandboxer.Unsupported, nil, "not yet")
}
