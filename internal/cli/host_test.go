package cli

import (
	"os"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// TestHosts runs the host commands against a real SSH server.
func TestHosts(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	print, err := sshrun.Fingerprint(s.HostKey)
	if err != nil {
		t.Fatal(err)
	}
	stranger, _, _ := sshtest.NewKey(t, t.TempDir(), "stranger")
	testscript.Run(t, testscript.Params{
		Dir: "testdata/host",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code": cmdCode, "capture": cmdCapture, "freeport": cmdFreePort, "waitfor": cmdWaitFor,
		},
		Setup: func(e *testscript.Env) error {
			home, err := os.MkdirTemp("", "sbx")
			if err != nil {
				return err
			}
			e.Defer(func() {
				stopServer(t, home)
				removeHome(t, home)
			})
			for k, v := range map[string]string{
				"SANDBOXER_HOME": home, "SANDBOXER_DATA_DIR": home + "/data", "SANDBOXER_PROGRESS": "none", "TZ": "UTC",
				"SSH_USER": s.User, "SSH_PORT": strconv.Itoa(s.Port), "SSH_IDENTITY": s.Identity, "SSH_FINGERPRINT": print, "SSH_STRANGER": stranger,
			} {
				e.Setenv(k, v)
			}
			return nil
		},
	})
}
