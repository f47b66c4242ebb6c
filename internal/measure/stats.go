package measure

import (
	"math"
	"slices"
	"strconv"
)

// Percentiles describe one distribution. Median is the middle value, of an even number
// the mean of the middle two; P95 and P99 are nearest-rank: values that occurred. Of no
// values all are 0.
type Percentiles[V ~float64] struct {
	N      int
	Min    V
	Median V
	P95    V
	P99    V
	Max    V
}

// Describe describes values, in any order, and leaves them as they are.
func Describe[V ~float64](values []V) Percentiles[V] {
	s := Sorted(values)
	n := len(s)
	if n == 0 {
		return Percentiles[V]{}
	}
	return Percentiles[V]{N: n, Min: s[0], Median: middle(s), P95: NearestRank(s, 95), P99: NearestRank(s, 99), Max: s[n-1]}
}

// Trim returns values in order without the given share of them, rounded down, at each end.
// That does not change the median.
func Trim[V ~float64](values []V, share float64) []V {
	s := Sorted(values)
	k := int(float64(len(s)) * share)
	return s[k : len(s)-k]
}

// Spread is the interquartile range: how far apart the ends of the middle half are.
func Spread[V ~float64](values []V) V {
	s := Sorted(values)
	if len(s) == 0 {
		return 0
	}
	return finite(NearestRank(s, 75) - NearestRank(s, 25))
}

// Outliers is how many values are further from the middle half than 1.5 times its width
// (Tukey's fences). They are only counted, and left out of no figure.
func Outliers[V ~float64](values []V) (n int) {
	s := Sorted(values)
	if len(s) == 0 {
		return 0
	}
	low, high := NearestRank(s, 25), NearestRank(s, 75)
	width := 1.5 * (high - low)
	for _, v := range s {
		if v < low-width || v > high+width {
			n++
		}
	}
	return n
}

// Ratio is the median of B divided by that of A. Low and High bound it with a
// confidence of 95 %; both are 0 if there are fewer than [MinForInterval] values of
// either, or the bound is not known. Value is 0 if there is nothing to compare.
type Ratio struct {
	Value float64 `json:"ratio"`
	Low   float64 `json:"ratio_low,omitempty"`
	High  float64 `json:"ratio_high,omitempty"`
}

// MinForInterval is how many values a median needs for an interval of 95 %: of five, all
// are on one side of it in 6 of 100 cases.
const MinForInterval = 6

// RatioOf compares the medians of b and a. The interval follows from those of the two
// medians, which are values that occurred and assume nothing about the distribution
// (binomial ranks), combined as logarithms (MOVER: Donner and Zou, 2012). That treats the
// values as independent of each other; those of one round share the machine's state, so
// that the interval of interleaved arms is rather too wide.
func RatioOf[V ~float64](a, b []V) Ratio {
	sa, sb := Sorted(a), Sorted(b)
	if len(sa) == 0 || len(sb) == 0 {
		return Ratio{}
	}
	ma, mb := float64(middle(sa)), float64(middle(sb))
	r := Ratio{Value: Times(ma, mb)}
	ka, kb := medianRank(len(sa)), medianRank(len(sb))
	if r.Value == 0 || ka == 0 || kb == 0 || sa[ka-1] <= 0 || sb[kb-1] <= 0 {
		return r
	}
	log := func(v V) float64 { return math.Log(float64(v)) }
	la, lb := math.Log(ma), math.Log(mb)
	down := math.Hypot(lb-log(sb[kb-1]), log(sa[len(sa)-ka])-la)
	up := math.Hypot(log(sb[len(sb)-kb])-lb, la-log(sa[ka-1]))
	low, high := math.Exp(lb-la-down), math.Exp(lb-la+up)
	if math.IsInf(high, 0) || low == 0 {
		return r
	}
	r.Low, r.High = math.Min(thousandth(low), r.Value), math.Max(thousandth(high), r.Value)
	return r
}

// Times is b divided by a, to the thousandth; 0 when there is nothing to compare.
func Times(a, b float64) float64 {
	if !(a > 0) || !(b > 0) {
		return 0
	}
	return finite(thousandth(b / a))
}

func thousandth(v float64) float64 {
	if v > 1e12 { // has none, and 1000 times as much may be too much
		return v
	}
	return math.Round(1000*v) / 1000
}

// finite is v, or 0 if that is no finite number.
func finite[V ~float64](v V) V {
	if f := float64(v); math.IsNaN(f) || math.IsInf(f, 0) {
		return 0
	}
	return v
}

// Sorted copies the finite ones of values in order.
func Sorted[V ~float64](values []V) []V {
	out := make([]V, 0, len(values))
	for _, v := range values {
		if f := float64(v); !math.IsNaN(f) && !math.IsInf(f, 0) {
			out = append(out, v)
		}
	}
	slices.Sort(out)
	return out
}

// middle is the median of at least one sorted value.
func middle[V ~float64](s []V) V {
	a, b := s[(len(s)-1)/2], s[len(s)/2]
	if sum := a + b; !math.IsInf(float64(sum), 0) {
		return sum / 2
	}
	return a/2 + b/2
}

// NearestRank is the smallest value that at least p hundredths of s, at least one sorted
// value, do not exceed.
func NearestRank[V ~float64](s []V, p int) V {
	rank := (p*len(s) + 99) / 100 // rounded up, in whole numbers
	return s[max(rank, 1)-1]
}

// medianRank is the largest k for which the median of a distribution is between the k-th
// and the k-th last of n sorted values with 95 %, or 0 if there is none: the number of values
// below the median is distributed as heads in n throws of a coin.
func medianRank(n int) (k int) {
	lg := func(n int) float64 { v, _ := math.Lgamma(float64(n) + 1); return v }
	for sum := 0.0; k <= n/2; k++ {
		sum += math.Exp(lg(n) - lg(k) - lg(n-k) - float64(n)*math.Ln2)
		if sum > 0.025 {
			break
		}
	}
	return k
}

// Figure writes v with three significant digits or more, without an exponent, and whole
// numbers as such.
func Figure(v float64) string {
	digits := 3
	switch a := math.Abs(v); {
	case a == math.Trunc(a) && a < 1e6, a >= 100:
		digits = 0
	case a >= 10:
		digits = 1
	case a >= 1:
		digits = 2
	}
	return strconv.FormatFloat(v, 'f', digits, 64)
}
