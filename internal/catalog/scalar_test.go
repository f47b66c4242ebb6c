package catalog

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func TestParseDuration(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"90s": 90 * time.Second, "1h30m": 90 * time.Minute, "1d": 24 * time.Hour, "1d12h": 36 * time.Hour,
		"0.5h": 30 * time.Minute, "250ms": 250 * time.Millisecond, "0s": 0, "36500d": 36500 * 24 * time.Hour,
		"": -1, "30": -1, "-5m": -1, "+5m": -1, "1 h": -1, "5m3": -1, "d": -1, "1h1d": -1, "1D": -1, ".5h": -1,
		"36501d": -1, "99999999999d": -1, "2562047h48m": -1, "36500d2562047h": -1, "9999999999h": -1,
	} {
		got, ok := parseDuration(in)
		if ok != (want >= 0) || ok && got != want {
			t.Errorf("parseDuration(%q) = %v, %v; want %v", in, got, ok, want)
		}
		if ok {
			if back, ok := parseDuration(sandboxer.FormatDuration(got)); !ok || back != got {
				t.Errorf("sandboxer.FormatDuration(%v) = %q, which reads as %v", got, sandboxer.FormatDuration(got), back)
			}
		}
	}
}

func TestParseBytes(t *testing.T) {
	for in, want := range map[string]int64{
		"512MiB": 512 << 20, "1.5GiB": 3 << 29, "2GB": 2e9, "64kB": 64e3, "64KB": 64e3, "1 TiB": 1 << 40, "10B": 10, "0B": 0,
		"": -1, "512": -1, "512M": -1, "512mib": -1, "-1GiB": -1, "1e3B": -1, "0.3B": -1, "1,5GiB": -1, "999999999TiB": -1, "0.0000001TB": -1,
	} {
		got, ok := parseBytes(in)
		if ok != (want >= 0) || ok && got != want {
			t.Errorf("parseBytes(%q) = %v, %v; want %v", in, got, ok, want)
		}
		if ok {
			if back, ok := parseBytes(formatBytes(got)); !ok || back != got {
				t.Errorf("formatBytes(%d) = %q, which reads as %d", got, formatBytes(got), back)
			}
		}
	}
}

func TestParseCPUs(t *testing.T) {
	for in, want := range map[string]int64{
		"1.5": 1500, "2": 2000, "0.25": 250, "0.001": 1, "0": 0,
		"": -1, "0.0001": -1, "1e3": -1, "-1": -1, ".5": -1, "500m": -1, "1234567": -1, "1.": -1,
	} {
		if got, ok := parseCPUs(in); ok != (want >= 0) || ok && got != want {
			t.Errorf("parseCPUs(%q) = %v, %v; want %v", in, got, ok, want)
		}
	}
}

func TestFormats(t *testing.T) {
	for name, texts := range map[string]struct{ good, bad []string }{
		"extension": {[]string{"ext.a", "ext.my-backend2"}, []string{"", "a", "ext.", "ext.-a", "ext.a-", "ext.A", "ext.a.b", "ext." + strings.Repeat("a", 49)}},
		"handler":   {[]string{"local", "compose-ssh", "a.b:C", "mod:Class_2"}, []string{"", "a b", ":C", "a:", "a:B:C", "a:2"}},
		"abspath":   {[]string{"/", "/a", "/a/b c"}, []string{"", "a", "./a", "/a/", "/a//b", "/a/./b", "/a/../b", "//a", "/a\nb"}},
		"env":       {[]string{"A", "_a1"}, []string{"", "1A", "A-B", "A=B", "Ä"}},
		"user":      {[]string{"root", "1000", "1000:1000", "www-data", "_apt"}, []string{"", "Root", "a b", "1000:", ":1", "app:app", "-x"}},
		"image":     {[]string{"busybox", "a/b:c@sha256:d"}, []string{"", "a b", "a\tb"}},
		"peer": {[]string{"example.org", "*.example.org", "example.org:443", "192.0.2.1", "192.0.2.1:80", "192.0.2.0/24", "2001:db8::1", "2001:db8::/32", "[2001:db8::1]:443"},
			[]string{"", "*", "a..b", "exa mple", "https://example.org", "example.org/x", "example.org:0", "example.org:65536", "example.org:http",
				"192.0.2.0/33", "localhost", "127.0.0.1", "169.254.0.0/16", "192.0.2.1/24", "[a.b]:80", "2001:db8::1]:80", "fe80::x:80", "-a.org", "a.*.org"}},
	} {
		f := formats[name]
		for _, s := range texts.good {
			if !f.matches(s) {
				t.Errorf("%s refuses %q", name, s)
			}
		}
		for _, s := range texts.bad {
			if f.matches(s) {
				t.Errorf("%s accepts %q", name, s)
			}
		}
	}
}

