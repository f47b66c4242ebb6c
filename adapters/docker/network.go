package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/usernet"
	"github.com/sand-boxer/sandboxer/internal/usernet/tap"
)

// A filtered network is a device in the container's own, which else has its loopback alone. The other end of
// it is here: a TCP/IP stack that asks the policy (package usernet). The engine has no part in that, and what
// runs inside has not the right to change it. The device ends with this process, so that without a
// server nothing gets out; the next one makes another (reconnect).

// device is the name that the way out has inside.
const device = "eth0"

// A link is the network of a sandbox.
type link struct {
	net   *usernet.Net  // nil for one that is not taken up yet
	tried chan struct{} // closed when that was tried; nil for one that was made here
}

func networked(p sandboxer.NetworkPolicy) bool {
	return p.Mode != "" && p.Mode != sandboxer.NetworkNone
}

// unfiltered reports whether p is for the engine's own network.
func (e *extension) unfiltered(p sandboxer.NetworkPolicy) bool {
	return p.Mode == sandboxer.NetworkPublic && e.cfg.UnfilteredEgress
}

// mayFilter reports whether this process may make devices in the networks of others on this machine. gVisor
// takes what there is in a container's network when it starts, and nothing later.
func mayFilter(cfg Config) bool {
	hdr := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if cfg.Runtime != "" || unix.Capget(hdr, &data[0]) != nil {
		return false
	}
	// To open the network of a process that has other rights, to enter it, and to change it.
	const need = 1<<unix.CAP_SYS_PTRACE | 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_NET_ADMIN
	return data[0].Effective&need == need && unix.Access("/dev/net/tun", unix.R_OK|unix.W_OK) == nil
}

// filters reports whether the networks of sandboxes of h can be filtered, as far as that is known before
// there is one.
func (e *extension) filters(h *host) bool { return e.mayFilter && h.socket != "" }

// filtersAny reports whether those of any host can be.
func (e *extension) filtersAny() bool {
	for _, h := range e.hosts {
		if e.filters(h) {
			return true
		}
	}
	return false
}

// checkNetwork refuses a policy that could not be kept on h; with nil, on any host.
func (e *extension) checkNetwork(h *host, p sandboxer.NetworkPolicy) error {
	if !networked(p) || e.unfiltered(p) || h == nil && e.filtersAny() || h != nil && e.filters(h) {
		return nil
	}
	where := ""
	if h != nil && h.socket == "" {
		where = " on the engine " + h.name + ", which is on another machine"
	}
	err := sandboxer.E(sandboxer.Unsupported, nil, "%s cannot filter what a sandbox reaches%s", e.env.Extension, where)
	if p.Mode == sandboxer.NetworkPublic {
		return err.WithHint("use a profile without a network, or have the operator set unfiltered_egress: true in the config of %s", e.env.Extension)
	}
	return err.WithHint("use a profile without a network, or ext.local")
}

// linkOptions make p ready to be enforced. Invalid: it cannot be.
func (e *extension) linkOptions(p sandboxer.NetworkPolicy) (usernet.Options, error) {
	never, err := e.cfg.never()
	if err != nil {
		return usernet.Options{}, err
	}
	policy, err := usernet.NewPolicy(p, never)
	return usernet.Options{Policy: policy, Resolvers: e.resolvers}, err
}

