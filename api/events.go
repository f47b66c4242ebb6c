package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// EventQuery selects events; zero fields do not restrict.
type EventQuery struct {
	Sandbox string // ID, unique beginning of one, or name
	After   int64  // sequence number; the events after it
	Newest  bool   // Events: the last Limit events instead of the first
	Limit   int    // for Events only
}

func (q EventQuery) path() string {
	if q.Sandbox == "" {
		return "/v1/events"
	}
	return sandboxPath(q.Sandbox) + "/events"
}

// Events returns one page of events after q.After, oldest first. Its NextCursor is the After of the
// next page. The newest page has none, because no event follows it yet.
func (c *Client) Events(ctx context.Context, q EventQuery) (*List[Event], error) {
	v := url.Values{}
	page(v, q.Limit, "")
	if q.After > 0 {
		v.Set("after", strconv.FormatInt(q.After, 10))
	}
	if q.Newest {
		v.Set("newest", "true")
	}
	return do[*List[Event]](ctx, c, call{method: "GET", path: q.path(), query: v})
}

// Follow yields the events after q.After, then new ones, until ctx ends or the loop is left. After a
// broken connection it continues at the same event. An error is the last value.
func (c *Client) Follow(ctx context.Context, q EventQuery) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		for left := retries; ; left-- {
			err := c.follow(ctx, &q, func(ev Event) bool {
				left = retries // it works
				return yield(ev, nil)
			})
			if err == nil {
				return
			}
			var p *Problem
			if left == 0 || ctx.Err() != nil || errors.As(err, &p) || !errors.Is(err, sandboxer.Unavailable) ||
				!sleep(ctx, 100*time.Millisecond<<(2*(retries-left))) {
				yield(Event{}, err)
				return
			}
		}
	}
}

// follow reads one connection's events, moving q.After. A nil error means that
// yield wants no more.
func (c *Client) follow(ctx context.Context, q *EventQuery, yield func(Event) bool) error {
	h := http.Header{"Accept": {"text/event-stream"}, "Last-Event-ID": {strconv.FormatInt(q.After, 10)}}
	cl := call{method: "GET", path: q.path(), header: h}
	resp, err := c.once(ctx, cl, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	sc := bufio.NewScanner(resp.Body)
	sc.Buffer(make([]byte, 0, 4<<10), 1<<20)
	var name string
	var data []byte
	for sc.Scan() {
		line := sc.Bytes()
		switch key, val, _ := bytes.Cut(line, []byte(":")); {
		case len(line) == 0:
			switch name {
			case "problem":
				var p Problem
				if err := json.Unmarshal(data, &p); err != nil {
					return c.unreachable(ctx, cl, err)
				}
				return p.Err()
			case "":
			default:
				var ev Event
				if err := json.Unmarshal(data, &ev); err != nil {
					return c.unreachable(ctx, cl, err)
				}
				q.After = max(q.After, ev.Seq) // progress has none
				if !yield(ev) {
					return nil
				}
			}
			name, data = "", nil
		case string(key) == "event":
			name = string(bytes.TrimPrefix(val, []byte(" ")))
		case string(key) == "data":
			data = append(data, bytes.TrimPrefix(val, []byte(" "))...)
			if most := c.opts.MaxAnswer; most > 0 && int64(len(data)) > most {
				return c.tooLong(cl)
			}
		}
	}
	err = sc.Err()
	if err == nil {
		err = errors.New("the server closed the stream")
	}
	return c.unreachable(ctx, cl, err)
}
