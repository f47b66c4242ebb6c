package composessh

import (
	"archive/tar"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/safetar"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// keep parses which volumes go into checkpoints, and whether the services are paused
// for them.
func (p *plan) keep(volumes, quiesce string) error {
	if volumes == "all" {
		p.meta.Volumes = p.project.Volumes
	} else if volumes != "" {
		for v := range strings.SplitSeq(volumes, ",") {
			v = strings.TrimSpace(v)
			if !slices.Contains(p.project.Volumes, v) {
				e := sandboxer.E(sandboxer.Invalid, nil, "the input volumes: %s declares no volume %q", p.project.File, v)
				if len(p.project.Volumes) > 0 {
					e.WithHint("it declares %s; all means every volume", strings.Join(p.project.Volumes, ", "))
				}
				return e
			}
			p.meta.Volumes = append(p.meta.Volumes, v)
		}
		slices.Sort(p.meta.Volumes)
		p.meta.Volumes = slices.Compact(p.meta.Volumes)
	}
	switch quiesce {
	case "":
		p.meta.Quiesce = len(p.meta.Volumes) > 0 // half a transaction is of no use to a restore
	case "yes", "no":
		p.meta.Quiesce = quiesce == "yes"
	default:
		return sandboxer.E(sandboxer.Invalid, nil, "the input quiesce must be yes or no, not %q", quiesce)
	}
	return nil
}

// Checkpoint implements sandboxer.Checkpointer. The workspace is read on the host, volumes
// by the engine, by way of a container that never runs: images need no tools.
func (e *extension) Checkpoint(ctx context.Context, h sandboxer.Handle, begin func(sandboxer.Contents) io.Writer) (err error) {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return err
	}
	if m.Quiesce {
		var thaw func() error
		if thaw, err = e.freeze(ctx, ho, m); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, thaw()) }()
	}
	c := sandboxer.Contents{Volumes: m.Volumes, Quiesced: m.Quiesce}
	if len(c.Volumes) == 0 {
		return e.archive(ctx, ho, m, ".", "", begin(c))
	}
	detach, err := e.attach(ctx, ho, m.Name, c.Volumes, map[string]string{engine.LabelName: m.Name, engine.LabelOwner: m.Owner})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, detach()) }()
	out := tar.NewWriter(begin(c))
	err = e.pass(out, "", func(w io.Writer) error { return e.archive(ctx, ho, m, ".", "", w) })
	for _, v := range c.Volumes {
		if err != nil {
			return err
		}
		args := []string{"docker", "cp", m.Name + "-keep:/v/" + v + "/.", "-"}
		if ho.known.engine == "podman" { // whose cp gives everything to root
			if err = e.rootOf(ctx, ho, m.Name+"_"+v, path.Join(sandboxer.VolumesDir, v), out); err != nil {
				return err
			}
			args = []string{"podman", "volume", "export", m.Name + "_" + v}
		}
		err = e.pass(out, path.Join(sandboxer.VolumesDir, v), func(w io.Writer) error {
			return e.copied(ctx, ho, "reading the volume "+v, sshrun.Cmd{Args: args, Stdout: w})
		})
	}
	if err != nil {
		return err
	}
	return out.Close()
}

// rootOf adds the directory of a Podman volume to out, under that name: Podman's export has
// only its content.
func (e *extension) rootOf(ctx context.Context, h *host, volume, name string, out *tar.Writer) error {
	said, err := e.script(ctx, h, nil, nil, `m=$(podman volume inspect --format '{{.Mountpoint}}' "$1") || exit
if [ "$(id -u)" = 0 ]; then stat -c '%a %u %g %Y' "$m"; else podman unshare stat -c '%a %u %g %Y' "$m"; fi`, volume)
	if err != nil {
		return err
	}
	hdr := &tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Format: tar.FormatGNU}
	var sec int64
	if _, err := fmt.Sscanf(said, "%o %d %d %d", &hdr.Mode, &hdr.Uid, &hdr.Gid, &sec); err != nil {
		return sandboxer.E(sandboxer.Failed, err, "host %s: the owner of the volume %s cannot be read", h.Name(), volume)
	}
	hdr.ModTime = time.Unix(sec, 0)
	return out.WriteHeader(hdr)
}

