package sandboxer

import "context"

// Progress is how far a long step of a create has come. It is shown while the step runs and never
// stored.
type Progress struct {
	Step  string `json:"step"`            // for display: "pulling docker.io/library/busybox:1"
	Done  int64  `json:"done"`            // bytes
	Total int64  `json:"total,omitempty"` // bytes; 0 if unknown
}

type progressKey struct{}

// WithProgress returns ctx with a function that receives progress. The function is called from any
// goroutine and must return quickly.
func WithProgress(ctx context.Context, hear func(Progress)) context.Context {
	return context.WithValue(ctx, progressKey{}, hear)
}

// ReportProgress passes p to the function in ctx; without one it does nothing. An adapter may call it
// as often as it likes, but only before the call with that ctx returns.
func ReportProgress(ctx context.Context, p Progress) {
	if hear, ok := ctx.Value(progressKey{}).(func(Progress)); ok {
		hear(p)
	}
}
