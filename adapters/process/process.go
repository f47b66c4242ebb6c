// Package process runs extensions that are programs of their own, in any language. It is the broker's
// side of the extension protocol (docs/reference/extension-protocol.md).
//
// A file with `command:`, or with a `handler: module:Class` that names no built-in adapter, is a child of
// the broker: it is started when it is first needed, and again when it dies. One with `connect:` is a service
// that runs already. Python classes run in the host of sdk/python, which the program carries.
//
// An extension's description is kept in its private directory (describe.go), so that reading the
// catalogue starts nothing.
package process

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/protocol"
)

// Adapter opens extensions that are processes of their own.
var Adapter = sandboxer.Adapter{
	Kind:  "process",
	Title: "A separate program, in any language",
	Help: `
Sandboxes are made by a program that is not part of this one: a Python class, a Go adapter that
is served by package extension, a script, or a service. It runs next to the broker, with as few rights as
its file says, and declares its own capabilities.
`,
	Isolation: sandboxer.Isolations(),
	Pricing:   sandboxer.PricingModels(),
	Inputs:    []sandboxer.Input{{Name: sandboxer.AnyInput, Help: "the inputs that the extension declares when the broker opens it", Restricted: true}},
	Open:      open,
	Known:     known,
}

// An arrival is a stream, or the reason why there is none.
type arrival struct {
	s   *protocol.Stream
	err error
}

// extension is an open one.
type extension struct {
	super       *supervisor
	description sandboxer.Description
}

// Describe implements sandboxer.Describer.
func (e *extension) Describe() sandboxer.Description { return e.description }

// Close ends the process; sandboxes live on.
func (e *extension) Close() error {
	e.super.close()
	return nil
}

func open(ctx context.Context, env sandboxer.Env) (sandboxer.Extension, error) {
	if env.Config == nil {
		env.Config = func(bool) (json.RawMessage, error) { return json.RawMessage("{}"), nil }
	}
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	p, err := prepare(env)
	if err != nil {
		return nil, err
	}
	digest, err := p.digest()
	if err != nil {
		return nil, err
	}
	s := newSupervisor(env, p)
	d, ok := readDescription(env.Dir, digest)
	if !ok {
		if d, err = s.describe(ctx); err != nil {
			s.close()
			return nil, err
		}
		if err := writeDescription(env.Dir, digest, d); err != nil {
			env.Log.Warn("the description of the extension cannot be stored", "err", err)
		}
	}
	s.opened(d)
	return &extension{s, d}, nil
}

// known implements sandboxer.Adapter's Known.
func known(env sandboxer.Env) (d sandboxer.Description, ok bool) {
	p, err := prepare(env)
	if err != nil {
		return d, false
	}
	digest, err := p.digest()
	if err != nil {
		return d, false
	}
	return readDescription(env.Dir, digest)
}

// secrets are the values that must not get into logs and messages.
type secrets struct {
	mu      sync.Mutex
	values  []string // and long lines of values: they may be said line by line
	longest int
}

// minSecret is how long a secret is for its value to be recognised in a text.
const minSecret = 6

// learn remembers the texts in which a configuration with its secrets differs from one without.
func (s *secrets) learn(without, with json.RawMessage) {
	var a, b any
	if json.Unmarshal(without, &a) != nil || json.Unmarshal(with, &b) != nil {
		return
	}
	var values []string
	var walk func(a, b any)
	walk = func(a, b any) {
		switch b := b.(type) {
		case map[string]any:
			a, _ := a.(map[string]any)
			for k := range b {
				walk(a[k], b[k])
			}
		case []any:
			a, _ := a.([]any)
			if len(a) != len(b) {
				a = make([]any, len(b))
			}
			for i := range b {
				walk(a[i], b[i])
			}
		case string:
			if a == b || len(b) < minSecret {
				return
			}
			values = append(values, b)
			for line := range strings.Lines(b) {
				if line = strings.TrimSpace(line); len(line) >= 4*minSecret && line != b {
					values = append(values, line)
				}
			}
		}
	}
	walk(a, b)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.values, s.longest = values, 0
	for _, v := range values {
		s.longest = max(s.longest, len(v))
	}
}

// different are the settings of a configuration that differ with its secrets and without.
func different(without, with json.RawMessage) (names []string) {
	var a, b map[string]any
	_, _ = json.Unmarshal(without, &a), json.Unmarshal(with, &b)
	for _, name := range slices.Sorted(maps.Keys(b)) {
		if !reflect.DeepEqual(a[name], b[name]) {
			names = append(names, name)
		}
	}
	return names
}

// hide blanks secrets out. It needs the whole text: half a secret is not recognized.
func (s *secrets) hide(text string) string { return s.hideIn(text, len(text)) }

// hideIn returns the first most bytes of text, without secrets. A secret that begins in them is
// recognized if all of it is in text: longest bytes beyond most are enough.
func (s *secrets) hideIn(text string, most int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found [][2]int // where, in text as it came: secrets may overlap, and one may be the beginning of another
	for _, v := range s.values {
		for at := 0; ; {
			i := strings.Index(text[at:], v)
			if i < 0 || at+i >= most {
				break
			}
			at += i + len(v)
			found = append(found, [2]int{at - len(v), at})
		}
	}
	slices.SortFunc(found, func(a, b [2]int) int { return cmp.Compare(a[0], b[0]) })
	var b strings.Builder
	said := 0 // of text, or blanked
	for _, f := range found {
		if f[0] >= said {
			b.WriteString(text[said:f[0]])
			b.WriteString("[redacted]")
		}
		said = max(said, f[1])
	}
	if most = min(most, len(text)); said < most {
		b.WriteString(text[said:most])
	}
	return b.String()
}

// reach is the length of the longest secret, in bytes.
func (s *secrets) reach() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.longest
}

var _ interface {
	sandboxer.Describer
	io.Closer
} = (*extension)(nil)
