package manager

import (
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Plan is what a create would do.
type Plan struct {
	Spec      sandboxer.Spec       `json:"spec"`
	Extension string               `json:"extension"`
	Quote     sandboxer.MeterQuote `json:"quote"`
	TTL       time.Duration        `json:"ttl_ns"`
}

// PoolStatus describes the pool of one profile.
type PoolStatus struct {
	Profile   string `json:"profile"`
	Extension string `json:"extension"`
	Size      int    `json:"size"`  // how many should wait
	Ready     int    `json:"ready"` // how many wait now
	// For administrators only:
	Claimed *int64    `json:"claimed,omitempty"` // creates that were answered from it since the broker started
	Cold    *int64    `json:"cold,omitempty"`    // creates of the profile that were not
	Problem string    `json:"problem,omitempty"` // why it is not full
	RetryAt time.Time `json:"retry_at,omitzero"` // when that is tried again
}

// The requests; what they mean is said in package sandboxer.
type (
	RestoreRequest   = sandboxer.RestoreRequest
	ForkRequest      = sandboxer.ForkRequest
	SnapshotRequest  = sandboxer.SnapshotRequest
	SnapshotAdoption = sandboxer.AdoptSnapshotRequest
	Extend           = sandboxer.ExtendRequest
	PauseRequest     = sandboxer.PauseRequest
	ResumeRequest    = sandboxer.ResumeRequest
	Adoption         = sandboxer.AdoptRequest
	NewKey           = sandboxer.KeyRequest
)

// Audit is the result of comparing the database with itself and with every
// backend's listing.
type Audit struct {
	Checked    int         `json:"checked"`    // records, objects, tenants and events looked at
	Violations []Violation `json:"violations"` // at most 1,000
	LeftOut    int         `json:"left_out"`   // how many more there are

	named map[generationKey]bool // damaged records
	deep  bool
}

// Violation is one broken invariant.
type Violation struct {
	Invariant string `json:"invariant"`
	SandboxID string `json:"sandbox_id,omitempty"`
	Detail    string `json:"detail"`
}

// SweepReport counts what one sweep saw and did.
type SweepReport struct {
	Seen     int `json:"seen"`     // live records
	Paused   int `json:"paused"`   // put to rest because their time ran out, or half paused and finished
	Expired  int `json:"expired"`  // ended because their time ran out or nobody used them
	Torndown int `json:"torndown"` // teardowns that succeeded
	Adopted  int `json:"adopted"`  // found alive, or half made and resumed, by the first sweep after a start
	Lost     int `json:"lost"`     // records whose object is proven gone, or was killed for its memory
	Orphans  int `json:"orphans"`  // objects without a live record that were removed
	// Quarantined counts objects that the database does not know and that are kept.
	Quarantined int `json:"quarantined"`
	// Unconfirmed counts records that may be older than their sandboxes, since the database
	// went back, and whose backends are being asked.
	Unconfirmed int `json:"unconfirmed"`
	Failed      int `json:"failed"`  // steps that failed and will be repeated
	Damaged     int `json:"damaged"` // live records that cannot be read and were left alone
}
