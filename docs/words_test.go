package docs_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// maxWords is how many words a sentence has at most in the pages that users read from
// beginning to end.
const maxWords = 35

var (
	comment      = regexp.MustCompile(`(?s)<!--.*?-->`)
	span         = regexp.MustCompile("(?s)``.+?``|`[^`]+`")
	linkText     = regexp.MustCompile(`(?s)\[([^\]]*)\]\([^)]*\)`)
	emphasis     = regexp.MustCompile(`\*+`)
	listItem     = regexp.MustCompile(`^ *(?:[-*]|\d+\.) +`)
	rule         = regexp.MustCompile(`^[|: -]+$`)
	endOfOne     = regexp.MustCompile(`[.!?][)"”’]*\s+`)
	abbreviation = regexp.MustCompile(`\b(?:e\.g|i\.e|etc|vs|cf)\.[)"]*\s+$`)
	hasLetter    = regexp.MustCompile(`[\p{L}\p{N}]`)
)

// sentences returns the sentences of a page: those of its paragraphs and lists, and those in
// the cells of its tables. Headings, comments and code have none; a span of code is one word.
func sentences(text string) (prose, cells []string) {
	text = comment.ReplaceAllString(codeFence.ReplaceAllString(text, ""), "")
	var paragraph []string
	flush := func() {
		prose = append(prose, split(strings.Join(paragraph, "\n"))...)
		paragraph = nil
	}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		switch trimmed := strings.TrimSpace(line); {
		case trimmed == "" || strings.HasPrefix(line, "#"):
			flush()
		case strings.HasPrefix(trimmed, "|"):
			flush()
			if rule.MatchString(trimmed) {
				continue
			}
			for _, cell := range strings.Split(span.ReplaceAllString(trimmed, "CODE"), "|") {
				cells = append(cells, split(cell)...)
			}
		case listItem.MatchString(line):
			flush()
			paragraph = append(paragraph, listItem.ReplaceAllString(line, ""))
		case strings.HasPrefix(line, "    ") && len(paragraph) == 0: // code without a fence
		default:
			paragraph = append(paragraph, trimmed)
		}
	}
	flush()
	return prose, cells
}

// split returns the sentences of one paragraph, without its marks.
func split(text string) (out []string) {
	text = span.ReplaceAllString(text, "CODE")
	text = emphasis.ReplaceAllString(linkText.ReplaceAllString(text, "$1"), "")
	add := func(s string) {
		if s = strings.Join(strings.Fields(s), " "); s != "" {
			out = append(out, s)
		}
	}
	start := 0
	for _, at := range endOfOne.FindAllStringIndex(text, -1) {
		if abbreviation.MatchString(text[:at[1]]) {
			continue
		}
		add(text[start:at[1]])
		start = at[1]
	}
	add(text[start:])
	return out
}

// words returns how many words a sentence has.
func words(sentence string) (n int) {
	for _, w := range strings.Fields(sentence) {
		if hasLetter.MatchString(w) {
			n++
		}
	}
	return n
}

func TestSentencesAreFound(t *testing.T) {
	prose, cells := sentences("# A heading. Of two.\n\nFirst one\ngoes on. *Second* has `a. b` and [a\nlink](x.md)? Third, e.g. this (1.5 MiB).\n" +
		"- an item\n  of two lines\n- another. Two.\n\n<!-- not. typed -->\n```sh\ncode. Code.\n```\n\n    code. Code.\n\n| cell. Two | `a|b` |\n|---|---|\n1. `x` ends.")
	want := []string{
		"First one goes on.", "Second has CODE and a link?", "Third, e.g. this (1.5 MiB).", "an item of two lines", "another.", "Two.", "CODE ends.",
	}
	if !slices.Equal(prose, want) {
		t.Errorf("sentences %q instead of %q", prose, want)
	}
	if want := []string{"cell.", "Two", "CODE"}; !slices.Equal(cells, want) {
		t.Errorf("cells %q instead of %q", cells, want)
	}
	if n := words("One – two, CODE: 3.5 MiB."); n != 5 {
		t.Errorf("%d words instead of 5", n)
	}
}

