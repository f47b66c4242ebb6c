package manager

import (
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer/internal/compattest"
)

func TestFormOfStamp(t *testing.T) {
	form := compattest.Shape("1", stamp{})
	// The record in it is that of the database, which has a listing of its own.
	var own []string
	for line := range strings.Lines(form) {
		if !strings.HasPrefix(line, "stamp.sandbox") {
			own = append(own, line)
		}
	}
	compattest.CheckForm(t, "stamp", strings.Join(own, ""))
}
