package agent

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// donated returns the connections of given files, as on the agent's side.
func donated(t *testing.T, files []*os.File) (conns []*PipeConn) {
	t.Helper()
	for i := 0; i < len(files); i += 2 {
		var fds [2]int
		for j, f := range files[i : i+2] {
			fd, err := unix.Dup(int(f.Fd()))
			if err != nil {
				t.Fatal(err)
			}
			fds[j] = fd
		}
		conns = append(conns, NewPipeConn(os.NewFile(uintptr(fds[0]), "r"), os.NewFile(uintptr(fds[1]), "w")))
	}
	return conns
}

func TestDonations(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	batches := make(chan []*PipeConn, 10)
	d := NewDonations(func(_ context.Context, files []*os.File) error {
		batches <- donated(t, files)
		return nil
	})
	dial := func() net.Conn {
		t.Helper()
		c, err := d.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	one := dial()
	first := <-batches
	if len(first) != firstBatch {
		t.Fatalf("%d at first; want %d", len(first), firstBatch)
	}
	if _, err := one.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if n, err := first[firstBatch-1].Read(make([]byte, 2)); n != 1 || err != nil {
		t.Errorf("the agent's end: %d, %v", n, err)
	}

	// No caller gets a connection that the agent has closed.
	first[firstBatch-2].Close()
	if spare, least := d.Waiting(); spare != firstBatch-1 || least != firstBatch/2 {
		t.Errorf("%d wait, of at least %d", spare, least)
	}
	two := dial()
	if _, err := two.Write([]byte("y")); err != nil {
		t.Errorf("a connection that was closed: %v", err)
	}

	// More are made before they run out, and more at a time, up to the content of one message.
	for _, want := range []int{2 * firstBatch, lastBatch, lastBatch} {
		for len(batches) == 0 {
			dial()
			eventually(t, "none are made", func() bool {
				spare, least := d.Waiting()
				return spare >= least || len(batches) > 0
			})
		}
		got := <-batches
		if len(got) != want {
			t.Errorf("%d more; want %d", len(got), want)
		}
		for _, c := range got {
			t.Cleanup(func() { c.Close() })
		}
	}

	d.Close()
	if _, err := d.Dial(t.Context()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if n, err := first[0].Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("what waited to be used is open: %d, %v", n, err)
	}
}

func TestDonationsFail(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	var tries atomic.Int32
	var given []*os.File
	away := sandboxer.E(sandboxer.Unavailable, nil, "away")
	d := NewDonations(func(_ context.Context, files []*os.File) error {
		given = files
		if tries.Add(1) == 1 {
			return away
		}
		for _, c := range donated(t, files) {
			t.Cleanup(func() { c.Close() })
		}
		return nil
	})
	defer d.Close()
	if _, err := d.Dial(t.Context()); !errors.Is(err, away) {
		t.Errorf("%v; want what it was told", err)
	}
	if _, err := given[0].Stat(); err == nil {
		t.Error("the files stay open")
	}
	c, err := d.Dial(t.Context())
	if err != nil {
		t.Fatalf("it is not tried again: %v", err)
	}
	c.Close()

	hangs := make(chan struct{})
	d2 := NewDonations(func(context.Context, []*os.File) error { <-hangs; return nil })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d2.Dial(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v; want canceled", err)
	}
	close(hangs)
	d2.Close()
}

// TestDonationsReachAnAgent: the whole way, with the command.
func TestDonationsReachAnAgent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d")
	startAgentWith(t, "", "--listen", donatePrefix+path)
	d := NewDonations(func(ctx context.Context, files []*os.File) error {
		cmd := exec.CommandContext(ctx, os.Args[0], "donate", path, strconv.Itoa(len(files)))
		cmd.Env = append(os.Environ(), "AGENT_TEST_RUN=1", "GORACE=atexit_sleep_ms=0")
		cmd.ExtraFiles = files
		return cmd.Run()
	})
	defer d.Close()
	c := NewClient(ClientOptions{Dial: d.Dial})
	defer c.Close()
	for range 3 {
		if err := c.Health(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}
