package aioserver

import (
	"bytes"
	"errors"
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// script is the text around a command.
type script struct {
	unset   []string // names of variables
	reports bool     // both outputs become one, and stderr says where the shell was left
}

// shellArgs is how a command is run: in a process of its own, so that exit ends nothing else. A command that
// is too long for an argument comes as input; the command itself gets empty input all the same.
func shellArgs(shell, command string, s script) []string {
	var b strings.Builder
	if s.reports {
		// The command's own file descriptors are 0, 1 and 2. Its exports and its directory are reported
		// when it ends, also by exit.
		b.WriteString("exec 8>&2 2>&1\n")
	}
	for _, name := range s.unset {
		b.WriteString("unset " + name + "\n")
	}
	run := `eval "set --; $1"`
	args := []string{command}
	if len(command) > maxArgument {
		b.WriteString("sandboxer_command=$(cat; printf x) || exit\nexec </dev/null\nset -- \"${sandboxer_command%x}\"\nunset sandboxer_command\n")
		args = []string{""}
	}
	if s.reports {
		const report = `{ printf '\000'; pwd; printf '\000'; export -p; printf '\000'; } >&8 2>/dev/null`
		b.WriteString("export -p >&8\ntrap \"" + strings.ReplaceAll(report, `\`, `\\`) + "\" EXIT\n")
		// A trap of the command's own replaces that one.
		run += "\nset -- \"$?\"\n" + report + "\nexit \"$1\""
	}
	if b.Len() == 0 {
		return []string{shell, "-c", command, path.Base(shell)} // as which it speaks of itself
	}
	b.WriteString(run)
	return append([]string{shell, "-c", b.String(), path.Base(shell)}, args...)
}

// maxReport bounds a shell's reports about itself.
const maxReport = 256 << 10

// stateReader reads what a shell with script.reports writes to stderr.
type stateReader struct {
	memory *memory
	who    account
	b      []byte
	cut    bool
}

func (r *stateReader) Write(p []byte) (int, error) {
	k := min(len(p), maxReport-len(r.b))
	if !r.memory.grow(r.who, forRequests, k) {
		k = 0
	}
	r.b = append(r.b, p[:k]...)
	r.cut = r.cut || k < len(p)
	return len(p), nil
}

// shellState is what a command has changed.
type shellState struct {
	ok    bool
	dir   string
	set   map[string]string
	unset []string
}

// notKept are variables of the shell itself.
var notKept = map[string]bool{"PWD": true, "OLDPWD": true, "SHLVL": true, "_": true}

// end releases what it holds, and returns the last complete report. If there is none, said is the text that is no report:
// a message about a shell that could not be started.
func (r *stateReader) end() (st shellState, said []byte) {
	defer r.memory.shrink(r.who, forRequests, len(r.b))
	parts := bytes.Split(r.b, []byte{0})
	if len(parts) == 1 {
		if _, err := parseExports(parts[0]); err != nil {
			return st, parts[0]
		}
		return st, nil
	}
	n := (len(parts) - 1) / 3 // each report is a NUL, and two that end something
	if r.cut || n == 0 {
		return st, nil
	}
	before, err1 := parseExports(parts[0])
	after, err2 := parseExports(parts[3*n-1])
	if err1 != nil || err2 != nil {
		return st, nil
	}
	st.dir = strings.TrimSuffix(string(parts[3*n-2]), "\n")
	if !strings.HasPrefix(st.dir, "/") || len(st.dir) > maxPath || !utf8.ValidString(st.dir) {
		st.dir = ""
	}
	st.ok, st.set = true, map[string]string{}
	for k, v := range after {
		if old, had := before[k]; !notKept[k] && (!had || old != v) {
			st.set[k] = v
		}
	}
	for k := range before {
		if _, has := after[k]; !notKept[k] && !has {
			st.unset = append(st.unset, k)
		}
	}
	return st, nil
}

// parseExports reads what export -p prints in bash, dash and busybox: a line for each variable,
// quoted so that a shell would read it.
func parseExports(b []byte) (map[string]string, error) {
	vars := map[string]string{}
	s := string(b)
	for s != "" {
		rest, ok := strings.CutPrefix(s, "export ")
		if !ok {
			if rest, ok = strings.CutPrefix(s, "declare -"); !ok {
				return nil, errors.New("a line begins with neither export nor declare")
			}
			flags, after, ok := strings.Cut(rest, " ")
			if !ok || strings.ContainsAny(flags, "\n=") {
				return nil, errors.New("a declaration has no name")
			}
			rest = after
		}
		end := strings.IndexAny(rest, "=\n")
		if end < 0 {
			return nil, errors.New("a line does not end")
		}
		name := rest[:end]
		if rest[end] == '\n' { // exported, and not set
			s = rest[end+1:]
			continue
		}
		value, after, err := shellWord(rest[end+1:])
		if err != nil {
			return nil, err
		}
		if variable.MatchString(name) && !strings.ContainsRune(value, 0) {
			vars[name] = value
		}
		s = after
	}
	return vars, nil
}

// shellWord reads a quoted word up to the end of its line, and returns what follows.
func shellWord(s string) (word, rest string, err error) {
	var b strings.Builder
	for i := 0; i < len(s); {
		switch c := s[i]; {
		case c == '\n':
			return b.String(), s[i+1:], nil
		case c == '\'':
			end := strings.IndexByte(s[i+1:], '\'')
			if end < 0 {
				return "", "", errors.New("a quote does not end")
			}
			b.WriteString(s[i+1 : i+1+end])
			i += end + 2
		case c == '"':
			i++
			for {
				if i >= len(s) {
					return "", "", errors.New("a quote does not end")
				}
				if s[i] == '"' {
					i++
					break
				}
				if s[i] == '\\' && i+1 < len(s) && strings.IndexByte("\\\"$`\n", s[i+1]) >= 0 {
					i++
				}
				b.WriteByte(s[i])
				i++
			}
		case c == '$' && strings.HasPrefix(s[i:], "$'"):
			n, err := ansiC(&b, s[i+2:])
			if err != nil {
				return "", "", err
			}
			i += 2 + n
		case c == '\\':
			if i+1 >= len(s) {
				return "", "", errors.New("a backslash is the last")
			}
			b.WriteByte(s[i+1])
			i += 2
		default:
			b.WriteByte(c)
			i++
		}
	}
	return "", "", errors.New("a line does not end")
}