// Shared2 is embedded.
type Shared2 struct {
	Zone  string
	Rules []struct {
		Size int64 `yaml:"size" unit:"bytes" max:"1KiB"`
	}
}

// TestShapes decodes what adapters may use in addition to plain fields.
func TestShapes(t *testing.T) {
	read := func(v any, text string) error {
		data := []byte(text)
		src := newSource("f", data)
		d := newDecoder(src)
		if n := src.parse(data); n != nil {
			d.value(reflect.ValueOf(v).Elem(), n, nil, "", rule{required: true}, 0)
		}
		if fs := src.take(); len(fs) > 0 {
			return fs
		}
		return nil
	}
	var s Shared2
	if err := read(&s, "zone: z\nrules: [{size: 512B}]\n"); err != nil || s.Zone != "z" || s.Rules[0].Size != 512 {
		t.Errorf("%+v, %v", s, err)
	}
	err := read(&s, "rules: [{size: 2KiB}]\n")
	if want := "f: 1 problem\n  1:16  rules[0].size: expected at most 1KiB, got \"2KiB\"\n        1 | rules: [{size: 2KiB}]\n          |                ^^^^"; err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
	var f struct {
		Shared2 `yaml:",inline"`
		Plain   string
		Cost    sandboxer.Credits
		Limit   float64 `min:"0.5"`
	}
	f.Rules = make([]struct {
		Size int64 `yaml:"size" unit:"bytes" max:"1KiB"`
	}, 1)
	f.Rules[0].Size, f.Cost = 2048, sandboxer.Credit
	if err := read(&f, "zone: z\nplain: p\ncost: 0.5\nlimit: 0x2\n"); err != nil || f.Zone != "z" || f.Cost != sandboxer.Credit/2 || f.Limit != 2 {
		t.Errorf("%+v, %v", f, err)
	}
	if err := read(&f, "limit: 0.25\n"); err == nil || !strings.Contains(err.Error(), "expected at least 0.5, got 0.25") {
		t.Error(err)
	}
	text, err := ConfigSchema(sandboxer.Adapter{Config: &f})
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Properties map[string]struct{ Default any }
	}
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"zone": "z", "plain": "p", "cost": "0.50", "limit": 2.0, "rules": []any{map[string]any{"size": "2KiB"}}}
	for name, def := range want {
		if !reflect.DeepEqual(got.Properties[name].Default, def) {
			t.Errorf("default of %s = %v; want %v", name, got.Properties[name].Default, def)
		}
	}
	if len(got.Properties) != len(want) {
		t.Errorf("properties: %v", got.Properties)
	}
	if d := describe(`jsonschema:"description=where it is\\, roughly"`); d != "where it is, roughly" {
		t.Errorf("description %q", d)
	}
}

// TestUnreadableTypes: a config struct that cannot be read is a bug that shows as
// soon as the catalogue loads.
func TestUnreadableTypes(t *testing.T) {
	defer func() {
		if r := recover(); r == nil {
			t.Error("a channel was described")
		}
	}()
	ConfigSchema(sandboxer.Adapter{Config: &struct{ C chan int }{}})
}

func TestNotUTF8(t *testing.T) {
	for text, want := range map[string]string{
		"title: a\xffb\n": "1:9   the file is not UTF-8 text (byte 0xff)",
		"\xff\xfea\x00":   "1:1   the file is not UTF-8 text (byte 0xff)",
		"a: \ufeffb\n":    "1:4   the control character U+FEFF is not allowed",
	} {
		_, err := load(t, map[string]string{"profiles/p.yaml": text})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %s", text, err, want)
		}
	}
	const bom = "\ufeffid: profile.x\r\nextension: ext.fake\r\nttl: 1\r\n"
	_, err := load(t, map[string]string{"profiles/p.yaml": bom})
	if err == nil || !strings.Contains(err.Error(), "  3:6   ttl: ") {
		t.Errorf("byte order mark and CRLF: %v", err)
	}
}
