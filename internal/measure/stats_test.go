package measure

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// upTo returns 1 to n in some order.
func upTo(n int) []float64 {
	out := make([]float64, n)
	for i := range out {
		out[i] = float64(i + 1)
	}
	rand.Shuffle(n, func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

func TestDescribe(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, tt := range []struct {
		name     string
		values   []float64
		want     Percentiles[float64]
		spread   float64
		outliers int
	}{
		{"nothing", nil, Percentiles[float64]{}, 0, 0},
		{"one", []float64{7}, Percentiles[float64]{1, 7, 7, 7, 7, 7}, 0, 0},
		{"two", []float64{4, 1}, Percentiles[float64]{2, 1, 2.5, 4, 4, 4}, 3, 0},
		{"three", []float64{9, 1, 4}, Percentiles[float64]{3, 1, 4, 9, 9, 9}, 8, 0},
		{"ties", []float64{5, 5, 5, 5}, Percentiles[float64]{4, 5, 5, 5, 5, 5}, 0, 0},
		{"ties and one", []float64{5, 5, 6, 5, 5}, Percentiles[float64]{5, 5, 5, 6, 6, 6}, 0, 1},
		// 0.95 of 20 is 19 exactly: the 19th, not the 20th.
		{"20", upTo(20), Percentiles[float64]{20, 1, 10.5, 19, 20, 20}, 10, 0},
		{"100", upTo(100), Percentiles[float64]{100, 1, 50.5, 95, 99, 100}, 50, 0},
		{"below and above", append(upTo(19), -100, 100), Percentiles[float64]{21, -100, 10, 19, 100, 100}, 10, 2},
		{"what is no number", []float64{nan, 3, inf, 1, -inf}, Percentiles[float64]{2, 1, 2, 3, 3, 3}, 2, 0},
		{"only what is no number", []float64{nan, inf}, Percentiles[float64]{}, 0, 0},
		{"the largest", []float64{math.MaxFloat64, math.MaxFloat64}, Percentiles[float64]{2, math.MaxFloat64, math.MaxFloat64, math.MaxFloat64, math.MaxFloat64, math.MaxFloat64}, 0, 0},
		{"the smallest", []float64{5e-324, 5e-324}, Percentiles[float64]{2, 5e-324, 5e-324, 5e-324, 5e-324, 5e-324}, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := slices.Clone(tt.values)
			if got := Describe(tt.values); got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
			if got := Spread(tt.values); got != tt.spread {
				t.Errorf("spread %v, want %v", got, tt.spread)
			}
			if got := Outliers(tt.values); got != tt.outliers {
				t.Errorf("%d outliers, want %d", got, tt.outliers)
			}
			if !slices.EqualFunc(before, tt.values, func(a, b float64) bool { return math.Float64bits(a) == math.Float64bits(b) }) {
				t.Error("the values were moved")
			}
		})
	}
}

func TestTrim(t *testing.T) {
	for _, tt := range []struct {
		n        int
		min, max float64
	}{{1, 1, 1}, {19, 1, 19}, {20, 2, 19}, {100, 6, 95}, {1000, 51, 950}} {
		values := upTo(tt.n)
		raw, got := Describe(values), Describe(Trim(values, 0.05))
		if got.Min != tt.min || got.Max != tt.max || got.Median != raw.Median {
			t.Errorf("of 1 to %d: %+v; want %v to %v and the median %v", tt.n, got, tt.min, tt.max, raw.Median)
		}
	}
	// The trap of it: the p95 and p99 of what is left of 100 are the p91 and p95 of all.
	values := upTo(100)
	all, trimmed := Sorted(values), Describe(Trim(values, 0.05))
	if trimmed.P95 != NearestRank(all, 91) || trimmed.P99 != NearestRank(all, 95) {
		t.Errorf("trimmed p95 %v and p99 %v; want the raw p91 and p95", trimmed.P95, trimmed.P99)
	}
}

// TestMedianRank: the ranks of tables of the confidence interval of a median (95 %).
func TestMedianRank(t *testing.T) {
	for n, want := range map[int]int{0: 0, 1: 0, 2: 0, 3: 0, 5: 0, 6: 1, 8: 1, 9: 2, 10: 2, 12: 3, 15: 4, 20: 6, 25: 8, 30: 10, 50: 18, 100: 40} {
		if got := medianRank(n); got != want {
			t.Errorf("of %d: %d, want %d", n, got, want)
		}
	}
	if n := MinForInterval; medianRank(n) == 0 || medianRank(n-1) != 0 {
		t.Errorf("%d is not the least", n)
	}
	// Half of 10,000 less 1.96 standard deviations, which are 50.
	if got := medianRank(MaxRounds); got < 4900 || got > 4904 {
		t.Errorf("of %d: %d", MaxRounds, got)
	}
}

func TestRatioOf(t *testing.T) {
	ten := func(f float64) []float64 { // of 10, the median lies between the second and the ninth
		out := upTo(10)
		for i := range out {
			out[i] = f * (100 + out[i])
		}
		return out
	}
	down, up := math.Log(105.5/102), math.Log(109/105.5)
	low, high := math.Exp(math.Log(2)-math.Hypot(down, up)), math.Exp(math.Log(2)+math.Hypot(up, down))
	same := slices.Repeat([]float64{4}, 10)
	for _, tt := range []struct {
		name string
		a, b []float64
		want Ratio
	}{
		{"nothing", nil, nil, Ratio{}},
		{"one side", upTo(9), nil, Ratio{}},
		{"one each", []float64{2}, []float64{3}, Ratio{Value: 1.5}},
		{"two and three", []float64{2, 4}, []float64{6, 5, 9}, Ratio{Value: 2}},
		{"five are too few", upTo(5), upTo(5), Ratio{Value: 1}},
		{"no spread", same, slices.Repeat([]float64{6}, 6), Ratio{1.5, 1.5, 1.5}},
		{"twice", ten(1), ten(2), Ratio{2, thousandth(low), thousandth(high)}},
		{"a median of 0", make([]float64, 10), same, Ratio{}},
		{"to a median of 0", same, make([]float64, 10), Ratio{}},
		{"bounded by 0", append(make([]float64, 4), 1, 1, 1, 1, 1, 1), same, Ratio{Value: 4}},
		{"less than nothing", slices.Repeat([]float64{-4}, 10), same, Ratio{}},
		{"what is no number", append(slices.Clone(same), math.NaN(), math.Inf(1)), same, Ratio{1, 1, 1}},
		{"too large to tell", slices.Repeat([]float64{1e-200}, 9), slices.Repeat([]float64{1e200}, 9), Ratio{}},
	} {
		if got := RatioOf(tt.a, tt.b); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
	}
}

// TestRatioIsCovered: of equal distributions, whose ratio is 1, at least 95 of 100 intervals
// hold it, and those of distributions that differ by a tenth seldom do.
func TestRatioIsCovered(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	draw := func(f float64) []float64 {
		out := make([]float64, 50)
		for i := range out {
			out[i] = f * (10 + r.ExpFloat64()) // a tail, as times have
		}
		return out
	}
	const runs = 2000
	held, missed := 0, 0
	for range runs {
		if x := RatioOf(draw(1), draw(1)); x.Low <= 1 && 1 <= x.High {
			held++
		}
		if x := RatioOf(draw(1), draw(1.1)); x.Low <= 1 && 1 <= x.High {
			missed++
		}
	}
	if held < runs*95/100 || held == runs {
		t.Errorf("%d of %d hold the ratio", held, runs)
	}
	if missed > runs/100 {
		t.Errorf("%d of %d do not see a tenth", missed, runs)
	}
}

func TestTimes(t *testing.T) {
	for _, tt := range []struct{ a, b, want float64 }{
		{10, 20, 2}, {20, 10, 0.5}, {3, 1, 0.333}, {0, 5, 0}, {5, 0, 0}, {-1, 5, 0}, {math.NaN(), 1, 0}, {1, math.NaN(), 0},
		{1, math.Inf(1), 0}, {1e-300, 1e300, 0}, {1, math.MaxFloat64, math.MaxFloat64},
	} {
		if got := Times(tt.a, tt.b); got != tt.want {
			t.Errorf("from %v to %v: %v, want %v", tt.a, tt.b, got, tt.want)
		}
	}
}

func TestFigure(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 50: "50", 260: "260", 0.141: "0.141", 0.0004: "0.000", 1.5: "1.50", 9.876: "9.88", 54.83: "54.8", 10455.4: "10455", 1e7: "10000000", -2.5: "-2.50"} {
		if got := Figure(v); got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
}

// properties holds what is true of any values.
func properties(t *testing.T, a, b []float64) {
	t.Helper()
	d := Describe(a)
	order := []float64{d.Min, d.Median, d.P95, d.P99, d.Max}
	if !slices.IsSorted(order) {
		t.Errorf("%v: percentiles fall: %+v", a, d)
	}
	if s := Sorted(a); len(s) > 0 {
		var ranks []float64
		for p := 0; p <= 100; p++ {
			ranks = append(ranks, NearestRank(s, p))
		}
		if !slices.IsSorted(ranks) || ranks[0] != d.Min || ranks[100] != d.Max || ranks[95] != d.P95 {
			t.Errorf("%v: ranks %v", a, ranks)
		}
	}
	trimmed, r, back := Describe(Trim(a, 0.05)), RatioOf(a, b), RatioOf(b, a)
	if trimmed.Median != d.Median || trimmed.Max > d.Max || trimmed.Min < d.Min {
		t.Errorf("%v: trimmed %+v of %+v", a, trimmed, d)
	}
	if r.High > 0 && !(r.Low <= r.Value && r.Value <= r.High) || r.Low < 0 || r.Value < 0 {
		t.Errorf("%v and %v: %+v", a, b, r)
	}
	if 0.01 < r.Value && r.Value < 100 && math.Abs(r.Value*back.Value-1) > 0.11 {
		t.Errorf("%v and %v: %+v and back %+v", a, b, r, back)
	}
	for _, v := range append(order, Spread(a), trimmed.P95, r.Value, r.Low, r.High) {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			t.Errorf("%v and %v: %v is no number", a, b, v)
		}
	}
	if n := Outliers(a); n < 0 || n > d.N/2 {
		t.Errorf("%v: %d outliers", a, n)
	}
	// The order in which samples came does not matter.
	ra, rb := slices.Clone(a), slices.Clone(b)
	slices.Reverse(ra)
	rand.New(rand.NewPCG(5, 6)).Shuffle(len(rb), func(i, j int) { rb[i], rb[j] = rb[j], rb[i] })
	if Describe(ra) != d || Spread(ra) != Spread(a) || Outliers(ra) != Outliers(a) || RatioOf(ra, rb) != r {
		t.Errorf("%v and %v: another order is told otherwise", a, b)
	}
}

func TestProperties(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 3000 {
		draw := func() []float64 {
			out := make([]float64, r.IntN(40))
			for i := range out {
				switch r.IntN(12) {
				case 0:
					out[i] = math.NaN()
				case 1:
					out[i] = math.Inf(1 - 2*r.IntN(2))
				case 2:
					out[i] = math.Float64frombits(r.Uint64()) // anything
				case 3, 4, 5:
					out[i] = float64(r.IntN(4)) // ties, and zero
				default:
					out[i] = 10 * r.ExpFloat64()
				}
			}
			return out
		}
		properties(t, draw(), draw())
	}
}

func FuzzStats(f *testing.F) {
	f.Add([]byte{1, 2, 3}, uint8(2))
	f.Fuzz(func(t *testing.T, data []byte, cut uint8) {
		var all []float64
		for len(data) >= 8 {
			var bits uint64
			for _, b := range data[:8] {
				bits = bits<<8 | uint64(b)
			}
			all, data = append(all, math.Float64frombits(bits)), data[8:]
		}
		k := min(int(cut), len(all))
		properties(t, all[:k], all[k:])
	})
}
