// Package mounts opens the sources of sandboxes' mounts on this machine: through no symbolic link, in
// the roots that an extension offers, and nothing of the broker's own. It makes mounts of them, which map owners so that
// both sides read what the other writes.
package mounts

import (
	"path/filepath"

	"github.com/sand-boxer/sandboxer"
)

// Settings say what of this machine sandboxes of an extension may mount.
type Settings struct {
	Roots []Root `yaml:"roots" json:"roots,omitempty" help:"Directories whose content everybody can mount. Administrators can mount any directory except the server's own."`
}

// A Root is a directory of this machine; every caller may mount any part of it.
type Root struct {
	Path     string `yaml:"path" json:"path,omitempty" help:"The directory, absolute."`
	ReadOnly bool   `yaml:"read_only" json:"read_only,omitempty" help:"Whether it can be mounted only read-only."`
}

// Validate refuses invalid roots.
func (s Settings) Validate() error {
	for _, r := range s.Roots {
		if !filepath.IsAbs(r.Path) || filepath.Clean(r.Path) != r.Path || r.Path == "/" {
			return sandboxer.E(sandboxer.Invalid, nil, "mounts.roots: %q is not a clean absolute path below /", r.Path)
		}
	}
	return nil
}

const (
	// IDShift is the owner on this machine of files that root of a sandbox leaves in another user's directory.
	IDShift = 100_000
	// IDCount is how many IDs a sandbox has.
	IDCount = 65_536
)

// An Opener opens sources for an extension.
type Opener struct {
	Settings
	Extension string             // what messages call it
	Own       []string           // directories and files of the broker's, which no sandbox may see
	CanMap    func(fd int) error // EINVAL or EPERM for what mounts cannot map owners of; nil is not asked
}

// rootOf finds the root of the configuration that contains m, with as many rights.
func (o *Opener) rootOf(m sandboxer.Mount) (string, bool) {
	for _, r := range o.Roots {
		if m.Within(r.Path, r.ReadOnly) {
			return r.Path, true
		}
	}
	return "", false
}

// Admit admits mounts within the configured roots.
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
		WithHint("only an administrator can mount any path of the server's machine; others can mount paths of the profile, and those in mounts.roots of the extension")
}

// OpenToShow opens the mounts of spec, for Show. Kinds: Invalid for what cannot be mounted, Denied for what must not be,
// Unsupported.
func (o *Opener) OpenToShow(spec sandboxer.Spec) ([]*Source, error) {
	if len(spec.Mounts) == 0 {
		return nil, nil
	}
	if err := Can(o.Extension); err != nil {
		return nil, err
	}
	sources, err := o.Open(spec)
	if err == nil {
		err = try(sources)
	}
	if err != nil {
		Close(sources)
		return nil, err
	}
	return sources, nil
}

// Fits refuses, as Invalid, an existing target that cannot be a mount point.
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
