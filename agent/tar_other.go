//go:build !unix

package agent

import "io/fs"

const openNonblock = 0

func isFull(error) bool { return false }

func linkID(fs.FileInfo) ([2]uint64, bool) { return [2]uint64{}, false }
