package suggest

import (
	"strings"
	"testing"
)

func TestNearest(t *testing.T) {
	words := []string{"memory", "cpus", "disk", "pids", "gpus"}
	for in, want := range map[string]string{
		"memroy": "memory", "cpuz": "cpus", "MEMORY": "memory", "mem": "", "zebra": "", "gpu": "gpus", "": "", "dosk": "disk", "dokk": "",
		strings.Repeat("x", 1000): "",
	} {
		if got := Nearest(in, words); got != want {
			t.Errorf("Nearest(%.20q) = %q; want %q", in, got, want)
		}
	}
}

// FuzzNearest wants an answer of the list or none, for anything.
func FuzzNearest(f *testing.F) {
	f.Add("profil", "profile")
	f.Add("", "a")
	f.Fuzz(func(t *testing.T, a, b string) {
		d := distance(a, b)
		if long := len(a) > 64 || len(b) > 64; d != distance(b, a) || d < 0 || !long && (d > max(len(a), len(b)) || a == b && d != 0) {
			t.Errorf("distance(%q, %q) = %d, and %d the other way round", a, b, d, distance(b, a))
		}
		if n := Nearest(a, []string{b}); n != "" && n != b {
			t.Errorf("Nearest(%q, %q) = %q", a, b, n)
		}
	})
}
