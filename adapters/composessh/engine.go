package composessh

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/composessh/composefile"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

type engine struct {
	env      sandboxer.Env
	cfg      Config
	pool     *sshrun.Pool
	registry *sshrun.Registry
	settle   time.Duration                   // settled, but in tests
	beat     time.Duration                   // frozenBeat, but in tests
	every    time.Duration                   // pulseEvery, but in tests
	fail     func(p point, after bool) error // for tests

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup // what is done for nobody who waits

	mu     sync.Mutex
	at     map[string]sshrun.Target     // where a host was when it was last used, by host
	known  map[string]*known            // by host
	pulses map[string]*pulse            // by host
	metas  map[string]*meta             // by name of the sandbox; only of what is up
	ooms   map[string]int               // processes killed for memory, by container, as last seen
	units  map[string]map[string]string // container of each service, by name of the sandbox
	bare   map[string]bool              // of them, those without a shell
	silent map[string]time.Time         // when hosts did not answer in time, by host
}

var _ interface {
	sandboxer.Extension
	sandboxer.Checker
	sandboxer.Admitter
	sandboxer.Serviced
	sandboxer.Cacher
	sandboxer.PortLister
	sandboxer.Forgetter
	sandboxer.Archiver
	sandboxer.Dialer
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.Pauser
	sandboxer.Capacitor
	sandboxer.Statser
	sandboxer.Checkpointer
	io.Closer
} = (*engine)(nil)

func open(_ context.Context, env sandboxer.Env, cfg Config) (sandboxer.Extension, error) {
	if err := os.MkdirAll(filepath.Join(env.Dir, "placed"), 0o700); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the state directory of %s cannot be made", env.Extension)
	}
	if err := wholefile.Sweep(filepath.Join(env.Dir, "placed")); err != nil && env.Log != nil {
		env.Log.Warn("what a former server was writing stays", "extension", env.Extension, "err", err)
	}
	transport := cfg.Transport
	if transport == "auto" {
		transport = ""
	}
	pool, err := sshrun.New(sshrun.Options{Transport: transport, Config: cfg.SSHConfig, Log: env.Log})
	if err != nil {
		return nil, err
	}
	e := &engine{
		env: env, cfg: cfg, pool: pool, registry: sshrun.NewRegistry(env.Hosts), settle: settled, beat: frozenBeat, every: pulseEvery,
		at: map[string]sshrun.Target{}, known: map[string]*known{}, pulses: map[string]*pulse{}, metas: map[string]*meta{}, units: map[string]map[string]string{}, ooms: map[string]int{}, bare: map[string]bool{}, silent: map[string]time.Time{},
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	return e, nil
}

// Close ends the connections.
func (e *engine) Close() error {
	e.mu.Lock() // nothing begins any more
	e.cancel()
	e.mu.Unlock()
	err := e.pool.Close()
	e.work.Wait()
	return err
}

// meta is what later processes must know of a sandbox. It lies in its directory.
type meta struct {
	V          int                   `json:"v"`
	Name       string                `json:"name"`
	ID         string                `json:"id"`
	Generation int                   `json:"generation"`
	Owner      string                `json:"owner"`
	Service    string                `json:"service"` // the default one
	User       string                `json:"user,omitempty"`
	Ports      []int                 `json:"ports,omitempty"` // further ones that were asked for
	Services   []composefile.Service `json:"services"`
	Notes      []string              `json:"notes,omitempty"`
	Volumes    []string              `json:"volumes,omitempty"` // that go into checkpoints
	Places     map[string]bool       `json:"places,omitempty"`  // of the workspace that must stay what they are: composefile.Project.Places
	Quiesce    bool                  `json:"quiesce,omitempty"`
	Stamp      []byte                `json:"stamp,omitempty"`
}

func (m *meta) service(name string) *composefile.Service {
	i := slices.IndexFunc(m.Services, func(s composefile.Service) bool { return s.Name == name })
	if i < 0 {
		return nil
	}
	return &m.Services[i]
}

const (
	labelName    = "dev.sandboxer.name"
	labelOwner   = "dev.sandboxer.owner"
	labelService = "dev.sandboxer.service"
)

func (e *engine) name(id string, generation int) string {
	return sandboxer.ExternalName(e.env.Owner, id, generation)
}

// split takes a name of this owner apart.
func (e *engine) split(name string) (id string, generation int, ok bool) {
	rest, ours := strings.CutPrefix(name, "sbx-"+e.env.Owner+"-")
	i := strings.LastIndex(rest, "-g")
	if !ours || i < 1 {
		return "", 0, false
	}
	n, err := strconv.Atoi(rest[i+2:])
	id = rest[:i]
	return id, n, err == nil && e.name(id, n) == name && sandboxer.CheckID(id) == nil
}

