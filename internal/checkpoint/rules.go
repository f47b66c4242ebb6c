package checkpoint

import (
	"strings"
	"unicode/utf8"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/safetar"
)

// Rules say what an archive may hold. The zero value is strict, with the limits that the
// fields name. In any case an archive that is cut short or followed by other data is refused, and so is
// a compressed one that decompresses to more than freeOutput and maxRatio allow.
type Rules = safetar.Rules

// maxRatio is how many bytes one byte of a compressed archive may decompress to, beyond freeOutput.
const maxRatio = 1000

// freeOutput is how much a compressed archive may decompress to whatever its size.
const freeOutput = 1 << 30

// refuse says why an archive is refused.
func refuse(format string, args ...any) *sandboxer.Error { return safetar.Refuse(format, args...) }

// compareNames orders names as a walk does that visits the entries of each directory in
// byte order, every directory right before its content. "a/b" comes before "a-b".
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
