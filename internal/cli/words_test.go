package cli

import (
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sand-boxer/sandboxer"
)

// TestSaidToFirstUsers: what users of other tools type, and the answers they get.
func TestSaidToFirstUsers(t *testing.T) {
	for line, want := range map[string]string{
		"run echo hi":                       "put -- before the command: sandboxer run -- echo hi; if echo is an image: sandboxer run --image echo -- hi",
		"run -it alpine sh":                 "put -- before the command: sandboxer run -it -- alpine sh; if alpine is an image: sandboxer run -it --image alpine -- sh",
		"run -it --keep alpine:3 sh":        "put -- before the command: sandboxer run -it --keep 'alpine:3' -- sh",
		"run -t -e S=secret local ls":       "put -- before the command: sandboxer run -t local -- ls",
		"run --rm -it alpine sh":            "leave it out: a sandbox of run is destroyed at its end",
		"run -d --volume /a:/b alpine":      "put -- before the command and its flags",
		"create --gpus all":                 "a profile asks for GPUs",
		"run --gpus all -- ls":              "a profile asks for GPUs",
		"exec x --timeout 5 -- ls":          "run the command under timeout",
		"create --pids many":                "see: sandboxer create --help",
		"create --pids 9999999999999999999": "see: sandboxer create --help",
		"ls --json=maybe":                   "see: sandboxer ls --help",
		"extension test --timeout 5 f":      "see: sandboxer extension test --help",
	} {
		root := newCmdRoot(testFactory(t))
		root.SetArgs(strings.Fields(line))
		err := root.ExecuteContext(t.Context())
		if sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(sandboxer.HintOf(err), want) {
			t.Errorf("%s: %v; hint %q; want %q", line, err, sandboxer.HintOf(err), want)
		}
		for _, typed := range commandsIn(": " + sandboxer.HintOf(err)) {
			if err := parses(t, typed); err != nil {
				t.Errorf("%s: its hint %s: %v", line, typed, err)
			}
		}
		if err != nil && (strings.Contains(err.Error(), "time:") || strings.Contains(err.Error(), "strconv")) {
			t.Errorf("%s: Go's own words: %v", line, err)
		}
	}
	for _, line := range []string{"--version", "-v"} {
		root := newCmdRoot(testFactory(t))
		var out strings.Builder
		root.SetOut(&out)
		root.SetArgs([]string{line})
		if err := root.Execute(); err != nil || !strings.HasPrefix(out.String(), "sandboxer ") || strings.Count(out.String(), "\n") != 1 {
			t.Errorf("%s: %v, %q", line, err, out.String())
		}
	}
}

// nouns are what may stand for the value of a flag in its help.
var nouns = strings.Fields("ACTION ADDRESS COMMAND CREDITS CURSOR DAY DEPTH DESTINATION DIR DURATION EXTENSION FILE FINGERPRINT FORM FORMAT HOST ID IMAGE " +
	"KEY KEY=VALUE KIND LANGUAGE LEVEL LIFETIME MODE NAME NAME=VALUE NUMBER PATTERN POLICY PORT PROFILE RATIO SANDBOX SCOPE SIGNER SIZE " +
	"SNAPSHOT SOCKET SRC:DST[:ro] STATE TARGETS TENANT TEXT USE USER VARIABLE=NAME [USER/]ID")

// TestPlaceholders: a noun in capitals stands for the value of each flag, and one of few.
func TestPlaceholders(t *testing.T) {
	used := map[string]bool{}
	var each func(*cobra.Command)
	each = func(c *cobra.Command) {
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			name, _ := pflag.UnquoteUsage(f)
			if f.Hidden || name == "" && f.Value.Type() == "bool" {
				return
			}
			if used[name] = true; !slices.Contains(nouns, name) {
				t.Errorf("%s --%s: %q stands for its value; want one of %v", c.CommandPath(), f.Name, name, nouns)
			}
		})
		for _, sub := range c.Commands() {
			each(sub)
		}
	}
	each(newCmdRoot(testFactory(t)))
	for _, n := range nouns {
		if !used[n] {
			t.Errorf("%s stands for the value of no flag", n)
		}
	}
}
