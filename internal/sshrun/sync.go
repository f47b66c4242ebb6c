package sshrun

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/sand-boxer/sandboxer"
)

// SyncOptions say how a tree is copied. The zero value copies what differs and
// deletes nothing.
type SyncOptions struct {
	// Delete removes from the destination what the source does not have. What is
	// ignored stays.
	Delete bool
	// Ignore are patterns as in [IgnoreFile], after those of that file.
	Ignore []string
	// Checksum compares the content of files of the same size and time too.
	Checksum bool
	// Method is what carries the data: "" for a tar stream of whole files, "rsync"
	// for the user's rsync, which sends only the differing parts of a file. Both
	// need to know what differs, which is found out in the same way.
	Method string
	// Compress is "" for by the way's length, "always" or "never".
	Compress string
	// MaxBytes bounds what Pull takes; 0 means no bound.
	MaxBytes int64
}

// SyncStats say what a copy did.
type SyncStats struct {
	Files   int      // in the source, directories included
	Sent    int      // of these, what differed
	Bytes   int64    // content sent, before compression
	Deleted int      // names removed, each with what was below it
	Skipped []string // neither file, directory nor symbolic link
}

// An entry is what is known about one name of a tree.
type entry struct {
	typ    byte // f, d, l, other; 0 if only the name is known
	mode   uint32
	size   int64
	sec    int64
	nsec   int64
	whole  bool // the time is known in seconds only
	target string
}

// listing prints every name below $1 with what is known of it, first what the host
// has to offer. $2: make the directory first.
const listing = `
[ -z "$2" ] || mkdir -p -- "$1" || exit
cd -- "$1" || exit
z=0; command -v zstd >/dev/null 2>&1 && z=1
export LC_ALL=C
if find . -prune -printf '' >/dev/null 2>&1; then
	echo "printf $z"
	exec find . -mindepth 1 -printf '%y %m %s %T@ %p\0%l\0'
fi
nl='
'
if stat -c %f . >/dev/null 2>&1; then
	echo "stat $z"
	find . ! -path "*$nl*" -exec stat -c '%f %s %Y %n' {} +
	printf '\0'
	exec find . -path "*$nl*" -print0
fi
echo "names $z"
exec find . ! -path "*$nl*" -print`

type manifest struct {
	entries map[string]entry
	how     string
	zstd    bool
}

// maxListing is how much is read of a list of files, in bytes: of a million and more.
const maxListing = 128 << 20

func (h *Host) list(ctx context.Context, dir string, make bool) (*manifest, error) {
	var said bytes.Buffer
	flag := ""
	if make {
		flag = "1"
	}
	out, exit, err := h.Capture(ctx, Cmd{Script: listing, Args: []string{dir, flag}, Stderr: &limited{&said, 8 << 10}}, maxListing)
	if err != nil {
		return nil, err
	}
	if exit.Code != 0 && len(out) == 0 {
		return nil, sandboxer.E(sandboxer.Failed, &exitError{exit, tidy(said.String())}, "directory %s on host %s cannot be used (%s)", dir, h.target.Name, tidy(said.String()))
	}
	// A name that vanished while it was listed is an exit status, and no loss.
	return parseListing(out)
}

