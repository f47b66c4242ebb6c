package capture

import (
	"fmt"
	"strings"
	"testing"
)

// Whatever the pieces, all is taken, and the beginning or the end is kept.
func TestCapture(t *testing.T) {
	for _, size := range []int{1, 7, 99, 100, 101, 5000} {
		first, last := &First{Max: 100}, &Last{Max: 100}
		var all strings.Builder
		for i := 0; all.Len() < 3000; i++ {
			p := []byte(fmt.Sprintf("%0*d", size, i))
			all.Write(p)
			for _, w := range []interface{ Write([]byte) (int, error) }{first, last} {
				if n, err := w.Write(p); n != len(p) || err != nil {
					t.Fatalf("%d: Write = %d, %v", size, n, err)
				}
			}
		}
		if got := first.String(); got != all.String()[:100] {
			t.Errorf("%d: First has %q", size, got)
		}
		if got := last.String(); got != all.String()[all.Len()-100:] {
			t.Errorf("%d: Last has %q", size, got)
		}
		if n := cap(last.b); n > 1000 {
			t.Errorf("%d: Last has a buffer of %d bytes", size, n)
		}
	}
}

func TestText(t *testing.T) {
	for said, want := range map[string]string{
		"":                         "",
		"one\n\ttwo":               "one\n\ttwo",
		"a\x1b[31mb\r\a\u202e\xff": "a\uFFFD[31mb\uFFFD\uFFFD\uFFFD\uFFFD",
		"1234567890123456789":      "1234567890123456…",
		"123456789012345ä":         "123456789012345\uFFFD…",
	} {
		if got := Text(said, 16); got != want {
			t.Errorf("Text(%q) = %q, want %q", said, got, want)
		}
	}
}
