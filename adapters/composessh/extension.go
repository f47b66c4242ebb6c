package composessh

import (
	"cmp"
	"context"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/composessh/composefile"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/hosts"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/program"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

type extension struct {
	// The capabilities of the agent in a sandbox: agent.Capabilities.
	sandboxer.AgentDialer
	sandboxer.ProcessManager
	sandboxer.Watcher

	env      sandboxer.Env
	cfg      Config
	pool     *sshrun.Pool
	registry *sshrun.Registry
	programs program.Finder
	settle   time.Duration                   // settled, but in tests
	beat     time.Duration                   // frozenBeat, but in tests
	every    time.Duration                   // engine.WatchEvery, but in tests
	fail     func(p point, after bool) error // for tests

	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	mu      sync.Mutex
	at      map[string]sshrun.Target  // where a host was when it was last used, by host
	known   map[string]*known         // by host
	engines map[string]*engine.Engine // by host
	watches map[string]*engine.Watch  // by host
	metas   map[string]*meta          // by name of the sandbox; only of what is up
	ooms    map[string]int            // processes killed for memory, by container, as last seen
	slow    map[string]time.Time      // when hosts did not answer in time, by host
	agents  agent.Clients             // by name of the sandbox
}

var _ interface {
	sandboxer.Extension
	sandboxer.Placer
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
	sandboxer.CapacityReporter
	sandboxer.StatsReader
	sandboxer.Checkpointer
	sandboxer.AgentDialer
	sandboxer.ProcessManager
	sandboxer.Watcher
	sandboxer.Narrower
	io.Closer
} = (*extension)(nil)

func open(ctx context.Context, env sandboxer.Env, cfg Config) (sandboxer.Extension, error) {
	if err := notes.Move(ctx, env.Notes, filepath.Join(env.Dir, formerDir), ""); err != nil {
		return nil, err
	}
	pool, err := sshrun.New(sshrun.Options{Config: cfg.SSHConfig, Log: env.Log})
	if err != nil {
		return nil, err
	}
	e := &extension{
		env: env, cfg: cfg, pool: pool, registry: sshrun.NewRegistry(env.Hosts), settle: settled, beat: frozenBeat, every: engine.WatchEvery,
		at: map[string]sshrun.Target{}, known: map[string]*known{}, engines: map[string]*engine.Engine{}, watches: map[string]*engine.Watch{}, metas: map[string]*meta{}, ooms: map[string]int{}, slow: map[string]time.Time{},
	}
	inside := agent.Capabilities{Open: e.openAgent}
	e.AgentDialer, e.ProcessManager, e.Watcher = inside, inside, inside
	e.ctx, e.cancel = context.WithCancel(context.Background())
	return e, nil
}

// Close ends the connections.
func (e *extension) Close() error {
	e.mu.Lock() // nothing begins any more
	e.cancel()
	e.mu.Unlock()
	_ = e.agents.Close()
	err := e.pool.Close()
	e.mu.Lock()
	watches := slices.Collect(maps.Values(e.watches))
	e.mu.Unlock()
	for _, w := range watches {
		w.Close()
	}
	return err
}

// meta is what later processes must know of a sandbox. It is in the sandbox's directory.
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
	Agent      string                `json:"agent,omitempty"` // digest of the agent in the default service; empty for none
}

func (m *meta) service(name string) *composefile.Service {
	i := slices.IndexFunc(m.Services, func(s composefile.Service) bool { return s.Name == name })
	if i < 0 {
		return nil
	}
	return &m.Services[i]
}

func (e *extension) name(id string, generation int) string {
	return sandboxer.ExternalName(e.env.Owner, id, generation)
}

// split parses a name of this owner.
func (e *extension) split(name string) (id string, generation int, ok bool) {
	rest, ours := strings.CutPrefix(name, "sbx-"+e.env.Owner+"-")
	i := strings.LastIndex(rest, "-g")
	if !ours || i < 1 {
		return "", 0, false
	}
	n, err := strconv.Atoi(rest[i+2:])
	id = rest[:i]
	return id, n, err == nil && e.name(id, n) == name && sandboxer.CheckID(id) == nil
}

// formerDir is where earlier versions recorded where sandboxes are, in the extension's directory: a file for
// each that has a host's name. They become notes, which are read, and removed with their sandboxes. No new
// ones are written.
const formerDir = "placed"

// untouched, in a note, means that nothing was done for a sandbox on any
// host. A missing note proves nothing.
const untouched = "-"

// former returns the host that an earlier version noted for a sandbox, untouched if that is
// what it noted, "" if there is no note.
func (e *extension) former(ctx context.Context, name string) (string, error) {
	n, err := e.env.Notes.Get(ctx, name)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		err = nil
	}
	return strings.TrimSpace(string(n.Value)), err
}

// forgetFormer removes that note, and what is cached of the sandbox.
func (e *extension) forgetFormer(ctx context.Context, name string) error {
	if err := e.env.Notes.Delete(ctx, name); err != nil {
		return err
	}
	e.forgetSandbox(name)
	return nil
}

