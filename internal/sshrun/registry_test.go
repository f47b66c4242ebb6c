package sshrun_test

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

func TestRegistry(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "hosts")
	r := sshrun.NewRegistry(dir)
	if all, err := r.Hosts(); len(all) != 0 || err != nil {
		t.Errorf("at first: %v, %v", all, err)
	}
	_, key, _ := sshtest.NewKey(t, t.TempDir(), "k")
	rec := sshrun.Record{Name: "build-1", Addr: "ci@build.example", Port: 2222, IdentityFile: "/k", ProxyJump: "jump", HostKeys: []string{key},
		Labels: map[string]string{"zone": "a"}, Capacity: 3, State: sshrun.Active, AddedAt: time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC),
		LastProbe: &sshrun.Facts{At: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Engine: "docker", Tools: map[string]string{"tar": "/bin/tar"}, Latency: 0.25}}
	if err := r.Put(rec); err != nil {
		t.Fatal(err)
	}
	if got, err := r.Host("build-1"); err != nil || !reflect.DeepEqual(got, rec) {
		t.Errorf("%+v, %v", got, err)
	}
	for name, change := range map[string]func(*sshrun.Record){
		"no key": func(r *sshrun.Record) { r.HostKeys = nil }, "name": func(r *sshrun.Record) { r.Name = "../x" },
		"option": func(r *sshrun.Record) { r.Addr = "-oProxyCommand=x" }, "state": func(r *sshrun.Record) { r.State = "" },
		"capacity": func(r *sshrun.Record) { r.Capacity = -1 },
	} {
		bad := rec
		change(&bad)
		if err := r.Put(bad); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	os.WriteFile(filepath.Join(dir, "broken.json"), []byte("{"), 0o600)
	if all, err := r.Hosts(); len(all) != 1 || sandboxer.KindOf(err) == "" {
		t.Errorf("with a damaged one: %v, %v", all, err)
	}
	for range 2 {
		if err := r.Remove("build-1"); err != nil {
			t.Error(err)
		}
	}
	if _, err := r.Host("build-1"); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("%v", err)
	}
}

// A login shell that never comes to the command holds a look for a bounded time, not for one after the other.
func TestProbeEnds(t *testing.T) {
	t.Parallel()
	s := sshtest.Start(t, sshtest.Options{Config: `ForceCommand exec sleep 1000`})
	h := host(t, newPool(t, sshrun.Options{ConnectTimeout: time.Second}), s.Target())
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	_, err := h.Probe(ctx)
	for ctx.Err() == nil && err != nil && strings.Contains(err.Error(), "cannot be reached") { // the login alone took over a second
		_, err = h.Probe(ctx)
	}
	if ctx.Err() != nil || sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(err.Error(), "did not finish within 6s") {
		t.Errorf("%v; the test's own time is over: %v", err, ctx.Err())
	}
}

func TestProbe(t *testing.T) {
	leaveNothing(t)
	tools := t.TempDir()
	s := sshtest.Start(t, sshtest.Options{Config: `ForceCommand PATH=` + tools + `:$PATH; export PATH; eval "$SSH_ORIGINAL_COMMAND"`})
	for name, script := range map[string]string{"docker": "case $1 in version) echo 20.10.24;; compose) exit 1;; esac", "docker-compose": "echo 1.29.2"} {
		os.WriteFile(filepath.Join(tools, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755)
	}
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	f, err := h.Probe(t.Context())
	for tries := 0; tries < 5 && err == nil && math.Abs(f.ClockAhead) > 0.5; tries++ {
		f, err = h.Probe(t.Context()) // the machine may have stood still in the middle of it
	}
	if err != nil {
		t.Fatal(err)
	}
	if f.Engine != "docker" || f.EngineVersion != "20.10.24" || f.Compose != "docker-compose" || f.ComposeVersion != "1.29.2" {
		t.Errorf("engine and compose: %+v", f)
	}
	if f.Tools["tar"] == "" || f.DiskFree <= 0 || f.Processors < 1 || f.System == "" || f.Latency <= 0 || math.Abs(f.ClockAhead) > 0.5 {
		t.Errorf("%+v", f)
	}
}
