package composessh

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// removeObjects removes, with the engine $1, everything of the sandbox $2, by the name of
// the project and by label in turn, until one look after the last removal finds nothing:
// each alone finds all that compose made of the file. With $3, volumes and images stay. It
// prints "built" if there were images; what they are made of stays (images.go).
const removeObjects = `
e=$1 n=$2 keep=$3
case $e in podman) project=io.podman.compose.project;; *) project=com.docker.compose.project;; esac
by=$project=$n
for try in 1 2 3 4 5 6; do
	some=
	ids=$("$e" ps -aq --no-trunc --filter "label=$by") || exit
	[ -z "$ids" ] || { some=1; { [ "$e" = podman ] && podman rm -f -v -t 0 $ids >/dev/null 2>&1; } || "$e" rm -f -v $ids >/dev/null; }
	if [ "$e" = podman ] && podman pod exists "pod_$n" 2>/dev/null; then some=1; podman pod rm -f "pod_$n" >/dev/null; fi
	ids=$("$e" network ls -q --filter "label=$by") || exit
	[ -z "$ids" ] || { some=1; "$e" network rm $ids >/dev/null; }
	ids=
	[ -n "$keep" ] || ids=$("$e" volume ls -q --filter "label=$by") || exit
	[ -z "$ids" ] || { some=1; "$e" volume rm -f $ids >/dev/null; }
	[ -n "$some" ] || [ $try = 1 ] || break
	case $by in $project=*) by=dev.sandboxer.name=$n;; *) by=$project=$n;; esac
	[ $try -lt 4 ] || sleep 0.2 2>/dev/null || sleep 1
done
[ -z "$some" ] || { echo "something of $n would not go" >&2; exit 1; }
[ -z "$keep" ] || exit 0
ids=$({ "$e" images -q --no-trunc --filter "label=dev.sandboxer.name=$n" && "$e" images -q --no-trunc "$n"; } | sort -u) || exit
[ -n "$ids" ] || exit 0
echo built
"$e" rmi -f --no-prune $ids >/dev/null 2>&1 || "$e" rmi -f $ids >/dev/null 2>&1
exit 0`

// removeDir removes the directory of sandbox $2 below $1, after its subnets. What
// containers wrote there may belong to others: the engine $3 is then asked to remove it,
// with an image that has rm. Whose image that is nobody knows: it sees that directory and
// nothing else, may no more than remove others' files, and is none that a sandbox built. What
// hangs there carries the sandbox's label, by which the next try finds it.
const removeDir = `
cd -P -- "$1" || exit
case $2 in sbx-*/*|*..*) exit 1;; sbx-*) ;; *) exit 1;; esac
if [ -e "$2" ]; then
	[ ! -L "$2" ] && [ "$(cd -P -- "$2" && pwd -P)" = "$(pwd -P)/$2" ] || { echo "$2 is not a directory of sandboxes" >&2; exit 1; }
	if ! rm -rf -- "$2/repo" "$2/copies" "$2/files" 2>/dev/null; then
		built=" $({ "$3" images -q --filter label=dev.sandboxer.name; "$3" images -q --filter label=dev.sandboxer.cache; } | tr '\n' ' ')" lim=
		[ "$3" != docker ] || lim="--memory 128m --pids-limit 32"
		for i in $("$3" images -q | head -n 50); do
			case $built in *" $i "*) continue;; esac
			"$3" run --rm --network none -u 0 --read-only --cap-drop ALL --cap-add DAC_OVERRIDE --cap-add FOWNER --security-opt no-new-privileges $lim \
				--label "dev.sandboxer.name=$2" -v "$(pwd -P)/$2:/w" --entrypoint rm "$i" -rf /w/repo /w/copies /w/files >/dev/null 2>&1 && break
		done
		rm -rf -- "$2/repo" "$2/copies" "$2/files" || exit
	fi
fi
for l in .net/*; do [ "$(readlink -- "$l" 2>/dev/null)" != "../$2" ] || rm -f -- "$l"; done
rm -rf -- "$2" || exit
`

