package cli

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sand-boxer/sandboxer/internal/buildtest"
)

// TestPrograms has extensions that are programs of their own live through the command line.
func TestPrograms(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("there is no python3")
	}
	if err := errors.Join(buildtest.ReadsFiles("../catalog/testdata/seeds"), buildtest.ReadsFiles("../../docs/examples"), buildtest.Reads(buildtest.Products)); err != nil {
		t.Fatal(err)
	}
	seeds, err := filepath.Abs("../catalog/testdata/seeds")
	if err != nil {
		t.Fatal(err)
	}
	examples, err := filepath.Abs("../../docs/examples")
	if err != nil {
		t.Fatal(err)
	}
	module, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("go", "env", "GOMODCACHE", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	caches := strings.Fields(string(out))
	testscript.Run(t, testscript.Params{
		Dir: "testdata/programs",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code": cmdCode, "capture": cmdCapture, "freeport": cmdFreePort, "waitfor": cmdWaitFor,
			"few": func(ts *testscript.TestScript, _ bool, args []string) { // lines that somebody has to read
				if n := strings.Count(ts.ReadFile(args[0]), "\n"); n >= 100 {
					ts.Fatalf("%s has %d lines; want less than 100", args[0], n)
				}
			},
		},
		Setup: func(e *testscript.Env) error {
			if err := writeGuide(filepath.Join(e.WorkDir, "guide")); err != nil {
				return err
			}
			home, err := os.MkdirTemp("", "sbx")
			if err != nil {
				return err
			}
			e.Defer(func() {
				stopServer(t, home)
				removeHome(t, home)
			})
			for k, v := range map[string]string{
				"SANDBOXER_HOME": home, "SANDBOXER_DATA_DIR": home + "/data", "SANDBOXER_PROGRESS": "none", "TZ": "UTC", "SEEDS": seeds, "EXAMPLES": examples,
				"MODULE": module, "SDK": filepath.Join(module, "sdk", "python"), "GOMODCACHE": caches[0], "GOCACHE": caches[1], "GOPROXY": "off", "GOFLAGS": "", "GOTOOLCHAIN": "local",
			} {
				e.Setenv(k, v)
			}
			return nil
		},
	})
}

// writeGuide writes the code blocks of the guide for authors and of the reference of methods, numbered by language.
func writeGuide(dir string) error {
	var text []byte
	for _, page := range []string{"how-to/write-an-extension.md", "reference/extension-sdk.md"} {
		data, err := os.ReadFile("../../docs/" + page)
		if err != nil {
			return err
		}
		text = append(text, data...)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	counts := map[string]int{}
	for _, m := range regexp.MustCompile("(?ms)^```(python|yaml|go)\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
		counts[m[1]]++
		name := fmt.Sprintf("%s%d", m[1], counts[m[1]])
		if err := os.WriteFile(filepath.Join(dir, name), []byte(m[2]), 0o644); err != nil {
			return err
		}
	}
	return nil
}
