//go:build linux

package vmpacker_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// installed returns a directory with what docs/operate.md says to install for the service.
func installed(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	bin, units := filepath.Join(dir, "usr/local/bin"), filepath.Join(dir, "etc/systemd/system")
	unit, err := os.ReadFile("../../contrib/systemd/sandboxer.service")
	if err := errors.Join(err, os.MkdirAll(bin, 0o755), os.MkdirAll(units, 0o755), os.WriteFile(filepath.Join(units, "sandboxer.service"), unit, 0o644)); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", bin+"/", "github.com/sand-boxer/sandboxer/cmd/...")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	return dir
}

// service runs the hardened unit in the machine h, whose own systemd is what is asked:
// sandboxes start in it and outlive it, other machines are reached, nothing is left and
// nothing is complained about.
func service(t *testing.T, e sandboxer.Execer, h sandboxer.Handle) {
	began := time.Now()
	// step runs a script in the machine; in it, box is the sandbox.
	step := func(name, script string) string {
		t.Helper()
		var out bytes.Buffer
		x, err := e.Exec(t.Context(), h, sandboxer.Cmd{
			Args: []string{"timeout", "600", "sh", "-euc", `box=service; export SANDBOXER_PROGRESS=none
				none() { if "$@"; then echo "unexpected: $*"; exit 1; fi; }
				processes() { test -n "$(grep -lsa "^runsc-$1" /proc/[0-9]*/cmdline)"; }
				` + script},
			Stdout: &out, Stderr: &out,
		})
		if err != nil || x.Code != 0 {
			var journal bytes.Buffer
			_, _ = e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"journalctl", "-u", "sandboxer", "-n", "60", "--no-pager"}, Stdout: &journal})
			t.Fatalf("%s: %+v, %v\n%s\n%s", name, x, err, &out, &journal)
		}
		t.Logf("%s: %s", time.Since(began).Round(time.Second), name)
		return strings.TrimSpace(out.String())
	}
	step("the service is started", `systemctl enable -q --now sandboxer; systemctl is-active sandboxer`)
	step("a sandbox is made, with this machine's programs and a limit on memory", `
		sandboxer create --name $box --ttl 5h -q
		sandboxer exec $box -- sh -c 'sleep 100000 </dev/null >/dev/null 2>&1 & echo $! >/root/pid; cksum /usr/lib/systemd/systemd >/root/sum; touch /usr/mine; cat /root/sum' </dev/null >/root/sum
		cksum /usr/lib/systemd/systemd | cmp - /root/sum
		test ! -e /usr/mine
		test "$(cat /sys/fs/cgroup/sandboxer-*/*/memory.max)" -gt 0`)
	alive := `sandboxer exec $box -- sh -c 'kill -0 $(cat /root/pid)' </dev/null`
	step("a restart leaves the sandbox and its process", `systemctl restart sandboxer; `+alive)
	step("so does a stop", `systemctl stop sandboxer; none systemctl is-active -q sandboxer; processes sandbox; systemctl daemon-reload; systemctl start sandboxer; `+alive)
	rights := step("it has the capabilities that the unit names, and no new ones", `grep -hE '^(CapEff|CapBnd|NoNewPrivs)' /proc/$(systemctl show -P MainPID sandboxer)/task/*/status | sort | uniq | tr -s '\t\n' '  '`)
	if rights != "CapBnd: 00000000002014cb CapEff: 00000000002014cb NoNewPrivs: 1" {
		t.Errorf("its rights: %s", rights)
	}
	step("nothing stays", `
		`+alive+`
		sandboxer destroy $box -q
		sandboxer audit | grep ' 0 violations'
		systemctl stop sandboxer
		none processes ''
		none ls -d /sys/fs/cgroup/sandboxer-* 2>/dev/null`)
	if said := step("nobody complained", `journalctl -u sandboxer -q --no-pager -o cat -p warning; journalctl -u sandboxer -q --no-pager -o cat | grep -E 'level=(WARN|ERROR)|left-over|Failed|error:' || :`); said != "" {
		t.Errorf("the journal says: %s", said)
	}
	t.Log(step("systemd's own judgement is no worse than it was", `systemd-analyze security --no-pager --threshold=56 sandboxer | tail -n 1`))
	// Last, since a machine that is emulated may be too busy for the patience of a connection.
	// That it was logged in to and looked at is enough: sandboxes there would need more of them.
	step("a machine is reached over SSH", `
		mkdir -p -m 700 /root/.ssh
		ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519 </dev/null
		cat /root/.ssh/id_ed25519.pub >>/root/.ssh/authorized_keys
		systemctl start sandboxer
		systemctl reload sandboxer
		until sandboxer host add self root@127.0.0.1 --yes </dev/null; do :; done
		systemctl stop sandboxer`)
}
