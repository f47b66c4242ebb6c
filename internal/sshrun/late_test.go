package sshrun_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"golang.org/x/crypto/ssh"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// tardy is a server that says at once that a command has ended, and passes on what the command wrote
// to stderr only when it has run the next one, as a busy sshd may.
type tardy struct {
	mu   sync.Mutex
	held func() // passes on the rest of the session that ended last
}

// serve serves one connection.
func (s *tardy) serve(c net.Conn, config *ssh.ServerConfig) {
	conn, channels, requests, err := ssh.NewServerConn(c, config)
	if err != nil {
		return
	}
	defer conn.Close()
	go ssh.DiscardRequests(requests)
	var sessions sync.WaitGroup
	defer sessions.Wait()
	for n := range channels {
		ch, requests, err := n.Accept()
		if err != nil {
			return
		}
		sessions.Go(func() { s.session(ch, requests) })
	}
}

func (s *tardy) session(ch ssh.Channel, requests <-chan *ssh.Request) {
	for r := range requests {
		if r.Type != "exec" {
			r.Reply(r.Type == "env", nil)
			continue
		}
		r.Reply(true, nil)
		go ssh.DiscardRequests(requests)
		cmd := exec.Command("/bin/sh", "-c", string(r.Payload[4:]))
		in, _ := cmd.StdinPipe()
		var said bytes.Buffer
		cmd.Stdout, cmd.Stderr = ch, &said
		if cmd.Start() != nil {
			ch.Close()
			return
		}
		go func() {
			buf := make([]byte, 4<<10)
			for {
				n, err := ch.Read(buf)
				in.Write(buf[:n])
				if err != nil {
					in.Close()
					return
				}
			}
		}()
		cmd.Wait()
		code := cmd.ProcessState.ExitCode()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.held != nil {
			s.held()
			s.held = nil
		}
		ch.SendRequest("exit-status", false, binary.BigEndian.AppendUint32(nil, uint32(code)))
		rest := func() {
			ch.Stderr().Write(said.Bytes())
			ch.Close()
		}
		if strings.Contains(said.String(), "no such network") {
			s.held = rest
		} else {
			rest()
		}
		return
	}
}

// TestSaidLate: what a command wrote arrives also when the server passes it on long after it said that the command has ended.
func TestSaidLate(t *testing.T) {
	leaveNothing(t)
	dir := t.TempDir()
	_, line, signer := sshtest.NewKey(t, dir, "host")
	id, _, _ := sshtest.NewKey(t, dir, "id")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	config := &ssh.ServerConfig{NoClientAuth: true}
	config.AddHostKey(signer)
	var served sync.WaitGroup
	t.Cleanup(served.Wait)
	t.Cleanup(func() { l.Close() })
	served.Go(func() {
		s := &tardy{}
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				served.Go(func() { s.serve(c, config) })
			}
		}
	})
	h := host(t, newPool(t, sshrun.Options{}), sshrun.Target{Name: "tardy", Addr: "me@127.0.0.1", Port: l.Addr().(*net.TCPAddr).Port, IdentityFile: id, HostKeys: []string{line}})
	var said bytes.Buffer
	x, err := h.Run(t.Context(), sshrun.Cmd{Script: "echo no such network >&2; exit 3", Stderr: &said})
	if err != nil || x != (sandboxer.Exit{Code: 3}) || said.String() != "no such network\n" {
		t.Errorf("Run = %+v, %v; it said %q", x, err, &said)
	}
}
