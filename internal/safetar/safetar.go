// Package safetar checks tar archives of others before they are unpacked or passed on: no entry
// leads out of the directory that it is unpacked in, by its name, by a link or by way of a link
// of the same archive; no name occurs twice; the unpacked size is bounded; and there is
// nothing in it except directories, files, symbolic links, and hard links to its own files.
//
// That makes an archive harmless to an unpacker that trusts it. If others change the directory
// meanwhile, the unpacker needs an os.Root all the same.
package safetar

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"path"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// Rules are the differences between archives. A limit of zero means its default.
type Rules struct {
	Bytes     int64 // of all files together; default 64 GiB
	FileBytes int64 // of one file; default Bytes
	Entries   int   // default 1,000,000; one takes some 100 bytes of memory
	PathBytes int   // of a name or link target; default 4096
	NameBytes int   // of one component; default 255
	Depth     int   // components of a name; default 256

	// OutsideLinks keeps symbolic links that are absolute or lead out. They are harmless if
	// the unpacker does not follow them; no entry is below one.
	OutsideLinks bool
	// SkipSpecial leaves out devices, FIFOs and sockets, and hard links to them, instead of
	// refusing the archive.
	SkipSpecial bool
	// Strip drops the first element of every name, and entries that have no other.
	Strip bool
	// FoldCase refuses names that differ by case only, for file systems that do not distinguish
	// them.
	FoldCase bool
}

// WithDefaults returns r with every limit set.
func (r Rules) WithDefaults() Rules {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	if r.Bytes == 0 {
		r.Bytes = 64 << 30
	}
	if r.FileBytes == 0 {
		r.FileBytes = r.Bytes
	}
	def(&r.Entries, 1_000_000)
	def(&r.PathBytes, 4096)
	def(&r.NameBytes, 255)
	def(&r.Depth, 256)
	return r
}

// Refuse says why an archive is refused, as Invalid.
func Refuse(format string, args ...any) *sandboxer.Error {
	return sandboxer.E(sandboxer.Invalid, nil, "the archive is refused: "+format, args...)
}

// over says which limit an archive exceeds.
func over(format string, args ...any) error {
	return sandboxer.E(sandboxer.Exhausted, nil, format, args...)
}

// CleanName returns a name in the form "a/b", or "." for the directory itself. r must have its
// defaults.
func (r Rules) CleanName(name string) (string, error) {
	switch {
	case name == "":
		return "", Refuse("an entry has no name")
	case len(name) > r.PathBytes:
		return "", Refuse("a name has %d bytes (%.40q…); %d is the limit", len(name), name, r.PathBytes)
	case strings.IndexByte(name, 0) >= 0:
		return "", Refuse("%q has a zero byte in its name", name)
	case name[0] == '/':
		return "", Refuse("%q is an absolute name", name)
	}
	depth := 0
	for c := range strings.SplitSeq(name, "/") {
		switch {
		case c == "..":
			return "", Refuse("%q leads out of the root", name)
		case len(c) > r.NameBytes:
			return "", Refuse("a name in %.40q… has %d bytes; %d is the limit", name, len(c), r.NameBytes)
		case c != "" && c != ".":
			depth++
		}
	}
	if depth > r.Depth {
		return "", Refuse("%.40q… is %d directories deep; %d is the limit", name, depth, r.Depth)
	}
	return path.Clean(name), nil
}

// target checks the target of the symbolic link name and reports whether it stays inside.
//
// ".." is followed only at the beginning of a target: there it leaves directories that are
// known to be real, whereas after a name it leaves whatever that name links to.
func (r Rules) target(name, target string) (inside bool, err error) {
	switch {
	case target == "":
		return false, Refuse("the symbolic link %q has no target", name)
	case len(target) > r.PathBytes:
		return false, Refuse("the target of the symbolic link %q has %d bytes; %d is the limit", name, len(target), r.PathBytes)
	case strings.IndexByte(target, 0) >= 0:
		return false, Refuse("the target of the symbolic link %q has a zero byte", name)
	}
	inside = target[0] != '/'
	room := strings.Count(name, "/")
	named := false
	for c := range strings.SplitSeq(target, "/") {
		switch {
		case c == "" || c == ".":
		case c != "..":
			named = true
		case named || room == 0:
			inside = false
		default:
			room--
		}
	}
	if !inside && !r.OutsideLinks {
		return false, Refuse("the symbolic link %q leads to %q, out of the root", name, target).
			WithHint("allow links that lead outside if the archive comes from a sandbox and goes to one")
	}
	return inside, nil
}

