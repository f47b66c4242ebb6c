package images

import (
	"slices"
	"testing"
)

func TestPorts(t *testing.T) {
	exposed := map[string]struct{}{"8080/tcp": {}, "80": {}, "80/tcp": {}, "53/udp": {}, "0/tcp": {}, "65536": {}, "-1": {}, "http": {}}
	if got := Ports(exposed); !slices.Equal(got, []int{80, 8080}) {
		t.Errorf("%v", got)
	}
}
