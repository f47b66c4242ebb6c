package composefile

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/compose-spec/compose-go/v2/types"
)

// target refuses places in a container where nothing may be mounted.
func (l *load) target(at []string, dir string) {
	clean := path.Clean(dir)
	if !path.IsAbs(dir) || clean == "/" || strings.ContainsAny(dir, ":\x00\n") {
		l.refuse(at, "%q is not a place in a container to mount at", dir)
		return
	}
	for _, no := range []string{"/proc", "/sys", "/dev"} {
		if clean == no || strings.HasPrefix(clean, no+"/") && clean != "/dev/shm" {
			l.refuse(at, "nothing can be mounted at %s, which belongs to the kernel", clean)
		}
	}
	if clean == AgentDir || strings.HasPrefix(clean, AgentDir+"/") {
		l.refuse(at, "nothing can be mounted at %s, which has sandboxer's own programs", clean)
	}
}

// ofEveryHost lists mounts of the host that files use although a service can do without, and why it
// can.
var ofEveryHost = map[string]string{
	"/etc/localtime": "the variable TZ names a time zone",
	"/etc/timezone":  "the variable TZ names a time zone",
	"/dev/null":      "nothing of the host is mounted",
}

func (l *load) mounts(p *Project, s *types.ServiceConfig, at func(...string) []string, out *Service) {
	kept := s.Volumes[:0]
	defer func() { s.Volumes = kept }()
	for i := range s.Volumes {
		v := &s.Volumes[i]
		place := at("volumes", strconv.Itoa(i))
		if why := ofEveryHost[path.Clean(v.Source)]; v.Type == types.VolumeTypeBind && why != "" {
			p.Notes = append(p.Notes, fmt.Sprintf("%s: %s is not mounted at %s: %s", s.Name, v.Source, v.Target, why))
			continue
		}
		kept = append(kept, *v)
		v = &kept[len(kept)-1]
		l.target(place, v.Target)
		l.allow(place, *v, "type", "source", "target", "read_only", "consistency", "bind", "volume", "tmpfs")
		switch v.Type {
		case types.VolumeTypeBind:
			l.allow(place, v.Bind, "create_host_path", "propagation", "selinux", "recursive")
			if b := v.Bind; b != nil && b.SELinux != "" {
				p.Notes = append(p.Notes, fmt.Sprintf("%s: the option %s of the mount at %s is left out: it changes labels on the host", s.Name, b.SELinux, v.Target))
			}
			if b := v.Bind; b != nil && (b.Propagation != "" && b.Propagation != "rprivate" && b.Propagation != "private" || b.Recursive != "") {
				l.refuse(place, "options of a bind mount change the host's mounts or labels")
				continue
			}
			source, err := l.below(v.Source)
			if err != nil {
				l.refuse(place, "%q cannot be mounted: %s", v.Source, err)
				continue
			}
			v.Source = source
			fi, err := l.stat(source)
			b := Bind{Source: source}
			switch {
			case errors.Is(err, fs.ErrNotExist): // made as a directory, as compose does
			case err != nil:
				l.refuse(place, "%q cannot be mounted: %s", source, reason(err))
				continue
			case fi.Mode().IsRegular():
				b.File = true
			case !fi.IsDir():
				l.refuse(place, "%q is neither directory nor regular file", source)
				continue
			}
			if source == "." {
				out.Workspace = path.Clean(v.Target)
			}
			if !slices.Contains(p.Binds, b) {
				p.Binds = append(p.Binds, b)
			}
		case types.VolumeTypeVolume:
			l.allow(place, v.Volume, "nocopy")
			if v.Source != "" {
				if !slices.Contains(p.Volumes, v.Source) {
					l.refuse(place, "the volume %q is not declared", v.Source)
				}
				out.Volumes[v.Source] = path.Clean(v.Target)
			}
		case types.VolumeTypeTmpfs:
			l.allow(place, v.Tmpfs, "size", "mode")
			if v.Source != "" {
				l.refuse(place, "a tmpfs has no source")
			}
		default:
			l.refuse(place, "a mount of the type %q is not supported", v.Type)
		}
	}
}

