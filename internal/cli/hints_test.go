package cli

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// advice is where a text names a command to type: after punctuation, in a column of
// its own, or in a substitution. Elsewhere "sandboxer" is a word of the sentence.
var (
	advice = regexp.MustCompile(`(?:[:;?|] +|  +|\$\()(sandboxer +[^\n]*)`)
	verb   = regexp.MustCompile(`%[a-z]`)
)

// TestHints: whatever hints, notes and help texts tell people to type is a command
// of that name, with flags and arguments that it takes. Nothing is executed.
func TestHints(t *testing.T) {
	tried := 0
	err := filepath.WalkDir(filepath.Join("..", ".."), func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "testdata" || len(d.Name()) > 2 && d.Name()[0] == '.') {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		eachText(file, func(at token.Pos, text string) {
			for _, line := range commandsIn(text) {
				if err := parses(t, line); err != nil {
					t.Errorf("%s: %s\n\t%v", fset.Position(at), line, err)
				}
				tried++
			}
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if tried < 30 {
		t.Errorf("only %d commands were found", tried)
	}
}

// eachText calls f with every constant text of the file. A hint's begins with ": ",
// because a hint may be nothing but a command.
func eachText(file *ast.File, f func(token.Pos, string)) {
	hint := map[ast.Expr]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if sel, ok := n.Fun.(*ast.SelectorExpr); ok && sel.Sel.Name == "WithHint" && len(n.Args) > 0 {
				hint[n.Args[0]] = true
			}
		case *ast.KeyValueExpr:
			if key, ok := n.Key.(*ast.Ident); ok && key.Name == "Hint" {
				hint[n.Value] = true
			}
		case ast.Expr:
			text, ok := constantText(n)
			if !ok {
				return true
			}
			if hint[n] {
				text = ": " + text
			}
			f(n.Pos(), text)
			return false
		}
		return true
	})
}

// constantText is the text of a literal, or of literals put together.
func constantText(x ast.Expr) (string, bool) {
	switch x := x.(type) {
	case *ast.BasicLit:
		if x.Kind != token.STRING {
			return "", false
		}
		return constant.StringVal(constant.MakeFromLiteral(x.Value, x.Kind, 0)), true
	case *ast.BinaryExpr:
		left, ok := constantText(x.X)
		right, also := constantText(x.Y)
		return left + right, ok && also && x.Op == token.ADD
	}
	return "", false
}

// commandsIn are the command lines that a text names, with something in the place of
// what it leaves open.
func commandsIn(text string) (lines []string) {
	for at := 0; at < len(text); {
		m := advice.FindStringSubmatchIndex(text[at:])
		if m == nil {
			break
		}
		line := text[at+m[2] : at+m[3]]
		at += m[2] + len("sandboxer")
		// The catalogue's hint, about profiles and extensions, leaves the command open.
		line = strings.Replace(line, "sandboxer %s", "sandboxer profile", 1)
		lines = append(lines, verb.ReplaceAllStringFunc(line, func(v string) string {
			if v == "%d" {
				return "1"
			}
			return "x"
		}))
	}
	return lines
}

// parses reports why line is not a command that can be typed, under the name that the
// documentation has for it. A command may be named without its arguments.
func parses(t *testing.T, line string) error {
	words := shellWords(line)
	cmd, rest, err := newCmdRoot(testFactory(t)).Find(words[1:])
	if err != nil {
		return err
	}
	if !strings.HasPrefix(strings.Join(words, " ")+" ", cmd.CommandPath()+" ") {
		return fmt.Errorf("this is another name of %s", cmd.CommandPath())
	}
	if err := cmd.ParseFlags(rest); err != nil {
		if strings.Contains(err.Error(), "help requested") {
			return nil
		}
		return err
	}
	if given := cmd.Flags().Args(); len(given) > 0 {
		return cmd.ValidateArgs(given)
	}
	return nil
}

func TestCommandsIn(t *testing.T) {
	for text, want := range map[string]string{
		"wait for it: sandboxer wait %s":                     "sandboxer wait x",
		"see all with: sandboxer %s ls":                      "sandboxer profile ls",
		"kept: sandboxer shell %s   |   sandboxer rm %s":     "sandboxer shell x   |   sandboxer rm x&sandboxer rm x",
		"  sandboxer ls     all\n  sandboxer --help":         "sandboxer ls     all&sandboxer --help",
		"listen on: sandboxer port forward x %d":             "sandboxer port forward x 1",
		"sandboxer itself failed; run sandboxer as root":     "",
		"what sandboxer made":                                "",
		"a: b\nID=$(sandboxer create -q)":                    "sandboxer create -q)",
		"without a server: start one with: sandboxer up now": "sandboxer up now",
	} {
		if got := strings.Join(commandsIn(text), "&"); got != want {
			t.Errorf("%q names %q; want %q", text, got, want)
		}
	}
	for line, want := range map[string]bool{
		"sandboxer ls --all": true, "sandboxer wait": true, "sandboxer --help": true, "sandboxer exec x -- CMD -x": true,
		"sandboxer port opn": false, "sandboxer list --all": false, "sandboxer port shut": false, "sandboxer lss": false, "sandboxer ls --al": false, "sandboxer get a b": false,
	} {
		if err := parses(t, line); (err == nil) != want {
			t.Errorf("%s: %v", strconv.Quote(line), err)
		}
	}
}
