//go:build linux

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	"github.com/sand-boxer/sandboxer/internal/measure"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// report is what a run measured.
type report struct {
	Time     time.Time `json:"time"`
	Revision string    `json:"revision,omitempty"`
	Machine  machine   `json:"machine"`
	Rounds   int       `json:"rounds"`
	Skipped  []string  `json:"skipped,omitempty"`
	Failed   []string  `json:"failed,omitempty"` // parts
	Metrics  Set       `json:"metrics"`
	Beside   *beside   `json:"beside,omitempty"`  // an older build, in the same run
	Against  *against  `json:"against,omitempty"` // another run
	Facts    []fact    `json:"facts"`
	Bars     []bar     `json:"bars"`
}

// against is how the run differs from another: of two moments, so that what else the machine
// did is in it.
type against struct {
	File     string    `json:"file"`
	Time     time.Time `json:"time"`
	Revision string    `json:"revision,omitempty"`
	Changes  []Change  `json:"changes"`
}

type machine struct {
	Kernel string `json:"kernel"`
	CPUs   int    `json:"cpus"`
	Go     string `json:"go"`
	Load   string `json:"load"` // average over 1, 5 and 15 minutes when the run began
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

func (r *report) fact(name, format string, args ...any) {
	r.Facts = append(r.Facts, fact{name, fmt.Sprintf(format, args...)})
}

func (r *report) skip(format string, args ...any) {
	r.Skipped = append(r.Skipped, fmt.Sprintf(format, args...))
}

// median is that of a series, NaN if nothing was measured.
func (r *report) median(name string) float64 { return r.percentile(name, 50) }

// percentile is the value that p hundredths of a series are no worse than, NaN if nothing was
// measured.
func (r *report) percentile(name string, p int) float64 {
	get := func() (float64, bool) { return r.Metrics.Percentile(name, p) }
	if p == 50 {
		get = func() (float64, bool) { return r.Metrics.Median(name) }
	}
	if v, ok := get(); ok {
		return v
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

// readReport reads what another run wrote; nil if file is "".
func readReport(file string) (*report, error) {
	if file == "" {
		return nil, nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var r report
	if _, err := strictjson.DecodeStored(data, &r); err != nil {
		return nil, fmt.Errorf("%s is not what -o writes: %w", file, err)
	}
	if x := r.Beside; x != nil && (x.Before == nil || x.Now == nil) {
		return nil, fmt.Errorf("%s is not what -o writes: a build of two is missing", file)
	}
	return &r, nil
}

// compare sets the run against a former one.
func (r *report) compare(former *report, file string) {
	changes := Compare(&former.Metrics, &r.Metrics)
	if former.Beside != nil && r.Beside != nil {
		for _, c := range Compare(&former.Beside.Now.Metrics, &r.Beside.Now.Metrics) {
			c.Name += ", " + beforeStep
			changes = append(changes, c)
		}
	}
	r.Against = &against{file, former.Time, former.Revision, changes}
}

// write writes the report to a file, if one is named.
func (r *report) write(file string) error {
	if file == "" {
		return nil
	}
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(data, '\n'), 0o644)
}

// print writes the report for people.
func (r *report) print(w io.Writer) error {
	fmt.Fprintf(w, "%s, revision %s, Linux %s, %d CPUs, %s, load %s, %d rounds\n", r.Time.Format("2006-01-02 15:04 MST"),
		r.Revision, r.Machine.Kernel, r.Machine.CPUs, r.Machine.Go, r.Machine.Load, r.Rounds)
	for _, s := range r.Skipped {
		fmt.Fprintf(w, "skipped: %s\n", s)
	}
	for _, s := range r.Failed {
		fmt.Fprintf(w, "FAILED: %s\n", s)
	}
	var errs []error
	if len(r.Metrics.All()) > 0 {
		fmt.Fprintln(w)
		errs = append(errs, r.Metrics.Write(w))
	}
	if x := r.Beside; x != nil {
		fmt.Fprintf(w, "\nbefore: %s in %s; now: %s in %s; by turns\n\n", x.Before.Revision, x.Before.Bin, x.Now.Revision, x.Now.Bin)
		errs = append(errs, WriteChanges(w, "before", "now", x.Changes))
	}
	if x := r.Against; x != nil {
		fmt.Fprintf(w, "\nformer: revision %s, %s, in %s: another moment of the machine\n\n", x.Revision, x.Time.Format("2006-01-02 15:04 MST"), x.File)
		errs = append(errs, WriteChanges(w, "former", "now", x.Changes))
	}
	var facts, bars [][]string
	for _, f := range r.Facts {
		facts = append(facts, []string{f.Name, f.Value})
	}
	for _, b := range r.Bars {
		sign, verdict := "<=", "ok"
		if b.Least {
			sign = ">="
		}
		if !b.OK {
			verdict = "MISSED"
		}
		bars = append(bars, []string{verdict, b.Name, measure.Figure(b.Got), fmt.Sprintf("%s %s %s", sign, measure.Figure(b.Limit), b.Unit)})
	}
	for _, rows := range [][][]string{facts, bars} {
		if len(rows) > 0 {
			fmt.Fprintln(w)
			errs = append(errs, Table(w, 0, rows))
		}
	}
	return errors.Join(errs...)
}
