package checkpoint

import (
	"path"
	"strings"
	"unicode/utf8"

	"github.com/sand-boxer/sandboxer"
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
	Entries   int   // default 1,000,000; one takes some 400 bytes of memory
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
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	if r.Bytes == 0 {
		r.Bytes = 64 << 30
	}
	if r.FileBytes == 0 {
		r.FileBytes = r.Bytes
	}
	def(&r.Entries, 1_000_000)
	def(&r.PathBytes, 4096)
	def(&r.NameBytes, 255)
	def(&r.Depth, 256)
	def(&r.Ratio, 1000)
	return r
}

// freeOutput may come out of a compressed archive whatever its size.
const freeOutput = 1 << 30

// refuse says why an archive is not taken.
func refuse(format string, args ...any) *sandboxer.Error {
	return sandboxer.E(sandboxer.Invalid, nil, "the archive is refused: "+format, args...)
}

// cleanName returns name in the form "a/b", or "." for the root. rules must have their
// defaults.
func cleanName(name string, rules Rules) (string, error) {
	switch {
	case name == "":
		return "", refuse("an entry has no name")
	case len(name) > rules.PathBytes:
		return "", refuse("a name has %d bytes (%.40q…); %d is the limit", len(name), name, rules.PathBytes)
	case strings.IndexByte(name, 0) >= 0:
		return "", refuse("%q has a zero byte in its name", name)
	case name[0] == '/':
		return "", refuse("%q is an absolute name", name)
	}
	depth := 0
	for c := range strings.SplitSeq(name, "/") {
		switch {
		case c == "..":
			return "", refuse("%q leads out of the root", name)
		case len(c) > rules.NameBytes:
			return "", refuse("a name in %.40q… has %d bytes; %d is the limit", name, len(c), rules.NameBytes)
		case c != "" && c != ".":
			depth++
		}
	}
	if depth > rules.Depth {
		return "", refuse("%.40q… lies %d directories deep; %d is the limit", name, depth, rules.Depth)
	}
	return path.Clean(name), nil
}

// checkTarget looks at the target of the symbolic link name and reports whether it
// stays below the root.
//
// ".." is followed only at the beginning of a target: there it leaves directories that
// are known to be real, whereas after a name it leaves whatever that name links to.
func checkTarget(name, target string, rules Rules) (inside bool, err error) {
	switch {
	case target == "":
		return false, refuse("the symbolic link %q has no target", name)
	case len(target) > rules.PathBytes:
		return false, refuse("the target of the symbolic link %q has %d bytes; %d is the limit", name, len(target), rules.PathBytes)
	case strings.IndexByte(target, 0) >= 0:
		return false, refuse("the target of the symbolic link %q has a zero byte", name)
	}
	inside = target[0] != '/'
	room := strings.Count(name, "/")
	named := false
	for c := range strings.SplitSeq(target, "/") {
		switch {
		case c == "" || c == ".":
		case c != "..":
			named = true
		case named || room == 0:
			inside = false
		default:
			room--
		}
	}
	if !inside && !rules.OutsideLinks {
		return false, refuse("the symbolic link %q leads to %q, out of the root", name, target).
			WithHint("allow links that lead outside if the archive comes from a sandbox and goes to one")
	}
	return inside, nil
}

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
