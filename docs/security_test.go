package docs_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var testName = regexp.MustCompile("`([a-z0-9]+)\\.((?:Test|Fuzz)\\w+)`")

// TestSecurity: each promise of the security page names the tests that hold it, and they
// exist.
func TestSecurity(t *testing.T) {
	exists := map[string]bool{}
	err := filepath.WalkDir("..", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "testdata"):
			return fs.SkipDir
		case !strings.HasSuffix(name, "_test.go"):
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				exists[strings.TrimSuffix(f.Name.Name, "_test")+"."+fn.Name.Name] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(read(t, "design/security.md")) {
		promise, tests, ok := strings.Cut(strings.Trim(line, "| \n"), "|")
		if !ok || !strings.Contains(tests, "Test") {
			continue
		}
		for _, m := range testName.FindAllStringSubmatch(tests, -1) {
			if !exists[m[1]+"."+m[2]] {
				t.Errorf("%q is said to be held by %s.%s, which does not exist", strings.TrimSpace(promise), m[1], m[2])
			}
		}
	}
}
