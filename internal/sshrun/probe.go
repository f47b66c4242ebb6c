package sshrun

import (
	"context"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// Facts are the results of a probe of a host. A field is empty if the host did not report it.
type Facts struct {
	At             time.Time         `json:"at"`
	System         string            `json:"system,omitempty"` // kernel and machine, "Linux x86_64"
	Engine         string            `json:"engine,omitempty"` // docker or podman
	EngineVersion  string            `json:"engine_version,omitempty"`
	EngineProblem  string            `json:"engine_problem,omitempty"` // why the engine that is there does not answer
	Compose        string            `json:"compose,omitempty"`        // the command: "docker compose", "docker-compose" or "podman-compose"
	ComposeVersion string            `json:"compose_version,omitempty"`
	Tools          map[string]string `json:"tools"`                 // tar, zstd, git and so on: where each is, "" if nowhere
	DiskFree       int64             `json:"disk_free,omitempty"`   // bytes, where the account's home is
	Processors     int               `json:"processors,omitempty"`  // those that are on
	ClockAhead     float64           `json:"clock_ahead,omitempty"` // seconds; negative if the host's clock is behind ours
	Latency        float64           `json:"latency"`               // seconds for a command that does nothing, over a connection that stands
}

// The tools that Facts reports.
var probed = []string{"tar", "zstd", "git", "docker", "podman", "setsid"}

// look prints one fact per line. An engine that hangs must not block the rest.
const look = `
say() { printf '%s=%s\n' "$1" "$2"; }
within() { if command -v timeout >/dev/null 2>&1; then timeout 5 "$@"; else "$@"; fi; }
say system "$(uname -sm)"
say clock "$(date +%s.%N)"
for t; do say "tool $t" "$(command -v "$t")"; done
for e in docker podman; do
	command -v $e >/dev/null 2>&1 || continue
	[ $e = docker ] && f='{{.Server.Version}}' || f='{{.Client.Version}}'
	if v=$(within $e version --format "$f" 2>&1) && [ -n "$v" ]; then
		say engine "$e"; say engine_version "$v"; break
	fi
	say problem "$(printf %s "$v" | tail -n 1)"
done
if v=$(within docker compose version --short 2>/dev/null); then say compose "docker compose"; say compose_version "$v"
elif v=$(within docker-compose version --short 2>/dev/null); then say compose docker-compose; say compose_version "$v"
elif v=$(within podman-compose --version 2>/dev/null); then say compose podman-compose; say compose_version "$(printf '%s\n' "$v" | sed -n 's/^podman-compose[^0-9]*//p' | head -n 1)"
fi
say disk "$(df -Pk . 2>/dev/null | awk 'NR==2{print $4}')"
say cpus "$(getconf _NPROCESSORS_ONLN 2>/dev/null || nproc 2>/dev/null)"
`

// Probe finds out what the host offers. It changes nothing there. All of it, the login included, takes 30 seconds
// at most: 20, and 10 to end what it has begun. Unavailable: that was not enough.
func (h *Host) Probe(ctx context.Context) (Facts, error) {
	most := h.pool.opts.ConnectTimeout + 5*time.Second
	c, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	f, err := h.probe(c)
	if err != nil && c.Err() != nil && ctx.Err() == nil {
		return f, sandboxer.E(sandboxer.Unavailable, err, "the checks on host %s did not finish within %s", h.target.Name, most).
			WithHint("log in there yourself: a start-up file of the shell or an engine may hang")
	}
	return f, err
}

func (h *Host) probe(ctx context.Context) (Facts, error) {
	out := &capture.First{Max: 64 << 10}
	if _, err := h.Run(ctx, Cmd{Args: []string{"true"}}); err != nil { // connects
		return Facts{}, err
	}
	begun := time.Now()
	exit, err := h.Run(ctx, Cmd{Args: []string{"true"}})
	if err == nil && exit.Code != 0 {
		err = h.target.fault(ErrShell, fmt.Sprintf("true ended with %d", exit.Code))
	}
	if err != nil {
		return Facts{}, err
	}
	f := Facts{At: time.Now().UTC().Truncate(time.Microsecond), Latency: time.Since(begun).Seconds(), Tools: map[string]string{}}
	sent := time.Now()
	heard := &firstTime{w: out}
	if _, err := h.Run(ctx, Cmd{Script: look, Args: probed, Stdout: heard, Stderr: io.Discard}); err != nil { // heard is bounded
		return Facts{}, err
	}
	for line := range strings.Lines(out.String()) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		value = tidy(value)
		if tool, ok := strings.CutPrefix(key, "tool "); ok {
			f.Tools[tool] = value
			continue
		}
		switch key {
		case "system":
			f.System = value
		case "engine":
			f.Engine, f.EngineProblem = value, ""
		case "engine_version":
			f.EngineVersion = value
		case "problem":
			f.EngineProblem = value
		case "compose":
			f.Compose = value
		case "compose_version":
			f.ComposeVersion = strings.TrimPrefix(value, "v")
		case "disk":
			if n, err := strconv.ParseInt(value, 10, 64); err == nil {
				f.DiskFree = n * 1024
			}
		case "cpus":
			f.Processors, _ = strconv.Atoi(value)
		case "clock":
			// A date without %N leaves the letter.
			value, _, whole := strings.Cut(value, ".N")
			if theirs, err := strconv.ParseFloat(strings.TrimSuffix(value, ".%N"), 64); err == nil {
				at := sent.Add(heard.at.Sub(sent) / 2)
				ahead := theirs - float64(at.UnixNano())/1e9
				if whole {
					ahead = math.Round(ahead + 0.5)
				}
				f.ClockAhead = math.Round(ahead*1000) / 1000
			}
		}
	}
	return f, nil
}

// firstTime notes when the first byte came.
type firstTime struct {
	w  io.Writer
	at time.Time
}

func (f *firstTime) Write(p []byte) (int, error) {
	if f.at.IsZero() {
		f.at = time.Now()
	}
	return f.w.Write(p)
}

// Fingerprint is how people compare keys: SHA256 and base64, as ssh shows it.
func Fingerprint(key string) (string, error) {
	pub, _, _, _, err := ssh.ParseAuthorizedKey([]byte(key))
	if err != nil {
		return "", sandboxer.E(sandboxer.Invalid, err, "%q is not a public key", key)
	}
	return ssh.FingerprintSHA256(pub), nil
}