// TestSentencesAreShort: a sentence that has more words than maxWords is two.
func TestSentencesAreShort(t *testing.T) {
	for _, page := range proofread(t) {
		prose, _ := sentences(read(t, filepath.Join("..", page)))
		for _, s := range prose {
			if n := words(s); n > maxWords {
				t.Errorf("%s: a sentence has %d words, at most %d are allowed: %s", page, n, maxWords, s)
			}
		}
	}
}

// badWords are words and phrases that are hard to read or have another meaning in English,
// each with a better one. They are looked for in each sentence, whose beginning is ^.
var badWords = []struct {
	phrase *regexp.Regexp
	better string
}{
	{regexp.MustCompile(`^Who (?:[^?]*[^?])$`), `a noun: "a caller who …", "users that …"`},
	{regexp.MustCompile(`\b[Ww]hoever\b`), `a noun: "any caller that …", "the user who …"`},
	{regexp.MustCompile(`\b[Ww]homever\b`), "a noun"},
	{regexp.MustCompile(`^What (?:is|are|was|were|has|had) (?:[^?]*[^?])$`), `a noun: "files that …"`},
	{regexp.MustCompile(`\b(?:is|are|was|were|be|been|being) told\b`), `"is reported", "gets", "the message says"`},
	{regexp.MustCompile(`\b[Aa]new\b`), `"again", "new"`},
	{regexp.MustCompile(`\bof which\b`), `a second sentence, or "whose"`},
	{regexp.MustCompile(`\b(?:stands?|stood|standing) still\b`), `"is frozen", "is stopped"`},
	{regexp.MustCompile(`\bstands (?:in|at|on|there|here|beside|above|below|as)\b`), `"is"`},
	{regexp.MustCompile(`\blies\b`), `"is in"`},
	{regexp.MustCompile(`\bbeside\b`), `"next to", "in addition to"`},
	{regexp.MustCompile(`\bone of (?:yours|theirs|ours|mine)\b`), `"your own …"`},
	{regexp.MustCompile(`\bone's own\b`), `"your own …"`},
	{regexp.MustCompile(`\b[Tt]here (?:is|are|was|were) but\b`), `"there is only"`},
	{regexp.MustCompile(`\b[Bb]ut for\b`), `"except"`},
	{regexp.MustCompile(`\b[Hh](?:e|im|is|imself)\b`), `"the caller", "they"`},
	{regexp.MustCompile(`\b[Ww]hat (?:else )?there is\b`), `a noun`},
	{regexp.MustCompile(`\bhow-manieth\b`), `"a counter"`},
	{regexp.MustCompile(`\bto the end of (?:its|their) days\b`), `"until it ended"`},
	{regexp.MustCompile(`\bwhen (?:its|their) time is over\b`), `"when it expires"`},
}

// TestWords: pages and changes have no bad words.
func TestWords(t *testing.T) {
	for _, page := range proofread(t) {
		prose, cells := sentences(read(t, filepath.Join("..", page)))
		for _, s := range slices.Concat(prose, cells) {
			for _, bad := range badWords {
				if m := bad.phrase.FindString(s); m != "" {
					t.Errorf("%s: write %s instead of %q: %s", page, bad.better, m, s)
				}
			}
		}
	}
}

