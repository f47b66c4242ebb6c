//go:build linux

package local

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sand-boxer/sandboxer"
)

// dnsServer is an authoritative server of test names, over UDP and TCP.
type dnsServer struct {
	mu    sync.Mutex
	zones map[string]func(ask int) []any // by name: addresses, and "=alias" strings; "!owner address" for a record of another owner
	asked map[string]int
}

func serveDNS(t testing.TB, w world, zones map[string]func(int) []any) *dnsServer {
	t.Helper()
	s := &dnsServer{zones: zones, asked: map[string]int{}}
	l := listenIn(t, w.run, w.host+":53")
	var p net.PacketConn
	var err error
	w.run(func() { p, err = net.ListenPacket("udp", w.host+":53") })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	go func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := p.ReadFrom(buf)
			if err != nil {
				return
			}
			if a := s.answer(t, buf[:n], 512); a != nil {
				p.WriteTo(a, from)
			}
		}
	}()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				var size [2]byte
				if _, err := io.ReadFull(c, size[:]); err != nil {
					return
				}
				q := make([]byte, binary.BigEndian.Uint16(size[:]))
				if _, err := io.ReadFull(c, q); err == nil {
					a := s.answer(t, q, 0)
					c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(a))), a...))
				}
			}()
		}
	}()
	return s
}

func (s *dnsServer) answer(t testing.TB, query []byte, limit int) []byte {
	var m dnsmessage.Message
	if err := m.Unpack(query); err != nil || len(m.Questions) != 1 {
		t.Errorf("a question that is none: %v", err)
		return nil
	}
	q := m.Questions[0]
	name := strings.ToLower(strings.TrimSuffix(q.Name.String(), "."))
	s.mu.Lock()
	if q.Type == dnsmessage.TypeA {
		s.asked[name]++
	}
	records, n := s.zones[name], s.asked[name]
	s.mu.Unlock()
	m.Response, m.Additionals = true, nil
	if records == nil {
		m.RCode = dnsmessage.RCodeNameError
	} else {
		owner := q.Name
		for _, r := range records(n) {
			h := dnsmessage.ResourceHeader{Name: owner, Class: dnsmessage.ClassINET, TTL: 1}
			text := fmt.Sprint(r)
			if alias, ok := strings.CutPrefix(text, "="); ok {
				owner = dnsmessage.MustNewName(alias + ".")
				m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.CNAMEResource{CNAME: owner}})
				continue
			}
			if other, ok := strings.CutPrefix(text, "!"); ok {
				var name string
				name, text, _ = strings.Cut(other, " ")
				h.Name = dnsmessage.MustNewName(name + ".")
			}
			a := netip.MustParseAddr(text)
			switch {
			case a.Is4() && q.Type == dnsmessage.TypeA:
				m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AResource{A: a.As4()}})
			case a.Is6() && q.Type == dnsmessage.TypeAAAA:
				m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AAAAResource{AAAA: a.As16()}})
			}
		}
	}
	out, err := m.Pack()
	if err == nil && limit > 0 && len(out) > limit {
		m.Truncated, m.Answers = true, nil
		out, err = m.Pack()
	}
	if err != nil {
		t.Error(err)
	}
	return out
}

func always(records ...any) func(int) []any { return func(int) []any { return records } }

// greet answers every connection and datagram to addr with "hello", and then echoes.
func greet(t testing.TB, run func(func()), addr string) {
	t.Helper()
	l := listenIn(t, run, addr)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { defer c.Close(); io.WriteString(c, "hello\n"); io.Copy(c, c) }()
		}
	}()
	var p net.PacketConn
	var err error
	run(func() { p, err = net.ListenPacket("udp", addr) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := p.ReadFrom(buf)
			if err != nil {
				return
			}
			p.WriteTo(buf[:n], from)
		}
	}()
}

func allow(list ...string) sandboxer.NetworkPolicy {
	return sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: list}
}

