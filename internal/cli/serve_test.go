package cli

import (
	"bytes"
	"context"
	stdlog "log"
	"log/slog"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A server that gets the signal to stop ends in time, whatever hangs; one that has stopped, or
// got no signal, is left alone.
func TestEndsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, tt := range []struct {
			told    bool
			takes   time.Duration
			endedIn time.Duration
		}{{true, time.Hour, stopsWithin}, {true, stopsWithin / 2, 0}, {false, time.Hour, 0}} {
			ctx, tell := context.WithCancel(t.Context())
			var endedIn time.Duration
			began := time.Now()
			stopped := endAfter(ctx, stopsWithin, func() { endedIn = time.Since(began) })
			if tt.told {
				tell()
			}
			time.Sleep(tt.takes)
			stopped()
			tell()
			synctest.Wait()
			if time.Sleep(time.Hour); endedIn != tt.endedIn {
				t.Errorf("told to stop: %v, and stopping for %v: ended after %v; want %v", tt.told, tt.takes, endedIn, tt.endedIn)
			}
		}
	})
}

// A library's own messages are in the log at the level of debugging, and there as data.
func TestLibrariesAreQuiet(t *testing.T) {
	w, flags := stdlog.Writer(), stdlog.Flags()
	t.Cleanup(func() { stdlog.SetOutput(w); stdlog.SetFlags(flags) })
	for level, want := range map[slog.Level]string{slog.LevelInfo: "", slog.LevelDebug: "level=DEBUG msg=\"an answer: \\x1b]0;\"\n"} {
		var out bytes.Buffer
		quietLibraries(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: level})))
		stdlog.Print("an answer: \x1b]0;")
		if _, got, _ := strings.Cut(out.String(), " "); got != want {
			t.Errorf("at level %s: %q; want %q", level, got, want)
		}
	}
}

// The time in which a server stops is the one that docs/reference/api.md has.
func TestStopsAsDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/api.md")
	if err != nil {
		t.Fatal(err)
	}
	if stopsWithin >= 5*time.Second || !strings.Contains(string(page), "A server that is stopped ends open requests after 2 seconds and exits within 5.") {
		t.Errorf("it stops within %s", stopsWithin)
	}
}
