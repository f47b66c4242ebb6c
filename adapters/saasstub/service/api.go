// Package service is the stub of a hosted service that adapters/saasstub speaks to: it keeps sandboxes in which no command
// runs, meters them by its own clock, and fails where its settings say so. It behaves as hosted services do: it chooses the
// names of its sandboxes, a create has no idempotency key, and its listing may lag behind.
//
// The service is a process of this program. It serves HTTP on a Unix socket in a directory of its own, and keeps its state in
// a file there, so that it finds its sandboxes again after it was killed.
package service

import "time"

// A Sandbox is one sandbox. Its times are those of the service's clock.
type Sandbox struct {
	Ref     string            `json:"ref"`            // the service chooses it
	Tags    map[string]string `json:"tags,omitempty"` // of its maker; the listing finds sandboxes by them
	Note    string            `json:"note,omitempty"` // all that it contains
	Created time.Time         `json:"created"`
	Expires time.Time         `json:"expires"` // the service ends it then
	Ended   time.Time         `json:"ended,omitzero"`
}

// Create is the body of POST /v1/sandboxes.
type Create struct {
	Tags     map[string]string `json:"tags,omitempty"`
	TTLMS    int64             `json:"ttl_ms"` // lifetime in milliseconds, at least 1
	Note     string            `json:"note,omitempty"`
	Snapshot string            `json:"snapshot,omitempty"` // name of the snapshot whose note it gets, if it has none
}

// Renew is the body of PUT /v1/sandboxes/{ref}: the lifetime from now on, and tags to set.
type Renew struct {
	TTLMS int64             `json:"ttl_ms"`
	Tags  map[string]string `json:"tags,omitempty"`
}

// A Snapshot is saved metadata of a sandbox. Its maker chooses the name.
type Snapshot struct {
	Name    string            `json:"name"`
	Tags    map[string]string `json:"tags,omitempty"`
	Note    string            `json:"note,omitempty"`
	Created time.Time         `json:"created"`
}

// Save is the body of PUT /v1/snapshots/{name}.
type Save struct {
	Ref  string            `json:"ref"`
	Tags map[string]string `json:"tags,omitempty"`
}

// Usage is the answer of GET /v1/sandboxes/{ref}/usage, which knows ended sandboxes, too.
type Usage struct {
	LivedMS int64 `json:"lived_ms"` // by the service's clock
	Final   bool  `json:"final"`    // it has ended
}

// A Page is a part of a listing. Next, if not empty, is the parameter after of the next one.
type Page[T any] struct {
	Items []T    `json:"items"`
	Next  string `json:"next,omitempty"`
}

// Capacity is the answer of GET /v1/capacity.
type Capacity struct {
	Free int `json:"free"`
}

// Health is the answer of GET /v1/health.
type Health struct {
	PID int `json:"pid"`
}

// Problem is the body of an answer that is an error. An error that is answered changed nothing.
type Problem struct {
	Message string `json:"message"`
}

// Settings are what the owner of the service sets. They hold from the next request on.
type Settings struct {
	Seed     int64  `json:"seed,omitempty"`
	Capacity int    `json:"capacity,omitempty"`
	Faults   Faults `json:"faults,omitzero"`
}

// Faults are what the service does wrong on purpose. The shares are in percent of the requests, chosen by the seed.
type Faults struct {
	Throttled   int           `yaml:"throttled" json:"throttled,omitempty" min:"0" max:"100" help:"Percent of the requests that are answered with 429 and Retry-After."`
	Unavailable int           `yaml:"unavailable" json:"unavailable,omitempty" min:"0" max:"100" help:"Percent of the requests that are answered with 503 and Retry-After."`
	Conflict    int           `yaml:"conflict" json:"conflict,omitempty" min:"0" max:"100" help:"Percent of the changes that are answered with 409."`
	Lost        int           `yaml:"lost" json:"lost,omitempty" min:"0" max:"100" help:"Percent of the creates that succeed and whose answer is lost."`
	Silent      int           `yaml:"silent" json:"silent,omitempty" min:"0" max:"100" help:"Percent of the requests that never get an answer, and change nothing."`
	Lag         time.Duration `yaml:"lag" json:"lag,omitempty" min:"0s" max:"1m" help:"How far the listing lags behind."`
	Skew        time.Duration `yaml:"skew" json:"skew,omitempty" help:"How far the clock of the service is ahead."`
	Expire      time.Duration `yaml:"expire" json:"expire,omitempty" min:"0s" help:"After how long the service ends a sandbox, whatever lifetime it has; 0s is never."`
}

// RetryAfter is what the service says in answers with 429 and 503, in seconds.
const RetryAfter = 1

// Bounds of the service.
const (
	MaxCapacity  = 1000 // sandboxes, and snapshots
	MaxNoteBytes = 256
	MaxBodyBytes = 16 << 10 // of a request
	MaxPage      = 100
	MaxTTL       = 10 * 365 * 24 * time.Hour

	maxTags     = 16
	maxTagBytes = 256 // of a name and of a value
	maxEnded    = 200 // ended sandboxes whose usage is still known
)
