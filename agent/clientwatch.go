package agent

import (
	"context"
	"strings"

	"connectrpc.com/connect"

	"github.com/sand-boxer/sandboxer"
	pb "github.com/sand-boxer/sandboxer/agent/proto/filesystem"
)

// A Change is one event of a Watch.
type Change struct {
	Name string              // relative to the watched directory
	Op   string              // "create", "write", "remove", "rename" (the old name of something moved) or "chmod"
	File *sandboxer.FileInfo // of create, write and chmod, if the file was still there
}

// A Watch reports changes of a directory. It is for one goroutine.
type Watch struct {
	c      *Client
	ctx    context.Context
	cut    context.CancelFunc
	stream *connect.ServerStreamForClient[pb.WatchDirResponse]
}

// Watch begins to watch a directory, or with recursive the tree below it: every change
// from its return on is reported. Kinds: NotFound, and Invalid for a file and for a
// network mount.
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
	return &Watch{c: c, ctx: ctx, cut: cut, stream: stream}, nil
}

// Next waits for the next change. Exhausted says that changes were lost: list the
// directory and watch it anew.
func (w *Watch) Next() (Change, error) {
	for w.stream.Receive() {
		ev := w.stream.Msg().GetFilesystem()
		if ev == nil {
			continue
		}
		name := ev.GetName()
		if w.stream.ResponseHeader().Get(escapeHeader) != "" {
			name = unescapeName(name)
		}
		ch := Change{Name: name, Op: strings.ToLower(strings.TrimPrefix(ev.GetType().String(), "EVENT_TYPE_"))}
		if e := ev.GetEntry(); e != nil {
			fi, err := described(w.stream.ResponseHeader(), e)
			if err != nil {
				return Change{}, err
			}
			ch.File = &fi
		}
		return ch, nil
	}
	if err := w.stream.Err(); err != nil {
		return Change{}, w.c.rpcError(w.ctx, err)
	}
	return Change{}, sandboxer.E(sandboxer.Unavailable, nil, "the agent ended the watch")
}

// Close ends the watch, and a Next that waits.
func (w *Watch) Close() error {
	w.cut()
	return nil
}
