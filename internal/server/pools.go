package server

import (
	"context"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

func (s *Server) poolRoutes() {
	const read, admin = sandboxer.ScopeRead, sandboxer.ScopeAdmin
	route(s, op("listPools", "GET", "/v1/pools", read, "catalogue", "List the warm pools"), s.pools)
	o := op("drainPool", "POST", "/v1/pools/{profile}/drain", admin, "catalogue", "Replace the sandboxes that wait in a pool")
	route(s, o, s.drainPool)
}

func (s *Server) pools(ctx context.Context, _ *none) (*reply[api.List[api.Pool]], error) {
	pools, err := s.m.Pools(ctx)
	return listed(func(p manager.PoolStatus) api.Pool { return api.Pool(p) }, pools, "", err)
}

type inPool struct {
	Profile string `path:"profile" maxLength:"128" doc:"ID of the profile"`
}

func (s *Server) drainPool(ctx context.Context, in *inPool) (*reply[api.DrainedPool], error) {
	profile, n, err := s.m.DrainPool(ctx, in.Profile)
	if err != nil {
		return nil, err
	}
	return &reply[api.DrainedPool]{Body: api.DrainedPool{Profile: profile, Removed: n}}, nil
}
