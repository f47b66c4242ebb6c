package vmpacker

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// A monitor is a connection to the control socket of a running qemu. A qemu talks to one
// client at a time, so connections are short.
type monitor struct {
	in    *json.Decoder
	out   *json.Encoder
	allow func(time.Duration) // how long the next command may take
	done  func()
}

// saveTime bounds reading or writing a machine's memory. qemu answers no command meanwhile.
const saveTime = 15 * time.Minute

// control connects to the machine whose files are in dir.
func control(ctx context.Context, dir string) (*monitor, error) {
	c, err := dialBelow(ctx, dir, "qmp")
	if err != nil {
		return nil, cmp.Or(ctx.Err(), err)
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	m := &monitor{in: json.NewDecoder(bufio.NewReader(c)), out: json.NewEncoder(c), done: func() { stop(); c.Close() },
		allow: func(d time.Duration) { c.SetDeadline(time.Now().Add(d)) }}
	m.allow(greetTime(ctx))
	var greeting struct{ QMP json.RawMessage }
	if err = m.in.Decode(&greeting); err == nil && greeting.QMP == nil {
		err = errors.New("no greeting")
	}
	if err != nil {
		err = fmt.Errorf("waiting for qemu's greeting: %w", err)
	} else {
		err = m.do("qmp_capabilities", nil, nil)
	}
	if err != nil {
		m.done()
		return nil, cmp.Or(ctx.Err(), err)
	}
	return m, nil
}

// do runs one command; it skips events that come meanwhile.
func (m *monitor) do(command string, args, result any) error {
	return m.ask(patience, command, args, result)
}

func (m *monitor) ask(d time.Duration, command string, args, result any) error {
	m.allow(d)
	q := map[string]any{"execute": command}
	if args != nil {
		q["arguments"] = args
	}
	if err := m.out.Encode(q); err != nil {
		return fmt.Errorf("telling qemu to %s: %w", command, err)
	}
	for {
		var a struct {
			Return json.RawMessage
			Error  *struct{ Class, Desc string }
			Event  string
		}
		if err := m.in.Decode(&a); err != nil {
			return fmt.Errorf("waiting for qemu's answer to %s: %w", command, err)
		}
		switch {
		case a.Event != "":
		case a.Error != nil:
			return fmt.Errorf("%s: %s", command, a.Error.Desc)
		case result != nil:
			return json.Unmarshal(a.Return, result)
		default:
			return nil
		}
	}
}

// job runs a background command of the monitor to its end.
func (m *monitor) job(ctx context.Context, command string, args map[string]any) error {
	id := fmt.Sprintf("job%d", time.Now().UnixNano())
	args["job-id"] = id
	if err := m.ask(saveTime, command, args, nil); err != nil {
		return err
	}
	for {
		var jobs []struct{ ID, Status, Error string }
		if err := m.ask(saveTime, "query-jobs", nil, &jobs); err != nil {
			return fmt.Errorf("%s: %w", command, err)
		}
		for _, j := range jobs {
			if j.ID != id || j.Status != "concluded" {
				continue
			}
			err := m.do("job-dismiss", map[string]any{"id": id}, nil)
			if j.Error != "" {
				err = errors.New(j.Error)
			}
			return err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// monitored runs f with the control socket of the machine at p.
func (e *extension) monitored(ctx context.Context, p *place, f func(*monitor) error) error {
	m, err := control(ctx, e.dir("vm", p.key()))
	if err != nil {
		return err
	}
	defer m.done()
	if err := f(m); err != nil {
		return cmp.Or(ctx.Err(), err)
	}
	return nil
}

// tell runs one command.
func (e *extension) tell(ctx context.Context, p *place, command string) error {
	return e.monitored(ctx, p, func(m *monitor) error { return m.do(command, nil, nil) })
}

// greetTime is how long qemu may take to greet: the caller's time limit if there is one,
// since qemu may be saving memory for an earlier caller.
func greetTime(ctx context.Context) time.Duration {
	if end, ok := ctx.Deadline(); ok {
		return time.Until(end)
	}
	return patience
}
