package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/usernet"
	"github.com/sand-boxer/sandboxer/internal/usernet/tap"
)

// A filtered network is a device in the container's own network, which otherwise has only its loopback. The
// other end is here: a TCP/IP stack that applies the policy (package usernet). The engine is not involved,
// and processes inside may not change the device. It ends with this process, so that without a server there
// is no network; the next server makes another one (reconnect).

// device is the name of the interface inside.
const device = "eth0"

// A link is the network of a sandbox.
type link struct {
	net   *usernet.Net  // nil for one that is not reconnected yet
	tried chan struct{} // closed after the first attempt; nil for one that was made here
}

func networked(p sandboxer.NetworkPolicy) bool {
	return p.Mode != "" && p.Mode != sandboxer.NetworkNone
}

// unfiltered reports whether p is for the engine's own network.
func (e *extension) unfiltered(p sandboxer.NetworkPolicy) bool {
	return p.Mode == sandboxer.NetworkPublic && e.cfg.UnfilteredEgress
}

// mayFilter reports whether this process may make devices in the networks of other processes on this machine.
// gVisor uses the devices that a container's network has when it starts, and no later ones.
func mayFilter(cfg Config) bool {
	hdr := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if cfg.Runtime != "" || unix.Capget(hdr, &data[0]) != nil {
		return false
	}
	// To open the network of a process with other rights, to enter it, and to change it.
	const need = 1<<unix.CAP_SYS_PTRACE | 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_NET_ADMIN
	return data[0].Effective&need == need && unix.Access("/dev/net/tun", unix.R_OK|unix.W_OK) == nil
}

// filters reports whether the networks of sandboxes of h can be filtered, as far as that is known before
// there is one.
func (e *extension) filters(h *host) bool { return e.mayFilter && h.socket != "" }

// filtersAny reports whether any host can filter.
func (e *extension) filtersAny() bool {
	for _, h := range e.hosts {
		if e.filters(h) {
			return true
		}
	}
	return false
}

// checkNetwork refuses a policy that h cannot enforce; with nil, that no host can.
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

// linkOptions prepares p for enforcement. Invalid: it cannot be enforced.
func (e *extension) linkOptions(p sandboxer.NetworkPolicy) (usernet.Options, error) {
	never, err := e.cfg.never()
	if err != nil {
		return usernet.Options{}, err
	}
	policy, err := usernet.NewPolicy(p, never)
	return usernet.Options{Policy: policy, Resolvers: e.resolvers}, err
}

