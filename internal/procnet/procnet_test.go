package procnet

import (
	"slices"
	"strings"
	"testing"
)

func TestListeners(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 0100007F:1F91 0100007F:0050 01 00000000:00000000 00:00000000 00000000     0        0 2
   2: 0B00007F:B3C5 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 3
  sl  local_address remote_address st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   3: 00000000000000000000000000000000:0BB8 00000000000000000000000000000000:0000 0A 00000000:00000000
   4: 00000000000000000000000001000000:0BB9 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4
   5: 0100000A:0050 00000000:0000 0A
   6: junk 00000000:0000 0A
   7: 0100000A:10050 00000000:0000 0A
`
	want := []Listener{{8080, true, 1}, {3000, false, 0}, {3001, true, 4}, {80, false, 0}}
	if got, known := Listeners(strings.NewReader(table)); !known || !slices.Equal(got, want) {
		t.Errorf("Listeners = %v, %t; want %v", got, known, want)
	}
	if got, known := Listeners(strings.NewReader("not such a table\n")); known || got != nil {
		t.Errorf("of no table: %v, %t", got, known)
	}
	long := strings.Repeat("   5: 0100000A:0050 00000000:0000 0A\n", MaxBytes/20)
	if got, _ := Listeners(strings.NewReader(table + long)); len(got) > MaxBytes/36 {
		t.Errorf("%d sockets were read", len(got))
	}
	if _, known := Listeners(strings.NewReader(table + strings.Repeat("x", 1<<17))); known {
		t.Error("a line without an end is taken for a table")
	}
}
