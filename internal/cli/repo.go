package cli

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
)

// Values and names of git's settings that give access. For SSH the user name alone does not.
var (
	gitUserinfo = regexp.MustCompile(`(?i)https?://[^/\s"@]+@`)
	gitSecret   = regexp.MustCompile(`(?i)^\s*([a-z0-9-]*(?:extraheader|pass|password|token|secret))\s*=\s*\S`)
)

// repoWarnings warns of credentials in a directory before its copy goes into a sandbox. It
// names where a credential is, never the credential.
func repoWarnings(dir string) (said []string) {
	git := filepath.Join(dir, ".git")
	fi, err := os.Lstat(git)
	if err != nil {
		return nil
	}
	if fi.Mode().IsRegular() {
		return []string{fmt.Sprintf("%s is a git worktree or a submodule: its history is elsewhere, and the copy is no git repository. "+
			"Give the main checkout, or a clone: git clone %s COPY", dir, dir)}
	}
	for _, name := range []string{"config", "config.worktree"} {
		if found := gitCredentials(filepath.Join(git, name)); len(found) > 0 {
			said = append(said, fmt.Sprintf("%s holds credentials (%s), which will be in the sandbox. "+
				"To keep them out, remove them, or give a clone of what is committed: git clone %s COPY", filepath.Join(git, name), strings.Join(found, ", "), dir))
		}
	}
	return said
}

// gitCredentials says which lines of a file of git's settings hold credentials.
func gitCredentials(name string) (found []string) {
	const most, shown = 1 << 20, 5
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return nil
	}
	data, _ := io.ReadAll(io.LimitReader(f, most))
	n := 0
	for s := bufio.NewScanner(bytes.NewReader(data)); s.Scan() && len(found) < shown; {
		n++
		line := strings.TrimSpace(s.Text())
		if strings.HasPrefix(line, "#") || strings.HasPrefix(line, ";") {
			continue
		}
		if m := gitSecret.FindStringSubmatch(line); m != nil {
			found = append(found, fmt.Sprintf("%s in line %d", m[1], n))
		} else if gitUserinfo.MatchString(line) {
			found = append(found, fmt.Sprintf("a URL with a user in line %d", n))
		}
	}
	return found
}
