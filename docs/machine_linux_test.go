package docs_test

import (
	"archive/tar"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/sand-boxer/sandboxer/internal/namespaces"
)

// The machine's address, and the world's, both public ones, which are nobody's here.
const (
	machineAddress = "198.41.30.1"
	worldAddress   = "198.41.30.2"
)

func sh(t *testing.T, script string, args ...string) string {
	t.Helper()
	cmd := exec.Command("bash", append([]string{"-ec", script, "bash"}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return string(out)
}

func writeFile(t *testing.T, name, text string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(name, mode); err != nil {
		t.Fatal(err)
	}
}

// inWorld calls f on a thread that is in the world's network.
func inWorld(t *testing.T, f func() error) {
	t.Helper()
	if err := namespaces.InNetworkAt("/run/netns/world", f); err != nil {
		t.Fatal(err)
	}
}

// makeMachine makes the accounts of this machine, and the world beyond its network.
func makeMachine(t *testing.T) {
	sh(t, `
ip link set lo up
mkdir -p /run/netns /run/sshd /run/lock
ip netns add world
ip link add uplink type veth peer name downlink netns world
ip addr add `+machineAddress+`/24 dev uplink
ip link set uplink up
ip route add default via `+worldAddress+`
ip -n world link set lo up
ip -n world addr add `+worldAddress+`/24 dev downlink
ip -n world link set downlink up

ln -sfn /run /var/run
rm -rf /etc/sandboxer /var/lib/sandboxer /var/log/sandboxer /root/.config /root/.ssh /root/.docker /root/.gitconfig /etc/ssh/ssh_config.d/*
for who in dev:7001 ci:7002 build:7003; do
	name=${who%:*} id=${who#*:}
	rm -rf /home/$name
	sed -i "/^$name:/d" /etc/passwd /etc/group /etc/shadow
	echo "$name:x:$id:$id::/home/$name:/bin/bash" >>/etc/passwd
	echo "$name:x:$id:" >>/etc/group
	echo "$name:*:19000::::::" >>/etc/shadow
	mkdir -p /home/$name/.ssh
	chmod 700 /home/$name/.ssh
	chown -R $name:$name /home/$name
done
mkdir -p /root/.ssh /run/user/7001
chmod 700 /root/.ssh
chown dev:dev /run/user/7001
chmod 700 /run/user/7001
sed -i '/^docker:/d' /etc/group
echo 'docker:x:7100:ci' >>/etc/group
mkdir /build /src
chown build:build /build
`)
	writeFile(t, "/etc/resolv.conf", "nameserver "+worldAddress+"\n", 0o644)
	writeFile(t, "/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n", 0o644)
	serveNames(t)
	serveHTTPS(t)
	serveSSH(t)
}

// serveNames is the world's resolver: every name of the pages is the world's address.
func serveNames(t *testing.T) {
	var conn net.PacketConn
	inWorld(t, func() (err error) {
		conn, err = net.ListenPacket("udp4", worldAddress+":53")
		return err
	})
	t.Cleanup(func() { conn.Close() })
	go func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			var q dnsmessage.Message
			if q.Unpack(buf[:n]) != nil || len(q.Questions) != 1 {
				continue
			}
			a := dnsmessage.Message{Header: dnsmessage.Header{ID: q.ID, Response: true, RecursionDesired: q.RecursionDesired, RecursionAvailable: true}, Questions: q.Questions}
			host := strings.ToLower(strings.TrimSuffix(q.Questions[0].Name.String(), "."))
			switch {
			case host != "example.org" && !strings.HasSuffix(host, ".example.org") && !strings.HasSuffix(host, ".example") && !strings.HasSuffix(host, "docker.io"):
				a.RCode = dnsmessage.RCodeNameError
			case q.Questions[0].Type == dnsmessage.TypeA:
				a.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Questions[0].Name, Class: dnsmessage.ClassINET, TTL: 60},
					Body:   &dnsmessage.AResource{A: [4]byte(net.ParseIP(worldAddress).To4())},
				}}
			}
			if out, err := a.Pack(); err == nil {
				conn.WriteTo(out, from)
			}
		}
	}()
}

// serveHTTPS is example.org with its git repositories, and Docker's registry, with
// certificates of an authority that this machine trusts.
func serveHTTPS(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the world's authority"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), NotBefore: ca.NotBefore, NotAfter: ca.NotAfter,
		DNSNames: []string{"example.org", "*.example.org", "index.docker.io", "registry-1.docker.io", "docker.io"}}
	der, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := os.ReadFile("/etc/ssl/certs/ca-certificates.crt")
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	writeFile(t, "/etc/ssl/certs/ca-certificates.crt", string(bundle)+string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: caDER})), 0o644)

	sh(t, `
mkdir -p /srv/git
git init -q -b main /srv/git/work
cd /srv/git/work
echo hello >README
git add README
git -c user.name=a -c user.email=a@example.org commit -q -m first
git tag v1.2
git clone -q --bare . ../project.git
`)
	git := &cgi.Handler{Path: strings.TrimSpace(sh(t, "git --exec-path")) + "/git-http-backend", Env: []string{"GIT_PROJECT_ROOT=/srv/git", "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*"}}
	images := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	for _, ref := range []string{"index.docker.io/library/alpine:latest", "index.docker.io/library/python:3.13"} {
		push(t, images, ref)
	}
	server := &http.Server{ErrorLog: log.New(io.Discard, "", 0), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.Host, "docker.io"):
			images.ServeHTTP(w, r)
		case strings.HasPrefix(r.URL.Path, "/project.git"):
			git.ServeHTTP(w, r)
		default:
			io.WriteString(w, "hello\n")
		}
	})}
	var l net.Listener
	inWorld(t, func() (err error) {
		l, err = net.Listen("tcp4", worldAddress+":443")
		return err
	})
	t.Cleanup(func() { server.Close() })
	go server.Serve(tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}))
}

