package cli

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

var progressModes = []string{"auto", "plain", "json", "none"}

// progress shows the progress of a command on stderr: one line that is redrawn on a
// terminal, lines with the time elsewhere, the events themselves as JSON lines on
// request. Its methods may be called after stop, and then print plain lines.
type progress struct {
	io    *streams
	mode  string // live, plain, json, none
	begin time.Time

	mu    sync.Mutex
	line  string // what the live line shows
	since time.Time
	quit  chan struct{}
	long  string // the long step that the last plain line was about
	tenth int64  // and how far it was
	ended chan struct{}
}

func (f *factory) progress() *progress {
	p := &progress{io: f.io, mode: "auto", begin: time.Now()}
	if s, err := f.settings(); err == nil {
		p.mode = s.get("progress")
	}
	if f.flags.quiet {
		p.mode = "none"
	}
	if p.mode == "auto" {
		p.mode = "plain"
		if f.io.live {
			p.mode = "live"
		}
	}
	return p
}

// step shows an event of the sandbox that the command waits for.
func (p *progress) step(ev api.Event) {
	text := ev.Message
	switch {
	case ev.Type == sandboxer.EventState:
		text = string(ev.To)
		if ev.Cause != "" && ev.To != sandboxer.Creating {
			text += " (" + string(ev.Cause) + ")"
		}
		if ev.Message != "" {
			text += ": " + ev.Message
		}
	case ev.Progress != nil:
		p.far(ev)
		return
	case ev.Type == sandboxer.EventRetry:
		text = "trying again: " + ev.Message
	}
	switch p.mode {
	case "json":
		p.json(map[string]any{"event": ev})
	case "live":
		p.draw(clean(text))
	case "plain":
		p.plain("%s %s", ev.SandboxID, clean(text))
	}
}

// far shows the progress of a long step: a bar on a terminal, elsewhere a line for
// every tenth.
func (p *progress) far(ev api.Event) {
	g := ev.Progress
	switch p.mode {
	case "json":
		p.json(map[string]any{"event": ev})
	case "live":
		p.draw(strings.TrimRight(clean(g.Step)+"  "+bar(*g), " "))
	case "plain":
		tenth := int64(-1)
		if g.Total > 0 {
			tenth = 10 * g.Done / g.Total
		}
		if g.Step == p.long && tenth == p.tenth {
			return
		}
		p.long, p.tenth = g.Step, tenth
		p.plain("%s", strings.TrimRight(fmt.Sprintf("%s %s  %s", ev.SandboxID, clean(g.Step), amount(*g)), " "))
	}
}

// bar draws how much of something is done.
func bar(g sandboxer.Progress) string {
	const width = 24
	if g.Total <= 0 {
		return amount(g)
	}
	n := int(width * min(g.Done, g.Total) / g.Total)
	return "[" + strings.Repeat("=", n) + strings.Repeat(" ", width-n) + "] " + amount(g)
}

func amount(g sandboxer.Progress) string {
	switch {
	case g.Total <= 0 && g.Done < 50_000: // nothing worth a number
		return ""
	case g.Total <= 0:
		return megabytes(g.Done)
	}
	return fmt.Sprintf("%d%%  %s of %s", 100*min(g.Done, g.Total)/g.Total, megabytes(g.Done), megabytes(g.Total))
}

func megabytes(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }

// note prints something once, on a line of its own.
func (p *progress) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	switch p.mode {
	case "json":
		p.json(map[string]any{"note": text})
	case "live":
		p.print("  " + clean(text))
	case "plain":
		p.plain("%s", clean(text))
	}
}

// warn prints what a user must know, however progress is shown.
func (f *factory) warn(format string, args ...any) {
	fmt.Fprintf(f.io.err, "%s %s\n", f.io.paint("33", "warning:"), clean(fmt.Sprintf(format, args...)))
}

// done ends the live line with a summary.
func (p *progress) done(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	p.stop()
	switch p.mode {
	case "json":
		p.json(map[string]any{"done": text})
	case "live":
		p.print(p.io.paint("32", "✓") + " " + clean(text))
	case "plain":
		p.plain("%s", clean(text))
	}
}

func (p *progress) plain(format string, args ...any) {
	fmt.Fprintf(p.io.err, time.Now().Format("15:04:05")+" "+format+"\n", args...)
}

func (p *progress) json(v any) {
	_ = printJSONLine(p.io.err, v)
}

// print writes a line above the live one.
func (p *progress) print(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.io.err, "%s%s\n", startOfLine, text)
	p.redraw()
}

// above lets write put lines of its own above the live one.
func (p *progress) above(write func() error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.line != "" {
		fmt.Fprint(p.io.err, startOfLine)
	}
	err := write()
	p.redraw()
	return err
}

// draw makes text the live line and keeps its clock running.
func (p *progress) draw(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.line, p.since = text, time.Now()
	p.redraw()
	if p.quit != nil {
		return
	}
	quit, ended := make(chan struct{}), make(chan struct{})
	p.quit, p.ended = quit, ended
	go func() {
		defer close(ended)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
				p.mu.Lock()
				p.redraw()
				p.mu.Unlock()
			}
		}
	}()
}

func (p *progress) redraw() {
	if p.line != "" {
		fmt.Fprintf(p.io.err, "%s  %s %.1fs", startOfLine, p.line, time.Since(p.begin).Seconds())
	}
}

// stop removes the live line. Guest output may follow.
func (p *progress) stop() {
	p.mu.Lock()
	quit, ended := p.quit, p.ended
	p.quit, p.ended = nil, nil
	p.mu.Unlock()
	if quit != nil {
		close(quit)
		<-ended
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.line != "" {
		fmt.Fprint(p.io.err, startOfLine)
		p.line = ""
	}
}

// took is how long ago p began, for people.
func (p *progress) took() string { return seconds(time.Since(p.begin)) }

func seconds(d time.Duration) string {
	switch {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Minute:
		return d.Round(time.Second).String()
	}
	return d.Round(time.Second).String()
}
