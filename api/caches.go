package api

import (
	"context"
	"net/url"
	"time"
)

// Caches is the list of the caches that extensions keep between sandboxes.
type Caches struct {
	SchemaVersion int     `json:"schema_version" example:"1" doc:"Version of this document"`
	Items         []Cache `json:"items"`
	Problem       string  `json:"problem,omitempty" doc:"Extensions or hosts that could not be asked; their caches are missing"`
}

// Cache is one cached item, such as the image layers of one service.
type Cache struct {
	Extension string    `json:"extension" example:"ext.compose-ssh"`
	Host      string    `json:"host,omitempty" example:"build-1"`
	Name      string    `json:"name" example:"shop/web" doc:"For people"`
	Tenant    string    `json:"tenant,omitempty" doc:"Owner; no other tenant ever uses it"`
	Bytes     int64     `json:"bytes" example:"73400320" doc:"Its size, with the layers below it"`
	UsedAt    time.Time `json:"used_at,omitzero" doc:"When it was used last"`
	Problem   string    `json:"problem,omitempty" doc:"What is wrong with it, such as a failed removal"`
}

// Caches lists the caches on one host or, with "", on all hosts. It needs the admin scope.
func (c *Client) Caches(ctx context.Context, host string) (*Caches, error) {
	return do[*Caches](ctx, c, call{method: "GET", path: "/v1/caches", query: ofHost(host)})
}

// PruneCaches removes the unused caches there and returns those that it removed. It needs the admin
// scope.
func (c *Client) PruneCaches(ctx context.Context, host string) (*Caches, error) {
	return do[*Caches](ctx, c, call{method: "POST", path: "/v1/caches/prune", query: ofHost(host)})
}

func ofHost(host string) url.Values {
	if host == "" {
		return nil
	}
	return url.Values{"host": {host}}
}
