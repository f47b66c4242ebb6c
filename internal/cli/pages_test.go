package cli

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

var (
	codeBlock  = regexp.MustCompile("(?ms)^ *```[a-z]*\n(.*?)^ *```")
	codeSpan   = regexp.MustCompile("`(sandboxer [^`]+)`")
	invocation = regexp.MustCompile(`(?m)(?:^\s*(?:\$ )?|\$\()sandboxer((?: [^\n]*)?)$`)
)

// docPages returns the pages below docs.
func docPages(t *testing.T) (pages []string) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join("..", "..", "docs"), func(name string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(name, ".md") {
			pages = append(pages, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return pages
}

// TestPages: whatever the pages tell people to type is a command with flags and
// arguments that it takes. Nothing is executed.
func TestPages(t *testing.T) {
	above, err := filepath.Glob("../../*.md")
	if err != nil {
		t.Fatal(err)
	}
	pages := append(above, docPages(t)...)
	tried := 0
	for _, page := range pages {
		data, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		type text struct {
			string
			typed bool // in a block
		}
		var lines []text
		for _, block := range codeBlock.FindAllStringSubmatch(string(data), -1) {
			for _, m := range invocation.FindAllStringSubmatch(block[1], -1) {
				lines = append(lines, text{"sandboxer" + m[1], true})
			}
		}
		for _, m := range codeSpan.FindAllStringSubmatch(codeBlock.ReplaceAllString(string(data), ""), -1) {
			lines = append(lines, text{m[1], false})
		}
		for _, line := range lines {
			args := shellWords(line.string)[1:]
			root := newCmdRoot(testFactory(t))
			cmd, rest, err := root.Find(args)
			if err == nil {
				err = cmd.ParseFlags(rest)
			}
			if (err == nil || errors.Is(err, pflag.ErrHelp)) && slices.Contains(rest, "--help") {
				continue
			}
			// A command in the running text may be named without its arguments.
			if given := cmd.Flags().Args(); err == nil && (line.typed || len(given) > 0) {
				err = cmd.ValidateArgs(given)
			}
			if err != nil {
				t.Errorf("%s: %s\n\t%v", filepath.Base(page), line.string, err)
			}
			tried++
		}
	}
	if tried < 30 {
		t.Errorf("only %d command lines were found in %d pages", tried, len(pages))
	}
}

// shellWords splits a line as a shell does, as far as the pages need it: with quotes, up
// to the end of the command, a comment, or a wide space with an explanation behind it.
func shellWords(line string) (words []string) {
	var word strings.Builder
	var quote rune
	some := false
	end := func() {
		if some {
			words = append(words, word.String())
		}
		word.Reset()
		some = false
	}
	for i, r := range line {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(r)
		case r == '\'' || r == '"':
			quote, some = r, true
		case r == ' ':
			end()
			if strings.HasPrefix(line[i:], "   ") {
				return words
			}
		case strings.ContainsRune(";|&)<>", r), r == '#' && i > 0 && line[i-1] == ' ':
			end()
			return words
		default:
			word.WriteRune(r)
			some = true
		}
	}
	end()
	return words
}

func TestShellWords(t *testing.T) {
	for line, want := range map[string][]string{
		`sandboxer ls   # all`:               {"sandboxer", "ls"},
		`sandboxer run -- sh -c 'a; b "c"'`:  {"sandboxer", "run", "--", "sh", "-c", `a; b "c"`},
		`sandboxer create -q)`:               {"sandboxer", "create", "-q"},
		`sandboxer get x "" | jq`:            {"sandboxer", "get", "x", ""},
		`sandboxer shell x    a shell in it`: {"sandboxer", "shell", "x"},
		`sandboxer get a#b`:                  {"sandboxer", "get", "a#b"},
	} {
		if got := shellWords(line); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
}
