package catalog

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/sand-boxer/sandboxer"
)

// A Fault is one thing wrong with one file.
type Fault struct {
	File string `json:"file"` // as the user would name it
	// Line and Column count from 1, in characters. Both are 0 when the fault is
	// about the file itself (it cannot be read).
	Line   int    `json:"line,omitempty"`
	Column int    `json:"column,omitempty"`
	Path   string `json:"path,omitempty"` // "limits.memory", "ports[0]"; empty for the whole document
	// Message says what is wrong, without the path.
	Message    string `json:"message"`
	Suggestion string `json:"suggestion,omitempty"` // what was probably meant
	Excerpt    string `json:"excerpt,omitempty"`    // the line, secrets blanked out
	Width      int    `json:"width,omitempty"`      // characters the caret underlines
}

// Faults is everything wrong with a set of files, in the order of files and lines.
// It is an error of Kind Invalid; its JSON form is a list of Fault.
type Faults []Fault

// Error renders the faults file by file, each with its position, its excerpt and a
// caret under the culprit.
func (fs Faults) Error() string {
	var b strings.Builder
	for i := 0; i < len(fs); {
		j := i
		for j < len(fs) && fs[j].File == fs[i].File {
			j++
		}
		if i > 0 {
			b.WriteByte('\n')
		}
		s := "s"
		if j-i == 1 {
			s = ""
		}
		fmt.Fprintf(&b, "%s: %d problem%s", fs[i].File, j-i, s)
		for _, f := range fs[i:j] {
			f.render(&b)
		}
		i = j
	}
	return b.String()
}

// Unwrap makes a set of faults an Invalid error whose sentence is the rendering.
func (fs Faults) Unwrap() error { return sandboxer.E(sandboxer.Invalid, nil, "%s", fs.Error()) }

const margin = "        "

func (f Fault) render(b *strings.Builder) {
	b.WriteByte('\n')
	if f.Line == 0 {
		b.WriteString("  " + f.text())
		return
	}
	fmt.Fprintf(b, "%3d:%-2d  %s", f.Line, f.Column, f.text())
	if f.Excerpt == "" {
		return
	}
	line, col := window([]rune(f.Excerpt), f.Column, f.Width)
	no := strconv.Itoa(f.Line)
	fmt.Fprintf(b, "\n%s%s | %s", margin, no, line)
	fmt.Fprintf(b, "\n%s%s | %s%s", margin, strings.Repeat(" ", len(no)), strings.Repeat(" ", col-1), strings.Repeat("^", max(1, f.Width)))
}

func (f Fault) text() string {
	s := f.Message
	if f.Path != "" {
		s = f.Path + ": " + s
	}
	if f.Suggestion != "" {
		s += fmt.Sprintf(" (did you mean %q?)", f.Suggestion)
	}
	return s
}

// window cuts a long line to what fits a terminal around the caret, and replaces
// characters that would disturb one. It returns the column of the caret in the result.
func window(line []rune, col, width int) (string, int) {
	const most = 100
	for i, r := range line {
		switch {
		case r == '\t':
			line[i] = '→'
		case !unicode.IsPrint(r):
			line[i] = '\uFFFD'
		}
	}
	end := min(len(line), col-1+min(max(1, width), most/2)+most/5)
	if start := end - most; start > 0 {
		line = append([]rune("…"), line[min(start+1, len(line)):]...)
		col -= start
	}
	if len(line) > most {
		line = append(line[:most-1:most-1], '…')
	}
	return string(line), col
}

func (fs Faults) sorted() Faults {
	slices.SortStableFunc(fs, func(a, b Fault) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return slices.CompactFunc(fs, func(a, b Fault) bool {
		return a.File == b.File && a.Line == b.Line && a.Column == b.Column && a.Path == b.Path && a.Message == b.Message
	})
}

// listed joins words for a sentence: "a, b or c".
func listed[S ~string](words []S, last string) string {
	var b strings.Builder
	for i, w := range words {
		switch {
		case i > 0 && i == len(words)-1:
			b.WriteString(" " + last + " ")
		case i > 0:
			b.WriteString(", ")
		}
		b.WriteString(string(w))
	}
	return b.String()
}

// Combine returns all errs as one: their faults together, in order, unless one is something else. nil if
// there is none.
func Combine(errs ...error) error {
	var all Faults
	others := false
	for _, err := range errs {
		if fs := FaultsOf(err); fs != nil {
			all = append(all, fs...)
		} else if err != nil {
			others = true
		}
	}
	switch {
	case others:
		return errors.Join(errs...)
	case len(all) > 0:
		return all.sorted()
	}
	return nil
}

// FaultsOf returns the faults that err is; nil if it is something else.
func FaultsOf(err error) Faults {
	var fs Faults
	errors.As(err, &fs)
	return fs
}
