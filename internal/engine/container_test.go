package engine

import (
	"encoding/json"
	"fmt"
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

// What hosts print of containers is read whatever their date knows, and what is no answer
// is an error.
func TestParseContainers(t *testing.T) {
	const list = `[{"Id": "2", "Name": "b", "Config": {"Labels": {"dev.sandboxer.service": "web"}, "Env": ["A=x", "PASSWORD=hunter2"]},
"NetworkSettings": {"IPAddress": "9.9.9.9", "Networks": {"n": {"IPAddress": "10.0.0.3"}, "m": {"IPAddress": "10.0.0.2"}, "none": {}}, "Ports": {"80/tcp": [{"HostPort": "8080"}, {}], "81/tcp": null}}}, {"Id": "1", "Name": "a"}]`
	for when, want := range map[string]time.Time{"12.5": time.Unix(12, 5), "1700000000.000000007": time.Unix(1700000000, 7), "12.%N": time.Unix(12, 0), "": time.Unix(0, 0)} {
		at, got, err := ParseContainers(when + "\n" + list)
		if err != nil || !at.Equal(want) || len(got) != 2 || got[0].ID != "1" || got[1].Service() != "web" {
			t.Errorf("%q: %s, %+v, %v", when, at, got, err)
		}
	}
	if at, got, err := ParseContainers("7\n\n"); err != nil || len(got) > 0 || at.Unix() != 7 {
		t.Errorf("of none: %s, %v, %v", at, got, err)
	}
	if _, _, err := ParseContainers("7\nError: what?"); err == nil {
		t.Error("what is not JSON is read")
	}
	_, got, _ := ParseContainers("7\n" + list)
	own, published := got[1].Addrs(80)
	if fmt.Sprint(own, published) != "[10.0.0.2 10.0.0.3] [127.0.0.1:8080]" {
		t.Errorf("Addrs = %q, %q", own, published)
	}
	if said := got[1].Redact("hunter2, x"); said != "…, x" {
		t.Errorf("Redact = %q", said)
	}
	if names := ParseInventory("b\na b\n\n"); fmt.Sprint(names) != "[a b]" {
		t.Errorf("ParseInventory = %q", names)
	}
}
