// Package capture keeps a bounded part of the output of programs, guests and hosts, and makes it fit to be shown. The
// output may be anything, and endless.
package capture

import (
	"strings"
	"sync"
	"unicode"
)

// First keeps the first Max bytes. It is safe for concurrent use.
type First struct {
	Max int

	mu sync.Mutex
	b  []byte
}

func (f *First) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.b = append(f.b, p[:min(len(p), f.Max-len(f.b))]...)
	return len(p), nil
}

// String returns what was kept.
func (f *First) String() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return string(f.b)
}

// Last keeps the last Max bytes. It is safe for concurrent use.
type Last struct {
	Max int

	mu sync.Mutex
	b  []byte // up to twice Max, so that few writes move what is kept
}

func (l *Last) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = append(l.b, p[max(0, len(p)-l.Max):]...)
	if len(l.b) > 2*l.Max {
		l.b = append(l.b[:0], l.b[len(l.b)-l.Max:]...)
	}
	return len(p), nil
}

// String returns what was kept.
func (l *Last) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.b[max(0, len(l.b)-l.Max):])
}

// Text is the first max bytes of said, fit to be shown and stored: U+FFFD replaces unprintable characters, except newlines and
// tabs, and an ellipsis the rest.
func Text(said string, max int) string {
	text := strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, strings.ToValidUTF8(said[:min(len(said), max)], "\uFFFD"))
	if len(said) > max {
		text += "…"
	}
	return text
}
