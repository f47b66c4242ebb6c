package process

import (
	"time"

	"github.com/sand-boxer/sandboxer"
)

// NoRest has the next start of ext's process come at once.
func NoRest(ext sandboxer.Extension) {
	s := ext.(*extension).super
	s.mu.Lock()
	defer s.mu.Unlock()
	s.until, s.rest = time.Time{}, 0
}
