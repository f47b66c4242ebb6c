package sshrun

import (
	"path"
	"strings"
)

// IgnoreFile is the file in the root of a pushed tree that names the files that are not pushed,
// in the syntax of .gitignore. No other file is read for that: what a version control system
// ignores is often just what a build needs.
const IgnoreFile = ".sandboxerignore"

// ignore judges names by patterns in the syntax of .gitignore; the last that matches
// counts.
type ignore []pattern

type pattern struct {
	parts    []string
	not, dir bool
}

func parseIgnore(lines []string) (ignore, error) {
	var ig ignore
	for _, line := range lines {
		line = strings.TrimRight(line, "\r\n")
		if !strings.HasSuffix(line, `\ `) {
			line = strings.TrimRight(line, " ")
		}
		if line == "" || line[0] == '#' {
			continue
		}
		var p pattern
		if line[0] == '!' {
			p.not, line = true, line[1:]
		}
		line = strings.TrimPrefix(line, `\`+"#")
		if p.dir = strings.HasSuffix(line, "/"); p.dir {
			line = strings.TrimRight(line, "/")
		}
		if line == "" {
			continue
		}
		if !strings.Contains(line, "/") {
			line = "**/" + line
		}
		p.parts = strings.Split(strings.TrimPrefix(line, "/"), "/")
		for _, part := range p.parts {
			if _, err := path.Match(part, ""); err != nil {
				return nil, invalid("%q is not a valid pattern of file names", line)
			}
		}
		ig = append(ig, p)
	}
	return ig, nil
}

// match reports whether name itself is left out. Everything below such a directory is left out,
// too, but the caller must see to that.
func (ig ignore) match(name string, dir bool) bool {
	parts := strings.Split(name, "/")
	for i := len(ig) - 1; i >= 0; i-- {
		if p := ig[i]; (dir || !p.dir) && matchParts(p.parts, parts) {
			return !p.not
		}
	}
	return false
}

// below reports whether name or a directory above it is left out.
func (ig ignore) below(name string, dir bool) bool {
	if len(ig) == 0 {
		return false
	}
	for i := range len(name) {
		if name[i] == '/' && ig.match(name[:i], true) {
			return true
		}
	}
	return ig.match(name, dir)
}

func matchParts(pattern, name []string) bool {
	for len(pattern) > 0 {
		if pattern[0] == "**" {
			for i := range len(name) + 1 {
				// A trailing ** is all below, and not the directory itself.
				if (len(pattern) > 1 || i > 0) && matchParts(pattern[1:], name[i:]) {
					return true
				}
			}
			return len(pattern) == 1 && len(name) > 0
		}
		if len(name) == 0 {
			return false
		}
		if ok, _ := path.Match(pattern[0], name[0]); !ok {
			return false
		}
		pattern, name = pattern[1:], name[1:]
	}
	return len(name) == 0
}
