package manager

import (
	"encoding/base64"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/access"
)

func openPorts(s *setup) {
	s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.web", Extension: "ext.fake", Ports: []int{8080}})
}

func TestPorts(t *testing.T) {
	r := newRig(t, openPorts)
	sb := r.create(sandboxer.CreateRequest{Profile: "web"})
	// known leaves out what only listens: the fake's sandboxes have the network of this machine.
	known := func() ([]PortInfo, error) {
		_, list, err := r.Ports(acme, sb.ID)
		return slices.DeleteFunc(list, func(p PortInfo) bool { return !p.Declared && !p.Open }), err
	}
	list, err := known()
	if err != nil || len(list) != 1 || !list[0].Declared || !list[0].Open {
		t.Fatalf("a declared port is open from the start: %+v, %v", list, err)
	}
	for range 2 {
		if sb, err = r.OpenPort(acme, sb.ID, 3000); err != nil || len(sb.Opened) != 2 {
			t.Fatalf("OpenPort: %+v, %v", sb.Opened, err)
		}
	}
	for range 2 {
		if sb, err = r.ClosePort(acme, sb.ID, 8080); err != nil || len(sb.Opened) != 1 || sb.Opened[0].Port != 3000 {
			t.Fatalf("ClosePort: %+v, %v", sb.Opened, err)
		}
	}
	if list, _ = known(); len(list) != 2 || !list[0].Open || list[0].Declared || list[1].Open || !list[1].Declared {
		t.Errorf("ports: %+v", list)
	}
	if h := history(t, r.Manager, sb.ID); strings.Count(h, "port user:default") != 2 {
		t.Errorf("history: %s", h)
	}
	for _, port := range []int{0, -1, 65536} {
		_, err := r.OpenPort(acme, sb.ID, port)
		wantErr(t, err, sandboxer.Invalid, "not a port")
	}
	_, err = r.OpenPort(rival, sb.ID, 1)
	wantErr(t, err, sandboxer.NotFound, "")
	_, err = r.OpenPort(as(sandboxer.DefaultTenant, sandboxer.ScopeRead), sb.ID, 1)
	wantErr(t, err, sandboxer.Denied, "")
	_, err = r.RevokePort(acme, sb.ID, 8080)
	wantErr(t, err, sandboxer.NotFound, "not open")
	r.restart()
	if got := r.get(sb.ID); len(got.Opened) != 1 || got.Opened[0].Port != 3000 {
		t.Errorf("after a restart: %+v", got.Opened)
	}
	r.destroy(sb.ID)
	_, err = r.OpenPort(acme, sb.ID, 3000)
	wantErr(t, err, sandboxer.Conflict, "terminated")
}

