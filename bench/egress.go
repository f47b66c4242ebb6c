//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/namespaces"
)

const (
	dockerOut = "profile.bench-docker-out"
	localOut  = "profile.bench-local-out"

	containerOut = "containers: 200 MB from outside, by policy"
	ownOut       = "ext.local: 200 MB from outside, by policy"
	outSize      = 200_000_000

	// A pair of addresses that are nobody's: those of the machine itself are never reached.
	outHere  = "198.51.100.252"
	outThere = "198.51.100.253"
)

// reaching is a profile of extension whose sandboxes reach the server of outside.
func (b *bench) reaching(id, extension, isolation string) string {
	return fmt.Sprintf("id: %s\nextension: %s\nisolation: %s\nrequires: [exec, files]\nnetwork: {allow: [%s]}\nimage: tar:%s\nttl: 30m\n", id, extension, isolation, outThere, b.image)
}

// egress measures how fast a container gets data through the filter of its network, beside a sandbox of
// ext.local with the same policy.
func (b *bench) egress(ctx context.Context, br *broker) (err error) {
	url, stop, err := outside(ctx)
	if url == "" && err == nil {
		b.r.skip("%s: needs root and ip (install iproute2)", containerOut)
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	var arms []Arm
	for name, profile := range map[string]string{containerOut: dockerOut, ownOut: localOut} {
		id, err := br.create(ctx, profile)
		if err != nil {
			return err
		}
		defer func() { _, _ = br.Destroy(context.WithoutCancel(ctx), id, true) }()
		arms = append(arms, Arm{Name: name, To: b.to, Sample: func(ctx context.Context, to *Set) error {
			begin := time.Now()
			err := br.exec(ctx, id, sandboxer.Cmd{Args: []string{"busybox", "wget", "-q", "-O", "/dev/null", url}})
			to.Rate(name, "MB/s", outSize/1e6/time.Since(begin).Seconds())
			return err
		}})
	}
	_, err = interleave(ctx, b.plan(b.count(max(5, b.rounds/4), 1)), arms...)
	return err
}

// outside starts a web server in a network of its own, as if it were elsewhere; url is "" where that
// cannot be.
func outside(ctx context.Context) (url string, stop func() error, err error) {
	if _, err := exec.LookPath("ip"); err != nil || os.Geteuid() != 0 {
		return "", nil, nil
	}
	ip := func(args ...string) error {
		_, _, _, err := command(context.WithoutCancel(ctx), nil, append([]string{"ip"}, args...)...)
		return err
	}
	ns := fmt.Sprintf("sbxbench%d", os.Getpid())
	dev := fmt.Sprintf("sbxb%d", os.Getpid())
	if l, err := net.Listen("tcp", outHere+":0"); err == nil { // two links with it would mix up what they are for
		l.Close()
		return "", nil, fmt.Errorf("the address %s is already this machine's: another bench runs, or one that was killed left the link sbxb…: ip link del it", outHere)
	}
	if err := ip("netns", "add", ns); err != nil {
		return "", nil, err
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", strconv.Itoa(outSize))
		_, _ = io.CopyN(w, zeros{}, outSize)
	})}
	stop = func() error {
		s.Close()
		_ = ip("link", "del", dev) // it goes with its peer, but not at once
		return ip("netns", "del", ns)
	}
	for _, args := range [][]string{
		{"link", "add", dev, "type", "veth", "peer", "name", "eth0", "netns", ns},
		{"addr", "add", outHere + "/31", "dev", dev},
		{"link", "set", dev, "up"},
		{"-n", ns, "addr", "add", outThere + "/31", "dev", "eth0"},
		{"-n", ns, "link", "set", "eth0", "up"},
	} {
		if err := ip(args...); err != nil {
			return "", nil, errors.Join(err, stop())
		}
	}
	var l net.Listener
	err = namespaces.InNetworkAt("/run/netns/"+ns, func() (err error) {
		l, err = net.Listen("tcp", outThere+":0")
		return err
	})
	if err != nil {
		return "", nil, errors.Join(err, stop())
	}
	go func() { _ = s.Serve(l) }()
	return "http://" + l.Addr().String() + "/", stop, nil
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
