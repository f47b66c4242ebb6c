package daytona

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// preview serves a port of a sandbox at an address of its own, as Daytona does by a name for each.
func (w *world) preview(b *box, port string) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go w.relay(b, port, c)
		}
	}()
	return l
}

// relay passes a connection on if its first request has the token.
func (w *world) relay(b *box, port string, c net.Conn) {
	defer c.Close()
	r, head := bufio.NewReader(c), ""
	for line := ""; line != "\r\n"; head += line {
		var err error
		if line, err = r.ReadString('\n'); err != nil {
			return
		}
	}
	w.mu.Lock()
	token, gate := b.token, w.gate
	w.mu.Unlock()
	<-gate
	if !strings.Contains(strings.ToLower(head), strings.ToLower("X-Daytona-Preview-Token: "+token+"\r\n")) {
		_, _ = io.WriteString(c, "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		return
	}
	to, err := w.inside(b, "127.0.0.1:"+port)
	if err != nil {
		_, _ = io.WriteString(c, "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		return
	}
	defer to.Close()
	there := make(chan struct{})
	go func() {
		defer close(there)
		_, _ = io.Copy(to, gated{w, io.MultiReader(strings.NewReader(head), r)})
		_ = to.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(c, gated{w, to})
	_ = c.(*net.TCPConn).CloseWrite()
	<-there
}

// gated is a reader that gives nothing while Daytona hangs.
type gated struct {
	w *world
	io.Reader
}

func (g gated) Read(p []byte) (int, error) {
	n, err := g.Reader.Read(p)
	g.w.mu.Lock()
	gate := g.w.gate
	g.w.mu.Unlock()
	<-gate
	return n, err
}

// inside opens a connection to a port in the network namespace of a sandbox.
func (w *world) inside(b *box, address string) (c net.Conn, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for good: the thread ends with this goroutine
		fd, err1 := unix.Open(fmt.Sprintf("/proc/%d/ns/net", b.pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err = err1; err != nil {
			return
		}
		defer unix.Close(fd)
		if err = unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			return
		}
		c, err = new(net.Dialer).DialContext(context.Background(), "tcp4", address)
	}()
	<-done
	return c, err
}

// hold starts the first process of a sandbox. A place for programs is its own, as all of /tmp is at Daytona.
func (b *box) hold() error {
	own := filepath.Join(b.home, ".own")
	if err := cmp.Or(os.MkdirAll(own, 0o755), os.MkdirAll(agentDir, 0o755)); err != nil {
		return err
	}
	b.holder = exec.Command("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc", "sh", "-c",
		`ip link set lo up && mount --bind "$1" "$2" && echo up && cat`, "sh", own, agentDir)
	out, err := b.holder.StdoutPipe()
	if err == nil {
		_, err = b.holder.StdinPipe() // it ends with this process
	}
	if err == nil {
		err = b.holder.Start()
	}
	if err != nil {
		return err
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "up\n" {
		_ = b.holder.Process.Kill()
		_ = b.holder.Wait()
		return fmt.Errorf("the sandbox does not start: %q, %v", line, err)
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", b.holder.Process.Pid))
	if err == nil {
		b.pid, err = strconv.Atoi(strings.TrimSpace(string(children)))
	}
	return err
}

// kill ends all processes of a sandbox, and returns when none of them runs.
func (b *box) kill() {
	space, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", b.pid))
	_ = b.holder.Process.Kill() // the kernel kills the first process with it, and all others with that one
	_ = b.holder.Wait()
	pids, _ := procs.All()
	for _, pid := range pids {
		if at, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)); err != nil || at != space {
			continue
		}
		for end := time.Now().Add(time.Minute); !procs.Ended(pid) && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
	}
}

// command is a command in a sandbox.
func (b *box) command(ctx context.Context, dir string, args ...string) *exec.Cmd {
	enter := []string{"-t", strconv.Itoa(b.pid), "-m", "-p", "-n", "--", "/bin/sh", "-c", `cd "$0" && exec "$@"`, cmp.Or(dir, b.home)}
	cmd := exec.CommandContext(ctx, "nsenter", append(enter, args...)...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=" + b.home, "DAYTONA_SANDBOX_ID=" + b.id}
	return cmd
}

// A session is a shell in a sandbox.
type session struct {
	id   string
	in   io.WriteCloser
	pid  int // of nsenter
	n    int
	text map[string]string // of the commands
}

// unfinished logs the commands that a session's shell has not begun, or could not begin, when its sandbox ends: a failed test shows why.
func (w *world) unfinished(b *box) {
	for _, s := range b.sessions {
		for id, text := range s.text {
			at := filepath.Join(w.home, b.id+"-"+id)
			said, err := os.ReadFile(at + ".err")
			if err == nil && len(said) == 0 {
				continue
			}
			list, _ := exec.Command("ps", "-o", "pid,ppid,stat,wchan:30,args", "-p", strconv.Itoa(s.pid), "--ppid", strconv.Itoa(s.pid)).CombinedOutput()
			w.t.Logf("sandbox %s, command %q: %s (%v)\n%s", b.id, text, said, err, list)
		}
	}
}

func (w *world) toolbox(rw http.ResponseWriter, r *http.Request, org, id, path string) {
	w.mu.Lock()
	b := w.boxes[id]
	up := b != nil && b.org == org && slices.Contains([]string{"started", "resizing", "snapshotting", "forking"}, b.states[0])
	w.mu.Unlock()
	if !up {
		refuse(rw, http.StatusBadRequest, "the sandbox %s is not running", id)
		return
	}
	switch part := strings.Split(path, "/"); {
	case path == "/process/execute":
		var req struct {
			Command, Cwd string
			Envs         map[string]string
		}
		json.NewDecoder(r.Body).Decode(&req)
		cmd := b.command(r.Context(), req.Cwd, "sh", "-c", req.Command)
		for name, value := range req.Envs {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
		out, err := cmd.CombinedOutput() // merged, as there
		if _, exited := err.(*exec.ExitError); err != nil && !exited {
			refuse(rw, 400, "%v", err)
			return
		}
		say(rw, 200, map[string]any{"exitCode": cmd.ProcessState.ExitCode(), "result": string(out)})
	case path == "/process/session":
		var req struct{ SessionID string }
		json.NewDecoder(r.Body).Decode(&req)
		w.mu.Lock()
		defer w.mu.Unlock()
		if b.sessions == nil || b.sessions[req.SessionID] != nil {
			refuse(rw, http.StatusConflict, "session already exists")
			return
		}
		cmd := b.command(context.WithoutCancel(r.Context()), "", "sh")
		s := &session{id: req.SessionID, text: map[string]string{}}
		var said bytes.Buffer
		cmd.Stdout, cmd.Stderr = &said, &said
		s.in, _ = cmd.StdinPipe()
		if err := cmd.Start(); err != nil {
			refuse(rw, 400, "%v", err)
			return
		}
		go func() {
			err := cmd.Wait()
			w.mu.Lock()
			defer w.mu.Unlock()
			if b.states[0] != "destroyed" { // no command of ours ends the shell of its session
				w.t.Errorf("the shell of session %s ended by itself: %v: %s", s.id, err, said.String())
			}
		}()
		s.pid = cmd.Process.Pid
		b.sessions[req.SessionID] = s
		rw.WriteHeader(http.StatusCreated)
	case len(part) >= 5 && part[2] == "session":
		w.mu.Lock()
		s := b.sessions[part[3]]
		w.mu.Unlock()
		if s == nil {
			refuse(rw, 404, "session not found")
			return
		}
		w.inSession(rw, r, b, s, part[4:])
	case path == "/files/bulk-upload":
		files, err := r.MultipartReader()
		if err != nil {
			refuse(rw, 400, "%v", err)
			return
		}
		w.store(rw, b, files)
	case path == "/files/bulk-download":
		var req struct{ Paths []string }
		json.NewDecoder(r.Body).Decode(&req)
		m := multipart.NewWriter(rw)
		rw.Header().Set("Content-Type", m.FormDataContentType())
		for _, name := range req.Paths {
			data, err := os.ReadFile(b.path(name))
			if err != nil {
				data = []byte(err.Error())
			}
			p, _ := m.CreateFormFile(map[bool]string{true: "file", false: "error"}[err == nil], name)
			p.Write(data)
		}
		m.Close()
	case path == "/work-dir", path == "/user-home-dir":
		say(rw, 200, map[string]any{"dir": b.home})
	case path == "/files" && r.Method == http.MethodGet:
		list := []any{}
		entries, err := os.ReadDir(b.path(r.FormValue("path")))
		for _, e := range entries {
			list = append(list, map[string]any{"name": e.Name(), "isDir": e.IsDir(), "size": 0, "modTime": "", "mode": "", "permissions": "", "owner": "", "group": ""})
		}
		if err != nil {
			refuse(rw, 404, "%v", err)
			return
		}
		say(rw, 200, list)
	default:
		refuse(rw, 404, "Cannot %s %s", r.Method, path)
	}
}

func (b *box) path(name string) string {
	if rest, own := strings.CutPrefix(name, agentDir+"/"); own {
		return filepath.Join(b.home, ".own", rest)
	}
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(b.home, name)
}

// store writes the files of a form; each follows the field with its path.
func (w *world) store(rw http.ResponseWriter, b *box, files *multipart.Reader) {
	for name := ""; ; {
		p, err := files.NextPart()
		if err != nil {
			break
		}
		if strings.HasSuffix(p.FormName(), ".path") {
			data, _ := io.ReadAll(p)
			name = b.path(string(data))
			continue
		}
		os.MkdirAll(filepath.Dir(name), 0o755)
		f, err := os.Create(name)
		if err == nil {
			_, err = io.Copy(f, p)
			f.Close()
		}
		if err != nil {
			refuse(rw, 400, "%v", err)
			return
		}
	}
	rw.WriteHeader(http.StatusOK)
}

// inSession runs a command in the shell of a session, which an exit ends: the request then hangs, as there.
func (w *world) inSession(rw http.ResponseWriter, r *http.Request, b *box, s *session, path []string) {
	at := func(id, what string) string { return filepath.Join(w.home, b.id+"-"+id+"."+what) }
	read := func(id, what string) string { data, _ := os.ReadFile(at(id, what)); return string(data) }
	if path[0] == "exec" {
		var req struct {
			Command         string
			RunAsync, Async bool
		}
		json.NewDecoder(r.Body).Decode(&req)
		w.mu.Lock()
		s.n++
		id := strconv.Itoa(s.n) + "-" + sandboxer.NewID()
		s.text[id] = req.Command
		to := io.Writer(s.in)
		if w.faults.unrun {
			w.faults.unrun, to = false, io.Discard
		}
		w.mu.Unlock()
		_, err := fmt.Fprintf(to, "{\n%s\n} >'%s' 2>'%s' </dev/null; echo $? >'%s'; mv '%[4]s' '%s'\n", req.Command, at(id, "out"), at(id, "err"), at(id, "code.new"), at(id, "code"))
		if err != nil {
			refuse(rw, 400, "%v", err)
			return
		}
		if req.RunAsync || req.Async {
			say(rw, http.StatusAccepted, map[string]any{"cmdId": id})
			return
		}
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for read(id, "code") == "" {
			select {
			case <-tick.C:
			case <-r.Context().Done():
				return
			}
		}
		code, _ := strconv.Atoi(strings.TrimSpace(read(id, "code")))
		say(rw, 200, map[string]any{"cmdId": id, "exitCode": code, "output": read(id, "out") + read(id, "err"), "stdout": read(id, "out"), "stderr": read(id, "err")})
		return
	}
	w.mu.Lock()
	text, ok := s.text[path[1]]
	w.mu.Unlock()
	if !ok {
		refuse(rw, 404, "command not found")
		return
	}
	v := map[string]any{"id": path[1], "command": text}
	if code, err := strconv.Atoi(strings.TrimSpace(read(path[1], "code"))); err == nil {
		v["exitCode"] = code
	}
	if len(path) > 2 {
		v = map[string]any{"output": read(path[1], "out") + read(path[1], "err"), "stdout": read(path[1], "out"), "stderr": read(path[1], "err")}
	}
	say(rw, 200, v)
}
