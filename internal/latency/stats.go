package latency

import (
	"math"
	"slices"
	"time"
)

// Millis is a duration in milliseconds, kept to the microsecond.
type Millis float64

func millis(d time.Duration) Millis {
	return Millis(d.Round(time.Microsecond)) / Millis(time.Millisecond)
}

// Percentiles describe one distribution. Median is the middle value, of an even number
// the mean of the middle two; P95 and P99 are nearest-rank: values that occurred.
type Percentiles struct {
	N      int    `json:"n"`
	Min    Millis `json:"min_ms"`
	Median Millis `json:"median_ms"`
	P95    Millis `json:"p95_ms"`
	P99    Millis `json:"p99_ms"`
	Max    Millis `json:"max_ms"`
}

// Summary is a distribution as it is, and without the extremes: a twentieth of the
// values, rounded down, is left out at each end. Of 100 values the trimmed p95 is the
// 91st and the trimmed p99 the 95th of all: only Raw shows the tail.
type Summary struct {
	Raw     Percentiles `json:"raw"`
	Trimmed Percentiles `json:"trimmed"`
}

// trimmedShare is how much is left out at each end.
const trimmedShare = 0.05

// Summarize describes values, in any order. It leaves them as they are.
func Summarize(values []Millis) Summary {
	sorted := slices.Sorted(slices.Values(values))
	k := int(float64(len(sorted)) * trimmedShare)
	return Summary{Raw: describe(sorted), Trimmed: describe(sorted[k : len(sorted)-k])}
}

func describe(sorted []Millis) Percentiles {
	n := len(sorted)
	if n == 0 {
		return Percentiles{}
	}
	return Percentiles{
		N: n, Min: sorted[0], Median: (sorted[(n-1)/2] + sorted[n/2]) / 2,
		P95: nearestRank(sorted, 95), P99: nearestRank(sorted, 99), Max: sorted[n-1],
	}
}

// nearestRank is the smallest value that at least p hundredths of sorted do not exceed.
func nearestRank(sorted []Millis, p int) Millis {
	rank := (p*len(sorted) + 99) / 100 // rounded up, in whole numbers
	return sorted[max(rank, 1)-1]
}

// worst is the time to interactive that is worth nothing.
const worst Millis = 10_000

// Score is one figure from 0 to 100 for a series: 60 parts the median, 25 the p95 and 15
// the p99 of the trimmed times, each 100 at nothing and 0 from ten seconds on, times the
// share of iterations that succeeded.
func Score(success float64, trimmed Percentiles) float64 {
	if trimmed.N == 0 {
		return 0
	}
	worth := func(v Millis) float64 { return max(0, 100*float64(1-v/worst)) }
	s := success * (0.60*worth(trimmed.Median) + 0.25*worth(trimmed.P95) + 0.15*worth(trimmed.P99))
	return math.Round(100*s) / 100
}

// Ratio is how many times b is a, to the thousandth; 0 when there is nothing to compare.
func Ratio(a, b Millis) float64 {
	if a <= 0 || b <= 0 {
		return 0
	}
	return math.Round(1000*float64(b/a)) / 1000
}
