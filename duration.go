package sandboxer

import (
	"fmt"
	"strings"
	"time"
)

// FormatDuration writes d in the form of profiles and flags: 30m, 1h30m, 2d, 1d12h instead of 36h0m0s.
func FormatDuration(d time.Duration) string {
	const day = 24 * time.Hour
	if d <= -day {
		return "-" + FormatDuration(-d)
	}
	days := ""
	if d >= day {
		days = fmt.Sprintf("%dd", d/day)
		if d %= day; d == 0 {
			return days
		}
	}
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-2]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-2]
	}
	return days + s
}