// plug makes the network of a container that runs, or stands still, in place of the one that it has. The
// caller holds the sandbox's lock.
func (e *extension) plug(ctx context.Context, b *box, p sandboxer.NetworkPolicy) error {
	opts, err := e.linkOptions(p)
	if err != nil {
		return err
	}
	c, err := b.host.api.InspectContainer(ctx, b.container)
	if err != nil {
		return err
	}
	first, err := b.host.here(c)
	if err != nil {
		return sandboxer.E(sandboxer.Unsupported, err, "the network of sandbox %s cannot be filtered: %v", b.id, err).
			WithHint("use a profile without a network, or have the operator set unfiltered_egress: true in the config of %s", e.env.Extension)
	}
	defer first.Close()
	failed := func(err error) error {
		kind := sandboxer.Unavailable
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) { // the server has not all of root's rights
			kind = sandboxer.Unsupported
		}
		return sandboxer.E(kind, err, "the network of sandbox %s could not be made: %v", b.id, err)
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", first.pid))
	if err != nil {
		return failed(err)
	}
	defer ns.Close()
	if err := first.alive(); err != nil { // so what was opened is its
		return failed(err)
	}
	theirs, err := ns.Stat()
	if err != nil {
		return failed(err)
	}
	if ours, err := os.Stat("/proc/self/ns/net"); err != nil || os.SameFile(ours, theirs) {
		return failed(errors.Join(err, errors.New("the container has no network of its own")))
	}
	dev, err := tap.In(ns, device)
	if err != nil {
		return failed(err)
	}
	n, err := usernet.OnDevice(opts, dev)
	if err != nil {
		return failed(err)
	}
	e.mu.Lock()
	if e.ctx.Err() != nil {
		e.mu.Unlock()
		n.Close()
		return e.ctx.Err()
	}
	l := e.links[b.key()]
	if l == nil {
		l = &link{}
		e.links[b.key()] = l
	}
	old := l.net
	l.net = n
	e.mu.Unlock()
	if old != nil {
		old.Close()
	}
	return nil
}

// plugged is the network that a sandbox has from this process, nil without.
func (e *extension) plugged(key string) *usernet.Net {
	e.mu.Lock()
	defer e.mu.Unlock()
	if l := e.links[key]; l != nil {
		return l.net
	}
	return nil
}

// unplug ends the network of a sandbox.
func (e *extension) unplug(key string) {
	e.mu.Lock()
	l := e.links[key]
	delete(e.links, key)
	e.mu.Unlock()
	if l != nil && l.net != nil {
		l.net.Close()
	}
}

// apply has p be in force. The caller holds the sandbox's lock, and has written p down.
func (e *extension) apply(ctx context.Context, b *box, p sandboxer.NetworkPolicy) error {
	if n := e.plugged(b.key()); n != nil {
		opts, err := e.linkOptions(p)
		if err == nil {
			n.SetPolicy(opts.Policy)
		}
		return err
	}
	if !networked(p) {
		return nil
	}
	return e.plug(ctx, b, p)
}

// SetNetwork implements sandboxer.Networker. What is in the record is what the next process enforces: it is
// written first, and taken back when it could not be put in force.
func (e *extension) SetNetwork(ctx context.Context, h sandboxer.Handle, p sandboxer.NetworkPolicy) error {
	if _, err := e.linkOptions(p); err != nil {
		return err
	}
	b, err := e.running(ctx, h)
	if err != nil {
		return err
	}
	m, err := readMade(b.labels)
	if err != nil {
		return err
	}
	if m.Mode == string(sandboxer.NetworkPublic) {
		if p.Mode == sandboxer.NetworkPublic {
			return nil
		}
		return sandboxer.E(sandboxer.Unsupported, nil, "sandbox %s has the engine's network, which is not filtered and cannot be taken away", b.id).
			WithHint("make one without a network")
	}
	if !e.filters(b.host) && networked(p) {
		return sandboxer.E(sandboxer.Unsupported, nil, "the network of sandbox %s cannot be filtered on the engine %s", b.id, b.host.name).WithHint("use ext.local")
	}
	l, err := e.lock(ctx, b.key(), filelock.Exclusive)
	if err != nil {
		return err
	}
	defer l.Remove()
	if b, err = e.running(ctx, e.handle(b)); err != nil {
		return err
	}
	r, err := e.recall(b.key())
	if err != nil {
		return err
	}
	former := r
	r.Network = p
	if r.Host == "" {
		r.Host = b.host.name
	}
	if err := e.remember(b.key(), r); err != nil {
		return err
	}
	if err := e.apply(ctx, b, p); err != nil {
		return errors.Join(err, e.remember(b.key(), former))
	}
	return nil
}

