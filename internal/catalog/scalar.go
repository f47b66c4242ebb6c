package catalog

import (
	"encoding"
	"fmt"
	"math"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// rule is what a struct tag says about a field beyond its Go type. The decoder and
// the schema read the same rule, which is why they agree.
//
//	yaml:"name"        the key; "-" hides the field; ",inline" lifts a struct's fields
//	help:"…"           one sentence for editors and documentation
//	required:"true"    the key must be there
//	unless:"a,b"       it need not if one of these is
//	unit:"bytes"       an integer written as a size: 512MiB, 2GB
//	unit:"cpus"        an integer of thousandths written as a number: 1.5
//	enum:"a,b"         a string that is one of these
//	format:"abspath"   a string of a known form (see formats)
//	keys:"env"         the form of a map's keys
//	min, max           bounds, written as the value is written
//	text:"any"         numbers and booleans count as text, exactly as written
//	unique:"true"      a list without repetitions
//	nonempty:"true"    a list with at least one element
//	short:"a,b"        a struct may be written as one of these words, which its first field takes
//
// On lists and maps, unit, enum, format, min, max and text are about the elements.
type rule struct {
	name, help                          string
	unit, format, keys, min, max        string
	enum, short, unless                 []string
	required, anyText, unique, nonempty bool
	index                               []int
}

// fieldsOf lists the keys of a struct in the order of its fields.
func fieldsOf(t reflect.Type) []rule {
	var rules []rule
	for i := range t.NumField() {
		f := t.Field(i)
		name, opts, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if name == "-" || !f.IsExported() {
			continue
		}
		if strings.Contains(opts, "inline") || f.Anonymous && name == "" && f.Type.Kind() == reflect.Struct {
			for _, r := range fieldsOf(f.Type) {
				r.index = append([]int{i}, r.index...)
				rules = append(rules, r)
			}
			continue
		}
		if name == "" {
			name = strings.ToLower(f.Name)
		}
		split := func(tag string) []string {
			if s := f.Tag.Get(tag); s != "" {
				return strings.Split(s, ",")
			}
			return nil
		}
		rules = append(rules, rule{
			name: name, help: describe(f.Tag), unit: f.Tag.Get("unit"), format: f.Tag.Get("format"), keys: f.Tag.Get("keys"),
			min: f.Tag.Get("min"), max: f.Tag.Get("max"), enum: split("enum"), short: split("short"), unless: split("unless"),
			required: f.Tag.Get("required") == "true", anyText: f.Tag.Get("text") == "any",
			unique: f.Tag.Get("unique") == "true", nonempty: f.Tag.Get("nonempty") == "true", index: []int{i},
		})
	}
	return rules
}

// describe also reads the tag of the common schema generators.
func describe(tag reflect.StructTag) string {
	if s := tag.Get("help"); s != "" {
		return s
	}
	_, s, _ := strings.Cut(tag.Get("jsonschema"), "description=")
	return strings.ReplaceAll(s, `\,`, ",")
}

// element is the rule for the elements of a list or map under r.
func (r rule) element() rule {
	return rule{required: true, unit: r.unit, format: r.format, min: r.min, max: r.max, enum: r.enum, anyText: r.anyText}
}

// A scalar is how one kind of scalar is read and described.
type scalar struct {
	want   string   // "a duration such as 30m", after "expected"
	tags   []string // YAML types that may hold it
	words  []string // the only texts accepted, if it is an enumeration
	secret bool
	parse  func(text string) (v any, ok bool)
	schema schema
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	lifetimeType = reflect.TypeFor[lifetime]()
	secretType   = reflect.TypeFor[sandboxer.Secret]()
	creditsType  = reflect.TypeFor[sandboxer.Credits]()
	textType     = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// enums are the string types of the domain that have a fixed set of values.
func enumOf(t reflect.Type) (what string, words []string) {
	switch t {
	case reflect.TypeFor[sandboxer.Isolation]():
		return "isolation level", texts(sandboxer.Isolations())
	case reflect.TypeFor[sandboxer.PricingModel]():
		return "pricing model", texts(sandboxer.PricingModels())
	case reflect.TypeFor[sandboxer.Capability]():
		return "capability", texts(sandboxer.Capabilities())
	case reflect.TypeFor[sandboxer.Kind]():
		return "kind of error", texts(sandboxer.Kinds())
	case reflect.TypeFor[sandboxer.ExpiryAction]():
		return "action", texts(sandboxer.ExpiryActions())
	case reflect.TypeFor[sandboxer.CostAction]():
		return "action", texts(sandboxer.CostActions())
	case reflect.TypeFor[sandboxer.PriceUnit]():
		return "unit", texts(sandboxer.PriceUnits())
	case reflect.TypeFor[sandboxer.PriceBasis]():
		return "basis", texts(sandboxer.PriceBases())
	case reflect.TypeFor[sandboxer.PriceConfidence]():
		return "confidence", texts(sandboxer.PriceConfidences())
	case reflect.TypeFor[sandboxer.PauseDepth]():
		return "depth of pausing", texts(sandboxer.PauseDepths())
	case reflect.TypeFor[sandboxer.RoutePolicy]():
		return "policy", texts(sandboxer.RoutePolicies())
	case reflect.TypeFor[sandboxer.RoutePreference]():
		return "preference", texts(sandboxer.RoutePreferences())
	case reflect.TypeFor[sandboxer.CredentialBy]():
		return "owner of a key", texts(sandboxer.CredentialsBy())
	case reflect.TypeFor[sandboxer.NetworkMode]():
		return "network mode", texts([]sandboxer.NetworkMode{sandboxer.NetworkNone, sandboxer.NetworkPublic, sandboxer.NetworkAllow})
	}
	return "", nil
}

func texts[S ~string](in []S) []string {
	out := make([]string, len(in))
	for i, s := range in {
		out[i] = string(s)
	}
	return out
}

// scalarOf returns how to read a t under r, or nil if t is not a scalar.
func scalarOf(t reflect.Type, r rule) *scalar {
	str, num := []string{"!!str"}, []string{"!!int", "!!float"}
	switch {
	case t == durationType:
		return &scalar{want: "a duration such as 90s, 30m or 1h30m", tags: str,
			parse:  func(s string) (any, bool) { return parseDuration(s) },
			schema: schema{Type: "string", Pattern: durationPattern}}
	case t == lifetimeType:
		return &scalar{want: "a duration such as 90s, 30m or 1h30m, or idle", tags: str,
			parse: func(s string) (any, bool) {
				if s == sandboxer.TTLIdleText {
					return sandboxer.TTLIdle, true
				}
				return parseDuration(s)
			},
			schema: schema{Type: "string", Pattern: "^" + sandboxer.TTLIdleText + "$|" + durationPattern}}
	case t == secretType:
		return &scalar{want: "a reference to a secret, ${env:NAME}, ${file:/absolute/path} or ${secret:NAME}", tags: str, secret: true,
			parse:  func(s string) (any, bool) { return s, secretPattern.MatchString(s) },
			schema: schema{Type: "string", Pattern: secretPattern.String()}}
	case t == creditsType:
		return &scalar{want: `an amount of credits such as "0.12"`, tags: append(str, num...),
			parse: func(s string) (any, bool) {
				c, err := sandboxer.ParseCredits(s)
				return int64(c), err == nil && c >= 0
			},
			schema: schema{AnyOf: []*schema{{Type: "string", Pattern: `^[0-9]{1,12}(\.[0-9]{0,6})?$`}, {Type: "number", Minimum: ptr(0.0)}}}}
	case reflect.PointerTo(t).Implements(textType):
		return &scalar{want: "text", tags: str, parse: func(s string) (any, bool) { return s, true }, schema: schema{Type: "string"}}
	}
	if what, words := enumOf(t); words != nil {
		return wordsScalar(what, words)
	}
	integer := t.Kind() >= reflect.Int && t.Kind() <= reflect.Uint64
	switch {
	case integer && r.unit == "bytes":
		return &scalar{want: "a size with its unit such as 512MiB or 2GB", tags: str,
			parse:  func(s string) (any, bool) { return parseBytes(s) },
			schema: schema{Type: "string", Pattern: bytesPattern.String()}}
	case integer && r.unit == "cpus":
		return &scalar{want: "a number of CPUs such as 1.5", tags: append(num, str...),
			parse:  func(s string) (any, bool) { return parseCPUs(s) },
			schema: schema{AnyOf: []*schema{{Type: "number", Minimum: ptr(0.0)}, {Type: "string", Pattern: cpusPattern.String()}}}}
	case integer:
		return &scalar{want: "a whole number", tags: num[:1],
			parse: func(s string) (any, bool) {
				n, err := strconv.ParseInt(strings.ReplaceAll(s, "_", ""), 0, 64)
				return n, err == nil
			},
			schema: schema{Type: "integer"}}
	case t.Kind() == reflect.Float32, t.Kind() == reflect.Float64:
		return &scalar{want: "a number", tags: num,
			parse: func(s string) (any, bool) {
				f, err := strconv.ParseFloat(strings.ReplaceAll(s, "_", ""), 64)
				if i, e := strconv.ParseInt(strings.ReplaceAll(s, "_", ""), 0, 64); e == nil {
					f, err = float64(i), nil
				}
				return f, err == nil && !math.IsInf(f, 0) && !math.IsNaN(f)
			},
			schema: schema{Type: "number"}}
	case t.Kind() == reflect.Bool:
		return &scalar{want: "true or false", tags: []string{"!!bool"}, words: nil,
			parse: func(s string) (any, bool) {
				b, err := strconv.ParseBool(strings.ToLower(s))
				return b, err == nil
			},
			schema: schema{Type: "boolean"}}
	case t.Kind() != reflect.String:
		return nil
	case r.enum != nil:
		return wordsScalar("value", r.enum)
	}
	sc := &scalar{want: "text", tags: str, parse: func(s string) (any, bool) { return s, true }, schema: schema{Type: "string"}}
	if r.anyText {
		sc.tags = []string{"!!str", "!!int", "!!float", "!!bool", "!!timestamp"}
		sc.schema.Type = []string{"string", "number", "boolean"}
	}
	if r.format != "" {
		f, ok := formats[r.format]
		if !ok {
			panic("catalog: unknown format " + r.format)
		}
		sc.want = f.want
		sc.parse = func(s string) (any, bool) { return s, f.matches(s) }
		sc.schema.Pattern = f.pattern.String()
	}
	return sc
}

func wordsScalar(what string, words []string) *scalar {
	return &scalar{want: what, tags: []string{"!!str"}, words: words,
		parse:  func(s string) (any, bool) { return s, slices.Contains(words, s) },
		schema: schema{Enum: words}}
}

// pattern is a regular expression that is compiled when first needed: the program
// also runs in roles that never read a catalogue, and those start often.
type pattern struct {
	text string
	re   func() *regexp.Regexp
}

func lazyRegexp(text string) *pattern {
	return &pattern{text, sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(text) })}
}