// pass adds the content of the tar that write writes to out, below the name under. A reader
// that leaves is the writer's error.
func (e *extension) pass(out *tar.Writer, under string, write func(io.Writer) error) error {
	pr, pw := io.Pipe()
	written := make(chan error, 1)
	go func() {
		err := write(pw)
		pw.CloseWithError(err)
		written <- err
	}()
	err := func() error {
		// The output of an engine is no more to be trusted than that of a sandbox.
		in := safetar.NewReader(pr, safetar.Rules{OutsideLinks: true, SkipSpecial: true})
		for {
			hdr, err := in.Next()
			if err == io.EOF {
				_, err = io.Copy(io.Discard, pr)
				return err
			}
			if err != nil {
				return err
			}
			name := hdr.Name
			if under == "" && (name == sandboxer.VolumesDir || strings.HasPrefix(name, sandboxer.VolumesDir+"/")) {
				return sandboxer.E(sandboxer.Conflict, nil, "the workspace contains %s, a name that checkpoints use for volumes", sandboxer.VolumesDir).
					WithHint("rename it, or leave the volumes out of snapshots")
			}
			as := &tar.Header{Name: path.Join(under, name), Linkname: hdr.Linkname, Mode: hdr.Mode, Uid: hdr.Uid, Gid: hdr.Gid}
			if hdr.Typeflag == tar.TypeLink {
				as.Linkname = path.Join(under, hdr.Linkname)
			}
			if err := copyEntry(out, in, as, hdr); err != nil {
				return err
			}
		}
	}()
	pr.CloseWithError(errors.New("the caller no longer reads the data"))
	if werr := <-written; werr != nil && (sandboxer.KindOf(err) == sandboxer.Internal || errors.Is(err, werr)) {
		return werr
	}
	return err
}

// copied runs a command that moves a volume.
func (e *extension) copied(ctx context.Context, h *host, what string, cmd sshrun.Cmd) error {
	said := &capture.Last{Max: engine.MaxSaid}
	cmd.Stderr = said
	exit, err := h.engine.Command(ctx, cmd)
	if err == nil && exit.Code != 0 {
		err = e.failed(h, what, said.String(), nil)
	}
	return err
}

// attaching makes, with the engine $1, the container $2-keep, which is never run, from an
// empty image, with $3 volumes of $2 in /v. Their names follow, and then
// options with the labels of everything that is made.
const attaching = `
e=$1 n=$2 c=$3; shift 3
vs= mounts=
while [ $c -gt 0 ]; do vs="$vs $1"; shift; c=$((c-1)); done
"$e" rm -f "$n-keep" >/dev/null 2>&1
for v in $vs; do
	mounts="$mounts -v ${n}_$v:/v/$v"
	"$e" volume inspect "${n}_$v" >/dev/null 2>&1 && continue
	more="--label com.docker.compose.project=$n --label com.docker.compose.volume=$v"
	[ "$e" != podman ] || more="$more --label io.podman.compose.project=$n"
	"$e" volume create "$@" $more "${n}_$v" >/dev/null || exit
done
dd if=/dev/zero bs=512 count=2 2>/dev/null | "$e" import -c "LABEL dev.sandboxer.name=$n" - "$n-keep" >/dev/null || exit
"$e" create --name "$n-keep" "$@" --network none $mounts "$n-keep" x >/dev/null`

// attach makes the container through which volumes of a sandbox are read and written, and the
// missing volumes; detach removes it again.
func (e *extension) attach(ctx context.Context, h *host, name string, volumes []string, labels map[string]string) (detach func() error, err error) {
	args := append([]string{h.known.engine, name, strconv.Itoa(len(volumes))}, volumes...)
	for k, v := range labels {
		args = append(args, "--label", k+"="+v)
	}
	detach = func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		_, err := h.engine.Script(ctx, nil, nil, `"$1" rm -f "$2-keep" >/dev/null && "$1" rmi -f "$2-keep" >/dev/null`, h.known.engine, name)
		return err
	}
	if _, err := h.engine.Script(ctx, map[string]string{"SANDBOXER_SANDBOX": name}, nil, attaching, args...); err != nil {
		return nil, errors.Join(err, detach())
	}
	return detach, nil
}

// content is the initial content of a sandbox.
type content struct {
	sandboxer.Contents
	r      io.Reader
	placed bool // it was read, and is on the host
}

// fits refuses content for which the project has no place.
func (c *content) fits(p *plan) error {
	for _, v := range c.Volumes {
		if !slices.Contains(p.project.Volumes, v) {
			return sandboxer.E(sandboxer.Unsupported, nil, "the checkpoint has the volume %q, but %s declares no volume of that name", v, p.project.File).
				WithHint("restore it with the compose file of its source")
		}
	}
	return nil
}

// ProvisionFrom implements sandboxer.Checkpointer.
func (e *extension) ProvisionFrom(ctx context.Context, spec sandboxer.Spec, c sandboxer.Contents, r io.Reader) (sandboxer.Handle, error) {
	return e.provision(ctx, spec, &content{Contents: c, r: r})
}

