package spec

import (
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestExpiryWithinProfile: what a request may choose.
func TestExpiryWithinProfile(t *testing.T) {
	const pause, destroy = sandboxer.ExpiryPause, sandboxer.ExpiryDestroy
	for _, c := range []struct {
		profile       sandboxer.Profile
		idle          time.Duration
		onIdle, onTTL sandboxer.ExpiryAction
		want          string // in the error
	}{
		{sandboxer.Profile{}, time.Hour, pause, pause, ""},
		{sandboxer.Profile{Idle: time.Hour, OnIdle: pause, OnTTL: pause}, time.Minute, destroy, destroy, ""},
		{sandboxer.Profile{Idle: time.Hour}, time.Hour, "", "", ""},
		{sandboxer.Profile{Idle: time.Hour}, time.Hour + 1, "", "", "longer than profile"},
		{sandboxer.Profile{}, time.Millisecond, "", "", "at least 1s"},
		{sandboxer.Profile{}, -time.Hour, "", "", "at least 1s"},
		{sandboxer.Profile{}, 0, pause, "", "no effect without an idle time"},
		{sandboxer.Profile{Idle: time.Hour, OnIdle: destroy}, 0, pause, "", "says destroy"},
		{sandboxer.Profile{OnTTL: destroy}, 0, "", pause, "says destroy"},
		{sandboxer.Profile{}, 0, "", "freeze", `on_ttl cannot be "freeze"`},
	} {
		p, err := withExpiry(c.profile, c.idle, c.onIdle, c.onTTL)
		switch {
		case c.want != "":
			if sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(sandboxer.Message(err), c.want) {
				t.Errorf("%+v: %v; want %q", c, err, c.want)
			}
		case err != nil:
			t.Errorf("%+v: %v", c, err)
		case c.idle != 0 && p.Idle != c.idle, c.onIdle != "" && p.OnIdle != c.onIdle, c.onTTL != "" && p.OnTTL != c.onTTL:
			t.Errorf("%+v becomes %s, %s, %s", c, p.Idle, p.OnIdle, p.OnTTL)
		}
	}
}
