package events

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Sweeper is the actor of changes that the sweep makes.
const Sweeper = "sweep"

// Actor is the name, in events, of the caller that makes a change with ctx.
func Actor(ctx context.Context) string {
	if p := sandboxer.PrincipalFrom(ctx); p.Actor != "" {
		return p.Actor
	}
	return Sweeper
}

// Of returns an event about sb.
func Of(ctx context.Context, sb *sandboxer.Sandbox, t sandboxer.EventType, message string) sandboxer.Event {
	return sandboxer.Event{
		At: time.Now(), SandboxID: sb.ID, ShownID: sb.ShownID, Generation: sb.Generation, Tenant: sb.Tenant,
		Type: t, Actor: Actor(ctx), Message: message,
	}
}
