package agent

import (
	"hash/fnv"
	"io"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/procs"
)

// A tag identifies a command's processes even if they have left its session, dropped
// its environment and lost their parent: a limit on resident memory, which Linux no
// longer enforces, and gVisor never did.

// tagOf returns the tag of a mark.
func tagOf(mark string) uint64 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, mark)
	return h.Sum64()>>3 | 1<<60 // a limit above any real memory
}

// tagged starts a program with the tag of mark, if it has one. If the limit cannot be
// set, it starts the program without.
func (t *table) tagged(mark string, start func() (int, error)) (pid int, err error) {
	t.tagging.Lock()
	defer t.tagging.Unlock()
	var was unix.Rlimit
	if mark == "" || unix.Getrlimit(unix.RLIMIT_RSS, &was) != nil {
		return start()
	}
	if unix.Setrlimit(unix.RLIMIT_RSS, &unix.Rlimit{Cur: tagOf(mark), Max: was.Max}) == nil {
		defer func() { _ = unix.Setrlimit(unix.RLIMIT_RSS, &was) }()
	}
	return start()
}

// taggedAs returns the tag of a process, or another number.
func taggedAs(pid int) (uint64, error) {
	tag, _, err := procs.Limit(pid, "Max resident set")
	return tag, err
}
