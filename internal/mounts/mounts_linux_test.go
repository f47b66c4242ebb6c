package mounts

import (
	"fmt"
	"os"
	"testing"
)

// TestIDMaps: of what is mounted, everybody inside has exactly one owner on this machine, and
// the other way round.
func TestIDMaps(t *testing.T) {
	const base = 0x7000_0000
	for _, c := range []struct{ owner, user uint32 }{{0, 0}, {0, 1000}, {1000, 0}, {1000, 1000}, {65534, 65535}, {IDShift, 0}, {IDShift, 5}, {IDShift + 7, 5}, {IDShift + 5, 7},
		{IDShift + IDCount - 1, 0}, {IDShift + IDCount, 0}, {IDShift - 1, IDCount - 1}, {IDShift + 4, 5}} {
		t.Run(fmt.Sprintf("%d as %d", c.owner, c.user), func(t *testing.T) {
			inside, there := map[uint32]uint32{}, map[uint32]uint32{}
			for _, m := range idMaps(c.owner, c.user, base) {
				for i := range uint32(m.Size) {
					in, on := uint32(m.HostID)-base+i, uint32(m.ContainerID)+i
					if _, ok := inside[in]; ok || in >= IDCount {
						t.Fatalf("%d inside is mapped twice, or is no ID of the sandbox", in)
					}
					if _, ok := there[on]; ok {
						t.Fatalf("%d on this machine is mapped twice", on)
					}
					inside[in], there[on] = on, in
				}
			}
			if inside[c.user] != c.owner || len(inside) != IDCount {
				t.Errorf("the user inside is %d; %d IDs are mapped", inside[c.user], len(inside))
			}
			for on := range there {
				if on != c.owner && (on < IDShift || on >= IDShift+IDCount) {
					t.Fatalf("somebody inside is %d on this machine", on)
				}
			}
			space, err := IDSpace(idMaps(c.owner, c.user, base), idMaps(c.user, c.owner%IDCount, base))
			if os.Geteuid() == 0 && err != nil {
				t.Error(err)
			} else if err == nil {
				space.Close()
			}
		})
	}
}