// forgetSandbox drops what is cached of a sandbox.
func (e *extension) forgetSandbox(name string) {
	e.agents.Drop(name)
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.metas, name)
	for _, en := range e.engines {
		en.Forget(name)
	}
}

// where returns the host of a sandbox as far as it is known without asking, which may be
// untouched; "" if it is not known.
func (e *extension) where(ctx context.Context, h sandboxer.Handle) (name, host string) {
	if h.Generation > 0 {
		name = e.name(h.SandboxID, h.Generation)
	} else if id, _, ok := e.split(h.Ref); ok && id == h.SandboxID {
		name = h.Ref
	}
	if name == "" {
		return "", ""
	}
	noted, err := e.former(ctx, name)
	switch {
	case err == nil && noted == untouched, h.Host == "" && err == nil: // without a note, the hosts are asked
		return name, noted
	}
	return name, h.Host
}

// locate returns where a sandbox is, as far as it is known without asking, or else by asking hosts. NotFound: it is
// certain that it is on none.
func (e *extension) locate(ctx context.Context, h sandboxer.Handle) (place, error) {
	name, at := e.where(ctx, h)
	switch at {
	case untouched:
		return place{}, hosts.Missing(h.SandboxID)
	case "":
		found, err := e.search(ctx, h)
		return hosts.Newest(h.SandboxID, found, func(p place) int { return p.generation }, err)
	}
	return place{name, at, h.Generation}, nil
}

// find returns where a sandbox is and its meta. NotFound: it is certain that it is on
// no host, or it was not made completely.
func (e *extension) find(ctx context.Context, h sandboxer.Handle) (*host, *meta, error) {
	p, err := e.locate(ctx, h)
	if err != nil {
		return nil, nil, err
	}
	ho, err := e.use(ctx, p.host)
	if err != nil {
		return nil, nil, err
	}
	m, err := e.meta(ctx, ho, p.name)
	if err == nil && (m == nil || m.Name == "") {
		err = hosts.Missing(h.SandboxID)
	}
	return ho, m, err
}

// findRunning is find with a look at the containers; there must be at least one.
func (e *extension) findRunning(ctx context.Context, h sandboxer.Handle) (*host, *meta, *status, error) {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return nil, nil, nil, err
	}
	s, err := e.status(ctx, ho, m.Name)
	if err == nil && len(s.containers) == 0 {
		err = hosts.Missing(h.SandboxID)
	}
	return ho, m, s, err
}

// meta reads the meta of a sandbox from its directory; nil if there is none.
func (e *extension) meta(ctx context.Context, h *host, name string) (*meta, error) {
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

// search looks for all remains of a sandbox; generation 0 means any. It looks on the host of h, or else on every
// host. Hosts that cannot be asked, or whose records cannot be read, are an error, in addition to what the others have:
// something not found may be there.
func (e *extension) search(ctx context.Context, h sandboxer.Handle) ([]place, error) {
	names := []string{h.Host}
	var unread error
	if h.Host == "" {
		if names, unread = e.configured(); len(names) == 0 {
			_, err := e.names() // which says why
			return nil, cmp.Or(unread, err)
		}
	}
	found, silent := e.placesOn(ctx, names)
	found = slices.DeleteFunc(found, func(p place) bool {
		id, g, _ := e.split(p.name)
		return id != h.SandboxID || h.Generation != 0 && g != h.Generation
	})
	switch {
	case len(silent) == 0 && unread == nil:
		return found, nil
	case ctx.Err() != nil:
		return found, ctx.Err()
	case len(silent) > 0:
		return found, silent.Unknown(h.SandboxID, unread)
	}
	return found, sandboxer.E(sandboxer.Unavailable, unread, "sandbox %s may be on a host of %s whose record cannot be read: %s", h.SandboxID, e.env.Extension, sandboxer.Message(unread)).
		WithPublic("sandbox %s may be on a host that cannot be reached now", h.SandboxID).
		WithHint("%s", sandboxer.HintOf(unread))
}

// inventory prints the names of every sandbox of $2 that has something here: a
// directory below $1, or objects of the engine $3.
const inventory = `
cd -- "$1" || exit
owner=$2 engine=$3
for d in "sbx-$owner-"*; do [ ! -d "$d" ] || echo "$d"; done
` + engine.InventoryScript + `exit 0`

// placesOn lists the sandboxes of this owner on these hosts.
func (e *extension) placesOn(ctx context.Context, names []string) ([]place, hosts.Silent) {
	return hosts.Ask(hosts.Named(names), func(name string) (all []place, err error) {
		h, err := e.use(ctx, name)
		if err != nil {
			return nil, err
		}
		out, err := h.engine.Script(ctx, nil, nil, inventory, h.known.root, e.env.Owner, h.known.engine)
		if err != nil {
			return nil, err
		}
		for _, n := range engine.ParseInventory(out) {
			if _, g, ok := e.split(n); ok {
				all = append(all, place{n, name, g})
			}
		}
		return all, nil
	})
}
