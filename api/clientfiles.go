package api

import (
	"context"
	"io"
	"io/fs"
	"iter"
	"net/url"
	"strconv"

	"github.com/sand-boxer/sandboxer"
)

// ReadFile opens a file for reading; the caller closes it. A read that ends with io.EOF has read the
// whole file.
func (c *Client) ReadFile(ctx context.Context, ref, name string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, call{method: "GET", path: sandboxPath(ref) + "/files", query: url.Values{"path": {name}}})
	if err != nil {
		return nil, err
	}
	return fileBody{resp.Body, name}, nil
}

// fileBody gives an error in the middle of a file a Kind.
type fileBody struct {
	io.ReadCloser
	name string
}

func (b fileBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		kind := sandboxer.Unavailable
		if k := sandboxer.KindOf(err); k == sandboxer.Canceled || k == sandboxer.Timeout {
			kind = k
		}
		err = sandboxer.E(kind, err, "reading %s broke off", b.name)
	}
	return n, err
}

// WriteFile creates or replaces a file with the content of r and makes its parent directories. With
// mode 0 an existing file keeps its mode, and a new one gets 0644.
func (c *Client) WriteFile(ctx context.Context, ref, name string, mode fs.FileMode, r io.Reader) error {
	q := url.Values{"path": {name}}
	if mode != 0 {
		q.Set("mode", FormatMode(mode))
	}
	return none(ctx, c, call{method: "PUT", path: sandboxPath(ref) + "/files", query: q, raw: r})
}

// RemoveFile removes a file or a tree; absence is success.
func (c *Client) RemoveFile(ctx context.Context, ref, name string) error {
	return none(ctx, c, call{method: "DELETE", path: sandboxPath(ref) + "/files", query: url.Values{"path": {name}}})
}

// StatFile describes a file. It does not follow a symbolic link.
func (c *Client) StatFile(ctx context.Context, ref, name string) (*FileInfo, error) {
	return do[*FileInfo](ctx, c, call{method: "GET", path: sandboxPath(ref) + "/files/stat", query: url.Values{"path": {name}}})
}

// ListFiles lists a directory in the order of names, following pages.
func (c *Client) ListFiles(ctx context.Context, ref, dir string) iter.Seq2[FileInfo, error] {
	q := url.Values{"path": {dir}, "limit": {strconv.Itoa(sandboxer.MaxPage)}}
	return All(func(cursor string) (*List[FileInfo], error) {
		set(q, "cursor", cursor)
		return do[*List[FileInfo]](ctx, c, call{method: "GET", path: sandboxPath(ref) + "/files/list", query: q})
	})
}

// MakeDir makes a directory and its parents; an existing one is success.
func (c *Client) MakeDir(ctx context.Context, ref, dir string) error {
	var body MakeDir
	body.Path, body.PathBase64 = rawPath(dir)
	return none(ctx, c, call{method: "POST", path: sandboxPath(ref) + "/files/mkdir", body: body, again: true})
}

// MoveFile renames a file or directory.
func (c *Client) MoveFile(ctx context.Context, ref, from, to string) error {
	var body MoveFile
	body.From, body.FromBase64 = rawPath(from)
	body.To, body.ToBase64 = rawPath(to)
	return none(ctx, c, call{method: "POST", path: sandboxPath(ref) + "/files/move", body: body})
}
