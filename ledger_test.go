package sandboxer_test

import (
	"errors"
	"math"
	"math/big"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/sand-boxer/sandboxer"
)

func TestCreditsText(t *testing.T) {
	for _, test := range []struct {
		c    sandboxer.Credits
		want string
	}{
		{0, "0.00"},
		{1, "0.000001"},
		{-1, "-0.000001"},
		{120_000, "0.12"},
		{100_000, "0.10"},
		{123_400, "0.1234"},
		{sandboxer.Credit, "1.00"},
		{-3 * sandboxer.Credit, "-3.00"},
		{1_000_000_000_001, "1000000.000001"},
		{math.MaxInt64, "9223372036854.775807"},
		{math.MinInt64, "-9223372036854.775808"},
	} {
		if got := test.c.String(); got != test.want {
			t.Errorf("Credits(%d) = %q, want %q", int64(test.c), got, test.want)
		}
	}
}

func TestParseCredits(t *testing.T) {
	for in, want := range map[string]sandboxer.Credits{
		"0":                   0,
		"-0":                  0,
		"7":                   7_000_000,
		"0.12":                120_000,
		"00.120000":           120_000,
		"-3.5":                -3_500_000,
		"0.000001":            1,
		"999999999999.999999": 999_999_999_999_999_999,
	} {
		if got, err := sandboxer.ParseCredits(in); err != nil || got != want {
			t.Errorf("ParseCredits(%q) = %d, %v; want %d", in, int64(got), err, int64(want))
		}
	}
	for _, in := range []string{"", "-", ".", ".5", "1.", "-.5", "+1", "--1", "-+1", "1.-5", "1.+5", "1e3", "0x10", "1_000", "1,5", " 1", "1 ",
		"1.2.3", "0.0000001", "1000000000000", "９", "NaN", "Inf", "1\n", "free"} {
		got, err := sandboxer.ParseCredits(in)
		if !errors.Is(err, sandboxer.Invalid) || got != 0 {
			t.Errorf("ParseCredits(%q) = %d, %v; want an Invalid error", in, int64(got), err)
		}
	}
}

func TestCreditsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const most = 999_999_999_999_999_999 // twelve digits before the point
		c := sandboxer.Credits(rapid.Int64Range(-most, most).Draw(t, "credits"))
		if got, err := sandboxer.ParseCredits(c.String()); err != nil || got != c {
			t.Fatalf("ParseCredits(%q) = %d, %v; want %d", c.String(), int64(got), err, int64(c))
		}
	})
}

func FuzzParseCredits(f *testing.F) {
	for _, s := range []string{"0", "-3.5", "0.000001", "1.", "--1", "1_0", "999999999999.999999", "1000000000000"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		c, err := sandboxer.ParseCredits(s)
		if err != nil {
			if !errors.Is(err, sandboxer.Invalid) {
				t.Fatalf("ParseCredits(%q): %v is not Invalid", s, err)
			}
			return
		}
		// Whatever is accepted is exact.
		want, ok := new(big.Rat).SetString(s)
		if !ok {
			t.Fatalf("ParseCredits(%q) = %v, and it is not a number", s, c)
		}
		if got := big.NewRat(int64(c), int64(sandboxer.Credit)); got.Cmp(want) != 0 {
			t.Fatalf("ParseCredits(%q) = %v", s, c)
		}
		if again, err := sandboxer.ParseCredits(c.String()); err != nil || again != c {
			t.Fatalf("ParseCredits(%q) = %v, which reads back as %v, %v", s, c, again, err)
		}
	})
}

