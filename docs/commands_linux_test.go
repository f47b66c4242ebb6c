package docs_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/sand-boxer/sandboxer/internal/buildtest"
)

// TestCommands types what the pages and the help texts tell people to type, on a terminal,
// as root and as an ordinary user, and compares what they show with what happens.
//
// It does so on a machine of its own: new namespaces for mounts, network and processes, an
// overlay over the root, and a second network namespace in which the registries, git hosts
// and SSH hosts that the pages name are real servers under those names. Nothing of that is
// left, whatever becomes of the test.
//
// The rules for pages:
//
//   - A block of code says its language. What is in a block of "sh" is typed line by line;
//     each line must end with 0. In one of "console" the lines to type begin with "$ ", and
//     the others are exactly what the terminal then shows. Other languages are not typed.
//   - In what is shown, "…" stands for anything, on a line of its own for any lines, and durations, times of day, sizes, random
//     IDs and fingerprints for any other of their kind.
//   - "ID" stands for what the last create or restore printed.
//   - A block with the comment <!-- not typed: REASON --> before it is left out.
func TestCommands(t *testing.T) {
	if os.Getenv("SANDBOXER_DOCS_MACHINE") != "" {
		onMachine(t)
		return
	}
	if testing.Short() {
		t.Skip("types every command of every page")
	}
	if os.Getuid() != 0 {
		t.Skip("needs root: a machine of its own")
	}
	for _, name := range []string{"unshare", "nsenter", "ip", "git", "curl", "busybox", "setpriv", "node", "/usr/sbin/sshd", "dockerd", "docker-compose"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("needs %s (scripts/setup.sh installs it)", name)
		}
	}
	if err := buildtest.ReadsFiles(".."); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "sbxdocs")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	env, err := exec.Command("go", "env", "GOCACHE", "GOMODCACHE", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	me, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	paths := strings.Fields(string(env))
	args := []string{"-m", "-n", "-p", "-u", "-i", "-f", "--kill-child", "bash", "-c", enter, "bash", dir, wd, me, "-test.run=^TestCommands$", "-test.v", "-test.timeout=25m"}
	if testing.Verbose() {
		t.Logf("unshare %q", args)
	}
	cmd := exec.Command("unshare", args...)
	cmd.Env = append(os.Environ(), "SANDBOXER_DOCS_MACHINE=1", "GOCACHE="+paths[0], "GOMODCACHE="+paths[1], "GOROOT="+paths[2])
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	for line := range strings.Lines(string(out)) {
		t.Log("| " + strings.TrimRight(line, "\n")) // not to be taken for this test's own
	}
	if err != nil {
		t.Error(err)
	}
}

// enter makes the machine and runs a program on it, as a child of the shell, which is its
// init: it must wait for what others leave.
const enter = `
set -e
dir=$1 wd=$2
shift 2
mount --make-rprivate /
mount -t tmpfs -o mode=755 machine "$dir"
mkdir "$dir/up" "$dir/work" "$dir/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/up,workdir=$dir/work" "$dir/root"
cd "$dir/root"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs -o mode=755 run run
mkdir .old
mount --rbind /tmp tmp
pivot_root . .old
cd /
umount -l /.old
rmdir /.old
hostname machine
cd "$wd"
status=0
"$@" || status=$?
exit $status
`

// user is somebody who reads the pages.
type user struct {
	name, home, runtime string
	env                 []string
}

// typed is something to type into a program, once the terminal shows the expression.
type typed struct {
	when string
	text string
}

// page is what a page needs in order to be typed: what its reader has before.
type page struct {
	// name of the file below the root, or "help CMD".
	name string
	// users are who types it: "root", "dev".
	users []string
	// dir is where: "checkout", or "project", which is a small program's.
	dir string
	// engine says that build-1.example has one for containers.
	engine bool
	// setup is done before, in silence. $PAGE/N.yaml is the N-th block of YAML of the page,
	// $PAGE/N.make of a Makefile.
	setup string
	// after is done in silence after it, before all sandboxes are destroyed.
	after string
	// before is done in silence before a command that contains the key.
	before map[string]string
	// code is what a command that contains the key ends with, instead of 0.
	code map[string]int
	// typing is what somebody types while a command runs that contains the key.
	typing map[string][]typed
	// rootOnly are parts of commands that are root's, or that show root's paths.
	rootOnly []string
}

