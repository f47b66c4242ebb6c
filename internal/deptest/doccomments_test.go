package deptest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// documented are the packages that other programs import: each exported name has a doc comment in plain words.
var documented = []string{".", "api", "agent", "extension"}

// dialect matches words that no doc comment has. CONTRIBUTING.md says how comments are written.
var dialect = regexp.MustCompile(`\banew\b|\bof which\b|\bstands still\b|\bis told\b|\bone of yours\b|\bthere is but one\b|(^|[.:] )(Who|Whoever) `)

// TestDocComments holds every exported identifier of the public packages to a doc comment. Fields of structs and
// the only method of an interface may go without: their names and the comment of their type suffice.
func TestDocComments(t *testing.T) {
	for _, dir := range documented {
		entries, err := os.ReadDir(filepath.Join("../..", dir))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, e := range entries {
			if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
				continue
			}
			n++
			checkDocs(t, filepath.Join("../..", dir, e.Name()), nil)
		}
		if n == 0 {
			t.Errorf("%s: no Go files", dir)
		}
	}
}

// TestDocCommentsAreSeen: the check finds what it is there for.
func TestDocCommentsAreSeen(t *testing.T) {
	for src, want := range map[string]string{
		"type T int":                                    "T",
		"func F() {}":                                   "F",
		"const A = 1":                                   "A",
		"var A int":                                     "A",
		"// T is.\ntype T int\nfunc (*T) M() {}":        "T.M",
		"// I is.\ntype I interface{ A(); B() }":        "I.A",
		"// F is\n// told anew.\nfunc F() {}":           "told anew",
		"// F does.\n//\n// Who calls it.\nfunc F(){}":  "Who calls",
		"// T is.\ntype T struct{ A int // of which\n}": "of which",
		"// f is told.\nfunc f() {}":                    "",
		"// A is a bound.\nconst (\nA = 1\nB = 2\n)":    "",
		"type t int\nfunc (t) M() {}":                   "",
	} {
		var found []string
		checkDocs(t, "x.go", &source{"package x\n\n" + src, func(what string) { found = append(found, what) }})
		if got := strings.Join(found, "\n"); want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%q: found %q, want %q", src, got, want)
		}
	}
}

// source is a file for checkDocs that is no file: its text, and where complaints go.
type source struct {
	text string
	bad  func(what string)
}

func checkDocs(t *testing.T, path string, s *source) {
	t.Helper()
	fset := token.NewFileSet()
	var src any
	bad := func(what string) {}
	if s != nil {
		src, bad = s.text, s.bad
	}
	f, err := parser.ParseFile(fset, path, src, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	complain := func(pos token.Pos, what string) {
		if s != nil {
			bad(what)
			return
		}
		t.Errorf("%s: %s", fset.Position(pos), what)
	}
	plain := func(comments ...*ast.CommentGroup) {
		for _, c := range comments {
			if c == nil {
				continue
			}
			text := strings.Join(strings.Fields(strings.ReplaceAll(c.Text(), "\n\n", ". ")), " ")
			if at := dialect.FindStringIndex(text); at != nil {
				complain(c.Pos(), "write it in plain words: "+text[max(0, at[0]-30):min(len(text), at[1]+30)])
			}
		}
	}
	want := func(name string, pos token.Pos, comments ...*ast.CommentGroup) {
		plain(comments...)
		for _, c := range comments {
			if c != nil {
				return
			}
		}
		complain(pos, name+" has no doc comment")
	}
	plain(f.Doc)
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			name := d.Name.Name
			if d.Recv != nil {
				recv := receiver(d.Recv.List[0].Type)
				if !ast.IsExported(recv) {
					continue
				}
				name = recv + "." + name
			}
			if d.Name.IsExported() {
				want(name, d.Pos(), d.Doc)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					if spec.Name.IsExported() {
						want(spec.Name.Name, spec.Pos(), spec.Doc, spec.Comment, d.Doc)
						checkMembers(spec, plain, want)
					}
				case *ast.ValueSpec:
					for _, name := range spec.Names {
						if name.IsExported() {
							want(name.Name, name.Pos(), spec.Doc, spec.Comment, d.Doc)
						}
					}
				}
			}
		}
	}
}

// checkMembers checks the fields of a struct and the methods of an interface.
func checkMembers(spec *ast.TypeSpec, plain func(...*ast.CommentGroup), want func(string, token.Pos, ...*ast.CommentGroup)) {
	switch typ := spec.Type.(type) {
	case *ast.StructType:
		for _, field := range typ.Fields.List {
			plain(field.Doc, field.Comment)
		}
	case *ast.InterfaceType:
		for _, m := range typ.Methods.List {
			if len(m.Names) == 1 && m.Names[0].IsExported() && len(typ.Methods.List) > 1 {
				want(spec.Name.Name+"."+m.Names[0].Name, m.Pos(), m.Doc, m.Comment)
				continue
			}
			plain(m.Doc, m.Comment)
		}
	}
}

// receiver returns the name of a method's receiver type.
func receiver(typ ast.Expr) string {
	switch typ := typ.(type) {
	case *ast.StarExpr:
		return receiver(typ.X)
	case *ast.IndexExpr:
		return receiver(typ.X)
	case *ast.Ident:
		return typ.Name
	}
	return ""
}
