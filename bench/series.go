package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/sand-boxer/sandboxer/internal/measure"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// Series is one thing that was measured, sample by sample.
type Series struct {
	Name    string
	Unit    string
	More    bool      // more is better
	Samples []float64 // in the order in which they were taken

	cpu     time.Duration
	cpuN    int // operations in cpu
	invalid int // samples that were no finite numbers
}

// Figures are what the samples of a series come to. P95 is always the bad end, and Best the
// other. CPUms is the mean processor time of one operation, over all processes that took
// part, in ms; nil if it was not watched.
type Figures struct {
	N        int      `json:"n"`
	P50      float64  `json:"p50"`
	P95      float64  `json:"p95"`
	Best     float64  `json:"best"`
	Spread   float64  `json:"iqr"`                // interquartile range
	Outliers int      `json:"outliers,omitempty"` // see [measure.Outliers]; they count all the same
	Invalid  int      `json:"invalid,omitempty"`  // samples that were no finite numbers, and do not count
	CPUms    *float64 `json:"cpu_ms,omitempty"`
}

// Figures works them out.
func (s *Series) Figures() Figures {
	d := measure.Describe(s.Samples)
	f := Figures{N: d.N, P50: d.Median, P95: d.P95, Best: d.Min, Spread: measure.Spread(s.Samples), Outliers: measure.Outliers(s.Samples), Invalid: s.invalid}
	if s.More {
		f.P95, f.Best = s.percentile(95), d.Max
	}
	if s.cpuN > 0 {
		ms := milliseconds(s.cpu) / float64(s.cpuN)
		f.CPUms = &ms
	}
	return f
}

// percentile counts from the good end: p hundredths of the samples are no worse.
func (s *Series) percentile(p int) float64 {
	v := measure.Sorted(s.Samples)
	if len(v) == 0 {
		return 0
	}
	if s.More {
		slices.Reverse(v)
	}
	return measure.NearestRank(v, p)
}

// seriesForm is how a series is written: its figures, which people read, and its samples,
// from which they are worked out again.
type seriesForm struct {
	Name string `json:"name"`
	Unit string `json:"unit"`
	More bool   `json:"more_is_better,omitempty"`
	Figures
	Samples []float64 `json:"samples"`
}

// MarshalJSON implements [json.Marshaler].
func (s *Series) MarshalJSON() ([]byte, error) {
	return json.Marshal(seriesForm{s.Name, s.Unit, s.More, s.Figures(), s.Samples})
}

// UnmarshalJSON implements [json.Unmarshaler]. The processor time is not read back.
func (s *Series) UnmarshalJSON(data []byte) error {
	var f seriesForm
	if _, err := strictjson.DecodeStored(data, &f); err != nil {
		return err
	}
	if f.N > 0 && len(f.Samples) == 0 {
		return fmt.Errorf("the series %q has no samples: an older bench wrote it", f.Name)
	}
	*s = Series{Name: f.Name, Unit: f.Unit, More: f.More, Samples: f.Samples, invalid: f.Invalid}
	return nil
}

// Set is series by their names, in the order in which they came. The zero value is empty.
// Several goroutines may add samples at a time; whatever reads them has to wait for these.
type Set struct {
	mu     sync.Mutex // held while a sample is added
	series []*Series
}

// Series returns that of the name, which is made if there is none.
func (s *Set) Series(name, unit string) *Series {
	if x := s.find(name); x != nil {
		return x
	}
	x := &Series{Name: name, Unit: unit}
	s.series = append(s.series, x)
	return x
}

func (s *Set) find(name string) *Series {
	i := slices.IndexFunc(s.series, func(x *Series) bool { return x.Name == name })
	if i < 0 {
		return nil
	}
	return s.series[i]
}

// Add adds a sample of which less is better.
func (s *Set) Add(name, unit string, v float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Series(name, unit).add(v)
}

// Rate adds a sample of which more is better.
func (s *Set) Rate(name, unit string, v float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.Series(name, unit)
	x.More = true
	x.add(v)
}

// Took adds a duration, in milliseconds.
func (s *Set) Took(name string, d time.Duration) { s.Add(name, "ms", milliseconds(d)) }

// Spent adds the processor time of one operation to a series of durations.
func (s *Set) Spent(name string, d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.Series(name, "ms")
	x.cpu += d
	x.cpuN++
}

func (s *Series) add(v float64) {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		s.invalid++
		return
	}
	s.Samples = append(s.Samples, v)
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Median is that of a series; ok is false if it has no samples.
func (s *Set) Median(name string) (v float64, ok bool) {
	if x := s.find(name); x != nil && len(x.Samples) > 0 {
		return measure.Describe(x.Samples).Median, true
	}
	return 0, false
}

