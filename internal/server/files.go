package server

import (
	"context"
	"encoding/base64"
	"io/fs"
	"path"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edge"
)

type InFile struct {
	InRef
	Path string `query:"path" required:"true" maxLength:"4096" doc:"Absolute path inside the sandbox"`
}

func (s *Server) readFile(ctx context.Context, in *InFile) (*huma.StreamResponse, error) {
	sctx, cancel := edge.Stream(ctx)
	f, err := s.m.ReadFile(sctx, in.ID, in.Path)
	if err != nil {
		defer cancel(nil)
		return nil, edge.StreamError(sctx, err)
	}
	return poured(ctx, sctx, f, "attachment", func() {
		f.Close()
		cancel(nil)
	})
}

type inWrite struct {
	InFile
	Mode string `query:"mode" doc:"Permission bits in octal; by default those of the file that is there, else 0644"`
}

func (s *Server) writeFile(ctx context.Context, in *inWrite) (*none, error) {
	var mode fs.FileMode // that of the file that is there
	if in.Mode != "" {
		var err error
		if mode, err = api.ParseMode(in.Mode); err != nil {
			return nil, err
		}
	}
	_, r := edge.Exchange(ctx)
	sctx, cancel := edge.Stream(ctx)
	defer cancel(nil)
	if err := s.m.WriteFile(sctx, in.ID, in.Path, mode, r.Body); err != nil {
		return nil, edge.StreamError(sctx, err)
	}
	return nil, nil
}

func (s *Server) removeFile(ctx context.Context, in *InFile) (*none, error) {
	return nil, s.m.RemoveFile(ctx, in.ID, in.Path)
}

func (s *Server) statFile(ctx context.Context, in *InFile) (*reply[api.FileInfo], error) {
	fi, err := s.m.StatFile(ctx, in.ID, in.Path)
	return replied(api.NewFileInfo, fi, err)
}

type inFiles struct {
	InFile
	InPage
}

// listFiles pages through a directory; the cursor is the last name seen, in base64url.
func (s *Server) listFiles(ctx context.Context, in *inFiles) (*reply[api.List[api.FileInfo]], error) {
	limit := in.Limit
	if limit == 0 {
		limit = sandboxer.DefaultPage
	}
	after, err := base64.RawURLEncoding.DecodeString(in.Cursor)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "the cursor does not belong to an earlier page").
			WithHint("send next_cursor of the page before as it is, or leave cursor out to begin again")
	}
	var items []api.FileInfo
	last := ""
	for fi, err := range s.m.ListFiles(ctx, in.ID, in.Path, string(after)) {
		if err != nil {
			return nil, err
		}
		if len(items) == limit {
			return listOf(items, base64.RawURLEncoding.EncodeToString([]byte(last))), nil
		}
		items, last = append(items, api.NewFileInfo(fi)), path.Base(fi.Path)
	}
	return listOf(items, ""), nil
}

func (s *Server) makeDir(ctx context.Context, in *InRef, b api.MakeDir) (*none, error) {
	return nil, s.m.MakeDir(ctx, in.ID, b.Name())
}

func (s *Server) moveFile(ctx context.Context, in *InRef, b api.MoveFile) (*none, error) {
	from, to := b.Names()
	return nil, s.m.MoveFile(ctx, in.ID, from, to)
}
