package fake

import (
	"os"
	"os/exec"
	"testing"
	"time"
)

// A process that is in the middle of an execve shows no environment; kill finds it all
// the same.
func TestKillAmidExec(t *testing.T) {
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		t.Skip("needs /proc")
	}
	cookie := "SANDBOXER_ROOT=" + t.TempDir()
	for range 200 {
		cmd := exec.Command("sh", "-c", "echo started; exec sleep 60")
		cmd.Env = append(os.Environ(), cookie)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := out.Read(make([]byte, 16)); err != nil {
			t.Fatal(err)
		}
		if err := kill(cookie); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() { defer close(ended); _ = cmd.Wait() }()
		select {
		case <-ended:
		case <-time.After(time.Minute):
			_ = cmd.Process.Kill()
			<-ended
			t.Fatal("it lives on")
		}
	}
}
