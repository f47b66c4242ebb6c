// Package docs_test keeps the pages true: what they name exists.
package docs_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

var (
	codeSpan = regexp.MustCompile("`([^`\n]+)`")
	function = regexp.MustCompile(`^([a-z][a-z0-9]*)\.([A-Za-z]\w*)$`)
	method   = regexp.MustCompile(`^\(\*?([a-z][a-z0-9]*)\.([A-Za-z]\w*)\)\.([A-Za-z]\w*)$`)
	step     = regexp.MustCompile(`(?m)^\d+\. `)
)

// declared returns every function and method of the module, as the pages write them.
func declared(t *testing.T) map[string]bool {
	out := map[string]bool{}
	err := filepath.WalkDir("..", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "testdata"):
			return fs.SkipDir
		case !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		pkg := f.Name.Name
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if fn.Recv == nil {
				out[pkg+"."+fn.Name.Name] = true
				continue
			}
			typ, star := fn.Recv.List[0].Type, ""
			if p, ok := typ.(*ast.StarExpr); ok {
				typ, star = p.X, "*"
			}
			if g, ok := typ.(*ast.IndexExpr); ok {
				typ = g.X
			}
			if id, ok := typ.(*ast.Ident); ok {
				out["("+star+pkg+"."+id.Name+")."+fn.Name.Name] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestTour: each step of the tour names functions, and they exist.
func TestTour(t *testing.T) {
	exists := declared(t)
	text := read(t, "tour.md")
	starts := step.FindAllStringIndex(text, -1)
	if len(starts) < 10 {
		t.Errorf("the tour has %d steps", len(starts))
	}
	for i, at := range starts {
		end := len(text)
		if i+1 < len(starts) {
			end = starts[i+1][0]
		}
		named := 0
		for _, m := range codeSpan.FindAllStringSubmatch(text[at[0]:end], -1) {
			if !function.MatchString(m[1]) && !method.MatchString(m[1]) || strings.HasPrefix(m[1], "ext.") || strings.HasPrefix(m[1], "profile.") {
				continue
			}
			named++
			if !exists[m[1]] {
				t.Errorf("step %d names %s, which does not exist", i+1, m[1])
			}
		}
		if named == 0 {
			t.Errorf("step %d names no function", i+1)
		}
	}
}

// TestDesignIsComplete: the page lists what the code declares.
func TestDesignIsComplete(t *testing.T) {
	text := read(t, "design.md")
	has := func(what, word string) {
		if !strings.Contains(text, "| "+word+" |") && !strings.Contains(text, "| `"+word+"` |") {
			t.Errorf("docs/design.md has no row for the %s %s", what, word)
		}
	}
	for _, k := range sandboxer.Kinds() {
		has("kind", string(k))
	}
	for _, s := range sandboxer.States() {
		has("state", string(s))
	}
	for _, c := range sandboxer.Capabilities() {
		has("capability", string(c))
	}
}

// TestTreeIsComplete: the page's tree has a line for every package, or for the directory
// that it is a part of, and no line for what there is not.
func TestTreeIsComplete(t *testing.T) {
	text := read(t, "design.md")
	_, tree, _ := strings.Cut(text, "```text\n.  ")
	tree, _, ok := strings.Cut(tree, "```")
	if !ok {
		t.Fatal("docs/design.md has no tree")
	}
	told := map[string]bool{}
	parent := ""
	for _, line := range strings.Split(tree, "\n")[1:] {
		if line == "" {
			continue
		}
		words := strings.Fields(line)
		if !strings.HasPrefix(line, " ") {
			parent = ""
		}
		for _, w := range words {
			if !strings.HasSuffix(w, "/") {
				break // what follows says what it is
			}
			dir := parent + strings.TrimSuffix(w, "/")
			told[dir] = true
			if _, err := os.Stat(filepath.Join("..", dir)); err != nil {
				t.Errorf("the tree has %s: %v", dir, err)
			}
		}
		if !strings.HasPrefix(line, " ") {
			parent = words[0]
		}
	}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel("..", path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") && d.Name() != ".." || d.Name() == "testdata" || rel == "bin"):
			return filepath.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".go" || filepath.Dir(rel) == ".":
			return nil
		}
		dir := filepath.Dir(rel)
		top, _, below := strings.Cut(dir, "/")
		if group := top == "adapters" || top == "internal"; group && below {
			second, _, _ := strings.Cut(dir[len(top)+1:], "/")
			top += "/" + second
		}
		if !told[top] {
			t.Errorf("the tree in docs/design.md has no line for %s", top)
			told[top] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

var link = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)

// TestLinks: links between pages lead somewhere.
func TestLinks(t *testing.T) {
	for _, pattern := range []string{"*.md", "adr/*.md", "../README.md", "../CONTRIBUTING.md", "../CHANGELOG.md"} {
		pages, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, page := range pages {
			for _, m := range link.FindAllStringSubmatch(read(t, page), -1) {
				if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
					t.Errorf("%s links to %s: %v", page, m[1], err)
				}
			}
		}
	}
}