// fill puts the content of from in place, before anything of the sandbox was made except its
// images.
func (e *extension) fill(ctx context.Context, h *host, p *plan, dir string, from *content) (err error) {
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "filling the workspace"})
	if _, err := e.script(ctx, h, p.env(), nil, `rm -rf -- "$1/copies" && mkdir -- "$1/copies"`, dir); err != nil {
		return err
	}
	if len(from.Volumes) > 0 {
		var detach func() error
		if detach, err = e.attach(ctx, h, p.name, from.Volumes, p.labels()); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, detach()) }()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	defer wg.Wait()
	// consume starts f, which reads what is written to the returned pipe.
	consume := func(f func(io.Reader) error) (w *tar.Writer, end func(error) error) {
		pr, pw := io.Pipe()
		done := make(chan error, 1)
		wg.Go(func() {
			err := f(pr)
			pr.CloseWithError(errors.Join(errors.New("the caller no longer reads the data"), err))
			done <- err
		})
		w = tar.NewWriter(pw)
		ended := false
		return w, func(err error) error {
			if ended {
				return err
			}
			ended = true
			if err == nil {
				err = w.Close()
			}
			pw.CloseWithError(err)
			if derr := <-done; derr != nil {
				return derr
			}
			return err
		}
	}
	workspace, end := consume(func(r io.Reader) error { return e.refill(ctx, h, path.Join(dir, "repo"), ".", "", nil, r) })
	err = e.distribute(from, workspace, func(v string) (*tar.Writer, string, func(error) error) {
		under, args := v, []string{h.known.engine, "cp", "-", p.name + "-keep:/v"}
		if h.known.engine == "podman" { // which sees volumes only where they are mounted, and gives files to the container
			under, args = ".", []string{"podman", "cp", "--archive=false", "-", p.name + "-keep:/v/" + v}
		}
		w, end := consume(func(r io.Reader) error {
			return e.copied(ctx, h, "filling the volume "+v, sshrun.Cmd{Args: args, Stdin: r})
		})
		return w, under, end
	})
	if err = end(err); err != nil {
		return err
	}
	from.placed = true
	return nil
}

// distribute writes from's part of the workspace to workspace, and each volume to
// the writer that open returns for it, which calls the volume under.
func (e *extension) distribute(from *content, workspace *tar.Writer, open func(v string) (w *tar.Writer, under string, end func(error) error)) (err error) {
	bad := func(format string, args ...any) error {
		return sandboxer.E(sandboxer.Invalid, nil, "the checkpoint "+format, args...)
	}
	in := safetar.NewReader(from.r, safetar.Rules{OutsideLinks: true, SkipSpecial: true})
	var volume, under string
	var vw *tar.Writer
	end := func(err error) error { return err }
	defer func() {
		if err != nil {
			err = end(err)
		}
	}()
	seen := map[string]bool{}
	for {
		hdr, err := in.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		name := hdr.Name
		rest, inVolumes := strings.CutPrefix(name+"/", sandboxer.VolumesDir+"/")
		if inVolumes = inVolumes && len(from.Volumes) > 0; !inVolumes {
			if len(from.Volumes) > 0 && name == path.Dir(sandboxer.VolumesDir) {
				continue // it is there for the volumes
			}
			if err := copyEntry(workspace, in, &tar.Header{Name: name, Linkname: hdr.Linkname, Mode: hdr.Mode}, hdr); err != nil {
				return err
			}
			continue
		}
		if rest = strings.TrimSuffix(rest, "/"); rest == "" {
			continue
		}
		v, below, _ := strings.Cut(rest, "/")
		if !slices.Contains(from.Volumes, v) {
			return bad("has %q, which is in none of its listed volumes", hdr.Name)
		}
		if v != volume {
			if seen[v] {
				return bad("is not in order: the volume %q begins twice", v)
			}
			if err := end(nil); err != nil {
				return err
			}
			seen[v], volume = true, v
			vw, under, end = open(v)
		}
		as := &tar.Header{Name: path.Join(under, below), Linkname: hdr.Linkname, Mode: hdr.Mode & 0o1777, Uid: hdr.Uid, Gid: hdr.Gid}
		if hdr.Typeflag == tar.TypeLink {
			target, ok := strings.CutPrefix(hdr.Linkname, path.Join(sandboxer.VolumesDir, v)+"/")
			if !ok {
				return bad("has the link %q, which leads out of its volume", hdr.Name)
			}
			as.Linkname = path.Join(under, target)
		}
		if err := copyEntry(vw, in, as, hdr); err != nil {
			return err
		}
	}
	if err := end(nil); err != nil {
		return err
	}
	for _, v := range from.Volumes {
		if !seen[v] {
			return bad("has no entry of the volume %q", v)
		}
	}
	return nil
}