func TestSignedPorts(t *testing.T) {
	r := newRig(t, openPorts)
	const port = 3000
	sb := r.create(sandboxer.CreateRequest{Profile: "web"})
	if _, _, _, err := r.SignPort(acme, sb.ID, port, 0); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("signing for a port that is not open: %v", err)
	}
	if _, err := r.OpenPort(acme, sb.ID, port); err != nil {
		t.Fatal(err)
	}
	sign := func(ttl time.Duration) sandboxer.Secret {
		t.Helper()
		token, _, _, err := r.SignPort(acme, sb.ID, port, ttl)
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	good := func(token sandboxer.Secret) bool {
		t.Helper()
		v, err := r.Visit(t.Context(), PortAccess{Token: token})
		if err != nil {
			if err != errNoVisit {
				t.Errorf("a bad token: %v", err)
			}
			return false
		}
		v.End()
		return true
	}
	token := sign(0)
	if !good(token) {
		t.Fatal("a good token is refused")
	}
	for what, a := range map[string]PortAccess{
		"another sandbox": {Ref: "other", Token: token}, "another port": {Port: 8080, Token: token},
	} {
		if _, err := r.Visit(t.Context(), a); err != errNoVisit {
			t.Errorf("for %s: %v", what, err)
		}
	}
	// Every single bit counts.
	raw, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(token.Reveal(), access.PortTokenPrefix))
	if err != nil {
		t.Fatal(err)
	}
	for i := range raw {
		b := slices.Clone(raw)
		b[i] ^= 1
		if good(sandboxer.Secret(access.PortTokenPrefix + base64.RawURLEncoding.EncodeToString(b))) {
			t.Fatalf("a token with byte %d changed is good", i)
		}
	}
	for _, s := range []string{"", "x", access.PortTokenPrefix, access.PortTokenPrefix + "AAAA", token.Reveal() + "A", strings.TrimPrefix(token.Reveal(), access.PortTokenPrefix)} {
		if s != "" && good(sandboxer.Secret(s)) {
			t.Errorf("%q is good", s)
		}
	}
	_, err = r.Visit(t.Context(), PortAccess{Ref: sb.ID, Port: port})
	wantErr(t, err, sandboxer.Unauthenticated, "")
	_, err = r.Visit(rival, PortAccess{Ref: sb.ID, Port: port})
	wantErr(t, err, sandboxer.NotFound, "")
	_, err = r.Visit(acme, PortAccess{Ref: sb.ID, Port: port + 1})
	wantErr(t, err, sandboxer.NotFound, "not open")

	// A visit ends when it is revoked, and is use until then.
	v, err := r.Visit(acme, PortAccess{Ref: sb.ID, Port: port})
	if err != nil {
		t.Fatal(err)
	}
	if _, busy := r.usage.last(sb.ID); !busy {
		t.Error("a visit is not use")
	}
	if _, err := r.RevokePort(acme, sb.ID, port); err != nil {
		t.Fatal(err)
	}
	<-v.Ctx.Done()
	v.End()
	if _, busy := r.usage.last(sb.ID); busy {
		t.Error("a visit that ended is use")
	}
	if good(token) {
		t.Error("a revoked token is good")
	}
	if token = sign(0); !good(token) {
		t.Error("a token signed after the revocation is refused")
	}
	r.restart()
	if !good(token) {
		t.Error("a token is lost with a restart")
	}
	if _, err := r.ClosePort(acme, sb.ID, port); err != nil {
		t.Fatal(err)
	}
	if _, err := r.OpenPort(acme, sb.ID, port); err != nil {
		t.Fatal(err)
	}
	if good(token) {
		t.Error("a token outlives the port's closing")
	}

	begun := time.Now()
	short := sign(time.Second)
	if c, ok := r.ports.ReadPort(short); !ok || c.Until.Sub(begun) < time.Second {
		t.Errorf("asked for a second, got %v", c.Until.Sub(begun))
	}
	v, err = r.Visit(t.Context(), PortAccess{Token: short})
	if err != nil {
		t.Fatal(err)
	}
	<-v.Ctx.Done() // with the token
	v.End()
	if good(short) {
		t.Error("an expired token is good")
	}
	for _, ttl := range []time.Duration{-1, time.Millisecond, 8 * 24 * time.Hour} {
		_, _, _, err := r.SignPort(acme, sb.ID, port, ttl)
		wantErr(t, err, sandboxer.Invalid, "cannot last")
	}

	token = sign(0)
	v, err = r.Visit(t.Context(), PortAccess{Token: token})
	if err != nil {
		t.Fatal(err)
	}
	r.destroy(sb.ID)
	<-v.Ctx.Done()
	v.End()
	if good(token) {
		t.Error("a token outlives its sandbox")
	}
	again := r.create(sandboxer.CreateRequest{Profile: "web", Inputs: map[string]string{"sandbox_id": sb.ID}})
	if _, err := r.OpenPort(acme, again.ID, port); err != nil {
		t.Fatal(err)
	}
	if again.Generation != 2 || good(token) {
		t.Errorf("a token opens the next generation (%d)", again.Generation)
	}
}

func FuzzPortToken(f *testing.F) {
	a := access.NewVisits(testKey)
	f.Add("sbx_port_AAAA")
	f.Add(a.SignPort(access.PortClaim{ID: "a", Generation: 1, Port: 1, Rev: 1, Until: time.Now()}).Reveal())
	f.Fuzz(func(t *testing.T, s string) {
		if c, ok := a.ReadPort(sandboxer.Secret(s)); ok && a.SignPort(c).Reveal() != s {
			t.Errorf("%q is read as %+v", s, c)
		}
	})
}

// Listeners are seen on IPv4 and IPv6, and if they cannot be seen, that is reported.
func TestListeningPorts(t *testing.T) {
	r := newRig(t, openPorts)
	sb := r.create(sandboxer.CreateRequest{Profile: "web"})
	listensOn := func(addr string) int {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Skip(err)
		}
		t.Cleanup(func() { l.Close() })
		return l.Addr().(*net.TCPAddr).Port
	}
	ports := []int{listensOn("127.0.0.1:0"), listensOn("[::1]:0")}
	_, list, err := r.Ports(acme, sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, port := range ports {
		if i := slices.IndexFunc(list, func(p PortInfo) bool { return p.Port.Port == port }); i < 0 || list[i].Listening == nil || !*list[i].Listening {
			t.Errorf("%d is not seen: %+v", port, list)
		}
	}

	r.world.Inject(fake.Fault{Verb: fake.VerbExec, Kind: sandboxer.Unavailable})
	_, list, err = r.Ports(acme, sb.ID)
	if err != nil || len(list) != 1 || list[0].Listening != nil || !isKind(list[0].Unseen, sandboxer.Unavailable) {
		t.Errorf("where it cannot be seen: %+v, %v", list, err)
	}
	bare := r.create(sandboxer.CreateRequest{})
	if _, list, err = r.Ports(acme, bare.ID); !isKind(err, sandboxer.Unavailable) {
		t.Errorf("where nothing else is known: %+v, %v", list, err)
	}
}
