package composessh

import (
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"os"
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
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/program"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

type extension struct {
	// What the agent in a sandbox can do: agent.Capabilities.
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
	agents  map[string]*agentClient   // by name of the sandbox
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

func open(_ context.Context, env sandboxer.Env, cfg Config) (sandboxer.Extension, error) {
	if err := os.MkdirAll(filepath.Join(env.Dir, lockDir), 0o700); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the state directory of %s cannot be made", env.Extension)
	}
	transport := cfg.Transport
	if transport == "auto" {
		transport = ""
	}
	pool, err := sshrun.New(sshrun.Options{Transport: transport, Config: cfg.SSHConfig, Log: env.Log})
	if err != nil {
		return nil, err
	}
	e := &extension{
		env: env, cfg: cfg, pool: pool, registry: sshrun.NewRegistry(env.Hosts), settle: settled, beat: frozenBeat, every: engine.WatchEvery,
		at: map[string]sshrun.Target{}, known: map[string]*known{}, engines: map[string]*engine.Engine{}, watches: map[string]*engine.Watch{}, metas: map[string]*meta{}, ooms: map[string]int{}, slow: map[string]time.Time{}, agents: map[string]*agentClient{},
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
	for name := range e.agents {
		e.dropAgent(name)
	}
	e.mu.Unlock()
	err := e.pool.Close()
	e.mu.Lock()
	watches := slices.Collect(maps.Values(e.watches))
	e.mu.Unlock()
	for _, w := range watches {
		w.Close()
	}
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
	Agent      string                `json:"agent,omitempty"` // digest of the agent in the default service; empty for none
	Stamp      []byte                `json:"stamp,omitempty"`
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

// split takes a name of this owner apart.
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

// lock keeps other processes of this extension from changing the sandbox meanwhile.
func (e *extension) lock(ctx context.Context, name string) (unlock func(), err error) {
	file := filepath.Join(e.env.Dir, lockDir, name+".lock")
	for {
		l, err := filelock.Take(ctx, file, filelock.Exclusive)
		if errors.Is(err, os.ErrNotExist) { // somebody cleared the directory
			if err = os.MkdirAll(filepath.Dir(file), 0o700); err == nil {
				continue
			}
		}
		switch {
		case err == nil:
			return l.Remove, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		}
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the lock of sandbox %s cannot be taken", name)
	}
}

// lockDir and formerDir are in the extension's directory.
const (
	lockDir = "lock"
	// formerDir has what earlier versions noted there of where sandboxes are, in a file for
	// each that has a host's name. They are read, removed with their sandboxes, and not written.
	formerDir = "placed"
)

func (e *extension) formerFile(name string) string { return filepath.Join(e.env.Dir, formerDir, name) }

// untouched stands for a host in a note that says that nothing was done for a sandbox on any
// host. That there is no note proves nothing.
const untouched = "-"

// former returns the host that an earlier version noted for a sandbox, untouched if that is
// what it noted, "" if there is no note.
func (e *extension) former(name string) (string, error) {
	data, err := os.ReadFile(e.formerFile(name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", sandboxer.E(sandboxer.Unavailable, err, "where sandbox %s was placed cannot be read", name)
	}
	return strings.TrimSpace(string(data)), nil
}

// forgetFormer removes that note, and what is known of the sandbox.
func (e *extension) forgetFormer(name string) error {
	if err := os.Remove(e.formerFile(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	e.forgetSandbox(name)
	return nil
}

// forgetSandbox drops what is known of a sandbox.
func (e *extension) forgetSandbox(name string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.metas, name)
	e.dropAgent(name)
	for _, en := range e.engines {
		en.Forget(name)
	}
}

// where returns the host of a sandbox by what is known without asking, which may be
// untouched; "" if nothing is.
func (e *extension) where(h sandboxer.Handle) (name, host string) {
	if h.Generation > 0 {
		name = e.name(h.SandboxID, h.Generation)
	} else if id, _, ok := e.split(h.Ref); ok && id == h.SandboxID {
		name = h.Ref
	}
	if name == "" {
		return "", ""
	}
	noted, err := e.former(name)
	switch {
	case err == nil && noted == untouched, h.Host == "" && err == nil: // without a note, the hosts are asked
		return name, noted
	}
	return name, h.Host
}

func gone(h sandboxer.Handle) error {
	return sandboxer.E(sandboxer.NotFound, nil, "sandbox %s does not exist on any host", h.SandboxID)
}

// find returns where a sandbox is and what is known of it. NotFound: it is proven not
// to be anywhere, or was not made to the end.
func (e *extension) find(ctx context.Context, h sandboxer.Handle) (*host, *meta, error) {
	name, at := e.where(h)
	if at == "" {
		found, err := e.search(ctx, h)
		switch {
		case len(found) > 0:
		case err != nil:
			return nil, nil, err
		default:
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
	if err == nil && (m == nil || m.Name == "") {
		err = gone(h)
	}
	return ho, m, err
}

// findRunning is find with a look at the containers, of which there must be some.
func (e *extension) findRunning(ctx context.Context, h sandboxer.Handle) (*host, *meta, *status, error) {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return nil, nil, nil, err
	}
	s, err := e.status(ctx, ho, m.Name)
	if err == nil && len(s.containers) == 0 {
		err = gone(h)
	}
	return ho, m, s, err
}

// meta reads what lies in the directory of a sandbox; nil if there is none.
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

// search looks for what there is of a sandbox, the newest generation first; generation 0
// means any. It looks on the host of h, or else on every host. Hosts that cannot be asked, or
// whose records cannot be read, are an error, beside what the others have: what was not found may be there.
func (e *extension) search(ctx context.Context, h sandboxer.Handle) ([]place, error) {
	hosts := []string{h.Host}
	var unread error
	if h.Host == "" {
		if hosts, unread = e.configured(); len(hosts) == 0 {
			_, err := e.names() // which says why
			return nil, cmp.Or(unread, err)
		}
	}
	var mu sync.Mutex
	var found []place
	failed := map[string]error{}
	e.each(ctx, hosts, func(name string, ho *host, err error) {
		var names []string
		if err == nil {
			names, err = e.namesOn(ctx, ho)
		}
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			failed[name] = err
			return
		}
		for _, n := range names {
			if i, g, ok := e.split(n); ok && i == h.SandboxID && (h.Generation == 0 || g == h.Generation) {
				found = append(found, place{n, name, g})
			}
		}
	})
	slices.SortFunc(found, func(a, b place) int { return b.generation - a.generation })
	if len(failed) == 0 && unread == nil {
		return found, nil
	}
	if err := ctx.Err(); err != nil {
		return found, err
	}
	if len(failed) == 0 {
		err := sandboxer.E(sandboxer.Unavailable, unread, "sandbox %s may be on a host of %s of which the record cannot be read: %s", h.SandboxID, e.env.Extension, sandboxer.Message(unread))
		err.WithPublic("sandbox %s may be on a host that cannot be asked now", h.SandboxID)
		return found, err.WithHint("%s", sandboxer.HintOf(unread))
	}
	names := slices.Sorted(maps.Keys(failed))
	errs := make([]error, len(names))
	for i, n := range names {
		errs[i] = failed[n]
	}
	err := sandboxer.E(sandboxer.Unavailable, errors.Join(append(errs, unread)...), "sandbox %s may be on %s, which cannot be asked: %s", h.SandboxID, strings.Join(names, ", "), sandboxer.Message(errs[0]))
	err.WithPublic("sandbox %s may be on %s, which cannot be asked now", h.SandboxID, strings.Join(names, ", "))
	return found, err.WithHint("%s", cmp.Or(sandboxer.HintOf(errs[0]), "bring it back; if it is gone for good: sandboxer host rm --force "+names[0]))
}

// inventory prints the names of every sandbox of $2 of which something is here: a
// directory below $1, or what the engine $3 has.
const inventory = `
cd -- "$1" || exit
owner=$2 engine=$3
for d in "sbx-$owner-"*; do [ ! -d "$d" ] || echo "$d"; done
` + engine.InventoryScript + `exit 0`

// namesOn lists the sandboxes of this owner on one host.
func (e *extension) namesOn(ctx context.Context, h *host) ([]string, error) {
	out, err := h.engine.Script(ctx, nil, nil, inventory, h.known.root, e.env.Owner, h.known.engine)
	if err != nil {
		return nil, err
	}
	return engine.ParseInventory(out), nil
}
