package cli

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestRepoWarnings: credentials in git's settings and directories that are no repository once copied
// are reported, and no credential is repeated.
func TestRepoWarnings(t *testing.T) {
	const secret = "ghp_canary"
	for name, tt := range map[string]struct{ config, want string }{
		"none":        {"[remote \"origin\"]\n\turl = https://example.org/x.git\n\turl = git@example.org:x.git\n\turl = ssh://git@example.org/x\n", ""},
		"url":         {"[remote \"origin\"]\n\turl = https://u:" + secret + "@example.org/x.git\n", "a URL with a user in line 2"},
		"token":       {"[remote \"origin\"]\n\turl = https://" + secret + "@example.org/x.git\n", "a URL with a user in line 2"},
		"instead of":  {"[url \"https://x:" + secret + "@example.org/\"]\n\tinsteadOf = https://example.org/\n", "a URL with a user in line 1"},
		"extraheader": {"# https://a:b@c\n[http \"https://example.org/\"]\n\textraheader = AUTHORIZATION: basic " + secret + "\n", "extraheader in line 3"},
		"mail":        {"[sendemail]\n\tsmtpPass = " + secret + "\n", "smtpPass in line 2"},
		"empty":       {"[http]\n\textraheader =\n", ""},
	} {
		dir := t.TempDir()
		if err := errors.Join(os.Mkdir(dir+"/.git", 0o755), os.WriteFile(dir+"/.git/config", []byte(tt.config), 0o600)); err != nil {
			t.Fatal(err)
		}
		said := strings.Join(repoWarnings(dir), "\n")
		if !strings.Contains(said, tt.want) || (tt.want == "") != (said == "") || strings.Contains(said, secret) {
			t.Errorf("%s: %q; want %q", name, said, tt.want)
		}
	}
	dir := t.TempDir()
	if said := repoWarnings(dir); said != nil {
		t.Errorf("no repository: %q", said)
	}
	if err := os.WriteFile(filepath.Join(dir, ".git"), []byte("gitdir: /elsewhere\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if said := repoWarnings(dir); len(said) != 1 || !strings.Contains(said[0], "git clone "+dir+" COPY") {
		t.Errorf("a worktree: %q", said)
	}
	dir = t.TempDir()
	if err := errors.Join(os.Mkdir(dir+"/.git", 0o755), unix.Mkfifo(dir+"/.git/config", 0o600)); err != nil {
		t.Fatal(err)
	}
	if said := repoWarnings(dir); said != nil { // and nothing waits
		t.Errorf("settings that are a pipe: %q", said)
	}
}
