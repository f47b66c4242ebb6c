package sandboxer

import (
	"testing"
	"time"
)

func TestFormatDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", time.Second: "1s", 90 * time.Second: "1m30s", 30 * time.Minute: "30m", 90 * time.Minute: "1h30m", time.Hour: "1h",
		time.Hour + time.Second: "1h0m1s", 24 * time.Hour: "1d", 36 * time.Hour: "1d12h", 720 * time.Hour: "30d", 48*time.Hour + time.Minute: "2d1m",
		1500 * time.Millisecond: "1.5s", -time.Minute: "-1m", -48 * time.Hour: "-2d",
	} {
		if got := FormatDuration(d); got != want {
			t.Errorf("FormatDuration(%v) = %s; want %s", d, got, want)
		}
	}
}
