package server

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edge"
)

type InEvents struct {
	After  int64     `query:"after" minimum:"0" doc:"Only events after this seq"`
	Since  time.Time `query:"since" doc:"Only events that happened then or later (RFC 3339)"`
	Newest bool      `query:"newest" doc:"If there are more events than the limit: the last ones instead of the first; a page is still oldest first"`
	Limit  int       `query:"limit" minimum:"1" maximum:"1000" doc:"Items of a page; default 100"`
	LastID int64     `header:"Last-Event-ID" minimum:"0" doc:"For streams: resume after this seq; 0 for the first"`
	Accept string    `header:"Accept" hidden:"true"`
}

type inSandboxEvents struct {
	InRef
	InEvents
}

// describeEvents describes the two forms of an events route.
func (s *Server) describeEvents(o huma.Operation) huma.Operation {
	reg := s.api.OpenAPI().Components.Schemas
	list := reg.Schema(typeOf[api.List[api.Event]](), true, "")
	o.Description += " With `Accept: text/event-stream` the events are sent as they happen, from now on or after `Last-Event-ID`, `after` or `since`: `id` is the seq to resume after " +
		"(Last-Event-ID), `event` the type, `data` an Event; `progress` has no `id` and is not kept; a last event `problem` says why a stream ends. Otherwise one page."
	o.Responses["200"] = &huma.Response{Description: "Events, oldest first", Content: map[string]*huma.MediaType{
		"application/json":  {Schema: list, Example: exampleOf(typeOf[api.List[api.Event]]())},
		"text/event-stream": {Schema: &huma.Schema{Type: "string"}},
	}}
	types := s.types[o.OperationID]
	types.out = typeOf[api.List[api.Event]]()
	s.types[o.OperationID] = types
	return o
}

func (s *Server) sandboxEvents(ctx context.Context, in *inSandboxEvents) (*huma.StreamResponse, error) {
	// A stream could report what is wrong with the sandbox only once it has begun.
	if _, err := s.m.Get(ctx, in.ID); err != nil {
		return nil, err
	}
	return s.history(ctx, in.ID, in.InEvents)
}

func (s *Server) events(ctx context.Context, in *InEvents) (*huma.StreamResponse, error) {
	return s.history(ctx, "", *in)
}

func (s *Server) history(ctx context.Context, id string, in InEvents) (*huma.StreamResponse, error) {
	q := sandboxer.EventQuery{SandboxID: id, After: max(in.After, in.LastID), Since: in.Since, Newest: in.Newest, Limit: in.Limit}
	if in.Newest && strings.Contains(in.Accept, "text/event-stream") {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "newest applies to a page of events, and this is a stream").WithHint("leave newest out, and set with after or since where the stream begins")
	}
	if strings.Contains(in.Accept, "text/event-stream") {
		if _, r := edge.Exchange(ctx); r.Header.Get("Last-Event-ID") == "" && !r.URL.Query().Has("after") && in.Since.IsZero() {
			head, err := s.m.Head(ctx)
			if err != nil {
				return nil, err
			}
			q.After = head
		}
		sctx, cancel := edge.Stream(ctx)
		events, err := s.m.Subscribe(sctx, q)
		if err != nil {
			defer cancel(nil)
			return nil, edge.StreamError(sctx, err)
		}
		return streamed(ctx, func(w http.ResponseWriter, r *http.Request) {
			defer cancel(nil)
			s.follow(sctx, cancel, w, r, q.After, events)
		}), nil
	}
	if q.Limit == 0 {
		q.Limit = sandboxer.DefaultPage
	}
	evs, err := s.m.Events(ctx, q)
	if err != nil {
		return nil, err
	}
	items := make([]api.Event, len(evs))
	for i, ev := range evs {
		items[i] = api.NewEvent(ev)
	}
	next := ""
	if len(evs) == q.Limit && !q.Newest {
		next = strconv.FormatInt(evs[len(evs)-1].Seq, 10)
	}
	return streamed(ctx, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(listOf(items, next).Body)
	}), nil
}

// follow sends events as they happen until the client leaves, its key is revoked or
// the server ends.
func (s *Server) follow(ctx context.Context, cancel context.CancelCauseFunc, w http.ResponseWriter, r *http.Request, after int64, events iter.Seq2[sandboxer.Event, error]) {
	type item struct {
		ev  sandboxer.Event
		err error
	}
	items := make(chan item)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ev, err := range events {
			if ctx.Err() != nil {
				return
			}
			select {
			case items <- item{ev, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	defer func() {
		cancel(nil)
		<-ended
	}()

	w.Header().Set("Content-Type", "text/event-stream")
	rc := http.NewResponseController(w)
	defer rc.SetWriteDeadline(time.Time{})
	var out bytes.Buffer
	send := func() bool {
		rc.SetWriteDeadline(time.Now().Add(30 * time.Second)) // a client that stopped reading has left
		_, err := w.Write(out.Bytes())
		out.Reset()
		return err == nil && rc.Flush() == nil
	}
	problem := func(err error) {
		b, _ := json.Marshal(edge.Problem(r.Context(), err))
		fmt.Fprintf(&out, "event: problem\ndata: %s\n\n", b)
		send()
	}
	out.WriteString("retry: 1000\n")
	if after > 0 { // also a client that has seen nothing yet can resume
		fmt.Fprintf(&out, "id: %d\n", after)
	}
	out.WriteString("\n")
	if !send() {
		return
	}
	tick := time.NewTicker(s.eventsKeepaliveEvery)
	defer tick.Stop()
	for {
		select {
		case it := <-items:
			if it.err != nil {
				problem(edge.StreamError(ctx, it.err))
				return
			}
			b, err := json.Marshal(api.NewEvent(it.ev))
			if err != nil {
				problem(err)
				return
			}
			if it.ev.Seq > 0 { // to resume after; progress is not kept
				fmt.Fprintf(&out, "id: %d\n", it.ev.Seq)
			}
			fmt.Fprintf(&out, "event: %s\ndata: %s\n\n", it.ev.Type, b)
		case <-tick.C:
			out.WriteString(": still here\n\n")
		case <-ended: // only after an error, which is taken first, or with ctx
			if r.Context().Err() == nil {
				problem(edge.StreamError(ctx, context.Cause(ctx)))
			}
			return
		}
		if !send() {
			return
		}
	}
}
