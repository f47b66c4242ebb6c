//go:build linux

package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
)

// seize is a list of root's attempts inside on the agent's programs; each line must fail.
const seize = `
cd /
d=/.sandboxer; a=$d/sandboxer-agent
took() { echo "$1"; }
echo x 2>/dev/null >$a && took write
echo x 2>/dev/null >>$d/pause && took append
touch 2>/dev/null $d/new && took create
rm -f $a 2>/dev/null && took remove
mv $a $d/old 2>/dev/null && took rename
mv $d /old 2>/dev/null && took "rename the directory"
rmdir $d 2>/dev/null && took "remove the directory"
chmod 0 $a 2>/dev/null && took chmod
chmod 0 $d 2>/dev/null && took "chmod of the directory"
chown 1 $a 2>/dev/null && took chown
ln -f /bin/sh $a 2>/dev/null && took link
cp /bin/sh $a 2>/dev/null && took copy
touch -d 2001-01-01 $a 2>/dev/null && took touch
umount $d 2>/dev/null && took umount
umount -l $d 2>/dev/null && took "lazy umount"
mkdir -p /m; echo fake >/m/sandboxer-agent
mount --bind /m $d 2>/dev/null && took "bind over it"
mount -o remount,rw $d 2>/dev/null && took remount
unshare -Urm sh -c "mount --bind /m $d" 2>/dev/null
chroot /m /sandboxer-agent 2>/dev/null && took chroot
true`

// TestGuestRootCannotReplaceTheAgent lets root of sandboxes of every origin try to replace
// the agent's programs.
func TestGuestRootCannotReplaceTheAgent(t *testing.T) {
	e := openTest(t)
	check := func(t *testing.T, h sandboxer.Handle) {
		t.Helper()
		want, err := os.ReadFile(e.program)
		if err != nil {
			t.Fatal(err)
		}
		if got := sh(t, e, h, seize); got != "" {
			t.Errorf("root inside could:\n%s", got)
		}
		var have bytes.Buffer
		if _, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"cat", agentPath}, Stdout: &have}); err != nil || !bytes.Equal(have.Bytes(), want) {
			t.Errorf("the agent inside has %d bytes, %v; ours %d", have.Len(), err, len(want))
		}
		if fi, err := e.StatFile(t.Context(), h, "/bin"); err != nil || fi.Path != "/bin" {
			t.Errorf("StatFile = %+v, %v", fi, err)
		}
		b, err := e.of(h)
		if err != nil {
			t.Fatal(err)
		}
		if !b.rec.AgentMount {
			t.Error("its record does not say that the agent is mounted")
		}
	}
	h := up(t, e, sandboxer.Spec{})
	t.Run("new", func(t *testing.T) { check(t, h) })
	t.Run("restored", func(t *testing.T) { check(t, restored(t, e, sandboxer.Spec{}, snapshot(t, e, h))) })
	t.Run("restored asleep", func(t *testing.T) {
		check(t, restored(t, e, sandboxer.Spec{}, snapshot(t, e, up(t, e, sandboxer.Spec{}))))
	})
	t.Run("claimed", func(t *testing.T) {
		spec := sandboxer.Spec{Warm: true}
		h := up(t, e, spec)
		spec.ID, spec.Generation, spec.Owner, spec.Warm = h.SandboxID, h.Generation, e.env.Owner, false
		if _, err := e.Claim(t.Context(), h, spec); err != nil {
			t.Fatal(err)
		}
		check(t, h)
	})
	t.Run("image", func(t *testing.T) {
		root := filepath.Join(t.TempDir(), "root")
		box, err := os.ReadFile(busybox(t))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []string{"sh", "cat", "rm", "mv", "rmdir", "chmod", "chown", "ln", "cp", "touch", "umount", "mkdir", "mount", "chroot", "unshare"} {
			if err := os.MkdirAll(filepath.Join(root, "bin"), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(root, "bin", n), box, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		// An image that contains an agent of its own.
		if err := os.MkdirAll(filepath.Join(root, agentDir), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, agentPath), box, 0o777); err != nil {
			t.Fatal(err)
		}
		h := up(t, e, sandboxer.Spec{Image: "dir:" + root})
		check(t, h)
		check(t, restored(t, e, sandboxer.Spec{}, snapshot(t, e, h)))
	})
}

