package agent

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	"github.com/sand-boxer/sandboxer"
	pb "github.com/sand-boxer/sandboxer/agent/proto/filesystem"
)

// ReadFile opens a file; see sandboxer.Filer. A transfer that breaks off is an error
// of Read, never an early end of file.
func (c *Client) ReadFile(ctx context.Context, name string) (io.ReadCloser, error) {
	res, err := c.do(ctx, http.MethodGet, "/files", url.Values{"path": {name}}, nil, nil, -1)
	if err != nil {
		return nil, err
	}
	return res.Body, nil
}

// WriteFile creates or replaces a file; see sandboxer.Filer.
func (c *Client) WriteFile(ctx context.Context, name string, mode fs.FileMode, r io.Reader) error {
	h := http.Header{
		"Content-Type": {"application/octet-stream"},
		modeHeader:     {strconv.FormatUint(uint64(unixMode(mode)), 8)},
	}
	body := &upload{r: r}
	res, err := c.do(ctx, http.MethodPost, "/files", url.Values{"path": {name}}, h, body, sizeOf(r))
	if body.err != nil && ctx.Err() == nil {
		return sandboxer.E(sandboxer.KindOf(body.err), body.err, "the new content of %s could not be read", name)
	}
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// An upload remembers why its source failed, to tell that from a failure of the wire.
type upload struct {
	r     io.Reader
	err   error
	still *stillness
}

func (u *upload) Read(p []byte) (int, error) {
	u.still.ours()
	n, err := u.r.Read(p)
	u.still.agents()
	if err != nil && !errors.Is(err, io.EOF) {
		u.err = err
	}
	return n, err
}

// sizeOf is how much r will give, where that is known; else -1.
func sizeOf(r io.Reader) int64 {
	if l, ok := r.(interface{ Len() int }); ok {
		return int64(l.Len())
	}
	return -1
}

func (c *Client) fileInfo(e *pb.EntryInfo) sandboxer.FileInfo {
	fi := sandboxer.FileInfo{
		Path: e.GetPath(), Size: e.GetSize(), Mode: parseMode(e.GetPermissions(), e.GetMode()),
		Owner: e.GetOwner(), Group: e.GetGroup(),
	}
	if t := e.GetModifiedTime(); t != nil {
		fi.ModTime = t.AsTime()
	}
	if fi.Mode&fs.ModeSymlink != 0 {
		fi.Target = e.GetSymlinkTarget()
	}
	return fi
}

// parseMode reads the wire's permissions: letters for type and special bits in the
// manner of fs.FileMode.String, then nine for the rest. A text that is none of this
// leaves the bits.
func parseMode(text string, bits uint32) fs.FileMode {
	const letters = "dalTLDpSugct?"
	if len(text) < 10 {
		return goMode(bits)
	}
	var m fs.FileMode
	for _, c := range text[:len(text)-9] {
		if c == '-' {
			continue
		}
		i := strings.IndexRune(letters, c)
		if i < 0 {
			return goMode(bits)
		}
		m |= 1 << (31 - i)
	}
	for i, c := range text[len(text)-9:] {
		if c != '-' {
			m |= 1 << (8 - i)
		}
	}
	return m
}

// StatFile describes a file; see sandboxer.Filer.
func (c *Client) StatFile(ctx context.Context, name string) (sandboxer.FileInfo, error) {
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	req := connect.NewRequest(&pb.StatRequest{Path: name})
	req.Header().Set(lstatHeader, "true")
	res, err := c.files.Stat(ctx, req)
	if err != nil {
		return sandboxer.FileInfo{}, c.rpcError(ctx, err)
	}
	return c.fileInfo(res.Msg.GetEntry()), nil
}

// ListFiles lists a directory in the order of names; see sandboxer.Filer.
func (c *Client) ListFiles(ctx context.Context, dir string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		ctx, cancel := within(ctx, c.wait.answer)
		defer cancel()
		req := connect.NewRequest(&pb.ListDirRequest{Path: dir, Depth: 1})
		req.Header().Set(lstatHeader, "true")
		res, err := c.files.ListDir(ctx, req)
		if err != nil {
			yield(sandboxer.FileInfo{}, c.rpcError(ctx, err))
			return
		}
		for _, e := range res.Msg.GetEntries() {
			if !yield(c.fileInfo(e), nil) {
				return
			}
		}
	}
}

// MakeDir makes a directory with its parents; see sandboxer.Filer.
func (c *Client) MakeDir(ctx context.Context, dir string) error {
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	_, err := c.files.MakeDir(ctx, connect.NewRequest(&pb.MakeDirRequest{Path: dir}))
	if connect.CodeOf(err) == connect.CodeAlreadyExists {
		return nil
	}
	return c.rpcError(ctx, err)
}

// MoveFile renames a file or directory, making the parents of its new place; see
// sandboxer.Filer.
func (c *Client) MoveFile(ctx context.Context, from, to string) error {
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	_, err := c.files.Move(ctx, connect.NewRequest(&pb.MoveRequest{Source: from, Destination: to}))
	return c.rpcError(ctx, err)
}

// RemoveFile removes a file or a tree; see sandboxer.Filer.
func (c *Client) RemoveFile(ctx context.Context, name string) error {
	ctx, cancel := within(ctx, c.wait.remove)
	defer cancel()
	_, err := c.files.Remove(ctx, connect.NewRequest(&pb.RemoveRequest{Path: name}))
	return c.rpcError(ctx, err)
}

// Unpack unpacks a tar stream below dir, inside the sandbox and by the rules of Untar.
// Of the options Limits and Owner are the agent's own.
func (c *Client) Unpack(ctx context.Context, dir string, r io.Reader, o UntarOptions) error {
	q := url.Values{"path": {dir}, "strip": {strconv.FormatBool(o.Strip)}, "replace": {strconv.FormatBool(o.Replace)}}
	body := &upload{r: r}
	res, err := c.do(ctx, http.MethodPut, tarPath, q, http.Header{"Content-Type": {"application/x-tar"}}, body, -1)
	if body.err != nil && ctx.Err() == nil {
		return sandboxer.E(sandboxer.KindOf(body.err), body.err, "the archive for %s could not be read", dir)
	}
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// Pack opens the tree below dir as a tar stream; the caller closes it.
func (c *Client) Pack(ctx context.Context, dir string) (io.ReadCloser, error) {
	res, err := c.do(ctx, http.MethodGet, tarPath, url.Values{"path": {dir}}, nil, nil, -1)
	if err != nil {
		return nil, err
	}
	return res.Body, nil
}
