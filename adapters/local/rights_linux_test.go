package local

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// TestRightsOfContainers: the error names what a plain container lacks, with the option that
// grants it.
func TestRightsOfContainers(t *testing.T) {
	switch os.Getenv("SANDBOXER_TEST_RIGHTS") {
	case "caps":
		err := checkRights(true)
		fmt.Println("told:", err, sandboxer.HintOf(err))
		return
	case "seccomp": // a filter that allows all calls, on all threads
		allow := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0x7fff0000}
		prog := unix.SockFprog{Len: 1, Filter: &allow}
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			t.Fatal(err)
		}
		if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, 1, 1, uintptr(unsafe.Pointer(&prog))); errno != 0 {
			t.Fatal(errno)
		}
		err := filtered(sandboxer.E(sandboxer.Unavailable, nil, "gVisor could not create the sandbox"))
		fmt.Println("told:", err, sandboxer.HintOf(err))
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, to give up what root has")
	}
	setpriv, err := exec.LookPath("setpriv")
	if err != nil {
		t.Skip("no setpriv")
	}
	for which, want := range map[string]string{"caps": "may not mount", "seccomp": "a filter of system calls"} {
		args := []string{"--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"}
		if which == "seccomp" {
			args = nil
		}
		cmd := exec.Command(setpriv, append(args, os.Args[0], "-test.run=^TestRightsOfContainers$", "-test.v")...)
		cmd.Env = append(os.Environ(), "SANDBOXER_TEST_RIGHTS="+which)
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), want) || !strings.Contains(string(out), containerSwitches) {
			t.Errorf("%s: %v\n%s", which, err, out)
		}
	}
	if err := checkRights(true); err != nil {
		t.Errorf("with all rights: %v", err)
	}
	if err := filtered(sandboxer.E(sandboxer.Unavailable, nil, "x")); ownStatus("Seccomp") == "0" && sandboxer.HintOf(err) != "" {
		t.Errorf("without a filter: %v", err)
	}
}
