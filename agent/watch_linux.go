package agent

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	pb "github.com/sand-boxer/sandboxer/agent/proto/filesystem"
)

// A watch reports what changes in a directory, or in a tree. It is used by one
// goroutine.
type watch struct {
	f         *os.File // an inotify instance
	disk      gate
	root      string
	recursive bool
	dirs      map[int32]string // watched directories, relative to root
	// Names that were found while a new directory was being added: the kernel may also
	// report their creation, within the next bytes of events.
	found map[string]bool
	until int
	draft uint32 // cookie of the last upload that was renamed to its name
	buf   []byte
}

type change struct {
	name string // relative to the watched directory
	kind pb.EventType
}

const watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
	unix.IN_DELETE | unix.IN_DELETE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK

// networkMounts are file systems with changes that the kernel does not see.
var networkMounts = map[int64]string{
	unix.NFS_SUPER_MAGIC: "NFS", unix.SMB_SUPER_MAGIC: "SMB", unix.CIFS_SUPER_MAGIC: "CIFS", unix.SMB2_SUPER_MAGIC: "SMB",
	unix.FUSE_SUPER_MAGIC: "FUSE", unix.CEPH_SUPER_MAGIC: "Ceph", unix.AFS_SUPER_MAGIC: "AFS",
}

func newWatch(dir string, recursive, network bool, disk gate) (*watch, error) {
	fi, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, sandboxer.E(sandboxer.NotFound, err, "path '%s' does not exist", dir)
	case err != nil:
		return nil, err
	case !fi.IsDir():
		return nil, sandboxer.E(sandboxer.Invalid, unix.ENOTDIR, "path '%s' is not a directory", dir)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err == nil && !network {
		if name := networkMounts[int64(uint32(st.Type))]; name != "" {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "path '%s' is on a network mount (%s), where changes by others go unseen", dir, name).
				WithHint("to watch it anyway, allow network mounts in the request")
		}
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Exhausted, err, "no more watches are possible: %v", err)
	}
	w := &watch{f: os.NewFile(uintptr(fd), "inotify"), disk: disk, root: dir, recursive: recursive,
		dirs: map[int32]string{}, found: map[string]bool{}, buf: make([]byte, 16<<10)}
	if err := w.add("", false, nil); err != nil {
		w.f.Close()
		return nil, err
	}
	return w, nil
}

// wake ends a waiting next, with os.ErrDeadlineExceeded. It does not close w.f: that takes the
// kernel some time, so the user of w does it, in close.
func (w *watch) wake() { _ = w.f.SetReadDeadline(time.Unix(1, 0)) }

func (w *watch) close() {
	w.disk.enter()
	defer w.disk.leave()
	w.f.Close()
}

// add watches the directory rel, and everything below it if the watch is recursive. If
// changes is not nil, existing files are reported as created; in a fresh directory also as
// written, because that may have happened before the watch.
func (w *watch) add(rel string, fresh bool, changes *[]change) error {
	var wd int
	var err error
	dir := filepath.Join(w.root, rel)
	rc, err := w.f.SyscallConn()
	if err != nil {
		return err
	}
	if cerr := rc.Control(func(fd uintptr) { wd, err = unix.InotifyAddWatch(int(fd), dir, watchMask) }); cerr != nil {
		return cerr
	}
	switch {
	case errors.Is(err, unix.ENOSPC):
		return sandboxer.E(sandboxer.Exhausted, err, "the system's limit of watched directories is reached").
			WithHint("watch fewer directories, or raise fs.inotify.max_user_watches")
	case err != nil && rel != "" && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, fs.ErrPermission)):
		return nil // gone, replaced or closed meanwhile
	case err != nil:
		return &fs.PathError{Op: "watch", Path: dir, Err: err}
	}
	w.dirs[int32(wd)] = rel
	if !w.recursive {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		name := filepath.Join(rel, e.Name())
		if !e.IsDir() && strings.HasPrefix(e.Name(), draftPrefix) {
			continue
		}
		if changes != nil {
			*changes = append(*changes, change{name, pb.EventType_EVENT_TYPE_CREATE})
			w.found[name] = true
			if fi, err := e.Info(); fresh && err == nil && fi.Mode().IsRegular() && fi.Size() > 0 {
				*changes = append(*changes, change{name, pb.EventType_EVENT_TYPE_WRITE})
			}
		}
		if e.IsDir() {
			if err := w.add(name, fresh, changes); err != nil {
				return err
			}
		}
	}
	return nil
}

