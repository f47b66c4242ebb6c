// Package suggest finds the word that a user meant who wrote another.
package suggest

import (
	"math"
	"strings"
)

// Nearest returns the one of words that got was probably meant to be, or "". It is the
// one with the fewest edits between them, if these are not more than a third of got,
// or one; the first of several.
func Nearest[S ~string](got string, words []S) string {
	best, found := max(1, len(got)/3), ""
	for _, w := range words {
		if strings.EqualFold(got, string(w)) {
			return string(w)
		}
		if d := distance(strings.ToLower(got), strings.ToLower(string(w))); d < best || d == best && found == "" {
			best, found = d, string(w)
		}
	}
	if best >= max(len(got), len(found)) { // nothing of it would remain
		return ""
	}
	return found
}

// distance counts the insertions, deletions, replacements and swaps of neighbours
// that turn a into b.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 { // no name
		return math.MaxInt
	}
	x, y := []rune(a), []rune(b)
	prev2, prev, row := make([]int, len(y)+1), make([]int, len(y)+1), make([]int, len(y)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(x); i++ {
		row[0] = i
		for j := 1; j <= len(y); j++ {
			cost := 1
			if x[i-1] == y[j-1] {
				cost = 0
			}
			row[j] = min(prev[j]+1, row[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && x[i-1] == y[j-2] && x[i-2] == y[j-1] {
				row[j] = min(row[j], prev2[j-2]+1)
			}
		}
		prev2, prev, row = prev, row, prev2
	}
	return prev[len(y)]
}
