package agent

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sand-boxer/sandboxer"
	pb "github.com/sand-boxer/sandboxer/agent/proto/filesystem"
)

// filesystemService translates filesystem.Filesystem to the file system.
type filesystemService struct{ *server }

// target finds the user and the file of a call.
func (s filesystemService) target(h http.Header, path string) (user, string, error) {
	u, err := s.rpcUser(h)
	if err != nil {
		return u, "", err
	}
	path, err = s.resolve(nameIn(h, path), u)
	return u, path, err
}

// nameIn returns a name of a request, unescaped if need be.
func nameIn(h http.Header, name string) string {
	if h.Get(escapeHeader) == escapeBoth {
		return unescapeName(name)
	}
	return name
}

// answer makes an answer to a request with these headers.
func answer[T any](h http.Header, msg *T) *connect.Response[T] {
	res := connect.NewResponse(msg)
	if h.Get(escapeHeader) != "" {
		res.Header().Set(escapeHeader, escapeAnswer)
	}
	return res
}

func (s filesystemService) Stat(ctx context.Context, req *connect.Request[pb.StatRequest]) (*connect.Response[pb.StatResponse], error) {
	_, path, err := s.target(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if err := kernelPath(path); err != nil {
		return nil, err
	}
	e, err := s.describer(req.Header()).entry(path)
	if err != nil {
		return nil, err
	}
	return answer(req.Header(), &pb.StatResponse{Entry: e}), nil
}

// A describer makes entries and remembers names of owners while it lives.
type describer struct {
	users  userDB
	lstat  bool
	escape bool
	owners map[uint32]string
	groups map[uint32]string
}

func (s *server) describer(h http.Header) *describer {
	return &describer{users: s.users, lstat: h.Get(lstatHeader) == "true", escape: h.Get(escapeHeader) != "",
		owners: map[uint32]string{}, groups: map[uint32]string{}}
}

// name returns the name in the form that the caller understands.
func (d *describer) name(s string) string {
	if d.escape {
		return escapeName(s)
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// entry describes the file at path in the form that the caller understands.
func (d *describer) entry(path string) (*pb.EntryInfo, error) {
	e, err := d.describe(path)
	if err != nil {
		return nil, err
	}
	e.Name, e.Path = d.name(e.Name), d.name(e.Path)
	if t := e.SymlinkTarget; t != nil {
		s := d.name(*t)
		e.SymlinkTarget = &s
	}
	e.Owner, e.Group = strings.ToValidUTF8(e.Owner, "\uFFFD"), strings.ToValidUTF8(e.Group, "\uFFFD")
	for k, v := range e.Metadata {
		delete(e.Metadata, k)
		e.Metadata[strings.ToValidUTF8(k, "\uFFFD")] = strings.ToValidUTF8(v, "\uFFFD")
	}
	return e, nil
}

// describe describes the file at path. Of a symbolic link the wire has the type and mode of
// its target; with lstat set the link itself is described.
func (d *describer) describe(path string) (*pb.EntryInfo, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	e := &pb.EntryInfo{
		Name: filepath.Base(path), Path: path,
		Type: fileType(fi.Mode()), Size: fi.Size(), Mode: unixMode(fi.Mode()),
		Permissions: fi.Mode().String(), ModifiedTime: timestamppb.New(fi.ModTime()),
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		e.Owner = remember(d.owners, st.Uid, d.users.userName)
		e.Group = remember(d.groups, st.Gid, d.users.groupName)
	}
	if fi.Mode()&fs.ModeSymlink == 0 {
		e.Metadata = metadata(path)
		return e, nil
	}
	if d.lstat {
		if t, err := os.Readlink(path); err == nil {
			e.SymlinkTarget = &t
		}
		return e, nil
	}
	e.Type = pb.FileType_FILE_TYPE_UNSPECIFIED
	if t, err := filepath.EvalSymlinks(path); err == nil {
		e.SymlinkTarget = &t
		if fi, err := os.Stat(t); err == nil {
			e.Type, e.Mode = fileType(fi.Mode()), unixMode(fi.Mode())
		}
	} else if t, err := os.Readlink(path); err == nil {
		e.SymlinkTarget = &t
	}
	return e, nil
}

func remember(m map[uint32]string, id uint32, find func(uint32) string) string {
	name, ok := m[id]
	if !ok {
		name = find(id)
		m[id] = name
	}
	return name
}

func fileType(m fs.FileMode) pb.FileType {
	switch {
	case m.IsRegular():
		return pb.FileType_FILE_TYPE_FILE
	case m.IsDir():
		return pb.FileType_FILE_TYPE_DIRECTORY
	case m&fs.ModeSymlink != 0:
		return pb.FileType_FILE_TYPE_SYMLINK
	}
	return pb.FileType_FILE_TYPE_UNSPECIFIED
}

func (s filesystemService) ListDir(ctx context.Context, req *connect.Request[pb.ListDirRequest]) (*connect.Response[pb.ListDirResponse], error) {
	_, path, err := s.target(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	fi, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case !fi.IsDir():
		return nil, sandboxer.E(sandboxer.Invalid, unix.ENOTDIR, "path '%s' is not a directory", path)
	}
	if err := kernelPath(filepath.Join(path, "x")); err != nil {
		return nil, err
	}
	if limit, err := strconv.Atoi(req.Header().Get(limitHeader)); err == nil && limit > 0 && req.Msg.GetDepth() <= 1 {
		return s.listPage(ctx, req.Header(), path, min(limit, maxPage))
	}
	res := &pb.ListDirResponse{}
	d := s.describer(req.Header())
	var walk func(dir string, depth uint32) error
	walk = func(dir string, depth uint32) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		names, err := os.ReadDir(dir)
		if err != nil && dir == path {
			return err // deeper down, a directory that cannot be read is shown as empty
		}
		for _, n := range names {
			e, err := d.entry(filepath.Join(dir, n.Name()))
			if err != nil {
				continue // gone meanwhile
			}
			res.Entries = append(res.Entries, e)
			if n.IsDir() && depth > 1 {
				if err := walk(filepath.Join(dir, n.Name()), depth-1); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if err := walk(path, max(req.Msg.GetDepth(), 1)); err != nil {
		return nil, err
	}
	return answer(req.Header(), res), nil
}

// listPage lists the next entries of a directory of any size with bounded memory.
func (s filesystemService) listPage(ctx context.Context, h http.Header, dir string, limit int) (*connect.Response[pb.ListDirResponse], error) {
	after, err := base64.RawURLEncoding.DecodeString(h.Get(afterHeader))
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "%s is not base64url", afterHeader)
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := kernelFile(f, dir); err != nil {
		return nil, err
	}
	st, err := statOf(f)
	if err != nil {
		return nil, err
	}
	next := page{after: string(after), limit: limit}
	all := s.listed.names(st)
	if all == nil {
		kept, room := []string{}, maxListedBytes
		for {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			names, err := f.Readdirnames(maxPage)
			for _, n := range names {
				next.add(n)
				if room -= len(n) + 16; room >= 0 {
					kept = append(kept, n)
				}
			}
			if err == io.EOF {
				break
			}
			if err != nil {
				return nil, err
			}
		}
		if room >= 0 && len(kept) > limit {
			slices.Sort(kept)
			s.listed.keep(st, kept)
		}
	} else {
		at, _ := slices.BinarySearch(all, string(after)+"\x00")
		for _, n := range all[at:min(at+limit+1, len(all))] {
			next.add(n)
		}
	}
	names, more := next.names()
	msg := &pb.ListDirResponse{}
	d, size, last := s.describer(h), 0, ""
	for _, n := range names {
		if size > maxPageBytes {
			more = true
			break
		}
		last = n
		e, err := d.entry(filepath.Join(dir, n))
		if err != nil {
			continue // gone meanwhile
		}
		size += len(e.Path) + len(e.Name) + len(e.GetSymlinkTarget()) + len(e.Owner) + len(e.Group)
		for k, v := range e.Metadata {
			size += len(k) + len(v)
		}
		msg.Entries = append(msg.Entries, e)
	}
	res := answer(h, msg)
	if more {
		res.Header().Set(moreHeader, base64.RawURLEncoding.EncodeToString([]byte(last)))
	}
	return res, nil
}

// dirNames keeps the sorted names of the directory that was read last, for its next pages: reading a
// hundred thousand of them takes a sandbox's kernel a second each time. A change shows in the
// directory's time.
type dirNames struct {
	mu    sync.Mutex
	of    unix.Stat_t
	all   []string
	timer *time.Timer
}

const (
	maxListedBytes = 8 << 20
	keepListed     = 30 * time.Second
)

func (l *dirNames) names(of unix.Stat_t) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of.Dev != of.Dev || l.of.Ino != of.Ino || l.of.Mtim != of.Mtim || l.of.Ctim != of.Ctim {
		return nil
	}
	return l.all
}

func (l *dirNames) keep(of unix.Stat_t, all []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(time.Unix(of.Mtim.Unix())) < time.Second { // it may change again within one tick of the file system's clock
		return
	}
	if l.timer != nil {
		l.timer.Stop()
	}
	l.of, l.all = of, all
	l.timer = time.AfterFunc(keepListed, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.of == of {
			l.all = nil
		}
	})
}

// A page collects the first names after a given one, out of any number and in any order.
type page struct {
	after string
	limit int
	got   []string
	cut   bool
}

func (p *page) add(name string) {
	if name <= p.after {
		return
	}
	if p.got = append(p.got, name); len(p.got) >= 2*p.limit+2 {
		p.shrink()
	}
}

func (p *page) shrink() {
	slices.Sort(p.got)
	if len(p.got) > p.limit {
		p.got, p.cut = p.got[:p.limit], true
	}
}

// names returns the page in order, and whether there are more.
func (p *page) names() ([]string, bool) {
	p.shrink()
	return p.got, p.cut
}

func (s filesystemService) MakeDir(ctx context.Context, req *connect.Request[pb.MakeDirRequest]) (*connect.Response[pb.MakeDirResponse], error) {
	u, path, err := s.target(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if fi, err := os.Stat(path); err == nil && fi.IsDir() {
		return nil, sandboxer.E(sandboxer.Conflict, fs.ErrExist, "directory '%s' already exists", path)
	}
	if err := makeDirs(path, u); err != nil {
		return nil, err
	}
	e, err := s.describer(req.Header()).entry(path)
	if err != nil {
		return nil, err
	}
	return answer(req.Header(), &pb.MakeDirResponse{Entry: e}), nil
}

func (s filesystemService) Move(ctx context.Context, req *connect.Request[pb.MoveRequest]) (*connect.Response[pb.MoveResponse], error) {
	u, from, err := s.target(req.Header(), req.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	to, err := s.resolve(nameIn(req.Header(), req.Msg.GetDestination()), u)
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(from); err != nil {
		return nil, err
	}
	if err := makeDirs(filepath.Dir(to), u); err != nil {
		return nil, err
	}
	if err := os.Rename(from, to); err != nil {
		if errors.Is(err, fs.ErrExist) { // a non-empty directory in the way
			return nil, sandboxer.E(sandboxer.Invalid, err, "cannot move '%s' over '%s': it is a directory that is not empty", from, to)
		}
		return nil, err
	}
	e, err := s.describer(req.Header()).entry(to)
	if err != nil {
		return nil, err
	}
	return answer(req.Header(), &pb.MoveResponse{Entry: e}), nil
}

func (s filesystemService) Remove(ctx context.Context, req *connect.Request[pb.RemoveRequest]) (*connect.Response[pb.RemoveResponse], error) {
	_, path, err := s.target(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if path == "/" {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the root directory cannot be removed")
	}
	if err := os.RemoveAll(path); err != nil && !errors.Is(err, unix.ENOTDIR) {
		return nil, err
	}
	return connect.NewResponse(&pb.RemoveResponse{}), nil
}
