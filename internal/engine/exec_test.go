package engine

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestCarried: arguments that are no UTF-8 reach a command as they are, with every shell
// that images have.
func TestCarried(t *testing.T) {
	plain := []string{"ls", "ünï", `back\slash`}
	if got := carried(plain); !slices.Equal(got, plain) {
		t.Errorf("%q became %q", plain, got)
	}
	args := []string{"printf", "%s\x01", "\xff", "a\n\n", "", `\0101 %s $HOME 'q' "q"`, "-n", "日本\xe6", "\n"}
	want := strings.Join(args[2:], "\x01") + "\x01"
	for _, shell := range [][]string{{"sh"}, {"dash"}, {"bash", "--posix"}, {"busybox", "sh"}} {
		if _, err := exec.LookPath(shell[0]); err != nil {
			t.Logf("there is no %s on this machine", shell[0])
			continue
		}
		c := append(slices.Clone(shell), carried(args)[1:]...)
		for i, a := range c {
			if i > 3 && strings.ContainsFunc(a, func(r rune) bool { return r < ' ' || r > '~' }) {
				t.Errorf("%q is not plain text", a)
			}
		}
		out, err := exec.Command(c[0], c[1:]...).Output()
		if err != nil || string(out) != want {
			t.Errorf("%s: %q, %v; want %q", shell, out, err, want)
		}
	}
}
