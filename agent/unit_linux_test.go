package agent

import (
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

func TestUserDB(t *testing.T) {
	dir := t.TempDir()
	db := userDB{filepath.Join(dir, "passwd"), filepath.Join(dir, "group")}
	if u, ok := db.lookup("root"); !ok || u.uid != 0 || u.home != "/root" {
		t.Errorf("root without files: %+v, %v", u, ok)
	}
	if err := os.WriteFile(db.passwd, []byte("# comment\n\nbroken\nroot:x:0:0:root:/root:/bin/sh\nann:x:1000:100:Ann:/home/ann:/bin/sh\n"+
		"1000:x:7:7::/odd:/bin/sh\nbad:x:minus:1::/:\nnohome:x:8:8:::\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(db.group, []byte("root:x:0:\nusers:x:100:\nwheel:x:10:ann,bob\ndocker:x:999:bob,ann\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		in   string
		want user
		ok   bool
	}{
		{"ann", user{"ann", 1000, 100, []uint32{10, 999}, "/home/ann"}, true},
		{"1000", user{"1000", 7, 7, nil, "/odd"}, true}, // a name that is a number
		{"0", user{"root", 0, 0, nil, "/root"}, true},
		{"4711", user{"4711", 4711, 4711, nil, "/"}, true},
		{"ann:wheel", user{"ann", 1000, 10, []uint32{10, 999}, "/home/ann"}, true},
		{"ann:5", user{"ann", 1000, 5, []uint32{10, 999}, "/home/ann"}, true},
		{"4711:5", user{"4711", 4711, 5, nil, "/"}, true},
		{"nohome", user{"nohome", 8, 8, nil, "/"}, true},
		{"ann:nothing", user{}, false},
		{"nobody-here", user{}, false},
		{"bad", user{}, false},
		{"", user{}, false},
		{"-1", user{}, false},
		{"4294967296", user{}, false},
	} {
		if got, ok := db.lookup(tt.in); ok != tt.ok || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("lookup(%q) = %+v, %v; want %+v, %v", tt.in, got, ok, tt.want, tt.ok)
		}
	}
	if db.userName(1000) != "ann" || db.userName(12) != "12" || db.groupName(999) != "docker" {
		t.Error("names of numbers")
	}
}

func TestParseStat(t *testing.T) {
	line := "S 3 4 5 34816 4 4194304 1 2 3 4 60 7 8 9 20 0 1 0 100 1000000 250 18446744073709551615 1 1"
	got, ok := parseStat(12, strings.Fields(line))
	want := procStat{pid: 12, parent: 3, group: 4, session: 5, ticks: 67, pages: 250}
	if !ok || got != want {
		t.Errorf("%+v, %v; want %+v", got, ok, want)
	}
	for _, bad := range []string{"", "12", "Z 1"} {
		if _, ok := parseStat(12, strings.Fields(bad)); ok {
			t.Errorf("%q was read", bad)
		}
	}
	f, err := procs.Stat(os.Getpid())
	if s, ok := parseStat(os.Getpid(), f); err != nil || !ok || s.dead || s.parent != os.Getppid() || s.group != unix.Getpgrp() {
		t.Errorf("this process: %+v, %v", s, ok)
	}
}

func TestExitOf(t *testing.T) {
	for _, tt := range []struct {
		code   int
		exited bool
		status string
		want   sandboxer.Exit
	}{
		{0, true, "exit status 0", sandboxer.Exit{}},
		{3, true, "exit status 3", sandboxer.Exit{Code: 3}},
		{-1, false, "signal: killed", sandboxer.Exit{Code: 137, Signal: "KILL"}},
		{-1, false, "signal: aborted (core dumped)", sandboxer.Exit{Code: 134, Signal: "ABRT"}},
		{-1, false, "signal: signal 40", sandboxer.Exit{Code: 168, Signal: "RTMIN+6"}},
		{-1, false, "signal: unheard of", sandboxer.Exit{Code: 255}},
		{-1, false, "", sandboxer.Exit{Code: 255}},
		{1, false, "", sandboxer.Exit{Code: 1}},
	} {
		if got := exitOf(tt.code, tt.exited, tt.status); got != tt.want {
			t.Errorf("exitOf(%d, %v, %q) = %+v; want %+v", tt.code, tt.exited, tt.status, got, tt.want)
		}
	}
	for n := 1; n < 32; n++ {
		if got := exitOf(-1, false, signalStatus+signalText(n)); got.Code != 128+n || got.Signal != signals[n].name {
			t.Errorf("signal %d comes back as %+v", n, got)
		}
	}
}

func FuzzParseMode(f *testing.F) {
	for _, m := range []fs.FileMode{0o644, fs.ModeDir | 0o755, fs.ModeSymlink | 0o777, fs.ModeSetuid | fs.ModeSticky | 0o4,
		fs.ModeDevice | fs.ModeCharDevice | 0o600, fs.ModeNamedPipe, fs.ModeSocket | 0o700, fs.ModeIrregular} {
		f.Add(uint32(m), m.String())
	}
	f.Fuzz(func(t *testing.T, bits uint32, text string) {
		const known = fs.ModeType | fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky
		m := fs.FileMode(bits) & known
		if got := parseMode(m.String(), 0); got != m {
			t.Errorf("%v comes back as %v", m, got)
		}
		if got := goMode(unixMode(m)); got != m&(fs.ModePerm|fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky) {
			t.Errorf("%v comes back as %v", m, got)
		}
		parseMode(text, bits)
	})
}

func TestEncodings(t *testing.T) {
	for _, tt := range []struct {
		in            string
		packed, plain bool
	}{
		{"", false, true}, {"identity", false, true}, {"gzip", true, true}, {"gzip, deflate", true, true},
		{"gzip;q=0", false, true}, {"gzip;q=0.5, identity;q=0", true, false}, {"identity;q=0", false, false}, {"br, *;q=0", false, false}, {"GZIP", true, true},
	} {
		if packed, plain := encodings([]string{tt.in}); packed != tt.packed || plain != tt.plain {
			t.Errorf("encodings(%q) = %v, %v", tt.in, packed, plain)
		}
	}
}

func TestPacer(t *testing.T) {
	var p pacer
	now := time.Unix(0, 0)
	for range 100 { // 8 KiB every 2 ms: lively, not bulk
		now = now.Add(2 * time.Millisecond)
		if p.wants(8<<10, now) || p.bulk {
			t.Fatal("slow output is taken for bulk")
		}
	}
	grew := 0
	for range 40 {
		now = now.Add(10 * time.Microsecond)
		if p.wants(8<<10, now) {
			grew++
		}
		if p.bulk {
			break
		}
	}
	if !p.bulk || grew != 1 {
		t.Fatalf("bulk %v, the pipe grew %d times", p.bulk, grew)
	}
	if p.wants(256<<10, now); !p.bulk {
		t.Error("a large read ends bulk")
	}
	if p.wants(100, now); p.bulk {
		t.Error("a small read does not end bulk")
	}
}

// The end of a process is not reported while its child processes are being killed.
func TestEndAfterTheKill(t *testing.T) {
	p := &process{pid: 1 << 30, t: newTable(1 << 10), done: make(chan struct{})}
	p.killing.RLock()
	close(p.done) // its leader is dead
	finished := make(chan struct{})
	go func() { p.finish(nil); close(finished) }()
	select {
	case <-finished:
		t.Error("it has ended, and what it started may not be dead yet")
	case <-time.After(5 * quietAfterExit):
	}
	p.killing.RUnlock()
	<-finished
}
