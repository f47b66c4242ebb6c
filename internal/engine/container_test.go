package engine

import (
	"encoding/json"
	"testing"
	"time"
)

// TestHealth: a container that was paused is as healthy as it was, whatever Docker says of
// it until it looks again.
func TestHealth(t *testing.T) {
	for state, want := range map[string]string{
		`{}`: "",
		`{"Health": {"Status": "starting", "FailingStreak": 2}}`:                                             "starting",
		`{"Health": {"Status": "unhealthy", "FailingStreak": 3, "Log": [{"ExitCode": 1}]}}`:                  "unhealthy",
		`{"Health": {"Status": "unhealthy", "FailingStreak": 0, "Log": [{"ExitCode": 1}, {"ExitCode": 0}]}}`: "healthy",
		`{"Health": {"Status": "unhealthy", "FailingStreak": 0, "Log": [{"ExitCode": 1}]}}`:                  "starting",
		`{"Health": {"Status": "unhealthy"}}`:                                                                "starting",
		`{"Healthcheck": {"Status": "unhealthy"}}`:                                                           "unhealthy",
	} {
		var c Container
		if err := json.Unmarshal([]byte(state), &c.State); err != nil {
			t.Fatal(err)
		}
		if got := c.Health(); got != want {
			t.Errorf("%s: %q; want %q", state, got, want)
		}
	}
}

// TestNextCheck: the engine is asked again when it can know more.
func TestNextCheck(t *testing.T) {
	start := time.Unix(1000, 0)
	for name, check := range map[string]struct {
		container string
		at        time.Duration // since the start
		want      time.Duration
	}{
		"the first":        {`{"Config": {"Healthcheck": {"Interval": 2000000000}}, "State": {"Health": {"Status": "starting"}}}`, 500 * time.Millisecond, 1550 * time.Millisecond},
		"it is at it":      {`{"Config": {"Healthcheck": {"Interval": 2000000000}}, "State": {"Health": {"Status": "starting"}}}`, 2100 * time.Millisecond, 0},
		"after a failure":  {`{"Config": {"Healthcheck": {"Interval": 2000000000}}, "State": {"Health": {"Log": [{"End": "1970-01-01T00:16:42.5Z"}]}}}`, 3 * time.Second, 1550 * time.Millisecond},
		"the default":      {`{"Config": {"Healthcheck": {}}, "State": {}}`, 10 * time.Second, 20*time.Second + 50*time.Millisecond},
		"clocks disagree":  {`{"Config": {"Healthcheck": {"Interval": 1000000000}}, "State": {}}`, -time.Hour, time.Hour + 1050*time.Millisecond},
		"not a check more": {`{"State": {}}`, time.Minute, 0},
	} {
		var c Container
		if err := json.Unmarshal([]byte(check.container), &c); err != nil {
			t.Fatal(err)
		}
		c.State.StartedAt = start
		if got := c.NextCheck(start.Add(check.at)); got != check.want {
			t.Errorf("%s: %s; want %s", name, got, check.want)
		}
	}
}
