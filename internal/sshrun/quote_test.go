package sshrun

import (
	"bytes"
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func shells(t testing.TB) (found [][]string) {
	for _, sh := range [][]string{{"dash"}, {"bash", "--posix"}, {"bash"}, {"busybox", "sh"}} {
		if path, err := exec.LookPath(sh[0]); err == nil {
			found = append(found, append([]string{path}, sh[1:]...))
		}
	}
	if len(found) == 0 {
		t.Skip("there is no shell to read what was quoted")
	}
	return found
}

// FuzzQuote has real shells read back what was quoted.
func FuzzQuote(f *testing.F) {
	sh := shells(f)
	for _, s := range []string{"", "a", "a b", "'", "''", `\`, `\'`, "\n", "-n", "~", "$x`y`", "!!", "*", "\xff\xfe", "é", "a=b", "#", "\r\n", strings.Repeat("'", 50)} {
		f.Add(s, "x")
		f.Add("x", s)
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		if strings.ContainsRune(a+b, 0) || len(a)+len(b) > 10000 {
			return
		}
		for _, sh := range sh {
			cmd := exec.Command(sh[0], sh[1:]...)
			cmd.Stdin = strings.NewReader("printf '%s\\0' " + Quote(a, b) + " end\n")
			out, err := cmd.Output()
			if want := a + "\x00" + b + "\x00end\x00"; err != nil || string(out) != want {
				t.Errorf("%s: %q, %v; want %q", sh, out, err, want)
			}
		}
	})
}

// FuzzBoot has real shells run what a command travels as.
func FuzzBoot(f *testing.F) {
	sh := shells(f)
	f.Add("printf %s \"$1\"", "x", "v")
	f.Add("", "0", "\xed\n") // bash took the two together
	f.Add("printf '%s' \"$A$1\"\n.\n:.\n", "a\nb", "\n.\n")
	f.Fuzz(func(t *testing.T, comment, arg, value string) {
		c := Cmd{Script: "# " + strings.ReplaceAll(comment, "\n", " ") + "\nprintf '%s\\0' \"$1\" \"$A\"", Args: []string{arg}, Env: map[string]string{"A": value}}
		text, err := c.text("mark")
		if err != nil {
			if strings.ContainsRune(comment+arg+value, 0) && sandboxer.KindOf(err) == sandboxer.Invalid {
				return
			}
			t.Fatal(err)
		}
		if len(text) > 20000 {
			return
		}
		for _, sh := range sh {
			cmd := exec.Command(sh[0], append(sh[1:], "-c", strings.Replace(boot("x", false, false), "/bin/sh", Quote(sh...), 1))...)
			cmd.Stdin = bytes.NewReader(append(header(text), "input"...))
			out, err := cmd.Output()
			_, rest, _ := bytes.Cut(out, []byte("\n"))
			if want := arg + "\x00" + value + "\x00"; err != nil || string(rest) != want {
				t.Errorf("%s: %q, %v; want %q", sh, rest, err, want)
			}
		}
	})
}

// A script that arrives in part is not run.
func TestCutScriptDoesNotRun(t *testing.T) {
	c := Cmd{Script: "echo ran"}
	text, err := c.text("mark")
	if err != nil {
		t.Fatal(err)
	}
	whole := header(text)
	for _, sh := range shells(t) {
		for n := range len(whole) - 1 {
			if n%7 != 0 && n < len(whole)-10 {
				continue
			}
			cmd := exec.Command(sh[0], append(sh[1:], "-c", boot("x", false, false))...)
			cmd.Stdin = bytes.NewReader(whole[:n])
			out, err := cmd.Output()
			if len(out) > 0 || cmd.ProcessState.ExitCode() != 125 {
				t.Fatalf("%s, %d bytes of %d: %q, %v", sh, n, len(whole), out, err)
			}
		}
	}
}

func FuzzTarget(f *testing.F) {
	for _, s := range []string{"host", "u@host", "ssh://u@host:22", "-oProxyCommand=x", "u@-x", "u@[::1]", "ssh://[::1]:22", "a b", "@", "u@", "ssh://h:0", "u@h:22"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, addr string) {
		target, err := Target{Addr: addr}.check()
		if err != nil {
			if sandboxer.KindOf(err) != sandboxer.Invalid {
				t.Errorf("%v", err)
			}
			return
		}
		user, host := target.split()
		if host == "" || strings.HasPrefix(target.Addr, "-") || strings.HasPrefix(host, "-") || strings.ContainsAny(user+host, " \n\x00'\"`$;|&") {
			t.Errorf("%q was taken for a target: %q at %q", addr, user, host)
		}
		if again, err := target.check(); err != nil || again.Addr != target.Addr {
			t.Errorf("%q, checked again: %q, %v", target.Addr, again.Addr, err)
		}
	})
}

// What ssh would not take for a host and its port is refused with what it would.
func TestHostAndPort(t *testing.T) {
	_, err := Target{Addr: "ci@build-1:2222"}.check()
	var e *sandboxer.Error
	if !errors.As(err, &e) || e.Kind != sandboxer.Invalid || !strings.Contains(e.Hint, "--port 2222") || !strings.Contains(e.Hint, "ssh://ci@build-1:2222") {
		t.Errorf("%v, hint %q", err, e.Hint)
	}
	for _, addr := range []string{"ssh://ci@build-1:2222", "ci@::1", "[::1]"} {
		if _, err := (Target{Addr: addr}).check(); err != nil {
			t.Errorf("%s: %v", addr, err)
		}
	}
}

func TestSockets(t *testing.T) {
	if _, err := New(Options{Dir: t.TempDir() + strings.Repeat("/long", 20)}); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("a directory too long for sockets: %v", err)
	}
}

func TestPlain(t *testing.T) {
	for said, want := range map[string]string{
		"\x1b[91mE: no\x1b[0m\n":                                           "E: no\n",
		"\x1b[1;31;48;5;12mred\x1b[K \x1b[2J\x1b[1A":                       "red ",
		"\x1b]0;a title\x07and \x1b]8;;http://x\x1b\\a link\x1b]8;;\x1b\\": "and a link",
		"\x1b(B\x1b7\x1bMup\x1b=":                                          "up",
		"\u009b31mred":                                                     "red",
		"[91m is no sequence, \t nor is [0m":                               "[91m is no sequence, \t nor is [0m",
		"\x1b":                                                             "\x1b",
		"cut \x1b[":                                                        "cut ",
	} {
		if got := Plain(said); got != want {
			t.Errorf("%q: %q; want %q", said, got, want)
		}
	}
}
