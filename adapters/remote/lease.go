package remote

import (
	"encoding/json"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// A lease is what is written down of a sandbox of kind url: which URL it has.
type lease struct {
	V          int    `json:"v"` // leaseVersion
	ID         string `json:"id"`
	Generation int    `json:"generation"`
	Owner      string `json:"owner"`
	URL        string `json:"url"` // as parseURL writes it
	Stamp      []byte `json:"stamp,omitempty"`
}

const leaseVersion = 1

func (l lease) handle() sandboxer.Handle {
	return sandboxer.Handle{SandboxID: l.ID, Generation: l.Generation, Ref: l.URL}
}

func (l lease) encode() ([]byte, error) { return json.Marshal(l) }

// readLease reads what encode wrote, and refuses what it cannot have written.
func readLease(data []byte) (lease, error) {
	var l lease
	if _, err := strictjson.DecodeStored(data, &l); err != nil {
		return lease{}, err
	}
	if l.V != leaseVersion {
		return lease{}, sandboxer.E(sandboxer.Unavailable, nil, "it is of version %d, and this sandboxer reads %d", l.V, leaseVersion)
	}
	if err := sandboxer.CheckID(l.ID); err != nil {
		return lease{}, err
	}
	u, err := parseURL(l.URL)
	if err != nil {
		return lease{}, err
	}
	if u.String() != l.URL || l.Generation < 1 {
		return lease{}, sandboxer.E(sandboxer.Invalid, nil, "it names something that was not written so")
	}
	return l, nil
}
