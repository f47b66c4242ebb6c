package vmpacker

import (
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/compattest"
)

func TestFormOfMachines(t *testing.T) {
	compattest.CheckForm(t, "machine-note", compattest.Shape("1", place{}))
	compattest.CheckForm(t, "machine-snapshot", compattest.Shape("", saved{}))
}

// A note of a newer program is said to be that.
func TestNewerFormats(t *testing.T) {
	err := new(place).decode([]byte(`{"v":2,"id":{"in":"another form"}}`))
	if said := sandboxer.Message(err) + sandboxer.HintOf(err); sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(said, "newer sandboxer") || !strings.Contains(said, "upgrade") {
		t.Errorf("%v (%s)", err, said)
	}
}