func parseListing(data []byte) (*manifest, error) {
	head, data, _ := bytes.Cut(data, []byte("\n"))
	how, z, _ := strings.Cut(string(head), " ")
	m := &manifest{entries: map[string]entry{}, how: how, zstd: z == "1"}
	damaged := sandboxer.E(sandboxer.Failed, nil, "the host's list of files cannot be read")
	put := func(name string, e entry) bool {
		name = strings.TrimPrefix(name, "./")
		if name == "" || name == "." {
			return true
		}
		if !filepath.IsLocal(name) {
			return false
		}
		m.entries[name] = e
		return true
	}
	switch how {
	case "printf":
		fields := bytes.Split(data, []byte{0})
		if len(fields)%2 == 0 {
			return nil, damaged
		}
		for i := 0; i+1 < len(fields); i += 2 {
			f := strings.SplitN(string(fields[i]), " ", 5)
			if len(f) != 5 || len(f[0]) != 1 {
				return nil, damaged
			}
			e := entry{typ: f[0][0], target: string(fields[i+1])}
			mode, err1 := strconv.ParseUint(f[1], 8, 32)
			size, err2 := strconv.ParseInt(f[2], 10, 64)
			sec, frac, _ := strings.Cut(f[3], ".")
			s, err3 := strconv.ParseInt(sec, 10, 64)
			frac = (frac + "000000000")[:9]
			n, err4 := strconv.ParseInt(frac, 10, 64)
			if s < 0 && n > 0 {
				s, n = s-1, 1e9-n
			}
			e.mode, e.size, e.sec, e.nsec = uint32(mode), size, s, n
			if errors.Join(err1, err2, err3, err4) != nil || !put(f[4], e) {
				return nil, damaged
			}
		}
	case "stat":
		lines, odd, _ := bytes.Cut(data, []byte{0})
		for line := range strings.Lines(string(lines)) {
			f := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 4)
			if len(f) != 4 {
				return nil, damaged
			}
			mode, err1 := strconv.ParseUint(f[0], 16, 32)
			size, err2 := strconv.ParseInt(f[1], 10, 64)
			sec, err3 := strconv.ParseInt(f[2], 10, 64)
			e := entry{typ: '?', mode: uint32(mode & 0o7777), size: size, sec: sec, whole: true}
			switch mode & 0o170000 {
			case 0o100000:
				e.typ = 'f'
			case 0o040000:
				e.typ = 'd'
			case 0o120000:
				e.typ = 'l'
			}
			if errors.Join(err1, err2, err3) != nil || !put(f[3], e) {
				return nil, damaged
			}
		}
		for _, name := range bytes.Split(odd, []byte{0}) {
			if !put(string(name), entry{}) {
				return nil, damaged
			}
		}
	case "names":
		for line := range strings.Lines(string(data)) {
			if !put(strings.TrimSuffix(line, "\n"), entry{}) {
				return nil, damaged
			}
		}
	default:
		return nil, damaged
	}
	return m, nil
}

// walk lists a local tree, without what ig leaves out.
func walk(root string, ig ignore) (map[string]entry, []string, error) {
	found := map[string]entry{}
	var skipped []string
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, file)
		if err != nil || name == "." {
			return err
		}
		name = filepath.ToSlash(name)
		if ig.match(name, d.IsDir()) {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		fi, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		e := entry{mode: unixMode(fi.Mode()), size: fi.Size(), sec: fi.ModTime().Unix(), nsec: int64(fi.ModTime().Nanosecond())}
		switch {
		case fi.Mode().IsRegular():
			e.typ = 'f'
		case fi.IsDir():
			e.typ = 'd'
		case fi.Mode().Type() == fs.ModeSymlink:
			e.typ = 'l'
			if e.target, err = os.Readlink(file); err != nil {
				return err
			}
		default:
			skipped = append(skipped, name)
			return nil
		}
		found[name] = e
		return nil
	})
	return found, skipped, err
}

func unixMode(m fs.FileMode) uint32 {
	n := uint32(m.Perm())
	for bit, is := range map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if m&is != 0 {
			n |= bit
		}
	}
	return n
}

// compare judges whether what is at the destination will do. unsure: only the
// content can tell.
func compare(from, to entry, checksum bool) (same, unsure bool) {
	if from.typ != to.typ {
		return false, false
	}
	switch from.typ {
	case 'd':
		return from.mode == to.mode, false
	case 'l':
		return to.target == from.target && (to.target != "" || from.target == "") && !to.whole && !from.whole, false
	}
	if from.mode != to.mode || from.size != to.size {
		return false, false
	}
	if from.sec != to.sec {
		// A checkout sets every time anew. Small files are sent in the time it
		// takes to ask.
		return false, from.size >= 256<<10
	}
	if from.nsec == to.nsec {
		return true, checksum
	}
	return false, from.whole || to.whole || from.size >= 256<<10
}

const hashScript = `cd -- "$1" && f=$(mktemp) || exit
cat >"$f"
[ "$(wc -c <"$f")" -eq "$2" ] && xargs -0 sha256sum -- <"$f"; r=$?
rm -f "$f"; exit $r`

// hashes returns the SHA-256 of files of the host, by name; those that it could not
// tell are missing.
func (h *Host) hashes(ctx context.Context, dir string, names []string) (map[string]string, error) {
	var list bytes.Buffer
	for _, n := range names {
		list.WriteString("./" + n + "\x00")
	}
	// For each name at most one line, of 68 bytes beside it, where it has none to escape.
	out, _, err := h.Capture(ctx, Cmd{Script: hashScript, Args: []string{dir, strconv.Itoa(list.Len())}, Stdin: &list}, 2*list.Len()+80*len(names))
	sums := map[string]string{}
	for line := range strings.Lines(string(out)) {
		// A name that needs escaping has a line that begins with a backslash: unknown.
		if sum, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "  ./"); ok && len(sum) == 64 {
			sums[name] = sum
		}
	}
	return sums, err
}