func TestQuoteFor(t *testing.T) {
	for _, test := range []struct {
		name  string
		quote sandboxer.MeterQuote
		life  time.Duration
		want  sandboxer.Credits
	}{
		{"no time", sandboxer.MeterQuote{Setup: 5, PerHour: 100}, 0, 5},
		{"negative time", sandboxer.MeterQuote{Setup: 5, PerHour: 100}, -time.Hour, 5},
		{"whole hours", sandboxer.MeterQuote{Setup: 5, PerHour: 100}, 3 * time.Hour, 305},
		{"part of an hour", sandboxer.MeterQuote{PerHour: 120_000}, 90 * time.Minute, 180_000},
		{"half, even below", sandboxer.MeterQuote{PerHour: 1}, 30 * time.Minute, 0},
		{"half, odd below", sandboxer.MeterQuote{PerHour: 1}, 90 * time.Minute, 2},
		{"half again", sandboxer.MeterQuote{PerHour: 1}, 150 * time.Minute, 2},
		{"just below half", sandboxer.MeterQuote{PerHour: 1}, 30*time.Minute - 1, 0},
		{"just above half", sandboxer.MeterQuote{PerHour: 1}, 30*time.Minute + 1, 1},
		{"an hour of a large machine park", sandboxer.MeterQuote{PerHour: 50_000 * sandboxer.Credit}, 59 * time.Minute, 49_166_666_667},
		{"more than can be told", sandboxer.MeterQuote{PerHour: math.MaxInt64}, 2 * time.Hour, math.MaxInt64},
		{"setup on top of it", sandboxer.MeterQuote{Setup: math.MaxInt64, PerHour: 1}, 2 * time.Hour, math.MaxInt64},
		{"longest life", sandboxer.MeterQuote{PerHour: math.MaxInt64}, math.MaxInt64, math.MaxInt64},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := test.quote.For(test.life); got != test.want {
				t.Errorf("For(%v) = %d, want %d", test.life, int64(got), int64(test.want))
			}
		})
	}
}

// TestQuoteForIsExact compares with arithmetic that has no bounds.
func TestQuoteForIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := sandboxer.MeterQuote{
			Setup:   sandboxer.Credits(rapid.Int64().Draw(t, "setup")),
			PerHour: sandboxer.Credits(rapid.Int64().Draw(t, "per hour")),
		}
		// Also lives that make halves: multiples of half an hour.
		life := rapid.OneOf(rapid.Int64(), rapid.Map(rapid.Int64Range(0, 1<<20), func(n int64) int64 {
			return n * int64(30*time.Minute)
		})).Draw(t, "life")

		product := new(big.Int).Mul(big.NewInt(int64(q.PerHour)), big.NewInt(max(life, 0)))
		want := new(big.Int).Add(bounded(halfEven(product, big.NewInt(int64(time.Hour)))), big.NewInt(int64(q.Setup)))
		want = bounded(want)
		if got := q.For(time.Duration(life)); int64(got) != want.Int64() {
			t.Fatalf("For = %d, want %s", int64(got), want)
		}
	})
}

func halfEven(a, b *big.Int) *big.Int {
	q, r := new(big.Int).QuoRem(a, b, new(big.Int))
	switch c := new(big.Int).Mul(r.Abs(r), big.NewInt(2)).Cmp(b); {
	case c > 0 || c == 0 && q.Bit(0) == 1:
		q.Add(q, big.NewInt(int64(a.Sign())))
	}
	return q
}

func bounded(n *big.Int) *big.Int {
	least, most := big.NewInt(math.MinInt64), big.NewInt(math.MaxInt64)
	switch {
	case n.Cmp(least) < 0:
		return least
	case n.Cmp(most) > 0:
		return most
	}
	return n
}

// TestQuoteForGrows: a longer life never costs less.
func TestQuoteForGrows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := sandboxer.MeterQuote{
			Setup:   sandboxer.Credits(rapid.Int64Range(0, math.MaxInt64).Draw(t, "setup")),
			PerHour: sandboxer.Credits(rapid.Int64Range(0, math.MaxInt64).Draw(t, "per hour")),
		}
		short := time.Duration(rapid.Int64Range(0, math.MaxInt64-1).Draw(t, "short"))
		long := short + time.Duration(rapid.Int64Range(0, math.MaxInt64-int64(short)).Draw(t, "longer by"))
		if a, b := q.For(short), q.For(long); a > b || a < q.Setup {
			t.Fatalf("%v costs %v, %v costs %v, setup alone %v", short, a, long, b, q.Setup)
		}
	})
}

func TestRated(t *testing.T) {
	for _, c := range []struct{ in, want sandboxer.MeterQuote }{
		{sandboxer.MeterQuote{Amount: 50, Duration: 30 * time.Minute}, sandboxer.MeterQuote{Amount: 50, PerHour: 100, Duration: 30 * time.Minute}},
		{sandboxer.MeterQuote{Amount: 50, Setup: 50, Duration: time.Hour}, sandboxer.MeterQuote{Amount: 50, Setup: 50, Duration: time.Hour}},
		{sandboxer.MeterQuote{Duration: time.Hour}, sandboxer.MeterQuote{Duration: time.Hour}},
		{sandboxer.MeterQuote{Amount: 50}, sandboxer.MeterQuote{Amount: 50}},
	} {
		if got := c.in.Rated(); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%+v becomes %+v; want %+v", c.in, got, c.want)
		}
	}
}
