package sandboxer

import "time"

// UsageType is the type of a usage row.
type UsageType string

// The types of usage rows.
const (
	UsageSettled    UsageType = "settled"    // a sandbox ended, and its bill was settled
	UsageCorrection UsageType = "correction" // its backend said later what it cost
)

// UsageTypes lists every type.
func UsageTypes() []UsageType { return []UsageType{UsageSettled, UsageCorrection} }

// A UsageRow says what one generation of a sandbox used and cost. It is written in the transaction that settles the bill, and
// never changes. The sum of Charged over all rows of a sandbox is the amount that the ledger has posted for it. All other
// fields of a correction replace those of the corrected row.
type UsageRow struct {
	Seq        int64             `json:"-"` // assigned by the store, strictly growing in the order of commits
	Key        string            `json:"key"`
	Type       UsageType         `json:"type"`
	Corrects   string            `json:"corrects,omitempty"` // Key of another row
	At         time.Time         `json:"at"`
	Tenant     string            `json:"tenant"`
	SandboxID  string            `json:"sandbox_id"`
	ShownID    string            `json:"shown_id,omitempty"` // Sandbox.ShownID
	Generation int               `json:"generation"`
	Consumer   Consumer          `json:"consumer,omitzero"`
	Labels     map[string]string `json:"labels,omitempty"`
	Profile    string            `json:"profile"`
	Extension  string            `json:"extension"`
	Host       string            `json:"host,omitempty"`

	// From is when it was ready, Until when it was to end. Ran is the time between them, without pauses.
	From  time.Time     `json:"from"`
	Until time.Time     `json:"until"`
	Ran   time.Duration `json:"ran_ns"`

	Charged Credits    `json:"charged"`           // by this row
	Cost    Credits    `json:"cost"`              // by the meter if it counts, else by the clock and the quote
	Overrun Credits    `json:"overrun,omitempty"` // part of Cost that is charged by no row
	Final   bool       `json:"final,omitempty"`   // no correction follows
	Meter   Usage      `json:"meter,omitzero"`    // last reading of the backend's meter; zero if there was none
	Quote   MeterQuote `json:"quote,omitzero"`
}

// UsageQuery selects usage rows; zero fields do not restrict.
type UsageQuery struct {
	Tenant string
	After  int64     // Seq
	Again  string    // only dead letters of this sink that are to be delivered once more
	Since  time.Time // only rows at or after this time
	Until  time.Time // only rows before this time
	Limit  int       // at most MaxPage; 0 means DefaultPage
}

// A Sink is a receiver of all usage rows, by the installation's file.
type Sink struct {
	Name string
	URL  string   // of an HTTP endpoint that takes batches of events; or
	File string   // an absolute path to which lines of events are added
	Keys []string // the operator's secrets with which requests to URL are signed
}

// Bounds of sinks.
const (
	MaxSinks       = 16
	MaxSinkKeys    = 4
	MaxDeadLetters = 1000 // of one sink, which then gets no more rows
)

// SinkState is the progress of a sink.
type SinkState struct {
	Name        string
	Seq         int64     // the last usage row that was delivered or became a dead letter
	Behind      int64     // rows after Seq
	DeadLetters int64     // includes those that are to be delivered once more
	Problem     string    // why the last delivery failed; empty after one that did not
	Since       time.Time // of the first failure in a row
	Stopped     bool      // nothing is delivered until a replay
}

// A DeadLetter is a usage row that a sink refused.
type DeadLetter struct {
	Sink   string
	Seq    int64 // of the row
	At     time.Time
	Reason string
	Again  bool // it is to be delivered once more
}

// DeadLetterQuery selects the dead letters of a sink, in the order of their rows.
type DeadLetterQuery struct {
	Sink  string
	After int64 // Seq
	Limit int
}

// A SinkChange changes the stored state of a sink.
type SinkChange struct {
	Name     string
	From, To int64        // its Seq: Conflict unless it is From. A sink that is not known is at 0
	Dead     []DeadLetter // inserted or replaced
	Gone     []int64      // dead letters that are removed, by Seq
	Again    bool         // all its dead letters are to be delivered once more
	Problem  string
	At       time.Time // becomes SinkState.Since at the first Problem in a row
	Stopped  bool
	Forget   bool // the sink is removed, with its dead letters, and nothing else happens
}