// An Entry is an entry of an archive as it may be used.
type Entry struct {
	Name string // clean; "." for the directory that the archive is unpacked in
	Kind byte   // tar.TypeReg, TypeDir, TypeSymlink or TypeLink; 0 for what is left out
	// Link is a symbolic link's target unchanged, and for a hard link the clean name of the
	// file, which is an earlier one of the archive. A hard link to a symbolic link is another
	// symbolic link, and is returned as one.
	Link    string
	Outside bool     // a symbolic link that leads out
	Again   bool     // a directory that was announced before
	Late    bool     // a directory that comes after something within it
	Implied []string // the directories above it that are not in the archive so far, outermost first
}

// A Checker checks the entries of one archive in their order.
type Checker struct {
	rules  Rules
	seen   map[string]node
	folded map[string]string
	root   bool // was announced
	others int  // entries besides those of seen
	bytes  int64
}

type node struct {
	kind    byte // 0: left out
	implied bool
	link    string
}

// NewChecker returns a Checker by rules.
func NewChecker(rules Rules) *Checker {
	c := &Checker{rules: rules.WithDefaults(), seen: map[string]node{}}
	if rules.FoldCase {
		c.folded = map[string]string{}
	}
	return c
}

// Bytes is the total size of the files so far.
func (c *Checker) Bytes() int64 { return c.bytes }

// Check returns the next entry, whose header h is, as it may be used. Kinds: Exhausted
// when there are too many entries or bytes, otherwise Invalid.
func (c *Checker) Check(h *tar.Header) (Entry, error) {
	if h.Typeflag == tar.TypeXGlobalHeader {
		for k := range h.PAXRecords {
			if k != "comment" { // git archive's
				return Entry{}, Refuse("its global header sets %q for everything that follows", k)
			}
		}
		return Entry{}, nil
	}
	for k := range h.PAXRecords {
		if strings.HasPrefix(k, "GNU.sparse.") {
			return Entry{}, sparse(h)
		}
	}
	name, err := c.name(h.Name)
	if err != nil {
		return Entry{}, err
	}
	if name == "" {
		return Entry{}, c.further()
	}
	e := Entry{Name: name, Kind: h.Typeflag, Link: h.Linkname}
	slash := strings.HasSuffix(h.Name, "/")
	switch h.Typeflag {
	case tar.TypeReg:
		if slash {
			return Entry{}, Refuse("%q is a file with the name of a directory", h.Name)
		}
		if h.Size < 0 {
			return Entry{}, Refuse("%q has %d bytes", h.Name, h.Size)
		}
		e.Link = ""
	case tar.TypeDir, tar.TypeSymlink, tar.TypeLink:
		if h.Size != 0 {
			return Entry{}, Refuse("%q is not a file, but has %d bytes", h.Name, h.Size)
		}
		if slash && h.Typeflag != tar.TypeDir {
			return Entry{}, Refuse("%q is a link with the name of a directory", h.Name)
		}
	case tar.TypeGNUSparse:
		return Entry{}, sparse(h)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		what := map[byte]string{tar.TypeChar: "character device", tar.TypeBlock: "block device", tar.TypeFifo: "FIFO"}[h.Typeflag]
		if !c.rules.SkipSpecial {
			return Entry{}, Refuse("%q is a %s", name, what).WithHint("exclude it")
		}
		e.Kind, e.Link = 0, ""
	default:
		return Entry{}, Refuse("%q has the unknown type %q", name, h.Typeflag)
	}
	if name == "." && e.Kind != tar.TypeDir {
		return Entry{}, Refuse("the root is not a directory in it")
	}
	if e.Kind == tar.TypeLink {
		if e.Link, err = c.name(h.Linkname); err != nil {
			return Entry{}, Refuse("the hard link %q leads to %.80q", name, h.Linkname)
		}
		to, ok := c.seen[e.Link]
		switch {
		case !ok || to.kind == tar.TypeDir:
			return Entry{}, Refuse("the hard link %q leads to %q, which is no earlier file", name, e.Link)
		case to.kind == 0: // what leads to what is left out is left out with it
			e.Kind, e.Link = 0, ""
		case to.kind == tar.TypeSymlink:
			e.Kind, e.Link = tar.TypeSymlink, to.link
		case to.kind == tar.TypeLink:
			e.Link = to.link
		}
	}
	if e.Kind == tar.TypeSymlink {
		inside, err := c.rules.target(name, e.Link)
		if err != nil {
			return Entry{}, err
		}
		e.Outside = !inside
	}
	if e.Kind == tar.TypeReg {
		if h.Size > c.rules.Bytes-c.bytes {
			return Entry{}, over("the files of the archive take more than %d bytes, which is the limit, at %q", c.rules.Bytes, name)
		}
		if h.Size > c.rules.FileBytes {
			return Entry{}, over("the archive's file %q has %d bytes; %d is the limit for one file", name, h.Size, c.rules.FileBytes)
		}
		c.bytes += h.Size
	}
	return e, c.place(&e)
}