// TestGuestRootCannotAnswerForTheAgent lets root inside listen at the agent's name, before the agent
// has started and while it runs, and in a copy: it gets no connection and its answers are not trusted,
// and the error says what is wrong.
func TestGuestRootCannotAnswerForTheAgent(t *testing.T) {
	e := openTest(t)
	socket := agentSocket(true)
	forget := func(h sandboxer.Handle) { // unused connections belong to the agent
		t.Helper()
		b, err := e.of(h)
		if err != nil {
			t.Fatal(err)
		}
		e.drop(b.name)
	}
	impersonated := func(h sandboxer.Handle) (end func()) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		out, in := io.Pipe()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{filepath.Join(helpers, "tool"), "impersonate", socket}, Stdout: in})
			in.CloseWithError(errors.Join(err, io.EOF))
		}()
		if _, err := io.ReadFull(out, make([]byte, len("there"))); err != nil {
			t.Fatal(err)
		}
		go io.Copy(io.Discard, out)
		return func() { cancel(); <-done }
	}
	look := func(what string, h sandboxer.Handle) {
		t.Helper()
		_, err := e.StatFile(t.Context(), h, "/bin")
		if err != nil && (sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(err.Error(), "replaced its agent")) {
			t.Errorf("%s: %v", what, err)
		}
		if given := sh(t, e, h, "cat "+socket+".given 2>/dev/null; true"); given != "" {
			t.Errorf("%s: somebody else was given connections", what)
		}
	}
	asleep := up(t, e, sandboxer.Spec{})
	end := impersonated(asleep)
	look("asleep", asleep)
	end()

	h := up(t, e, sandboxer.Spec{})
	if _, err := e.StatFile(t.Context(), h, "/bin"); err != nil { // starts it
		t.Fatal(err)
	}
	end = impersonated(h)
	look("with connections that wait", h)
	forget(h)
	if _, err := e.StatFile(t.Context(), h, "/bin"); sandboxer.KindOf(err) != sandboxer.Failed {
		t.Errorf("nobody but an impostor is there, and StatFile says %v", err)
	}
	if given := sh(t, e, h, "cat "+socket+".given 2>/dev/null; true"); given != "" {
		t.Error("awake: somebody else was given connections")
	}
	end()

	// The agent of a copy is still recognised.
	up := up(t, e, sandboxer.Spec{})
	if _, err := e.StatFile(t.Context(), up, "/bin"); err != nil {
		t.Fatal(err)
	}
	twin := restored(t, e, sandboxer.Spec{}, snapshot(t, e, up))
	forget(twin)
	if _, err := e.StatFile(t.Context(), twin, "/bin"); err != nil {
		t.Errorf("the agent of a copy: %v", err)
	}
	end = impersonated(twin)
	look("a copy", twin)
	// Without it the sandbox ends.
	_, _ = e.Exec(t.Context(), twin, sandboxer.Cmd{Args: []string{"sh", "-c", "kill -9 1; sleep 1000"}})
	for late := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if l, err := e.IsAlive(t.Context(), twin); l == sandboxer.Gone {
			break
		} else if time.Now().After(late) {
			t.Fatalf("its first process was killed, and it is %q, %v", l, err)
		}
	}
	end()
}

