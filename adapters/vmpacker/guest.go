package vmpacker

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// A guest is the inside of a sandbox, reached over SSH.
type guest struct {
	host *sshrun.Host
	rec  string // the directory with the sandbox's data there
	dir  string // the workspace
	mark string // SANDBOXER_SANDBOX in the environment of everything that runs in it
	user string // default user of commands
	own  bool   // the whole machine is the sandbox
	// look asks whether the sandbox is there: nil, NotFound or Conflict.
	look func(context.Context) error
}

const markName = "SANDBOXER_SANDBOX"

var (
	envName  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	userName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]*(:[0-9]+)?$`)
)

func checkEnv(env map[string]string) error {
	for k := range env {
		if !envName.MatchString(k) {
			return sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the name of an environment variable here: a shell must be able to say it", k)
		}
		if strings.HasPrefix(k, "SANDBOXER_") {
			return sandboxer.E(sandboxer.Invalid, nil, "environment variable %s is sandboxer's own", k)
		}
	}
	return nil
}

func checkUser(u string) error {
	if u != "" && !userName.MatchString(u) {
		return sandboxer.E(sandboxer.Invalid, nil, "%q is not a user: want a name or uid[:gid]", u)
	}
	return nil
}

// exports is shell text that sets env.
func exports(env map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(env)) {
		fmt.Fprintf(&b, "export %s=%s\n", k, sshrun.Quote(env[k]))
	}
	return b.String()
}

// goneCode is the exit code of a command's wrapper if the sandbox does not exist; it has that
// meaning only if a look confirms it.
const goneCode = 119

// enter runs "$@" inside: $1 is the directory with the sandbox's data, $2 the mark, $3 the
// user ("" or uid:gid). The environment of a shell that others see is the one at its start.
// Therefore the second shell is started with the mark and checks again: a teardown removes
// ready, then ends all marked processes, and so misses none.
const enter = `
[ -e "$1/ready" ] && [ -r "$1/env" ] || exit 119
. "$1/env"
%s` + markName + `=$2; export ` + markName + `
r=$1 u=$3; shift 3
exec /bin/sh -c '[ -e "$1/ready" ] || exit 119
r=$1 u=$2; shift 2
[ -n "$u" ] || exec "$@"
if /usr/bin/setpriv --help 2>&1 | grep -q -e --reuid; then exec /usr/bin/setpriv --reuid "${u%%:*}" --regid "${u#*:}" --clear-groups -- "$@"; fi
exec chpst -u ":$u" "$@"' sh "$r" "$u" "$@"`

// exec implements sandboxer.Execer.
func (g *guest) exec(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	if err := checkCmdEnv(cmd.Env); err != nil {
		return sandboxer.Exit{}, err
	}
	user := cmd.User
	if user == "" {
		user = g.user
	}
	as := ""
	if user != "" {
		var err error
		if as, err = g.resolve(ctx, user); err != nil {
			if gone := g.look(ctx); gone != nil {
				return sandboxer.Exit{}, gone
			}
			return sandboxer.Exit{}, err
		}
	}
	dir := cmd.Dir
	if dir == "" {
		dir = g.dir
	}
	began := time.Now()
	x, err := g.host.Run(ctx, sshrun.Cmd{
		Script: fmt.Sprintf(enter, exports(cmd.Env)), Args: append([]string{g.rec, g.mark, as}, cmd.Args...), Dir: dir,
		TTY: cmd.TTY, Stdin: cmd.Stdin, Stdout: cmd.Stdout, Stderr: cmd.Stderr, Resize: cmd.Resize, Signals: cmd.Signals,
	})
	if ctx.Err() == nil && (err == nil && x.Code == goneCode || sandboxer.KindOf(err) == sandboxer.Invalid || sandboxer.KindOf(err) == sandboxer.Unavailable) {
		if gone := g.look(ctx); gone != nil && (err == nil || sandboxer.KindOf(gone) == sandboxer.NotFound) {
			return sandboxer.Exit{}, gone
		}
	}
	if g.own && err == nil && x.Signal == "KILL" {
		x.OOMKilled = g.ranOut(ctx, time.Since(began))
	}
	return x, err
}

// ranOut reports whether the machine's kernel killed a process for memory within the last d.
// Only the kernel's log shows that, and not whose process it was.
func (g *guest) ranOut(ctx context.Context, d time.Duration) bool {
	_, err := g.host.Output(ctx, `
dmesg 2>/dev/null | awk -v up="$(cut -d ' ' -f 1 /proc/uptime)" -v d="$1" '
	/oom-kill:|Out of memory: Kill/ { sub(/^[^[]*\[ */, ""); if ($0 + 0 >= up - d) n = 1 }
	END { exit !n }' || exit 3`, strconv.Itoa(int(d/time.Second)+2))
	return err == nil
}

