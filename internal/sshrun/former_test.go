package sshrun

import (
	"testing"

	"github.com/sand-boxer/sandboxer/internal/compattest"
)

func TestFormOfHosts(t *testing.T) {
	compattest.CheckForm(t, "host-record", compattest.Shape("", Record{}))
}
