package agent

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"io/fs"
	"iter"
	"maps"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
	"unicode/utf8"

	"connectrpc.com/connect"

	"github.com/sand-boxer/sandboxer"
	pb "github.com/sand-boxer/sandboxer/agent/proto/filesystem"
	"github.com/sand-boxer/sandboxer/internal/upload"
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
	}
	if mode != 0 {
		h.Set(modeHeader, strconv.FormatUint(uint64(unixMode(mode)), 8))
	}
	body := &content{r: r}
	res, err := c.do(ctx, http.MethodPost, "/files", url.Values{"path": {name}}, h, body, sizeOf(r))
	if failed := body.err(); failed != nil && ctx.Err() == nil {
		return sandboxer.E(sandboxer.KindOf(failed), failed, "the new content of %s could not be read", name)
	}
	if err != nil {
		return err
	}
	_, _ = readAnswer(res.Body) // otherwise the connection is closed with it
	return res.Body.Close()
}

// A content is the data that a caller sends to the agent.
type content struct {
	r     io.Reader
	still *stillness
	given int // by the last Read, for the agent to read
	sent  *upload.Body
}

func (c *content) Read(p []byte) (int, error) {
	c.still.ours(c.given)
	n, err := c.r.Read(p)
	c.given = n
	c.still.agents()
	return n, err
}

// err is why the caller's reader failed, to distinguish that from a failure of the connection.
func (c *content) err() error {
	if c.sent == nil { // the agent asked for none of it
		return nil
	}
	return c.sent.Err()
}

// sizeOf is how many bytes r will give if that is known; else -1.
func sizeOf(r io.Reader) int64 {
	if l, ok := r.(interface{ Len() int }); ok {
		return int64(l.Len())
	}
	return -1
}

// named makes a request about files. header says whether its names are escaped.
func named[T any](msg *T, header http.Header, paths ...*string) *connect.Request[T] {
	how := escapeAnswer
	for _, p := range paths {
		if !utf8.ValidString(*p) {
			how = escapeBoth
		}
	}
	if how == escapeBoth {
		for _, p := range paths {
			*p = escapeName(*p)
		}
	}
	req := connect.NewRequest(msg)
	req.Header().Set(escapeHeader, how)
	maps.Copy(req.Header(), header)
	return req
}

// described reads an entry of an answer with these headers. An entry that no file can have is
// Failed.
func described(h http.Header, e *pb.EntryInfo) (sandboxer.FileInfo, error) {
	name := func(s string) string { return s }
	if h.Get(escapeHeader) != "" {
		name = unescapeName
	}
	fi := fileInfo(e, name)
	switch base := path.Base(fi.Path); {
	case !path.IsAbs(fi.Path), path.Clean(fi.Path) != fi.Path, strings.ContainsRune(fi.Path, 0), base != name(e.GetName()):
		return fi, unreadable(nil, "a file without a proper name")
	case fi.Size < 0, len(fi.Path) > maxName, len(fi.Target) > maxName, len(fi.Owner) > maxOwner, len(fi.Group) > maxOwner:
		return fi, unreadable(nil, "an impossible file")
	}
	return fi, nil
}

const (
	maxName  = 1 << 15 // bytes of a path; Linux opens up to 4 KiB, deeper files have longer ones
	maxOwner = 256
)

func fileInfo(e *pb.EntryInfo, name func(string) string) sandboxer.FileInfo {
	fi := sandboxer.FileInfo{
		Path: name(e.GetPath()), Size: e.GetSize(), Mode: parseMode(e.GetPermissions(), e.GetMode()),
		Owner: e.GetOwner(), Group: e.GetGroup(),
	}
	if t := e.GetModifiedTime(); t != nil {
		fi.ModTime = t.AsTime()
	}
	if fi.Mode&fs.ModeSymlink != 0 {
		fi.Target = name(e.GetSymlinkTarget())
	}
	return fi
}

// parseMode reads the wire's permissions: letters for type and special bits as
// fs.FileMode.String writes them, then nine for the rest. For any other text it returns
// the bits.
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
	msg := &pb.StatRequest{Path: name}
	res, err := c.files.Stat(ctx, named(msg, lstat, &msg.Path))
	if err != nil {
		return sandboxer.FileInfo{}, c.rpcError(ctx, err)
	}
	return described(res.Header(), res.Msg.GetEntry())
}

var lstat = http.Header{lstatHeader: {"true"}}

// ListFiles lists a directory in the order of names, page by page; see sandboxer.Filer.
func (c *Client) ListFiles(ctx context.Context, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		for seen := 0; ; {
			page, next, err := c.listPage(ctx, dir, after)
			for _, fi := range page {
				if base := path.Base(fi.Path); base <= after {
					err = unreadable(nil, "a directory whose entries are not in order")
					break
				} else {
					after = base
				}
				if seen++; seen > maxListed {
					err = tooLarge("a million files in a directory")
					break
				}
				if !yield(fi, nil) {
					return
				}
			}
			if err == nil && next != "" && next < after {
				err = unreadable(nil, "a directory whose entries are not in order")
			}
			if err != nil {
				yield(sandboxer.FileInfo{}, err)
				return
			}
			if next == "" {
				return
			}
			after = next
		}
	}
}