// reaches runs one client inside for all targets; the result for each is "hello" or
// the reason.
func reaches(t *testing.T, e *extension, h sandboxer.Handle, targets ...string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for i, line := range strings.Split(sh(t, e, h, helpers+"/tool reach "+strings.Join(targets, " ")), "\n") {
		out[targets[i]] = line
	}
	return out
}

func setNetwork(t *testing.T, e *extension, h sandboxer.Handle, p sandboxer.NetworkPolicy) {
	t.Helper()
	if err := e.SetNetwork(t.Context(), h, p); err != nil {
		t.Fatalf("SetNetwork(%+v): %v", p, err)
	}
}

// TestNetworkPolicy tries all modes in one sandbox, with real servers outside, and
// checks from inside what can be reached.
func TestNetworkPolicy(t *testing.T) {
	needsGVisor(t)
	w := outside(t)
	public, public2, private, own := w.host+":80", w.host+":81", w.private+":80", w.own+":8080"
	for _, a := range []string{public, public2, private} {
		greet(t, w.run, a)
	}
	greet(t, here, own)
	greet(t, here, w.extra+":8080")
	greet(t, here, "127.0.0.1:8081")
	six := w.host6 != ""
	if six {
		greet(t, w.run, "["+w.host6+"]:80")
		greet(t, w.run, "["+w.unique+"]:80")
		greet(t, here, "["+w.own6+"]:8080")
	}
	var many []any
	for i := range 60 {
		many = append(many, fmt.Sprintf("9.9.9.%d", i+1))
	}
	serveDNS(t, w, map[string]func(int) []any{
		"public.example":       always(w.host),
		"a.wild.example":       always(w.host),
		"b.a.wild.example":     always(w.host),
		"wild.example":         always(w.host),
		"alias.example":        always("=target.elsewhere", w.host),
		"target.elsewhere":     always(w.host),
		"private.example":      always(w.private),
		"mixed.example":        always(w.private, w.host),
		"loopback.example":     always("127.0.0.1"),
		"metadata.example":     always("169.254.169.254"),
		"own.example":          always(w.own),
		"aliasprivate.example": always("=inside.corp", w.private),
		"smuggle.example":      always("!public.example 203.0.113.254", w.host),
		"big.example":          always(many...),
		"six.example": func(int) []any {
			if !six {
				return nil
			}
			return []any{w.host6}
		},
		"rebind.example": func(n int) []any { // first public, then inside
			if n == 1 {
				return []any{w.host}
			}
			return []any{w.private, w.own, "127.0.0.1"}
		},
	})
	dir := shortDir(t)
	config := func(c *Config) { c.DNS = []string{w.host + ":53"} }
	e := openIn(t, dir, ours("test"), config)
	t.Cleanup(func() { e.Close() })
	h := up(t, e, sandboxer.Spec{}) // starts without a network

	type want map[string]string
	const hello, refused, none = "hello", "refused", "no such host"
	udp := func(a string) string { return "udp:" + a }
	tcp := func(a string) string { return "tcp:" + a }
	never := want{
		tcp(own): refused, udp(own): refused, tcp(w.extra + ":8080"): refused, tcp("169.254.169.254:80"): refused, tcp("168.63.129.16:80"): refused,
		tcp("10.0.2.2:80"): refused, tcp("10.0.2.2:8081"): refused, tcp("loopback.example:8081"): none, tcp("metadata.example:80"): none, tcp("own.example:8080"): none,
		tcp("127.0.0.1:8081"): refused,
	}
	if six {
		never[tcp("["+w.own6+"]:8080")] = refused
		never[tcp("[::1]:8081")] = refused
		never[tcp("[fd00:ec2::254]:80")] = refused
		never[tcp("[::ffff:127.0.0.1]:8081")] = refused
		never[tcp("[fd53:4258::2]:8081")] = refused
	}
	with := func(more want) want {
		for k, v := range never {
			if _, ok := more[k]; !ok {
				more[k] = v
			}
		}
		return more
	}
	v6 := func(addr, answer string) want {
		if !six {
			return nil
		}
		return want{tcp("[" + addr + "]:80"): answer, udp("[" + addr + "]:80"): answer}
	}
	join := func(all ...want) want {
		out := want{}
		for _, m := range all {
			for k, v := range m {
				out[k] = v
			}
		}
		return out
	}
	for _, tc := range []struct {
		name   string
		policy sandboxer.NetworkPolicy
		want   want
	}{
		{"public", sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}, with(join(want{
			tcp(public): hello, tcp(public2): hello, udp(public): hello, tcp(private): refused, udp(private): refused,
			tcp("public.example:80"): hello, udp("public.example:80"): hello, tcp("alias.example:80"): hello, tcp("private.example:80"): none,
			tcp("aliasprivate.example:80"): none, tcp("mixed.example:80"): hello, tcp("unknown.example:80"): none,
		}, v6(w.host6, hello), v6(w.unique, refused)))},
		{"none", sandboxer.NetworkPolicy{}, with(join(want{
			tcp(public): refused, udp(public): refused, tcp(private): refused,
			tcp("10.0.2.2:53"): refused, udp("10.0.2.2:53"): refused,
		}, v6(w.host6, refused), want{tcp("loopback.example:8081"): "", tcp("metadata.example:80"): "", tcp("own.example:8080"): ""}))},
		{"a name", allow("public.example"), with(join(want{
			tcp(private): refused, tcp("public.example:80"): hello, tcp("PUBLIC.Example:81"): hello, udp("public.example:80"): hello,
			tcp("alias.example:80"): none, tcp("target.elsewhere:80"): none, tcp("wild.example:80"): none, tcp("x.public.example:80"): none,
		}, v6(w.host6, refused)))},
		{"a name with a port", allow("public.example:80"), with(want{tcp("public.example:80"): hello, tcp("public.example:81"): refused, udp("public.example:81"): refused})},
		{"a wildcard", allow("*.wild.example"), with(want{
			tcp("a.wild.example:80"): hello, tcp("b.a.wild.example:80"): hello, tcp("wild.example:80"): none, tcp("public.example:80"): none})},
		{"an alias", allow("alias.example"), with(want{tcp("alias.example:80"): hello, tcp("target.elsewhere:80"): none})},
		{"names that lead inside", allow("private.example", "mixed.example", "aliasprivate.example", "loopback.example", "metadata.example", "own.example"), with(want{
			tcp("private.example:80"): none, tcp("aliasprivate.example:80"): none, tcp("mixed.example:80"): hello, tcp(private): refused})},
		{"an address", allow(w.host), with(join(want{tcp(public): hello, udp(public): hello, tcp(private): refused, tcp("public.example:80"): none}, v6(w.host6, refused)))},
		{"an address with a port", allow(public), with(want{tcp(public): hello, udp(public): hello, tcp(public2): refused})},
		{"everything", allow("0.0.0.0/0", "::/0"), with(join(want{tcp(public): hello, tcp(private): refused}, v6(w.host6, hello), v6(w.unique, refused)))},
		{"a private network", allow(w.private+"/32", "fd99::/16", "private.example"), with(join(want{
			tcp(public): refused, tcp(private): hello, udp(private): hello, tcp("private.example:80"): hello}, v6(w.unique, hello), v6(w.host6, refused)))},
		{"a network and a name", allow(w.host+"/32:80", "wild.example:81"), with(want{tcp(public): hello, tcp("wild.example:81"): hello})},
		{"a big answer", allow("big.example", "six.example"), with(want{tcp("public.example:80"): none, tcp(public): refused})},
	} {
		t.Run(tc.name, func(t *testing.T) {
			setNetwork(t, e, h, tc.policy)
			var targets []string
			for k := range tc.want {
				targets = append(targets, k)
			}
			for k, got := range reaches(t, e, h, targets...) {
				if want := tc.want[k]; got != want && want != "" || want == "" && got == hello {
					t.Errorf("%s answers %q; want %q", k, got, want)
				}
			}
		})
	}

	t.Run("answers", func(t *testing.T) {
		setNetwork(t, e, h, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic})
		got := strings.Split(sh(t, e, h, helpers+"/tool resolve big.example mixed.example smuggle.example private.example six.example"), "\n")
		if n := len(strings.Fields(got[0])); n != 60 {
			t.Errorf("a long answer, which needs TCP, has %d addresses; want 60", n)
		}
		for i, want := range map[int]string{1: w.host, 2: w.host, 3: "no such host", 4: w.host6} {
			if i == 4 && !six {
				continue
			}
			if s := strings.TrimSpace(got[i]); s != want {
				t.Errorf("answer %d is %q; want %q", i, s, want)
			}
		}
	})

	t.Run("rebinding", func(t *testing.T) {
		setNetwork(t, e, h, allow("rebind.example"))
		if got := reaches(t, e, h, tcp("rebind.example:80"))[tcp("rebind.example:80")]; got != hello {
			t.Fatalf("first it answers %q", got)
		}
		for range 2 {
			targets := []string{tcp("rebind.example:80"), tcp("rebind.example:8080"), tcp("rebind.example:8081"), tcp(private), tcp(own)}
			for k, got := range reaches(t, e, h, targets...) {
				if got != none && got != refused {
					t.Errorf("then %s answers %q", k, got)
				}
			}
		}
	})

	t.Run("smuggled records pin nothing", func(t *testing.T) {
		setNetwork(t, e, h, allow("smuggle.example:80"))
		sh(t, e, h, helpers+"/tool resolve smuggle.example")
		if got := reaches(t, e, h, tcp(public))[tcp(public)]; got != hello {
			t.Errorf("the pinned address answers %q", got)
		}
		if got := reaches(t, e, h, tcp("203.0.113.254:80"))[tcp("203.0.113.254:80")]; got != refused {
			t.Errorf("an address of a record nobody asked for answers %q", got)
		}
	})

	t.Run("bad policies change nothing", func(t *testing.T) {
		setNetwork(t, e, h, allow(public))
		for _, p := range []sandboxer.NetworkPolicy{{Mode: "some"}, allow(), allow("127.0.0.1"), {Mode: sandboxer.NetworkPublic, Allow: []string{"x.example"}}} {
			if err := e.SetNetwork(t.Context(), h, p); sandboxer.KindOf(err) != sandboxer.Invalid {
				t.Errorf("SetNetwork(%+v): %v; want invalid", p, err)
			}
		}
		if got := reaches(t, e, h, tcp(public), tcp(public2)); got[tcp(public)] != hello || got[tcp(public2)] != refused {
			t.Errorf("then: %v", got)
		}
	})

	t.Run("a change cuts and opens", func(t *testing.T) {
		setNetwork(t, e, h, allow("public.example:80", w.host+":81"))
		first, second := hold(t, e, h, "public.example:80"), hold(t, e, h, public2)
		setNetwork(t, e, h, allow("public.example"))
		for name, r := range map[string]*holding{"by name": first} {
			select {
			case line := <-r.lines:
				t.Errorf("a connection %s that stays allowed: %q", name, line)
			case <-time.After(300 * time.Millisecond):
			}
		}
		// It was allowed as an address, and is now pinned to the name.
		setNetwork(t, e, h, sandboxer.NetworkPolicy{})
		for _, r := range []*holding{first, second} {
			if line := <-r.lines; line != "ended reset" {
				t.Errorf("a connection that is not allowed any more: %q", line)
			}
		}
		if got := reaches(t, e, h, tcp(public))[tcp(public)]; got != refused {
			t.Errorf("after the change it answers %q", got)
		}
		setNetwork(t, e, h, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic})
		if got := reaches(t, e, h, tcp(public))[tcp(public)]; got != hello {
			t.Errorf("opened again it answers %q", got)
		}
	})

	t.Run("hundreds of connections", func(t *testing.T) {
		setNetwork(t, e, h, allow(w.host))
		l := listenIn(t, w.run, w.host+":82")
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() { defer c.Close(); io.Copy(c, c) }()
			}
		}()
		sh(t, e, h, helpers+"/tool many "+w.host+":82 400")
	})

	t.Run("never, by configuration", func(t *testing.T) {
		again := openIn(t, dir, ours("test"), config, func(c *Config) { c.Never = []string{w.host} })
		defer again.Close()
		setNetwork(t, again, h, allow(w.host))
		if got := reaches(t, again, h, tcp(public))[tcp(public)]; got != refused {
			t.Errorf("it answers %q", got)
		}
	})

	t.Run("restart of the broker", func(t *testing.T) {
		setNetwork(t, e, h, allow("public.example:80"))
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		e = openIn(t, dir, ours("test"), config)
		got := reaches(t, e, h, tcp("public.example:80"), tcp("public.example:81"), tcp("wild.example:80"), tcp(private))
		if got[tcp("public.example:80")] != hello || got[tcp("public.example:81")] != refused || got[tcp("wild.example:80")] != none || got[tcp(private)] != refused {
			t.Errorf("after a restart: %v", got)
		}
		setNetwork(t, e, h, sandboxer.NetworkPolicy{})
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		e = openIn(t, dir, ours("test"), config)
		if got := reaches(t, e, h, tcp(public))[tcp(public)]; got != refused {
			t.Errorf("without a network after a restart: %q", got)
		}
		setNetwork(t, e, h, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic})
		if got := reaches(t, e, h, tcp("public.example:80"))[tcp("public.example:80")]; got != hello {
			t.Errorf("given one then, it answers %q", got)
		}
	})
}

