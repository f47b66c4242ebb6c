package sandboxer

import "context"

// Progress is how far a long step of a create has come, for whoever watches. It is
// shown while it happens and never stored.
type Progress struct {
	Step  string `json:"step"`            // for people: "pulling docker.io/library/busybox:1"
	Done  int64  `json:"done"`            // bytes
	Total int64  `json:"total,omitempty"` // bytes; 0 if unknown
}

type progressKey struct{}

// WithProgress returns ctx with a function that hears of progress. It is called from
// any goroutine and must return at once.
func WithProgress(ctx context.Context, hear func(Progress)) context.Context {
	return context.WithValue(ctx, progressKey{}, hear)
}

// ReportProgress tells whoever listens on ctx how far a step has come; without a
// listener it does nothing. An adapter may call it as often as it likes, but only
// before the call that ctx came with returns.
func ReportProgress(ctx context.Context, p Progress) {
	if hear, ok := ctx.Value(progressKey{}).(func(Progress)); ok {
		hear(p)
	}
}