func hashFile(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// A plan is what a copy has to do.
type plan struct {
	send   []string // in the order of names, so that directories come before what is in them
	remove []string
	bytes  int64
}

// differ makes the plan. tell says, of names about which only the content can, which
// are the same.
func differ(from, to map[string]entry, o SyncOptions, ig ignore, tell func([]string) (map[string]bool, error)) (*plan, error) {
	var p plan
	var unsure []string
	for name, e := range from {
		is, there := to[name]
		same, ask := false, false
		if there && is.typ != 0 {
			same, ask = compare(e, is, o.Checksum)
		}
		switch {
		case ask:
			unsure = append(unsure, name)
		case !same:
			p.send = append(p.send, name)
		}
		if there && is.typ != e.typ && is.typ != 0 {
			p.remove = append(p.remove, name)
		}
	}
	if len(unsure) > 0 {
		slices.Sort(unsure)
		same, err := tell(unsure)
		if err != nil {
			return nil, err
		}
		for _, name := range unsure {
			if !same[name] {
				p.send = append(p.send, name)
			}
		}
	}
	slices.Sort(p.send)
	for _, name := range p.send {
		if e := from[name]; e.typ == 'f' {
			p.bytes += e.size
		}
	}
	if o.Delete {
		kept := map[string]bool{} // directories that hold something that stays
		for name, e := range to {
			if _, ok := from[name]; ok || ig.below(name, e.typ == 'd') {
				for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
					kept[dir] = true
				}
			}
		}
		for name, e := range to {
			if _, ok := from[name]; !ok && !kept[name] && !ig.below(name, e.typ == 'd') {
				p.remove = append(p.remove, name)
			}
		}
	}
	slices.Sort(p.remove)
	p.remove = topmost(p.remove)
	return &p, nil
}

// topmost drops what is below another one of sorted names.
func topmost(names []string) []string {
	all := make(map[string]bool, len(names))
	for _, n := range names {
		all[n] = true
	}
	return slices.DeleteFunc(names, func(name string) bool {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			if all[dir] {
				return true
			}
		}
		return false
	})
}

// Push makes the directory remote of the host like the local one: files, directories,
// symbolic links, modes and times; owners are the account's. Only what differs is
// sent, judged by type, size, mode and time, and by content where these leave doubt.
// It may be repeated after any failure, and what arrived is not sent again: a file
// has its time only once it is whole.
//
// Kinds: Invalid when local is not a directory or Ignore cannot be read, Failed when
// the host cannot write there, Conflict when local changes faster than it can be read.
func (h *Host) Push(ctx context.Context, local, remote string, o SyncOptions) (SyncStats, error) {
	for try := 0; ; try++ {
		stats, err := h.push(ctx, local, remote, o)
		if c := (*changedError)(nil); errors.As(err, &c) && try < 2 {
			continue
		} else if errors.As(err, &c) {
			err = sandboxer.E(sandboxer.Conflict, err, "%s changes while it is copied", filepath.Join(local, c.name))
		}
		return stats, err
	}
}

func (o SyncOptions) check() error {
	if o.Method != "" && o.Method != "rsync" {
		return invalid("%q is not a way to copy files", o.Method).WithHint("want rsync, or nothing for a tar stream")
	}
	if o.Compress != "" && o.Compress != "always" && o.Compress != "never" {
		return invalid("compression is always, never or, left out, by the way's length; not %q", o.Compress)
	}
	return nil
}

