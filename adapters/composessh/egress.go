package composessh

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"net/netip"
	"os"
	"path"
	"slices"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/composessh/composefile"
	"github.com/sand-boxer/sandboxer/internal/egress"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/program"
)

// Sandboxes with a filtered network have three more kinds of containers, all from an
// image with one program that is copied to the host: see package egress. That image is kept
// there as layers of builds are (images.go).
const (
	labelLink    = "dev.sandboxer.link" // the service
	labelGateway = "dev.sandboxer.gateway"
)

// filters reports whether a gateway is between services and the network.
func (c *Config) filters(p sandboxer.NetworkPolicy) bool {
	return p.Mode == sandboxer.NetworkAllow || p.Mode == sandboxer.NetworkPublic && !c.UnfilteredEgress
}

// fits refuses what h cannot do for p.
func (e *extension) fits(h *host, p *plan) error {
	if p.filtered {
		if err := e.filterable(h, p); err != nil {
			return err
		}
	}
	return p.fits(h)
}

// filterable says why h cannot filter the network of p; nil if it may be able to.
func (e *extension) filterable(h *host, p *plan) error {
	cannot := func(why string) error {
		return sandboxer.E(sandboxer.Unsupported, nil, "host %s cannot filter what services reach: %s", h.Name(), why).
			WithHint("%s", e.unfilteredHint(p.spec.Network.Mode))
	}
	switch {
	case h.known.engine != "docker" || h.known.podmanCompose():
		return cannot("filtering needs Docker, and the host has " + h.known.engine)
	case !h.known.tun:
		return cannot("it has no /dev/net/tun (modprobe tun)")
	case h.known.arch == "":
		return cannot("the server has no program for its platform")
	}
	if _, err := e.program(h.known.arch); err != nil {
		return err
	}
	return nil
}

// unfilteredHint says what to do where the network cannot be filtered.
func (e *extension) unfilteredHint(mode sandboxer.NetworkMode) string {
	if mode == sandboxer.NetworkPublic {
		return "use a profile without a network, a host with Docker and /dev/net/tun, or have the operator set unfiltered_egress: true in the config of " + e.env.Extension
	}
	return "use a profile without a network, or a host with Docker and /dev/net/tun"
}

// program returns the program for hosts of an architecture.
func (e *extension) program(arch string) (program.Program, error) {
	p, err := e.programs.Find("sandboxer-egress", arch, e.cfg.EgressProgram)
	var because *sandboxer.Error
	if errors.As(err, &because) {
		return p, sandboxer.E(sandboxer.Unavailable, err, "the program that filters the network of linux/%s hosts is missing: %s", arch, because.Msg).
			WithHint("make build builds it next to sandboxer; set egress_program in the config of %s if it is in another place", e.env.Extension)
	}
	return p, err
}

// carriedImages prints, for engine.ParseImages, the images with the label $2, and marks them as
// used: as a build in the directory $3, under the name $4.
const carriedImages = `
cd -- "$3" && mkdir -p .cache && printf '%s\n' "$4" >".cache/${2%.0}" || exit
engine=$1 most=100
set -- --filter dangling=true --filter "label=` + labelCache + `=$2"` + engine.ImagesScript

// carry copies the program to h, unless it is there, and returns its image.
func (e *extension) carry(ctx context.Context, h *host) (string, error) {
	prog, err := e.program(h.known.arch)
	if err != nil {
		return "", err
	}
	data, err := os.ReadFile(prog.Path)
	if err != nil {
		return "", sandboxer.E(sandboxer.Unavailable, err, "the program that filters the network cannot be read")
	}
	label := short("") + "." + prog.Digest[:12] + ".0"
	select { // one that is brought need not be brought again
	case h.known.carrying <- struct{}{}:
		defer func() { <-h.known.carrying }()
	case <-ctx.Done():
		return "", ctx.Err()
	}
	look := func() (string, error) {
		out, err := h.engine.Script(ctx, nil, nil, carriedImages, h.known.engine, label, h.known.root, "/sandboxer/egress")
		if err != nil {
			return "", err
		}
		images, err := engine.ParseImages(out)
		if err != nil {
			return "", sandboxer.E(sandboxer.Unavailable, err, "host %s: the engine's list of images cannot be read", h.Name())
		}
		for _, i := range images {
			if i.HasLabels(map[string]string{engine.LabelOwner: e.env.Owner, labelCache: label}) {
				return i.ID, nil
			}
		}
		return "", nil
	}
	if id, err := look(); id != "" || err != nil {
		return id, err
	}
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "copying sandboxer-egress to " + h.Name()})
	var packed bytes.Buffer
	zw := gzip.NewWriter(&packed)
	tw := tar.NewWriter(zw)
	for _, dir := range []string{"etc/", "run/", egress.Dir[1:] + "/"} {
		// A volume that is mounted there takes its owner from this directory.
		err = errors.Join(err, tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755, Uid: egress.User, Gid: egress.User}))
	}
	err = errors.Join(err, tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: egress.Binary[1:], Mode: 0o755, Size: int64(len(data))}))
	if err == nil {
		_, err = tw.Write(data)
	}
	if err = errors.Join(err, tw.Close(), zw.Close()); err != nil {
		return "", err
	}
	err = e.step(pCarry, func() error {
		_, err := h.engine.Import(ctx, &packed, map[string]string{engine.LabelOwner: e.env.Owner, labelCache: label}, egress.Binary)
		return err
	})
	if err != nil {
		return "", err
	}
	id, err := look()
	if err == nil && id == "" {
		err = sandboxer.E(sandboxer.Failed, nil, "host %s: the engine does not have the image that was loaded", h.Name())
	}
	return id, err
}

