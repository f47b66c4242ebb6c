package api

import (
	"context"
	"net/url"
	"time"
)

// Pool is the warm pool of one profile.
type Pool struct {
	Profile   string    `json:"profile" example:"profile.local"`
	Extension string    `json:"extension" example:"ext.local"`
	Size      int       `json:"size" example:"4" doc:"How many should wait"`
	Ready     int       `json:"ready" example:"4" doc:"How many wait and are as good as new ones"`
	Claimed   *int64    `json:"claimed,omitempty" doc:"Creates that were answered from it since the server started; for administrators only"`
	Cold      *int64    `json:"cold,omitempty" doc:"Creates of the profile since then that were not; for administrators only"`
	Problem   string    `json:"problem,omitempty" doc:"Why it is not full; for administrators only"`
	RetryAt   time.Time `json:"retry_at,omitzero" doc:"When that is tried again; for administrators only"`
}

// DrainedPool is the result of draining a pool.
type DrainedPool struct {
	Profile string `json:"profile" example:"profile.local"`
	Removed int    `json:"removed" example:"4" doc:"Sandboxes that waited and are gone"`
}

// Pools lists the pools of the profiles that keep one.
func (c *Client) Pools(ctx context.Context) (*List[Pool], error) {
	return do[*List[Pool]](ctx, c, call{method: "GET", path: "/v1/pools"})
}

// DrainPool removes every sandbox that waits in the pool of a profile; new ones replace them.
func (c *Client) DrainPool(ctx context.Context, profile string) (*DrainedPool, error) {
	return do[*DrainedPool](ctx, c, call{method: "POST", path: "/v1/pools/" + url.PathEscape(profile) + "/drain"})
}
