package execfiles

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// parseStat reads the output of stat in statFormat, and returns what follows.
func parseStat(line string) (fi sandboxer.FileInfo, rest string, err error) {
	f := strings.SplitN(line, " ", 8)
	if len(f) < 7 {
		return fi, "", errors.New("too few fields")
	}
	if len(f) == 8 {
		rest = f[7]
	}
	mode, err1 := strconv.ParseUint(f[0], 16, 32)
	size, err2 := strconv.ParseInt(f[1], 10, 64)
	mtime, err3 := strconv.ParseInt(f[2], 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil {
		return fi, "", err
	}
	fi = sandboxer.FileInfo{Size: size, Mode: unixMode(uint32(mode)), ModTime: time.Unix(mtime, 0), Owner: f[5], Group: f[6]}
	if fi.Owner == "UNKNOWN" {
		fi.Owner = f[3]
	}
	if fi.Group == "UNKNOWN" {
		fi.Group = f[4]
	}
	return fi, rest, nil
}

// A listing reads the output of listScript about dir, and keeps the first files after one.
type listing struct {
	dir, after string
	limit      int

	got   []sandboxer.FileInfo
	cut   bool // there are more
	bytes int64
	err   error

	part   []byte // that has not come to its end
	record []byte // an entry, which goes on in the next line if that has no slash
	links  map[string]int
	link   *int // of got: whose target comes next; -1 if that is not kept
}

const (
	pageFiles  = 1000
	maxPart    = 64 << 10 // bytes of a name or target
	maxListing = 4 << 30  // bytes, of ten million files and more
)

// parseList reads the whole output of listScript.
func parseList(dir, out string) ([]sandboxer.FileInfo, error) {
	l := &listing{dir: dir, limit: len(out)}
	if _, err := l.Write([]byte(out)); err != nil {
		return nil, err
	}
	return l.end()
}

func (l *listing) bad(err error) error {
	return sandboxer.E(sandboxer.Failed, err, "%s: the shell inside the sandbox printed a listing that cannot be read", l.dir)
}

func (l *listing) Write(p []byte) (int, error) {
	if l.err == nil {
		l.err = l.read(p)
	}
	if l.err != nil {
		return 0, l.err
	}
	return len(p), nil
}

func (l *listing) read(p []byte) error {
	if l.bytes += int64(len(p)); l.bytes > maxListing {
		return l.bad(errors.New("it has no end"))
	}
	for len(p) > 0 {
		ends := "\n\x00"
		if l.links != nil {
			ends = "\x00"
		}
		i := bytes.IndexAny(p, ends)
		if i < 0 {
			i = len(p)
		}
		if l.part = append(l.part, p[:i]...); len(l.part)+len(l.record) > maxPart {
			return l.bad(errors.New("a name is too long"))
		}
		if i == len(p) {
			return nil
		}
		err := l.piece(p[i] == 0)
		if err != nil {
			return err
		}
		l.part, p = l.part[:0], p[i+1:]
	}
	return nil
}

// piece handles the content of part, a line of the entries or, after those, a name or target.
func (l *listing) piece(nul bool) error {
	if l.links != nil {
		return l.linked()
	}
	switch {
	case nul && len(l.part) == 0:
	case bytes.IndexByte(l.part, '/') >= 0:
		if err := l.entry(); err != nil {
			return err
		}
		l.record = append(l.record, l.part...)
	case len(l.record) == 0:
		return l.bad(fmt.Errorf("it begins with %q", l.part))
	default: // the rest of a name with a line end
		l.record = append(append(l.record, '\n'), l.part...)
	}
	if !nul {
		return nil
	}
	err := l.entry()
	l.shrink()
	l.links = map[string]int{}
	for i, fi := range l.got {
		l.links["./"+path.Base(fi.Path)] = i
	}
	return err
}

// entry handles a complete record.
func (l *listing) entry() error {
	if len(l.record) == 0 {
		return nil
	}
	fi, name, err := parseStat(string(l.record))
	name, ok := strings.CutPrefix(name, "./")
	if err != nil || !ok || name == "" || name == "." || name == ".." || strings.Contains(name, "/") {
		return l.bad(errors.Join(err, fmt.Errorf("record %q", l.record)))
	}
	l.record = l.record[:0]
	if name > l.after {
		fi.Path = path.Join(l.dir, name)
		if l.got = append(l.got, fi); len(l.got) > 2*l.limit {
			l.shrink()
		}
	}
	return nil
}

func (l *listing) shrink() {
	slices.SortFunc(l.got, func(a, b sandboxer.FileInfo) int { return strings.Compare(a.Path, b.Path) })
	if len(l.got) > l.limit {
		l.got, l.cut = l.got[:l.limit], true
	}
}

func (l *listing) linked() error {
	if l.link == nil {
		i, ok := l.links[string(l.part)]
		if !ok {
			i = -1
		}
		l.link = &i
		return nil
	}
	if *l.link >= 0 {
		l.got[*l.link].Target = strings.TrimSuffix(string(l.part), "\n")
	}
	l.link = nil
	return nil
}

func (l *listing) end() ([]sandboxer.FileInfo, error) {
	if l.links == nil || l.link != nil || len(l.part) > 0 {
		return nil, l.bad(errors.New("cut off"))
	}
	return l.got, nil
}

// unixMode converts st_mode. The values are the same on every system a guest has.
func unixMode(m uint32) fs.FileMode {
	mode := fs.FileMode(m & 0o777)
	switch m & 0o170000 {
	case 0o040000:
		mode |= fs.ModeDir
	case 0o120000:
		mode |= fs.ModeSymlink
	case 0o010000:
		mode |= fs.ModeNamedPipe
	case 0o140000:
		mode |= fs.ModeSocket
	case 0o060000:
		mode |= fs.ModeDevice
	case 0o020000:
		mode |= fs.ModeDevice | fs.ModeCharDevice
	}
	for bit, flag := range map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if m&bit != 0 {
			mode |= flag
		}
	}
	return mode
}
