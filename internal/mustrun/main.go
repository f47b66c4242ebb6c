// Command mustrun reads the output of go test -json and prints what a person wants to
// know of it: each package's result and whatever failed. It fails when a test failed
// and also when one that must run (the file given) was skipped or did not run: a suite
// that quietly skips proves nothing.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

type event struct {
	Action  string
	Package string
	Test    string
	Output  string
	Elapsed float64
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: go test -json ./... | mustrun FILE")
		os.Exit(2)
	}
	list, err := os.ReadFile(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "mustrun:", err)
		os.Exit(2)
	}
	ok, err := report(os.Stdin, os.Stdout, parseList(string(list)))
	if err != nil {
		fmt.Fprintln(os.Stderr, "mustrun:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

// parseList reads lines "package Test"; # begins a comment.
func parseList(s string) []string {
	var out []string
	for line := range strings.Lines(s) {
		line, _, _ = strings.Cut(line, "#")
		if f := strings.Fields(line); len(f) == 2 {
			out = append(out, f[0]+" "+f[1])
		}
	}
	return out
}

// report copies the essence of the events from r to w and says whether all is well.
func report(r io.Reader, w io.Writer, must []string) (ok bool, err error) {
	ok = true
	result := map[string]string{} // "package Test" → pass, fail, skip
	output := map[string][]string{}
	var passed, failed, skipped int
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 1<<20), 16<<20)
	for sc.Scan() {
		var e event
		if err := json.Unmarshal(sc.Bytes(), &e); err != nil {
			fmt.Fprintln(w, sc.Text()) // a build error, say
			continue
		}
		key := e.Package + " " + e.Test
		switch e.Action {
		case "output", "build-output":
			output[key] = append(output[key], e.Output)
			if e.Action == "build-output" {
				fmt.Fprint(w, e.Output)
			}
		case "pass", "fail", "skip":
			result[key] = e.Action
			if e.Test == "" {
				if e.Action == "fail" {
					ok = false
					fmt.Fprint(w, strings.Join(output[key], ""))
				}
				if e.Action != "skip" { // a package without tests
					fmt.Fprintf(w, "%-4s %s %.1fs\n", e.Action, e.Package, e.Elapsed)
				}
				break
			}
			switch e.Action {
			case "pass":
				passed++
			case "fail":
				failed++
				ok = false
				fmt.Fprint(w, strings.Join(output[key], ""))
			case "skip":
				skipped++
				fmt.Fprintf(w, "skip %s: %s\n", key, reason(output[key]))
			}
			delete(output, key)
		}
	}
	if err := sc.Err(); err != nil {
		return false, err
	}
	slices.Sort(must)
	for _, m := range must {
		switch result[m] {
		case "pass", "fail":
		case "skip":
			ok = false
			fmt.Fprintf(w, "FAIL %s was skipped, but must run\n", m)
		default:
			ok = false
			fmt.Fprintf(w, "FAIL %s did not run, but must\n", m)
		}
	}
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	return ok, nil
}

// reason finds why a test was skipped in what it printed.
func reason(lines []string) string {
	for _, l := range slices.Backward(lines) {
		l = strings.TrimSpace(l)
		if l != "" && !strings.HasPrefix(l, "---") && !strings.HasPrefix(l, "===") {
			return l
		}
	}
	return "no reason given"
}
