//go:build linux

package usernet

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	dnsPort    = 53
	dnsIdle    = 30 * time.Second
	dnsTry     = 2 * time.Second // for one resolver, once
	dnsPending = 64              // questions of one sandbox at a time
	dnsSize    = 1232            // of a datagram that arrives whole everywhere
	maxChain   = 16              // aliases that one answer may go through
)

// HostResolvers returns a function that returns this machine's DNS servers as host:port,
// also after they have changed.
func HostResolvers() func() []string {
	const fresh = 5 * time.Second
	var mu sync.Mutex
	var at time.Time
	var list []string
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(at) > fresh {
			list, at = readResolvers("/etc/resolv.conf"), time.Now()
		}
		return list
	}
}

func readResolvers(file string) (out []string) {
	f, err := os.Open(file)
	if err != nil {
		return nil
	}
	defer f.Close()
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		if w := strings.Fields(sc.Text()); len(w) > 1 && w[0] == "nameserver" {
			out = append(out, net.JoinHostPort(w[1], "53"))
		}
	}
	return out
}

// serveDNS answers the questions that come over a connection to the gateway.
func (n *Net) serveDNS(ctx context.Context, c net.Conn, stream bool) {
	var wg sync.WaitGroup
	defer wg.Wait()
	var write sync.Mutex
	buf := make([]byte, 64<<10)
	for {
		_ = c.SetReadDeadline(time.Now().Add(dnsIdle))
		k, err := 0, error(nil)
		if stream {
			var size [2]byte
			if _, err = io.ReadFull(c, size[:]); err == nil {
				k, err = io.ReadFull(c, buf[:binary.BigEndian.Uint16(size[:])])
			}
		} else {
			k, err = c.Read(buf)
		}
		if err != nil {
			return
		}
		query := slices.Clone(buf[:k])
		select {
		case n.dnsSlots <- struct{}{}:
		default:
			continue // the sandbox asks again, or is up to no good
		}
		// Questions on one socket do not wait for each other: resolvers inside ask for
		// both kinds of address at once.
		wg.Go(func() {
			defer func() { <-n.dnsSlots }()
			answer := n.answer(ctx, query, stream)
			if answer == nil {
				return
			}
			if stream {
				answer = append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)
			}
			write.Lock()
			defer write.Unlock()
			_, _ = c.Write(answer)
		})
	}
}

// answer returns the answer to a question of the sandbox; nil for anything else.
func (n *Net) answer(ctx context.Context, query []byte, stream bool) []byte {
	var p dnsmessage.Parser
	h, err := p.Start(query)
	if err != nil || h.Response {
		return nil
	}
	reply := dnsmessage.Message{Header: dnsmessage.Header{ID: h.ID, Response: true, OpCode: h.OpCode, RecursionDesired: h.RecursionDesired, RecursionAvailable: true}}
	questions, err := p.AllQuestions()
	if err != nil || len(questions) != 1 {
		reply.RCode = dnsmessage.RCodeFormatError
		return pack(reply, 0)
	}
	q := questions[0]
	reply.Questions = questions
	limit, edns := 512, false
	if p.SkipAllAnswers() == nil && p.SkipAllAuthorities() == nil {
		if extra, err := p.AllAdditionals(); err == nil {
			for _, r := range extra {
				if r.Header.Type == dnsmessage.TypeOPT {
					edns = true
					limit = max(limit, min(int(r.Header.Class), 4096))
				}
			}
		}
	}
	if stream {
		limit = 0
	}
	blocked := false
	if h.OpCode != 0 || q.Class != dnsmessage.ClassINET || q.Type == dnsmessage.TypeALL {
		reply.RCode = dnsmessage.RCodeNotImplemented
	} else {
		reply.RCode, reply.Answers, blocked = n.resolve(ctx, q)
	}
	if edns {
		opt := dnsmessage.Resource{Body: &dnsmessage.OPTResource{}}
		if opt.Header.SetEDNS0(dnsSize, reply.RCode, false) == nil {
			if blocked {
				// Extended DNS Errors: 15 is "Blocked", then the text.
				opt.Body = &dnsmessage.OPTResource{Options: []dnsmessage.Option{{Code: 15, Data: append([]byte{0, 15}, "not allowed by the sandbox's network policy"...)}}}
			}
			reply.Additionals = []dnsmessage.Resource{opt}
		}
	}
	return pack(reply, limit)
}

// pack encodes m. If that is longer than limit (if not 0), it encodes an answer that says so, and the
// sandbox asks again over TCP.
func pack(m dnsmessage.Message, limit int) []byte {
	out, err := m.Pack()
	if err == nil && limit > 0 && len(out) > limit {
		m.Truncated, m.Answers = true, nil
		out, err = m.Pack()
	}
	if err != nil || len(out) > 0xffff {
		return nil
	}
	return out
}

