// Package adapters is the table of the adapters that this program contains. A new
// backend is one package next to this file and one line in it.
package adapters

import (
	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/composessh"
	"github.com/sand-boxer/sandboxer/adapters/daytona"
	"github.com/sand-boxer/sandboxer/adapters/docker"
	"github.com/sand-boxer/sandboxer/adapters/e2b"
	"github.com/sand-boxer/sandboxer/adapters/local"
	"github.com/sand-boxer/sandboxer/adapters/modal"
	"github.com/sand-boxer/sandboxer/adapters/process"
	"github.com/sand-boxer/sandboxer/adapters/remote"
	"github.com/sand-boxer/sandboxer/adapters/saasstub"
	"github.com/sand-boxer/sandboxer/adapters/vmpacker"
)

// All returns every adapter. The fake is not among them: tests add it to a table of
// their own, so that no installation can be talked into running commands unisolated.
func All() []sandboxer.Adapter {
	return []sandboxer.Adapter{
		local.Adapter,
		composessh.Adapter,
		daytona.Adapter,
		docker.Adapter,
		e2b.Adapter,
		modal.Adapter,
		process.Adapter,
		remote.Adapter,
		saasstub.Adapter,
		vmpacker.Adapter,
	}
}
