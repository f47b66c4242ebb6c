package agent

import (
	"context"
	"path"
	"slices"
	"strings"

	"connectrpc.com/connect"

	"github.com/sand-boxer/sandboxer"
	pb "github.com/sand-boxer/sandboxer/agent/proto/filesystem"
)

// A Watch reports changes of a directory. It is for one goroutine.
type Watch struct {
	c      *Client
	ctx    context.Context
	cut    context.CancelFunc
	dir    string
	stream *connect.ServerStreamForClient[pb.WatchDirResponse]
}

// Watch starts to watch a directory, or with recursive the tree below it. Every change after its return
// is reported. Kinds: NotFound, and Invalid for a file and for a network mount.
func (c *Client) Watch(ctx context.Context, dir string, recursive bool) (*Watch, error) {
	streamCtx, cut, began := c.begin(ctx)
	msg := &pb.WatchDirRequest{Path: dir, Recursive: recursive, IncludeEntry: true}
	req := named(msg, lstat, &msg.Path)
	stream, err := c.files.WatchDir(streamCtx, req)
	if err == nil && !stream.Receive() {
		err = stream.Err()
	}
	began()
	if err != nil {
		defer cut()
		return nil, c.streamError(ctx, streamCtx, err)
	}
	return &Watch{c: c, ctx: ctx, cut: cut, dir: dir, stream: stream}, nil
}

// Next waits for the next change. Exhausted means that changes were lost: list the directory and watch
// it again.
func (w *Watch) Next() (sandboxer.FileChange, error) {
	for w.stream.Receive() {
		ev := w.stream.Msg().GetFilesystem()
		if ev == nil {
			continue
		}
		name := ev.GetName()
		if w.stream.ResponseHeader().Get(escapeHeader) != "" {
			name = unescapeName(name)
		}
		ch := sandboxer.FileChange{Path: path.Join(w.dir, name), Op: sandboxer.FileOp(strings.ToLower(strings.TrimPrefix(ev.GetType().String(), "EVENT_TYPE_")))}
		if !slices.Contains(sandboxer.FileOps(), ch.Op) || len(name) > maxName || !below(w.dir, ch.Path) {
			return sandboxer.FileChange{}, unreadable(nil, "an impossible change")
		}
		if e := ev.GetEntry(); e != nil {
			fi, err := described(w.stream.ResponseHeader(), e)
			if err != nil {
				return sandboxer.FileChange{}, err
			}
			if path.Base(fi.Path) != path.Base(ch.Path) {
				return sandboxer.FileChange{}, unreadable(nil, "a change whose name and file differ")
			}
			ch.File = &fi
		}
		return ch, nil
	}
	if err := w.stream.Err(); err != nil {
		return sandboxer.FileChange{}, w.c.rpcError(w.ctx, err)
	}
	return sandboxer.FileChange{}, sandboxer.E(sandboxer.Unavailable, nil, "the agent ended the watch")
}

// Close ends the watch and a waiting Next.
func (w *Watch) Close() error {
	w.cut()
	return nil
}

// below reports whether p is dir or is in it.
func below(dir, p string) bool {
	return p == path.Clean(dir) || dir == "/" || strings.HasPrefix(p, path.Clean(dir)+"/")
}
