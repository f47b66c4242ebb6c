package cli

import (
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// The doctor of a program that may replace the server's says what that one saved and it
// cannot restore, and repeats what the server says itself.
func TestDoctorTellsOfOtherVersions(t *testing.T) {
	told := func(e api.Extension) []check {
		c := &checkup{o: &doctorOptions{f: &factory{program: program{adapters: []sandboxer.Adapter{{Kind: "other", Runtime: "v3"}, {Kind: "local", Runtime: "v2"}}}}}}
		c.upgrade(e)
		return c.checks
	}
	for name, e := range map[string]api.Extension{"the same": {ID: "ext.local", Adapter: "local", Runtime: "v2"}, "unknown": {ID: "ext.local", Adapter: "local"}, "none": {ID: "ext.fake", Adapter: "fake"}} {
		if got := told(e); len(got) > 0 {
			t.Errorf("%s: %+v", name, got)
		}
	}
	got := told(api.Extension{ID: "ext.local", Adapter: "local", Runtime: "v1", Notices: []string{"lost: 2; do this"}})
	if len(got) != 2 || got[0].Status != warn || got[0].Evidence != "lost: 2" || got[0].Fix != "do this" {
		t.Fatalf("%+v", got)
	}
	if got[1].Status != warn || !strings.Contains(got[1].Evidence, "v1") || !strings.Contains(got[1].Evidence, "v2") || !strings.Contains(got[1].Fix, "snapshot create --portable") {
		t.Errorf("%+v", got[1])
	}
}
