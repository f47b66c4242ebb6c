package catalog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const fakeHead = "id: ext.fake\nhandler: fake\ncapabilities: {isolation_levels: [container], pricing_model: self-hosted}\n"

const goodConfig = `host: build-2
token: ${env:CATALOG_TOKEN}
retries: 0x5
port: 22
small: -3
unsigned: 7
timeout: 1m30s
cache: 512MiB
cpus: 0.5
ratio: 2
strict: true
colour: green
hosts: [a, b]
levels: [vm]
env: {B: mine}
nested: {depth: 4}
groups: {small: {size: 1}}
pointer: {x: 1, y: 2}
when: "2026-11-21T00:00:00Z"
free: {text: a, list: [1, true, 1.5, null], map: {k: v}}
`

func indentedBlock(text string) string {
	return "config:\n  " + strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "\n", "\n  ") + "\n"
}

// withOpen is adapters() whose fake opens as told.
func withOpen(open func(ctx context.Context, env sandboxer.Env) (sandboxer.Extension, error)) []sandboxer.Adapter {
	as := adapters()
	as[0].Open = open
	return as
}

func openFake(t *testing.T, config string, open func(ctx context.Context, env sandboxer.Env) (sandboxer.Extension, error)) ([]Opened, error) {
	t.Helper()
	c, err := load(t, map[string]string{"extensions/ext.fake.yaml": fakeHead + config}, withOpen(open)...)
	if err != nil {
		t.Fatal(err)
	}
	return c.Open(t.Context(), "owner", t.TempDir(), nil)
}

func TestDecodeConfig(t *testing.T) {
	t.Setenv("CATALOG_TOKEN", "sk-live-1")
	shared := map[string]string{"A": "default"}
	defaults := richConfig{Host: "build-1", Retries: 3, Env: shared, Hosts: []string{"h1"}, Other: "kept", Hidden: "kept"}
	var got richConfig
	opened, err := openFake(t, indentedBlock(goodConfig), func(_ context.Context, env sandboxer.Env) (sandboxer.Extension, error) {
		got = defaults
		return nil, env.Decode(&got)
	})
	if err != nil || opened[0].Info.Problem != "" {
		t.Fatalf("opened = %+v, %v", opened, err)
	}
	want := richConfig{
		Host: "build-2", Token: "sk-live-1", Other: "kept", Retries: 5, Port: 22, Small: -3, Unsigned: 7,
		Timeout: 90 * time.Second, Cache: 512 << 20, CPUs: 500, Ratio: 2, Strict: true, Colour: "green",
		Hosts: []string{"a", "b"}, Levels: []sandboxer.Isolation{"vm"}, Env: map[string]string{"A": "default", "B": "mine"},
		Groups: map[string]struct{ Size int }{"small": {1}}, Pointer: &struct{ X, Y int }{1, 2},
		When: time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC), Hidden: "kept",
		Free: map[string]any{"text": "a", "list": []any{int64(1), true, 1.5, nil}, "map": map[string]any{"k": "v"}},
	}
	want.Nested.Depth = 4
	if !reflect.DeepEqual(got, want) {
		t.Errorf("config = %#v\nwant     %#v", got, want)
	}
	if len(shared) != 1 {
		t.Errorf("the adapter's defaults were changed: %v", shared)
	}
}

func TestDecodeDefaults(t *testing.T) {
	for _, block := range []string{"", "config:\n", "config: {}\n"} {
		got := richConfig{Host: "build-1"}
		_, err := openFake(t, block, func(_ context.Context, env sandboxer.Env) (sandboxer.Extension, error) {
			return nil, env.Decode(&got)
		})
		if err != nil || got.Host != "build-1" {
			t.Errorf("%q: %+v, %v", block, got, err)
		}
	}
}

