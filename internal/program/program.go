// Package program finds programs of ours that run elsewhere than the broker: on other hosts,
// which may have another platform, and in containers, which have nothing else.
package program

import (
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// A Program is a file that can be copied to where it runs.
type Program struct {
	Path   string
	Digest string // SHA-256, in hexadecimal
}

// machines are the architectures for which there are programs.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// A Finder finds programs. It remembers the digests of files that have not changed since. The
// zero value is ready, and safe for concurrent use.
type Finder struct {
	mu    sync.Mutex
	known map[string]known
}

type known struct {
	fi     os.FileInfo
	digest string
}

// Find returns the program of a name for linux/arch (amd64 or arm64): the configured file if
// that is not empty, else NAME-linux-ARCH next to the running program, or NAME there if the
// running program is for that platform, too. It must be linked statically.
//
// Kinds: Unsupported for another architecture; Unavailable if the program does not exist, is
// for another machine, or needs libraries. The message and the hint say what to do.
func (f *Finder) Find(name, arch, configured string) (Program, error) {
	if _, ok := machines[arch]; !ok {
		return Program{}, sandboxer.E(sandboxer.Unsupported, nil, "there is no %s for linux/%s", name, arch)
	}
	file := configured
	if file == "" {
		self, err := os.Executable()
		if err != nil {
			return Program{}, sandboxer.E(sandboxer.Unavailable, err, "the path of the running program is unknown")
		}
		file = filepath.Join(filepath.Dir(self), name+"-linux-"+arch)
		if _, err := os.Stat(file); err != nil && runtime.GOOS == "linux" && runtime.GOARCH == arch {
			file = filepath.Join(filepath.Dir(self), name)
		}
	}
	if err := Check(file, arch); err != nil {
		if configured == "" {
			return Program{}, sandboxer.E(sandboxer.KindOf(err), err, "there is no %s for linux/%s next to the running program: %s", name, arch, sandboxer.Message(err)).
				WithHint("make build makes it, as %s", file)
		}
		return Program{}, err
	}
	digest, err := f.digest(file)
	return Program{file, digest}, err
}

// Any reports whether Find finds the program for some architecture.
func (f *Finder) Any(name, configured string) bool {
	for arch := range machines {
		if _, err := f.Find(name, arch, configured); err == nil {
			return true
		}
	}
	return false
}

// Check refuses a file that is not a program for linux/arch, or is linked dynamically: it would
// find no libraries in an empty container. The kind is Unavailable.
func Check(file, arch string) error {
	p, err := elf.Open(file)
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the program %s cannot be read", file)
	}
	defer p.Close()
	if p.Machine != machines[arch] {
		return sandboxer.E(sandboxer.Unavailable, nil, "the program %s is for %s, and not for linux/%s", file, p.Machine, arch)
	}
	for _, s := range p.Progs {
		if s.Type == elf.PT_INTERP {
			return sandboxer.E(sandboxer.Unavailable, nil, "the program %s is linked dynamically, and finds no libraries where it is to run", file).
				WithHint("build it with CGO_ENABLED=0: make build, or CGO_ENABLED=0 go install github.com/sand-boxer/sandboxer/cmd/...")
		}
	}
	return nil
}

// digest returns the digest of a file, computed once for each of its states.
func (f *Finder) digest(file string) (string, error) {
	unreadable := func(err error) error {
		return sandboxer.E(sandboxer.Unavailable, err, "the program %s cannot be read", file)
	}
	r, err := os.Open(file)
	if err != nil {
		return "", unreadable(err)
	}
	defer r.Close()
	fi, err := r.Stat()
	if err != nil {
		return "", unreadable(err)
	}
	f.mu.Lock()
	k := f.known[file]
	f.mu.Unlock()
	if k.fi != nil && os.SameFile(k.fi, fi) && k.fi.Size() == fi.Size() && k.fi.ModTime().Equal(fi.ModTime()) {
		return k.digest, nil
	}
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		return "", unreadable(err)
	}
	k = known{fi, hex.EncodeToString(h.Sum(nil))}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known == nil {
		f.known = map[string]known{}
	}
	f.known[file] = k
	return k.digest, nil
}