// nested handles mounts of paths within a place that some service may write: that
// service could put a link there between the check and the mount. Read-only mounts, and files,
// use a copy that was made before. For writable mounts of directories, each directory
// on the way is mounted in that service, too, at its place there: the kernel
// lets no process remove or rename a mount point. (Another service
// that has it not mounted could do so, and so could a program outside that puts files into the
// workspace; such programs must keep what Mounts lists.)
func (l *load) nested(p *Project) {
	var writable, pins []string
	for _, s := range p.model.Services {
		for _, v := range s.Volumes {
			if v.Type == types.VolumeTypeBind && !v.ReadOnly {
				writable = append(writable, v.Source)
			}
		}
	}
	within := func(source string) bool {
		return slices.ContainsFunc(writable, func(w string) bool {
			return w != source && (w == "." || strings.HasPrefix(source, w+"/"))
		})
	}
	for _, name := range l.order(p.model) {
		for _, v := range p.model.Services[name].Volumes {
			if v.Type != types.VolumeTypeBind || !within(v.Source) {
				continue
			}
			file := slices.Contains(p.Binds, Bind{Source: v.Source, File: true})
			if !v.ReadOnly && !file {
				pins = append(pins, v.Source)
				continue
			}
			what := "%s: %s is mounted as a copy from the start of the sandbox"
			if !v.ReadOnly {
				what += ", and changes to it are not in the workspace"
			}
			p.Notes = append(p.Notes, fmt.Sprintf(what, name, v.Source))
			if p.copied[v.Source] != "" {
				continue
			}
			at2 := slices.IndexFunc(p.Binds, func(b Bind) bool { return b.Source == v.Source })
			if at2 < 0 {
				continue
			}
			b := p.Binds[at2]
			b.Copy = fmt.Sprintf("copy-%d", len(p.Copies))
			p.copied[v.Source] = b.Copy
			p.Copies = append(p.Copies, b)
		}
	}
	slices.SortFunc(p.Copies, func(a, b Bind) int { return cmp.Compare(a.Copy, b.Copy) })
	for _, source := range pins {
		l.pin(p, source)
	}
}

// pin mounts source, a directory, and its parents in every service that may write
// one of these, at their places there.
func (l *load) pin(p *Project, source string) {
	for _, name := range l.order(p.model) {
		s := p.model.Services[name]
		for _, v := range s.Volumes {
			rest, in := strings.CutPrefix(source, v.Source+"/")
			if v.Source == "." {
				rest, in = source, true
			}
			if v.Type != types.VolumeTypeBind || v.ReadOnly || !in {
				continue
			}
			dir, target := v.Source, path.Clean(v.Target)
			for part := range strings.SplitSeq(rest, "/") {
				dir, target = path.Join(dir, part), path.Join(target, part)
				if slices.ContainsFunc(s.Volumes, func(o types.ServiceVolumeConfig) bool { return path.Clean(o.Target) == target && o.Source != dir }) ||
					slices.ContainsFunc(s.Tmpfs, func(o string) bool { at, _, _ := strings.Cut(o, ":"); return path.Clean(at) == target }) {
					break // something else is there, which the service cannot move, or look behind
				}
				if !slices.ContainsFunc(s.Volumes, func(o types.ServiceVolumeConfig) bool { return path.Clean(o.Target) == target }) {
					s.Volumes = append(s.Volumes, types.ServiceVolumeConfig{Type: types.VolumeTypeBind, Source: dir, Target: target})
				}
				if b := (Bind{Source: dir}); !slices.Contains(p.Binds, b) {
					p.Binds = append(p.Binds, b)
				}
			}
		}
		p.model.Services[name] = s
	}
}

// asset turns the use of a config or secret into a file next to the workspace.
func (l *load) asset(p *Project, s *types.ServiceConfig, at func(...string) []string, kind string, r types.FileReferenceConfig) {
	place := at(kind)
	l.allow(place, r, "source", "target", "uid", "gid", "mode")
	o, ok := object(p.model, kind, r.Source)
	if !ok {
		l.refuse(place, "%q is not declared", r.Source)
		return
	}
	target := cmp.Or(r.Target, r.Source)
	if !path.IsAbs(target) {
		if kind == "secrets" {
			target = path.Join("/run/secrets", target)
		} else {
			target = "/" + target
		}
	}
	l.target(place, target)
	where := []string{kind, r.Source}
	var content []byte
	switch {
	case o.File != "":
		name, err := l.below(o.File)
		if err == nil {
			content, err = l.read(name)
		}
		if err != nil {
			l.refuse(append(where, "file"), "%q cannot be read: %s", o.File, reason(err))
			return
		}
	case o.Environment != "":
		v, ok := l.env[o.Environment]
		if !ok {
			l.refuse(append(where, "environment"), "the variable %s is not set", o.Environment)
			return
		}
		content = []byte(v)
	default:
		content = []byte(o.Content)
	}
	mode := fs.FileMode(0o444)
	if r.Mode != nil {
		mode = fs.FileMode(*r.Mode) & 0o777
	}
	name := fmt.Sprintf("file-%d", len(p.Files))
	p.mounted[s.Name] = append(p.mounted[s.Name], mount{name, target})
	p.Files = append(p.Files, File{Name: name, Mode: mode, Content: content})
}

func object(m *types.Project, kind, name string) (types.FileObjectConfig, bool) {
	if kind == "secrets" {
		o, ok := m.Secrets[name]
		return types.FileObjectConfig(o), ok
	}
	o, ok := m.Configs[name]
	return types.FileObjectConfig(o), ok
}
