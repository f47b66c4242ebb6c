package cli

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// advice is where a text names a command to type: after punctuation or "or", in parentheses, in a column of
// its own, or in a substitution. Elsewhere "sandboxer" is a word of the sentence.
var (
	advice = regexp.MustCompile(`(?:[:;?|,] +|  +|\(|\bor +)(sandboxer +[^\n]*)`)
	verb   = regexp.MustCompile(`%[a-z]`)
)

// TestHints: whatever hints, notes and help texts tell people to type is a command
// of that name, with flags and arguments that it takes. Nothing is executed.
func TestHints(t *testing.T) {
	tried := 0
	eachCommand(t, func(at, line string) {
		if err := parses(t, line); err != nil {
			t.Errorf("%s: %s\n\t%v", at, line, err)
		}
		tried++
	})
	if tried < 30 {
		t.Errorf("only %d commands were found", tried)
	}
}

// notTyped are commands of texts that TestHintsAreTyped leaves out, by how they begin.
var notTyped = []struct{ begins, why string }{
	{"--help", "the help is read by docs.TestCommands"},
	{"--url https://…", "an option of every command, with an address left open"},
	{"bench", "docs.TestCommands types it"},
	{"cp", "docs.TestCommands types it"},
	{"credits sink", "no sink is declared; docs.TestCommands types it"},
	{"exec x -- CMD…", "leaves the command open"},
	{"exec x -- make test", "docs.TestCommands types it, in a project with that"},
	{"exec x -- tar x", "docs.TestCommands types it, with something to unpack"},
	{"exec x -- tar -C x", "a workspace to be copied by hand, of a directory that is left open"},
	{"exec x -- tar -c", "as that"},
	{"host add", "leaves the host open; docs.TestCommands types it with one"},
	{"host drain", "of a host that a test with a server of SSH has"},
	{"host probe", "as that"},
	{"host rm --force", "as that"},
	{"network set", "the fake filters nothing; docs.TestCommands types it"},
	{"forget", "of a sandbox that cannot be removed; TestProject of cmd/sandboxer types it"},
	{"backup restore --data-dir", "as a server says it that has found its database damaged; TestScripts/backup types it"},
	{"backup restore FILE", "as that"},
	{"port url", "needs a server that listens on an address; TestScripts types it"},
	{"port forward", "goes on until it is interrupted; TestScripts types it"},
	{"run local-public", "docs.TestCommands types it"},
	{"run --input repo=. -- make test", "docs.TestCommands types it, in a project with that"},
	{"run -- CMD…", "leaves the command open"},
	{"serve", "goes on until it is interrupted; TestScripts types it"},
	{"restore x --kind portable", "of a snapshot in both forms; TestScripts types it"},
	{"up --listen", "takes a port that somebody may have; docs.TestCommands types it"},
	{"destroy --label", "asks on a terminal, which is not here"},
	{"secret set", "reads a value; TestScripts types it"},
	{"secret rm", "of a secret that is there; TestScripts types it"},
	{"shell", "needs a terminal; TestScripts types it"},
	{"create -q)", "a part of a longer line; docs.TestCommands types it"},
	{"exec", "the name of a command"},
	{"create --profile", "docs.TestCommands types it, with what that needs"},
	{"pool drain", "of a profile with a pool; TestScripts types it"},
	{"restore SNAPSHOT --input", "as host drain"},
	{"exec x -- COMMAND", "leaves the command open"},
	{"host rm", "as host drain"},
	{"profile init", "makes one of ext.local, which is not built in here; docs.TestCommands types it"},
	{"profile validate x", "of a file that has a fault"},
	{"extension test", "of a file that extension new writes; TestPrograms types it"},
}

