package sandboxer

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer/internal/fieldtest"
)

// TestRequestJSON: a request comes back from its JSON as it was, under the names of its tags,
// and every duration and amount in it is text.
func TestRequestJSON(t *testing.T) {
	header := fieldtest.Withheld{"Key": "a header", "NoWaiting": "a header"}
	requestJSON[CreateRequest](t, header)
	requestJSON[RestoreRequest](t, header)
	requestJSON[ForkRequest](t, fieldtest.Withheld{"Key": "a header"})
	requestJSON[SnapshotRequest](t, nil)
	requestJSON[ExtendRequest](t, nil)
	requestJSON[PauseRequest](t, nil)
	requestJSON[ResumeRequest](t, nil)
	requestJSON[KeyRequest](t, nil)
}

func requestJSON[R any](t *testing.T, withheld fieldtest.Withheld) {
	t.Helper()
	r := fieldtest.Fill[R](nil)
	j, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var again R
	if err := json.Unmarshal(j, &again); err != nil {
		t.Fatal(err)
	}
	fieldtest.Same(t, r, again, withheld)
	var written map[string]any
	if err := json.Unmarshal(j, &written); err != nil {
		t.Fatal(err)
	}
	names := 0
	for _, f := range reflect.VisibleFields(reflect.TypeFor[R]()) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" {
			continue
		}
		names++
		v, ok := written[name]
		if !ok {
			t.Errorf("%T: %s is not in %s", r, name, j)
		}
		if _, text := v.(string); (f.Type == reflect.TypeFor[time.Duration]() || f.Type == reflect.TypeFor[Credits]()) && !text {
			t.Errorf("%T writes %s as %v, not as text", r, name, v)
		}
	}
	if len(written) != names {
		t.Errorf("%T writes %d names of %d: %s", r, len(written), names, j)
	}
	// What is left out is not written.
	var none R
	if j, err = json.Marshal(none); err != nil || strings.Contains(string(j), "ttl") || strings.Contains(string(j), "max_cost") || strings.Contains(string(j), "add") {
		t.Errorf("an empty %T is %s, %v", r, j, err)
	}
	if _, has := written["ttl"]; !has {
		return
	}
	if err := json.Unmarshal([]byte(`{"ttl":"30m","tll":"30m"}`), &none); err == nil {
		t.Errorf("%T takes a name that it does not know", r)
	}
	for _, bad := range []string{`{"ttl":"soon"}`, `{"ttl":"30"}`} {
		if err := json.Unmarshal([]byte(bad), &none); !errors.Is(err, Invalid) || HintOf(err) == "" {
			t.Errorf("%T of %s: %v", r, bad, err)
		}
	}
	if err := json.Unmarshal([]byte(`{"ttl":7}`), &none); err == nil {
		t.Errorf("%T takes a number for a duration", r)
	}
}

// TestTTLText: what makes a sandbox can ask for one that lives as long as it is used; nothing else has such a time.
func TestTTLText(t *testing.T) {
	for _, r := range []interface {
		json.Marshaler
		json.Unmarshaler
	}{new(CreateRequest), new(RestoreRequest), new(ForkRequest)} {
		if err := r.UnmarshalJSON([]byte(`{"ttl":"idle"}`)); err != nil {
			t.Errorf("%T: %v", r, err)
		}
		if b, err := r.MarshalJSON(); err != nil || !strings.Contains(string(b), `"ttl":"idle"`) {
			t.Errorf("%T is written as %s, %v", r, b, err)
		}
		for _, bad := range []string{`{"ttl":"-1ns"}`, `{"ttl":"idl"}`, `{"ttl":-1}`} {
			if err := r.UnmarshalJSON([]byte(bad)); err == nil {
				t.Errorf("%T takes %s", r, bad)
			}
		}
	}
	for _, r := range []json.Unmarshaler{new(ExtendRequest), new(ResumeRequest), new(SnapshotRequest), new(KeyRequest)} {
		if err := r.UnmarshalJSON([]byte(`{"ttl":"idle"}`)); !errors.Is(err, Invalid) {
			t.Errorf("%T: %v", r, err)
		}
	}
}

func TestEndsAt(t *testing.T) {
	at := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		state State
		ttl   time.Duration
		used  time.Time
		want  time.Time
	}{
		{Running, TTLIdle, at, at.Add(10 * time.Minute)},
		{Running, TTLIdle, at.Add(55 * time.Minute), at.Add(time.Hour)},
		{Running, time.Hour, at, at.Add(time.Hour)},
		{Paused, TTLIdle, at, at.Add(time.Hour)},
		{Creating, TTLIdle, time.Time{}, at.Add(time.Hour)},
	} {
		sb := Sandbox{State: c.state, UsedAt: c.used, ExpiresAt: at.Add(time.Hour), Spec: Spec{Profile: Profile{TTL: c.ttl, Idle: 10 * time.Minute}}}
		if got := sb.EndsAt(); !got.Equal(c.want) {
			t.Errorf("%s with ttl %s, used at %s: %s, want %s", c.state, TTLText(c.ttl), c.used, got, c.want)
		}
	}
}
