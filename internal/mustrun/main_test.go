package main

import (
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	const events = `{"Action":"output","Package":"p","Test":"TestA","Output":"fine\n"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestB","Output":"    b_test.go:7: no engine here\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"--- SKIP: TestB\n"}
{"Action":"skip","Package":"p","Test":"TestB"}
{"Action":"pass","Package":"p","Elapsed":1.5}
`
	for _, tt := range []struct {
		name, events, must string
		ok                 bool
		want               []string
	}{
		{"all well", events, "p TestA # the suite\n", true, []string{"pass p 1.5s", "skip p TestB: b_test.go:7: no engine here", "slowest packages:\n    1.5s p\n1 passed, 0 failed, 1 skipped"}},
		{"skipped but must run", events, "p TestB", false, []string{"FAIL p TestB was skipped, but must run"}},
		{"absent", events, "p TestC", false, []string{"FAIL p TestC did not run, but must"}},
		{"failed", `{"Action":"output","Package":"p","Test":"TestA","Output":"why\n"}` + "\n" + `{"Action":"fail","Package":"p","Test":"TestA"}`, "p TestA", false, []string{"why\n", "0 passed, 1 failed"}},
		{"failed under a long log", `{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:7: too few\n"}` + "\n" + strings.Repeat(`{"Action":"output","Package":"p","Test":"TestA","Output":"        level=INFO\n"}`+"\n", 1000) + `{"Action":"fail","Package":"p","Test":"TestA"}`, "", false, []string{"level=INFO\nFAIL p TestA\n    a_test.go:7: too few\nslowest packages:\n0 passed, 1 failed"}},
		{"cut off", `{"Action":"output","Package":"p","Test":"TestA","Output":"panic: test timed out\n"}` + "\n" + `{"Action":"output","Package":"pp","Test":"TestA","Output":"of another package\n"}` + "\n" + `{"Action":"fail","Package":"p"}`, "", false, []string{"panic: test timed out\n", "FAIL p TestA did not end\nslowest packages:\n    0.0s p\n0 passed, 1 failed"}},
		{"package does not build", `{"Action":"build-output","ImportPath":"p","Output":"p.go:1: broken\n"}` + "\n" + `{"Action":"fail","Package":"p"}`, "", false, []string{"broken"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			ok, err := report(strings.NewReader(tt.events), &out, parseList(tt.must))
			if err != nil || ok != tt.ok {
				t.Errorf("report = %t, %v; want %t", ok, err, tt.ok)
			}
			for _, w := range tt.want {
				if !strings.Contains(out.String(), w) {
					t.Errorf("output lacks %q:\n%s", w, out.String())
				}
			}
		})
	}
}