// What a text leaves open stands for something that is there, and every command of a text
// works as it stands.
func TestHintsAreTyped(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a server, and types every command")
	}
	home, err := os.MkdirTemp("", "sbx") // a socket's name is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stopServer(t, home); removeHome(t, home) })
	run := func(args ...string) ([]byte, error) {
		cmd := selfCommand(home, args...)
		cmd.Dir = t.TempDir()
		return cmd.CombinedOutput()
	}
	exists := func(name string, make ...string) {
		t.Helper()
		if _, err := run(strings.Fields(name)...); err == nil {
			return
		}
		if make[0] == "create" {
			_, _ = run("destroy", "x") // the fake forgets its sandboxes when the server ends
		}
		if out, err := run(make...); err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(make, " "), err, out)
		}
	}
	prepare := func() {
		t.Helper()
		exists("status", "up")
		exists("exec x -- true", "create", "--name", "x", "--label", "is=x")
		_, _ = run("snapshot", "rm", "x") // as above
		if out, err := run("snapshot", "create", "x", "--name", "x"); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	reads := map[string]bool{"ls": true, "get": true, "status": true, "events": true, "stats": true, "version": true, "quota": true}
	prepared := false
	typed := map[string]bool{}
	try := func(at, line string) {
		for _, stop := range []string{"; ", "   ", " | ", "# "} {
			if before, _, found := strings.Cut(line, stop); found && !strings.Contains(line, "--help") {
				line = before
			}
		}
		words := shellWords(line)[1:]
		for i, w := range words {
			switch w {
			case "7k2m", "7k2mq0xa", "ID":
				words[i] = "x"
			case "NAME":
				words[i] = "ext.fake"
			case "x=x":
				words[i] = "is=x"
			case "--scope":
				words[i+1] = "read"
			}
		}
		said := strings.Join(words, " ")
		if typed[said] {
			return
		}
		typed[said] = true
		for _, n := range notTyped {
			if n.begins == said || n.begins != "exec" && strings.HasPrefix(said, n.begins) {
				return
			}
		}
		if words[0] != "up" && words[0] != "down" {
			if !prepared {
				prepare()
			}
			if words[0] == "backup" && len(words) > 1 && words[1] == "restore" {
				_, _ = run("backup")
				_, _ = run("down")
			}
		}
		// After anything else, what is there is made again for the next one.
		prepared = reads[words[0]] || len(words) > 1 && words[1] == "ls"
		if out, err := run(words...); err != nil {
			t.Errorf("%s: sandboxer %s: %v\n%s", at, said, err, out)
		}
		if words[0] == "backup" && len(words) > 1 && words[1] == "restore" {
			exists("status", "up")
			if out, err := run("accept"); err != nil { // else the audit of doctor has something to say
				t.Errorf("accept: %v\n%s", err, out)
			}
		}
	}
	eachCommand(t, try)
	for _, page := range append(docPages(t), filepath.Join("..", "..", "README.md")) {
		data, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		// What is in blocks docs.TestCommands types.
		for _, m := range codeSpan.FindAllStringSubmatch(codeBlock.ReplaceAllString(string(data), ""), -1) {
			line := strings.Join(strings.Fields(m[1]), " ") // a page may be wrapped in it
			cmd, rest, err := newCmdRoot(testFactory(t)).Find(shellWords(line)[1:])
			if err == nil && len(rest) == 0 && (cmd.ValidateArgs(nil) != nil || cmd.HasSubCommands() && !cmd.Runnable()) {
				continue // the name of a command
			}
			try(page, line)
		}
	}
}

// eachCommand calls f with each command line that a text of the program names, and where that
// is.
func eachCommand(t *testing.T, f func(at, line string)) {
	t.Helper()
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
				f(fset.Position(at).String(), line)
			}
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// eachText calls f with every constant text of the file. A hint's begins with ": ", because a hint may be
// nothing but a command.
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
		"drop some (sandboxer snapshot rm ID), or ask":       "sandboxer snapshot rm ID), or ask",
		"if paused, sandboxer resume %s; or sandboxer wait":  "sandboxer resume x; or sandboxer wait&sandboxer wait",
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
