//go:build linux

package vmpacker_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// installed returns a directory with the files that docs/how-to/run-as-a-service.md installs for the service.
func installed(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	bin, units := filepath.Join(dir, "usr/local/bin"), filepath.Join(dir, "etc/systemd/system")
	unit, err := os.ReadFile("../../contrib/systemd/sandboxer.service")
	if err := errors.Join(err, os.MkdirAll(bin, 0o755), os.MkdirAll(units, 0o755), os.WriteFile(filepath.Join(units, "sandboxer.service"), unit, 0o644)); err != nil {
		t.Fatal(err)
	}
	// An emulated machine on a busy one needs longer than any real machine.
	slow := filepath.Join(units, "sandboxer.service.d")
	if err := errors.Join(os.Mkdir(slow, 0o755), os.WriteFile(filepath.Join(slow, "slow.conf"), []byte("[Service]\nTimeoutStartSec=1h\nTimeoutStopSec=1h\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	if err := buildtest.Build(bin, buildtest.Products); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestServiceUnit: docs/how-to/run-as-a-service.md explains every restriction of the unit and names no other, and systemd
// understands the unit. TestDebian runs it, in make test-long.
func TestServiceUnit(t *testing.T) {
	text, err := os.ReadFile("../../contrib/systemd/sandboxer.service")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/how-to/run-as-a-service.md")
	if err != nil {
		t.Fatal(err)
	}
	unit := map[string]string{}
	_, body, _ := strings.Cut(string(text), "[Service]")
	for line := range strings.Lines(body) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(name, "#") {
			unit[name] = value
		}
	}
	for name, want := range map[string]string{
		"Type": "notify", "ExecStart": "/usr/local/bin/sandboxer serve", "ExecReload": "/usr/local/bin/sandboxer reload", // as the page installs them
		"KillMode": "process", "Delegate": "cpu memory pids", // sandboxes outlive the service
		"StateDirectory": "sandboxer", "CacheDirectory": "sandboxer", "RuntimeDirectory": "sandboxer sandboxer-roots", "RuntimeDirectoryPreserve": "yes",
	} {
		if unit[name] != want {
			t.Errorf("%s=%s; want %s", name, unit[name], want)
		}
	}

	_, restrictions, _ := strings.Cut(string(page), "## Restrictions of the unit")
	restrictions, rest, _ := strings.Cut(restrictions, "**Mounts of")
	quoted := regexp.MustCompile("`([A-Z][A-Za-z]+)(?:=([^`]*))?`")
	explained := map[string]bool{"ReadWritePaths": true, "SystemCallErrorNumber": true} // they belong to ProtectSystem and SystemCallFilter
	for line := range strings.Lines(restrictions) {
		if !strings.HasPrefix(line, "| ") {
			continue
		}
		first := strings.Split(line, "|")[1]
		for _, q := range quoted.FindAllStringSubmatch(first, -1) {
			value, ok := unit[q[1]]
			if absent := strings.HasPrefix(first, " no `"); ok == absent || q[2] != "" && value != q[2] {
				t.Errorf("the page says%s; the unit has %q", first, value)
			}
			explained[q[1]] = true
		}
	}
	_, without, _ := strings.Cut(restrictions, "The unit leaves out")
	for _, q := range quoted.FindAllStringSubmatch(without, -1) {
		if _, ok := unit[q[1]]; ok {
			t.Errorf("the page says that the unit leaves out %s", q[1])
		}
	}
	_, restricting, _ := strings.Cut(body, "OOMScoreAdjust=")
	restricting, _, _ = strings.Cut(restricting, "[Install]")
	for _, m := range regexp.MustCompile(`(?m)^([A-Z][A-Za-z]+)=`).FindAllStringSubmatch(restricting, -1) {
		if !explained[m[1]] {
			t.Errorf("the page does not explain %s", m[1])
		}
	}
	if len(explained) < 10 || without == "" {
		t.Errorf("the page's restrictions are %v", explained)
	}

	_, kept, _ := strings.Cut(rest, "**Capabilities.**")
	kept, _, _ = strings.Cut(kept, "The server never")
	var mask uint64
	for name := range strings.FieldsSeq(unit["CapabilityBoundingSet"]) {
		if !strings.Contains(kept, "`"+strings.TrimPrefix(name, "CAP_")+"`") {
			t.Errorf("the page does not say what %s is for", name)
		}
		n, ok := map[string]uint{"CAP_CHOWN": unix.CAP_CHOWN, "CAP_DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE, "CAP_FOWNER": unix.CAP_FOWNER, "CAP_SETUID": unix.CAP_SETUID,
			"CAP_SETGID": unix.CAP_SETGID, "CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN, "CAP_NET_ADMIN": unix.CAP_NET_ADMIN, "CAP_NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE}[name]
		if !ok {
			t.Errorf("the unit gives the server %s", name)
		}
		mask |= 1 << n
	}
	if got := fmt.Sprintf("%016x", mask); got != serviceCaps {
		t.Errorf("its capabilities are %s; want %s", got, serviceCaps)
	}

	t.Run("systemd-analyze", func(t *testing.T) {
		if _, err := exec.LookPath("systemd-analyze"); err != nil {
			t.Skip("there is no systemd-analyze on this machine")
		}
		file := filepath.Join(t.TempDir(), "sandboxer.service")
		// Files that are not installed here would be reported missing.
		if err := os.WriteFile(file, bytes.ReplaceAll(text, []byte("/usr/local/bin/sandboxer"), []byte("/bin/true")), 0o644); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command("systemd-analyze", "verify", "--man=no", file).CombinedOutput()
		if err != nil || bytes.Contains(out, []byte(file)) { // it also reports the machine's own units
			t.Errorf("%v: %s", err, out)
		}
	})
}

// serviceCaps are the capabilities that the unit names, as /proc/PID/status shows them.
const serviceCaps = "00000000002014cb"

// service runs the hardened unit in the machine h, under its own systemd: sandboxes start in
// it and outlive it, other machines are reached, nothing is left behind and there are no
// complaints.
func service(t *testing.T, e sandboxer.Execer, h sandboxer.Handle) {
	began := time.Now()
	// step runs a script in the machine; in it, box is the sandbox.
	step := func(name, script string) string {
		t.Helper()
		out := &capture.First{Max: 1 << 20}
		x, err := e.Exec(t.Context(), h, sandboxer.Cmd{
			Args: []string{"timeout", "3600", "sh", "-euc", `box=service; export SANDBOXER_PROGRESS=none
				none() { if "$@"; then echo "unexpected: $*"; exit 1; fi; }
				processes() { test -n "$(grep -lsa "^runsc-$1" /proc/[0-9]*/cmdline)"; }
				` + script},
			Stdout: out, Stderr: out,
		})
		if err != nil || x.Code != 0 {
			var journal bytes.Buffer
			_, _ = e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"journalctl", "-u", "sandboxer", "-n", "60", "--no-pager"}, Stdout: &journal})
			t.Fatalf("%s: %+v, %v\n%s\n%s", name, x, err, out, &journal)
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
	if rights != "CapBnd: "+serviceCaps+" CapEff: "+serviceCaps+" NoNewPrivs: 1" {
		t.Errorf("its rights: %s", rights)
	}
	step("nothing stays", `
		`+alive+`
		sandboxer destroy $box -q
		sandboxer audit | grep ' 0 violations'
		systemctl stop sandboxer
		none processes ''
		none ls -d /sys/fs/cgroup/sandboxer-* 2>/dev/null`)
	// An emulated machine on a busy one is slower than the server's time limit. Its error is correct.
	if said := step("nobody complained", `{ journalctl -u sandboxer -q --no-pager -o cat -p warning; journalctl -u sandboxer -q --no-pager -o cat | grep -E 'level=(WARN|ERROR)|left-over|Failed|error:'; } | grep -v 'did not finish within' || :`); said != "" {
		t.Errorf("the journal says: %s", said)
	}
	t.Log(step("systemd's own judgement is no worse than it was", `systemd-analyze security --no-pager --threshold=56 sandboxer | tail -n 1`))
	// Last, since an emulated machine may be too busy for the time limit of a connection. A login and
	// a look are enough: sandboxes there would need more of them.
	step("a machine is reached over SSH", `
		mkdir -p -m 700 /root/.ssh
		ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519 </dev/null
		cat /root/.ssh/id_ed25519.pub >>/root/.ssh/authorized_keys
		systemctl start sandboxer
		systemctl reload sandboxer
		until sandboxer host add self root@127.0.0.1 --yes </dev/null; do :; done
		systemctl stop sandboxer`)
}