func (p *pattern) MatchString(s string) bool { return p.re().MatchString(s) }
func (p *pattern) String() string            { return p.text }

// format is a form of text with a name. The pattern is also published in the
// schemas, so it keeps to what ECMA and Go regular expressions share.
type format struct {
	want    string
	pattern *pattern
	check   func(string) bool // what a pattern cannot say; may be nil
	prefix  string            // often forgotten, suggested then
}

func (f format) matches(s string) bool {
	return f.pattern.MatchString(s) && (f.check == nil || f.check(s))
}

// secretNamePattern is what sandboxer.CheckSecretName takes, for schemas.
const secretNamePattern = `[A-Za-z0-9][A-Za-z0-9._-]{0,63}`

var formats = map[string]format{
	"extension": {want: `an extension ID such as "ext.local"`, prefix: extPrefix,
		pattern: lazyRegexp(`^ext\.[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?$`)},
	"profile": {want: `a profile ID such as "profile.local"`, prefix: profilePrefix,
		pattern: lazyRegexp(`^profile\.[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?$`)},
	"handler": {want: `the name of an adapter such as "local", or "module:Class"`,
		pattern: lazyRegexp(`^[A-Za-z0-9_][A-Za-z0-9_.-]*(?::[A-Za-z_][A-Za-z0-9_]*)?$`)},
	"abspath": {want: "a clean absolute path such as /workspace",
		pattern: lazyRegexp(`^/(?:[^/\r\n]+(?:/[^/\r\n]+)*)?$`), check: func(s string) bool { return path.Clean(s) == s }},
	"env": {want: "a name of letters, digits and _ that does not begin with a digit",
		pattern: lazyRegexp(`^[A-Za-z_][A-Za-z0-9_]{0,254}$`)},
	"label": {want: "1 to 128 letters, digits and . _ - /, beginning with a letter or digit",
		pattern: lazyRegexp(`^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$`)},
	"sink": {want: "1 to 48 characters a-z, 0-9 and inner hyphens",
		pattern: lazyRegexp(`^[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?$`)},
	"secret": {want: "1 to 64 letters, digits and . _ -, beginning with a letter or digit",
		pattern: lazyRegexp(`^` + secretNamePattern + `$`), check: func(s string) bool { return sandboxer.CheckSecretName(s) == nil }},
	"user": {want: `a user such as "app", "1000" or "1000:1000"`,
		pattern: lazyRegexp(`^(?:[a-z_][a-z0-9_.-]{0,31}|[0-9]{1,10}(?::[0-9]{1,10})?)$`)},
	"image": {want: "the name of an image, without spaces",
		pattern: lazyRegexp(`^[^ \t\r\n]+$`)},
	"urlpath": {want: "the path of a request such as /healthz?all=1: at most 1024 visible ASCII characters without #",
		pattern: lazyRegexp(`^/[!"$-~]*$`), check: func(s string) bool { return len(s) <= 1024 }},
	"date": {want: "a day such as 2026-08-01", pattern: lazyRegexp(`^[0-9]{4}-[0-9]{2}-[0-9]{2}$`),
		check: func(s string) bool { _, err := time.Parse(time.DateOnly, s); return err == nil }},
	"line": {want: "one line of text", pattern: lazyRegexp(`^[^\r\n]{0,200}$`)},
	"service": {want: "unix:/absolute/path, or tls:host:port",
		pattern: lazyRegexp(`^(?:unix:/[^\x00-\x20]{1,100}|tls:(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5})$`)},
	"peer": {want: "a domain, *.domain, IP address or CIDR, each with an optional :port",
		pattern: lazyRegexp(`^[A-Za-z0-9*.:/\[\]_-]+$`), check: isPeer},
}

