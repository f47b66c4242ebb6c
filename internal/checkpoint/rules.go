package checkpoint

import (
	"strings"
	"unicode/utf8"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/safetar"
)

// Rules say what an archive may hold. The zero value is strict, with the limits that
// the fields name; a limit of 0 means that default.
//
// Whatever the rules: absolute names, "..", entries below something that is no
// directory, duplicate names, hard links to anything but an earlier file, sparse files,
// devices and archives that are cut short or followed by something are refused.
type Rules struct {
	Bytes     int64 // of all files together; default 64 GiB
	FileBytes int64 // of one file; default Bytes
	Entries   int   // default 1,000,000; one takes some 500 bytes of memory
	PathBytes int   // of a name or link target; default 4096
	NameBytes int   // of one component; default 255
	Depth     int   // components of a name; default 256
	// Ratio bounds how many bytes may come out of one byte of a compressed archive,
	// beyond the first GiB; default 1000.
	Ratio int

	// OutsideLinks keeps symbolic links that are absolute or lead out of the root. They
	// are harmless where they came from, in a sandbox; programs on the broker's machine
	// must not follow them.
	OutsideLinks bool
	// SkipSpecial leaves out devices, FIFOs and sockets instead of refusing the archive.
	SkipSpecial bool
	// FoldCase refuses names that differ by case only, for file systems that do not
	// tell them apart.
	FoldCase bool
}

func (r Rules) withDefaults() Rules {
	t := r.tar().WithDefaults()
	r.Bytes, r.FileBytes, r.Entries, r.PathBytes, r.NameBytes, r.Depth = t.Bytes, t.FileBytes, t.Entries, t.PathBytes, t.NameBytes, t.Depth
	if r.Ratio == 0 {
		r.Ratio = 1000
	}
	return r
}

// tar is what of the rules holds for any archive.
func (r Rules) tar() safetar.Rules {
	return safetar.Rules{Bytes: r.Bytes, FileBytes: r.FileBytes, Entries: r.Entries, PathBytes: r.PathBytes, NameBytes: r.NameBytes, Depth: r.Depth,
		OutsideLinks: r.OutsideLinks, SkipSpecial: r.SkipSpecial, FoldCase: r.FoldCase}
}

// freeOutput may come out of a compressed archive whatever its size.
const freeOutput = 1 << 30

// refuse says why an archive is not taken.
func refuse(format string, args ...any) *sandboxer.Error { return safetar.Refuse(format, args...) }

// compareNames orders names as a walk does that visits the entries of each directory in
// byte order, every directory right before what is in it. "a/b" comes before "a-b".
func compareNames(a, b string) int {
	for i := range min(len(a), len(b)) {
		if x, y := a[i], b[i]; x != y {
			switch {
			case x == '/':
				return -1
			case y == '/':
				return 1
			case x < y:
				return -1
			}
			return 1
		}
	}
	return len(a) - len(b)
}

// display is name for JSON, which holds UTF-8 only.
func display(name string) string {
	if utf8.ValidString(name) {
		return name
	}
	return strings.ToValidUTF8(name, "\uFFFD")
}
