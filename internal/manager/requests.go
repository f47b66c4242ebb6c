package manager

import (
	"github.com/sand-boxer/sandboxer"
)

// The requests; what they mean is said in package sandboxer.
type (
	RestoreRequest   = sandboxer.RestoreRequest
	ForkRequest      = sandboxer.ForkRequest
	SnapshotRequest  = sandboxer.SnapshotRequest
	SnapshotAdoption = sandboxer.AdoptSnapshotRequest
	Extend           = sandboxer.ExtendRequest
	PauseRequest     = sandboxer.PauseRequest
	ResumeRequest    = sandboxer.ResumeRequest
	Adoption         = sandboxer.AdoptRequest
	NewKey           = sandboxer.KeyRequest
)
