package engine

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/halfclose"
)

// Exec runs a command in a running container, as user, with streams, and returns how it ended.
// Its parameters are those of agent.RunFunc. When ctx is done the connection is closed, and with it
// the command's input: engines have no way to end a command.
func (a *API) Exec(ctx context.Context, id, user string, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
	var made struct{ ID string }
	err := a.request(ctx, "a command", http.MethodPost, "/containers/"+url.PathEscape(id)+"/exec", nil, map[string]any{
		"AttachStdin": true, "AttachStdout": true, "AttachStderr": true, "Cmd": args, "User": user,
	}, into(&made))
	if err != nil {
		return sandboxer.Exit{}, err
	}
	conn, r, err := a.attach(ctx, made.ID)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	go func() { // which ends with conn, or when in does
		_, err := io.Copy(conn, in)
		if err == nil {
			_ = halfclose.CloseWrite(conn)
		}
	}()
	err = demux(r, out, errs)
	if ctx.Err() != nil {
		return sandboxer.Exit{}, ctx.Err()
	}
	if err != nil {
		return sandboxer.Exit{}, sandboxer.E(sandboxer.Unavailable, err, "the streams of a command in the engine %s broke", a.o.Name)
	}
	// The streams may end a moment before the engine knows that the command has ended.
	var state struct {
		Running  bool
		ExitCode *int
	}
	for try := 0; ; try++ {
		err := a.request(ctx, "a command", http.MethodGet, "/exec/"+made.ID+"/json", nil, nil, into(&state))
		if err != nil {
			return sandboxer.Exit{}, err
		}
		if !state.Running && state.ExitCode != nil {
			return sandboxer.Exit{Code: *state.ExitCode}, nil
		}
		if try == 200 {
			return sandboxer.Exit{}, sandboxer.E(sandboxer.Unavailable, nil, "the engine %s does not report how a command ended", a.o.Name)
		}
		select {
		case <-ctx.Done():
			return sandboxer.Exit{}, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// attach starts a command, and returns the connection that carries its streams.
func (a *API) attach(ctx context.Context, exec string) (net.Conn, *bufio.Reader, error) {
	within, done, err := a.Attend(ctx)
	if err != nil {
		return nil, nil, err
	}
	conn, r, err := a.upgrade(within, exec)
	return conn, r, done(err)
}

func (a *API) upgrade(ctx context.Context, exec string) (_ net.Conn, _ *bufio.Reader, err error) {
	conn, err := a.o.Dial(ctx)
	if err != nil {
		return nil, nil, a.failed(ctx, err)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer func() {
		if !stop() && err == nil {
			err = a.failed(ctx, ctx.Err())
		}
		if err != nil {
			conn.Close()
		}
	}()
	body := []byte(`{"Detach":false,"Tty":false}`)
	r, err := http.NewRequest(http.MethodPost, "http://engine"+apiVersion+"/exec/"+url.PathEscape(exec)+"/start", bytes.NewReader(body))
	if err != nil {
		return nil, nil, sandboxer.E(sandboxer.Internal, err, "a request to the engine cannot be made")
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", "tcp")
	if err := r.Write(conn); err != nil {
		return nil, nil, a.failed(ctx, err)
	}
	br := bufio.NewReaderSize(conn, 32<<10)
	res, err := http.ReadResponse(br, r)
	if err != nil {
		return nil, nil, a.failed(ctx, err)
	}
	if res.StatusCode != http.StatusSwitchingProtocols && res.StatusCode != http.StatusOK {
		return nil, nil, a.said("a command", res)
	}
	return conn, br, nil
}

// demux separates the streams that an engine sends as one, until they end.
func demux(r io.Reader, out, errs io.Writer) error {
	var head [8]byte
	for {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		to := out
		switch head[0] {
		case 0, 1:
		case 2:
			to = errs
		default:
			return fmt.Errorf("a frame begins with %d", head[0])
		}
		if _, err := io.CopyN(to, r, int64(binary.BigEndian.Uint32(head[4:]))); err != nil {
			return err
		}
	}
}
