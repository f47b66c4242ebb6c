package sandboxer

import "time"

// Debt describes an object that may exist on an extension that could not make a sandbox. The create continued on another
// candidate, and nothing proves yet that the first one made no object. The object is torn down until its absence is proven.
type Debt struct {
	Extension string    `json:"extension"`
	Handle    Handle    `json:"handle"` // with the generation of the object
	Reason    Reason    `json:"reason"` // ReasonReplaced
	Since     time.Time `json:"since"`
	Retries   int       `json:"retries,omitempty"`
	RetryAt   time.Time `json:"retry_at"`             // time of the next teardown
	LastError string    `json:"last_error,omitempty"` // why it could not be torn down
}

// DebtsDue is when the first of the debts of sb is to be torn down; zero if there are none.
func (sb *Sandbox) DebtsDue() (due time.Time) {
	for _, d := range sb.Debts {
		if due.IsZero() || d.RetryAt.Before(due) {
			due = d.RetryAt
		}
	}
	return due
}
