package hosted

import (
	"testing"

	"github.com/sand-boxer/sandboxer/internal/compattest"
)

func TestFormOfAttempt(t *testing.T) {
	compattest.CheckForm(t, "hosted-attempt", compattest.Shape("", attempt{}))
}
