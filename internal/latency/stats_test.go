package latency

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// upTo returns 1 to n in some order.
func upTo(n int) []Millis {
	out := make([]Millis, n)
	for i := range out {
		out[i] = Millis(i + 1)
	}
	rand.Shuffle(n, func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

func TestSummarize(t *testing.T) {
	for _, tt := range []struct {
		name   string
		values []Millis
		want   Summary
	}{
		{"nothing", nil, Summary{}},
		{"one", []Millis{7}, Summary{
			Raw:     Percentiles{N: 1, Min: 7, Median: 7, P95: 7, P99: 7, Max: 7},
			Trimmed: Percentiles{N: 1, Min: 7, Median: 7, P95: 7, P99: 7, Max: 7},
		}},
		{"two", []Millis{4, 1}, Summary{
			Raw:     Percentiles{N: 2, Min: 1, Median: 2.5, P95: 4, P99: 4, Max: 4},
			Trimmed: Percentiles{N: 2, Min: 1, Median: 2.5, P95: 4, P99: 4, Max: 4},
		}},
		{"19 are too few to trim", upTo(19), Summary{
			Raw:     Percentiles{N: 19, Min: 1, Median: 10, P95: 19, P99: 19, Max: 19},
			Trimmed: Percentiles{N: 19, Min: 1, Median: 10, P95: 19, P99: 19, Max: 19},
		}},
		// 0.95 of 20 is 19 exactly: the 19th, not the 20th. Trimmed, 2 to 19 are left, and
		// 0.95 of those 18 is 17.1: the 18th of them.
		{"20", upTo(20), Summary{
			Raw:     Percentiles{N: 20, Min: 1, Median: 10.5, P95: 19, P99: 20, Max: 20},
			Trimmed: Percentiles{N: 18, Min: 2, Median: 10.5, P95: 19, P99: 19, Max: 19},
		}},
		// The trap of the method: of the 90 that are left (6 to 95) the p95 is the 86th and the
		// p99 the 90th, which are the p91 and the p95 of all.
		{"100", upTo(100), Summary{
			Raw:     Percentiles{N: 100, Min: 1, Median: 50.5, P95: 95, P99: 99, Max: 100},
			Trimmed: Percentiles{N: 90, Min: 6, Median: 50.5, P95: 91, P99: 95, Max: 95},
		}},
		{"1000", upTo(1000), Summary{
			Raw:     Percentiles{N: 1000, Min: 1, Median: 500.5, P95: 950, P99: 990, Max: 1000},
			Trimmed: Percentiles{N: 900, Min: 51, Median: 500.5, P95: 905, P99: 941, Max: 950},
		}},
		{"an outlier is in the raw figures only", append(upTo(19), 5000), Summary{
			Raw:     Percentiles{N: 20, Min: 1, Median: 10.5, P95: 19, P99: 5000, Max: 5000},
			Trimmed: Percentiles{N: 18, Min: 2, Median: 10.5, P95: 19, P99: 19, Max: 19},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := slices.Clone(tt.values)
			if got := Summarize(tt.values); got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
			if !slices.Equal(before, tt.values) {
				t.Error("the values were moved")
			}
		})
	}
}

func TestScore(t *testing.T) {
	for _, tt := range []struct {
		name    string
		success float64
		p       Percentiles
		want    float64
	}{
		{"nothing was measured", 1, Percentiles{}, 0},
		{"no time at all", 1, Percentiles{N: 1}, 100},
		// 0.6·90 + 0.25·80 + 0.15·50
		{"1, 2 and 5 seconds", 1, Percentiles{N: 9, Median: 1000, P95: 2000, P99: 5000}, 81.5},
		{"half of them failed", 0.5, Percentiles{N: 9, Median: 1000, P95: 2000, P99: 5000}, 40.75},
		// 0.6·90 + nothing: what takes longer than ten seconds does not count against the rest
		{"a tail beyond the scale", 1, Percentiles{N: 9, Median: 1000, P95: 20000, P99: 90000}, 54},
		{"too slow", 1, Percentiles{N: 9, Median: 10000, P95: 20000, P99: 90000}, 0},
		// 0.6·98.14 + 0.25·95.08 + 0.15·94.4 = 96.814
		{"a published series: 186, 492, 560", 1, Percentiles{N: 90, Median: 186, P95: 492, P99: 560}, 96.81},
	} {
		if got := Score(tt.success, tt.p); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestMillis(t *testing.T) {
	for d, want := range map[time.Duration]Millis{time.Second: 1000, 1500 * time.Microsecond: 1.5, 1499 * time.Nanosecond: 0.001, 0: 0} {
		if got := millis(d); got != want {
			t.Errorf("%s: %v, want %v", d, got, want)
		}
	}
}
