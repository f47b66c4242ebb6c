//go:build linux

package main

import (
	"bytes"
	"flag"
	"os"
	"strings"
	"testing"
)

var regenerate = flag.Bool("regenerate", false, "compare whole programs (not for -race, under which gVisor's differ)")

// TestCurrent: the programs in the repository are those of the gVisor in go.mod.
// Stale ones would not be used, or, worse, would be.
func TestCurrent(t *testing.T) {
	have, err := os.ReadFile("../../seccomp_gen.go")
	if err != nil {
		t.Fatal(err)
	}
	version, err := gvisor()
	if err != nil {
		t.Fatal(err)
	}
	head, _, _ := strings.Cut(string(have), "\npackage ")
	current := strings.Contains(head, "// "+version+"\n")
	if *regenerate {
		want, err := generate()
		if err != nil {
			t.Fatal(err)
		}
		current = bytes.Equal(have, want)
	}
	if !current {
		t.Errorf("seccomp_gen.go is not of %s: go generate ./adapters/local/runner", version)
	}
}