const interrupt = "\x03"

type block struct {
	line   int // of the page
	lang   string
	text   string
	reason string // not to type it
}

var (
	fence    = regexp.MustCompile("^( *)```(.*)$")
	notTyped = regexp.MustCompile(`^ *<!-- not typed: (.+) -->$`)
)

// blocks are those of a page of Markdown.
func blocks(text string) (out []block) {
	var in *block
	indent, before := "", ""
	for i, line := range strings.Split(text, "\n") {
		m := fence.FindStringSubmatch(line)
		switch {
		case m != nil && in == nil:
			indent = m[1]
			in = &block{line: i + 1, lang: m[2]}
			if r := notTyped.FindStringSubmatch(before); r != nil {
				in.reason = r[1]
			}
		case m != nil:
			out = append(out, *in)
			in = nil
		case in != nil:
			in.text += strings.TrimPrefix(line, indent) + "\n"
		}
		if strings.TrimSpace(line) != "" {
			before = line
		}
	}
	return out
}

// command is one to type, and, if it is known, what is shown then.
type command struct {
	line  int
	text  string
	shown *string
}

// commands are those of a block.
func commands(b block) (out []command) {
	console := b.lang == "console"
	for i, line := range strings.Split(strings.TrimRight(b.text, "\n"), "\n") {
		last := len(out) - 1
		switch {
		case last >= 0 && !complete(out[last].text):
			out[last].text += "\n" + line
		case console && strings.HasPrefix(line, "$ "):
			out = append(out, command{line: b.line + i + 1, text: line[2:], shown: new(string)})
		case console && last >= 0:
			*out[last].shown += line + "\n"
		case console:
			out = append(out, command{line: b.line + i + 1, text: "false # a console begins with a command", shown: new(string)})
		case strings.TrimSpace(line) != "":
			out = append(out, command{line: b.line + i + 1, text: line})
		}
	}
	return out
}

// complete reports whether a shell would run this rather than ask for more.
func complete(text string) bool {
	if strings.HasSuffix(text, "\\") {
		return false
	}
	out, err := exec.Command("bash", "-n", "-c", text).CombinedOutput()
	return err == nil || !bytes.Contains(out, []byte("unexpected end of file")) && !bytes.Contains(out, []byte("unexpected EOF"))
}

// kinds are what differs from run to run in what is shown.
var kinds = []struct{ like, any string }{
	{`20\d\d-\d\d-\d\d \d\d:\d\d:\d\d`, ``},
	{`\b\d\d:\d\d(:\d\d)?\b`, ``},
	{`\b(\d+(\.\d+)?(ms|µs|[hms]))+`, ``},
	{`\b\d+(\.\d+)?[KMGT]i?B\b`, ``},
	{`SHA256:[A-Za-z0-9+/]{43}`, ``},
	{`\b[0-9a-hjkmnp-tv-z]{8}\b`, `[0-9a-hjkmnp-tv-z]{8}`},
}

// pattern is what a line that is shown stands for.
func pattern(line string) *regexp.Regexp {
	var out strings.Builder
	for line != "" {
		first, end, with := len(line), len(line), ""
		if i := strings.Index(line, "…"); i >= 0 {
			first, end, with = i, i+len("…"), ".*"
		}
		for _, k := range kinds {
			if m := regexp.MustCompile(k.like).FindStringIndex(line); m != nil && m[0] < first {
				first, end, with = m[0], m[1], k.any
				if with == "" {
					with = k.like
				}
			}
		}
		out.WriteString(regexp.QuoteMeta(line[:first]) + with)
		line = line[end:]
	}
	return regexp.MustCompile("^" + out.String() + "$")
}

var escape = regexp.MustCompile("\x1b\\[[0-9;?]*[A-Za-z]")

