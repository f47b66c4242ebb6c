// Package docs_test keeps the pages true: what they name exists.
package docs_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"html"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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
	text := read(t, "design/tour.md")
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
	text := read(t, "design/design.md")
	has := func(what, word string) {
		if !strings.Contains(text, "| "+word+" |") && !strings.Contains(text, "| `"+word+"` |") {
			t.Errorf("docs/design/design.md has no row for the %s %s", what, word)
		}
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
	text := read(t, "design/design.md")
	_, tree, _ := strings.Cut(text, "```text\n.  ")
	tree, _, ok := strings.Cut(tree, "```")
	if !ok {
		t.Fatal("docs/design/design.md has no tree")
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
			t.Errorf("the tree in docs/design/design.md has no line for %s", top)
			told[top] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

var (
	link      = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	anchored  = regexp.MustCompile(`\]\(([^)#:]*)#([^)]+)\)`)
	heading   = regexp.MustCompile(`(?m)^#+ (.+)$`)
	codeFence = regexp.MustCompile("(?ms)^ *```.*?^ *```")
	inAnchor  = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// markdown returns the pages below docs, in order.
func markdown(t *testing.T) (pages []string) {
	t.Helper()
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && d.Name() == "testdata":
			return fs.SkipDir
		case !d.IsDir() && strings.HasSuffix(name, ".md"):
			pages = append(pages, name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return pages
}

// anchors returns the anchors of a page's headings, as GitHub makes them.
func anchors(text string) map[string]bool {
	out := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(codeFence.ReplaceAllString(text, ""), -1) {
		out[strings.ReplaceAll(inAnchor.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")] = true
	}
	return out
}

// TestLinks: links between pages lead to pages that exist, and to headings that these have.
func TestLinks(t *testing.T) {
	for _, page := range append(markdown(t), "../README.md", "../CONTRIBUTING.md", "../CHANGELOG.md") {
		text := read(t, page)
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				t.Errorf("%s links to %s: %v", page, m[1], err)
			}
		}
		for _, m := range anchored.FindAllStringSubmatch(text, -1) {
			to := page
			if m[1] != "" {
				to = filepath.Join(filepath.Dir(page), m[1])
			}
			if data, err := os.ReadFile(to); err == nil && !anchors(string(data))[m[2]] {
				t.Errorf("%s links to %s#%s: the page has no such heading", page, m[1], m[2])
			}
		}
	}
}

// TestPagesAreShort: only references are long.
func TestPagesAreShort(t *testing.T) {
	if n := strings.Count(read(t, "../README.md"), "\n"); n > 120 {
		t.Errorf("README.md has %d lines, at most 120 are allowed", n)
	}
	for _, page := range markdown(t) {
		n := len(strings.Fields(codeFence.ReplaceAllString(read(t, page), "")))
		if n > 2000 && !strings.HasPrefix(page, "reference/") {
			t.Errorf("%s has %d words: put details into docs/reference, measurements and reasons into docs/design, or split it", page, n)
		}
	}
}

var pagePath = regexp.MustCompile(`\bdocs/[\w./-]+\.md\b`)

// TestPathsOfPages: a page that a source, a comment, a script or a page names exists.
func TestPathsOfPages(t *testing.T) {
	err := filepath.WalkDir("..", func(name string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel("..", name)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") && d.Name() != ".." || rel == "bin"):
			return fs.SkipDir
		case !d.Type().IsRegular() || rel == "docs/README.md": // it has the former paths
			return nil
		case !slices.Contains([]string{".go", ".md", ".yaml", ".py", ".sh", ".txt", ".txtar", ".service", ".toml", ""}, filepath.Ext(name)):
			return nil
		}
		for _, page := range pagePath.FindAllString(read(t, name), -1) {
			if _, err := os.Stat(filepath.Join("..", page)); err != nil {
				t.Errorf("%s names %s, which does not exist", rel, page)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

var (
	svgText    = regexp.MustCompile(`<text [^>]*>\$\x{a0}(.*)</text>`)
	svgSession = regexp.MustCompile("(?s)<<'END'\n(.*?)\nEND\n")
)

// TestSession: the picture shows the commands that its script types.
func TestSession(t *testing.T) {
	m := svgSession.FindStringSubmatch(read(t, "../scripts/session-svg.sh"))
	if m == nil {
		t.Fatal("scripts/session-svg.sh has no commands")
	}
	var shown []string
	for _, line := range svgText.FindAllStringSubmatch(read(t, "session.svg"), -1) {
		shown = append(shown, strings.ReplaceAll(html.UnescapeString(line[1]), "\u00a0", " "))
	}
	if got := strings.Join(shown, "\n"); got != m[1] {
		t.Errorf("docs/session.svg shows\n%s\nand its script types\n%s\ndraw it again: make build && scripts/session-svg.sh", got, m[1])
	}
}