// frozenBeat is how often the host gets the message that the services must stay
// paused. After three times that without one it lets them go on: the
// broker may be dead, or the connection.
const frozenBeat = 10 * time.Second

// thawing lets the containers in the file $1 go on, with the engine $e, and then removes the
// file.
const thawing = `
thaw() {
	ids=$(cat "$1") || return
	[ -z "$ids" ] || "$e" unpause $ids >/dev/null 2>&1 || for i in $ids; do
		"$e" unpause "$i" >/dev/null 2>&1 || [ "$("$e" inspect --format '{{.State.Paused}}' "$i" 2>/dev/null)" != true ] || return
	done
	"$e" version >/dev/null 2>&1 && rm -f "$1"
}
`

// freezing pauses the running containers of $3, in the directory $1, with the
// engine $2, until the file frozen.$4 is gone, or beat.$4 was not there for $5 seconds.
var freezing = `e=$2` + thawing + `
cd -- "$1" || exit
for f in frozen.*; do [ ! -e "$f" ] || thaw "$f"; done
ids=$("$e" ps -q --no-trunc --filter "label=dev.sandboxer.name=$3" --filter "` + engine.OwnNames("$3") + `" --filter status=running) || exit
printf '%s\n' "$ids" >"frozen.$4.tmp" && mv -f "frozen.$4.tmp" "frozen.$4" && : >"beat.$4" || exit
(
	trap '' HUP INT TERM
	while sleep "$5" && [ -e "frozen.$4" ]; do rm "beat.$4" || thaw "frozen.$4"; done
) </dev/null >/dev/null 2>&1 3>&- &
[ -z "$ids" ] || "$e" pause $ids >/dev/null || { thaw "frozen.$4"; exit 1; }`

// goingOn lets the containers go on that freezing has paused for $3, in the directory $1, with the
// engine $2. "late": the host did so on its own.
const goingOn = `e=$2` + thawing + `
cd -- "$1" || exit
rm -f "beat.$3"
[ -e "frozen.$3" ] || { echo late; exit 0; }
thaw "frozen.$3"; [ ! -e "frozen.$3" ]`

// freeze pauses the running services, and returns a function that lets them go on. If the
// broker does not come back for that, the host itself lets them go on; in
// that case thaw fails.
func (e *extension) freeze(ctx context.Context, h *host, m *meta) (thaw func() error, err error) {
	dir, token := path.Join(h.known.root, m.Name), strings.ToLower(rand.Text()[:8])
	stop := make(chan struct{})
	ended := make(chan struct{})
	goOn := func(ctx context.Context) error {
		_, err := e.script(ctx, h, nil, nil, goingOn, dir, h.known.engine, token)
		if sandboxer.KindOf(err) == sandboxer.Failed {
			err = nil // it is removed, perhaps
		}
		return err
	}
	thaw = func() error {
		close(stop)
		<-ended
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		out, err := h.engine.Script(ctx, nil, nil, goingOn, dir, h.known.engine, token)
		if err == nil && strings.TrimSpace(out) == "late" {
			err = sandboxer.E(sandboxer.Unavailable, nil, "the services of sandbox %s were resumed before the snapshot was complete: host %s got no sign from the server for too long", m.ID, h.Name())
		}
		if err != nil && h.engine.Watch.Hangs() {
			h.engine.Watch.Owe(goOn) // the call to pause them may have arrived
		}
		return err
	}
	err = e.withoutDials(ctx, h, m, func(ctx context.Context) error {
		_, err := h.engine.Script(ctx, map[string]string{"SANDBOXER_SANDBOX": m.Name}, nil, freezing, dir, h.known.engine, m.Name, token, strconv.FormatFloat(max(1, (3*e.beat).Seconds()), 'f', 0, 64))
		return err
	})
	if err != nil { // it may have begun all the same
		close(ended)
		if terr := thaw(); terr != nil && e.env.Log != nil {
			e.env.Log.Debug("a sandbox may stay frozen for a while", "sandbox", m.ID, "host", h.Name(), "err", terr)
		}
		return nil, err
	}
	go func() {
		defer close(ended)
		tick := time.NewTicker(e.beat)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			beat, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*e.beat)
			_, err := e.script(beat, h, nil, nil, `cd -- "$1" && [ -e "frozen.$2" ] && : >"beat.$2"`, dir, token)
			cancel()
			if err != nil && e.env.Log != nil {
				e.env.Log.Debug("the freeze of a sandbox could not be renewed", "sandbox", m.ID, "host", h.Name(), "err", err)
			}
		}
	}()
	return thaw, nil
}
