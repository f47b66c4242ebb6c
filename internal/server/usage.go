package server

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

type inUsage struct {
	InPage
	Tenant string    `query:"tenant" maxLength:"128" doc:"Only of this tenant; other callers than administrators see their own alone"`
	Since  time.Time `query:"since" doc:"Only rows that were written then or later (RFC 3339)"`
	Until  time.Time `query:"until" doc:"Only rows that were written before (RFC 3339)"`
}

func (s *Server) usage(ctx context.Context, in *inUsage) (*reply[api.List[api.UsageRow]], error) {
	rows, next, err := s.m.UsageRows(ctx, sandboxer.UsageQuery{Tenant: in.Tenant, Since: in.Since, Until: in.Until, Limit: in.Limit}, in.Cursor)
	return listed(api.NewUsageRow, rows, next, err)
}

// InSink names a receiver of usage rows.
type InSink struct {
	Name string `path:"name" maxLength:"128" doc:"As sinks.yaml has it"`
}

func newSink(st manager.SinkStatus) api.Sink {
	out := api.Sink{Name: st.ID(), URL: st.URL, File: st.File, Keys: st.Keys, Declared: st.Declared(), Seq: st.Seq, Behind: st.Behind,
		DeadLetters: st.DeadLetters, Problem: st.Problem, Since: st.Since, Stopped: st.Stopped}
	for _, d := range st.Dead {
		out.Dead = append(out.Dead, api.DeadLetter{Seq: d.Seq, At: d.At, Reason: d.Reason, Again: d.Again})
	}
	return out
}

func (s *Server) sinks(ctx context.Context, _ *none) (*reply[api.List[api.Sink]], error) {
	all, err := s.m.Sinks(ctx)
	return listed(newSink, all, "", err)
}

func (s *Server) sink(ctx context.Context, in *InSink) (*reply[api.Sink], error) {
	st, err := s.m.Sink(ctx, in.Name)
	return &reply[api.Sink]{Body: newSink(st)}, err
}

func (s *Server) replaySink(ctx context.Context, in *InSink, b api.Replay) (*reply[api.Sink], error) {
	st, err := s.m.ReplaySink(ctx, in.Name, b.Since)
	return &reply[api.Sink]{Body: newSink(st)}, err
}

func (s *Server) dropSink(ctx context.Context, in *InSink, b api.Drop) (*reply[api.Sink], error) {
	st, err := s.m.DropSink(ctx, in.Name, b.Rows)
	return &reply[api.Sink]{Body: newSink(st)}, err
}
