// Package spec decides what a create or a restore makes, from its request, its profile, its principal and the abilities of the
// extensions, or why it is refused. It does so before anything exists, and changes nothing: it reads a Site, which describes
// the installation at one time. [Site.Create] and [Site.Restore] are its entry points.
package spec

import (
	"cmp"
	"slices"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// A Site is the installation at one time, against which requests are checked.
type Site struct {
	Owner         string // the installation's name, stamped on outside objects
	Profiles      []sandboxer.Profile
	Extensions    []Extension
	KeepsPortable bool // portable snapshots are kept

	// MAC turns the digest of a request into the stored form. nil stores the digest itself.
	MAC func(digest string) string
}

// An Extension is one extension, opened or not.
type Extension struct {
	Info    sandboxer.ExtensionInfo
	Backend Backend // nil where it cannot be used; Info.Problem says why
}

// A Backend is the part of an open extension that checks of requests need.
type Backend interface {
	Capabilities() []sandboxer.Capability
	Can(sandboxer.Capability) bool
	// DefaultLimits are the limits that apply where a spec sets none.
	DefaultLimits(sandboxer.Spec) sandboxer.Limits
	// AdmitMounts refuses, as Denied, mounts for which no operator vouches and which the extension does not allow.
	AdmitMounts(sandboxer.Spec) error
	// Credential says whose secret is the key for new sandboxes.
	Credential() sandboxer.Credential
}

func (s *Site) extension(id string) *Extension {
	for i := range s.Extensions {
		if e := &s.Extensions[i]; e.Info.ID == id {
			return e
		}
	}
	return nil
}

// backend returns the backend of an extension, or why there is none now.
func (s *Site) backend(id string) (Backend, error) {
	e := s.extension(id)
	switch {
	case e == nil:
		return nil, NotConfigured(id)
	case e.Backend == nil:
		return nil, NotUsable(id, e.Info.Problem)
	}
	return e.Backend, nil
}

func (s *Site) extensionIDs() []string {
	var ids []string
	for _, e := range s.Extensions {
		ids = append(ids, e.Info.ID)
	}
	return ids
}

// NotConfigured is the error for an extension that the installation does not have. Kind: Unavailable.
func NotConfigured(id string) error {
	return sandboxer.E(sandboxer.Unavailable, nil, "extension %q is no longer configured", id).
		WithHint("configure it again: its sandboxes cannot be used or removed without it")
}

// NotUsable is the error for an extension that could not be opened. Kind: Unavailable.
func NotUsable(id, problem string) error {
	return sandboxer.E(sandboxer.Unavailable, nil, "extension %q cannot be used here: %s", id, problem)
}

// FindProfile finds a profile by its ID, with or without the prefix.
func FindProfile(profiles []sandboxer.Profile, id string) (sandboxer.Profile, error) {
	var ids []string
	for _, p := range profiles {
		if p.ID == id || p.ID == "profile."+id {
			return p, nil
		}
		ids = append(ids, p.ID)
	}
	if id == "" {
		return sandboxer.Profile{}, sandboxer.E(sandboxer.Invalid, nil, "no profile given").WithHint("choose one of: %s", suggest.List(ids))
	}
	return sandboxer.Profile{}, sandboxer.E(sandboxer.Invalid, nil, "profile %q does not exist%s", id, suggest.DidYouMean(id, ids)).
		WithHint("the profiles are: %s", suggest.List(ids))
}

// CheckProfile returns what is wrong with p, or "". A profile whose extension could not be opened on this machine is unusable,
// not wrong.
func (s *Site) CheckProfile(p sandboxer.Profile) string {
	if err := p.Ready.Check(); err != nil {
		return "profile " + p.ID + ": ready: " + sandboxer.Message(err)
	}
	for i, v := range s.views(p) {
		id := v.Profile.Extension
		e := s.extension(id)
		if e == nil {
			return "profile " + p.ID + " is on extension " + id + ", which does not exist" + suggest.DidYouMean(id, s.extensionIDs())
		}
		if e.Backend == nil {
			continue
		}
		if why, text, _ := v.suits(); why != "" {
			return "profile " + p.ID + ": " + text
		}
		if i == 0 && p.Pool.Size > 0 && e.Backend.Credential().By != "" {
			return "profile " + p.ID + " keeps a pool, whose sandboxes belong to no tenant, but extension " + id + " needs a key of each tenant"
		}
		if i == 0 && p.Pool.Size > 0 && !e.Backend.Can(sandboxer.CanPool) { // which holds the first
			return "profile " + p.ID + " keeps a pool, which extension " + id + " cannot"
		}
	}
	return ""
}

// PauseDepth returns the depth to which sb is paused: the requested one, else that of its profile, else the first that its
// extension supports.
func (s *Site) PauseDepth(sb *sandboxer.Sandbox, asked sandboxer.PauseDepth, cause sandboxer.Reason) (sandboxer.PauseDepth, error) {
	b, err := s.backend(sb.Extension)
	if err != nil {
		return "", err
	}
	depth := cmp.Or(asked, sb.Spec.Profile.PauseDepth)
	if depth == "" {
		depth = s.defaultDepth(b, cause)
	}
	switch {
	case !slices.Contains(sandboxer.PauseDepths(), depth):
		return "", sandboxer.E(sandboxer.Invalid, nil, "%q is not a depth of pausing", depth).
			WithHint("the depths are: %s", suggest.List(sandboxer.PauseDepths()))
	case !s.canPauseSomehow(b):
		return "", backend.Lacks(sb.Extension, sandboxer.CanPause)
	case !s.CanPause(b, depth):
		e := sandboxer.E(sandboxer.Unsupported, nil, "extension %s cannot pause to the depth %s", sb.Extension, depth)
		for _, d := range sandboxer.PauseDepths() {
			if s.CanPause(b, d) {
				e.WithHint("try --depth %s", d)
				break
			}
		}
		return "", e
	}
	return depth, nil
}

// defaultDepth is the depth if neither the request nor the profile names one. Files by an archive come last, and only if the
// sandbox would end otherwise: a caller that asks for a pause has to agree that processes end.
func (s *Site) defaultDepth(b Backend, cause sandboxer.Reason) sandboxer.PauseDepth {
	order := []sandboxer.PauseDepth{sandboxer.PauseFreeze, sandboxer.PauseDisk}
	if cause != sandboxer.ReasonRequested { // no caller is about to come back
		order = []sandboxer.PauseDepth{sandboxer.PauseDisk, sandboxer.PauseFreeze, sandboxer.PauseFiles}
	}
	for _, d := range order {
		if s.CanPause(b, d) {
			return d
		}
	}
	return order[len(order)-1]
}

func (s *Site) CanPause(b Backend, depth sandboxer.PauseDepth) bool {
	switch depth {
	case sandboxer.PauseFreeze:
		return b.Can(sandboxer.CanPause)
	case sandboxer.PauseFiles:
		return b.Can(sandboxer.CanSnapshot) || s.canKeepFiles(b)
	}
	return b.Can(sandboxer.CanSnapshot)
}

func (s *Site) canPauseSomehow(b Backend) bool {
	return slices.ContainsFunc(sandboxer.PauseDepths(), func(d sandboxer.PauseDepth) bool { return s.CanPause(b, d) })
}

// canKeepFiles reports whether there are portable snapshots of the sandboxes of b.
func (s *Site) canKeepFiles(b Backend) bool {
	return s.KeepsPortable && (b.Can(sandboxer.CanArchive) || b.Can(sandboxer.CanCheckpoint))
}
