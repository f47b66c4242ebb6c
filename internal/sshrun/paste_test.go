package sshrun

import (
	"os/exec"
	"strings"
	"testing"
)

// TestPaste: what a target is shown as is what ssh takes, and what Target takes again.
func TestPaste(t *testing.T) {
	for want, target := range map[string]Target{
		"root@127.0.0.1":              {Addr: "root@127.0.0.1"},
		"build":                       {Addr: "build"},
		"ssh://root@127.0.0.1:18222":  {Addr: "root@127.0.0.1", Port: 18222},
		"ssh://build:22":              {Addr: "build", Port: 22},
		"ssh://me@[2001:db8::1]:2222": {Addr: "me@2001:db8::1", Port: 2222},
		"ssh://root@127.0.0.1:18223":  {Addr: "ssh://root@127.0.0.1:18223"},
	} {
		got := target.Paste()
		if got != want {
			t.Errorf("%+v is shown as %q; want %q", target, got, want)
		}
		again, err := Target{Addr: got}.check()
		first, ferr := target.check()
		if err != nil || ferr != nil || again.Addr != first.Addr || again.Port != first.Port {
			t.Errorf("%q is read as %q, port %d, %v; want %q, %d, %v", got, again.Addr, again.Port, err, first.Addr, first.Port, ferr)
		}
		if _, err := exec.LookPath("ssh"); err == nil && first.Port != 0 && !strings.Contains(got, "[") { // ssh wants the port of those apart
			out, err := exec.Command("ssh", "-F", "/dev/null", "-G", got).CombinedOutput()
			if _, host := first.split(); err != nil || !strings.Contains(string(out), "hostname "+host+"\n") {
				t.Errorf("ssh %s: %v\n%.300s", got, err, out)
			}
		}
	}
}
