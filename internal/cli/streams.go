package cli

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/term"

	"github.com/sand-boxer/sandboxer"
)

// streams are the standard files as the process was started with them. Messages to
// people and programs go through out and err, whatever they contain; only the streams of a
// command inside and the content of files are written to stdout and stderr unchanged.
type streams struct {
	in, stdout, stderr    *os.File
	out, err              io.Writer
	inTTY, outTTY, errTTY bool
	color                 bool // on stderr
	live                  bool // stderr can redraw a line
}

func systemStreams() *streams {
	s := &streams{in: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, out: printer{os.Stdout}, err: printer{os.Stderr}}
	s.inTTY, s.outTTY, s.errTTY = term.IsTerminal(int(s.in.Fd())), term.IsTerminal(int(s.stdout.Fd())), term.IsTerminal(int(s.stderr.Fd()))
	dumb := os.Getenv("TERM") == "dumb" || os.Getenv("CI") != ""
	s.live = s.errTTY && !dumb
	s.color = s.live && os.Getenv("NO_COLOR") == "" && os.Getenv("SANDBOXER_NO_COLOR") == ""
	return s
}

// size is the size of the terminal that shows a command's output, or, if the output goes
// elsewhere, of the one that it reads from.
func (s *streams) size() (sandboxer.WinSize, bool) {
	for _, f := range []*os.File{s.stdout, s.in} {
		if cols, rows, err := term.GetSize(int(f.Fd())); err == nil && cols > 0 && rows > 0 {
			return sandboxer.WinSize{Cols: uint16(cols), Rows: uint16(rows)}, true
		}
	}
	return sandboxer.WinSize{}, false
}

// paint colours s (an SGR number such as "31") where that is wanted.
func (s *streams) paint(sgr, text string) string {
	if !s.color {
		return text
	}
	return control("\x1b["+sgr+"m") + text + control("\x1b[0m")
}

// A control sequence is written between these bytes, which no text contains.
const controlBegin, controlEnd = 0xF8, 0xF9

// control marks a control sequence as this program's own. Texts of others cannot be marked so.
func control(seq string) string {
	return string([]byte{controlBegin}) + seq + string([]byte{controlEnd})
}

// startOfLine moves the cursor there, and clears the line.
var startOfLine = control("\r\x1b[K")

// printer is a file that may be a terminal: it shows unprintable characters as U+FFFD, and
// lets no control sequence through except those that control made.
type printer struct{ f *os.File }

func (p printer) Write(b []byte) (int, error) {
	harmless := true
	for _, c := range b {
		if (c < ' ' || c > '~') && c != '\n' && c != '\t' {
			harmless = false
			break
		}
	}
	if harmless {
		return p.f.Write(b)
	}
	out := make([]byte, 0, len(b)+16)
	for rest := b; len(rest) > 0; {
		if rest[0] == controlBegin {
			if end := bytes.IndexByte(rest, controlEnd); end > 0 && own.Match(rest[1:end]) {
				out = append(out, rest[1:end]...)
				rest = rest[end+1:]
				continue
			}
		}
		r, n := utf8.DecodeRune(rest)
		if r == utf8.RuneError || r != '\n' && r != '\t' && !unicode.IsPrint(r) {
			r = utf8.RuneError
		}
		out = utf8.AppendRune(out, r)
		rest = rest[n:]
	}
	if _, err := p.f.Write(out); err != nil {
		return 0, err
	}
	return len(b), nil
}

// own matches the sequences that this program sends to terminals: colours, and startOfLine.
var own = regexp.MustCompile("^(\x1b\\[[0-9]+m|\r\x1b\\[K)$")

// escaped is text of JSON or, with eight digits beyond 16 bits, of YAML, in
// which characters that a printer would not show are written with \u: it means the same.
func escaped(b []byte, yaml bool) []byte {
	if !slices.ContainsFunc(b, func(c byte) bool { return c > '~' }) {
		return b
	}
	out := make([]byte, 0, len(b)+len(b)/4)
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		switch {
		case r == utf8.RuneError:
			out = append(out, `\ufffd`...)
		case r < ' ' || unicode.IsPrint(r):
			out = append(out, b[:n]...)
		case r > 0xFFFF && yaml:
			out = fmt.Appendf(out, `\U%08x`, r)
		case r > 0xFFFF:
			hi, lo := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, hi, lo)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
		b = b[n:]
	}
	return out
}

// clean makes text of unknown origin harmless to a terminal: unprintable characters are
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