// resolve has names asked of the link's own end where the engine does not: Podman makes no configuration of
// a resolver for a container without a network.
func (e *extension) resolve(ctx context.Context, c *agent.Client, b *box, m made) error {
	if m.Mode == string(sandboxer.NetworkPublic) || !e.filters(b.host) {
		return nil
	}
	info, err := b.host.look(ctx)
	if err != nil || !info.Podman {
		return err
	}
	text := "nameserver " + usernet.Gateway.String() + "\n"
	var file bytes.Buffer
	w := tar.NewWriter(&file)
	err = w.WriteHeader(&tar.Header{Name: "resolv.conf", Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(text))})
	if err == nil {
		_, err = io.WriteString(w, text)
	}
	if err = errors.Join(err, w.Close()); err != nil {
		return err
	}
	return must(ctx, c, "configuring the resolver", &file, agentPath, "untar", "--replace", "/etc")
}

const (
	// replugEvery is between two tries to take up a sandbox's network, at first; maxReplug is the most.
	replugEvery = time.Second
	maxReplug   = time.Minute
)

// reconnect takes up the networks of sandboxes that a former process had. It waits for nobody: calls
// that need one do (await).
func (e *extension) reconnect() error {
	if !e.mayFilter {
		return nil
	}
	files, err := os.ReadDir(e.dir("box")) // not Glob, which finds nothing where it cannot look
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "which sandboxes of %s have a network cannot be read", e.env.Extension).
			WithHint("see that the account that runs sandboxer may read %s", e.dir("box"))
	}
	for _, f := range files {
		k, ok := strings.CutSuffix(f.Name(), ".json")
		if !ok {
			continue
		}
		r, err := e.recall(k)
		if err != nil || !r.Ready || !networked(r.Network) || e.hosts[r.Host] == nil {
			continue // whoever asks for the sandbox is told
		}
		l := &link{tried: make(chan struct{})}
		e.mu.Lock()
		e.links[k] = l
		e.mu.Unlock()
		e.work.Go(func() { e.replug(k, l) })
	}
	return nil
}

// replug takes up one, until it is there or the sandbox is gone.
func (e *extension) replug(k string, l *link) {
	wait := replugEvery
	for first := true; ; first = false {
		err := e.replugOnce(k, l)
		if first {
			close(l.tried)
		}
		if err == nil || e.ctx.Err() != nil {
			return
		}
		if first {
			e.log.Warn("a sandbox is without its network until it can be taken up", "extension", e.env.Extension, "sandbox", k, "err", err)
		}
		select {
		case <-time.After(wait):
			wait = min(2*wait, maxReplug)
		case <-e.ctx.Done():
			return
		}
	}
}

func (e *extension) replugOnce(k string, l *link) error {
	i := strings.LastIndex(k, ".g")
	if i < 0 {
		return nil
	}
	generation, err := strconv.Atoi(k[i+2:])
	if err != nil {
		return nil // not of this adapter's
	}
	held, err := e.lock(e.ctx, k, filelock.Exclusive)
	if err != nil {
		return err
	}
	defer held.Remove()
	e.mu.Lock()
	done := e.links[k] != l || l.net != nil // somebody else did, or it is gone
	e.mu.Unlock()
	if done {
		return nil
	}
	r, err := e.recall(k)
	if err != nil {
		return err
	}
	h, err := e.host(r.Host)
	if err != nil || !networked(r.Network) {
		return nil
	}
	there, err := e.on(e.ctx, h, k[:i], generation)
	if err != nil {
		return err
	}
	for _, b := range there {
		if b.state == "running" || b.state == "paused" {
			return e.plug(e.ctx, b, r.Network)
		}
	}
	return nil
}

// await waits until it was tried to take up the network of a sandbox.
func (e *extension) await(ctx context.Context, b *box) error {
	e.mu.Lock()
	l := e.links[b.key()]
	e.mu.Unlock()
	if l == nil || l.tried == nil {
		return nil
	}
	select {
	case <-l.tried:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