// holding is a connection that a client inside holds open.
type holding struct{ lines chan string }

func hold(t *testing.T, e *extension, h sandboxer.Handle, addr string) *holding {
	t.Helper()
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{helpers + "/tool", "hold", addr}, Stdout: w})
		w.CloseWithError(err)
	}()
	t.Cleanup(func() { cancel(); r.Close(); <-done })
	c := &holding{lines: make(chan string, 4)}
	go func() {
		for sc := bufio.NewScanner(r); sc.Scan(); {
			c.lines <- sc.Text()
		}
	}()
	if line := <-c.lines; line != "connected" {
		t.Fatalf("holding a connection to %s: %q", addr, line)
	}
	return c
}

// TestNetworkLeavesNothing uses a network in every way and checks what stays in the
// broker after the sandbox is gone.
func TestNetworkLeavesNothing(t *testing.T) {
	needsGVisor(t)
	w := outside(t)
	greet(t, w.run, w.host+":80")
	serveDNS(t, w, map[string]func(int) []any{"public.example": always(w.host)})
	e := openIn(t, shortDir(t), ours("test"), func(c *Config) { c.DNS = []string{w.host + ":53"} })
	defer e.Close()
	life := func() {
		h, err := e.Provision(t.Context(), sandboxer.Spec{ID: "life", Generation: 1, Owner: ours("test"), Network: allow("public.example")})
		if err != nil {
			t.Fatal(err)
		}
		reaches(t, e, h, "tcp:public.example:80", "udp:public.example:80", "tcp:10.1.2.3:80")
		setNetwork(t, e, h, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic})
		sh(t, e, h, helpers+"/tool hold "+w.host+":80 >/dev/null 2>&1 & sleep 0.3")
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Fatal(err)
		}
	}
	life()
	files := func() (open []string) {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range list {
			to, _ := os.Readlink("/proc/self/fd/" + d.Name())
			open = append(open, d.Name()+" "+to)
		}
		return open
	}
	runtime.GC() // gVisor leaves it a pipe and two process handles of each sandbox
	goroutines, before := runtime.NumGoroutine(), files()
	for range 3 {
		life()
	}
	for end := time.Now().Add(time.Minute); runtime.NumGoroutine() > goroutines || len(files()) > len(before); time.Sleep(10 * time.Millisecond) {
		runtime.GC()
		if time.Now().After(end) {
			buf := make([]byte, 1<<20)
			t.Fatalf("goroutines %d, then %d; files %q, then %q\n%s", goroutines, runtime.NumGoroutine(), before, files(), buf[:runtime.Stack(buf, true)])
		}
	}
}
