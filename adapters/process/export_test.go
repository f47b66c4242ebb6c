package process

import (
	"time"

	"github.com/sand-boxer/sandboxer"
)

// NoRest has ext's process started at once when it has ended.
func NoRest(ext sandboxer.Extension) {
	s := ext.(*extension).super
	s.mu.Lock()
	defer s.mu.Unlock()
	s.first, s.long = time.Millisecond, time.Millisecond
}

// MakeExchange makes the socket for streams below dir, and returns what removes it.
func MakeExchange(dir string) (remove func(), err error) {
	x, err := newExchange(dir, nil)
	if err != nil {
		return nil, err
	}
	return x.close, nil
}

// Rests returns how long ext's process rests after each of n deaths that come at once.
func Rests(ext sandboxer.Extension, n int) (rests []time.Duration) {
	s := ext.(*extension).super
	s.mu.Lock()
	defer s.mu.Unlock()
	for range n {
		s.failed(nil)
		rests = append(rests, s.rest)
	}
	return rests
}
