package composessh

import (
	"context"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

const (
	// pulseEvery is how often an engine of which something is awaited, and nothing heard, is
	// asked whether it is there, and how long it may take to answer that.
	pulseEvery = 5 * time.Second
	// pulseMisses is how many times in a row it does not answer before calls that need it
	// end. It is more than one for a host, or a broker, that stood still.
	pulseMisses = 3
	// pulseRecheck is how long a call waits for a sign of an engine that did not answer.
	pulseRecheck = 2 * time.Second
)

// A pulse watches the engine of a host while calls that need it are under way, so that
// they end when it hangs. How long a call takes says nothing: an engine may have an image
// of gigabytes to unpack. The host itself is sshrun's business. Podman has no process that
// could hang, and is not watched.
type pulse struct {
	every time.Duration // pulseEvery, but for tests
	hung  error         // why calls end
	// ask asks the engine whether it is there. hung: it does not answer, by the word of its
	// host; any other error says nothing of the engine.
	ask   func(context.Context) error
	told  func(answers bool)                       // called without locks when that changes
	start func(owed []func(context.Context) error) // has what is owed done

	mu       sync.Mutex
	calls    map[*attended]struct{}
	beat     *time.Timer // nil while there are no calls
	checking chan struct{}
	said     error     // what came of the last check
	heard    time.Time // its last answer, of any kind
	missed   int
	since    time.Time // it does not answer; zero while it does
	owed     []func(context.Context) error
}

// An attended is a call under way.
type attended struct {
	ctx    context.Context // what it came with
	cancel context.CancelCauseFunc
}

// attend returns ctx that also ends, with p.hung as its cause, when the engine does not
// answer; done must be called with the error of the call, and returns what the call is to
// answer. A nil pulse attends to nothing.
func (p *pulse) attend(ctx context.Context) (_ context.Context, done func(error) error, err error) {
	if p == nil {
		return ctx, func(err error) error { return err }, nil
	}
	if p.isHung() {
		if err := p.check(ctx, min(pulseRecheck, p.every)); err == p.hung {
			return nil, nil, err
		}
	}
	a := &attended{ctx: ctx}
	within, cancel := context.WithCancelCause(ctx)
	a.cancel = cancel
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.calls == nil {
		p.calls = map[*attended]struct{}{}
	}
	p.calls[a] = struct{}{}
	if p.beat == nil {
		p.missed = 0
		p.beat = time.AfterFunc(p.every, p.tick)
	}
	return within, func(err error) error {
		p.mu.Lock()
		delete(p.calls, a)
		p.mu.Unlock()
		if err != nil && context.Cause(within) == p.hung {
			err = p.hung
		}
		cancel(nil)
		return err
	}, nil
}

func (p *pulse) isHung() bool {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.since.IsZero()
}

// hear notes that the engine answered something.
func (p *pulse) hear() {
	if p == nil {
		return
	}
	p.mu.Lock()
	p.heard, p.missed = time.Now(), 0
	again := !p.since.IsZero()
	p.since = time.Time{}
	owed := p.owed
	p.owed = nil
	p.mu.Unlock()
	if again {
		p.told(true)
	}
	if len(owed) > 0 {
		p.start(owed)
	}
}

// hang notes that the engine had its time to answer.
func (p *pulse) hang() {
	p.mu.Lock()
	first := p.since.IsZero()
	if first {
		p.since = time.Now()
	}
	p.mu.Unlock()
	if first {
		p.told(false)
	}
}

// owe has f done once the engine answers again.
func (p *pulse) owe(f func(context.Context) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.owed) >= maxOwed {
		p.owed = p.owed[1:]
	}
	p.owed = append(p.owed, f)
}

// maxOwed bounds what waits for an engine; every sandbox is ended sooner or later anyway.
const maxOwed = 1024

// check asks the engine whether it is there, once for all who want to know, and waits for
// an answer as long as limit.
func (p *pulse) check(ctx context.Context, limit time.Duration) error {
	p.mu.Lock()
	ch := p.checking
	if ch == nil {
		ch = make(chan struct{})
		p.checking = ch
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), 3*p.every)
			defer cancel()
			err := p.ask(ctx)
			if err == nil {
				p.hear()
			}
			p.mu.Lock()
			p.checking, p.said = nil, err
			p.mu.Unlock()
			close(ch)
		}()
	}
	p.mu.Unlock()
	begun := time.Now()
	over := time.NewTimer(limit)
	defer over.Stop()
	select {
	case <-ch:
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.said
	case <-ctx.Done():
		return ctx.Err()
	case <-over.C:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.heard.Before(begun) {
		return p.hung
	}
	return nil
}