// next waits for changes, at most until the deadline of w.f.
func (w *watch) next() ([]change, error) {
	n, err := w.f.Read(w.buf)
	if err != nil {
		return nil, err
	}
	w.disk.enter()
	defer w.disk.leave()
	var out []change
	scanned := false
	moved := map[uint32]string{} // directories that were moved away, by cookie
	for b := w.buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
		wd := int32(binary.NativeEndian.Uint32(b))
		mask := binary.NativeEndian.Uint32(b[4:])
		cookie := binary.NativeEndian.Uint32(b[8:])
		size := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(b[12:]))
		raw, _, _ := bytes.Cut(b[unix.SizeofInotifyEvent:size], []byte{0})
		b = b[size:]
		if mask&unix.IN_Q_OVERFLOW != 0 {
			return nil, sandboxer.E(sandboxer.Exhausted, nil, "changes came faster than they were read: some are lost").
				WithHint("list the directory and watch it again")
		}
		dir, known := w.dirs[wd]
		if mask&unix.IN_IGNORED != 0 {
			delete(w.dirs, wd)
			continue
		}
		if !known {
			continue
		}
		if mask&unix.IN_DELETE_SELF != 0 {
			if dir == "" {
				out = append(out, change{".", pb.EventType_EVENT_TYPE_REMOVE})
			}
			continue
		}
		if len(raw) == 0 { // of the directory itself; its parent's watch reports it
			continue
		}
		name := filepath.Join(dir, string(raw))
		isDir := mask&unix.IN_ISDIR != 0
		if !isDir && strings.HasPrefix(string(raw), draftPrefix) { // of an upload, which is reported once it has its name
			if mask&unix.IN_MOVED_FROM != 0 {
				w.draft = cookie
			}
			continue
		}
		var kind pb.EventType
		switch {
		case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
			kind = pb.EventType_EVENT_TYPE_CREATE
			if w.found[name] {
				delete(w.found, name)
				continue
			}
			delete(moved, cookie)
		case mask&unix.IN_MODIFY != 0:
			kind = pb.EventType_EVENT_TYPE_WRITE
		case mask&unix.IN_ATTRIB != 0:
			kind = pb.EventType_EVENT_TYPE_CHMOD
		case mask&unix.IN_DELETE != 0:
			kind = pb.EventType_EVENT_TYPE_REMOVE
			delete(w.found, name)
		case mask&unix.IN_MOVED_FROM != 0:
			kind = pb.EventType_EVENT_TYPE_RENAME
			delete(w.found, name)
			if isDir && w.recursive {
				moved[cookie] = name
			}
		default:
			continue
		}
		at := len(out)
		out = append(out, change{name, kind})
		if mask&unix.IN_MOVED_TO != 0 && cookie != 0 && cookie == w.draft {
			out = append(out, change{name, pb.EventType_EVENT_TYPE_WRITE})
		}
		if kind == pb.EventType_EVENT_TYPE_CREATE && isDir && w.recursive {
			// A directory moved within the tree keeps its watches, which get new names here.
			scanned = true
			var below []change
			if err := w.add(name, mask&unix.IN_CREATE != 0, &below); err != nil {
				return out[:at], err
			}
			out = append(out, below...)
		}
	}
	for _, name := range moved { // moved out of the tree
		w.forget(name)
	}
	switch {
	case scanned:
		w.until = w.queued()
	case len(w.found) > 0:
		w.until -= n
	}
	if w.until <= 0 {
		clear(w.found)
	}
	return out, nil
}

// queued is how many bytes of events wait for a read.
func (w *watch) queued() int {
	n := 0
	if rc, err := w.f.SyscallConn(); err == nil {
		_ = rc.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	}
	return n
}

// forget stops watching a directory and everything below it.
func (w *watch) forget(name string) {
	rc, err := w.f.SyscallConn()
	if err != nil {
		return
	}
	for wd, dir := range w.dirs {
		if dir == name || strings.HasPrefix(dir, name+"/") {
			delete(w.dirs, wd)
			_ = rc.Control(func(fd uintptr) { _, _ = unix.InotifyRmWatch(int(fd), uint32(wd)) })
		}
	}
}

// event is a change in the form of the wire.
func (w *watch) event(c change, d *describer, name func(string) string) *pb.FilesystemEvent {
	ev := &pb.FilesystemEvent{Name: name(c.name), Type: c.kind}
	if d != nil && c.kind != pb.EventType_EVENT_TYPE_REMOVE && c.kind != pb.EventType_EVENT_TYPE_RENAME {
		w.disk.enter()
		if e, err := d.entry(filepath.Join(w.root, c.name)); err == nil {
			ev.Entry = e
		}
		w.disk.leave()
	}
	return ev
}