// behind completes r for a network that is filtered.
func (p *plan) behind(r *composefile.Rendering, image string) {
	if p.filtered {
		r.Egress = &composefile.Egress{Image: image, File: composefile.EgressFile(r.Dir), LinkLabel: labelLink, GatewayLabel: labelGateway, Container: p.name}
	}
}

// gatewayConfig is the configuration of the gateway.
func (e *extension) gatewayConfig(p *plan, r composefile.Rendering) ([]byte, error) {
	cfg := p.project.EgressConfig(r, p.linkedBuilds)
	cfg.Network = p.spec.Network
	var err, derr error
	cfg.Never, err = egress.Prefixes("never", e.cfg.Never)
	cfg.DNS, derr = egress.Resolvers("dns", e.cfg.DNS)
	if err = errors.Join(err, derr); err != nil {
		return nil, err
	}
	// The gateway is on the host, and so could reach the networks of other sandboxes there.
	if others, err := netip.ParsePrefix(e.cfg.Subnets); err == nil {
		cfg.Never = append(cfg.Never, others)
	}
	return cfg.Marshal()
}

// linking waits until the gateway $1-gateway of the sandbox $1 serves the links $3…, or prints
// why it cannot. $2: the engine.
var linking = `
n=$1 e=$2; shift 2
"$e" exec "$n-gateway" ` + egress.Binary + ` wait "$@" & p=$!
while kill -0 $p 2>/dev/null; do
	for l in dev.sandboxer.link dev.sandboxer.gateway; do
		for s in exited restarting dead; do
			i=$("$e" ps -aq --filter "label=dev.sandboxer.name=$n" --filter "` + engine.OwnNames("$n") + `" --filter "label=$l" --filter status=$s | head -n 1)
			[ -z "$i" ] || { kill $p; "$e" logs --tail 3 "$i" >&2; exit 1; }
		done
	done
	sleep 0.2 2>/dev/null || sleep 1
done
wait $p`

// link starts the gateway and links, and waits until they are in place: services that start after
// that have only the way out that the policy gives them.
func (e *extension) link(ctx context.Context, h *host, p *plan, links []string) error {
	args := append(e.compose(h, p), "up", "-d", "--no-deps", egress.Name)
	for _, l := range links {
		if l == egress.Build {
			args = append(args, l)
		} else {
			args = append(args, composefile.LinkOf(l))
		}
	}
	if err := e.long(ctx, h, p, "starting the gateway", args, p.env()); err != nil {
		return err
	}
	if len(links) == 0 {
		return nil
	}
	_, err := h.engine.Script(ctx, p.env(), nil, linking, append([]string{p.name, h.known.engine}, links...)...)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if sandboxer.KindOf(err) == sandboxer.Failed {
		return sandboxer.E(sandboxer.Unsupported, err, "host %s cannot filter what services reach: %s", h.Name(), sandboxer.Message(errors.Unwrap(err))).
			WithHint("%s", e.unfilteredHint(p.spec.Network.Mode))
	}
	return err
}

// linkBuilds starts the link behind which images are built, and returns a function that ends it.
func (e *extension) linkBuilds(ctx context.Context, h *host, p *plan) (end func(), err error) {
	if !p.linkedBuilds {
		return func() {}, nil
	}
	if err := e.step(pLink, func() error { return e.link(ctx, h, p, []string{egress.Build}) }); err != nil {
		return nil, err
	}
	return func() {
		// Otherwise it is removed with the sandbox.
		_, _ = h.engine.Script(ctx, nil, nil, `"$1" rm -f "$2" >/dev/null 2>&1; exit 0`, h.known.engine, buildLink(p.name))
	}, nil
}

func buildLink(name string) string { return name + "-build" }

// compose is the compose program with the options that select the project.
func (e *extension) compose(h *host, p *plan) []string {
	dir := path.Join(h.known.root, p.name)
	args := append(slices.Clone(h.known.compose), "-p", p.name, "-f", path.Join(dir, "compose.yaml"))
	if !h.known.podmanCompose() {
		args = append(args, "--project-directory", dir)
	}
	return args
}
