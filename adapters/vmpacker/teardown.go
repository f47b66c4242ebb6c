package vmpacker

import (
	"context"
	"errors"
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// Teardown implements sandboxer.Extension.
func (e *extension) Teardown(ctx context.Context, h sandboxer.Handle) (r sandboxer.CleanupReport, err error) {
	if err := ctx.Err(); err != nil {
		return r, err
	}
	places, unasked := e.places(ctx, h)
	for _, p := range places {
		unlock, lerr := e.env.Notes.Lock(ctx, p.key())
		if lerr != nil {
			return r, errors.Join(err, lerr)
		}
		e.agents.Drop(p.key())
		var terr error
		if p.Kind == managed {
			if _, serr := os.Stat(e.vmDir(p)); serr == nil || !p.gone() {
				r.Removed = append(r.Removed, "machine "+p.mark())
			}
			terr = e.destroy(ctx, p)
		} else if !p.Untouched {
			terr = e.detach(ctx, p, &r)
		}
		if terr == nil { // also in a note of an earlier version
			terr = e.forget(ctx, p)
		}
		unlock()
		if p.Kind == managed && terr == nil {
			e.collect(ctx)
		}
		err = errors.Join(err, terr)
	}
	if err = errors.Join(err, unasked); err == nil && len(places) == 0 && h.Host == "" && len(h.Data) == 0 {
		r.Warnings = append(r.Warnings, "where it was is not known; it is on none of the machines that are configured, added, or named by records. One that only its own request named was not asked")
	}
	return r, err
}

// Forget implements sandboxer.Forgetter.
func (e *extension) Forget(ctx context.Context, h sandboxer.Handle) (remains []string, err error) {
	places, err := e.unasked(ctx, h)
	if err != nil {
		return nil, err
	}
	if len(places) == 0 {
		return []string{"on a machine that is not known, the directory " + workspaceName(h.SandboxID) + " where workspaces are made, and what runs there"}, nil
	}
	for _, p := range places {
		if p.Kind == managed {
			return nil, sandboxer.E(sandboxer.Unsupported, nil, "sandbox %s is a machine on this one, which can be removed", p.ID).
				WithHint("what keeps it from ending is what its destroy says")
		}
	}
	for _, p := range places {
		if !p.Untouched {
			remains = append(remains, "on machine "+p.Host+" ("+p.Target.Name+") the directory "+path.Join(p.Base, workspaceName(p.ID))+", and what runs there")
		}
		if err := e.forget(ctx, p); err != nil {
			return nil, err
		}
	}
	return remains, nil
}

// clear ends and removes the sandbox of p, or an older generation, on its machine, and
// returns what that was.
func (e *extension) clear(ctx context.Context, p *place, h *sshrun.Host) (string, error) {
	n := workspaceName(p.ID)
	out, err := h.Output(ctx, lookScript, p.Base, n)
	if err != nil {
		return "", err
	}
	f := strings.Fields(string(out))
	if len(f) != 3 || f[0] != p.Owner {
		return "", nil
	}
	generation, err := strconv.Atoi(f[1])
	if err != nil || generation > p.Generation {
		return "", nil
	}
	there := place{ID: p.ID, Generation: generation, Owner: p.Owner}
	// First no new command can start, and then all are ended.
	if _, err := h.Output(ctx, `rm -f "$1"`, path.Join(p.Base, ".sandboxer", n, "ready")); err != nil {
		return "", err
	}
	if err := h.Kill(ctx, markName, there.mark()); err != nil && sandboxer.KindOf(err) != sandboxer.Unsupported {
		return "", err
	}
	out, err = h.Output(ctx, removeScript, p.Base, n, p.Owner, strconv.Itoa(generation))
	x, said, _ := sshrun.ExitOf(err)
	switch x.Code {
	case exitMount:
		return "", sandboxer.E(sandboxer.Failed, nil, "something is mounted in %s on %s and cannot be taken away", path.Join(p.Base, n), p.Host).
			WithHint("unmount it on the machine; the server then tries the teardown again")
	case exitBase:
		return "", sandboxer.E(sandboxer.Failed, errors.New(said), "%s on %s cannot be removed", path.Join(p.Base, n), p.Host)
	}
	return strings.TrimSpace(string(out)), err
}

// detach tears down the sandbox at p.
func (e *extension) detach(ctx context.Context, p *place, r *sandboxer.CleanupReport) error {
	h, err := e.pool.Host(p.Target)
	if err != nil {
		return err
	}
	gone, err := e.clear(ctx, p, h)
	if err != nil {
		return err
	}
	if gone != "" {
		r.Removed = append(r.Removed, p.Host+":"+gone)
		r.Kept = append(r.Kept, "machine "+p.Host)
	}
	return nil
}

// remove: base, name, owner, generation (0: any). The caller has ended all marked
// processes. Other processes in the workspace are ended here: they keep the directory
// busy, and should not be there.
const removeScript = `
b=$1 n=$2 o=$3 g=$4
l=$b/.sandboxer/$n.lock r=$b/.sandboxer/$n w=$b/$n
t=$(readlink "$l") || exit 0
[ "${t%% *}" = "$o" ] || exit 0
[ "$g" = 0 ] || [ "${t##* }" -le "$g" ] || exit 0
rm -f "$r/ready"
if [ -r /proc/self/environ ]; then for i in 1 2 3 4 5 6 7 8 9 10; do
	f=$(ls -ld /proc/[0-9]*/cwd /proc/[0-9]*/exe /proc/[0-9]*/root 2>/dev/null | awk -v w="$w" '
		{ i = index($0, " -> "); t = substr($0, i + 4) }
		i && (t == w || index(t, w "/") == 1 || t == w " (deleted)") && match($0, "/proc/[0-9]+/") { print substr($0, RSTART + 6, RLENGTH - 7) }')
	[ -n "$f" ] || break
	kill -KILL $f 2>/dev/null
	[ $i -lt 3 ] || sleep 0.1 2>/dev/null || sleep 1
done; fi
mounts() { awk -v w="$w" '$5 == w || index($5, w "/") == 1 { print $5 }' /proc/self/mountinfo 2>/dev/null; }
for m in $(mounts); do umount -l "$m" 2>/dev/null; done
[ -z "$(mounts)" ] || exit 68
rm -rf "$w" && rm -rf "$r" && rm -f "$l" || exit 61
[ ! -e "$w" ] || exit 61
echo "$w"`
