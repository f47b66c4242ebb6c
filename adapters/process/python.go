package process

import "github.com/sand-boxer/sandboxer"

func (p *program) python() error {
	return sandboxer.E(sandboxer.Unavailable, nil, "not yet")
}
func (p *program) unpackSDK(dir string) error { return nil }
