package agent

import (
	"strings"
	"unicode/utf8"
)

// Names of files are bytes, and the wire's are UTF-8. A call with escapeHeader gets
// names escaped in its answer, and with the value escapeBoth also sends them escaped:
// each byte that is no part of UTF-8 is written %XX, and a percent sign too. Other
// callers get U+FFFD for such bytes.
const (
	escapeAnswer = "answer"
	escapeBoth   = "both"
)

const hexDigits = "0123456789ABCDEF"

func escapeName(s string) string {
	if utf8.ValidString(s) && !strings.Contains(s, "%") {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError && n == 1 || r == '%' {
			b.WriteByte('%')
			b.WriteByte(hexDigits[s[i]>>4])
			b.WriteByte(hexDigits[s[i]&15])
		} else {
			b.WriteString(s[i : i+n])
		}
		i += n
	}
	return b.String()
}

// unescapeName undoes escapeName; it keeps what escapeName does not write.
func unescapeName(s string) string {
	if !strings.Contains(s, "%") {
		return s
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			h, l := strings.IndexByte(hexDigits, s[i+1]), strings.IndexByte(hexDigits, s[i+2])
			if h >= 0 && l >= 0 {
				b = append(b, byte(h<<4|l))
				i += 2
				continue
			}
		}
		b = append(b, s[i])
	}
	return string(b)
}
