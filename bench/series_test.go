package main

import (
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestSet(t *testing.T) {
	var s Set
	s.Took("exec", 1500*time.Microsecond)
	s.Rate("output", "MB/s", 300)
	for _, v := range []float64{100, 200, math.Inf(1), math.NaN()} {
		s.Rate("output", "MB/s", v)
	}
	s.Took("exec", 2500*time.Microsecond)
	s.Spent("exec", 4*time.Millisecond)
	s.Spent("exec", 5*time.Millisecond)
	var names []string
	for _, x := range s.All() {
		names = append(names, x.Name)
	}
	if !slices.Equal(names, []string{"exec", "output"}) {
		t.Errorf("series %q", names)
	}
	cpu := 4.5
	if got, want := s.Series("exec", "ms").Figures(), (Figures{N: 2, P50: 2, P95: 2.5, Best: 1.5, Spread: 1, CPUms: &cpu}); !reflect.DeepEqual(got, want) {
		t.Errorf("exec: %+v", got)
	}
	// Of a rate the bad end is the low one.
	if got, want := s.Series("output", "MB/s").Figures(), (Figures{N: 3, P50: 200, P95: 100, Best: 300, Spread: 200, Invalid: 2}); !reflect.DeepEqual(got, want) {
		t.Errorf("output: %+v", got)
	}
	if v, ok := s.Median("exec"); v != 2 || !ok {
		t.Errorf("median %v, %v", v, ok)
	}
	if v, ok := s.Percentile("output", 34); v != 200 || !ok {
		t.Errorf("percentile %v, %v", v, ok)
	}
	s.Series("empty", "ms")
	for _, name := range []string{"empty", "nonesuch"} {
		_, median := s.Median(name)
		if _, ok := s.Percentile(name, 95); ok || median {
			t.Errorf("%s has figures", name)
		}
	}
	if got := s.Series("empty", "ms").Figures(); got != (Figures{}) {
		t.Errorf("empty: %+v", got)
	}
}

// TestForm: what is written has the figures by the names that they always had, and is read
// back with its samples.
func TestForm(t *testing.T) {
	var s Set
	if data, err := json.Marshal(&s); err != nil || string(data) != "[]" {
		t.Errorf("nothing: %s, %v", data, err)
	}
	s.Took("exec", 2*time.Millisecond)
	s.Spent("exec", time.Millisecond)
	s.Rate("output", "MB/s", 7)
	s.Rate("output", "MB/s", math.Inf(1))
	data, err := json.Marshal(&s)
	want := `[{"name":"exec","unit":"ms","n":1,"p50":2,"p95":2,"best":2,"iqr":0,"cpu_ms":1,"samples":[2]},` +
		`{"name":"output","unit":"MB/s","more_is_better":true,"n":1,"p50":7,"p95":7,"best":7,"iqr":0,"invalid":1,"samples":[7]}]`
	if err != nil || string(data) != want {
		t.Fatalf("%s, %v\nwant %s", data, err, want)
	}
	var back Set
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatal(err)
	}
	for i, x := range back.All() {
		if y := s.All()[i]; x.Name != y.Name || x.Unit != y.Unit || x.More != y.More || !slices.Equal(x.Samples, y.Samples) || x.Figures().Invalid != y.Figures().Invalid {
			t.Errorf("read back %+v, want %+v", x, y)
		}
	}
	// As it was written before samples were.
	old := `[{"name":"exec","unit":"ms","n":50,"p50":2,"p95":3,"best":1}]`
	if err := json.Unmarshal([]byte(old), &back); err == nil || !strings.Contains(err.Error(), `"exec" has no samples`) {
		t.Errorf("of an older bench: %v", err)
	}
}

func TestCompare(t *testing.T) {
	var a, b Set
	for i := range 10 {
		a.Took("exec", time.Duration(100+i)*time.Millisecond)
		b.Took("exec", time.Duration(200+2*i)*time.Millisecond)
		a.Rate("output", "MB/s", 100)
	}
	b.Rate("output", "MB/s", 50)
	a.Took("only in a", time.Second)
	b.Took("only in b", time.Second)
	a.Add("another unit", "MB", 1)
	b.Add("another unit", "GB", 1)
	a.Series("nothing", "ms")
	b.Series("nothing", "ms")
	got := Compare(&a, &b)
	if len(got) != 2 || got[0].Name != "exec" || got[0].A != 104.5 || got[0].B != 209 || got[0].Value != 2 || got[0].Low == 0 || got[0].NA != 10 || got[0].More ||
		got[1].Name != "output" || got[1].Value != 0.5 || got[1].NB != 1 || got[1].High != 0 || !got[1].More {
		t.Errorf("%+v", got)
	}
	var text strings.Builder
	if err := WriteChanges(&text, "before", "now", got); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"  before  now", "10     104  209", "2.000", " exec\n", "10/1", "0.500", " output (more is better)\n"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
}

func TestWrite(t *testing.T) {
	var s Set
	s.Took("exec", 1500*time.Microsecond)
	s.Rate("output", "MB/s", math.NaN())
	var text strings.Builder
	if err := s.Write(&text); err != nil {
		t.Fatal(err)
	}
	want := "  n   p50   p95  best  IQR  out  CPU ms  unit \n" +
		"  1  1.50  1.50  1.50    0    0       -    ms exec\n" +
		"  0     0     0     0    0    0       -  MB/s output (and 1 that are no numbers)\n"
	if text.String() != want {
		t.Errorf("got\n%s\nwant\n%s", text.String(), want)
	}
}

// Clients that are measured side by side add to one set.
func TestSetTakesSamplesAtOnce(t *testing.T) {
	var s Set
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				s.Took("turn", time.Millisecond)
				s.Rate("rate", "1/s", 1)
				s.Spent("turn", time.Millisecond)
			}
		})
	}
	wg.Wait()
	for _, x := range s.All() {
		if len(x.Samples) != 800 {
			t.Errorf("%s has %d samples; want 800", x.Name, len(x.Samples))
		}
	}
	if len(s.All()) != 2 {
		t.Errorf("%d series; want 2", len(s.All()))
	}
}
