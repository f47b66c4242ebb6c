package sandboxer_test

import (
	"context"
	"errors"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

type exampleConfig struct {
	Host  string
	Slots int
}

func (c *exampleConfig) Validate() error {
	if c.Slots < 1 {
		return sandboxer.E(sandboxer.Invalid, nil, "slots: %d is too few", c.Slots)
	}
	return nil
}

func TestTyped(t *testing.T) {
	var got []exampleConfig
	opened := errors.New("opened")
	a := sandboxer.Typed(sandboxer.Adapter{Kind: "example"}, exampleConfig{Host: "localhost", Slots: 4},
		func(_ context.Context, _ sandboxer.Env, cfg exampleConfig) (sandboxer.Extension, error) {
			got = append(got, cfg)
			return nil, opened
		})
	open := func(set func(*exampleConfig) error) error {
		_, err := a.Open(t.Context(), sandboxer.Env{Decode: func(v any) error { return set(v.(*exampleConfig)) }})
		return err
	}

	if shown, ok := a.Config.(*exampleConfig); !ok || *shown != (exampleConfig{"localhost", 4}) {
		t.Errorf("Config = %#v, want the defaults", a.Config)
	}
	// A file decodes over the defaults, and what one sets the next does not see.
	if err := open(func(c *exampleConfig) error { c.Host = "far"; return nil }); !errors.Is(err, opened) {
		t.Fatal(err)
	}
	if err := open(func(*exampleConfig) error { return nil }); !errors.Is(err, opened) {
		t.Fatal(err)
	}
	if _, err := a.Open(t.Context(), sandboxer.Env{}); !errors.Is(err, opened) { // no file at all
		t.Fatal(err)
	}
	// The shown defaults are a copy too.
	a.Config.(*exampleConfig).Host = "changed"
	if err := open(func(*exampleConfig) error { return nil }); !errors.Is(err, opened) {
		t.Fatal(err)
	}
	want := []exampleConfig{{"far", 4}, {"localhost", 4}, {"localhost", 4}, {"localhost", 4}}
	if len(got) != len(want) {
		t.Fatalf("opened %d times, want %d", len(got), len(want))
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("opened with %+v, want %+v", got[i], want[i])
		}
	}

	// What does not decode or validate is not opened.
	if err := open(func(c *exampleConfig) error { c.Slots = 0; return nil }); !errors.Is(err, sandboxer.Invalid) {
		t.Errorf("an invalid configuration: %v", err)
	}
	broken := errors.New("line 3, column 5")
	if err := open(func(c *exampleConfig) error { c.Slots = 0; return broken }); !errors.Is(err, broken) {
		t.Errorf("a broken file: %v", err)
	}
	if len(got) != len(want) {
		t.Error("opened with a configuration that was refused")
	}
}
