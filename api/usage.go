package api

import (
	"cmp"
	"context"
	"net/url"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// UsageRow says what a sandbox used and cost. It is also the data of the events that sinks get. Numbers that may
// be large are decimal text.
type UsageRow struct {
	Seq        int64               `json:"seq,string" example:"17" doc:"Grows from row to row"`
	ID         string              `json:"id" example:"sbx:k3q8w2zt:g1:usage" doc:"The same row has always the same ID"`
	Type       sandboxer.UsageType `json:"type" enum:"settled,correction" doc:"settled: its bill was settled. correction: its backend said later what it cost, and the row replaces what the row corrects says, except for charged"`
	Corrects   string              `json:"corrects,omitempty" doc:"ID of the row that is corrected"`
	At         time.Time           `json:"at" doc:"When it was written"`
	Tenant     string              `json:"tenant" example:"acme"`
	Sandbox    string              `json:"sandbox" example:"k3q8w2zt" doc:"ID, as the tenant knows it"`
	Generation int                 `json:"generation" example:"1" doc:"Of the sandbox: a later one may have the same ID"`
	Consumer   sandboxer.Consumer  `json:"consumer,omitzero"`
	Labels     map[string]string   `json:"labels,omitempty"`
	Profile    string              `json:"profile" example:"profile.local"`
	Extension  string              `json:"extension" example:"ext.local"`

	From  time.Time `json:"from" doc:"When it was ready"`
	Until time.Time `json:"until" doc:"When it was to end"`
	Ran   int64     `json:"ran_ns,string" example:"1800000000000" doc:"Nanoseconds between them, without pauses"`

	Charged Credits `json:"charged" example:"0.08" doc:"What the tenant paid by this row"`
	Cost    Credits `json:"cost" example:"0.09" doc:"What it cost: by its backend if that knows, else by the time that it ran"`
	Overrun Credits `json:"overrun" example:"0.01" doc:"The part of cost that is charged to no tenant"`
	Final   bool    `json:"final" doc:"No correction follows"`
	Meter   *Usage  `json:"meter,omitempty" doc:"Last reading of the backend's meter"`
	Quote   Quote   `json:"quote" doc:"The price that was quoted; with the rows of the price book as they were"`
}

// NewUsageRow converts a usage row to its public form.
func NewUsageRow(r sandboxer.UsageRow) UsageRow {
	return UsageRow{
		Seq: r.Seq, ID: r.Key, Type: r.Type, Corrects: r.Corrects, At: r.At, Tenant: r.Tenant, Sandbox: cmp.Or(r.ShownID, r.SandboxID), Generation: r.Generation,
		Consumer: r.Consumer, Labels: r.Labels, Profile: r.Profile, Extension: r.Extension,
		From: r.From, Until: r.Until, Ran: int64(r.Ran),
		Charged: Credits(r.Charged), Cost: Credits(r.Cost), Overrun: Credits(r.Overrun), Final: r.Final, Meter: newUsage(r.Meter), Quote: NewQuote(r.Quote),
	}
}

// newUsage converts a reading to its public form; nil for none.
func newUsage(u sandboxer.Usage) *Usage {
	if u.At.IsZero() {
		return nil
	}
	return &Usage{At: u.At, Cost: Credits(u.Cost), CPU: int64(u.CPU), MiBMillis: u.MiBMillis, RxBytes: u.RxBytes, TxBytes: u.TxBytes, Final: u.Final}
}

// UsageQuery selects usage rows; zero fields do not restrict.
type UsageQuery struct {
	Tenant string
	Since  time.Time // only rows that were written then or later
	Until  time.Time // only rows that were written before
	Cursor string
	Limit  int
}

// Sink is a receiver of usage rows.
type Sink struct {
	Name        string       `json:"name" example:"fin-hub"`
	URL         string       `json:"url,omitempty" example:"https://fin-hub.example.org/usage"`
	File        string       `json:"file,omitempty" doc:"Of the server's machine"`
	Keys        []string     `json:"keys,omitempty" doc:"Names of the secrets that sign"`
	Declared    bool         `json:"declared" doc:"sinks.yaml has it; no other sink gets rows"`
	Seq         int64        `json:"seq,string" example:"17" doc:"The last row that was delivered or refused"`
	Behind      int64        `json:"behind" example:"0" doc:"Rows after it"`
	DeadLetters int64        `json:"dead_letters" example:"0" doc:"Rows that it refused"`
	Problem     string       `json:"problem,omitempty" doc:"Why the last delivery failed"`
	Since       time.Time    `json:"since,omitzero" doc:"Since when every delivery has failed"`
	Stopped     bool         `json:"stopped,omitempty" doc:"It answered 410 and gets no rows until a replay"`
	Dead        []DeadLetter `json:"dead,omitempty" doc:"The first of its dead letters; not in lists"`
}

// DeadLetter is a usage row that a sink refused.
type DeadLetter struct {
	Seq    int64     `json:"seq,string" example:"12" doc:"Of the row"`
	At     time.Time `json:"at" doc:"When it was refused last"`
	Reason string    `json:"reason"`
	Again  bool      `json:"again,omitempty" doc:"It is delivered once more"`
}

// Replay asks for rows to be delivered once more.
type Replay struct {
	Since time.Time `json:"since,omitzero" doc:"All rows from then on; without it, the dead letters"`
}

// Drop gives up dead letters.
type Drop struct {
	Rows []int64 `json:"rows,omitempty" maxItems:"1000" doc:"Their numbers; without it, all"`
}

// UsageRows returns one page of the usage rows, oldest first.
func (c *Client) UsageRows(ctx context.Context, q UsageQuery) (*List[UsageRow], error) {
	v := url.Values{}
	set(v, "tenant", q.Tenant)
	for name, at := range map[string]time.Time{"since": q.Since, "until": q.Until} {
		if !at.IsZero() {
			v.Set(name, at.UTC().Format(time.RFC3339Nano))
		}
	}
	page(v, q.Limit, q.Cursor)
	return do[*List[UsageRow]](ctx, c, call{method: "GET", path: "/v1/credits/usage", query: v})
}

// Sinks lists the receivers of usage rows. It needs the admin scope, as all of sinks does.
func (c *Client) Sinks(ctx context.Context) (*List[Sink], error) {
	return do[*List[Sink]](ctx, c, call{method: "GET", path: "/v1/credits/sinks"})
}

// Sink returns one receiver with its dead letters.
func (c *Client) Sink(ctx context.Context, name string) (*Sink, error) {
	return do[*Sink](ctx, c, call{method: "GET", path: "/v1/credits/sinks/" + url.PathEscape(name)})
}

// ReplaySink delivers rows to a receiver once more.
func (c *Client) ReplaySink(ctx context.Context, name string, r Replay) (*Sink, error) {
	return do[*Sink](ctx, c, call{method: "POST", path: "/v1/credits/sinks/" + url.PathEscape(name) + "/replay", body: r})
}

// DropSink gives up dead letters of a receiver.
func (c *Client) DropSink(ctx context.Context, name string, d Drop) (*Sink, error) {
	return do[*Sink](ctx, c, call{method: "POST", path: "/v1/credits/sinks/" + url.PathEscape(name) + "/drop", body: d})
}