// name returns the name that counts; "" if it is stripped away.
func (c *Checker) name(name string) (string, error) {
	name, err := c.rules.CleanName(name)
	if err == nil && c.rules.Strip {
		_, name, _ = strings.Cut(name, "/")
	}
	return name, err
}

func sparse(h *tar.Header) error {
	return Refuse("%.80q is a sparse file: its size is %d bytes, regardless of how much the archive holds of it", h.Name, h.Size).
		WithHint("make the archive without tar's --sparse")
}

// place adds e to the tree.
func (c *Checker) place(e *Entry) error {
	if e.Name == "." { // nothing can link to it
		e.Again, c.root = c.root, true
		if !e.Again {
			return nil
		}
		return c.further()
	}
	old, taken := c.seen[e.Name]
	if taken {
		if e.Kind != tar.TypeDir || old.kind != tar.TypeDir {
			return Refuse("%q is in it twice", e.Name)
		}
		e.Again, e.Late = !old.implied, old.implied
		c.seen[e.Name] = node{kind: tar.TypeDir}
		if e.Late {
			return nil
		}
		return c.further()
	}
	// Every directory above, the outermost first.
	for i := 0; i < len(e.Name); i++ {
		if e.Name[i] != '/' {
			continue
		}
		dir := e.Name[:i]
		switch d, ok := c.seen[dir]; {
		case !ok:
			if err := c.add(dir, node{kind: tar.TypeDir, implied: true}); err != nil {
				return err
			}
			e.Implied = append(e.Implied, dir)
		case d.kind != tar.TypeDir:
			return Refuse("%q is below %q, which is no directory", e.Name, dir)
		}
	}
	return c.add(e.Name, node{kind: e.Kind, link: e.Link})
}

// further counts an entry that adds no name.
func (c *Checker) further() error {
	if len(c.seen)+c.others >= c.rules.Entries {
		return over("the archive has more than %d entries, which is the limit", c.rules.Entries)
	}
	c.others++
	return nil
}

func (c *Checker) add(name string, n node) error {
	if err := c.further(); err != nil {
		return err
	}
	c.others-- // it is counted by its name
	if c.folded != nil {
		key := strings.ToLower(name)
		if other, ok := c.folded[key]; ok {
			return Refuse("%q and %q differ by case only", other, name)
		}
		c.folded[key] = name
	}
	c.seen[name] = n
	return nil
}

// A Reader reads an archive and refuses everything that breaks the rules.
type Reader struct {
	tr      *tar.Reader
	checker *Checker
}

// NewReader returns a Reader of the archive that r has.
func NewReader(r io.Reader, rules Rules) *Reader {
	return &Reader{tar.NewReader(r), NewChecker(rules)}
}

// Next returns the header of the next entry that is not left out, with the name, type and
// link that may be used; everything else in it is unchecked. io.EOF is the end.
// An error of the source that has a kind, or says that it was cancelled, is returned unchanged;
// otherwise an unreadable archive is Invalid.
func (r *Reader) Next() (*tar.Header, error) {
	for {
		h, err := r.tr.Next()
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) { // Check says more about that
			return nil, unreadable(err)
		}
		e, err := r.checker.Check(h)
		if err != nil {
			return nil, err
		}
		if e.Kind != 0 {
			h.Name, h.Typeflag, h.Linkname = e.Name, e.Kind, e.Link
			if e.Kind == tar.TypeDir {
				h.Linkname = ""
			}
			return h, nil
		}
	}
}

// Read reads the contents of the current file.
func (r *Reader) Read(p []byte) (int, error) {
	n, err := r.tr.Read(p)
	return n, unreadable(err)
}

func unreadable(err error) error {
	if err == nil || err == io.EOF || sandboxer.KindOf(err) != sandboxer.Internal || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return sandboxer.E(sandboxer.Invalid, err, "the archive cannot be read: %v", err)
}