func (h *Host) push(ctx context.Context, local, remote string, o SyncOptions) (stats SyncStats, err error) {
	if err := errors.Join(o.check(), checkWords("the directory", remote)); err != nil {
		return stats, err
	}
	if fi, err := os.Stat(local); err != nil || !fi.IsDir() {
		return stats, invalid("%s is not a directory of this machine", local)
	}
	if local, err = filepath.EvalSymlinks(local); err != nil {
		return stats, invalid("%s cannot be read", local)
	}
	var lines []string
	if data, err := os.ReadFile(filepath.Join(local, IgnoreFile)); err == nil {
		lines = strings.Split(string(data), "\n")
	}
	ig, err := parseIgnore(append(lines, o.Ignore...))
	if err != nil {
		return stats, err
	}
	var there *manifest
	var lerr error
	var wg sync.WaitGroup
	wg.Go(func() { there, lerr = h.list(ctx, remote, true) })
	here, skipped, err := walk(local, ig)
	wg.Wait()
	if err != nil {
		return stats, sandboxer.E(sandboxer.Invalid, err, "%s cannot be read", local)
	}
	if lerr != nil {
		return stats, lerr
	}
	p, err := differ(here, there.entries, o, ig, func(names []string) (map[string]bool, error) {
		sums, err := h.hashes(ctx, remote, names)
		same := map[string]bool{}
		for name, sum := range sums {
			mine, err := hashFile(filepath.Join(local, name))
			same[name] = err == nil && mine == sum
		}
		return same, err
	})
	if err != nil {
		return stats, err
	}
	stats = SyncStats{Files: len(here), Sent: len(p.send), Bytes: p.bytes, Deleted: len(p.remove), Skipped: skipped}
	inline := p.remove
	if n := 0; slices.ContainsFunc(p.remove, func(s string) bool { n += len(s) + 5; return n > 8<<10 }) {
		if err := h.removeMany(ctx, remote, p.remove); err != nil {
			return stats, err
		}
		inline = nil
	}
	if len(p.send) == 0 && len(inline) == 0 {
		return stats, nil
	}
	if o.Method == "rsync" {
		if len(inline) > 0 {
			if err := h.removeMany(ctx, remote, inline); err != nil {
				return stats, err
			}
		}
		return stats, h.rsync(ctx, local, remote, p.send, o)
	}
	return stats, h.sendTar(ctx, local, remote, here, p.send, inline, there.zstd, p.bytes, o)
}

// removeMany deletes names below dir that are too many for a command. They are
// counted before anything is deleted: the last of a list that was cut would be
// another name.
func (h *Host) removeMany(ctx context.Context, dir string, names []string) error {
	var list bytes.Buffer
	for _, n := range names {
		list.WriteString("./" + n + "\x00")
	}
	exit, said, err := h.feedScript(ctx, `cd -- "$1" && f=$(mktemp) || exit
cat >"$f"
[ "$(wc -c <"$f")" -eq "$2" ] && xargs -0 rm -rf -- <"$f"; r=$?
rm -f "$f"; exit $r`, []string{dir, strconv.Itoa(list.Len())}, &list)
	return h.stepped(exit, said, err, "deleting from "+dir)
}

func (h *Host) feedScript(ctx context.Context, script string, args []string, in io.Reader) (sandboxer.Exit, string, error) {
	var said bytes.Buffer
	exit, err := h.Run(ctx, Cmd{Script: script, Args: args, Stdin: in, Stderr: &limited{&said, 8 << 10}})
	return exit, tidy(said.String()), err
}

func (h *Host) stepped(exit sandboxer.Exit, said string, err error, what string) error {
	if err != nil || exit.Code == 0 {
		return err
	}
	kind := sandboxer.Failed
	if strings.Contains(said, "No space left") || strings.Contains(said, "quota exceeded") {
		kind = sandboxer.Exhausted
	}
	return sandboxer.E(kind, &exitError{exit, said}, "%s on host %s failed (%s)", what, h.target.Name, tidy(said))
}

// extract unpacks a tar stream in $1 after it has deleted the other arguments but $2,
// which says whether the stream is compressed.
const extract = `cd -- "$1" || exit
z=$2; shift 2
[ $# -eq 0 ] || rm -rf -- "$@" || exit
if [ "$z" = 1 ]; then zstd -dqc | tar -xpof -; else exec tar -xpof -; fi`

const (
	// farAway is the answer time from which on a host is so far away that sending
	// less, and over several channels at once, is worth the work: a channel's window
	// is 2 MiB for each round trip.
	farAway = 20 * time.Millisecond
	streams = 4
)