// TestBadWordsAreFound: each phrase of the list finds what it is for, and lets alone what is alike.
func TestBadWordsAreFound(t *testing.T) {
	find := func(s string) (out []string) {
		for _, bad := range slices.Concat(badWords, badInMessages) {
			if m := bad.phrase.FindString(s); m != "" {
				out = append(out, m)
			}
		}
		return out
	}
	for _, s := range []string{
		"Who distrusts guests gives it an account.", "Access for whoever has the key.", "Whomever it is for.", "What is claimed was there.",
		"The broker is told to end.", "It starts anew.", "Two files, of which one is new.", "The processors stand still.", "It stands in the log.",
		"The socket lies there.", "A file beside it.", "Any host, or one of yours.", "An account of one's own.", "There is but one.", "All but for one.",
		"The caller gets his result.", "It lists what there is.", "A how-manieth.", "It ran to the end of its days.", "It is removed when its time is over.",
		"Nobody used it.", "The ID cannot be had.", "It is tried again by itself.", "The quota is not yours to see.", "The server goes on stopping.",
		"It has 2, as many as it may have.", "%d files: 50 are the most.", "A size that cannot be: %d.", "The port of a name that cannot be", "%q is no port.",
		"The key is there twice.", "It reads what the engine says.", "See whether it runs.", "They go on; save them.",
	} {
		if got := find(s); len(got) != 1 {
			t.Errorf("%q: found %q", s, got)
		}
	}
	for _, s := range []string{
		"Who may mount?", "What is checked?", "What you type is compared.", "Besides that, it stands for a list.", "This history is not there.", "Users who have it renew it.",
		"root:x:0:0::/root:/bin/sh nobody:x:65534", "There is no port.", "It names a file that cannot be read.", "It goes on to the next.", "%q is no longer there.",
	} {
		if got := find(s); len(got) != 0 {
			t.Errorf("%q: found %q", s, got)
		}
	}
}

// badInMessages are phrases of messages that hide the subject or mean something else, in addition to badWords.
var badInMessages = []struct {
	phrase *regexp.Regexp
	better string
}{
	{regexp.MustCompile(`\b[Nn]obody(?:[^\w:]|$)`), `the subject: "no request", "the client"`}, // not the account of /etc/passwd
	{regexp.MustCompile(`\b(?:can|cannot|could|is to) be had\b`), `"is available", "is not available"`},
	{regexp.MustCompile(`\bby itself\b`), `"automatically"`},
	{regexp.MustCompile(`\bnot yours\b`), `"you cannot see …"`},
	{regexp.MustCompile(`\bgo(?:es)? on (?:starting|stopping|destroying|trying|running)\b`), `"continues to …"`},
	{regexp.MustCompile(`\bas many as (?:there|it|they) may\b`), `"the maximum"`},
	{regexp.MustCompile(`\bare the most\b`), `"the maximum is"`},
	{regexp.MustCompile(`\b(?:that|which) cannot be(?:[^\w ]|$)`), `"impossible", "invalid"`},
	{regexp.MustCompile(`%[.\d]*[qsdv] is no (?:[^\Wl]|l[^o])`), `"is not a …"`},
	{regexp.MustCompile(`\bis there twice\b`), `"occurs twice"`},
	{regexp.MustCompile(`\bwhat (?:the|an) \w+ (?:says|answers)\b`), `"the answer of …", "the output of …"`},
	{regexp.MustCompile(`\b[Ss]ee (?:that|whether)\b`), `"check that"`},
	{regexp.MustCompile(`\bgo(?:es)? on(?:[^\w ]|$)`), `"it continues to …"`},
}

// TestMessages: errors, hints, logs and help texts have no bad words. It looks at all strings of the programs.
func TestMessages(t *testing.T) {
	bad := slices.Concat(badWords, badInMessages)
	files := 0
	err := filepath.WalkDir("..", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "testdata" || d.Name() == ".git"):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		files++
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(lit.Value)
			if err != nil {
				t.Errorf("%s: %v", fset.Position(lit.Pos()), err)
				return true
			}
			if !strings.Contains(text, " ") { // a name
				return true
			}
			for _, s := range split(text) {
				for _, b := range bad {
					if m := b.phrase.FindString(s); m != "" {
						t.Errorf("%s: write %s instead of %q: %s", fset.Position(lit.Pos()), b.better, m, s)
					}
				}
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 100 {
		t.Errorf("%d files were looked at", files)
	}
}

// proofread returns the pages whose sentences are looked at, from the top of the module.
func proofread(t *testing.T) []string {
	t.Helper()
	pages := []string{"README.md"}
	for _, page := range markdown(t) {
		pages = append(pages, "docs/"+page)
	}
	changes, err := filepath.Glob("../changes/unreleased/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range changes {
		pages = append(pages, strings.TrimPrefix(change, "../"))
	}
	return pages
}