// plug replaces the network of a running or paused container. The caller holds the sandbox's lock.
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
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) { // the server lacks some of root's rights
			kind = sandboxer.Unsupported
		}
		return sandboxer.E(kind, err, "the network of sandbox %s could not be made: %v", b.id, err)
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", first.PID))
	if err != nil {
		return failed(err)
	}
	defer ns.Close()
	if err := first.Alive(); err != nil { // so the opened network was its own
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

// plugged is a sandbox's network in this process, nil without.
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

// apply puts p in force. The caller holds the sandbox's lock, and has recorded p.
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

// SetNetwork implements sandboxer.Networker. The next process enforces the record: it is written first, and
// reverted if the policy could not be put in force.
func (e *extension) SetNetwork(ctx context.Context, h sandboxer.Handle, p sandboxer.NetworkPolicy) error {
	if _, err := e.linkOptions(p); err != nil {
		return err
	}
	b, unlock, err := e.alone(ctx, h)
	if err != nil {
		return err
	}
	defer unlock()
	if err := e.runs(ctx, b); err != nil {
		return err
	}
	if b.made.Mode == string(sandboxer.NetworkPublic) {
		if p.Mode == sandboxer.NetworkPublic {
			return nil
		}
		return sandboxer.E(sandboxer.Unsupported, nil, "sandbox %s has the engine's network, which is not filtered and cannot be taken away", b.id).
			WithHint("make one without a network")
	}
	if !e.filters(b.host) && networked(p) {
		return sandboxer.E(sandboxer.Unsupported, nil, "the network of sandbox %s cannot be filtered on the engine %s", b.id, b.host.name).WithHint("use ext.local")
	}
	r, err := e.recall(ctx, b.key())
	if err != nil {
		return err
	}
	former := r
	r.Network = p
	if r.Host == "" {
		r.Host = b.host.name
	}
	if err := e.remember(ctx, b.key(), r); err != nil {
		return err
	}
	if err := e.apply(ctx, b, p); err != nil {
		return errors.Join(err, e.remember(context.WithoutCancel(ctx), b.key(), former))
	}
	return nil
}

// resolve makes the link's own end the resolver if the engine does not: Podman configures none for a
// container without a network.
func (e *extension) resolve(ctx context.Context, c *agent.Client, b *box) error {
	if b.made.Mode == string(sandboxer.NetworkPublic) || !e.filters(b.host) {
		return nil
	}
	info, err := b.host.look(ctx)
	if err != nil || !info.Podman {
		return err
	}
	text := "nameserver " + usernet.Gateway.String() + "\n"
	var file bytes.Buffer
	w := tar.NewWriter(&file)
	if err := errors.Join(putFile(w, "resolv.conf", 0o644, []byte(text)), w.Close()); err != nil {
		return err
	}
	return inside.Run(ctx, c.Exec, "configuring the resolver", sandboxer.Cmd{Args: []string{agentPath, "untar", "--replace", "/etc"}, Dir: "/", User: "0", Stdin: &file})
}

const (
	// replugEvery is the first pause between attempts to reconnect a sandbox's network; maxReplug is the
	// longest.
	replugEvery = time.Second
	maxReplug   = time.Minute
)

// reconnect reconnects the networks of sandboxes of an earlier process. It does not wait: calls that need
// one do (await).
func (e *extension) reconnect(keys []string) {
	if !e.mayFilter {
		return
	}
	for _, k := range keys {
		r, err := e.recall(e.ctx, k)
		if err != nil || !r.Ready || !networked(r.Network) || e.hosts[r.Host] == nil {
			continue // the next call for the sandbox reports it
		}
		l := &link{tried: make(chan struct{})}
		e.mu.Lock()
		e.links[k] = l
		e.mu.Unlock()
		e.work.Go(func() { e.replug(k, r.Host, l) })
	}
}

// replug reconnects one, until it works or the sandbox is gone.
func (e *extension) replug(k, host string, l *link) {
	wait := replugEvery
	for first := true; ; first = false {
		err := e.replugOnce(k, host, l)
		if first {
			close(l.tried)
		}
		if err == nil || e.ctx.Err() != nil {
			return
		}
		if first {
			e.log.Warn("a sandbox has no network until the server can serve it again", "extension", e.env.Extension, "sandbox", k, "err", err)
		}
		select {
		case <-time.After(wait):
			wait = min(2*wait, maxReplug)
		case <-e.ctx.Done():
			return
		}
	}
}

func (e *extension) replugOnce(k, host string, l *link) error {
	i := strings.LastIndex(k, ".g")
	if i < 0 {
		return nil
	}
	generation, err := strconv.Atoi(k[i+2:])
	if err != nil {
		return nil // another adapter's
	}
	b, unlock, err := e.alone(e.ctx, sandboxer.Handle{SandboxID: k[:i], Generation: generation, Host: host})
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	e.mu.Lock()
	done := e.links[k] != l || l.net != nil // by another call, or the sandbox is gone
	e.mu.Unlock()
	r, err := e.recall(e.ctx, k)
	if err != nil || done || !networked(r.Network) || b.state != "running" && b.state != "paused" {
		return err
	}
	return e.plug(e.ctx, b, r.Network)
}

// await waits for the first attempt to reconnect a sandbox's network.
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
