package agent

import (
	"testing"
	"unicode/utf8"
)

func FuzzEscapeName(f *testing.F) {
	for _, s := range []string{"", "a", "%", "%41", "\xff", "a\xe6\x97", "日本", "\ufffd", "%%FF\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e := escapeName(s)
		if got := unescapeName(e); got != s || !utf8.ValidString(e) {
			t.Errorf("%q is %q on the wire and %q after it", s, e, got)
		}
		_ = unescapeName(s)
	})
}