func TestSecrets(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	t.Setenv("CATALOG_TOKEN", "from-env")
	t.Setenv("CATALOG_EMPTY", "")
	for _, tt := range []struct{ ref, want, problem string }{
		{ref: "${env:CATALOG_TOKEN}", want: "from-env"},
		{ref: "${file:" + write("ok", "from-file\n") + "}", want: "from-file"},
		{ref: "${secret:kept}", want: "from-database"},
		{ref: "${secret:absent}", problem: "config.token: there is no secret"},
		{ref: "${env:CATALOG_EMPTY}", problem: "config.token: the environment variable CATALOG_EMPTY is not set"},
		{ref: "${env:CATALOG_ABSENT}", problem: "config.token: the environment variable CATALOG_ABSENT is not set"},
		{ref: "${file:" + dir + "/absent}", problem: "no such file or directory"},
		{ref: "${file:" + write("empty", "\n") + "}", problem: "is empty"},
		{ref: "${file:" + write("large", strings.Repeat("x", maxSecret+1)) + "}", problem: "longer than 64 KiB"},
		{ref: "${file:" + dir + "}", problem: "not a regular file"},
		{ref: "${file:/dev/zero}", problem: "not a regular file"},
	} {
		var cfg richConfig
		var log bytes.Buffer
		as := withOpen(func(_ context.Context, env sandboxer.Env) (sandboxer.Extension, error) {
			if err := env.Decode(&cfg); err != nil {
				return nil, err
			}
			env.Log.Info("config", "token", cfg.Token, "all", fmt.Sprintf("%+v", cfg))
			return nil, nil
		})
		c, err := load(t, map[string]string{"extensions/ext.fake.yaml": fakeHead + "config:\n  token: " + tt.ref + "\n"}, as...)
		if err != nil {
			t.Errorf("%s: loading needs the secret: %v", tt.ref, err)
			continue
		}
		c.Secret = func(_ context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error) {
			if ref != (sandboxer.SecretRef{Name: "kept"}) {
				return "", sandboxer.E(sandboxer.NotFound, nil, "there is no secret")
			}
			return "from-database", nil
		}
		if names := c.Extensions[0].StoredSecrets(); (len(names) == 1) != strings.HasPrefix(tt.ref, "${secret:") {
			t.Errorf("%s: the file refers to %q", tt.ref, names)
		}
		opened, err := c.Open(t.Context(), "o", t.TempDir(), slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil {
			t.Errorf("%s: %v", tt.ref, err)
			continue
		}
		if p := opened[0].Info.Problem; tt.problem == "" && p != "" || !strings.Contains(p, tt.problem) {
			t.Errorf("%s: problem %q; want %q", tt.ref, p, tt.problem)
		}
		if cfg.Token.Reveal() != tt.want {
			t.Errorf("%s = %q; want %q", tt.ref, cfg.Token.Reveal(), tt.want)
		}
		if tt.want != "" && strings.Contains(log.String(), tt.want) {
			t.Errorf("%s: the log has the secret: %s", tt.ref, &log)
		}
	}
}

type closer struct {
	sandboxer.Extension
	closed bool
}

func (c *closer) Close() error { c.closed = true; return nil }

func TestOpen(t *testing.T) {
	ext := &closer{}
	var env sandboxer.Env
	state := t.TempDir()
	c, err := load(t, nil, withOpen(func(_ context.Context, e sandboxer.Env) (sandboxer.Extension, error) {
		env = e
		return ext, nil
	})...)
	if err != nil {
		t.Fatal(err)
	}
	var keeps sandboxer.Notes = struct{ sandboxer.Notes }{}
	var keptFor []string
	c.Notes = func(extension, dir string) sandboxer.Notes { keptFor = []string{extension, dir}; return keeps }
	opened, err := c.Open(t.Context(), "owner-1", state, nil)
	if err != nil || len(opened) != 1 || opened[0].Ext != ext {
		t.Fatalf("opened = %+v, %v", opened, err)
	}
	if env.Extension != "ext.fake" || env.Owner != "owner-1" || env.Dir != filepath.Join(state, "ext.fake") || env.Log == nil {
		t.Errorf("env = %+v", env)
	}
	if env.Notes != keeps || !slices.Equal(keptFor, []string{"ext.fake", env.Dir}) {
		t.Errorf("its notes are %v, for %q", env.Notes, keptFor)
	}
	if st, err := os.Stat(env.Dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("state directory: %v, %v", st, err)
	}
	info := opened[0].Info
	if info.ID != "ext.fake" || info.Adapter != "fake" || info.Title != "In memory" || len(info.Inputs) != 2 || len(info.Capabilities) != 2 {
		t.Errorf("info = %+v", info)
	}
	if ext.closed {
		t.Error("closed without a reason")
	}
}

func TestOpenFailures(t *testing.T) {
	wrapped := func(err error) error { return fmt.Errorf("opening: %w", err) }
	for _, tt := range []struct {
		name    string
		err     error
		fault   string // in the error of Open
		problem string // in Info.Problem
	}{
		{name: "unavailable", err: sandboxer.E(sandboxer.Unavailable, nil, "no engine answers").WithHint("start it"), problem: "no engine answers (start it)"},
		{name: "unsupported", err: sandboxer.E(sandboxer.Unsupported, nil, "not on this kernel"), problem: "not on this kernel"},
		{name: "timeout", err: context.DeadlineExceeded, problem: "did not finish in time"},
		{name: "internal text stays inside", err: errors.New("password=hunter2"), problem: "internal error"},
		{name: "invalid", err: wrapped(sandboxer.E(sandboxer.Invalid, nil, "hosts do not agree")),
			fault: "  4:1   config: hosts do not agree\n        4 | config:\n"},
		{name: "invalid field", err: sandboxer.E(sandboxer.Invalid, nil, "host: is down for good").WithHint("buy another"),
			fault: "  5:9   config.host: is down for good (buy another)\n        5 |   host: h\n          |         ^"},
		{name: "faults", err: wrapped(Faults{{File: "x", Message: "very wrong"}}), fault: "very wrong"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			other := &closer{}
			as := withOpen(func(context.Context, sandboxer.Env) (sandboxer.Extension, error) { return nil, tt.err })
			as[2].Open = func(context.Context, sandboxer.Env) (sandboxer.Extension, error) { return other, nil }
			c, err := load(t, map[string]string{
				"extensions/ext.fake.yaml":  fakeHead + "config:\n  host: h\n",
				"extensions/ext.plain.yaml": strings.ReplaceAll(fakeHead, "fake", "plain"),
			}, as...)
			if err != nil {
				t.Fatal(err)
			}
			opened, err := c.Open(t.Context(), "o", t.TempDir(), nil)
			if tt.fault != "" {
				if !errors.Is(err, sandboxer.Invalid) && sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(err.Error(), tt.fault) {
					t.Errorf("error:\n%v\nwant in it:\n%s", err, tt.fault)
				}
				if !other.closed {
					t.Error("the other extension was left open")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if o := opened[0]; o.Ext != nil || !strings.Contains(o.Info.Problem, tt.problem) || len(o.Info.Capabilities) != 0 {
				t.Errorf("opened = %+v; want problem %q", o, tt.problem)
			}
			if o := opened[1]; o.Ext != other || o.Info.Problem != "" {
				t.Errorf("the other extension: %+v", o)
			}
		})
	}
}

// TestOpenHangs: a backend that never answers costs its own extension and a bounded
// wait, not the start of the server.
// That what came with the program has nothing to use here is no news for the log; that it cannot be used otherwise, or
// what somebody configured, is.
func TestOpenFailureLog(t *testing.T) {
	mine := map[string]string{"extensions/ext.fake.yaml": fakeHead + "config:\n  host: h\n"}
	for _, tt := range []struct {
		kind  sandboxer.Kind
		files map[string]string
		warns bool
	}{
		{sandboxer.NotFound, nil, false},
		{sandboxer.Unavailable, nil, true},
		{sandboxer.NotFound, mine, true},
	} {
		c, err := load(t, tt.files, withOpen(func(context.Context, sandboxer.Env) (sandboxer.Extension, error) {
			return nil, sandboxer.E(tt.kind, nil, "no engine")
		})...)
		if err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		if _, err := c.Open(t.Context(), "o", t.TempDir(), slog.New(slog.NewTextHandler(&log, nil))); err != nil {
			t.Fatal(err)
		}
		if warns := strings.Contains(log.String(), "level=WARN"); warns != tt.warns || !strings.Contains(log.String(), "no engine") {
			t.Errorf("%s, configured: %t: %s", tt.kind, tt.files != nil, log.String())
		}
	}
}

func TestOpenHangs(t *testing.T) {
	state := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		other := &closer{}
		as := withOpen(func(ctx context.Context, _ sandboxer.Env) (sandboxer.Extension, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		})
		as[2].Open = func(context.Context, sandboxer.Env) (sandboxer.Extension, error) { return other, nil }
		c, err := load(t, map[string]string{"extensions/ext.plain.yaml": strings.ReplaceAll(fakeHead, "fake", "plain")}, as...)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		opened, err := c.Open(t.Context(), "o", state, nil)
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took != openTimeout {
			t.Errorf("opening took %s; want %s", took, openTimeout)
		}
		if opened[0].Info.Problem == "" || opened[1].Ext != other {
			t.Errorf("opened = %+v", opened)
		}
	})
}

func TestOpenWithoutStateDirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := load(t, nil, withOpen(func(context.Context, sandboxer.Env) (sandboxer.Extension, error) {
		t.Error("opened")
		return nil, nil
	})...)
	if err != nil {
		t.Fatal(err)
	}
	opened, err := c.Open(t.Context(), "o", file, nil)
	if err != nil || !strings.Contains(opened[0].Info.Problem, "cannot be made") {
		t.Errorf("opened = %+v, %v", opened, err)
	}
}

func TestDecodeIntoNothing(t *testing.T) {
	_, err := openFake(t, "", func(_ context.Context, env sandboxer.Env) (sandboxer.Extension, error) {
		var cfg *richConfig
		for _, v := range []any{richConfig{}, cfg, nil} {
			if err := env.Decode(v); sandboxer.KindOf(err) != sandboxer.Internal {
				t.Errorf("Decode(%T): %v", v, err)
			}
		}
		return nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