// Percentile is the value that p hundredths of a series are no worse than; ok is false if it
// has no samples.
func (s *Set) Percentile(name string, p int) (v float64, ok bool) {
	if x := s.find(name); x != nil && len(x.Samples) > 0 {
		return x.percentile(p), true
	}
	return 0, false
}

// All returns the series.
func (s *Set) All() []*Series { return slices.Clone(s.series) }

// MarshalJSON implements [json.Marshaler].
func (s *Set) MarshalJSON() ([]byte, error) {
	return json.Marshal(append([]*Series{}, s.series...)) // [] rather than null
}

// UnmarshalJSON implements [json.Unmarshaler].
func (s *Set) UnmarshalJSON(data []byte) error {
	_, err := strictjson.DecodeStored(data, &s.series)
	return err
}

// Write writes the series as a table.
func (s *Set) Write(w io.Writer) error {
	rows := [][]string{{"n", "p50", "p95", "best", "IQR", "out", "CPU ms", "unit", " "}}
	for _, x := range s.series {
		f := x.Figures()
		cpu := "-"
		if f.CPUms != nil {
			cpu = measure.Figure(*f.CPUms)
		}
		name := x.Name
		if f.Invalid > 0 {
			name += fmt.Sprintf(" (and %d that are no numbers)", f.Invalid)
		}
		rows = append(rows, []string{fmt.Sprint(f.N), measure.Figure(f.P50), measure.Figure(f.P95), measure.Figure(f.Best), measure.Figure(f.Spread), fmt.Sprint(f.Outliers), cpu, x.Unit, " " + name})
	}
	return Table(w, tabwriter.AlignRight, rows)
}

// Change is what one series became.
type Change struct {
	Name string  `json:"name"`
	Unit string  `json:"unit"`
	More bool    `json:"more_is_better,omitempty"`
	NA   int     `json:"n_a"`
	NB   int     `json:"n_b"`
	A    float64 `json:"a"` // median, as B
	B    float64 `json:"b"`
	measure.Ratio
}

// Compare sets b against a: every series that both have samples of, in the order of a.
func Compare(a, b *Set) []Change {
	out := []Change{}
	for _, x := range a.series {
		y := b.find(x.Name)
		if y == nil || len(x.Samples) == 0 || len(y.Samples) == 0 || x.Unit != y.Unit {
			continue
		}
		out = append(out, Change{Name: x.Name, Unit: x.Unit, More: x.More, NA: len(x.Samples), NB: len(y.Samples),
			A: measure.Describe(x.Samples).Median, B: measure.Describe(y.Samples).Median, Ratio: measure.RatioOf(x.Samples, y.Samples)})
	}
	return out
}

// WriteChanges writes changes as a table, with headings for a and b.
func WriteChanges(w io.Writer, a, b string, changes []Change) error {
	rows := [][]string{{"n", a, b, "unit", "ratio", "95 %", " "}}
	for _, c := range changes {
		n := fmt.Sprint(c.NA)
		if c.NB != c.NA {
			n += "/" + fmt.Sprint(c.NB)
		}
		ratio, bounds := "-", "-"
		if c.Value > 0 {
			ratio = fmt.Sprintf("%.3f", c.Value)
		}
		if c.High > 0 {
			bounds = fmt.Sprintf("%.3f to %.3f", c.Low, c.High)
		}
		name := c.Name
		if c.More {
			name += " (more is better)"
		}
		rows = append(rows, []string{n, measure.Figure(c.A), measure.Figure(c.B), c.Unit, ratio, bounds, " " + name})
	}
	return Table(w, tabwriter.AlignRight, rows)
}

// Table writes rows in columns.
func Table(w io.Writer, flags uint, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', flags)
	for _, r := range rows {
		fmt.Fprintln(tw, strings.Join(r, "\t"))
	}
	return tw.Flush()
}

// Arm is one of the things that take turns, with where its samples go.
type Arm struct {
	Name string
	To   *Set
	// Sample adds what it took to to: To, or while warming up a set that nobody looks at.
	Sample func(ctx context.Context, to *Set) error
}

// interleave lets arms take turns; see [measure.Plan.Interleave].
func interleave(ctx context.Context, p measure.Plan, arms ...Arm) (rounds int, err error) {
	taking := make([]measure.Arm, len(arms))
	for i, a := range arms {
		taking[i] = measure.Arm{Name: a.Name, Sample: func(ctx context.Context, counts bool) error {
			if counts {
				return a.Sample(ctx, a.To)
			}
			return a.Sample(ctx, &Set{})
		}}
	}
	return p.Interleave(ctx, taking...)
}
