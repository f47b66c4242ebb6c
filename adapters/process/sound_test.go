package process

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func TestAbsurdExits(t *testing.T) {
	for _, x := range []sandboxer.Exit{{}, {Code: 255}, {Code: 137, Signal: "KILL"}, {Code: 143, Signal: "SIGTERM"}, {Code: 162, Signal: "RTMIN+3"}} {
		if err := sound(x); err != nil {
			t.Errorf("%+v: %v", x, err)
		}
	}
	for _, x := range []sandboxer.Exit{{Code: -1}, {Code: 256}, {Code: 1 << 40}, {Code: 1, Signal: "NONE"}, {Code: 1, Signal: strings.Repeat("K", 1<<20)}} {
		if err := sound(x); sandboxer.KindOf(err) != sandboxer.Failed || len(err.Error()) > 200 {
			t.Errorf("%+.20v: %v", x.Code, err)
		}
	}
}

func TestAbsurdStats(t *testing.T) {
	s := sandboxer.Stats{MemoryBytes: 1 << 50, RxBytes: -1 << 63, TxBytes: -1, CPU: -7}
	if err := soundStats(&s); err != nil || s.RxBytes != -1 || s.TxBytes != -1 || s.CPU != -1 || s.MemoryBytes != 1<<50 {
		t.Errorf("%+v, %v", s, err)
	}
	if err := soundStats(&sandboxer.Stats{PIDs: 1 << 62}); sandboxer.KindOf(err) != sandboxer.Failed {
		t.Errorf("4e18 processes: %v", err)
	}
}

// TestLogBounded: an extension's output is bounded in bytes, and omissions are reported.
func TestLogBounded(t *testing.T) {
	var out bytes.Buffer
	l := newRateLog(slog.New(slog.NewTextHandler(&out, nil)))
	line := strings.Repeat("x", maxStderr)
	for range 50 { // fewer than the lines of a second
		l.say(slog.LevelInfo, "output of the extension", len(line), func() []any { return []any{"line", line} })
	}
	l.mu.Lock()
	lost := l.lost
	l.second = l.second.Add(-2 * time.Second)
	l.mu.Unlock()
	if lost == 0 || out.Len() > 40*maxLogBytes/2 {
		t.Errorf("%d bytes are logged, %d left out", out.Len(), lost)
	}
	l.say(slog.LevelInfo, "more", 4, func() []any { return nil })
	if !strings.Contains(out.String(), "lines were dropped") || !strings.Contains(out.String(), "bytes=") {
		t.Errorf("nothing tells what was left out: %.300q", out.String()[max(0, out.Len()-300):])
	}
}

// TestSearchPath: a script finds sandboxer, its interpreter, where the server was started by its path.
func TestSearchPath(t *testing.T) {
	for _, c := range [][3]string{
		{"/usr/bin:/bin", "/opt/sandboxer", "/usr/bin:/bin:/opt"},
		{"/usr/bin:/opt", "/opt/sandboxer", "/usr/bin:/opt"},
		{"", "/opt/sandboxer", "/opt"},
		{"/usr/bin", "/tmp/process.test", "/usr/bin"},
	} {
		if got := searchPath(c[0], c[1]); got != c[2] {
			t.Errorf("the PATH %q of %s becomes %q; want %q", c[0], c[1], got, c[2])
		}
	}
}