// lock keeps other processes of this extension from changing the sandbox meanwhile.
func (e *engine) lock(ctx context.Context, name string) (unlock func(), err error) {
	file := filepath.Join(e.env.Dir, "placed", name+".lock")
	for {
		f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the lock of sandbox %s cannot be taken", name)
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		held, herr := f.Stat()
		there, terr := os.Stat(file)
		if err == nil && herr == nil && terr == nil && os.SameFile(held, there) {
			return func() { _ = os.Remove(file); f.Close() }, nil
		}
		f.Close()
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (e *engine) placedFile(name string) string { return filepath.Join(e.env.Dir, "placed", name) }

// untouched stands for a host where it is written down that nothing was done for a sandbox
// on any host so far. That nothing is written down would prove nothing.
const untouched = "-"

// placed returns the host that a sandbox was put on, untouched if that is what is written
// down, "" if nothing is.
func (e *engine) placed(name string) (string, error) {
	data, err := os.ReadFile(e.placedFile(name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", sandboxer.E(sandboxer.Unavailable, err, "where sandbox %s was placed cannot be read", name)
	}
	return strings.TrimSpace(string(data)), nil
}

// place writes down where the sandbox goes, before that host hears of it.
func (e *engine) place(name, host string) error {
	err := wholefile.Write(e.placedFile(name), []byte(host+"\n"))
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "it cannot be written down where sandbox %s goes", name)
	}
	return nil
}

// unplace forgets it.
func (e *engine) unplace(name string) error {
	if err := os.Remove(e.placedFile(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.unknow(name)
	return nil
}

// where returns the host of a sandbox by what is known without asking, which may be
// untouched; "" if nothing is.
func (e *engine) where(h sandboxer.Handle) (name, host string) {
	if h.Generation > 0 {
		name = e.name(h.SandboxID, h.Generation)
	} else if id, _, ok := e.split(h.Ref); ok && id == h.SandboxID {
		name = h.Ref
	}
	if name == "" {
		return "", ""
	}
	if p, err := e.placed(name); err == nil && p != "" { // without it, the hosts are asked
		return name, p
	}
	if h.Ref == name {
		return name, h.Host
	}
	return name, ""
}

func gone(h sandboxer.Handle) error {
	return sandboxer.E(sandboxer.NotFound, nil, "sandbox %s does not exist on any host", h.SandboxID)
}

// find returns where a sandbox is and what is known of it. NotFound: it is proven not
// to be anywhere.
func (e *engine) find(ctx context.Context, h sandboxer.Handle) (*host, *meta, error) {
	name, at := e.where(h)
	if at == "" {
		found, err := e.search(ctx, h.SandboxID, h.Generation)
		if err != nil {
			return nil, nil, err
		}
		if len(found) == 0 {
			return nil, nil, gone(h)
		}
		name, at = found[0].name, found[0].host
	}
	if at == untouched {
		return nil, nil, gone(h)
	}
	ho, err := e.host(at)
	if err == nil {
		err = e.look(ctx, ho)
	}
	if err != nil {
		return nil, nil, err
	}
	m, err := e.meta(ctx, ho, name)
	if m == nil && err == nil {
		err = gone(h)
	}
	return ho, m, err
}

// meta reads what lies in the directory of a sandbox; nil if there is none.
func (e *engine) meta(ctx context.Context, h *host, name string) (*meta, error) {
	e.mu.Lock()
	m := e.metas[name]
	e.mu.Unlock()
	if m != nil {
		return m, nil
	}
	out, err := e.script(ctx, h, nil, nil, `cd -- "$1" || exit; [ -d "$2" ] || exit 0; [ ! -e "$2/up" ] || echo up; cat -- "$2/meta.json" 2>/dev/null || echo '{}'`, h.known.root, name)
	if err != nil || out == "" {
		return nil, err
	}
	rest, up := strings.CutPrefix(out, "up\n")
	if m, err = readMeta([]byte(rest)); err != nil || m.Name != name {
		m = &meta{} // it was not made to the end
	}
	if up && m.Name == name {
		e.mu.Lock()
		e.metas[name] = m
		e.mu.Unlock()
	}
	return m, nil
}

func readMeta(data []byte) (*meta, error) {
	m := &meta{}
	_, err := strictjson.DecodeStored(data, m)
	return m, err
}

// A place is where a search found something of a sandbox.
type place struct {
	name, host string
	generation int
}

// search looks on every host for what there is of a sandbox, the newest generation
// first; generation 0 means any. A host that cannot be asked is an error only if nothing
// was found: what was not found may be there.
func (e *engine) search(ctx context.Context, id string, generation int) ([]place, error) {
	var mu sync.Mutex
	var found []place
	var failed error
	err := e.each(ctx, func(name string, h *host, err error) {
		var names []string
		if err == nil {
			names, err = e.names1(ctx, h)
		}
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			failed = err
			return
		}
		for _, n := range names {
			if i, g, ok := e.split(n); ok && i == id && (generation == 0 || g == generation) {
				found = append(found, place{n, name, g})
			}
		}
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(found, func(a, b place) int { return b.generation - a.generation })
	if len(found) == 0 {
		return nil, failed
	}
	return found, nil
}

// inventory prints the names of every sandbox of $2 of which something is here: a
// directory below $1, or containers, networks, volumes. $3: the engine.
const inventory = `
cd -- "$1" || exit
for d in "sbx-$2-"*; do [ ! -d "$d" ] || echo "$d"; done
f="label=dev.sandboxer.owner=$2"
case $3 in podman) n='{{index .Labels "dev.sandboxer.name"}}';; *) n='{{.Label "dev.sandboxer.name"}}';; esac
"$3" ps -a --filter "$f" --format "$n" || exit
"$3" volume ls -q --filter "$f" >.volumes.$$ || { rm -f .volumes.$$; exit 1; }
[ ! -s .volumes.$$ ] || xargs "$3" volume inspect --format '{{index .Labels "dev.sandboxer.name"}}' <.volumes.$$ 2>/dev/null
"$3" network ls -q --filter "$f" >.volumes.$$ || { rm -f .volumes.$$; exit 1; }
[ ! -s .volumes.$$ ] || xargs "$3" network inspect --format '{{index .Labels "dev.sandboxer.name"}}' <.volumes.$$ 2>/dev/null
rm -f .volumes.$$
exit 0`

// names1 lists the sandboxes of this owner on one host.
func (e *engine) names1(ctx context.Context, h *host) ([]string, error) {
	out, err := e.ask(ctx, h, nil, nil, inventory, h.known.root, e.env.Owner, h.known.engine)
	if err != nil {
		return nil, err
	}
	names := strings.Fields(out)
	slices.Sort(names)
	return slices.Compact(names), nil
}
