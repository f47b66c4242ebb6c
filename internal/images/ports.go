package images

import (
	"slices"
	"strconv"
	"strings"
)

// Ports are the TCP ports that an image says it listens on, by the ExposedPorts of its configuration
// (https://github.com/opencontainers/image-spec/blob/main/config.md), in order. Invalid ports are skipped.
func Ports(exposed map[string]struct{}) []int {
	var out []int
	for p := range exposed {
		number, proto, _ := strings.Cut(p, "/")
		n, err := strconv.Atoi(number)
		if err == nil && n > 0 && n < 1<<16 && (proto == "" || proto == "tcp") {
			out = append(out, n)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