// tick looks after the calls under way.
func (p *pulse) tick() {
	p.mu.Lock()
	if len(p.calls) == 0 {
		p.beat = nil
		p.mu.Unlock()
		return
	}
	quiet := time.Since(p.heard)
	p.mu.Unlock()
	var err error
	if quiet > p.every/2 {
		err = p.check(context.Background(), 4*p.every) // it ends by itself
	}
	if first := p.tell(err); first {
		p.told(false)
	}
}

// tell tells the calls under way what came of asking the engine. first: they are the
// first that end for want of an answer.
func (p *pulse) tell(err error) (first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.beat.Reset(p.every)
	switch {
	case err != p.hung:
		return false
	case time.Since(p.heard) < p.every:
		return false
	}
	p.beat.Reset(p.every / 100) // the rest of the time went by while it was asked
	p.missed++
	for a := range p.calls {
		if p.missed >= pulseMisses {
			a.cancel(p.hung)
		} else {
			sandboxer.ReportProgress(a.ctx, sandboxer.Progress{Step: "waiting: " + sandboxer.Message(p.hung)})
		}
	}
	if p.missed < pulseMisses || !p.since.IsZero() {
		return false
	}
	p.since = time.Now()
	return true
}

// answering exits with 0 if the engine $1 answers within $2 seconds, with 124 if it does
// not. It may say that it is not there: that is an answer.
const answering = `
"$1" version >/dev/null 2>&1 & p=$!
i=0
while kill -0 $p 2>/dev/null; do
	[ $i -lt $(($2*10)) ] || { kill -KILL $p; exit 124; }
	if sleep 0.1 2>/dev/null; then i=$((i+1)); else sleep 1; i=$((i+10)); fi
done
exit 0`

// pulse returns that of h's engine, nil where there is nothing to watch.
func (e *extension) pulse(h *host) *pulse {
	if h.known.engine != "docker" {
		return nil
	}
	return e.pulseOf(h.Host)
}

// pulseOf is pulse for a host whose engine is Docker.
func (e *extension) pulseOf(h *sshrun.Host) *pulse {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p := e.pulses[h.Name()]; p != nil {
		return p
	}
	p := &pulse{every: e.every}
	p.hung = sandboxer.E(sandboxer.Unavailable, nil, "the engine (docker) on host %s does not answer", h.Name()).
		WithHint("it is tried again, and what runs there goes on; look at the engine on that host: docker info")
	p.ask = func(ctx context.Context) error {
		// The host may have changed its address since.
		ho, err := e.host(h.Name())
		if err != nil {
			return err
		}
		exit, err := ho.Ask(ctx, sshrun.Cmd{Script: answering, Args: []string{"docker", strconv.Itoa(max(1, int(p.every/time.Second)))}, Env: e.engineEnv()})
		if err == nil && exit.Code == 124 {
			err = p.hung
		}
		return err
	}
	p.told = func(answers bool) {
		switch {
		case e.env.Log == nil:
		case answers:
			e.env.Log.Info("an engine answers again", "extension", e.env.Extension, "host", h.Name())
		default:
			e.env.Log.Warn("an engine does not answer; calls that need it end", "extension", e.env.Extension, "host", h.Name())
		}
	}
	p.start = func(owed []func(context.Context) error) { e.do(p, owed) }
	e.pulses[h.Name()] = p
	return p
}

// do does what was owed to an engine, until the extension is closed.
func (e *extension) do(p *pulse, owed []func(context.Context) error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ctx.Err() != nil {
		return
	}
	e.work.Go(func() {
		for _, f := range owed {
			ctx, cancel := context.WithTimeout(e.ctx, killTime)
			err := f(ctx)
			cancel()
			switch {
			case err == nil:
			case p.isHung():
				p.owe(f)
			case e.env.Log != nil && e.ctx.Err() == nil:
				e.env.Log.Warn("what was owed to an engine that did not answer could not be done", "extension", e.env.Extension, "err", err)
			}
		}
	})
}

// ask runs a script on h, as e.script does, that needs the engine. Unavailable: the engine
// does not answer.
func (e *extension) ask(ctx context.Context, h *host, env map[string]string, stdin io.Reader, script string, args ...string) (string, error) {
	p := e.pulse(h)
	ctx, done, err := p.attend(ctx)
	if err != nil {
		return "", err
	}
	out, err := e.script(ctx, h, env, stdin, script, args...)
	if err == nil {
		p.hear()
	}
	return out, done(err)
}
