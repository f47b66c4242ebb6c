package suggest

import (
	"slices"
	"strconv"
	"strings"
)

// DidYouMean returns `; did you mean "x"?` for the word nearest to got, or "". The prefix
// of an ID may be missing.
func DidYouMean(got string, words []string) string {
	best := Nearest(got, words)
	if best == "" {
		short := make([]string, len(words))
		for i, w := range words {
			short[i] = w[strings.IndexByte(w, '.')+1:]
		}
		if n := Nearest(got, short); n != "" {
			best = words[slices.Index(short, n)]
		}
	}
	if best == "" {
		return ""
	}
	return "; did you mean " + strconv.Quote(best) + "?"
}

// List names items, separated by commas; "nothing" if there are none.
func List[S ~string](items []S) string {
	var b strings.Builder
	for i, s := range items {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(string(s))
	}
	if len(items) == 0 {
		return "nothing"
	}
	return b.String()
}
