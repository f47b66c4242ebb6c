package cli

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// givePagesBack releases the pages of the program's own file. Most of them were needed
// only to start it, or for a burst. When they are needed again, they come back, usually from
// the page cache.
func givePagesBack() {
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return
	}
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return
	}
	defer f.Close()
	var start, end uint64
	ours := false
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		field := strings.Fields(lines.Text())
		if len(field) == 6 && strings.Contains(field[0], "-") {
			_, err := fmt.Sscanf(field[0], "%x-%x", &start, &end)
			ours = err == nil && field[5] == self && !strings.Contains(field[1], "w") && strings.HasSuffix(field[1], "p")
		}
		// Pages that were written to once, such as addresses that the loader put in, exist only in memory.
		if ours && len(field) == 3 && field[0] == "Anonymous:" && field[1] == "0" {
			_, _, _ = unix.Syscall(unix.SYS_MADVISE, uintptr(start), uintptr(end-start), unix.MADV_DONTNEED)
		}
	}
}

// pagesOfFiles returns how many bytes of files this process has in its memory; 0 if that
// is not known.
func pagesOfFiles() uint64 {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var size, resident, shared uint64 // in pages
	if _, err := fmt.Sscan(string(b), &size, &resident, &shared); err != nil {
		return 0
	}
	return shared * uint64(os.Getpagesize())
}
