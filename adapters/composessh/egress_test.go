package composessh

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/egress"
)

// world is a network namespace that stands for the internet: a machine with a public and a
// private address, which answers HTTP and resolves names.
type world struct {
	public, private string // of that machine
	own             string // this one's, towards it
}

// outside makes a world, with a process of this program in it.
func outside(t testing.TB) world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making a network namespace needs root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("no ip command (install iproute2)")
	}
	id := os.Getpid() % 100_000
	ns, dev := fmt.Sprintf("sbxout%d", id), fmt.Sprintf("sbxo%d", id)
	k, third := 4*(id%62+1), id%200+20 // not the first four: a machine may be 192.0.2.2 itself, behind 192.0.2.1
	w := world{own: fmt.Sprintf("192.0.2.%d", k+1), public: fmt.Sprintf("192.0.2.%d", k+2), private: fmt.Sprintf("172.30.%d.2", third)}
	ip := func(args string) {
		t.Helper()
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v\n%s", args, err, out)
		}
	}
	ip("netns add " + ns)
	t.Cleanup(func() { exec.Command("ip", "netns", "del", ns).Run() })
	ip("link add " + dev + " type veth peer name eth0 netns " + ns)
	t.Cleanup(func() { exec.Command("ip", "link", "del", dev).Run() }) // goes with its peer, but not at once
	ip("addr add " + w.own + "/30 dev " + dev)
	ip("addr add " + fmt.Sprintf("172.30.%d.1/24", third) + " dev " + dev)
	ip("link set " + dev + " up")
	ip("-n " + ns + " addr add " + w.public + "/30 dev eth0")
	ip("-n " + ns + " addr add " + w.private + "/24 dev eth0")
	ip("-n " + ns + " link set eth0 up")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("ip", "netns", "exec", ns, self, "outside", w.public, w.private)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe() // it ends with this process
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); cmd.Wait() })
	if _, err := io.ReadFull(out, make([]byte, 3)); err != nil {
		t.Fatal("the outside does not answer: ", err)
	}
	return w
}

// serveOutside is the machine outside: allowed.example and other.example are its public
// address, private.example the other one.
func serveOutside(public, private string) error {
	go func() { io.Copy(io.Discard, os.Stdin); os.Exit(0) }()
	dns, err := net.ListenPacket("udp", ":53")
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", ":80")
	if err != nil {
		return err
	}
	go http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "outside %s", r.Host) }))
	fmt.Println("up")
	buf := make([]byte, 4096)
	for {
		n, from, err := dns.ReadFrom(buf)
		if err != nil {
			return err
		}
		var m dnsmessage.Message
		if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		q := m.Questions[0]
		m.Response, m.Additionals = true, nil
		addr := map[string]string{"allowed.example.": public, "other.example.": public, "private.example.": private}[q.Name.String()]
		if addr == "" {
			m.RCode = dnsmessage.RCodeNameError
		} else if q.Type == dnsmessage.TypeA {
			m.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 60}, Body: &dnsmessage.AResource{A: netip.MustParseAddr(addr).As4()}}}
		}
		if out, err := m.Pack(); err == nil {
			dns.WriteTo(out, from)
		}
	}
}

// withProgram gives the rig's extensions the program that filters.
func (r *rig) withProgram(t testing.TB) {
	t.Helper()
	r.cfg.EgressProgram = buildtest.Program(t, "cmd/sandboxer-egress")
}

// withGateway gives them something to filter as well.
func (r *rig) withGateway(t testing.TB) world {
	t.Helper()
	r.withProgram(t)
	w := outside(t)
	r.cfg.DNS = []string{w.public}
	return w
}

const online = `services:
  main:
    image: ` + image + `
    hostname: mainhost
    command: [sh, -c, "mkdir -p /tmp/www && echo inside >/tmp/www/index.html && exec httpd -f -p 8080 -h /tmp/www"]
    ports: ["18080:8080"]
    dns: [192.0.2.254]
    extra_hosts: ["made-up:10.9.8.7"]
    links: ["db:database"]
    depends_on: [db]
  db:
    image: ` + image + `
    command: [sh, -c, "mkdir -p /tmp/www && echo rows >/tmp/www/index.html && exec httpd -f -p 5432 -h /tmp/www"]
    networks: {default: {aliases: [rows.internal]}, back: {}}
  worker:
    image: ` + image + `
    network_mode: service:main
    command: [sleep, "86400"]
  closed:
    image: ` + image + `
    command: [sleep, "86400"]
    networks: [back]
networks:
  back: {internal: true}
`