// TestNobodyInsideIsAboveTheGuests checks the capabilities of all processes of a sandbox except
// its first: they are the guests' own set, or less.
func TestNobodyInsideIsAboveTheGuests(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{Command: []string{"sleep", "1000"}, Limits: sandboxer.Limits{PIDs: 64}})
	want := uint64(capabilities(guestCapabilities, true).BoundingCaps)
	const look = `for p in /proc/[0-9]*; do [ $p = /proc/1 ] || grep -h '^Cap' $p/status 2>/dev/null; done`
	check := func(t *testing.T, h sandboxer.Handle, cmd sandboxer.Cmd) {
		t.Helper()
		var out bytes.Buffer
		cmd.Stdout = &out
		if x, err := e.Exec(t.Context(), h, cmd); err != nil || x.Code != 0 {
			t.Fatalf("%+v %v", x, err)
		}
		n := 0
		for line := range strings.Lines(out.String()) {
			var caps uint64
			name, hex, _ := strings.Cut(strings.TrimSpace(line), ":")
			if _, err := fmt.Sscanf(strings.TrimSpace(hex), "%x", &caps); err != nil {
				t.Errorf("%q: %v", line, err)
			}
			caps &= 1<<agent.TagShift - 1 // the bits above are a command's tag
			if n++; caps&^want != 0 {
				t.Errorf("%s of a process inside is %x; guests have %x", name, caps, want)
			}
		}
		if n < 10 {
			t.Errorf("only %d lines:\n%s", n, out.String())
		}
	}
	all := func(t *testing.T, h sandboxer.Handle) {
		t.Helper()
		for _, user := range []string{"root", "user"} {
			for _, tty := range []*sandboxer.WinSize{nil, {Cols: 80, Rows: 24}} {
				check(t, h, sandboxer.Cmd{Args: []string{"sh", "-c", look}, User: user, TTY: tty})
			}
		}
		if got := sh(t, e, h, "ulimit -u 100000 2>/dev/null && echo raised || true"); got != "" {
			t.Error("root inside raises the limit of processes")
		}
	}
	all(t, h)
	all(t, restored(t, e, sandboxer.Spec{Limits: sandboxer.Limits{PIDs: 64}}, snapshot(t, e, h)))
}

// TestCancelFindsWhatHid: a cancel also ends processes of a command that have left its process
// tree and its session and dropped its environment; nothing else of the sandbox.
func TestCancelFindsWhatHid(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	sh(t, e, h, "setsid env -i sleep 4001 >/dev/null 2>&1 & sleep 0.1") // of a command that ended on its own
	for _, tt := range []struct {
		name, script string
		tty          *sandboxer.WinSize
	}{
		{"its parent lives", "setsid env -i sleep 4002 >/dev/null 2>&1 & touch /started; sleep 4003", nil},
		{"its parent has ended", "(setsid env -i setsid env -i sleep 4004 >/dev/null 2>&1 &); touch /started; sleep 4005", nil},
		{"of another user", "setsid env -i /usr/sbin/chroot --userspec=1000:1000 / sleep 4006 >/dev/null 2>&1 & touch /started; sleep 4007", nil},
		{"of a terminal", "setsid env -i sleep 4008 >/dev/null 2>&1 & touch /started; sleep 4009", &sandboxer.WinSize{Cols: 80, Rows: 24}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sh(t, e, h, "rm -f /started")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			go func() {
				_, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", tt.script}, TTY: tt.tty})
				ended <- err
			}()
			sh(t, e, h, "i=0; while ! [ -e /started ] || [ $(pgrep -c sleep) -lt 3 ]; do sleep 0.01; [ $((i+=1)) -lt 3000 ] || exit 1; done")
			cancel()
			if err := <-ended; sandboxer.KindOf(err) != sandboxer.Canceled {
				t.Errorf("Exec: %v", err)
			}
			if got := sh(t, e, h, "pgrep -fa '^sleep' || true"); !strings.HasSuffix(got, "sleep 4001") || strings.Count(got, "sleep") != 1 {
				t.Errorf("left:\n%s", got)
			}
		})
	}
}
