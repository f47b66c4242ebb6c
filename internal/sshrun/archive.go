package sshrun

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// A Subdir is a directory of a host below a root. No link may lead out of the root, even if other
// programs write there.
type Subdir struct {
	Root           string // absolute
	Dir            string // below Root, "." for Root itself
	RootName, Name string // what messages call the two
}

// enter changes to $2 below $1, which it makes if $make is set, without being led out of $1. It
// stays in that directory even if another one is moved there afterwards.
const enter = `
cd -P -- "$1" || exit 40
root=$(pwd -P)
# What is made belongs to whom the root does.
o=$(ls -nd . | awk '{ print $3 ":" $4 }')
own() { [ "$(id -u)" != 0 ] || [ "$o" = 0:0 ] || chown -h "$o" "$@"; }
[ -e "./$2" ] || [ -n "$make" ] || exit 44
[ ! -e "./$2" ] || [ -d "./$2" ] || exit 46
[ -z "$make" ] || {
	rest=$2/
	while [ -n "$rest" ]; do
		part=${rest%%/*} rest=${rest#*/}
		[ -L "$part" ] && exit 45
		[ -d "$part" ] || { mkdir -- "$part" && own -- "$part"; } || exit
		cd -P -- "$part" || exit 47
	done
	cd -P -- "$root" || exit
}
cd -P -- "./$2" 2>/dev/null || exit 47
case $(pwd -P)/ in "$root"/*) ;; *) exit 45;; esac
`

// archived is the error of a script that began with enter.
func (h *Host) archived(d Subdir, exit sandboxer.Exit, said string) error {
	switch exit.Code {
	case 0:
		return nil
	case 40:
		return sandboxer.E(sandboxer.NotFound, nil, "%s is gone from host %s", d.RootName, h.Name())
	case 44:
		return sandboxer.E(sandboxer.NotFound, nil, "%s does not exist", d.Name)
	case 45:
		return sandboxer.E(sandboxer.Invalid, nil, "%s is behind a symbolic link that leads out of %s", d.Name, d.RootName)
	case 46:
		return sandboxer.E(sandboxer.Invalid, nil, "%s is a file, not a directory", d.Name)
	case 47:
		return sandboxer.E(sandboxer.Denied, nil, "the account may not read %s on host %s", d.Name, h.Name())
	}
	if strings.Contains(said, "Permission denied") || strings.Contains(said, "Operation not permitted") {
		return sandboxer.E(sandboxer.Denied, &exitError{exit, said}, "the account may not change a file in %s on host %s", d.Name, h.Name())
	}
	return h.stepped(exit, said, nil, "the archive of "+d.Name)
}

// Archive writes the content of a directory to w as a tar, with names that begin with "./". Files
// that change or vanish meanwhile are in it as tar found them, or are missing.
//
// Kinds: NotFound when root or directory do not exist, Invalid when the directory is a file
// or behind a link that leads out of the root, Denied when the account may not read it, or
// something in it; Unavailable when w fails; Failed, or the kind that fits, for tar's other
// errors, which ExitOf returns.
func (h *Host) Archive(ctx context.Context, d Subdir, w io.Writer) error {
	said := &capture.Last{Max: 16 << 10}
	exit, err := h.Run(ctx, Cmd{Script: enter + `LC_ALL=C exec tar -cf - .`, Args: []string{d.Root, d.Dir}, Stdout: w, Stderr: said})
	if errors.Is(err, ErrOutput) {
		return sandboxer.E(sandboxer.Unavailable, err, "the archive could not be written")
	}
	if err != nil || exit.Code == 1 && onlyChanged(said.String()) {
		return err
	}
	return h.archived(d, exit, said.String())
}

// onlyChanged reports whether all complaints of tar are about files that changed while
// they were read.
func onlyChanged(said string) bool {
	for line := range strings.Lines(said) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasSuffix(line, "file changed as we read it") && !strings.HasSuffix(line, "File removed before we read it") && !strings.HasSuffix(line, "socket ignored") {
			return false
		}
	}
	return said != ""
}

// Replace gives a directory exactly the content of the tar r; the directory is made if it does
// not exist. The directories keep, below it, are emptied but not removed, because they may be
// mounted elsewhere. If the account is root, new files get the owner of the root directory.
//
// The host's tar trusts r: the caller must refuse names that lead out of the directory
// (package safetar). No other program may write there meanwhile. Kinds are as with Archive.
func (h *Host) Replace(ctx context.Context, d Subdir, keep []string, r io.Reader) error {
	but := ""
	for _, p := range slices.Sorted(slices.Values(keep)) {
		but += " ! -path " + Quote("./"+findPattern.Replace(p))
	}
	said := &capture.Last{Max: 16 << 10}
	exit, err := h.Run(ctx, Cmd{Script: "make=1\n" + enter + `
find . -xdev -mindepth 1 -depth` + but + ` -delete 2>/dev/null || find . -xdev -depth ! -name .` + but + ` ! -type d -exec rm -f {} + || exit
find . -xdev -depth ! -name .` + but + ` -type d -exec rmdir {} + || exit
LC_ALL=C tar -xpo -f - || exit
own -R -- .`, Args: []string{d.Root, d.Dir}, Stdin: r, Stderr: said})
	if err != nil {
		return err
	}
	return h.archived(d, exit, said.String())
}

// findPattern escapes what find -path would take for a pattern.
var findPattern = strings.NewReplacer(`*`, `\*`, `?`, `\?`, `[`, `\[`, `\`, `\\`)