func isPeer(s string) bool {
	_, err := sandboxer.ParseDestination(s)
	return err == nil
}

const durationPattern = `^(?:[0-9]+d|(?:[0-9]+d)?(?:[0-9]+(?:\.[0-9]+)?(?:h|m|s|ms|us|ns))+)$`

var durationForm = lazyRegexp(durationPattern)

// parseDuration reads Go's durations without sign, optionally led by whole days.
func parseDuration(s string) (time.Duration, bool) {
	if !durationForm.MatchString(s) {
		return 0, false
	}
	var d time.Duration
	if days, rest, ok := strings.Cut(s, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 32)
		if err != nil || n > 36500 {
			return 0, false
		}
		d, s = time.Duration(n)*24*time.Hour, rest
		if s == "" {
			return d, true
		}
	}
	rest, err := time.ParseDuration(s)
	if err != nil || rest > math.MaxInt64-d {
		return 0, false
	}
	return d + rest, true
}

var (
	bytesPattern = lazyRegexp(`^[0-9]{1,9}(?:\.[0-9]{1,6})? ?(?:B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)$`)
	cpusPattern  = lazyRegexp(`^[0-9]{1,6}(?:\.[0-9]{1,3})?$`)
	byteUnits    = []struct {
		name string
		size float64
	}{
		{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
		{"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1},
	}
)

func parseBytes(s string) (int64, bool) {
	if !bytesPattern.MatchString(s) {
		return 0, false
	}
	for _, u := range byteUnits {
		if n, ok := strings.CutSuffix(s, u.name); ok {
			f, err := strconv.ParseFloat(strings.TrimSpace(n), 64)
			f *= u.size
			// 2^53 bytes is the last exact size and far beyond any disk.
			return int64(f), err == nil && f == math.Trunc(f) && f <= 1<<53
		}
	}
	return 0, false
}

// formatBytes is the shortest form that parseBytes reads back.
func formatBytes(n int64) string {
	for _, u := range []string{"TiB", "GiB", "MiB", "KiB"} {
		if v, ok := parseBytes("1" + u); ok && n >= v && n%v == 0 {
			return strconv.FormatInt(n/v, 10) + u
		}
	}
	return strconv.FormatInt(n, 10) + "B"
}

func parseCPUs(s string) (int64, bool) {
	if !cpusPattern.MatchString(s) {
		return 0, false
	}
	whole, frac, _ := strings.Cut(s, ".")
	n, err := strconv.ParseInt(whole+frac+strings.Repeat("0", 3-len(frac)), 10, 64)
	return n, err == nil
}

// bounds says, if v breaks the rule's bounds, what would be right.
func (r rule) bounds(sc *scalar, v any) (want string, ok bool) {
	if v == any(sandboxer.TTLIdle) { // the word, which is no duration
		return "", true
	}
	number := func(v any) float64 {
		f, _ := strconv.ParseFloat(fmt.Sprintf("%d", v), 64)
		if g, ok := v.(float64); ok {
			f = g
		}
		return f
	}
	low, high := true, true
	if r.min != "" {
		lim, _ := sc.parse(r.min)
		low = number(v) >= number(lim)
	}
	if r.max != "" {
		lim, _ := sc.parse(r.max)
		high = number(v) <= number(lim)
	}
	switch {
	case low && high:
		return "", true
	case r.min != "" && r.max != "":
		return r.min + " to " + r.max, false
	case !low:
		return "at least " + r.min, false
	}
	return "at most " + r.max, false
}

func ptr[T any](v T) *T { return &v }