func (h *Host) sendTar(ctx context.Context, local, remote string, here map[string]entry, names, remove []string, canZstd bool, size int64, o SyncOptions) error {
	far := h.latency() > farAway
	z := canZstd && (o.Compress == "always" || o.Compress == "" && far && size > 64<<10)
	flag := "0"
	if z {
		flag = "1"
	}
	args := []string{remote, flag}
	for _, n := range remove {
		args = append(args, "./"+n)
	}
	parts := [][]string{names}
	closed := slices.ContainsFunc(names, func(n string) bool { return here[n].typ == 'd' && here[n].mode&0o300 != 0o300 })
	if far && size > 8<<20 && !closed {
		if len(remove) > 0 {
			if err := h.removeMany(ctx, remote, remove); err != nil {
				return err
			}
			args = args[:2]
		}
		parts = split(here, names, streams)
	}
	errs := make([]error, len(parts))
	var wg sync.WaitGroup
	for i, part := range parts {
		wg.Go(func() {
			src := &tarSource{root: local, entries: here, names: part, zstd: z, workers: max(1, 2/len(parts))}
			exit, said, err := h.feedScript(ctx, extract, args, src)
			// What broke at the other end is told there; what could not be read here is not.
			serr := src.err()
			if c := (*changedError)(nil); serr != nil && ctx.Err() == nil && (isFault(serr) || errors.As(serr, &c) && err == nil || err == nil && exit.Code == 0) {
				errs[i] = serr
				return
			}
			errs[i] = h.stepped(exit, said, err, "unpacking in "+remote)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// split deals names, which are sorted, out to n streams of about the same size that are
// unpacked at once. Each has the directories of its own files before them, also where
// others have them too: a tar that lacks a directory, and finds it made by another one when
// it is about to make it, gives up.
func split(here map[string]entry, names []string, n int) [][]string {
	parts := make([][]string, n)
	sums := make([]int64, n)
	has := make([]map[string]bool, n) // what of directories is in a part
	for i := range has {
		has[i] = map[string]bool{}
	}
	sent := make(map[string]bool)
	var dirs func(at int, name string)
	dirs = func(at int, name string) {
		if dir := path.Dir(name); dir != "." && !has[at][dir] {
			dirs(at, dir)
			if sent[dir] {
				has[at][dir], parts[at] = true, append(parts[at], dir)
			}
		}
	}
	for _, name := range names {
		if here[name].typ == 'd' {
			sent[name], has[0][name] = true, true
			parts[0] = append(parts[0], name)
			continue
		}
		at := 0
		if here[name].typ == 'f' {
			at = slices.Index(sums, slices.Min(sums))
			sums[at] += here[name].size + 1024
		}
		dirs(at, name)
		parts[at] = append(parts[at], name)
	}
	return parts
}

// changedError is a file that was not what it had been when it was listed.
type changedError struct{ name string }

func (e *changedError) Error() string { return e.name + " changed while it was read" }

// A tarSource is a reader that is only ever asked to write itself.
type tarSource struct {
	root    string
	entries map[string]entry
	names   []string
	zstd    bool
	workers int
	// What went wrong first. The host may be done with the stream, and the command
	// have ended, before the writing of it has returned.
	failed atomic.Pointer[error]
}

func (s *tarSource) fail(err error) { s.failed.CompareAndSwap(nil, &err) }

func (s *tarSource) err() error {
	if err := s.failed.Load(); err != nil {
		return *err
	}
	return nil
}

func (s *tarSource) Read([]byte) (int, error) { return 0, errors.ErrUnsupported }

func (s *tarSource) WriteTo(w io.Writer) (int64, error) {
	err := s.write(w)
	if err != nil {
		s.fail(err)
	}
	return 0, err
}

func (s *tarSource) write(w io.Writer) error {
	out := bufio.NewWriterSize(w, 256<<10)
	var to io.Writer = out
	var z *zstd.Encoder
	if s.zstd {
		var err error
		if z, err = zstd.NewWriter(out, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(s.workers)); err != nil {
			return err
		}
		defer z.Close()
		to = z
	}
	root, err := os.OpenRoot(s.root)
	if err != nil {
		return err
	}
	defer root.Close()
	// Names are sorted, so that what is in a directory comes together.
	dir, in := "", (*os.Root)(nil)
	defer func() {
		if in != nil {
			in.Close()
		}
	}()
	open := func(name string) (*os.File, error) {
		at := path.Dir(name)
		if at == "." {
			return root.Open(name)
		}
		if in == nil || at != dir {
			next, err := root.OpenRoot(at)
			if err != nil {
				return nil, err
			}
			if in != nil {
				in.Close()
			}
			dir, in = at, next
		}
		return in.Open(path.Base(name))
	}
	var head tarHead
	buf := make([]byte, 256<<10)
	var blank [2 * tarBlock]byte // fills up blocks, and is the end
	changed := func(name string) { s.fail(&changedError{name}) }
	for _, name := range s.names {
		e := s.entries[name]
		hdr, err := head.of(name, e)
		if err != nil {
			return err
		}
		if e.typ != 'f' {
			if _, err := to.Write(hdr); err != nil {
				return err
			}
			continue
		}
		f, err := open(name)
		if errors.Is(err, fs.ErrNotExist) {
			changed(name)
			continue
		}
		if err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "%s cannot be read", filepath.Join(s.root, name))
		}
		fi, err := f.Stat()
		if err == nil && (!fi.Mode().IsRegular() || fi.Size() != e.size || fi.ModTime().Unix() != e.sec || int64(fi.ModTime().Nanosecond()) != e.nsec) {
			f.Close()
			changed(name)
			continue
		}
		if err == nil {
			_, err = to.Write(hdr)
		}
		if err == nil {
			var n int64
			n, err = io.CopyBuffer(onlyWriter{to}, io.LimitReader(onlyReader{f}, e.size), buf)
			if err == nil && n < e.size {
				// The stream must go on; its time being another, the file is sent anew.
				changed(name)
				_, err = io.CopyN(onlyWriter{to}, zeros{}, e.size-n)
			}
			if err == nil {
				_, err = to.Write(blank[:-e.size&(tarBlock-1)])
			}
		}
		f.Close()
		if err != nil {
			return err
		}
	}
	if _, err := to.Write(blank[:]); err != nil {
		return err
	}
	if z != nil {
		if err := z.Close(); err != nil {
			return err
		}
	}
	return out.Flush()
}

// Without these, CopyBuffer would not use the buffer.
type (
	onlyWriter struct{ io.Writer }
	onlyReader struct{ io.Reader }
	zeros      struct{}
)

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func (h *Host) rsync(ctx context.Context, local, remote string, names []string, o SyncOptions) error {
	program, err := exec.LookPath("rsync")
	if err != nil {
		return sandboxer.E(sandboxer.Unsupported, err, "there is no rsync on this machine").WithHint("install it, or leave the method out")
	}
	l, err := h.acquire(ctx, command, time.Now())
	if err != nil {
		return err
	}
	defer h.release(l, false)
	words, ok := sshCommand(l.conn)
	if !ok {
		return sandboxer.E(sandboxer.Unsupported, nil, "rsync needs the transport openssh")
	}
	// It is told what differs, and must not judge anew by times in whole seconds.
	args := []string{"-lptDI", "-s", "--no-recursive", "--dirs", "--from0", "--files-from=-", "-e", words}
	if o.Compress == "always" || o.Compress == "" && h.latency() > farAway {
		args = append(args, "-z")
	}
	if o.Checksum {
		args = append(args, "-c")
	}
	cmd := exec.CommandContext(ctx, program, append(args, "--", local+"/", "host:"+remote+"/")...)
	cmd.Stdin = strings.NewReader(strings.Join(names, "\x00") + "\x00")
	said := &tailBuffer{}
	cmd.Stderr, cmd.WaitDelay = said, time.Second
	err = cmd.Run()
	if e := (*exec.ExitError)(nil); errors.As(err, &e) && ctx.Err() == nil {
		if e.ExitCode() == sandboxer.ExitNotFound || strings.Contains(said.String(), "not found") {
			return sandboxer.E(sandboxer.Unsupported, err, "host %s has no rsync (%s)", h.target.Name, tidy(said.String()))
		}
		if !l.alive() || e.ExitCode() == 255 {
			return h.target.fault(ErrLost, tidy(said.String()))
		}
		return h.stepped(sandboxer.Exit{Code: e.ExitCode()}, tidy(said.String()), nil, "rsync to "+remote)
	}
	return failure(ctx, h.target, err, "rsync")
}

// Pull makes the local directory like the one on the host, as Push does the other way.
// Nothing that the host says leads out of local. Exhausted: it is more than MaxBytes.
func (h *Host) Pull(ctx context.Context, remote, local string, o SyncOptions) (stats SyncStats, err error) {
	if err := errors.Join(o.check(), checkWords("the directory", remote)); err != nil {
		return stats, err
	}
	if o.Method != "" {
		return stats, sandboxer.E(sandboxer.Unsupported, nil, "files are taken from a host by tar streams only")
	}
	ig, err := parseIgnore(o.Ignore)
	if err != nil {
		return stats, err
	}
	if err := os.MkdirAll(local, 0o755); err != nil {
		return stats, sandboxer.E(sandboxer.Invalid, err, "directory %s cannot be made", local)
	}
	if local, err = filepath.EvalSymlinks(local); err != nil {
		return stats, err
	}
	there, err := h.list(ctx, remote, false)
	if err != nil {
		return stats, err
	}
	maps.DeleteFunc(there.entries, func(name string, e entry) bool {
		if e.typ != 0 && e.typ != 'f' && e.typ != 'd' && e.typ != 'l' {
			stats.Skipped = append(stats.Skipped, name)
			return true
		}
		return ig.below(name, e.typ == 'd')
	})
	here, _, err := walk(local, nil)
	if err != nil {
		return stats, sandboxer.E(sandboxer.Invalid, err, "%s cannot be read", local)
	}
	p, err := differ(there.entries, here, o, ig, func(names []string) (map[string]bool, error) {
		sums, err := h.hashes(ctx, remote, names)
		same := map[string]bool{}
		for name, sum := range sums {
			mine, err := hashFile(filepath.Join(local, name))
			same[name] = err == nil && mine == sum
		}
		return same, err
	})
	if err != nil {
		return stats, err
	}
	slices.Sort(stats.Skipped)
	stats.Files, stats.Sent, stats.Bytes, stats.Deleted = len(there.entries), len(p.send), p.bytes, len(p.remove)
	if o.MaxBytes > 0 && p.bytes > o.MaxBytes {
		return stats, sandboxer.E(sandboxer.Exhausted, nil, "%s on host %s is %d bytes more than the %d allowed", remote, h.target.Name, p.bytes-o.MaxBytes, o.MaxBytes)
	}
	root, err := os.OpenRoot(local)
	if err != nil {
		return stats, err
	}
	defer root.Close()
	for _, name := range p.remove {
		if err := root.RemoveAll(name); err != nil {
			return stats, err
		}
	}
	return stats, h.fetch(ctx, remote, root, there, p.send, o.MaxBytes)
}

// fetch takes names from the host. Directories are made from the list; only the rest
// is asked for, since a tar that is told a directory would add all that is in it.
func (h *Host) fetch(ctx context.Context, remote string, root *os.Root, there *manifest, names []string, most int64) error {
	var list bytes.Buffer
	wanted := map[string]bool{}
	var dirs, args []string // args: names for a tar that takes no list
	for _, name := range names {
		if there.entries[name].typ == 'd' {
			dirs = append(dirs, name)
			continue
		}
		wanted[name] = true
		if list.WriteString("./" + name + "\x00"); there.how != "printf" {
			args = append(args, "./"+name)
		}
	}
	for _, d := range dirs {
		if err := root.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	var err error
	if there.how == "printf" && len(wanted) > 0 {
		z := there.zstd && h.latency() > farAway
		script := `cd -- "$1" && exec tar --format=posix --pax-option=delete=atime,delete=ctime --no-recursion --null -cf - -T -`
		if z {
			// Its exit status hides tar's; a stream that tar broke off lacks names.
			script = strings.Replace(script, "exec tar", "tar", 1) + " | zstd -1qc"
		}
		err = h.fetchTar(ctx, remote, root, Cmd{Script: script, Args: []string{remote}, Stdin: &list}, wanted, z, most)
	}
	for len(args) > 0 && err == nil {
		n, size := 0, 0
		for n < len(args) && size < 32<<10 {
			size += len(args[n])
			n++
		}
		err = h.fetchTar(ctx, remote, root, Cmd{Script: `cd -- "$1" && shift && exec tar -cf - -- "$@"`, Args: append([]string{remote}, args[:n]...)}, wanted, false, most)
		args = args[n:]
	}
	if err == nil && len(wanted) > 0 {
		err = sandboxer.E(sandboxer.Conflict, nil, "%s on host %s changed while it was copied", remote, h.target.Name)
	}
	if err != nil {
		return err
	}
	// Modes at the end: one that forbids writing would forbid it to us.
	for _, d := range slices.Backward(dirs) {
		if err := root.Chmod(d, fileMode(there.entries[d].mode)); err != nil {
			return err
		}
	}
	return nil
}

// fetchTar unpacks the tar stream that cmd writes.
func (h *Host) fetchTar(ctx context.Context, remote string, root *os.Root, cmd Cmd, wanted map[string]bool, z bool, most int64) error {
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := unpack(root, r, wanted, z, most)
		r.CloseWithError(errors.Join(err, io.ErrClosedPipe))
		done <- err
	}()
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = w, &limited{&said, 8 << 10}
	exit, err := h.Run(ctx, cmd)
	w.Close()
	uerr := <-done
	if uerr != nil && (err == nil && exit.Code == 0 || isFault(uerr)) {
		return uerr
	}
	return h.stepped(exit, tidy(said.String()), err, "packing "+remote)
}

func fileMode(mode uint32) fs.FileMode {
	m := fs.FileMode(mode & 0o777)
	for bit, is := range map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if mode&bit != 0 {
			m |= is
		}
	}
	return m
}

// unpack writes what is wanted of a tar stream below root, taking each off wanted.
// Whatever else the stream holds is refused: a rule that is stricter than those of package
// safetar, for archives of which nobody knows what is in them.
func unpack(root *os.Root, r io.Reader, wanted map[string]bool, z bool, most int64) error {
	if z {
		d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(256<<20))
		if err != nil {
			return err
		}
		defer d.Close()
		r = d
	}
	refused := func(name string) error {
		return sandboxer.E(sandboxer.Failed, nil, "the host sent %q, which was not asked for", name)
	}
	links := map[string]string{} // a second name of a file comes as a link to the first
	tr := tar.NewReader(r)
	var total int64
	for {
		hdr, err := tr.Next()
		if err == io.EOF {
			// What follows the end is padding; the host waits for it to be read.
			io.Copy(io.Discard, r)
			return nil
		}
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(hdr.Name, "./")
		if !wanted[name] {
			return refused(hdr.Name)
		}
		if total += hdr.Size; most > 0 && total > most {
			return sandboxer.E(sandboxer.Exhausted, nil, "the host sent more than the %d bytes allowed", most)
		}
		if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return err
		}
		tmp := path.Join(path.Dir(name), ".sbx-"+token())
		switch hdr.Typeflag {
		case tar.TypeReg:
			f, err := root.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			if err != nil {
				return err
			}
			_, err = io.Copy(f, tr)
			err = errors.Join(err, f.Chmod(fileMode(uint32(hdr.Mode))), f.Close())
			if err == nil {
				err = root.Chtimes(tmp, hdr.ModTime, hdr.ModTime)
			}
			if err != nil {
				root.Remove(tmp)
				return err
			}
		case tar.TypeSymlink:
			if err := root.Symlink(hdr.Linkname, tmp); err != nil {
				return err
			}
		case tar.TypeLink:
			if links[strings.TrimPrefix(hdr.Linkname, "./")] == "" {
				return refused(hdr.Name)
			}
			if err := root.Link(strings.TrimPrefix(hdr.Linkname, "./"), tmp); err != nil {
				return err
			}
		default:
			return refused(hdr.Name)
		}
		if err := root.Rename(tmp, name); err != nil {
			root.Remove(tmp)
			return err
		}
		links[name] = name
		delete(wanted, name)
	}
}