// resolve asks this machine's resolvers for q and removes from the answer what the
// sandbox may not reach. The addresses that remain are pinned to the requested
// name: only the owner of a listed name can open anything, and nothing but
// addresses of the public internet.
func (n *Net) resolve(ctx context.Context, q dnsmessage.Question) (code dnsmessage.RCode, answers []dnsmessage.Resource, blocked bool) {
	name := domain(q.Name)
	if answers, known := n.known(q, name); known {
		return dnsmessage.RCodeSuccess, answers, false
	}
	n.mu.Lock()
	policy := n.policy
	n.mu.Unlock()
	if !policy.resolves(name) {
		return dnsmessage.RCodeNameError, nil, true
	}
	if len(policy.list) > 0 && (q.Type == dnsmessage.TypeHTTPS || q.Type == dnsmessage.TypeSVCB) {
		return dnsmessage.RCodeSuccess, nil, false // they contain addresses of their own; without them programs ask for A and AAAA
	}
	m, err := n.exchange(ctx, q)
	if err != nil {
		return dnsmessage.RCodeServerFailure, nil, false
	}
	if m.RCode != dnsmessage.RCodeSuccess && m.RCode != dnsmessage.RCodeNameError {
		return dnsmessage.RCodeServerFailure, nil, false
	}
	chain := aliases(name, m.Answers)
	type told struct {
		ip  netip.Addr
		ttl time.Duration
	}
	var list []told
	for _, r := range m.Answers {
		if r.Header.Class != dnsmessage.ClassINET || !slices.Contains(chain, domain(r.Header.Name)) ||
			r.Header.Type != q.Type && r.Header.Type != dnsmessage.TypeCNAME {
			continue // the sandbox did not ask for it
		}
		var ip netip.Addr
		may := func(ip netip.Addr) bool { return policy.tells(ip) && !n.own(ip) }
		switch b := r.Body.(type) {
		case *dnsmessage.AResource:
			ip = netip.AddrFrom4(b.A)
		case *dnsmessage.AAAAResource:
			ip = netip.AddrFrom16(b.AAAA)
		case *dnsmessage.HTTPSResource:
			blocked = !hints(&b.SVCBResource, may) || blocked
		case *dnsmessage.SVCBResource:
			blocked = !hints(b, may) || blocked
		}
		if ip.IsValid() {
			if !may(ip) {
				blocked = true
				continue
			}
			list = append(list, told{ip, time.Duration(r.Header.TTL) * time.Second})
		}
		r.Header.TTL = min(r.Header.TTL, uint32(pinMost/time.Second))
		answers = append(answers, r)
	}
	now := time.Now()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, t := range list {
		n.pins.add(t.ip, name, t.ttl, now)
	}
	return m.RCode, answers, blocked
}

// hostsTTL is how long, in seconds, a sandbox may keep answers from Options.Hosts.
const hostsTTL = 60

// known answers a question about a name or an address of Options.Hosts.
func (n *Net) known(q dnsmessage.Question, name string) (answers []dnsmessage.Resource, known bool) {
	add := func(body dnsmessage.ResourceBody) {
		answers = append(answers, dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: hostsTTL}, Body: body})
	}
	if q.Type == dnsmessage.TypePTR {
		for _, host := range slices.Sorted(maps.Keys(n.opts.Hosts)) {
			if to, err := dnsmessage.NewName(host + "."); err == nil && slices.ContainsFunc(n.opts.Hosts[host], func(ip netip.Addr) bool { return name == reverse(ip) }) {
				add(&dnsmessage.PTRResource{PTR: to})
			}
		}
		return answers, len(answers) > 0
	}
	addrs, known := n.opts.Hosts[name]
	for _, ip := range addrs {
		if ip = ip.Unmap(); ip.Is4() && q.Type == dnsmessage.TypeA {
			add(&dnsmessage.AResource{A: ip.As4()})
		} else if ip.Is6() && q.Type == dnsmessage.TypeAAAA {
			add(&dnsmessage.AAAAResource{AAAA: ip.As16()})
		}
	}
	return answers, known
}

// reverse is the name for a reverse lookup of an IPv4 address (RFC 1035, section
// 3.5); other addresses have none.
func reverse(ip netip.Addr) string {
	if ip = ip.Unmap(); !ip.Is4() {
		return ""
	}
	a := ip.As4()
	return fmt.Sprintf("%d.%d.%d.%d.in-addr.arpa", a[3], a[2], a[1], a[0])
}

