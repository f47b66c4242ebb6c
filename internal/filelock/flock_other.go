//go:build !unix

package filelock

import "os"

// There is nothing to lock with here: only one process may use what locks are for.
func lock(*os.File, Kind) error { return nil }

func (l *Lock) unlock() {}