// screen is what a terminal that was sent text shows in the end.
func screen(text string) string {
	var out []string
	for line := range strings.SplitSeq(text, "\n") {
		line = strings.TrimRight(line, "\r")
		if i := strings.LastIndexByte(line, '\r'); i >= 0 {
			line = line[i+1:]
		}
		out = append(out, strings.TrimRight(escape.ReplaceAllString(line, ""), " "))
	}
	return strings.Trim(strings.Join(out, "\n"), "\n")
}

func sameScreen(got, want string) error {
	if !sameLines(strings.Split(got, "\n"), strings.Split(strings.Trim(want, "\n"), "\n")) {
		return fmt.Errorf("the page shows\n%s\nand the terminal\n%s", want, got)
	}
	return nil
}

func sameLines(got, want []string) bool {
	switch {
	case len(want) == 0:
		return len(got) == 0
	case want[0] == "…":
		return sameLines(got, want[1:]) || len(got) > 0 && sameLines(got[1:], want)
	}
	return len(got) > 0 && pattern(strings.TrimRight(want[0], " ")).MatchString(got[0]) && sameLines(got[1:], want[1:])
}

// tempDir is a directory that both users read.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/run", "page")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// terminal is a shell on a terminal.
type terminal struct {
	cmd *exec.Cmd
	pty *os.File
	dir string // for what is typed

	mu    sync.Mutex
	seen  []byte
	more  chan struct{}
	ended bool
}

// session is the shell: it runs what the named files hold and tells how each ended.
const session = `trap : INT; while read -r -u 3 f; do . "$f"; printf '\036%d\036' $?; done`

func newTerminal(t *testing.T, u user, dir string, env ...string) *terminal {
	t.Helper()
	x := &terminal{dir: tempDir(t), more: make(chan struct{}, 1)}
	ptmx, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	pty.Setsize(ptmx, &pty.Winsize{Rows: 50, Cols: 140})
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	args := []string{"bash", "--norc", "--noprofile", "-c", session}
	if u.name != "root" {
		args = append([]string{"setpriv", "--reuid", u.name, "--regid", u.name, "--init-groups", "--"}, args...)
		if err := exec.Command("chown", u.name, tty.Name()).Run(); err != nil {
			t.Fatal(err)
		}
	}
	x.cmd = exec.Command(args[0], args[1:]...)
	x.cmd.Dir = dir
	x.cmd.Env = slices.Concat(u.env, env)
	x.cmd.Stdin, x.cmd.Stdout, x.cmd.Stderr = tty, tty, tty
	x.cmd.ExtraFiles = []*os.File{r}
	x.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Pdeathsig: syscall.SIGKILL}
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	x.pty = ptmx
	go func() {
		buf := make([]byte, 32<<10)
		for {
			n, err := ptmx.Read(buf)
			x.mu.Lock()
			x.seen = append(x.seen, buf[:n]...)
			x.ended = err != nil
			x.mu.Unlock()
			select {
			case x.more <- struct{}{}:
			default:
			}
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		w.Close()
		done := make(chan struct{})
		go func() {
			x.cmd.Wait()
			close(done)
		}()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			syscall.Kill(-x.cmd.Process.Pid, syscall.SIGKILL)
			<-done
		}
		ptmx.Close()
	})
	x.cmd.ExtraFiles = []*os.File{w}
	return x
}

var ending = regexp.MustCompile("\x1e([0-9]+)\x1e")

// run types a command, and what is to be typed into it, and returns what the terminal
// showed and how it ended.
func (x *terminal) run(text string, typing []typed) (shown string, code int, err error) {
	f, err := os.CreateTemp(x.dir, "")
	if err != nil {
		return "", 0, err
	}
	f.Chmod(0o644)
	if _, err := io.WriteString(f, text+"\n"); err != nil {
		return "", 0, err
	}
	f.Close()
	x.mu.Lock()
	x.seen = nil
	x.mu.Unlock()
	fmt.Fprintln(x.cmd.ExtraFiles[0], f.Name())
	deadline := time.After(8 * time.Minute)
	from := 0
	for {
		x.mu.Lock()
		all, ended := string(x.seen), x.ended
		x.mu.Unlock()
		if m := ending.FindStringSubmatchIndex(all); m != nil {
			fmt.Sscan(all[m[2]:m[3]], &code)
			if len(typing) > 0 {
				err = fmt.Errorf("%q was not asked for", typing[0].text)
			}
			return screen(all[:m[0]]), code, err
		}
		if len(typing) > 0 {
			if m := regexp.MustCompile(typing[0].when).FindStringIndex(all[from:]); m != nil {
				from += m[1]
				io.WriteString(x.pty, typing[0].text)
				typing = typing[1:]
				continue
			}
		}
		if ended {
			return screen(all), 0, errors.New("the shell ended")
		}
		select {
		case <-x.more:
		case <-deadline:
			return screen(all), 0, errors.New("it does not end")
		}
	}
}