// hints removes forbidden addresses from the hints of b (RFC 9460, section
// 7.3), and reports whether there were none. A hint that becomes empty, or is not a list of
// addresses, is removed completely, also from the keys that a client must understand.
func hints(b *dnsmessage.SVCBResource, told func(netip.Addr) bool) (all bool) {
	all = true
	for key, size := range map[dnsmessage.SVCParamKey]int{dnsmessage.SVCParamIPv4Hint: 4, dnsmessage.SVCParamIPv6Hint: 16} {
		list, ok := b.GetParam(key)
		if !ok {
			continue
		}
		var keep []byte
		for a := range slices.Chunk(list, size) {
			if ip, ok := netip.AddrFromSlice(a); ok && len(a) == size && told(ip) {
				keep = append(keep, a...)
			}
		}
		if len(keep) == len(list) {
			continue
		}
		all = false
		if len(keep) > 0 {
			b.SetParam(key, keep)
			continue
		}
		b.DeleteParam(key)
		if must, ok := b.GetParam(dnsmessage.SVCParamMandatory); ok {
			var rest []byte
			for k := range slices.Chunk(must, 2) {
				if len(k) == 2 && binary.BigEndian.Uint16(k) != uint16(key) {
					rest = append(rest, k...)
				}
			}
			if b.DeleteParam(dnsmessage.SVCParamMandatory); len(rest) > 0 {
				b.SetParam(dnsmessage.SVCParamMandatory, rest)
			}
		}
	}
	return all
}

// domain is a name in the form of policies.
func domain(name dnsmessage.Name) string {
	return strings.ToLower(strings.TrimSuffix(name.String(), "."))
}

// aliases returns name and the names that it leads to.
func aliases(name string, answers []dnsmessage.Resource) []string {
	chain := []string{name}
	for range maxChain {
		i := slices.IndexFunc(answers, func(r dnsmessage.Resource) bool {
			_, ok := r.Body.(*dnsmessage.CNAMEResource)
			return ok && domain(r.Header.Name) == chain[len(chain)-1]
		})
		if i < 0 {
			break
		}
		next := domain(answers[i].Body.(*dnsmessage.CNAMEResource).CNAME)
		if slices.Contains(chain, next) {
			break
		}
		chain = append(chain, next)
	}
	return chain
}

var errNoResolver = errors.New("no resolver answers")

// exchange asks the resolvers in turn, twice. It sends a new question: nothing else
// of the sandbox's message leaves it this way.
func (n *Net) exchange(ctx context.Context, q dnsmessage.Question) (*dnsmessage.Message, error) {
	var last *dnsmessage.Message
	for range 2 {
		for _, server := range n.opts.Resolvers() {
			m, err := ask(ctx, "udp", server, q)
			if err == nil && m.Truncated {
				m, err = ask(ctx, "tcp", server, q)
			}
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err != nil {
				continue
			}
			if m.RCode == dnsmessage.RCodeSuccess || m.RCode == dnsmessage.RCodeNameError {
				return m, nil
			}
			last = m
		}
		if last != nil {
			return last, nil
		}
	}
	return nil, errNoResolver
}

func ask(ctx context.Context, network, server string, q dnsmessage.Question) (*dnsmessage.Message, error) {
	query := dnsmessage.Message{Header: dnsmessage.Header{ID: uint16(rand.Uint32()), RecursionDesired: true}, Questions: []dnsmessage.Question{q}}
	opt := dnsmessage.Resource{Body: &dnsmessage.OPTResource{}}
	if err := opt.Header.SetEDNS0(dnsSize, dnsmessage.RCodeSuccess, false); err != nil {
		return nil, err
	}
	query.Additionals = []dnsmessage.Resource{opt}
	out, err := query.Pack()
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(dnsTry)
	c, err := (&net.Dialer{Deadline: deadline}).DialContext(ctx, network, server)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	_ = c.SetDeadline(deadline)
	if network == "tcp" {
		out = append(binary.BigEndian.AppendUint16(nil, uint16(len(out))), out...)
	}
	if _, err := c.Write(out); err != nil {
		return nil, err
	}
	buf := make([]byte, 64<<10)
	for {
		k := 0
		if network == "tcp" {
			var size [2]byte
			if _, err = io.ReadFull(c, size[:]); err == nil {
				k, err = io.ReadFull(c, buf[:binary.BigEndian.Uint16(size[:])])
			}
		} else {
			k, err = c.Read(buf)
		}
		if err != nil {
			return nil, err
		}
		m := &dnsmessage.Message{}
		if m.Unpack(buf[:k]) == nil && m.ID == query.ID && m.Response && len(m.Questions) == 1 &&
			m.Questions[0].Type == q.Type && m.Questions[0].Class == q.Class && domain(m.Questions[0].Name) == domain(q.Name) {
			return m, nil
		}
		if network == "tcp" {
			return nil, errors.New("an answer to another question")
		}
	}
}
