package cli

import (
	"os"
	"strings"
	"unicode"

	"golang.org/x/term"
)

// streams are the standard files as the process was started with them.
type streams struct {
	in, out, err          *os.File
	inTTY, outTTY, errTTY bool
	color                 bool // on stderr
	live                  bool // stderr can redraw a line
}

func systemStreams() *streams {
	s := &streams{in: os.Stdin, out: os.Stdout, err: os.Stderr}
	s.inTTY, s.outTTY, s.errTTY = term.IsTerminal(int(s.in.Fd())), term.IsTerminal(int(s.out.Fd())), term.IsTerminal(int(s.err.Fd()))
	dumb := os.Getenv("TERM") == "dumb" || os.Getenv("CI") != ""
	s.live = s.errTTY && !dumb
	s.color = s.live && os.Getenv("NO_COLOR") == "" && os.Getenv("SANDBOXER_NO_COLOR") == ""
	return s
}

// paint colours s (an SGR number such as "31") where that is wanted.
func (s *streams) paint(sgr, text string) string {
	if !s.color {
		return text
	}
	return "\x1b[" + sgr + "m" + text + "\x1b[0m"
}

// clean makes text of unknown origin harmless to a terminal: what does not print is
// shown as U+FFFD, line breaks as spaces.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case !unicode.IsPrint(r):
			return '\uFFFD'
		}
		return r
	}, s)
}

// cleanLines is clean for text of several lines.
func cleanLines(s string) string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		lines[i] = clean(l)
	}
	return strings.Join(lines, "\n")
}
