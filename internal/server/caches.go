package server

import (
	"context"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

func (s *Server) cacheRoutes() {
	const admin = sandboxer.ScopeAdmin
	o := op("listCaches", "GET", "/v1/caches", admin, "operation", "List the caches of extensions, such as layers of built images")
	o.Description += " The caches of a host that does not answer are missing; problem says so."
	route(s, o, s.caches)
	o = op("pruneCaches", "POST", "/v1/caches/prune", admin, "operation", "Remove the unused caches of extensions")
	o.Description += " The answer lists the removed caches. Caches that are in use stay."
	route(s, o, s.pruneCaches)
}

type inCaches struct {
	Host string `query:"host" maxLength:"253" doc:"Only of this host"`
}

func (s *Server) caches(ctx context.Context, in *inCaches) (*reply[api.Caches], error) {
	return cachesOf(s.m.Caches(ctx, in.Host))
}

func (s *Server) pruneCaches(ctx context.Context, in *inCaches) (*reply[api.Caches], error) {
	return cachesOf(s.m.PruneCaches(ctx, in.Host))
}

func cachesOf(found []manager.Cache, err error) (*reply[api.Caches], error) {
	if err != nil && len(found) == 0 {
		return nil, err
	}
	out := api.Caches{SchemaVersion: api.SchemaVersion, Items: make([]api.Cache, len(found))}
	for i, c := range found {
		out.Items[i] = api.Cache{Extension: c.Extension, Host: c.Host, Name: c.Name, Tenant: c.Tenant, Bytes: c.Bytes, UsedAt: c.UsedAt, Problem: c.Problem}
	}
	if err != nil {
		out.Problem = sandboxer.Message(err)
	}
	return &reply[api.Caches]{Body: out}, nil
}
