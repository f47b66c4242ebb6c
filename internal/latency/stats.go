package latency

import (
	"math"
	"time"

	"github.com/sand-boxer/sandboxer/internal/measure"
)

// Millis is a duration in milliseconds, kept to the microsecond.
type Millis float64

func millis(d time.Duration) Millis {
	return Millis(d.Round(time.Microsecond)) / Millis(time.Millisecond)
}

// Percentiles are [measure.Percentiles] in the form of results.
type Percentiles struct {
	N      int    `json:"n"`
	Min    Millis `json:"min_ms"`
	Median Millis `json:"median_ms"`
	P95    Millis `json:"p95_ms"`
	P99    Millis `json:"p99_ms"`
	Max    Millis `json:"max_ms"`
}

// Summary is a distribution, and the same without the extremes: a twentieth of the
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
	return Summary{Raw: Percentiles(measure.Describe(values)), Trimmed: Percentiles(measure.Describe(measure.Trim(values, trimmedShare)))}
}

// worst is the time to interactive that is worth nothing.
const worst Millis = 10_000

// Score is one figure from 0 to 100 for a series: 60 parts the median, 25 the p95 and 15
// the p99 of the trimmed times, each 100 at zero and 0 from ten seconds on, times the
// share of iterations that succeeded.
func Score(success float64, trimmed Percentiles) float64 {
	if trimmed.N == 0 {
		return 0
	}
	worth := func(v Millis) float64 { return max(0, 100*float64(1-v/worst)) }
	s := success * (0.60*worth(trimmed.Median) + 0.25*worth(trimmed.P95) + 0.15*worth(trimmed.P99))
	return math.Round(100*s) / 100
}
