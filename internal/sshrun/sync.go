package sshrun

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
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
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// SyncOptions say how a tree is copied. The zero value copies what differs and
// deletes nothing.
type SyncOptions struct {
	// Delete removes from the destination what the source does not have. Ignored
	// files stay.
	Delete bool
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

// listing makes the directory $1 and prints every name below it with its metadata,
// after the capabilities of the host.
const listing = `
mkdir -p -- "$1" && cd -- "$1" || exit
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

// maxListing bounds a list of files, in bytes: enough for a million files and more.
const maxListing = 128 << 20

func (h *Host) list(ctx context.Context, dir string) (*manifest, error) {
	said := &capture.First{Max: 8 << 10}
	out, exit, err := h.Capture(ctx, Cmd{Script: listing, Args: []string{dir}, Stderr: said}, maxListing)
	if err != nil {
		return nil, err
	}
	if exit.Code != 0 && len(out) == 0 {
		return nil, sandboxer.E(sandboxer.Failed, &exitError{exit, tidy(said.String())}, "cannot use the directory %s on host %s (%s)", dir, h.target.Name, tidy(said.String()))
	}
	// A name that vanished while it was listed changes the exit status, and is no loss.
	return parseListing(out)
}

func parseListing(data []byte) (*manifest, error) {
	head, data, _ := bytes.Cut(data, []byte("\n"))
	how, z, _ := strings.Cut(string(head), " ")
	m := &manifest{entries: map[string]entry{}, how: how, zstd: z == "1"}
	damaged := sandboxer.E(sandboxer.Failed, nil, "cannot read the host's list of files")
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

// compare decides whether the file at the destination is the same. unsure: only the
// content shows that.
func compare(from, to entry) (same, unsure bool) {
	if from.typ != to.typ {
		return false, false
	}
	switch from.typ {
	case 'd':
		return from.mode == to.mode, false
	case 'l':
		return to.target == from.target && (to.target != "" || from.target == "") && !to.whole, false
	}
	if from.mode != to.mode || from.size != to.size {
		return false, false
	}
	if from.sec != to.sec {
		// A checkout gives every file a new time. Small files are sent in the time it
		// takes to ask.
		return false, from.size >= 256<<10
	}
	if from.nsec == to.nsec {
		return true, false
	}
	return false, to.whole || from.size >= 256<<10
}

const hashScript = `cd -- "$1" && f=$(mktemp) || exit
cat >"$f"
[ "$(wc -c <"$f")" -eq "$2" ] && xargs -0 sha256sum -- <"$f"; r=$?
rm -f "$f"; exit $r`

// hashes returns the SHA-256 of files of the host, by name; those that it could not
// hash are missing.
func (h *Host) hashes(ctx context.Context, dir string, names []string) (map[string]string, error) {
	var list bytes.Buffer
	for _, n := range names {
		list.WriteString("./" + n + "\x00")
	}
	// For each name at most one line, of 68 bytes plus the name, where it has none to escape.
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

// differ makes the plan. tell says which names are the same, for those where only the
// content shows that.
func differ(from, to map[string]entry, o SyncOptions, ig ignore, tell func([]string) (map[string]bool, error)) (*plan, error) {
	var p plan
	var unsure []string
	for name, e := range from {
		is, there := to[name]
		same, ask := false, false
		if there && is.typ != 0 {
			same, ask = compare(e, is)
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
// Kinds: Invalid when local is not a directory or its ignore file cannot be read, Failed when
// the host cannot write there, Conflict when local changes faster than it can be read.
func (h *Host) Push(ctx context.Context, local, remote string, o SyncOptions) (SyncStats, error) {
	for try := 0; ; try++ {
		stats, err := h.push(ctx, local, remote, o)
		if c := (*changedError)(nil); errors.As(err, &c) && try < 2 {
			continue
		} else if errors.As(err, &c) {
			err = sandboxer.E(sandboxer.Conflict, err, "%s changed while it was copied", filepath.Join(local, c.name))
		}
		return stats, err
	}
}

func (h *Host) push(ctx context.Context, local, remote string, o SyncOptions) (stats SyncStats, err error) {
	if err := checkWords("the directory", remote); err != nil {
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
	ig, err := parseIgnore(lines)
	if err != nil {
		return stats, err
	}
	var there *manifest
	var lerr error
	var wg sync.WaitGroup
	wg.Go(func() { there, lerr = h.list(ctx, remote) })
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
	return stats, h.sendTar(ctx, local, remote, here, p.send, inline, there.zstd, p.bytes)
}

// removeMany deletes names below dir that are too many for a command. They are
// counted before anything is deleted: if the list were cut, the last name would be
// another one.
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
	said := &capture.First{Max: 8 << 10}
	exit, err := h.Run(ctx, Cmd{Script: script, Args: args, Stdin: in, Stderr: said})
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

// extract unpacks a tar stream in $1 after it has deleted the other arguments except $2,
// which says whether the stream is compressed.
const extract = `cd -- "$1" || exit
z=$2; shift 2
[ $# -eq 0 ] || rm -rf -- "$@" || exit
if [ "$z" = 1 ]; then zstd -dqc | tar -xpof -; else exec tar -xpof -; fi`

const (
	// farAway is the answer time from which on it pays to send less to a host,
	// and over several channels at once: a channel's window
	// is 2 MiB for each round trip.
	farAway = 20 * time.Millisecond
	streams = 4
)

func (h *Host) sendTar(ctx context.Context, local, remote string, here map[string]entry, names, remove []string, canZstd bool, size int64) error {
	far := h.latency() > farAway
	z := canZstd && far && size > 64<<10
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
			// An error at the other end is reported there; a local read error is not.
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

// split divides names, which are sorted, among n streams of about the same size that are
// unpacked at once. Each has the directories of its own files before them, even if
// others have them too: a tar that lacks a directory, and finds that another one made it
// just before it does, gives up.
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

// changedError is a file that changed after it was listed.
type changedError struct{ name string }

func (e *changedError) Error() string { return e.name + " changed while it was read" }

// A tarSource is a reader that is only ever asked to write itself.
type tarSource struct {
	root    string
	entries map[string]entry
	names   []string
	zstd    bool
	workers int
	// The first error. The host may be done with the stream, and the command
	// have ended, before writing the stream has returned.
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
	// Names are sorted, so that the files of a directory come together.
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
				// The stream must go on. Since its time differs, the file is sent again.
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
		err = fmt.Errorf("reading the new content of %s: %w", name, *failed)
	}
	if err := h.stepped(exit, said, err, "writing "+name); err != nil {
		if ctx.Err() == nil {
			h.Output(ctx, `rm -f -- "$1"`, tmp)
		}
		return err
	}
	// In a second command, since the end of the input may be the end of the connection.
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
