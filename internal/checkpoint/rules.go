package checkpoint

import (
	"strings"
	"unicode/utf8"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/safetar"
)

// Rules say what an archive may hold. The zero value is strict, with the limits that the
// fields name. Whatever they say, an archive that is cut short or followed by something is refused, and so is
// a compressed one of which more comes out than freeOutput and maxRatio allow.
type Rules = safetar.Rules

// maxRatio is how many bytes may come out of one byte of a compressed archive, beyond freeOutput.
const maxRatio = 1000

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
