package server

import (
	"context"
	"encoding/base64"
	"io"
	"net/http"
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
	// The first piece is read before anything is answered: what fails there still
	// gets its proper answer.
	buf := make([]byte, 128<<10)
	n, err := io.ReadAtLeast(f, buf, 1)
	if err != nil && err != io.EOF {
		defer cancel(nil)
		f.Close()
		return nil, edge.StreamError(sctx, err)
	}
	return streamed(ctx, func(w http.ResponseWriter, r *http.Request) {
		defer cancel(nil)
		defer f.Close()
		// A sandbox's bytes are never shown as a page of this server.
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Disposition", "attachment")
		_, err := w.Write(buf[:n])
		if err == nil {
			_, err = io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{f}, buf)
		}
		if err != nil {
			edge.Problem(ctx, edge.StreamError(sctx, err)) // to the log
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler) // the client must not take the part for the whole
		}
	}), nil
}

type inWrite struct {
	InFile
	Mode string `query:"mode" doc:"Permission bits in octal; default 0644"`
}

func (s *Server) writeFile(ctx context.Context, in *inWrite) (*none, error) {
	mode, err := api.ParseMode("0644")
	if in.Mode != "" {
		mode, err = api.ParseMode(in.Mode)
	}
	if err != nil {
		return nil, err
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
	if err != nil {
		return nil, err
	}
	return &reply[api.FileInfo]{Body: api.NewFileInfo(fi)}, nil
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
		return nil, sandboxer.E(sandboxer.Invalid, err, "the cursor is not one of a page before")
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
