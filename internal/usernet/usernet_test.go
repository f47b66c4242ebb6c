//go:build linux

package usernet

import (
	"net/netip"
	"reflect"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sand-boxer/sandboxer"
)

func policy(t testing.TB, p sandboxer.NetworkPolicy) Policy {
	t.Helper()
	out, err := NewPolicy(p, []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestPolicyDials(t *testing.T) {
	list := policy(t, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"example.org:443", "*.wild.example", "192.0.2.0/24:80", "10.0.0.0/8", "0.0.0.0/0:53"}})
	public := policy(t, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic})
	for _, tc := range []struct {
		p     Policy
		to    string
		names []string
		want  bool
	}{
		{list, "203.0.113.1:443", []string{"example.org"}, true}, {list, "203.0.113.1:80", []string{"example.org"}, false},
		{list, "203.0.113.1:443", []string{"other.example"}, false}, {list, "203.0.113.1:9", []string{"other.example", "a.wild.example"}, true},
		{list, "203.0.113.1:443", nil, false}, {list, "192.0.2.9:80", nil, true}, {list, "192.0.2.9:81", nil, false},
		{list, "10.1.2.3:5432", nil, true}, {list, "192.168.1.1:53", nil, false}, {list, "1.1.1.1:53", nil, true},
		{list, "169.254.169.254:53", nil, false}, {list, "198.51.100.7:53", nil, false}, {list, "10.1.2.3:0", nil, false},
		// A name never opens what is not public, whatever was pinned.
		{list, "192.168.1.1:443", []string{"example.org"}, false}, {list, "127.0.0.1:443", []string{"example.org"}, false},
		{public, "203.0.113.1:25", nil, true}, {public, "10.1.2.3:80", nil, false}, {public, "198.51.100.7:80", nil, false}, {public, "[2001:db8::1]:80", nil, true},
		{Policy{}, "203.0.113.1:25", nil, false},
	} {
		if got := tc.p.dials(netip.MustParseAddrPort(tc.to), tc.names); got != tc.want {
			t.Errorf("%s %v %s %v: %t", tc.p.mode, tc.p.list, tc.to, tc.names, got)
		}
	}
}

// TestHints: what may not be reached is not told by way of a service's hints either.
func TestHints(t *testing.T) {
	public := policy(t, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic})
	v4 := func(list ...string) (out []byte) {
		for _, s := range list {
			out = append(out, netip.MustParseAddr(s).AsSlice()...)
		}
		return out
	}
	for _, tc := range []struct {
		name       string
		give, want []dnsmessage.SVCParam
		all        bool
	}{
		{"public", []dnsmessage.SVCParam{{Key: 1, Value: []byte("\x02h2")}, {Key: 4, Value: v4("203.0.113.1")}, {Key: 6, Value: v4("2001:db8::1")}},
			[]dnsmessage.SVCParam{{Key: 1, Value: []byte("\x02h2")}, {Key: 4, Value: v4("203.0.113.1")}, {Key: 6, Value: v4("2001:db8::1")}}, true},
		{"some", []dnsmessage.SVCParam{{Key: 4, Value: v4("169.254.169.254", "203.0.113.1", "10.0.0.1")}}, []dnsmessage.SVCParam{{Key: 4, Value: v4("203.0.113.1")}}, false},
		{"none left", []dnsmessage.SVCParam{{Key: 0, Value: []byte{0, 1, 0, 4}}, {Key: 1, Value: []byte("\x02h2")}, {Key: 4, Value: v4("192.168.1.1")}, {Key: 6, Value: v4("fd00:ec2::254")}},
			[]dnsmessage.SVCParam{{Key: 0, Value: []byte{0, 1}}, {Key: 1, Value: []byte("\x02h2")}}, false},
		{"only that", []dnsmessage.SVCParam{{Key: 0, Value: []byte{0, 4}}, {Key: 4, Value: v4("127.0.0.1")}}, nil, false},
		{"no list", []dnsmessage.SVCParam{{Key: 4, Value: []byte{10, 0, 0}}, {Key: 6, Value: v4("::ffff:10.0.0.1", "2001:db8::1")[:20]}}, nil, false},
	} {
		b := &dnsmessage.SVCBResource{Params: tc.give}
		if all := hints(b, public.tells); all != tc.all || len(b.Params) != len(tc.want) || len(tc.want) > 0 && !reflect.DeepEqual(b.Params, tc.want) {
			t.Errorf("%s: %t, %v; want %t, %v", tc.name, all, b.Params, tc.all, tc.want)
		}
	}
}

func TestPins(t *testing.T) {
	var p pins
	a, now := netip.MustParseAddr("203.0.113.1"), time.Now()
	p.add(a, "x.example", time.Second, now)
	p.add(a, "y.example", 24*time.Hour, now)
	for after, want := range map[time.Duration]int{0: 2, pinLeast - time.Second: 2, pinLeast + time.Second: 1, pinMost + time.Second: 0} {
		if got := p.names(a, now.Add(after)); len(got) != want {
			t.Errorf("after %s: %v; want %d", after, got, want)
		}
	}
	p.add(a, "y.example", time.Second, now) // never shortens
	if got := p.names(a, now.Add(pinMost-time.Second)); len(got) != 1 {
		t.Errorf("a short answer took away a longer one: %v", got)
	}
	for i := range 2 * maxPins {
		p.add(netip.AddrFrom4([4]byte{9, byte(i >> 16), byte(i >> 8), byte(i)}), "z.example", time.Second, now)
	}
	if p.count != maxPins {
		t.Errorf("%d pins; want %d", p.count, maxPins)
	}
	p.add(a, "late.example", time.Second, now.Add(pinLeast+time.Second)) // makes room
	if got := p.names(a, now.Add(pinLeast+2*time.Second)); len(got) != 2 || p.count > 3 {
		t.Errorf("after a prune %v, %d in all", got, p.count)
	}
}

