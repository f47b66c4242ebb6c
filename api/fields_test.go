package api

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
)

// shown has a sandbox first shown by its ID and then by another.
var shown = fieldtest.Values{"ShownID": {"", "shown"}}

// TestAnswers: the public form of whatever the broker has says all of it, or here stands what
// it keeps to itself.
func TestAnswers(t *testing.T) {
	t.Run("profile", func(t *testing.T) {
		fieldtest.Conversion[sandboxer.Profile, Profile]{
			Convert:  NewProfile,
			Withheld: fieldtest.Withheld{"Env[value]": "values may be secret; names are shown"},
		}.Check(t)
	})
	t.Run("sandbox", func(t *testing.T) {
		withheld := fieldtest.Withheld{
			"Spec.ID":                   "the sandbox's own",
			"Spec.Generation":           "of its latest object, which is the broker's business; ref names that",
			"Spec.Owner":                "the installation's name, which the status has",
			"Spec.Host":                 "where it was asked to be; host is where it is",
			"Spec.Consumer":             "the sandbox's own",
			"Spec.Tenant":               "the sandbox's own",
			"Spec.Env":                  "values may be secret, and names tell what there is to steal",
			"Spec.Fuse":                 "the expiry and a margin of the broker's",
			"Spec.Warm":                 "a state of its own",
			"Spec.Vouched":              "decides what is admitted when it is made again, and changes nothing about it",
			"Spec.Place":                "host is where it is",
			"Untouched":                 "whether its host was reached yet, which decides what a teardown owes",
			"SealedEnv":                 "encrypted, for the broker alone",
			"Secrets[value].Tenant":     "the sandbox's own",
			"Handle.SandboxID":          "the sandbox's own",
			"Handle.Generation":         "see Spec.Generation",
			"Handle.Host":               "the sandbox's own",
			"Handle.Data":               "private to the adapter",
			"Debts[].Handle.SandboxID":  "the sandbox's own",
			"Debts[].Handle.Host":       "see Handle.Data: where it may be is for the teardown",
			"Debts[].Handle.Ref":        "see Handle.Data: where it may be is for the teardown",
			"Debts[].Handle.Data":       "private to the adapter",
			"Opened":                    "the ports have an answer of their own; a Rev is part of a secret",
			"Pause.As":                  "the record of the snapshot says its kind",
			"Pause.Undo":                "the state is pausing, and the last error says why",
			"Pool":                      "a digest by which the broker tells stale ones",
			"PooledAt":                  "the times of a claimed one count from its claim",
			"AbsentSince":               "a suspicion, which the next passes of the sweep settle",
			"Spec.Credential":           "the name of a key, which the extension's file chooses",
			"Handle.Credential":         "see Spec.Credential",
			"Debts[].Handle.Credential": "see Spec.Credential",
		}
		for _, path := range fieldtest.Paths[sandboxer.Profile]() {
			if !slices.Contains([]string{"Idle", "OnIdle", "OnTTL"}, path) { // which the request chooses, too
				withheld["Spec.Profile."+path] = "a copy from when it was made; the profile is named, and has an answer of its own"
			}
		}
		fieldtest.Conversion[sandboxer.Sandbox, Sandbox]{
			Convert:  func(sb sandboxer.Sandbox) Sandbox { return NewSandbox(&sb) },
			Values:   shown,
			Withheld: withheld,
			Unset:    fieldtest.Withheld{"ObjectID": "only where it is not the ID (below)"},
		}.Check(t)
		sb := sandboxer.Sandbox{ID: "t-x", ShownID: "mine", Tenant: "acme"}
		if a := NewSandbox(&sb); a.ID != "mine" || a.ObjectID != "t-x" || a.Addr() != "acme/mine" {
			t.Errorf("%+v", a)
		}
	})
	t.Run("snapshot", func(t *testing.T) {
		fieldtest.Conversion[sandboxer.SnapshotRecord, Snapshot]{
			Convert: func(r sandboxer.SnapshotRecord) Snapshot { return NewSnapshot(&r) },
			Values:  fieldtest.Values{"Kind": {sandboxer.SnapshotNative, sandboxer.SnapshotBoth}, "ShownID": {"", "shown"}},
			Withheld: fieldtest.Withheld{
				"Spec":              "what its sandbox was, which is named; a restore shows what becomes of it",
				"SealedEnv":         "encrypted, for the broker alone",
				"Secrets":           "those of its sandbox; one that is restored shows them",
				"Version":           "grows with every write; nobody waits for one",
				"Native.SnapshotID": "the snapshot's own",
				"Native.Meta":       "private to the adapter",
				"Native.ExpiresAt":  "the time of the record where that is its only form",
				"Native.Credential": "the name of a key, which the extension's file chooses",
				"Portable.Bytes":    "what was not there yet tells of other tenants' files; administrators get it (Stored)",
				"Portable.Quiesced": "said of the native form where there is one (below)",
			},
			Unset: fieldtest.Withheld{"Stored": "for administrators; the server adds it"},
		}.Check(t)
		portable := sandboxer.SnapshotRecord{Kind: sandboxer.SnapshotPortable, Portable: sandboxer.PortablePayload{Quiesced: true}}
		if !NewSnapshot(&portable).Quiesced {
			t.Error("whether a portable one is quiesced is dropped")
		}
	})
	t.Run("quote", func(t *testing.T) {
		fieldtest.Conversion[sandboxer.MeterQuote, Quote]{Convert: NewQuote}.Check(t)
	})
	t.Run("entry", func(t *testing.T) {
		fieldtest.Conversion[sandboxer.Entry, Entry]{Convert: NewEntry, Values: shown}.Check(t)
	})
	t.Run("event", func(t *testing.T) {
		fieldtest.Conversion[sandboxer.Event, Event]{Convert: NewEvent, Values: shown}.Check(t)
	})
	t.Run("stats", func(t *testing.T) { fieldtest.Conversion[sandboxer.Stats, Stats]{Convert: NewStats}.Check(t) })
}

