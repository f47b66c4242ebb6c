package catalog

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
)

// Bounds on one file: hand-written ones are a few kilobytes, and no user reads more
// faults than that at once.
const (
	maxFile    = 1 << 20
	maxFaults  = 100
	maxExcerpt = 2000 // characters of a line that is still shown
)

// source is one file's text together with what was found wrong with it.
type source struct {
	name   string
	lines  []string
	masks  []mask
	faults Faults
}

// mask is a stretch of one line that no excerpt may show.
type mask struct{ line, col, width int }

// breaks are the line breaks that the parser counts.
var breaks = strings.NewReplacer("\r\n", "\n", "\r", "\n", "\u0085", "\n", "\u2028", "\n", "\u2029", "\n")

func newSource(name string, data []byte) *source {
	text := strings.TrimPrefix(string(data), "\ufeff")
	return &source{name: name, lines: strings.Split(breaks.Replace(text), "\n")}
}

// at records a fault at a position, which is moved into the file if the parser
// named one just outside of it.
func (s *source) at(line, col, width int, path, suggestion, format string, args ...any) {
	switch {
	case len(s.faults) > maxFaults:
		return
	case len(s.faults) == maxFaults:
		path, suggestion, format, args = "", "", "too many problems: the rest is not shown", nil
	}
	line = min(max(line, 1), len(s.lines))
	for line > 1 && line == len(s.lines) && s.lines[line-1] == "" {
		line-- // the end of the file means the end of its last line
		col = utf8.RuneCountInString(s.lines[line-1]) + 1
	}
	col = min(max(col, 1), utf8.RuneCountInString(s.lines[line-1])+1)
	s.faults = append(s.faults, Fault{
		File: s.name, Line: line, Column: col, Width: min(max(1, width), 80),
		Path: clipPath(path), Message: fmt.Sprintf(format, args...), Suggestion: suggestion,
	})
}

// clipPath keeps both ends of a very long path.
func clipPath(path string) string {
	if r := []rune(path); len(r) > 80 {
		return string(r[:40]) + "…" + string(r[len(r)-39:])
	}
	return path
}

// full reports that looking for more faults is pointless.
func (s *source) full() bool { return len(s.faults) > maxFaults }

// node records a fault at a node.
func (s *source) node(n *yaml.Node, path, suggestion, format string, args ...any) {
	s.at(n.Line, n.Column, s.width(n), path, suggestion, format, args...)
}

// take returns the faults recorded since the last call, with their excerpts.
func (s *source) take() Faults {
	fs := s.faults
	s.faults = nil
	for i := range fs {
		f := &fs[i]
		if f.Line == 0 || f.Excerpt != "" {
			continue
		}
		line := []rune(s.lines[f.Line-1])
		if len(line) > maxExcerpt {
			continue
		}
		for _, m := range s.masks {
			if m.line != f.Line {
				continue
			}
			for c := m.col - 1; c < min(len(line), m.col-1+m.width); c++ {
				line[c] = '*'
			}
		}
		f.Excerpt = strings.TrimRight(string(line), " \t")
	}
	return fs.sorted()
}

// hide keeps a scalar out of every excerpt.
func (s *source) hide(n *yaml.Node) {
	if n.Kind != yaml.ScalarNode || n.Line < 1 || n.Line > len(s.lines) {
		return
	}
	last := n.Line + strings.Count(n.Value, "\n")
	width := s.width(n)
	if !strings.Contains(s.lines[n.Line-1], n.Value) { // spread over lines, or escaped
		width = 1 << 20
		for last < len(s.lines) && indent(s.lines[last]) > indent(s.lines[n.Line-1]) {
			last++
		}
	}
	s.masks = append(s.masks, mask{n.Line, n.Column, width})
	for l := n.Line + 1; l <= last; l++ {
		s.masks = append(s.masks, mask{l, 1, 1 << 20})
	}
}

// hideAll keeps every scalar under n out of excerpts.
func (s *source) hideAll(n *yaml.Node) {
	s.hide(n)
	for i, c := range n.Content {
		if n.Kind != yaml.MappingNode || i%2 == 1 {
			s.hideAll(c)
		}
	}
}

func indent(line string) int { return len(line) - len(strings.TrimLeft(line, " \t")) }

// width measures how far a node reaches on its first line.
func (s *source) width(n *yaml.Node) int {
	if n.Line < 1 || n.Line > len(s.lines) {
		return 1
	}
	line := []rune(s.lines[n.Line-1])
	if n.Column < 1 || n.Column > len(line) {
		return 1
	}
	rest := line[n.Column-1:]
	switch {
	case n.Kind == yaml.AliasNode:
		return 1 + utf8.RuneCountInString(n.Value)
	case n.Kind != yaml.ScalarNode:
		return 1
	case rest[0] == '"':
		for i := 1; i < len(rest); i++ {
			if rest[i] == '\\' {
				i++
			} else if rest[i] == '"' {
				return i + 1
			}
		}
		return len(rest)
	case rest[0] == '\'':
		for i := 1; i < len(rest); i++ {
			if rest[i] == '\'' {
				if i+1 < len(rest) && rest[i+1] == '\'' {
					i++
					continue
				}
				return i + 1
			}
		}
		return len(rest)
	case strings.HasPrefix(string(rest), n.Value):
		return max(1, utf8.RuneCountInString(n.Value))
	case rest[0] == '&' || rest[0] == '!':
		return max(1, len(strings.TrimRight(string(rest), " ")))
	}
	return 1
}

