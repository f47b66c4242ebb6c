//go:build linux

package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// rightsOf returns what a process may do, of each of its threads.
func rightsOf(t *testing.T, pid int) map[string]bool {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(threads) < 2 {
		t.Fatalf("threads of process %d: %v, %v", pid, threads, err)
	}
	seen := map[string]bool{}
	for _, name := range threads {
		data, err := os.ReadFile(name)
		if err != nil {
			continue // it ended
		}
		var rights []string
		for line := range strings.Lines(string(data)) {
			if k, v, _ := strings.Cut(strings.TrimSpace(line), ":\t"); strings.HasPrefix(k, "Cap") || k == "NoNewPrivs" {
				rights = append(rights, k+"="+v)
			}
		}
		seen[strings.Join(rights, " ")] = true
	}
	return seen
}

// A server gives up what it does not need, on all of its threads, and everything that a
// sandbox is good for works without; what tells its supervisor works, too.
func TestServerGivesUpRights(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: it starts servers of root and of an ordinary user")
	}
	dir, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	bin := programs(t)
	const nobody = 65534
	for _, user := range []struct {
		name   string
		uid    uint32
		env    []string
		rights string
		whole  bool
	}{
		// The capabilities of internal/confine, and no others, however many this test has.
		{"root", 0, nil, "CapInh=0000000000000000 CapPrm=%[1]s CapEff=%[1]s CapBnd=%[1]s CapAmb=0000000000000000 NoNewPrivs=1", true},
		{"told not to", 0, []string{"SANDBOXER_NO_NEW_PRIVILEGES=false"}, "CapInh=0000000000000000 CapPrm=%[1]s CapEff=%[1]s CapBnd=%[1]s CapAmb=0000000000000000 NoNewPrivs=0", false},
		{"an ordinary user", nobody, nil, "NoNewPrivs=1", true},
	} {
		t.Run(user.name, func(t *testing.T) {
			home := filepath.Join(dir, strings.ReplaceAll(user.name, " ", "-"))
			if err := os.Mkdir(home, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.Chown(home, int(user.uid), int(user.uid)); err != nil {
				t.Fatal(err)
			}
			supervisor, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(home, "notify"), Net: "unixgram"})
			if err != nil {
				t.Fatal(err)
			}
			defer supervisor.Close()
			if err := os.Chmod(filepath.Join(home, "notify"), 0o777); err != nil {
				t.Fatal(err)
			}
			told := func(want string) {
				t.Helper()
				got := make([]byte, 100)
				supervisor.SetReadDeadline(time.Now().Add(time.Minute))
				if n, err := supervisor.Read(got); err != nil || string(got[:n]) != want {
					t.Fatalf("the supervisor was told %q, %v; want %q", got[:n], err, want)
				}
			}
			sandboxer := func(args ...string) *exec.Cmd {
				// Hardened services have an umask as strict as this.
				cmd := exec.Command("sh", append([]string{"-c", `umask 077; exec "$0" "$@"`, filepath.Join(bin, "sandboxer")}, args...)...)
				cmd.Env = append(os.Environ(), "SANDBOXER_HOME="+home, "SANDBOXER_PROGRESS=none", "HOME="+home)
				cmd.Env = append(cmd.Env, user.env...)
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user.uid, Gid: user.uid}}
				return cmd
			}
			must := func(args ...string) string {
				t.Helper()
				var out, errs bytes.Buffer
				cmd := sandboxer(args...)
				cmd.Stdout, cmd.Stderr = &out, &errs
				if err := cmd.Run(); err != nil {
					t.Fatalf("sandboxer %s: %v\n%s%s", strings.Join(args, " "), err, out.String(), errs.String())
				}
				return strings.TrimSpace(out.String())
			}
			var log bytes.Buffer
			serve := func() *exec.Cmd {
				t.Helper()
				server := sandboxer("serve")
				server.Env = append(server.Env, "NOTIFY_SOCKET="+filepath.Join(home, "notify"))
				server.Stderr = &log
				if err := server.Start(); err != nil {
					t.Fatal(err)
				}
				told("READY=1")
				return server
			}
			server := serve()
			stop := func() {
				t.Helper()
				_ = server.Process.Signal(syscall.SIGTERM)
				told("STOPPING=1")
				if err := server.Wait(); err != nil {
					t.Errorf("serve: %v", err)
				}
			}
			t.Cleanup(func() {
				if server.ProcessState == nil {
					_ = server.Process.Kill()
					_ = server.Wait()
				}
				if t.Failed() {
					t.Log(log.String())
				}
			})
			if user.uid != 0 && strings.Contains(must("extension", "get", "ext.local", "-o", "json"), "user namespaces") {
				stop()
				t.Skip("ordinary users may not make user namespaces here")
			}
			want := user.rights
			if strings.Contains(want, "%") {
				keep := uint64(0)
				for _, c := range []int{0, 1, 3, 5, 6, 7, 10, 12, 18, 19, 21, 31} { // chown, dac_override, fowner, kill, setgid, setuid, net_bind_service, net_admin, sys_chroot, sys_ptrace, sys_admin, setfcap
					keep |= 1 << c
				}
				ours, err := exec.Command("sh", "-c", "sed -n 's/^CapBnd:.//p' /proc/self/status").Output()
				if err != nil {
					t.Fatal(err)
				}
				have, err := strconv.ParseUint(strings.TrimSpace(string(ours)), 16, 64)
				if err != nil {
					t.Fatal(err)
				}
				want = fmt.Sprintf(want, fmt.Sprintf("%016x", have&keep))
			}
			check := func() {
				t.Helper()
				seen := rightsOf(t, server.Process.Pid)
				for got := range seen {
					if !strings.HasSuffix(got, want) || len(seen) != 1 {
						t.Errorf("rights %s; want %s on all threads", got, want)
					}
				}
			}
			check()
			if user.whole {
				repo := filepath.Join(home, "repo")
				if err := os.Mkdir(repo, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(repo, "file"), []byte("content"), 0o600); err != nil {
					t.Fatal(err)
				}
				for _, name := range []string{repo, filepath.Join(repo, "file")} { // of another user where root may read it
					if err := os.Chown(name, int(nobody), int(nobody)); err != nil {
						t.Fatal(err)
					}
				}
				must("create", "--profile", "local-public", "--input", "repo="+repo, "--name", "first")
				must("exec", "first", "--", "sh", "-c", "echo more >>file; sleep 1000 </dev/null >/dev/null 2>&1 &")
				must("pause", "first", "--depth", "disk")
				must("resume", "first")
				copied := strings.Fields(must("fork", "first", "-q"))[0]
				must("destroy", copied)
				stop()
				server = serve()
				if got := must("exec", "first", "--", "sh", "-c", "cat file"); got != "contentmore" {
					t.Errorf("the workspace says %q", got)
				}
				check() // also after threads have come and been elsewhere
				must("destroy", "first")
				if out := must("audit"); !strings.Contains(out, " 0 violations") {
					t.Errorf("audit says %s", out)
				}
			}
			stop()
		})
	}
}
