// Command mustrun reads the output of go test -json and prints what a person needs to
// know of it: each package's result and all failures. It fails when a test failed
// and also when one that must run (the files given) was skipped or did not run: a suite
// that quietly skips proves nothing.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
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
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: go test -json ./... | mustrun FILE...")
		os.Exit(2)
	}
	var must []string
	for _, name := range os.Args[1:] {
		list, err := os.ReadFile(name)
		if err != nil {
			fmt.Fprintln(os.Stderr, "mustrun:", err)
			os.Exit(2)
		}
		must = append(must, parseList(string(list))...)
	}
	ok, err := report(os.Stdin, os.Stdout, must)
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

// report copies the essence of the events from r to w and says whether everything passed.
func report(r io.Reader, w io.Writer, must []string) (ok bool, err error) {
	ok = true
	result := map[string]string{} // "package Test" → pass, fail, skip
	output := map[string][]string{}
	var passed, failed, skipped int
	var cut []string             // tests that did not end
	var said []string            // by tests that failed, in short
	took := map[string]float64{} // seconds of each package that ran
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
					// A test that the package's end overtook (a time-out, a panic) has no
					// end of its own, and its output has the stacks.
					for _, k := range unfinished(output, e.Package) {
						cut = append(cut, k)
						fmt.Fprint(w, strings.Join(clip(output[k]), ""))
						delete(output, k)
					}
				}
				if e.Action != "skip" { // a package without tests
					fmt.Fprintf(w, "%-4s %s %.1fs\n", e.Action, e.Package, e.Elapsed)
					took[e.Package] += e.Elapsed
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
				said = append(said, essence(key, output[key])...)
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
	for _, line := range said {
		fmt.Fprintln(w, line)
	}
	for _, k := range cut {
		fmt.Fprintf(w, "FAIL %s did not end\n", k)
	}
	slowest := slices.SortedFunc(maps.Keys(took), func(a, b string) int { return cmp.Or(cmp.Compare(took[b], took[a]), cmp.Compare(a, b)) })
	fmt.Fprintln(w, "slowest packages:")
	for _, p := range slowest[:min(maxSlowest, len(slowest))] {
		fmt.Fprintf(w, "%7.1fs %s\n", took[p], p)
	}
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped\n", passed, failed+len(cut), skipped)
	return ok, nil
}

// maxSlowest is how many of the slowest packages are listed.
const maxSlowest = 10

// A few lines of each failed test are repeated at the end, where they are visible when
// a program's log has buried them.
const (
	maxSaid  = 8
	saidLine = 400 // bytes
)

var message = regexp.MustCompile(`^\s+\w+\.go:[0-9]+: `)

func essence(test string, lines []string) (out []string) {
	out = []string{"FAIL " + test}
	for _, l := range lines {
		if message.MatchString(l) && len(out) <= maxSaid {
			out = append(out, fmt.Sprintf("%.*s", saidLine, strings.TrimRight(l, "\n")))
		}
	}
	return out
}

// maxLines bounds how much of an unfinished test's output is copied, in lines: the stacks of a
// large program would bury everything else.
const maxLines = 1000

// unfinished names the tests of a package that printed something and have no result.
func unfinished(output map[string][]string, pkg string) []string {
	var out []string
	for k := range output {
		if test, ok := strings.CutPrefix(k, pkg+" "); ok && test != "" {
			out = append(out, k)
		}
	}
	slices.Sort(out)
	return out
}

// clip leaves out the middle of output that is longer than maxLines.
func clip(lines []string) []string {
	if len(lines) <= maxLines {
		return lines
	}
	out := slices.Clone(lines[:maxLines/2])
	out = append(out, fmt.Sprintf("... %d lines left out\n", len(lines)-maxLines))
	return append(out, lines[len(lines)-maxLines/2:]...)
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
