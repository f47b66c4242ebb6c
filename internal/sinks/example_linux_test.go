package sinks

import (
	"bufio"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestExample delivers to the receiver in docs/examples, which is killed in between, and gets everything twice.
func TestExample(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3")
	}
	r := newRig(t)
	books, address := filepath.Join(t.TempDir(), "books.db"), "127.0.0.1:0"
	start := func() *exec.Cmd {
		cmd := exec.Command(python, "../../docs/examples/usage-receiver/receiver.py", address, books)
		cmd.Env = append(os.Environ(), "USAGE_KEYS="+former+" "+key)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		address = strings.TrimPrefix(strings.TrimSpace(line), "http://")
		return cmd
	}
	cmd := start()
	sink := sandboxer.Sink{Name: "hub", URL: "http://" + address, Keys: []string{"new"}}
	r.use(1200, "a label")
	r.run(sink)
	r.await("hub", func(st Status) bool { return st.Seq > 0 })
	cmd.Process.Kill()
	cmd.Wait()
	r.use(10, "")
	start()
	r.await("hub", upToDate)
	r.run() // as if the cursor were lost
	if _, err := r.Drop(t.Context(), "hub", nil); err != nil {
		t.Fatal(err)
	}
	r.run(sink)
	if st := r.await("hub", upToDate); st.DeadLetters > 0 {
		t.Errorf("%+v", st)
	}
	res, err := http.Get("http://" + address + "/total")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var total struct {
		Rows    int
		Charged string
	}
	if err := json.NewDecoder(res.Body).Decode(&total); err != nil {
		t.Fatal(err)
	}
	if c, err := sandboxer.ParseCredits(total.Charged); total.Rows != r.n || c != sandboxer.Credits(r.n*(r.n+1)/2) || err != nil {
		t.Errorf("the receiver has %d rows, %s; want %d", total.Rows, total.Charged, r.n)
	}
	res, err = http.Post("http://"+address, "application/json", strings.NewReader("[]"))
	if err != nil || res.StatusCode != 401 {
		t.Errorf("without a signature: %v, %v", res, err)
	}
}
