package cli

import (
	"bytes"
	stdlog "log"
	"log/slog"
	"strings"
	"testing"
)

// What a library says by itself is in the log of who looks for faults, and there as data.
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
