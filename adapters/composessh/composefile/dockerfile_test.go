package composefile

import (
	"fmt"
	"strings"
	"testing"
)

// Lines are put behind what begins a stage, and nowhere else.
func TestStages(t *testing.T) {
	for name, tt := range map[string]struct {
		in, want string
		stages   int
	}{
		"one":               {"FROM a\nRUN x\n", "FROM a\n<0>\nRUN x\n", 1},
		"no line end":       {"FROM a", "FROM a\n<0>\n", 1},
		"two":               {"ARG V=1\nFROM a:$V AS one\nRUN x\nfrom one\nRUN y\n", "ARG V=1\nFROM a:$V AS one\n<0>\nRUN x\nfrom one\n<1>\nRUN y\n", 2},
		"windows":           {"FROM a\r\nRUN x\r\n", "FROM a\r\n<0>\nRUN x\r\n", 1},
		"a mark before":     {"\ufeffFROM a\n", "\ufeffFROM a\n<0>\n", 1},
		"continued":         {"FROM \\\n  --platform=linux/amd64 \\\n  a AS b\nRUN x\n", "FROM \\\n  --platform=linux/amd64 \\\n  a AS b\n<0>\nRUN x\n", 1},
		"a comment between": {"FROM a \\\n# FROM no\n\n AS b\nRUN x\n", "FROM a \\\n# FROM no\n\n AS b\n<0>\nRUN x\n", 1},
		"inside a command":  {"FROM a\nRUN echo \\\nFROM b \\\n&& FROM c\n", "FROM a\n<0>\nRUN echo \\\nFROM b \\\n&& FROM c\n", 1},
		"comments":          {"# FROM x\nFROM a\n# FROM b\n", "# FROM x\nFROM a\n<0>\n# FROM b\n", 1},
		"other escape":      {"# syntax=docker/dockerfile:1\n# escape=`\nFROM `\n a\nRUN x \\\nFROM b\n", "# syntax=docker/dockerfile:1\n# escape=`\nFROM `\n a\n<0>\nRUN x \\\nFROM b\n<1>\n", 2},
		"escape too late":   {"# a comment\n# escape=`\nFROM \\\n a\n", "# a comment\n# escape=`\nFROM \\\n a\n<0>\n", 1},
		"text":              {"FROM a\nRUN <<EOF\nFROM b\nEOF\nCOPY <<-'ONE' <<TWO /x\n\tFROM c\n\tONE\nFROM d\nTWO\nFROM e\n", "FROM a\n<0>\nRUN <<EOF\nFROM b\nEOF\nCOPY <<-'ONE' <<TWO /x\n\tFROM c\n\tONE\nFROM d\nTWO\nFROM e\n<1>\n", 2},
		"not a stage":       {"FROMAGE a\nFROM\n", "FROMAGE a\nFROM\n<0>\n", 1},
		"nothing":           {"", "", 0},
	} {
		got := Labels{Stage: func(i int) string { return fmt.Sprintf("<%d>\n", i) }}.Write([]byte(tt.in))
		if string(got) != tt.want || strings.Count(tt.want, "<") != tt.stages+strings.Count(tt.in, "<") {
			t.Errorf("%s: %q; want %q", name, got, tt.want)
		}
	}
}

// The stage that is built ends with the labels of the image.
func TestLastLabels(t *testing.T) {
	for name, tt := range map[string]struct{ target, in, want string }{
		"the last":    {"", "FROM a\nRUN x\nFROM b\nRUN y", "FROM a\nRUN x\nFROM b\nRUN y\nLABEL \"k\"=\"v\"\n"},
		"by name":     {"One", "FROM a aS one\nRUN x\nFROM b\n", "FROM a aS one\nRUN x\nLABEL \"k\"=\"v\"\nFROM b\n"},
		"by number":   {"0", "FROM a\nRUN x\nFROM b\n", "FROM a\nRUN x\nLABEL \"k\"=\"v\"\nFROM b\n"},
		"in parts":    {"one", "FROM a \\\n AS \\\n one\nFROM b\n", "FROM a \\\n AS \\\n one\nLABEL \"k\"=\"v\"\nFROM b\n"},
		"no such":     {"two", "FROM a AS one\n", "FROM a AS one\n"},
		"no stage":    {"", "ARG x\n", "ARG x\n"},
		"cut off":     {"", "FROM a\nRUN x \\", "FROM a\nRUN x \\\n"},
		"text":        {"", "FROM a\nRUN <<EOF\nx\n", "FROM a\nRUN <<EOF\nx\n"},
		"other quote": {"", "# escape=`\nFROM a\n", "# escape=`\nFROM a\nLABEL \"k\"=\"v\"\n"},
	} {
		got := Labels{Stage: func(int) string { return "" }, Target: tt.target, Last: []Label{{"k", "v"}}}.Write([]byte(tt.in))
		if string(got) != tt.want {
			t.Errorf("%s: %q; want %q", name, got, tt.want)
		}
	}
	for in, want := range map[string]string{"FROM a\n": `LABEL "k"="\$A \"b\" \\ ` + "``" + `"`, "# escape=`\nFROM a\n": "LABEL \"k\"=\"`$A `\"b`\" \\ ````\""} {
		if got := string(Labels{Stage: func(int) string { return "" }, Last: []Label{{"k", "$A \"b\" \\ ``"}}}.Write([]byte(in))); got != in+want+"\n" {
			t.Errorf("quoted: %s; want %s", got, want)
		}
	}
}
