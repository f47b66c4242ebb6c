package manager

import (
	"testing"
	"time"
)

// A snapshot that its backend drops has that time, unless its own is earlier.
func TestEarlier(t *testing.T) {
	never, soon, late := time.Time{}, time.Unix(1, 0), time.Unix(2, 0)
	for _, c := range [][3]time.Time{{never, never, never}, {never, soon, soon}, {soon, never, soon}, {soon, late, soon}, {late, soon, soon}} {
		if got := earlier(c[0], c[1]); !got.Equal(c[2]) {
			t.Errorf("earlier(%s, %s) = %s; want %s", c[0], c[1], got, c[2])
		}
	}
}
