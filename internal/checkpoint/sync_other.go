//go:build !linux

package checkpoint

import "os"

func beginSync(*os.File, int64, int64) {}
