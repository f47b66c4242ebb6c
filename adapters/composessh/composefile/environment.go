package composefile

import (
	"bytes"
	"cmp"
	"errors"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/compose-spec/compose-go/v2/dotenv"
	"github.com/compose-spec/compose-go/v2/types"
)

func (l *load) image(p *Project, s *types.ServiceConfig, at func(...string) []string) {
	if s.Image != "" {
		last := s.Image[strings.LastIndexByte(s.Image, '/')+1:]
		switch {
		case !imageName.MatchString(s.Image) || strings.HasPrefix(s.Image, "sha256:"):
			l.refuse(at("image"), "%q is not a valid name of an image", s.Image)
		case strings.HasPrefix(last, "sbx-"):
			l.refuse(at("image"), "%q could be an image of another sandbox", s.Image)
		case hexOnly.MatchString(s.Image) && s.Build == nil:
			l.refuse(at("image"), "%q could be the ID of any image of the host; add a tag", s.Image)
		}
	}
	if s.Build == nil {
		if s.Image == "" {
			l.refuse(at(), "the service has neither image nor build")
		}
		return
	}
	b := s.Build
	l.allow(at("build"), b, "context", "dockerfile", "dockerfile_inline", "args", "labels", "no_cache", "pull", "target", "platforms", "tags", "cache_from")
	if len(b.CacheFrom) > 0 {
		p.Notes = append(p.Notes, s.Name+": build.cache_from is left out: images are built from what the host has")
	}
	build := Build{Service: s.Name, Args: map[string]string{}, Labels: b.Labels, Target: b.Target, NoCache: b.NoCache, Pull: b.Pull, Platform: s.Platform}
	l.labels(p, at("build"), b.Labels)
	for k, v := range b.Labels {
		if strings.ContainsAny(k+v, "\r\n\x00") {
			l.refuse(at("build", "labels", k), "a label has one line")
		}
	}
	if b.Target != "" {
		l.word(at("build", "target"), b.Target)
	}
	if len(b.Platforms) > 1 || len(b.Platforms) == 1 && !platform.MatchString(b.Platforms[0]) {
		l.refuse(at("build", "platforms"), "only one platform can be built")
	} else if len(b.Platforms) == 1 {
		build.Platform = b.Platforms[0]
	}
	var err error
	if build.Context, err = l.below(cmp.Or(b.Context, ".")); err != nil {
		l.refuse(at("build", "context"), "%q cannot be built from: %s", b.Context, err)
		return
	}
	if fi, err := l.stat(build.Context); err != nil || !fi.IsDir() {
		l.refuse(at("build", "context"), "%q is not a directory of the workspace", b.Context)
		return
	}
	if b.DockerfileInline != "" {
		build.Dockerfile = []byte(b.DockerfileInline)
	} else {
		file := path.Join(cmp.Or(b.Context, "."), cmp.Or(b.Dockerfile, "Dockerfile"))
		if path.IsAbs(b.Dockerfile) {
			file = b.Dockerfile
		}
		if file, err = l.below(file); err != nil {
			l.refuse(at("build", "dockerfile"), "%q cannot be used: %s", b.Dockerfile, err)
		} else if fi, err := l.stat(file); err != nil || !fi.Mode().IsRegular() {
			l.refuse(at("build", "dockerfile"), "%q is not a file of the workspace", file)
		} else if build.Dockerfile, err = l.read(file); err != nil {
			l.refuse(at("build", "dockerfile"), "%q cannot be read: %s", file, reason(err))
		} else if build.Ignore, err = l.read(file + ".dockerignore"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			l.refuse(at("build", "dockerfile"), "%q cannot be read: %s", file+".dockerignore", reason(err))
		}
	}
	for k, v := range b.Args {
		if !variable.MatchString(k) {
			l.refuse(at("build", "args", k), "%q is not a valid name of an argument", k)
		} else if v != nil {
			build.Args[k] = *v
		} else if v, ok := l.env[k]; ok {
			build.Args[k] = v
		}
	}
	p.Builds = append(p.Builds, build)
}

func (l *load) environment(s *types.ServiceConfig, at func(...string) []string) {
	env := types.MappingWithEquals{}
	for i, f := range s.EnvFiles {
		place := at("env_file", strconv.Itoa(i))
		if f.Format != "" {
			l.refuse(place, "the format %q is not supported", f.Format)
			continue
		}
		name, err := l.below(f.Path)
		if err != nil {
			l.refuse(place, "%q cannot be read: %s", f.Path, err)
			continue
		}
		data, err := l.read(name)
		if errors.Is(err, fs.ErrNotExist) && !bool(f.Required) {
			continue
		}
		if err != nil {
			l.refuse(place, "%q cannot be read: %s", f.Path, reason(err))
			continue
		}
		vars, err := dotenv.ParseWithLookup(bytes.NewReader(data), func(k string) (string, bool) { v, ok := l.env[k]; return v, ok })
		if err != nil {
			l.refuse(place, "%q is not a file of variables", f.Path)
			continue
		}
		for k, v := range vars {
			env[k] = &v
		}
	}
	for k, v := range s.Environment {
		if v == nil {
			if got, ok := l.env[k]; ok {
				env[k] = &got
			}
			continue
		}
		env[k] = v
	}
	for k := range env {
		if !variable.MatchString(k) {
			l.refuse(at("environment", k), "%q is not a valid name of a variable", k)
		}
	}
	s.Environment, s.EnvFiles = env, nil
}
