package latency

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer/internal/measure"
)

// Comparison compares run B with run A.
type Comparison struct {
	SchemaVersion int      `json:"schema_version"`
	A             string   `json:"a"`
	B             string   `json:"b"`
	Rows          []Row    `json:"rows"`
	Warnings      []string `json:"warnings,omitempty"` // why they are not alike
}

// Row compares two series of one profile and mode.
type Row struct {
	Profile string `json:"profile"`
	Mode    Mode   `json:"mode"`
	CountA  int    `json:"count_a"`
	CountB  int    `json:"count_b"`
	Median  Change `json:"median"` // trimmed, as P95 and P99
	// The ratio of the medians is between these with 95 %; 0 where there are too few
	// iterations to say.
	MedianLow  float64    `json:"median_ratio_low,omitempty"`
	MedianHigh float64    `json:"median_ratio_high,omitempty"`
	P95        Change     `json:"p95"`
	P99        Change     `json:"p99"`
	RawP95     Change     `json:"raw_p95"`
	RawP99     Change     `json:"raw_p99"`
	Success    [2]float64 `json:"success"` // of A and of B
	Score      [2]float64 `json:"score"`
}

// Change is the change of one figure. Ratio is B/A: above 1 it got slower; 0 when one of
// them is missing.
type Change struct {
	A     Millis  `json:"a_ms"`
	B     Millis  `json:"b_ms"`
	Ratio float64 `json:"ratio"`
}

// Compare compares b with a: series of the same profile and mode, bursts of the same size.
func Compare(a, b *Result) *Comparison {
	c := &Comparison{SchemaVersion: a.SchemaVersion, A: a.ID, B: b.ID, Rows: []Row{}}
	differ := func(what string, x, y any) {
		if fmt.Sprint(x) != fmt.Sprint(y) {
			c.Warnings = append(c.Warnings, fmt.Sprintf("%s: %v and %v", what, x, y))
		}
	}
	differ("command", strings.Join(a.Command, " "), strings.Join(b.Command, " "))
	differ("probe", a.Probe, b.Probe)
	differ("warm sandboxes only", a.WarmOnly, b.WarmOnly)
	differ("processors", a.Client.Cores, b.Client.Cores)
	differ("system", a.Client.OS+"/"+a.Client.Arch, b.Client.OS+"/"+b.Client.Arch)
	differ("server on the client's machine", a.Local, b.Local)
	if a.Every > 0 && b.Every > 0 {
		differ("launches every", a.Every, b.Every)
	}
	alike := func(x, y Series) bool {
		return x.Profile == y.Profile && x.Mode == y.Mode && (x.Mode != Burst || x.Count == y.Count)
	}
	missing := func(s Series, id string) {
		c.Warnings = append(c.Warnings, fmt.Sprintf("%s %s %d is only in %s", s.Profile, s.Mode, s.Count, id))
	}
	for _, x := range a.Series {
		i := slices.IndexFunc(b.Series, func(y Series) bool { return alike(x, y) })
		if i < 0 {
			missing(x, a.ID)
			continue
		}
		y := b.Series[i]
		change := func(f func(Summary) Millis) Change {
			va, vb := f(x.TTI), f(y.TTI)
			return Change{va, vb, measure.Times(float64(va), float64(vb))}
		}
		bounds := measure.RatioOf(x.times(), y.times())
		c.Rows = append(c.Rows, Row{
			MedianLow: bounds.Low, MedianHigh: bounds.High,
			Profile: x.Profile, Mode: x.Mode, CountA: x.Count, CountB: y.Count,
			Median:  change(func(s Summary) Millis { return s.Trimmed.Median }),
			P95:     change(func(s Summary) Millis { return s.Trimmed.P95 }),
			P99:     change(func(s Summary) Millis { return s.Trimmed.P99 }),
			RawP95:  change(func(s Summary) Millis { return s.Raw.P95 }),
			RawP99:  change(func(s Summary) Millis { return s.Raw.P99 }),
			Success: [2]float64{x.Success, y.Success}, Score: [2]float64{x.Score, y.Score},
		})
	}
	for _, y := range b.Series {
		if !slices.ContainsFunc(a.Series, func(x Series) bool { return alike(x, y) }) {
			missing(y, b.ID)
		}
	}
	return c
}

// times are the times of the iterations that succeeded; listings have none.
func (s *Series) times() (out []Millis) {
	for _, it := range s.Iterations {
		if it.OK {
			out = append(out, it.TTI)
		}
	}
	return out
}

// Regressed reports whether the median or the p95 became more than limit times its former
// value, or fewer iterations succeeded.
func (r *Row) Regressed(limit float64) bool {
	return r.Median.Ratio > limit || r.P95.Ratio > limit || r.Success[1] < r.Success[0]
}