// WriteFile makes or replaces a file of the host with what r yields. The file has
// its former content until all of it is there.
func (h *Host) WriteFile(ctx context.Context, name string, mode fs.FileMode, r io.Reader) error {
	if err := checkWords("the name", name); err != nil {
		return err
	}
	tmp := path.Join(path.Dir(name), ".sbx-"+token())
	counted := &counter{r: r}
	exit, said, err := h.feedScript(ctx, `umask 077; exec cat >"$1"`, []string{tmp}, counted)
	if failed := counted.failed.Load(); err == nil && failed != nil {
		err = fmt.Errorf("reading what is to be written to %s: %w", name, *failed)
	}
	if err := h.stepped(exit, said, err, "writing "+name); err != nil {
		if ctx.Err() == nil {
			h.Output(ctx, `rm -f -- "$1"`, tmp)
		}
		return err
	}
	// In a second command, since the end of the input may be that of the connection.
	_, err = h.Output(ctx, `[ "$(wc -c <"$1")" -eq "$3" ] && [ ! -d "$2" ] && chmod "$4" "$1" && mv -f -- "$1" "$2" || { rm -f -- "$1"; exit 1; }`,
		tmp, name, strconv.FormatInt(counted.n.Load(), 10), strconv.FormatUint(uint64(unixMode(mode)), 8))
	return err
}

type counter struct {
	r      io.Reader
	n      atomic.Int64
	failed atomic.Pointer[error]
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n.Add(int64(n))
	if err != nil && err != io.EOF {
		c.failed.Store(&err)
	}
	return n, err
}

// ReadFile writes the content of a file of the host to w. NotFound: there is none.
func (h *Host) ReadFile(ctx context.Context, name string, w io.Writer) error {
	var said bytes.Buffer
	exit, err := h.Run(ctx, Cmd{Script: `[ -e "$1" ] || exit 44; exec cat <"$1"`, Args: []string{name}, Stdout: w, Stderr: &limited{&said, 8 << 10}})
	if err == nil && exit.Code == 44 {
		return sandboxer.E(sandboxer.NotFound, nil, "there is no file %s on host %s", name, h.target.Name)
	}
	return h.stepped(exit, tidy(said.String()), err, "reading "+name)
}
