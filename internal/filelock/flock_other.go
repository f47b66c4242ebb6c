//go:build !unix

package filelock

import "os"

// There is no lock on this system: only one process may use what locks protect.
func lock(*os.File, Kind) error { return nil }

func (l *Lock) unlock() {}
