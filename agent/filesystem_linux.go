package agent

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"syscall"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sand-boxer/sandboxer"
	pb "github.com/sand-boxer/sandboxer/agent/proto/filesystem"
)

// filesystemService translates filesystem.Filesystem to the file system.
type filesystemService struct{ *server }

// target finds the user and the file that a call means.
func (s filesystemService) target(h http.Header, path string) (user, string, error) {
	u, err := s.rpcUser(h)
	if err != nil {
		return u, "", err
	}
	path, err = s.resolve(path, u)
	return u, path, err
}

func (s filesystemService) Stat(ctx context.Context, req *connect.Request[pb.StatRequest]) (*connect.Response[pb.StatResponse], error) {
	_, path, err := s.target(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	e, err := s.describer(req.Header()).entry(path)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.StatResponse{Entry: e}), nil
}

// A describer makes entries and remembers names of owners while it lives.
type describer struct {
	users  userDB
	lstat  bool
	owners map[uint32]string
	groups map[uint32]string
}

func (s *server) describer(h http.Header) *describer {
	return &describer{users: s.users, lstat: h.Get(lstatHeader) == "true",
		owners: map[uint32]string{}, groups: map[uint32]string{}}
}

// entry describes the file at path. Of a symbolic link the wire wants the type and
// mode of what it points to; with lstat set the link itself is described.
func (d *describer) entry(path string) (*pb.EntryInfo, error) {
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
	res := &pb.ListDirResponse{}
	d := s.describer(req.Header())
	var walk func(dir string, depth uint32) error
	walk = func(dir string, depth uint32) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		names, err := os.ReadDir(dir)
		if err != nil && dir == path {
			return err // deeper down, what cannot be read is shown as empty
		}
		for _, n := range names {
			e, err := d.entry(filepath.Join(dir, n.Name()))
			if err != nil {
				continue // gone meanwhile
			}
			res.Entries = append(res.Entries, e)
			if n.IsDir() && depth > 1 {
				if err := walk(e.Path, depth-1); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if err := walk(path, max(req.Msg.GetDepth(), 1)); err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
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
	return connect.NewResponse(&pb.MakeDirResponse{Entry: e}), nil
}

func (s filesystemService) Move(ctx context.Context, req *connect.Request[pb.MoveRequest]) (*connect.Response[pb.MoveResponse], error) {
	u, from, err := s.target(req.Header(), req.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	to, err := s.resolve(req.Msg.GetDestination(), u)
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
		if errors.Is(err, fs.ErrExist) { // a directory in the way, not empty
			return nil, sandboxer.E(sandboxer.Invalid, err, "cannot move '%s' over '%s': it is a directory that is not empty", from, to)
		}
		return nil, err
	}
	e, err := s.describer(req.Header()).entry(to)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.MoveResponse{Entry: e}), nil
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