// wget prints what a page says, or "no".
func wget(url string) string { return "timeout 10 wget -qO- " + url + " 2>/dev/null || echo no" }

// in runs a script in a service, which must end well.
func in(t testing.TB, e *extension, h sandboxer.Handle, service, script string) string {
	t.Helper()
	var out, errs bytes.Buffer
	x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Service: service, Stdout: &out, Stderr: &errs})
	if err != nil || x.Code != 0 {
		t.Fatalf("%s: %s: %+v, %v, %s", service, script, x, err, &errs)
	}
	return strings.TrimSpace(out.String())
}

// eventually waits until f says what is wanted.
func eventually(t testing.TB, what, want string, f func() string) {
	t.Helper()
	got := ""
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if got = f(); got == want {
			return
		}
	}
	t.Errorf("%s: %q; want %q", what, got, want)
}

// TestFilteredNetwork: services reach what the policy lets them and nothing else, whatever
// becomes of the gateway; each other they reach as without it.
func TestFilteredNetwork(t *testing.T) {
	r := newRig(t, current(t), 1)
	w := r.withGateway(t)
	e := r.opened(t, "public")
	l, err := net.Listen("tcp", w.own+":0") // of the host itself
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := order("public", repo(t, online, nil))
	s.Network.Mode = sandboxer.NetworkPublic
	h, err := e.put(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	teardown(t, e, s.ID)
	reach, err := e.WaitReady(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(reach.Extra["changed"], "main: dns is left out") {
		t.Errorf("what was changed: %q", reach.Extra["changed"])
	}
	for _, c := range []struct{ service, script, want string }{
		{"main", wget("http://allowed.example/"), "outside allowed.example"},
		{"main", wget("http://" + w.public + "/"), "outside " + w.public},
		{"worker", wget("http://other.example/"), "outside other.example"},
		{"db", wget("http://allowed.example/"), "outside allowed.example"},
		{"main", wget("http://" + w.private + "/"), "no"},
		{"main", wget("http://private.example/"), "no"},
		{"main", "nc -w 3 " + strings.ReplaceAll(l.Addr().String(), ":", " ") + " </dev/null >/dev/null 2>&1 && echo reached || echo no", "no"},
		{"main", "nc -w 3 169.254.169.254 80 </dev/null >/dev/null 2>&1 && echo reached || echo no", "no"},
		{"closed", wget("http://" + w.public + "/"), "no"},
		// Each other.
		{"main", wget("http://db:5432/"), "rows"},
		{"main", wget("http://database:5432/"), "rows"},
		{"worker", wget("http://rows.internal:5432/"), "rows"},
		{"db", wget("http://database:5432/"), "no"}, // what main calls it
		{"db", wget("http://main:8080/"), "inside"},
		{"closed", wget("http://db:5432/"), "rows"},
		{"worker", wget("http://localhost:8080/"), "inside"},
		{"main", "nslookup db 127.0.0.11 >/dev/null 2>&1 && echo known || echo no", "known"},
		{"main", "hostname; grep -c made-up /etc/hosts", "mainhost\n1"},
		// Root of a service does not get around it.
		{"main", "ip route del default 2>/dev/null || ip link set " + egress.Device + " down 2>/dev/null || ip addr add 10.1.1.1/24 dev eth0 2>/dev/null || echo no", "no"},
	} {
		if got := in(t, e, h, c.service, c.script); got != c.want {
			t.Errorf("%s: %s: %q; want %q", c.service, c.script, got, c.want)
		}
	}
	if got := get(t, e, h, 18080, "/"); !strings.Contains(got, "inside") {
		t.Errorf("the published port says %q", got)
	}
	if ports, err := e.ListPorts(t.Context(), h); err != nil || !slices.Contains(ports, 18080) {
		t.Errorf("ports %v, %v", ports, err)
	}
	if st, err := e.Stats(t.Context(), h); err != nil || st.RxBytes <= 0 {
		t.Errorf("stats %+v, %v", st, err)
	}

	env := r.engines[0]
	name := e.name(s.ID, 1)
	outside := func() string { return in(t, e, h, "main", wget("http://allowed.example/")) }
	if err := e.Pause(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if err := e.Resume(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	eventually(t, "after a pause", "outside allowed.example", outside)
	r.engine(t, env, "stop", "-t", "0", name+"-gateway")
	if got := outside(); got != "no" {
		t.Errorf("without the gateway: %q", got)
	}
	if got := in(t, e, h, "main", wget("http://"+w.public+"/")); got != "no" {
		t.Errorf("without the gateway, by address: %q", got)
	}
	r.engine(t, env, "start", name+"-gateway")
	eventually(t, "with the gateway again", "outside allowed.example", outside)
	r.engine(t, env, "kill", name+"-gateway")
	r.engine(t, env, "restart", "-t", "0", strings.Fields(r.engine(t, env, "ps", "-q", "--filter", "label=dev.sandboxer.name="+name, "--filter", "label=dev.sandboxer.service=main"))[0])
	r.engine(t, env, "start", name+"-gateway")
	eventually(t, "after the service was started again", "outside allowed.example", outside)

	// The program is kept as layers are, and goes with them, as the agent does.
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if left := r.remains(t, "public"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	caches, err := e.PruneCaches(t.Context(), "")
	if err != nil || len(caches) != 2 || !strings.HasPrefix(caches[0].Name, "sandboxer-agent/") || caches[1].Name != "sandboxer/egress" || caches[1].Bytes < 1<<20 {
		t.Errorf("pruned %+v, %v", caches, err)
	}
	if left := r.engine(t, env, "images", "-q", "--filter", "label=dev.sandboxer.owner=public"); left != "" {
		t.Errorf("images left: %q", left)
	}
}

// TestAllowedDestinations: a list of destinations holds for services and for what builds them,
// and opens no sandbox to another one, whatever is on it.
func TestAllowedDestinations(t *testing.T) {
	r := newRig(t, current(t), 1)
	w := r.withGateway(t)
	e := r.opened(t, "listed")
	s := order("listed", repo(t, "services: {main: {build: ., command: [sleep, '86400']}}\n",
		map[string]string{"Dockerfile": "FROM " + image + "\nRUN wget -qO /got http://allowed.example/; wget -qO /not http://other.example/ || echo no >/not\n"}))
	s.Network = sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"allowed.example:80", w.private + ":80", "10.0.0.0/8"}}
	other := order("other", repo(t, online, nil))
	oh, err := e.put(t.Context(), other)
	if err != nil {
		t.Fatal(err)
	}
	teardown(t, e, other.ID)
	if _, err := e.WaitReady(t.Context(), oh); err != nil {
		t.Fatal(err)
	}
	address := in(t, e, oh, "main", "hostname -i")
	if got := in(t, e, oh, "db", wget("http://"+address+":8080/")); got != "inside" {
		t.Fatalf("the other one says %q at %s", got, address)
	}
	h, err := e.put(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	teardown(t, e, s.ID)
	if _, err := e.WaitReady(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	for script, want := range map[string]string{
		"cat /got":                           "outside allowed.example",
		"cat /not":                           "no",
		wget("http://allowed.example/"):      "outside allowed.example",
		wget("http://other.example/"):        "no",
		wget("http://" + w.private + "/"):    "outside " + w.private,
		wget("http://" + w.private + ":81/"): "no",
		wget("http://" + address + ":8080/"): "no",
		"nslookup other.example || echo no":  "no",
	} {
		if got := run(t, e, h, script+" 2>/dev/null"); got != want && !(want == "no" && strings.HasSuffix(got, "no")) {
			t.Errorf("%s: %q; want %q", script, got, want)
		}
	}
	if left := r.engine(t, r.engines[0], "ps", "-aq", "--filter", "name="+buildLink(e.name(s.ID, 1))); left != "" {
		t.Errorf("the link for builds stays: %q", left)
	}
}

// TestFilteringHost: of several hosts one is chosen that can filter.
func TestFilteringHost(t *testing.T) {
	r := newRig(t, current(t), 2)
	r.withProgram(t)
	e := r.opened(t, "prefers")
	s := order("prefers", repo(t, single, nil))
	s.Network.Mode = sandboxer.NetworkPublic
	for _, cannot := range []string{"host-1", "host-2"} {
		for _, name := range []string{"host-1", "host-2"} {
			h, err := e.host(name)
			if err == nil {
				err = e.look(t.Context(), h)
			}
			if err != nil {
				t.Fatal(err)
			}
			h.known.tun = name != cannot
		}
		p, err := e.plan(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		h, err := e.choose(t.Context(), p, nil)
		if err != nil || h.Name() == cannot {
			t.Errorf("%v, %v; %s cannot filter", h, err, cannot)
		}
	}
}

// TestCannotFilter: where nothing can filter, a network is refused, and the refusal says what
// to do.
func TestCannotFilter(t *testing.T) {
	r := newRig(t, "docker-compose", 0)
	r.cfg.EgressProgram = filepath.Join(t.TempDir(), "none")
	e := r.opened(t, "cannot")
	public, listed := order("cannot", repo(t, single, nil)), order("cannot", repo(t, single, nil))
	public.Network.Mode = sandboxer.NetworkPublic
	listed.Network = sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"a.example"}}
	for name, k := range map[string]*known{
		"and the host has podman":      {engine: "podman", compose: []string{"podman-compose"}},
		"/dev/net/tun (modprobe tun)":  {engine: "docker", compose: []string{"docker-compose"}, arch: "amd64"},
		"has no program for its platf": {engine: "docker", compose: []string{"docker-compose"}, tun: true},
		"that filters the network of":  {engine: "docker", compose: []string{"docker-compose"}, tun: true, arch: "amd64"},
		"network of linux/arm64 hosts": {engine: "docker", compose: []string{"docker-compose"}, tun: true, arch: "arm64"},
	} {
		h, err := newHost("x")
		if err != nil {
			t.Fatal(err)
		}
		h.known = k
		p, err := e.plan(t.Context(), public)
		if err != nil {
			t.Fatal(err)
		}
		err = e.fits(h, p)
		if k.arch != "" && k.tun {
			kind(t, err, sandboxer.Unavailable, name, "make build")
			continue
		}
		kind(t, err, sandboxer.Unsupported, name, "unfiltered_egress: true in the config of ext.test")
		if p, err = e.plan(t.Context(), listed); err != nil {
			t.Fatal(err)
		}
		if err = e.fits(h, p); strings.Contains(sandboxer.HintOf(err), "unfiltered_egress") {
			t.Errorf("a list would not hold with that: %q", sandboxer.HintOf(err))
		}
	}
	// Of another platform.
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	e.cfg.EgressProgram = self
	other := map[bool]string{true: "arm64", false: "amd64"}[runtime.GOARCH == "amd64"]
	if _, err := e.program(other); sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(err.Error(), "linux/"+other) {
		t.Errorf("of another platform: %v", err)
	}
	for name, file := range map[string]string{
		"it runs 2 times":       strings.Replace(single, "working_dir", "scale: 2\n    working_dir", 1),
		"begin with sandboxer-": "services: {sandboxer-x: {image: x}}\n",
		"volumes.sandboxer-e":   "services: {main: {image: x, volumes: ['sandboxer-egress:/v']}}\nvolumes: {sandboxer-egress: {}}\n",
	} {
		s := public
		s.Inputs = map[string]string{"repo": repo(t, file, nil)}
		_, err := e.plan(t.Context(), s)
		kind(t, err, sandboxer.Unsupported, name)
	}
	s := public
	s.Network.Allow = []string{"a.example"}
	kind(t, s.Check(), sandboxer.Invalid) // before the extension sees it
}
