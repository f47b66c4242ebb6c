package api

import (
	"errors"
	"strconv"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestAllEnds: a server's list ends, whatever the server says.
func TestAllEnds(t *testing.T) {
	for name, next := range map[string]func(string) string{
		"in a circle": func(string) string { return "again" },
		"for ever": func(c string) string {
			n, _ := strconv.Atoi(c)
			return strconv.Itoa(n + 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			n, asked := 0, 0
			var last error
			for _, err := range All(func(cursor string) (*List[int], error) {
				asked++
				return &List[int]{Items: []int{1}, NextCursor: next(cursor)}, nil
			}) {
				if last = err; err == nil {
					n++
				}
			}
			if !errors.Is(last, sandboxer.Unavailable) || asked > mostPages || n != asked {
				t.Errorf("%d entries of %d pages, %v", n, asked, last)
			}
		})
	}
	n := 0
	for _, err := range All(func(cursor string) (*List[int], error) {
		return &List[int]{Items: []int{1}, NextCursor: map[string]string{"": "a", "a": "b"}[cursor]}, nil
	}) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	if n != 3 {
		t.Errorf("%d of 3", n)
	}
}
