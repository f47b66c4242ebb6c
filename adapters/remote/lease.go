package remote

import (
	"encoding/json"
	"strconv"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// A lease is the record of a sandbox of kind url: which URL it has.
type lease struct {
	V          int    `json:"v"` // leaseVersion
	ID         string `json:"id"`
	Generation int    `json:"generation"`
	Owner      string `json:"owner"`
	URL        string `json:"url"` // as parseURL writes it
}

const leaseVersion = 1

// key names the note that has the lease.
func (l lease) key() string { return l.ID + ".g" + strconv.Itoa(l.Generation) }

func (l lease) handle() sandboxer.Handle {
	return sandboxer.Handle{SandboxID: l.ID, Generation: l.Generation, Ref: l.URL}
}

func (l lease) encode() ([]byte, error) { return json.Marshal(l) }

// readLease reads what encode wrote, and refuses anything else.
func readLease(data []byte) (lease, error) {
	var l lease
	if _, err := strictjson.DecodeStored(data, &l); err != nil {
		return lease{}, err
	}
	if l.V != leaseVersion {
		return lease{}, sandboxer.E(sandboxer.Unavailable, nil, "a lease was written by another version of sandboxer (version %d; this program knows %d)", l.V, leaseVersion).
			WithHint("upgrade this program")
	}
	if err := sandboxer.CheckID(l.ID); err != nil {
		return lease{}, err
	}
	u, err := parseURL(l.URL)
	if err != nil {
		return lease{}, err
	}
	if u.String() != l.URL || l.Generation < 1 {
		return lease{}, sandboxer.E(sandboxer.Invalid, nil, "sandboxer did not write its contents")
	}
	return l, nil
}