func TestPublic(t *testing.T) {
	may := Public([]netip.Prefix{netip.MustParsePrefix("8.8.0.0/16")})
	for s, want := range map[string]bool{"1.1.1.1": true, "8.8.8.8": false, "10.0.0.1": false, "127.0.0.1": false, "169.254.169.254": false, "::1": false} {
		if got := may(netip.MustParseAddr(s)); got != want {
			t.Errorf("%s: %t", s, got)
		}
	}
}

func TestOwnAddr(t *testing.T) {
	for s, want := range map[string]bool{"127.0.0.1": true, "127.9.9.9": true, "224.0.0.1": true} {
		if got := OwnAddr(netip.MustParseAddr(s)); got != want {
			t.Errorf("%s: %t", s, got)
		}
	}
}

// FuzzAnswer gives the resolver what a sandbox might send: it must not fall, and
// answers only what is asked.
func FuzzAnswer(f *testing.F) {
	q := dnsmessage.Message{Header: dnsmessage.Header{ID: 7, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName("blocked.example."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}}}
	seed, err := q.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add(append(seed, 0, 0, 41, 16, 0, 0, 0, 0, 0, 0, 0))
	f.Add([]byte{})
	n := &Net{policy: policy(f, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"192.0.2.1"}}),
		opts: Options{Resolvers: func() []string { return nil }}, own: OwnAddr}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, stream := range []bool{false, true} {
			out := n.answer(t.Context(), b, stream)
			if out == nil {
				continue
			}
			var m dnsmessage.Message
			if err := m.Unpack(out); err != nil {
				t.Fatalf("an answer that is none: %v", err)
			}
			if !m.Response || len(m.Answers) > 0 || len(out) > 4096 && !stream {
				t.Errorf("answer %+v", m)
			}
		}
	})
}

func TestAliases(t *testing.T) {
	name := dnsmessage.MustNewName
	cname := func(from, to string) dnsmessage.Resource {
		return dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: name(from + ".")}, Body: &dnsmessage.CNAMEResource{CNAME: name(to + ".")}}
	}
	if got := aliases("a", []dnsmessage.Resource{cname("c", "d"), cname("B", "C"), cname("a", "b"), cname("x", "y"), cname("d", "a")}); len(got) != 4 || got[3] != "d" {
		t.Errorf("%v", got)
	}
	if got := aliases("a", []dnsmessage.Resource{cname("a", "a")}); len(got) != 1 {
		t.Errorf("%v", got)
	}
}

// TestHosts: names of Options.Hosts are answered whatever the policy says, and no resolver is
// asked for them.
func TestHosts(t *testing.T) {
	n := &Net{policy: policy(t, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"192.0.2.1"}}), own: OwnAddr,
		opts: Options{Resolvers: func() []string { t.Error("a resolver is asked"); return nil },
			Hosts: map[string][]netip.Addr{"db": {netip.MustParseAddr("10.213.0.3"), netip.MustParseAddr("10.213.0.67")}, "rows.internal": {netip.MustParseAddr("10.213.0.3")}}}}
	for _, c := range []struct {
		name string
		kind dnsmessage.Type
		code dnsmessage.RCode
		want int
	}{
		{"db.", dnsmessage.TypeA, dnsmessage.RCodeSuccess, 2}, {"DB.", dnsmessage.TypeA, dnsmessage.RCodeSuccess, 2}, {"rows.internal.", dnsmessage.TypeA, dnsmessage.RCodeSuccess, 1},
		{"db.", dnsmessage.TypeAAAA, dnsmessage.RCodeSuccess, 0}, {"db.", dnsmessage.TypeMX, dnsmessage.RCodeSuccess, 0},
		{"3.0.213.10.in-addr.arpa.", dnsmessage.TypePTR, dnsmessage.RCodeSuccess, 2}, {"4.0.213.10.in-addr.arpa.", dnsmessage.TypePTR, dnsmessage.RCodeNameError, 0},
		{"other.", dnsmessage.TypeA, dnsmessage.RCodeNameError, 0},
	} {
		q := dnsmessage.Message{Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(c.name), Type: c.kind, Class: dnsmessage.ClassINET}}}
		query, err := q.Pack()
		if err != nil {
			t.Fatal(err)
		}
		var m dnsmessage.Message
		if err := m.Unpack(n.answer(t.Context(), query, false)); err != nil {
			t.Fatal(err)
		}
		if m.RCode != c.code || len(m.Answers) != c.want {
			t.Errorf("%s %s: %s, %v", c.name, c.kind, m.RCode, m.Answers)
		}
	}
}