type direct struct{ http.Handler }

func (d direct) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	if r.Body == nil {
		r.Body = http.NoBody
	}
	d.ServeHTTP(w, r)
	res := w.Result()
	res.Request = r
	return res, nil
}

// push stores an image under a name, made of this machine's busybox.
func push(t *testing.T, images http.Handler, ref string) {
	t.Helper()
	data := busyboxTar(t)
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	img, err = mutate.ConfigFile(img, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, Config: v1.Config{Cmd: []string{"sh"}, Env: []string{"PATH=/bin"}},
		RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{must(layer.DiffID())}}})
	if err != nil {
		t.Fatal(err)
	}
	r, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, img, remote.WithTransport(direct{images})); err != nil {
		t.Fatal(err)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// busyboxTar is the root of an image.
func busyboxTar(t *testing.T) []byte {
	t.Helper()
	data, err := os.ReadFile("/usr/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(h tar.Header, text []byte) {
		h.Size = int64(len(text))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		w.Write(text)
	}
	for _, d := range []string{"bin/", "etc/", "root/", "proc/", "sys/", "dev/", "data/", "src/"} {
		put(tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	put(tar.Header{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o1777}, nil)
	put(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, data)
	for applet := range strings.FieldsSeq(sh(t, "busybox --list")) {
		if applet != "busybox" {
			put(tar.Header{Name: "bin/" + applet, Typeflag: tar.TypeSymlink, Linkname: "busybox"}, nil)
		}
	}
	put(tar.Header{Name: "bin/pytest", Typeflag: tar.TypeReg, Mode: 0o755}, []byte("#!/bin/sh\nwget -q -O - http://web:8080/README && echo 1 passed\n"))
	put(tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:0:root:/root:/bin/sh\n"))
	put(tar.Header{Name: "etc/group", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:\n"))
	put(tar.Header{Name: "etc/os-release", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("NAME=\"Alpine Linux\"\nID=alpine\n"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// daemon starts a server of the world that ends with the test.
func daemon(t *testing.T, args ...string) {
	t.Helper()
	logs, err := os.Create("/run/" + filepath.Base(args[0]) + ".log")
	if err != nil {
		t.Fatal(err)
	}
	defer logs.Close()
	cmd := exec.Command("nsenter", append([]string{"--net=/run/netns/world", "--"}, args...)...)
	cmd.Stdout, cmd.Stderr = logs, logs
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(logs.Name())
			t.Logf("%s said:\n%s", args[0], text[max(0, len(text)-4000):])
		}
	})
}

// eventually runs a script until it succeeds.
func eventually(t *testing.T, script string) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		out, err := exec.Command("bash", "-ec", script).CombinedOutput()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// serveSSH is the hosts of the pages, which let both users in by key: with an engine for
// containers, and with a compiler.
func serveSSH(t *testing.T) {
	sh(t, `
ssh-keygen -q -t ed25519 -N '' -f /run/host_key
ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519
install -m 600 -o dev -g dev /root/.ssh/id_ed25519 /home/dev/.ssh/
for name in ci build; do install -m 600 -o $name -g $name /root/.ssh/id_ed25519.pub /home/$name/.ssh/authorized_keys; done
`)
	writeFile(t, "/run/sshd_config", fmt.Sprintf(`
ListenAddress %s
HostKey /run/host_key
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
Subsystem sftp internal-sftp
`, worldAddress), 0o644)
	writeFile(t, "/usr/local/bin/cabal", `#!/bin/sh
[ "$1" = build ] || exit 1
mkdir -p dist-newstyle/sdist && cp README dist-newstyle/sdist/
echo "Build profile: -w ghc-9.8 -O1"
`, 0o755)
	daemon(t, "/usr/sbin/sshd", "-D", "-e", "-f", "/run/sshd_config")
	eventually(t, "ssh -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null ci@build-1.example true")
}

// serveDocker starts the engine of build-1.example.
func serveDocker(t *testing.T) {
	daemon(t, "dockerd", "--data-root", "/var/lib/docker-of-world", "--exec-root", "/run/docker-of-world", "-H", "unix:///var/run/docker.sock", "--pidfile", "/run/docker-of-world.pid",
		"--bridge=none", "--iptables=false", "--ip6tables=false", "--group", "docker")
	eventually(t, "docker version")
	cmd := exec.Command("docker", "import", "-", "example.org/tools:1")
	cmd.Stdin = bytes.NewReader(busyboxTar(t))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("docker import: %v\n%s", err, out)
	}
}
