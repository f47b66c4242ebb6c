package api

import (
	"context"
	"net/url"
	"time"
)

// Caches are what extensions keep between sandboxes.
type Caches struct {
	SchemaVersion int     `json:"schema_version" example:"1" doc:"Version of this document"`
	Items         []Cache `json:"items"`
	Problem       string  `json:"problem,omitempty" doc:"What could not be asked, so that what it keeps is missing"`
}

// Cache is what is kept of one thing: layers of the images of one service, say.
type Cache struct {
	Extension string    `json:"extension" example:"ext.compose-ssh"`
	Host      string    `json:"host,omitempty" example:"build-1"`
	Name      string    `json:"name" example:"shop/web" doc:"For people"`
	Tenant    string    `json:"tenant,omitempty" doc:"Whose it is; another tenant never gets any of it"`
	Bytes     int64     `json:"bytes" example:"73400320" doc:"Of it, with what it is based on"`
	UsedAt    time.Time `json:"used_at,omitzero" doc:"When it was used last"`
	Problem   string    `json:"problem,omitempty" doc:"What is wrong with it, such as that it should be gone"`
}

// Caches lists what is kept between sandboxes, on one host or, with "", everywhere.
func (c *Client) Caches(ctx context.Context, host string) (*Caches, error) {
	return do[*Caches](ctx, c, call{method: "GET", path: "/v1/caches", query: ofHost(host)})
}

// PruneCaches removes it, and returns what was removed.
func (c *Client) PruneCaches(ctx context.Context, host string) (*Caches, error) {
	return do[*Caches](ctx, c, call{method: "POST", path: "/v1/caches/prune", query: ofHost(host)})
}

func ofHost(host string) url.Values {
	if host == "" {
		return nil
	}
	return url.Values{"host": {host}}
}
