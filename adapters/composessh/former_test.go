package composessh

import (
	"testing"

	"github.com/sand-boxer/sandboxer/internal/compattest"
)

func TestFormOfCompose(t *testing.T) {
	compattest.CheckForm(t, "compose-note", compattest.Shape("", meta{}))
}
