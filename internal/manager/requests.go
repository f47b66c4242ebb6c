package manager

import (
	"github.com/sand-boxer/sandboxer"
)

// The requests; package sandboxer documents them.
type (
	RestoreRequest  = sandboxer.RestoreRequest
	ForkRequest     = sandboxer.ForkRequest
	SnapshotRequest = sandboxer.SnapshotRequest
	Extend          = sandboxer.ExtendRequest
	PauseRequest    = sandboxer.PauseRequest
	ResumeRequest   = sandboxer.ResumeRequest
	NewKey          = sandboxer.KeyRequest
)
