package composefile

import (
	"bytes"
	"regexp"
	"strconv"
	"strings"
)

// fromLine begins a stage of a Dockerfile, asName ends it where the stage has a name.
var (
	fromLine = regexp.MustCompile(`(?i)^from\s`)
	asName   = regexp.MustCompile(`(?i)\sas\s+([a-z0-9][a-z0-9_.-]*)\s*$`)
)

// escapeLine is the directive that makes another character than \ continue a line.
var escapeLine = regexp.MustCompile("(?i)^#\\s*escape\\s*=\\s*([`\\\\])\\s*$")

// heredoc is where an instruction declares that its next lines are text, up to a word.
var heredoc = regexp.MustCompile(`<<-?\s*["']?([A-Za-z_][A-Za-z0-9_.]*)["']?`)

// Labels are the labels for the stages of a Dockerfile.
type Labels struct {
	Stage func(stage int) string // instructions that each stage begins with
	// Target is the stage that is built, by name or number; "" is the last. It ends with
	// the labels Last.
	Target string
	Last   []Label
}

// A Label is one label of an image. Its value has one line.
type Label struct{ Name, Value string }

// Write writes the Dockerfile with these labels; the rest stays as it was. It follows
// https://docs.docker.com/reference/dockerfile/ for what continues a line, and what is a
// comment or text; a text that is not a Dockerfile stays unchanged, or nearly.
func (l Labels) Write(dockerfile []byte) []byte {
	var out bytes.Buffer
	escape := `\`
	begin, continued, from := true, false, false // directives may come; a line goes on; it is of a FROM
	var until []string                           // words that end the texts that come
	stage, name, head := -1, "", ""
	end := func(last bool) {
		if out.Len() > 0 && !bytes.HasSuffix(out.Bytes(), []byte("\n")) {
			out.WriteByte('\n')
		}
		if stage < 0 || continued || len(l.Last) == 0 || l.Target == "" && !last || l.Target != "" && !strings.EqualFold(l.Target, name) && l.Target != strconv.Itoa(stage) {
			return
		}
		quote := strings.NewReplacer(escape, escape+escape, `"`, escape+`"`, `$`, escape+`$`)
		out.WriteString("LABEL")
		for _, l := range l.Last {
			out.WriteString(` "` + quote.Replace(l.Name) + `"="` + quote.Replace(l.Value) + `"`)
		}
		out.WriteByte('\n')
	}
	for line := range strings.Lines(string(dockerfile)) {
		bare := strings.TrimRight(line, " \t\r\n")
		if len(until) > 0 {
			out.WriteString(line)
			if strings.TrimLeft(bare, "\t") == until[0] {
				until = until[1:]
			}
			continue
		}
		trimmed := strings.TrimLeft(bare, " \t\ufeff")
		if begin {
			if m := escapeLine.FindStringSubmatch(trimmed); m != nil {
				escape = m[1]
			}
			begin = strings.HasPrefix(trimmed, "#") && strings.Contains(trimmed, "=")
		}
		if strings.HasPrefix(trimmed, "#") || trimmed == "" && continued {
			out.WriteString(line)
			continue // a comment, also between lines that belong together
		}
		if !continued {
			if from = fromLine.MatchString(strings.TrimRight(trimmed, "\r\n") + " "); from {
				end(false)
				head = ""
			}
			if word, _, _ := strings.Cut(strings.ToUpper(trimmed), " "); word == "RUN" || word == "COPY" || word == "ADD" {
				for _, m := range heredoc.FindAllStringSubmatch(trimmed, -1) {
					until = append(until, m[1])
				}
			}
		}
		out.WriteString(line)
		bare = strings.TrimRight(trimmed, " \t\r\n")
		continued = strings.HasSuffix(bare, escape)
		if from {
			head += " " + strings.TrimSuffix(bare, escape)
		}
		if from && !continued {
			from = false
			stage++
			name = ""
			if m := asName.FindStringSubmatch(head); m != nil {
				name = m[1]
			}
			if !strings.HasSuffix(line, "\n") {
				out.WriteByte('\n')
			}
			out.WriteString(l.Stage(stage))
		}
	}
	if len(until) == 0 {
		end(true)
	}
	return out.Bytes()
}