// sent is what a server gets of a request.
type sent struct {
	Method, Path, Query string
	Key, Prefer         string // headers
	Body                any
}

// TestRequests: all that a request asks for reaches the server.
func TestRequests(t *testing.T) {
	var got sent
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = sent{Method: r.Method, Path: r.URL.Path, Query: r.URL.RawQuery, Key: r.Header.Get("Idempotency-Key"), Prefer: r.Header.Get("Prefer")}
		if b, err := io.ReadAll(r.Body); err == nil && len(b) > 0 {
			if err := json.Unmarshal(b, &got.Body); err != nil {
				t.Error(err)
			}
		}
		w.Header().Set("Content-Type", "application/json")
		w.Write([]byte(`{}`))
	}))
	defer s.Close()
	c, err := New(s.URL, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := t.Context()
	answered := func(err error) sent {
		if err != nil {
			t.Error(err)
		}
		return got
	}
	request(t, func(r CreateSandbox) sent { _, err := c.Create(ctx, r); return answered(err) }, nil)
	request(t, func(r CreateSandbox) sent { _, err := c.Plan(ctx, r); return answered(err) },
		fieldtest.Withheld{"Key": "nothing is made", "NoWaiting": "nothing is made"})
	request(t, func(r RestoreSnapshot) sent { _, err := c.Restore(ctx, "x", r); return answered(err) }, nil)
	request(t, func(r ForkSandbox) sent { _, err := c.Fork(ctx, "x", r); return answered(err) }, nil)
	request(t, func(r CreateSnapshot) sent { _, err := c.Snapshot(ctx, "x", r); return answered(err) }, nil)
	request(t, func(r ExtendSandbox) sent { _, err := c.Extend(ctx, "x", r); return answered(err) }, nil)
	request(t, func(r PauseSandbox) sent { _, err := c.Pause(ctx, "x", r); return answered(err) }, nil)
	request(t, func(r ResumeSandbox) sent { _, err := c.Resume(ctx, "x", r); return answered(err) }, nil)
	request(t, func(r sandboxer.NetworkPolicy) sent { _, err := c.SetNetwork(ctx, "x", r); return answered(err) }, nil)
	request(t, func(r Exec) sent { _, err := c.Run(ctx, "x", r); return answered(err) }, nil)
	request(t, func(r NewKey) sent { _, err := c.CreateKey(ctx, r); return answered(err) }, nil)
	request(t, func(r Grant) sent { _, err := c.Grant(ctx, r); return answered(err) }, nil)
	request(t, func(q SandboxQuery) sent { _, err := c.List(ctx, q); return answered(err) }, nil)
	request(t, func(q SnapshotQuery) sent { _, err := c.Snapshots(ctx, q); return answered(err) }, nil)
	request(t, func(q QuotaQuery) sent { _, err := c.Quotas(ctx, q); return answered(err) }, nil)
}

// request holds a method of the client to sending every field of what it takes.
func request[R any](t *testing.T, send func(R) sent, withheld fieldtest.Withheld) {
	t.Helper()
	fieldtest.Conversion[R, []string]{
		Convert: func(r R) []string {
			s := send(r)
			b, err := json.Marshal(s)
			if err != nil {
				t.Error(err)
			}
			return slices.Sorted(strings.SplitSeq(string(b), ",")) // maps have no order
		},
		Withheld: withheld,
	}.Check(t)
}