// parse reads the one document of data. It returns nil after recording faults when
// there is nothing to decode.
func (s *source) parse(data []byte) *yaml.Node {
	if len(data) > maxFile {
		s.lines = []string{""}
		s.at(1, 1, 1, "", "", "the file is larger than 1 MiB")
		return nil
	}
	if !s.readable() {
		return nil
	}
	var docs []yaml.Node
	err := yaml.Load(data, &docs, yaml.WithAllDocuments(), yaml.WithUniqueKeys(false))
	if err != nil {
		s.syntax(err)
		return nil
	}
	for _, d := range docs[min(1, len(docs)):] {
		s.at(d.Line, d.Column, 3, "", "", "a second document begins here: one file declares one thing")
	}
	if len(docs) == 0 || len(docs[0].Content) == 0 || docs[0].Content[0].Tag == "!!null" {
		s.at(1, 1, 1, "", "", "the file is empty")
		return nil
	}
	return docs[0].Content[0]
}

// readable finds the characters that YAML forbids, which the parser would report
// without a position.
func (s *source) readable() bool {
	ok := true
	for i, line := range s.lines {
		col := 0
		for j, r := range line {
			col++
			switch {
			case r == utf8.RuneError && !strings.HasPrefix(line[j:], "\uFFFD"):
				s.at(i+1, col, 1, "", "", "the file is not UTF-8 text (byte 0x%02x)", line[j])
			case r < ' ' && r != '\t', r >= 0x7f && r < 0xa0, r == 0xfeff, r == 0xfffe, r == 0xffff:
				s.at(i+1, col, 1, "", "", "the control character %U is not allowed", r)
			default:
				continue
			}
			ok = false
			break
		}
	}
	return ok
}

// syntax translates the parser's complaint into advice.
func (s *source) syntax(err error) {
	var e *yaml.LoadError
	if !errors.As(err, &e) {
		s.at(1, 1, 1, "", "", "not YAML: %s", strings.TrimPrefix(err.Error(), "yaml: "))
		return
	}
	line, col := e.Mark.Line, e.Mark.Column
	has := func(part string) bool { return strings.Contains(e.Message, part) }
	char := s.char(line, col)
	switch {
	case has("tab character"), has("mixed spaces and tabs"), has("space indentation is required"),
		has("cannot start any token") && char == '\t':
		s.tabs(line)
	case has("cannot start any token"):
		s.at(line, col, 1, "", "", "a value cannot begin with %q: put it in quotes", char)
	case has("mapping values are not allowed"):
		s.at(line, col, 1, "", "", `an unexpected ":": align this key with the keys above it, or put a value that contains ": " in quotes`)
	case has("unexpected end of stream"):
		s.at(e.ContextMark.Line, e.ContextMark.Column, 1, "", "", "this quoted text is never closed")
	case has("expected ',' or ']'"), has("expected ',' or '}'"):
		closing := "]"
		if has("'}'") {
			closing = "}"
		}
		s.at(e.ContextMark.Line, e.ContextMark.Column, 1, "", "", `not closed with %q: it is still open at %d:%d`, closing, line, col)
	case has("did not find expected key"), has("expected '-' indicator"), has("block sequence entries are not allowed"):
		s.at(line, col, 1, "", "", "the indentation does not fit what is above")
	case has("could not find expected ':'"):
		if e.ContextMark.Line > 0 {
			line, col = e.ContextMark.Line, e.ContextMark.Column
		}
		s.at(line, col, 1, "", "", `expected "key: value"`)
	case has("unknown anchor"):
		s.at(line, col, 1, "", "", "this alias refers to an anchor that is not defined above it")
	case has("unknown escape"), has("hexadecimal"), has("invalid Unicode character escape"):
		s.at(line, col, 1, "", "", `a backslash in double quotes begins an escape: write \\, or use single quotes`)
	case has("incompatible YAML document"), has("directive"):
		s.at(line, col, 1, "", "", "directives are not accepted: remove this line")
	case has("max depth"):
		s.at(line, col, 1, "", "", "nested too deeply")
	default:
		msg := e.Message
		if e.ContextMsg != "" {
			msg = e.ContextMsg + ": " + msg
		}
		s.at(line, col, 1, "", "", "not YAML: %s", msg)
	}
}

// tabs reports every line that is indented with a tab, since all of them have to change.
func (s *source) tabs(line int) {
	n := len(s.faults)
	for i, l := range s.lines {
		lead := l[:indent(l)]
		if j := strings.IndexByte(lead, '\t'); j >= 0 && indent(l) < len(l) {
			s.at(i+1, j+1, len(lead)-j, "", "", "a tab in the indentation: YAML is indented with spaces")
		}
	}
	if len(s.faults) == n {
		s.at(line, 1, 1, "", "", "a tab where YAML wants spaces")
	}
}

func (s *source) char(line, col int) rune {
	if line < 1 || line > len(s.lines) {
		return 0
	}
	l := []rune(s.lines[line-1])
	if col < 1 || col > len(l) {
		return 0
	}
	return l[col-1]
}