// Teardown implements sandboxer.Extension.
func (e *extension) Teardown(ctx context.Context, h sandboxer.Handle) (report sandboxer.CleanupReport, err error) {
	if err := ctx.Err(); err != nil {
		return report, err
	}
	var places []place
	var unasked error
	if name, at := e.where(h); at != "" {
		places = []place{{name, at, h.Generation}}
	} else {
		places, unasked = e.search(ctx, h)
		if places, err = e.withFormer(places, h.SandboxID, h.Generation); err != nil {
			return report, err
		}
	}
	for _, p := range places {
		if err := e.remove(ctx, p); err != nil {
			return report, err
		}
		if p.host != untouched {
			report.Removed = append(report.Removed, "compose project "+p.name+" on "+p.host)
		}
	}
	return report, unasked // there may be more of it
}

// withFormer adds to places those where an earlier version noted a sandbox, of any generation
// if that is 0.
func (e *extension) withFormer(places []place, id string, generation int) ([]place, error) {
	files, err := os.ReadDir(filepath.Join(e.env.Dir, formerDir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "where sandbox %s was placed cannot be read", id)
	}
	for _, f := range files {
		got, g, ok := e.split(f.Name())
		if !ok || got != id || generation != 0 && g != generation || slices.ContainsFunc(places, func(p place) bool { return p.name == f.Name() }) {
			continue
		}
		at, err := e.former(f.Name())
		if err != nil {
			return nil, err
		}
		if at != "" {
			places = append(places, place{f.Name(), at, g})
		}
	}
	return places, nil
}

func (e *extension) remove(ctx context.Context, p place) error {
	unlock, err := e.lock(ctx, p.name)
	if err != nil {
		return err
	}
	defer unlock()
	if p.host == untouched {
		if at, err := e.former(p.name); err != nil || at != untouched { // somebody else saw to it meanwhile
			return err
		}
		return e.forgetFormer(p.name)
	}
	h, err := e.host(p.host)
	if err == nil {
		err = e.look(ctx, h)
	}
	if err != nil {
		return err
	}
	e.forgetSandbox(p.name)
	// What was cut off may still be at it.
	err = e.step(pProcesses, func() error { return h.Kill(ctx, "SANDBOXER_SANDBOX", p.name) })
	if err != nil && sandboxer.KindOf(err) != sandboxer.Failed && sandboxer.KindOf(err) != sandboxer.Unsupported {
		return err
	}
	err = e.step(pObjects, func() error {
		out, err := h.engine.Script(ctx, nil, nil, `cd -- "$4" || exit;`+removeObjects, h.known.engine, p.name, "", h.known.root)
		if err == nil && strings.Contains(out, "built") {
			// What is kept for others holds up no removal; the next one collects, too.
			if err := e.collect(ctx, h); err != nil && e.env.Log != nil {
				e.env.Log.Warn("layers of built images were not looked through", "extension", e.env.Extension, "host", h.Name(), "err", err)
			}
		}
		return err
	})
	if err == nil {
		err = e.step(pRemove, func() error {
			_, err := h.engine.Script(ctx, nil, nil, removeDir+unusedAgents, h.known.root, p.name, h.known.engine, e.agentDigest(h))
			return err
		})
	}
	if err != nil {
		return e.notRemoved(h, p, err)
	}
	return e.forgetFormer(p.name)
}

// Forget implements sandboxer.Forgetter.
func (e *extension) Forget(_ context.Context, h sandboxer.Handle) ([]string, error) {
	var places []place
	if name, at := e.where(h); at != "" {
		places = []place{{name, at, h.Generation}}
	}
	places, err := e.withFormer(places, h.SandboxID, h.Generation)
	if err != nil {
		return nil, err
	}
	var remains []string
	for _, p := range places {
		if p.host != untouched {
			remains = append(remains, fmt.Sprintf("on host %s what has the label %s=%s (containers, networks, volumes, images), and the directory %s", p.host, engine.LabelName, p.name, path.Join(e.cfg.Root, p.name)))
		}
		if err := e.forgetFormer(p.name); err != nil {
			return nil, err
		}
	}
	if len(places) == 0 {
		remains = append(remains, fmt.Sprintf("on a host that is not known, what has a label %s=%s", engine.LabelName, e.name(h.SandboxID, h.Generation)))
	}
	return remains, nil
}

// notRemoved makes an error that the sweep repeats of one that says that the spec is at
// fault.
func (e *extension) notRemoved(h *host, p place, err error) error {
	if sandboxer.KindOf(err) != sandboxer.Failed {
		return err
	}
	return sandboxer.E(sandboxer.Unavailable, err, "sandbox %s could not be removed from host %s: %s", p.name, h.Name(), sandboxer.Message(err)).
		WithHint("look at it there; it is tried again")
}
