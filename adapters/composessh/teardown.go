package composessh

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// removeObjects removes, with the engine $1, everything of the sandbox $2, by the name of
// the project and by label in turn, until one listing after the last removal finds nothing:
// each alone finds all that compose made of the file. Containers must also have a name that begins with the sandbox's (engine.OwnNames):
// others were made from an image of ours. They stay, and it prints "stranger" and their names. With $3, volumes and images stay. It
// prints "built" if there were images; their layers stay (images.go), and so does an image that a user named. Docker removes
// one container at a time: before version 23, two of one network that end together can make it hang until
// somebody restarts it (https://github.com/moby/moby/pull/42545).
var removeObjects = `
e=$1 n=$2 keep=$3 l=$(printf %s "$2" | tr A-Z a-z)
case $e in podman) project=io.podman.compose.project;; *) project=com.docker.compose.project;; esac
by=$project=$n
for try in 1 2 3 4 5 6; do
	some=
	ids=$("$e" ps -aq --no-trunc --filter "label=$by" --filter "` + engine.OwnNames("$n") + `") || exit
	[ -z "$ids" ] || { some=1; { [ "$e" = podman ] && podman rm -f -v -t 0 $ids >/dev/null 2>&1; } || for id in $ids; do "$e" rm -f -v "$id" >/dev/null; done; }
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
"$e" ps -a --filter "label=dev.sandboxer.name=$n" --format 'stranger {{.Names}}' || exit
[ -z "$keep" ] || exit 0
ids=$({ "$e" images -q --no-trunc --filter dangling=true --filter "label=dev.sandboxer.name=$n" && for i in "$l" "$l-keep"; do "$e" images -q --no-trunc "$i" || exit; done; } | sort -u) || exit
[ -n "$ids" ] || exit 0
echo built
"$e" rmi -f --no-prune $ids >/dev/null 2>&1 || "$e" rmi -f $ids >/dev/null 2>&1
exit 0`

// removeDir removes the directory of sandbox $2 below $1, after its subnets. Files that
// containers wrote there may belong to other users: the engine $3 is then asked to remove it,
// with an image that has rm. The origin of that image is not known: so its container sees that directory and
// nothing else, has no right except to remove others' files, and no image that a sandbox built is used. A
// container that hangs there has the sandbox's label, by which the next try finds it.
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
				--name "$2-rm" --label "dev.sandboxer.name=$2" -v "$(pwd -P)/$2:/w" --entrypoint rm "$i" -rf /w/repo /w/copies /w/files >/dev/null 2>&1 && break
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
	if name, at := e.where(ctx, h); at != "" {
		places = []place{{name, at, h.Generation}}
	} else {
		places, unasked = e.search(ctx, h)
		if places, err = e.withFormer(ctx, places, h.SandboxID, h.Generation); err != nil {
			return report, err
		}
	}
	for _, p := range places {
		strangers, err := e.remove(ctx, p)
		if err != nil {
			return report, err
		}
		for _, s := range strangers {
			report.Warnings = append(report.Warnings, fmt.Sprintf("container %s on %s has the labels of sandbox %s but does not belong to it: it was not removed", s, p.host, h.SandboxID))
		}
		if p.host != untouched {
			report.Removed = append(report.Removed, "compose project "+p.name+" on "+p.host)
		}
	}
	return report, unasked // there may be more of it
}

// withFormer adds to places those where an earlier version recorded a sandbox, of any generation
// if that is 0.
func (e *extension) withFormer(ctx context.Context, places []place, id string, generation int) ([]place, error) {
	names, err := e.env.Notes.List(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		got, g, ok := e.split(name)
		if !ok || got != id || generation != 0 && g != generation || slices.ContainsFunc(places, func(p place) bool { return p.name == name }) {
			continue
		}
		at, err := e.former(ctx, name)
		if err != nil {
			return nil, err
		}
		if at != "" {
			places = append(places, place{name, at, g})
		}
	}
	return places, nil
}

// remove removes a sandbox, and returns the names of containers that have its labels but are not part of it.
func (e *extension) remove(ctx context.Context, p place) (strangers []string, err error) {
	unlock, err := e.env.Notes.Lock(ctx, p.name)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if p.host == untouched {
		if at, err := e.former(ctx, p.name); err != nil || at != untouched { // another process has done it meanwhile
			return nil, err
		}
		return nil, e.forgetFormer(ctx, p.name)
	}
	h, err := e.use(ctx, p.host)
	if err != nil {
		return nil, err
	}
	e.forgetSandbox(p.name)
	// Interrupted commands may still be running.
	err = e.step(pProcesses, func() error { return h.Kill(ctx, "SANDBOXER_SANDBOX", p.name) })
	if err != nil && sandboxer.KindOf(err) != sandboxer.Failed && sandboxer.KindOf(err) != sandboxer.Unsupported {
		return nil, err
	}
	err = e.step(pObjects, func() error {
		out, err := h.engine.Script(ctx, nil, nil, `cd -- "$4" || exit;`+removeObjects, h.known.engine, p.name, "", h.known.root)
		for line := range strings.Lines(out) {
			if s, ok := strings.CutPrefix(strings.TrimSpace(line), "stranger "); ok {
				strangers = append(strangers, engine.OneLine(s))
			}
		}
		if err == nil && strings.Contains(out, "built") {
			// Caches for others must not block a removal; the next one collects, too.
			if err := e.collect(ctx, h); err != nil && e.env.Log != nil {
				e.env.Log.Warn("unused layers of built images were not removed", "extension", e.env.Extension, "host", h.Name(), "err", err)
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
		return strangers, e.notRemoved(h, p, err)
	}
	return strangers, e.forgetFormer(ctx, p.name)
}

// Forget implements sandboxer.Forgetter.
func (e *extension) Forget(ctx context.Context, h sandboxer.Handle) ([]string, error) {
	var places []place
	if name, at := e.where(ctx, h); at != "" {
		places = []place{{name, at, h.Generation}}
	}
	places, err := e.withFormer(ctx, places, h.SandboxID, h.Generation)
	if err != nil {
		return nil, err
	}
	var remains []string
	for _, p := range places {
		if p.host != untouched {
			remains = append(remains, fmt.Sprintf("on host %s: containers, networks, volumes and images with the label %s=%s, and the directory %s", p.host, engine.LabelName, p.name, path.Join(e.cfg.Root, p.name)))
		}
		if err := e.forgetFormer(ctx, p.name); err != nil {
			return nil, err
		}
	}
	if len(places) == 0 {
		remains = append(remains, fmt.Sprintf("on an unknown host: containers, networks, volumes and images with the label %s=%s", engine.LabelName, e.name(h.SandboxID, h.Generation)))
	}
	return remains, nil
}

// notRemoved turns an error that blames the spec into one that the sweep
// repeats.
func (e *extension) notRemoved(h *host, p place, err error) error {
	if sandboxer.KindOf(err) != sandboxer.Failed {
		return err
	}
	return sandboxer.E(sandboxer.Unavailable, err, "sandbox %s could not be removed from host %s: %s", p.name, h.Name(), sandboxer.Message(err)).
		WithHint("check that host; the server tries again automatically")
}
