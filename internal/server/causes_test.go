package server

import (
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
)

// noDatabase are the operations that answer, or refuse their example, without the tables that the test takes away.
var noDatabase = map[string]string{
	"importSnapshot": "no portable snapshots are kept", "drainPool": "the profile keeps no pool",
	"reload": "this server cannot read its profiles again", "revokeKey": "the keys are still there", "listKeys": "the keys are still there",
	"health": "it asks nobody", "openapi": "it asks nobody", "getProfile": "profiles are in memory", "listProfiles": "profiles are in memory",
	"listPools": "profiles are in memory", "listExtensions": "extensions are in memory", "listQuarantine": "the quarantine is in memory",
	"plan": "no quota is set that it would have to look at", "probeExtension": "it asks the extension", "listCaches": "it asks the extensions", "pruneCaches": "it asks the extensions",
}

// TestInternalErrorsLeadToTheirCause: whichever route fails, the log has the cause in the line with the ID that the caller got.
func TestInternalErrorsLeadToTheirCause(t *testing.T) {
	r := newRig(t)
	k, c := r.key("default", sandboxer.Scopes()...)
	sb := r.create(c, api.CreateSandbox{})
	r.m.BreakDatabase(t)
	for _, op := range operations(t) {
		t.Run(op.id, func(t *testing.T) {
			one := &rig{TB: t, tcp: r.tcp}
			var told string
			if op.id == "execStream" { // it answers inside
				conn, _, err := websocket.Dial(t.Context(), one.tcp+op.path(sb.ID), &websocket.DialOptions{
					Subprotocols: []string{api.ExecProtocol}, HTTPHeader: http.Header{"Authorization": {"Bearer " + k.Token}},
				})
				if err != nil {
					t.Fatal(err)
				}
				defer conn.CloseNow()
				if err := conn.Write(t.Context(), websocket.MessageText, []byte(`{"args":["true"]}`)); err != nil {
					t.Fatal(err)
				}
				_, b, err := conn.Read(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				told = string(b)
			} else {
				path, body := op.path(sb.ID), strings.ReplaceAll(op.body, "profile.local", "profile.test")
				if op.id == "diffSnapshots" {
					path += "?to=other"
				}
				a := one.send(op.method, path, k.Token, op.contentType(), body, op.upgrade()...)
				if told = a.body; a.status != http.StatusInternalServerError {
					if noDatabase[op.id] == "" {
						t.Errorf("%d %.300s", a.status, a.body)
					}
					return
				}
			}
			if why := noDatabase[op.id]; why != "" {
				t.Errorf("it fails, although %s", why)
			}
			r.log.HasCause(t, told, edgetest.DatabaseCause)
		})
	}
}
