//go:build linux

package runner

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/boot"
)

// A guest is the part of gVisor's spec that the runner uses.
type guest struct {
	Hostname    string
	Process     struct{ Rlimits []specs.POSIXRlimit }
	Linux       struct{ Resources specs.LinuxResources }
	Annotations map[string]string
}

// readGuest reads it from the open file in the arguments.
func readGuest(args []string) (*guest, error) {
	for _, a := range args {
		v, ok := strings.CutPrefix(a, "--spec-fd=")
		if !ok {
			continue
		}
		fd, err := strconv.Atoi(v)
		if err != nil {
			return nil, err
		}
		data, err := readAll(fd)
		if err != nil {
			return nil, err
		}
		g := &guest{}
		return g, json.Unmarshal(data, g)
	}
	return nil, fmt.Errorf("no --spec-fd among the arguments")
}

// readAll reads an open file and leaves it to gVisor.
func readAll(fd int) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	data := make([]byte, st.Size)
	for n := 0; n < len(data); {
		m, err := unix.Pread(fd, data[n:], int64(n))
		if err != nil {
			return nil, os.NewSyscallError("pread", err)
		}
		if m == 0 {
			return data[:n], nil
		}
		n += m
	}
	return data, nil
}

// showLimits returns args with the sandbox's limits, which its kernel then shows as the size of the
// machine and in the files of control groups. gVisor's parent would take them from control groups
// that it made itself; the broker makes ours.
//
// With one processor gVisor runs one thread of an address space at a time, so that a program may
// rely on the number that it sees.
func (g *guest) showLimits(args []string) []string {
	r := g.Linux.Resources
	if m := r.Memory; m != nil && m.Limit != nil && *m.Limit > 0 {
		args = withFlag(args, "total-memory", *m.Limit)
	}
	if c := r.CPU; c != nil && c.Quota != nil && c.Period != nil && *c.Quota > 0 && *c.Period > 0 {
		period := int64(*c.Period)
		n := (*c.Quota + period - 1) / period
		args = withFlag(args, "cpu-num", min(n, int64(runtime.NumCPU())))
		args = withFlag(args, "cpu-quota", *c.Quota)
		args = withFlag(args, "cpu-period", period)
	}
	return args
}

// withFlag adds a flag before the last argument, which is the sandbox's name. If a flag appears
// twice, the later one counts.
func withFlag(args []string, name string, value int64) []string {
	return slices.Insert(args, len(args)-1, "--"+name+"="+strconv.FormatInt(value, 10))
}

// nameItself returns args with an /etc/hosts that resolves the sandbox's own name, as the first file
// of its writable layer. A restored sandbox has one, and gVisor ignores this.
func (g *guest) nameItself(args []string) ([]string, error) {
	if g.Hostname == "" || g.Annotations["sandboxer.linked-etc"] != "" {
		return args, nil
	}
	hosts := "127.0.0.1\tlocalhost\n127.0.1.1\t" + g.Hostname + "\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	now := time.Now()
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, h := range []tar.Header{
		{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./etc/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./etc/hosts", Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(hosts))},
	} {
		h.ModTime = now
		if err := w.WriteHeader(&h); err != nil {
			return nil, err
		}
	}
	if _, err := w.Write([]byte(hosts)); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("hosts", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	if n, err := unix.Pwrite(fd, layer.Bytes(), 0); err != nil || n != layer.Len() {
		return nil, fmt.Errorf("writing the file of host names: %d bytes of %d: %w", n, layer.Len(), err)
	}
	return withFlag(args, "rootfs-upper-tar-fd", int64(fd)), nil
}

// freeLoopback leaves the address 127.0.0.1 of a new network namespace to the program that makes it:
// on Linux a new one has none, and bubblewrap fails if there is one already. All of 127.0.0.0/8 is
// still local there, even for a program that only brings lo up.
func freeLoopback() {
	for i, a := range boot.DefaultLoopbackLink.Addresses {
		if ip := a.Address.To4(); ip != nil {
			boot.DefaultLoopbackLink.Addresses[i].Address = []byte{127, 255, 255, 254}
		}
	}
}