func checkCmdEnv(env map[string]string) error {
	for k := range env {
		if !envName.MatchString(k) {
			return sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the name of an environment variable here: a shell must be able to say it", k)
		}
	}
	return nil
}

// resolve returns user as uid:gid, or "" if commands run as that user anyway.
func (g *guest) resolve(ctx context.Context, user string) (string, error) {
	who, gid, _ := strings.Cut(user, ":")
	// Look up passwd by name, then by number.
	out, err := g.host.Output(ctx, `
echo "$(id -u) $(id -g)"
if command -v getent >/dev/null; then l=$(getent passwd "$1"); else l=$(awk -F: -v u="$1" '$1 == u || $3 == u { print; exit }' /etc/passwd); fi
echo "$l"`, who)
	if err != nil {
		return "", err
	}
	self, line, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	f := strings.Split(line, ":")
	_, numeric := strconv.Atoi(who)
	uid := who
	switch {
	case len(f) >= 4:
		uid = f[2]
		if gid == "" {
			gid = f[3]
		}
	case numeric != nil:
		return "", sandboxer.E(sandboxer.Invalid, nil, "there is no user %q in the sandbox", user)
	case gid == "":
		gid = uid
	}
	mine := strings.Fields(self)
	if len(mine) == 2 && mine[0] == uid && mine[1] == gid {
		return "", nil
	}
	if len(mine) != 2 || mine[0] != "0" {
		return "", sandboxer.E(sandboxer.Unsupported, nil, "commands cannot run as %s: the account on %s is not root", user, g.host.Name()).
			WithHint("leave the user out, or let the machine's SSH target be root@…")
	}
	return uid + ":" + gid, nil
}

// owned prints the processes with $1, NAME=value, in their environment.
const owned = `
for p in $(grep -lsF "$1" /proc/[0-9]*/environ 2>/dev/null); do
	p=${p#/proc/} p=${p%/environ}
	tr '\0' '\n' <"/proc/$p/environ" 2>/dev/null | grep -qxF "$1" && echo "$p"
done`

// mayDial ends with 0 if a process marked with $1 listens on the port $2, in
// hexadecimal; 3 if another process does, or none.
const mayDial = `
n=$(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk -v p=":$2" '$4 == "0A" && substr($2, length($2) - 4) == p { print $10 }')
[ -n "$n" ] || exit 3
for p in $(` + owned + `); do
	l=$(ls -l "/proc/$p/fd" 2>/dev/null) || continue
	for i in $n; do case $l in *"socket:[$i]"*) exit 0;; esac; done
done
exit 3`

func (g *guest) dial(ctx context.Context, port int) (net.Conn, error) {
	if !g.own {
		if err := g.look(ctx); err != nil {
			return nil, err
		}
		_, err := g.host.Output(ctx, mayDial, markName+"="+g.mark, fmt.Sprintf("%04X", port))
		if x, _, ok := sshrun.ExitOf(err); ok && x.Code == 3 {
			return nil, sandboxer.E(sandboxer.Unavailable, nil, "nothing in the sandbox listens on port %d", port)
		}
		if err != nil {
			return nil, err
		}
	}
	c, err := g.host.Dial(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil && !g.own {
		if c, err6 := g.host.Dial(ctx, "tcp", net.JoinHostPort("::1", strconv.Itoa(port))); err6 == nil {
			return c, nil
		}
	}
	return c, err
}

// figures prints the size of the workspace $2 in kilobytes, and for the processes marked
// with $1: their number and their unshared memory in kilobytes.
const figures = `
echo "$(du -sk "$2" 2>/dev/null | awk '{print $1}')"
` + owned + ` | { n=0 m=0; while read -r p; do
	n=$((n+1)); k=$(awk '$1 == "RssAnon:" { print $2 }' "/proc/$p/status" 2>/dev/null)
	m=$((m + ${k:-0})); done; echo "$n $m"; }`

// stats measures processes on an attached machine as far as possible: there is no account of
// ended ones.
func (g *guest) stats(ctx context.Context) (sandboxer.Stats, error) {
	out, err := g.host.Output(ctx, figures, markName+"="+g.mark, g.dir)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	s := sandboxer.Stats{At: now(), CPU: -1, DiskBytes: -1, RxBytes: -1, TxBytes: -1}
	var disk, n, mem int64
	if _, err := fmt.Sscan(string(bytes.TrimSpace(out)), &disk, &n, &mem); err != nil {
		return s, sandboxer.E(sandboxer.Failed, err, "machine %s measures in a way that cannot be read", g.host.Name())
	}
	s.DiskBytes, s.PIDs, s.MemoryBytes = disk<<10, n, mem<<10
	return s, nil
}

// patience bounds work that continues after its caller has left.
const patience = 20 * time.Second
