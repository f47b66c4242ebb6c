package engine

import (
	"context"
	"errors"
	"net"
	"path"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procnet"
)

// tables prints $2 bytes of each table of the sockets in the network of process $1, as in /proc. Sockets that listen come
// first there, so the others hide none of them.
const tables = `
tables() {
	for t in tcp tcp6; do
		head -c "$2" "/proc/$1/net/$t" 2>/dev/null
		echo
	done
}
`

// nearScript prints which of the addresses $2… are on a network of the host itself (elsewhere
// that address belongs to another machine), and the sockets that listen in the network of process
// $1, as in /proc.
const nearScript = tables + `p=$1; shift
for a; do
	r=$(ip route get "$a" 2>/dev/null) || continue
	case $r in ""|*" via "*) ;; *) echo "near $a";; esac
done
tables "$p" 1048576
exit 0`

// An Endpoint is a port of a container.
type Endpoint struct {
	Container *Container
	// Network is the container whose network Container uses: itself, or another.
	Network *Container
	Port    int
	Name    string // what messages call the container, such as "the service web"
	// Inside connects to the port from within the container, and is tried before tools of its
	// image. nil for an endpoint that has no such way.
	Inside func(ctx context.Context) (net.Conn, error)
}

// Dial connects to a port: by the container's own address where that is near the host, by the
// port of the host that it is published on, or else from within the container, which takes
// Inside or an image with nc. It returns when the connection is there; ending ctx later does not close it.
// Unavailable: nothing listens there, or it cannot be reached.
func (en *Engine) Dial(ctx context.Context, to Endpoint) (net.Conn, error) {
	addrs, published := to.Network.Addrs(to.Port)
	out, err := en.HostScript(ctx, nil, nil, nearScript, append([]string{strconv.Itoa(to.Container.State.Pid)}, addrs...)...)
	if err != nil {
		return nil, err
	}
	known, loopback, wide := listening(out, to.Port)
	var failed error = sandboxer.E(sandboxer.Unavailable, nil, "nothing listens on port %d of %s", to.Port, to.Name)
	if known && !loopback && !wide {
		return nil, failed
	}
	if !known || wide {
		var ways []string
		for _, a := range addrs {
			if strings.Contains(out, "near "+a+"\n") {
				ways = append(ways, net.JoinHostPort(a, strconv.Itoa(to.Port)))
			}
		}
		if en.Program != "podman" {
			ways = append(ways, published...)
		}
		for _, addr := range ways {
			c, err := en.Host.Dial(ctx, "tcp", addr)
			if err == nil {
				return c, nil
			}
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			failed = err
		}
	}
	c, err := en.dialInside(ctx, to)
	if err == nil || sandboxer.KindOf(err) != sandboxer.Unavailable || ctx.Err() != nil || !wide {
		return c, err
	}
	// Podman keeps a published port open even if it leads nowhere in the sandbox.
	for _, addr := range published {
		if c, err := en.Host.Dial(ctx, "tcp", addr); err == nil {
			return c, nil
		}
	}
	return nil, sandboxer.E(sandboxer.Unavailable, errors.Join(failed, err), "port %d of %s cannot be reached", to.Port, to.Name).
		WithHint("use an image with nc: the server then reaches every port")
}

// listening reports which sockets listen on a port, by the tables of sockets in a host's output.
func listening(said string, port int) (known, loopback, wide bool) {
	all, known := procnet.Listeners(strings.NewReader(said))
	for _, l := range all {
		if l.Port == port {
			loopback, wide = loopback || l.Loopback, wide || !l.Loopback
		}
	}
	return known, loopback, wide
}

// socketsScript prints, for every named process, its number and the tables of its sockets.
const socketsScript = tables + `for p; do
	echo "process $p"
	tables "$p" 65536
done
exit 0`

// Listeners returns the sockets that listen in the networks of containers, by container ID. A container that does
// not run, or reports nothing, has no entry.
func (en *Engine) Listeners(ctx context.Context, list []Container) (map[string][]procnet.Listener, error) {
	id, pids := map[string]string{}, []string{}
	for _, c := range list {
		if pid := strconv.Itoa(c.State.Pid); c.State.Running && c.State.Pid > 0 {
			id[pid] = c.ID
			pids = append(pids, pid)
		}
	}
	out, err := en.HostScript(ctx, nil, nil, socketsScript, pids...)
	if err != nil {
		return nil, err
	}
	all := map[string][]procnet.Listener{}
	for part := range strings.SplitSeq("\n"+out, "\nprocess ") {
		pid, table, _ := strings.Cut(part, "\n")
		if list, known := procnet.Listeners(strings.NewReader(table)); known && id[pid] != "" {
			all[id[pid]] = list
		}
	}
	return all, nil
}

// dialInside connects from within the container, by Inside or with a tool of the image.
func (en *Engine) dialInside(ctx context.Context, to Endpoint) (net.Conn, error) {
	var inside error
	if to.Inside != nil {
		var c net.Conn
		if c, inside = to.Inside(ctx); inside == nil || ctx.Err() != nil {
			return c, inside
		}
	}
	out, err := en.Script(ctx, nil, nil, `"$1" exec "$2" sh -c 'command -v nc || command -v busybox' 2>/dev/null || echo none`, en.Program, to.Container.ID)
	if err != nil {
		return nil, err
	}
	tool := strings.Fields(out)
	if len(tool) == 0 || tool[0] == "none" || !path.IsAbs(tool[0]) && tool[0] != "nc" {
		return nil, sandboxer.E(sandboxer.Unavailable, inside, "port %d is not open to the host, and the image of %s has no nc to reach it from within", to.Port, to.Name).
			WithHint("let the program listen on 0.0.0.0; only the sandbox's own network can reach that")
	}
	var args []string
	if strings.HasSuffix(tool[0], "busybox") {
		args = []string{tool[0], "nc"}
	} else {
		args = tool[:1]
	}
	c, err := en.Stream(ctx, to.Container.ID, sandboxer.Cmd{Args: append(args, "127.0.0.1", strconv.Itoa(to.Port))})
	if sandboxer.KindOf(err) == sandboxer.Failed {
		err = sandboxer.E(sandboxer.Unavailable, err, "%s ended while port %d was being reached", to.Name, to.Port)
	}
	return c, err
}
