// Package mounts opens what sandboxes have mounted of this machine: through no symbolic link, in
// the roots that an extension offers, and nothing of the broker's own; and makes mounts of it, which map owners so that
// both sides read what the other writes.
package mounts

import (
	"path/filepath"

	"github.com/sand-boxer/sandboxer"
)

// Settings say what of this machine sandboxes of an extension may have mounted.
type Settings struct {
	Roots []Root `yaml:"roots" json:"roots,omitempty" help:"Directories in which anybody may mount what lies there; an administrator may mount any but the server's own."`
}

// A Root is a directory of this machine of which anybody may mount any part.
type Root struct {
	Path     string `yaml:"path" json:"path,omitempty" help:"The directory, absolute."`
	ReadOnly bool   `yaml:"read_only" json:"read_only,omitempty" help:"It is mounted read-only or not at all."`
}

// Validate refuses roots that are none.
func (s Settings) Validate() error {
	for _, r := range s.Roots {
		if !filepath.IsAbs(r.Path) || filepath.Clean(r.Path) != r.Path || r.Path == "/" {
			return sandboxer.E(sandboxer.Invalid, nil, "mounts.roots: %q is not a clean absolute path below /", r.Path)
		}
	}
	return nil
}

const (
	// IDShift is who on this machine what root of a sandbox leaves in what belongs to somebody else belongs to.
	IDShift = 100_000
	// IDCount is how many IDs a sandbox has.
	IDCount = 65_536
)

// An Opener opens sources for an extension.
type Opener struct {
	Settings
	Extension string             // what messages call it
	Own       []string           // directories and files of the broker's, of which no sandbox sees anything
	CanMap    func(fd int) error // EINVAL or EPERM for what mounts cannot map owners of; nil is not asked
}

// rootOf finds the root of the configuration that m lies in, with as many rights.
func (o *Opener) rootOf(m sandboxer.Mount) (string, bool) {
	for _, r := range o.Roots {
		if m.Within(r.Path, r.ReadOnly) {
			return r.Path, true
		}
	}
	return "", false
}

// Admit admits mounts of what lies in the configured roots.
func (o *Opener) Admit(spec sandboxer.Spec) error {
	for _, m := range spec.Mounts {
		if _, ok := o.rootOf(m); !ok && !spec.VouchesMount(m) {
			return o.notOffered(m)
		}
	}
	return nil
}

func (o *Opener) notOffered(m sandboxer.Mount) error {
	return sandboxer.E(sandboxer.Denied, nil, "mount %s: %s does not offer that path%s", m.Source, o.Extension, map[bool]string{false: " for writing"}[m.ReadOnly]).
		WithHint("only an administrator mounts any path of the server's machine; others what the profile has, or what lies in mounts.roots of the extension")
}

// Fits refuses, as Invalid, a target that is there and cannot be mounted at.
func Fits(target sandboxer.Mount, isDir, thereIsDir, thereIsLink bool) error {
	why := ""
	switch {
	case thereIsLink:
		why = "a symbolic link is on the way there"
	case isDir && !thereIsDir:
		why = "it is not a directory"
	case !isDir && thereIsDir:
		why = "it is a directory, and the source is a file"
	default:
		return nil
	}
	return sandboxer.E(sandboxer.Invalid, nil, "mount %s:%s: %s", target.Source, target.Target, why)
}