func (s filesystemService) WatchDir(ctx context.Context, req *connect.Request[pb.WatchDirRequest], out *connect.ServerStream[pb.WatchDirResponse]) error {
	if err := s.disk.enterUntil(ctx); err != nil {
		return err
	}
	_, dir, err := s.target(req.Header(), req.Msg.GetPath())
	var w *watch
	if err == nil {
		w, err = newWatch(dir, req.Msg.GetRecursive(), req.Msg.GetAllowNetworkMounts(), s.disk)
	}
	s.disk.leave()
	if err != nil {
		return err
	}
	defer w.close()
	if req.Header().Get(escapeHeader) != "" {
		out.ResponseHeader().Set(escapeHeader, escapeAnswer)
	}
	if err := out.Send(&pb.WatchDirResponse{Event: &pb.WatchDirResponse_Start{Start: &pb.WatchDirResponse_StartEvent{}}}); err != nil {
		return err
	}
	interval := keepaliveOf(req.Header())
	name := s.describer(req.Header()).name
	defer context.AfterFunc(ctx, w.wake)()
	for {
		_ = w.f.SetReadDeadline(time.Now().Add(interval))
		if ctx.Err() != nil { // woken before
			return ctx.Err()
		}
		changes, err := w.next()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, os.ErrDeadlineExceeded):
			err = out.Send(&pb.WatchDirResponse{Event: &pb.WatchDirResponse_Keepalive{Keepalive: &pb.WatchDirResponse_KeepAlive{}}})
		}
		if err != nil {
			return err
		}
		var d *describer
		if req.Msg.GetIncludeEntry() {
			d = s.describer(req.Header())
		}
		for _, c := range changes {
			if err := out.Send(&pb.WatchDirResponse{Event: &pb.WatchDirResponse_Filesystem{Filesystem: w.event(c, d, name)}}); err != nil {
				return err
			}
		}
	}
}

// watchers are those with events that a client fetches by polling.
type watchers struct {
	mu   sync.Mutex
	last uint64
	all  map[string]*polled
}

type polled struct {
	w      *watch
	closed chan struct{} // when w is
	mu     sync.Mutex
	events []*pb.FilesystemEvent
	err    error // ended the watch; reported once the events are fetched
}

// Bounds of what polling clients may leave behind.
const (
	maxWatchers     = 256
	maxPolledEvents = 16 << 10
)

func (s filesystemService) CreateWatcher(ctx context.Context, req *connect.Request[pb.CreateWatcherRequest]) (*connect.Response[pb.CreateWatcherResponse], error) {
	_, dir, err := s.target(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	s.watches.mu.Lock()
	defer s.watches.mu.Unlock()
	if len(s.watches.all) >= maxWatchers {
		return nil, sandboxer.E(sandboxer.Exhausted, nil, "%d watchers exist, the maximum", maxWatchers).
			WithHint("remove watchers that are no longer needed")
	}
	w, err := newWatch(dir, req.Msg.GetRecursive(), req.Msg.GetAllowNetworkMounts(), s.disk)
	if err != nil {
		return nil, err
	}
	if s.watches.all == nil {
		s.watches.all = map[string]*polled{}
	}
	s.watches.last++
	id := "w" + strconv.FormatUint(s.watches.last, 10)
	p := &polled{w: w, closed: make(chan struct{})}
	s.watches.all[id] = p
	go p.collect(func() *describer {
		if !req.Msg.GetIncludeEntry() {
			return nil
		}
		return s.describer(req.Header())
	})
	return connect.NewResponse(&pb.CreateWatcherResponse{WatcherId: id}), nil
}

// collect gathers events until the watch is closed or fails.
func (p *polled) collect(describe func() *describer) {
	for {
		changes, err := p.w.next()
		d := describe()
		var events []*pb.FilesystemEvent
		for _, c := range changes {
			events = append(events, p.w.event(c, d, new(describer).name))
		}
		p.mu.Lock()
		if room := maxPolledEvents - len(p.events); len(events) > room {
			events = events[:room]
			err = sandboxer.E(sandboxer.Exhausted, nil, "changes came faster than they were fetched: some are lost")
		}
		p.events = append(p.events, events...)
		if err != nil {
			p.err = err
			p.mu.Unlock()
			p.w.close()
			close(p.closed)
			return
		}
		p.mu.Unlock()
	}
}

func (s filesystemService) GetWatcherEvents(ctx context.Context, req *connect.Request[pb.GetWatcherEventsRequest]) (*connect.Response[pb.GetWatcherEventsResponse], error) {
	id := req.Msg.GetWatcherId()
	s.watches.mu.Lock()
	p := s.watches.all[id]
	s.watches.mu.Unlock()
	if p == nil {
		return nil, sandboxer.E(sandboxer.NotFound, nil, "watcher %q not found", id)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.events) == 0 && p.err != nil {
		return nil, p.err
	}
	res := &pb.GetWatcherEventsResponse{Events: p.events}
	p.events = nil
	return connect.NewResponse(res), nil
}

func (s filesystemService) RemoveWatcher(ctx context.Context, req *connect.Request[pb.RemoveWatcherRequest]) (*connect.Response[pb.RemoveWatcherResponse], error) {
	id := req.Msg.GetWatcherId()
	s.watches.mu.Lock()
	p := s.watches.all[id]
	delete(s.watches.all, id)
	s.watches.mu.Unlock()
	if p == nil {
		return nil, sandboxer.E(sandboxer.NotFound, nil, "watcher %q not found", id)
	}
	p.w.wake()
	select {
	case <-p.closed:
	case <-ctx.Done():
	}
	return connect.NewResponse(&pb.RemoveWatcherResponse{}), nil
}
