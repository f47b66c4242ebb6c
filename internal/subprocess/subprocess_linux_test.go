package subprocess

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// given is what this process has in its environment in these tests, and who gets it.
var given = map[string][]Kind{
	"PATH": {Tool, SSH, Packer, Extension, Self}, "HOME": {Tool, SSH, Packer, Extension, Self},
	"USER": {Tool, SSH, Packer, Extension, Self}, "LOGNAME": {Tool, SSH, Packer, Extension, Self},
	"LANG": {Tool, SSH, Packer, Extension, Self}, "LC_CTYPE": {Tool, SSH, Packer, Extension, Self},
	"TZ": {Tool, SSH, Packer, Extension, Self}, "TMPDIR": {Tool, SSH, Packer, Extension, Self},
	"SSL_CERT_FILE": {Packer, Extension, Self}, "SSL_CERT_DIR": {Packer, Extension, Self},
	"HTTPS_PROXY": {SSH, Packer, Self}, "no_proxy": {SSH, Packer, Self},
	"SHELL": {SSH, Packer, Self}, "SSH_AUTH_SOCK": {SSH, Packer, Self}, "XDG_RUNTIME_DIR": {SSH, Packer, Self},
	"KRB5CCNAME": {SSH, Packer, Self}, "DOCKER_HOST": {Self}, "CONTAINERS_CONF": {Self},
	"REGISTRY_AUTH_FILE": {Self}, "PKR_VAR_size": {Packer, Self}, "PACKER_LOG": {Packer, Self},
	"AWS_SECRET_ACCESS_KEY": {Self}, "SANDBOXER_S3_CREDENTIALS": {Self}, "SANDBOXER_API_KEY": {Self}, "GODEBUG": {Self},
	"NOTIFY_SOCKET": {Self}, "LISTEN_FDS": {Self}, "LD_PRELOAD": {Self}, "PATHS": {Self},
}

func TestChildGetsWhatIsNamed(t *testing.T) {
	old := os.Environ()
	os.Clearenv()
	t.Cleanup(func() {
		os.Clearenv()
		for _, kv := range old {
			name, value, _ := strings.Cut(kv, "=")
			os.Setenv(name, value)
		}
	})
	for name := range given {
		value := "x"
		if name == "LD_PRELOAD" || name == "GODEBUG" {
			value = "" // which the program would heed
		}
		os.Setenv(name, value)
	}
	unmarked(t)
	extra, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer extra.Close()
	defer unix.Umask(unix.Umask(0o077))
	for _, k := range []Kind{Tool, SSH, Packer, Extension, Self} {
		t.Run(fmt.Sprint(int(k)), func(t *testing.T) {
			// Every built-in of a shell, so that nothing else opens a file: a glob has one descriptor open itself.
			c := Command(t.Context(), k, "/bin/sh", "-c", `umask; pwd; while read -r l; do case $l in Groups:*) echo "$l";; esac; done </proc/self/status
for f in /proc/self/fd/*; do [ ! -e "$f" ] || echo "${f##*/}"; done; echo --; tr '\0' '\n' </proc/$$/environ`)
			c.Env = append(c.Env, "ADDED=1")
			for i, kv := range c.Env { // looked up by name only
				if strings.HasPrefix(kv, "PATH=") {
					c.Env[i] = "PATH=/usr/bin:/bin"
				}
			}
			c.ExtraFiles = []*os.File{extra}
			out, err := c.Output()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			head, env, _ := strings.Cut(string(out), "--\n")
			groups, _ := os.ReadFile("/proc/self/status")
			_, ours, _ := strings.Cut(string(groups), "\nGroups:\t")
			ours, _, _ = strings.Cut(ours, "\n")
			lines := strings.Split(strings.TrimSpace(head), "\n")
			if lines[0] != "0022" || lines[1] != "/" || strings.TrimSpace(strings.TrimPrefix(lines[2], "Groups:")) != strings.TrimSpace(ours) {
				t.Errorf("umask, directory and groups are %q; want 0022, / and %q", lines[:3], ours)
			}
			if fds := lines[3:]; !slices.Equal(fds, []string{"0", "1", "2", "3"}) {
				t.Errorf("it has the descriptors %q", fds)
			}
			var got, want []string
			for _, kv := range strings.Split(strings.TrimSpace(env), "\n") {
				name, _, _ := strings.Cut(kv, "=")
				got = append(got, name)
			}
			for name, kinds := range given {
				if slices.Contains(kinds, k) {
					want = append(want, name)
				}
			}
			want = append(want, "ADDED")
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("it has the variables\n%q; want\n%q", got, want)
			}
		})
	}
}

// unmarked opens files as gVisor's library does: an execve does not close them.
func unmarked(t *testing.T) {
	t.Helper()
	for range 100 {
		fd, err := unix.Eventfd(0, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
	}
}

// What another thread opens in the middle of a start does not arrive either.
func TestChildrenStartedAmidOpens(t *testing.T) {
	over := make(chan struct{})
	var opens sync.WaitGroup
	for range 2 {
		opens.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
				}
				if fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0); err == nil {
					unix.Close(fd)
				}
			}
		})
	}
	defer opens.Wait()
	defer close(over)
	for range 40 {
		out, err := Command(t.Context(), Tool, "/bin/sh", "-c", `for f in /proc/self/fd/*; do [ ! -e "$f" ] || echo "${f##*/}"; done`).CombinedOutput()
		if err != nil || string(out) != "0\n1\n2\n" {
			t.Fatalf("it has the descriptors %q, %v", out, err)
		}
	}
}

// A start that fails says so as os/exec does.
func TestStartFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "program")
	for _, c := range []struct {
		mode os.FileMode
		text string
		want error
	}{{0o755, "no program", syscall.ENOEXEC}, {0o755, "#!/nosuch/interpreter\n", syscall.ENOENT}} {
		if err := os.WriteFile(file, []byte(c.text), c.mode); err != nil {
			t.Fatal(err)
		}
		cmd := Command(t.Context(), Tool, file)
		if err := cmd.Start(); !errors.Is(err, c.want) {
			t.Errorf("%q: %v; want %v", c.text, err, c.want)
		}
	}
	if err := Command(t.Context(), Tool, "no-such-program").Run(); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("a program that is not there: %v", err)
	}
	var exit interface{ ExitCode() int }
	if _, err := Command(t.Context(), Tool, "/bin/sh", "-c", "echo why >&2; exit 3").Output(); !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Errorf("exit 3: %v", err)
	}
}

// It is the program that has the arguments, the number and the death signal that were asked for.
func TestChildIsItself(t *testing.T) {
	cmd := Command(t.Context(), Tool, "/bin/sh", "-c", `echo "$0 $1 $$"`, "zero", "one")
	cmd.Args[0] = "named"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGTERM}
	out, err := cmd.Output()
	if want := fmt.Sprintf("zero one %d\n", cmd.Process.Pid); err != nil || string(out) != want {
		t.Errorf("%q, %v; want %q", out, err, want)
	}
	if cmd.Args[0] != "named" || cmd.Path != "/bin/sh" || cmd.ExtraFiles != nil {
		t.Errorf("afterwards it is %q with %q", cmd.Path, cmd.Args)
	}
}
