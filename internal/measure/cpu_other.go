//go:build !unix

package measure

import "time"

// CPU is the processor time of this process so far, or less than 0 if it is not
// known.
func CPU() time.Duration { return -1 }