// listPage returns the next files and, if there are more, the name to continue after.
func (c *Client) listPage(ctx context.Context, dir, after string) (page []sandboxer.FileInfo, next string, err error) {
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	msg := &pb.ListDirRequest{Path: dir, Depth: 1}
	res, err := c.files.ListDir(ctx, named(msg, http.Header{lstatHeader: {"true"}, limitHeader: {strconv.Itoa(maxPage)},
		afterHeader: {base64.RawURLEncoding.EncodeToString([]byte(after))}}, &msg.Path))
	if err != nil {
		return nil, "", c.rpcError(ctx, err)
	}
	more, err := base64.RawURLEncoding.DecodeString(res.Header().Get(moreHeader))
	if err != nil || len(more) > 0 && string(more) <= after {
		return nil, "", unreadable(err, "a directory that does not end")
	}
	for _, e := range res.Msg.GetEntries() {
		fi, err := described(res.Header(), e)
		if err == nil && path.IsAbs(dir) && path.Dir(fi.Path) != path.Clean(dir) {
			err = unreadable(nil, "a file of another directory")
		}
		if err != nil {
			return nil, "", err
		}
		if path.Base(fi.Path) > after { // an agent of an earlier build knows no pages
			page = append(page, fi)
		}
	}
	return page, string(more), nil
}

// MakeDir makes a directory with its parents; see sandboxer.Filer.
func (c *Client) MakeDir(ctx context.Context, dir string) error {
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	msg := &pb.MakeDirRequest{Path: dir}
	_, err := c.files.MakeDir(ctx, named(msg, nil, &msg.Path))
	if connect.CodeOf(err) == connect.CodeAlreadyExists {
		return nil
	}
	return c.rpcError(ctx, err)
}

// MoveFile renames a file or directory and makes the parents of its new path; see sandboxer.Filer.
func (c *Client) MoveFile(ctx context.Context, from, to string) error {
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	msg := &pb.MoveRequest{Source: from, Destination: to}
	_, err := c.files.Move(ctx, named(msg, nil, &msg.Source, &msg.Destination))
	return c.rpcError(ctx, err)
}

// RemoveFile removes a file or a tree; see sandboxer.Filer.
func (c *Client) RemoveFile(ctx context.Context, name string) error {
	ctx, cancel := within(ctx, c.wait.remove)
	defer cancel()
	msg := &pb.RemoveRequest{Path: name}
	_, err := c.files.Remove(ctx, named(msg, nil, &msg.Path))
	return c.rpcError(ctx, err)
}

// Archive writes the content of dir to w as a tar stream; see sandboxer.Archiver. An empty dir means
// the agent's default directory.
func (c *Client) Archive(ctx context.Context, dir string, w io.Writer) error {
	res, err := c.do(ctx, http.MethodGet, archivePath, url.Values{"path": {dir}}, http.Header{"Te": {"trailers"}}, nil, -1)
	if err != nil {
		return noArchives(err)
	}
	defer res.Body.Close()
	out := &keptError{w: w}
	_, err = io.CopyBuffer(struct{ io.Writer }{out}, struct{ io.Reader }{res.Body}, make([]byte, 128<<10))
	switch kind := res.Trailer.Get(kindHeader); {
	case out.err != nil:
		return sandboxer.E(ownKind(out.err, sandboxer.Unavailable), out.err, "the archive of %s could not be written", archived(dir))
	case err != nil:
		return err
	case kind != "":
		said, err := url.PathUnescape(res.Trailer.Get(errorTrailer))
		if err != nil {
			said = res.Trailer.Get(errorTrailer)
		}
		return c.failure(sandboxer.Failed, res.Trailer, said)
	}
	return nil
}

// Unarchive replaces the content of dir with that of the tar stream r; see sandboxer.Archiver. New
// files belong to the client's user. An empty dir means the agent's default directory.
//
// Unarchive follows the rules of Untar and refuses an archive that breaks them as Invalid.
func (c *Client) Unarchive(ctx context.Context, dir string, r io.Reader) error {
	if err := c.empty(ctx, dir); err != nil {
		return noArchives(err)
	}
	body := &content{r: r}
	res, err := c.do(ctx, http.MethodPut, archivePath, url.Values{"path": {dir}}, http.Header{"Content-Type": {"application/x-tar"}}, body, -1)
	if failed := body.err(); failed != nil && ctx.Err() == nil {
		return sandboxer.E(ownKind(failed, sandboxer.Invalid), failed, "the archive for %s could not be read", archived(dir))
	}
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// empty makes dir, or removes what is in it.
func (c *Client) empty(ctx context.Context, dir string) error {
	ctx, cancel := within(ctx, c.wait.remove)
	defer cancel()
	patient := *c // no data moves meanwhile
	patient.wait.progress = c.wait.remove
	res, err := patient.do(ctx, http.MethodDelete, archivePath, url.Values{"path": {dir}}, nil, nil, -1)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// noArchives distinguishes an agent that knows no archives from one that has no such directory.
func noArchives(err error) error {
	if !errors.Is(err, errNoRoute) {
		return err
	}
	return sandboxer.E(sandboxer.Unsupported, err, "the version of the sandbox's agent is too old for archives").WithHint("destroy the sandbox and create it again")
}

func archived(dir string) string {
	if dir == "" {
		return "the workspace"
	}
	return dir
}

// ownKind is the Kind of err or of its context's end, or else the other one.
func ownKind(err error, other sandboxer.Kind) sandboxer.Kind {
	if k := sandboxer.KindOf(err); k != sandboxer.Internal {
		return k
	}
	return other
}

// A keptError is a writer that remembers its failure.
type keptError struct {
	w   io.Writer
	err error
}

func (k *keptError) Write(p []byte) (int, error) {
	n, err := k.w.Write(p)
	if err != nil {
		k.err = err
	}
	return n, err
}
