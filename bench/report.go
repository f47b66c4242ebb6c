//go:build linux

package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
	"time"
)

// report collects what was measured; series keep the order in which they came.
type report struct {
	Time     time.Time `json:"time"`
	Revision string    `json:"revision,omitempty"`
	Machine  machine   `json:"machine"`
	Rounds   int       `json:"rounds"`
	Skipped  []string  `json:"skipped,omitempty"`
	Metrics  []*metric `json:"metrics"`
	Facts    []fact    `json:"facts"`
	Bars     []bar     `json:"bars"`
}

type machine struct {
	Kernel string `json:"kernel"`
	CPUs   int    `json:"cpus"`
	Go     string `json:"go"`
	Load   string `json:"load"` // average over 1, 5 and 15 minutes when the run began
}

// metric is one series of samples.
type metric struct {
	Name  string  `json:"name"`
	Unit  string  `json:"unit"`
	N     int     `json:"n"`
	P50   float64 `json:"p50"`
	P95   float64 `json:"p95"`
	Best  float64 `json:"best"`
	CPUms float64 `json:"cpu_ms,omitempty"` // mean of one operation, over all processes that took part

	samples []float64
	cpu     time.Duration
	cpuN    int
	more    bool // a larger sample is better
}

// fact is one figure that is not a series.
type fact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// bar is a target and how it was met.
type bar struct {
	Name  string  `json:"name"`
	Got   float64 `json:"got"`
	Limit float64 `json:"limit"`
	Unit  string  `json:"unit"`
	Least bool    `json:"least,omitempty"` // the limit is a lower one
	OK    bool    `json:"ok"`
}

func (r *report) metric(name, unit string) *metric {
	for _, m := range r.Metrics {
		if m.Name == name {
			return m
		}
	}
	m := &metric{Name: name, Unit: unit}
	r.Metrics = append(r.Metrics, m)
	return m
}

// took adds a duration in milliseconds.
func (r *report) took(name string, d time.Duration) {
	m := r.metric(name, "ms")
	m.samples = append(m.samples, float64(d)/float64(time.Millisecond))
}

// rate adds a sample of which more is better.
func (r *report) rate(name, unit string, v float64) {
	m := r.metric(name, unit)
	m.more = true
	m.samples = append(m.samples, v)
}

// spent adds the processor time of one operation of the series.
func (r *report) spent(name string, d time.Duration) {
	m := r.metric(name, "ms")
	m.cpu += d
	m.cpuN++
}

func (r *report) fact(name, format string, args ...any) {
	r.Facts = append(r.Facts, fact{name, fmt.Sprintf(format, args...)})
}

func (r *report) skip(format string, args ...any) {
	r.Skipped = append(r.Skipped, fmt.Sprintf(format, args...))
}

// finish computes what is derived from the samples.
func (r *report) finish() {
	for _, m := range r.Metrics {
		s := slices.Sorted(slices.Values(m.samples))
		if len(s) == 0 {
			continue
		}
		if m.more { // the 95th percentile is always the bad end
			slices.Reverse(s)
		}
		m.N, m.P50, m.P95, m.Best = len(s), quantile(s, 0.5), quantile(s, 0.95), s[0]
		if m.cpuN > 0 {
			m.CPUms = float64(m.cpu) / float64(m.cpuN) / float64(time.Millisecond)
		}
	}
}

// quantile interpolates in sorted samples.
func quantile(s []float64, q float64) float64 {
	x := q * float64(len(s)-1)
	i := int(x)
	if i+1 == len(s) {
		return s[i]
	}
	return s[i] + (x-float64(i))*(s[i+1]-s[i])
}

// median is that of a series, NaN if nothing was measured.
func (r *report) median(name string) float64 {
	for _, m := range r.Metrics {
		if m.Name == name && m.N > 0 {
			return m.P50
		}
	}
	return math.NaN()
}

// quantile is the q-quantile of a series of durations.
func (r *report) quantile(name string, q float64) float64 {
	for _, m := range r.Metrics {
		if m.Name == name && m.N > 0 {
			return quantile(slices.Sorted(slices.Values(m.samples)), q)
		}
	}
	return math.NaN()
}

// most adds a bar with an upper limit, unless there is nothing to compare.
func (r *report) most(name string, got, limit float64, unit string) {
	if !math.IsNaN(got) {
		r.Bars = append(r.Bars, bar{Name: name, Got: got, Limit: limit, Unit: unit, OK: got <= limit})
	}
}

func (r *report) least(name string, got, limit float64, unit string) {
	if !math.IsNaN(got) {
		r.Bars = append(r.Bars, bar{Name: name, Got: got, Limit: limit, Unit: unit, Least: true, OK: got >= limit})
	}
}

func (r *report) print(w io.Writer) {
	fmt.Fprintf(w, "%s, revision %s, Linux %s, %d CPUs, %s, load %s, %d rounds\n", r.Time.Format("2006-01-02 15:04 MST"),
		r.Revision, r.Machine.Kernel, r.Machine.CPUs, r.Machine.Go, r.Machine.Load, r.Rounds)
	for _, s := range r.Skipped {
		fmt.Fprintf(w, "skipped: %s\n", s)
	}
	fmt.Fprintln(w)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(tw, "n\tp50\tp95\tbest\tCPU ms\tunit\t \n")
	for _, m := range r.Metrics {
		cpu := "-"
		if m.cpuN > 0 {
			cpu = figure(m.CPUms)
		}
		fmt.Fprintf(tw, "%d\t%s\t%s\t%s\t%s\t%s\t %s\n", m.N, figure(m.P50), figure(m.P95), figure(m.Best), cpu, m.Unit, m.Name)
	}
	tw.Flush()
	fmt.Fprintln(w)
	tw = tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range r.Facts {
		fmt.Fprintf(tw, "%s\t%s\n", f.Name, f.Value)
	}
	tw.Flush()
	fmt.Fprintln(w)
	tw = tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, b := range r.Bars {
		sign, verdict := "<=", "ok"
		if b.Least {
			sign = ">="
		}
		if !b.OK {
			verdict = "MISSED"
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s %s %s\n", verdict, b.Name, figure(b.Got), sign, figure(b.Limit), b.Unit)
	}
	tw.Flush()
}

// figure prints three significant digits, without an exponent.
func figure(v float64) string {
	switch a := math.Abs(v); {
	case a == math.Trunc(a) && a < 1e6:
		return fmt.Sprintf("%.0f", v)
	case a >= 100:
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 1:
		return fmt.Sprintf("%.2f", v)
	default:
		return fmt.Sprintf("%.3f", v)
	}
}
