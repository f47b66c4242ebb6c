package server

import (
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
)

// TestOutOfMemory: that the memory limit killed a command and its sandbox arrives as
// data by every way, and is counted.
func TestOutOfMemory(t *testing.T) {
	r := newRig(t)
	k, c := r.key("acme", sandboxer.ScopeWrite, sandboxer.ScopeRead)
	r.world.Inject(fake.Fault{Verb: fake.VerbExec, OOM: true})
	ended := func(sb *api.Sandbox) {
		t.Helper()
		for deadline := time.Now().Add(edgetest.Patience); ; time.Sleep(10 * time.Millisecond) {
			got, err := c.Get(t.Context(), sb.ID)
			if err == nil && got.State == sandboxer.Terminated && got.Reason == sandboxer.ReasonOOMKilled {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%+v, %v; want it terminated, oom_killed", got, err)
			}
		}
	}
	one := r.create(c, api.CreateSandbox{Profile: "test"})
	x, err := c.Exec(t.Context(), one.ID, sandboxer.Cmd{Args: []string{"sleep", "60"}})
	if err != nil || x != (sandboxer.Exit{Code: 137, Signal: "KILL", OOMKilled: true}) {
		t.Errorf("by the stream: %+v, %v", x, err)
	}
	ended(one)
	two := r.create(c, api.CreateSandbox{Profile: "test"})
	a := r.send("POST", "/v1/sandboxes/"+two.ID+"/exec", k.Token, "application/json", `{"args":["sleep","60"]}`)
	if a.status != 200 || !strings.Contains(a.body, `"code":137,"signal":"KILL","oom_killed":true`) {
		t.Errorf("in one piece: %d %s", a.status, a.body)
	}
	ended(two)

	admin, _ := r.key("root", sandboxer.ScopeAdmin)
	a = r.send("GET", "/metrics", admin.Token, "", "")
	for _, want := range []string{
		`sandboxer_oom_kills_total{extension="ext.fake",what="command"} 2`,
		`sandboxer_oom_kills_total{extension="ext.fake",what="sandbox"} 2`,
	} {
		if !strings.Contains(a.body, want) {
			t.Errorf("/metrics has no %s", want)
		}
	}
}
