package portproxy_test

import (
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer/internal/edgetest"
)

// TestInternalErrorsLeadToTheirCause: the log has the cause in the line with the ID that a visitor got.
func TestInternalErrorsLeadToTheirCause(t *testing.T) {
	s := newSite(t, "")
	l := s.signed(time.Minute)
	s.m.BreakDatabase(t)
	resp, err := http.Get(l.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	told, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	s.log.HasCause(t, string(told), edgetest.DatabaseCause)
}