// ansiC reads the text between $' and ', and returns its length with the last quote.
func ansiC(b *strings.Builder, s string) (int, error) {
	simple := map[byte]byte{'a': 7, 'b': 8, 'e': 27, 'E': 27, 'f': 12, 'n': 10, 'r': 13, 't': 9, 'v': 11, '\\': '\\', '\'': '\'', '"': '"', '?': '?'}
	for i := 0; i < len(s); i++ {
		switch c := s[i]; c {
		case '\'':
			return i + 1, nil
		case '\\':
			i++
			if i >= len(s) {
				break
			}
			if v, ok := simple[s[i]]; ok {
				b.WriteByte(v)
				continue
			}
			from, base, most := i, 8, 3
			switch s[i] {
			case 'x':
				from, base, most = i+1, 16, 2
			case 'u':
				from, base, most = i+1, 16, 4
			case 'U':
				from, base, most = i+1, 16, 8
			}
			to := from
			for to < len(s) && to-from < most && isDigit(s[to], base) {
				to++
			}
			v, err := strconv.ParseUint(s[from:to], base, 32)
			if err != nil {
				return 0, fmt.Errorf("the escape %q", s[i-1:to])
			}
			if most > 3 {
				b.WriteRune(rune(min(v, utf8.MaxRune)))
			} else {
				b.WriteByte(byte(v))
			}
			i = to - 1
		default:
			b.WriteByte(c)
		}
	}
	return 0, errors.New("a quote does not end")
}

func isDigit(c byte, base int) bool {
	if base == 8 {
		return c >= '0' && c <= '7'
	}
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}