// do runs a command in silence, which must end with 0.
func (x *terminal) do(t *testing.T, text string) {
	t.Helper()
	if text == "" {
		return
	}
	shown, code, err := x.run("{ "+text+"\n} </dev/null", nil)
	if err != nil || code != 0 {
		t.Fatalf("%s\nended with %d, %v\n%s", text, code, err, shown)
	}
}

var made = regexp.MustCompile(`\bsandboxer (create|restore)\b`)
var anID = regexp.MustCompile(`(?m)^([0-9a-hjkmnp-tv-z]{8})$`)
var placeholder = regexp.MustCompile(`\bID\b([^=]|$)`)

// typePage types one page as one user, and returns how many commands that were.
func typePage(t *testing.T, p page, list []block, u user, dir string) (count int) {
	files := tempDir(t)
	n := map[string]int{}
	for _, b := range list {
		if b.lang == "yaml" || b.lang == "make" {
			n[b.lang]++
			if err := os.WriteFile(filepath.Join(files, fmt.Sprintf("%d.%s", n[b.lang], b.lang)), []byte(b.text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	x := newTerminal(t, u, dir, "PAGE="+files)
	defer func() {
		// Nothing of the page is left for the next one.
		defer x.do(t, "sandboxer down; rm -rf $config ~/.ssh/known_hosts")
		x.do(t, p.after)
		x.do(t, "cd && sandboxer up --quiet && sandboxer destroy --all --yes --quiet && "+
			"for h in $(sandboxer host ls --quiet); do sandboxer host drain $h && sandboxer host rm $h; done && sandboxer audit")
	}()
	x.do(t, p.setup)
	id := ""
	for _, b := range list {
		if b.lang != "sh" && b.lang != "console" || b.reason != "" {
			continue
		}
		for _, c := range commands(b) {
			if u.name != "root" && slices.ContainsFunc(p.rootOnly, func(part string) bool { return strings.Contains(c.text, part) }) {
				continue
			}
			if id != "" {
				c.text = placeholder.ReplaceAllString(c.text, id+"$1")
			}
			for part, text := range p.before {
				if strings.Contains(c.text, part) {
					x.do(t, text)
				}
			}
			want := 0
			for part, code := range p.code {
				if strings.Contains(c.text, part) {
					want = code
				}
			}
			var typing []typed
			for part, list := range p.typing {
				if strings.Contains(c.text, part) {
					typing = list
				}
			}
			start := time.Now()
			shown, code, err := x.run(c.text, typing)
			count++
			if made.MatchString(c.text) {
				if m := anID.FindAllString(shown, -1); len(m) > 0 {
					id = m[len(m)-1]
				}
			}
			if err == nil && code != want {
				err = fmt.Errorf("it ended with %d", code)
				if want != 0 {
					err = fmt.Errorf("it ended with %d, not %d", code, want)
				}
			}
			if err == nil && c.shown != nil {
				err = sameScreen(shown, *c.shown)
				shown = ""
			}
			if err != nil {
				t.Errorf("%s:%d: as %s: %s\n%v\n%s", p.name, c.line, u.name, c.text, err, shown)
				if err.Error() == "it does not end" || err.Error() == "the shell ended" {
					return count
				}
			} else {
				t.Logf("%s:%d %s (%.1fs)", p.name, c.line, c.text, time.Since(start).Seconds())
			}
		}
	}
	return count
}
