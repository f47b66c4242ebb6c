package cli

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/catalog"
	"github.com/sand-boxer/sandboxer/internal/checkpoint"
	"github.com/sand-boxer/sandboxer/internal/checkpoint/s3"
	"github.com/sand-boxer/sandboxer/internal/manager"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/sqlstore"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// brokerConfig has the parts of a broker.
type brokerConfig struct {
	Dir        string     // data directory; only one process at a time may use it
	Own        []string   // what else on this machine is the server's own, and no sandbox's to see
	Bucket     *s3.Config // keeps portable snapshots; nil: the data directory does
	Layers     []catalog.Layer
	Adapters   []sandboxer.Adapter
	Log        *slog.Logger
	History    time.Duration                                                       // how long ended things are kept; 0 for ever
	MaxExecs   int                                                                 // commands at once; 0 for the default
	MaxStreams int                                                                 // other uses at once; 0 for the default
	Overrun    func(extension string, beyond sandboxer.Credits)                    // may be nil
	Pooled     func(profile string, warm bool)                                     // may be nil
	Abandoned  func(extension, op string, change int)                              // may be nil
	OOMKilled  func(extension, what string)                                        // may be nil
	Observe    func(extension, op string, kind sandboxer.Kind, took time.Duration) // may be nil
}

// broker is the whole program except its edges: database, backends and the manager that
// rules them. It runs inside serve, and inside run and doctor when no server does.
type broker struct {
	manager   *manager.Manager
	owner     string
	store     *sqlstore.Store
	mu        sync.Mutex
	backends  []*backend.Backend // guarded by mu while the manager runs
	snapshots *snapshotStore
	tidied    func() // ends the snapshot store's housekeeping; nil before it began

	cfg     brokerConfig
	loading sync.Mutex
	cat     *catalog.Catalog // as it was read last
}

// The files of the data directory next to the database.
const (
	ownerFile = "owner" // the installation's name, stamped on everything it makes
	keyFile   = "key"   // seals environments and secrets in the database
	extDir    = "extensions"
	vaultDir  = "snapshots"
)

// Remains of snapshots are removed about once in the store's grace period, and
// soon after the start of a server that seldom lives so long; commands that are a
// broker for a moment leave them alone.
const (
	tidyAfter = time.Minute
	tidyEvery = 24 * time.Hour
)

// confineProcess gives up rights that a broker does not need, before there is one. A broker that cannot
// do that works all the same, with more rights than it should have.
func (f *factory) confineProcess(log *slog.Logger) {
	if f.confine == nil {
		return
	}
	if err := f.confine(f.resolved.get("no_new_privileges") != "false"); err != nil {
		log.Warn("cannot drop rights that the server does not need", "err", err)
	}
}

// newBroker opens everything and makes the first sweep, which resumes what an
// earlier process left unfinished. Nothing is made before the catalogue is found to be valid.
// Kinds: Invalid for the catalogue's faults, Conflict when another process uses the
// data directory, and the store's.
func newBroker(ctx context.Context, cfg brokerConfig) (_ *broker, err error) {
	cat, err := catalog.Load(cfg.Layers, cfg.Adapters)
	if err != nil {
		return nil, err
	}
	if old := cat.StalePrices(time.Now()); len(old) > 0 {
		cfg.Log.Warn(stalePrices(old))
	}
	b := &broker{cfg: cfg, cat: cat}
	if b.store, err = sqlstore.OpenSQLite(ctx, cfg.Dir, sqlstore.Options{Log: cfg.Log, Beside: []string{ownerFile, keyFile}}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = b.Close()
		}
	}()
	if err := wholefile.Sweep(cfg.Dir); err != nil {
		cfg.Log.Warn("unfinished files of a former server could not be removed", "dir", cfg.Dir, "err", err)
	}
	if err := checkComplete(ctx, b.store, cfg.Dir); err != nil {
		return nil, err
	}
	owner, err := keep(filepath.Join(cfg.Dir, ownerFile), func() []byte { return []byte(sandboxer.NewID()) })
	if err != nil {
		return nil, err
	}
	if b.owner = strings.TrimSpace(string(owner)); sandboxer.CheckID(b.owner) != nil {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%s does not hold the name of an installation", filepath.Join(cfg.Dir, ownerFile)).
			WithHint("put back the 8 characters it held: the backends know this installation's sandboxes by them")
	}
	key, err := keep(filepath.Join(cfg.Dir, keyFile), func() []byte {
		key := make([]byte, 32)
		rand.Read(key)
		return []byte(hex.EncodeToString(key))
	})
	if err != nil {
		return nil, err
	}
	text, renewed := strings.CutPrefix(strings.TrimSpace(string(key)), "new ")
	seal, err := hex.DecodeString(text)
	if err != nil || len(seal) != 32 {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%s does not hold a key of 32 bytes", filepath.Join(cfg.Dir, keyFile)).
			WithHint("put back a copy of it: without it the environments in the database cannot be read")
	}
	if err := b.bind(ctx, seal, renewed); err != nil {
		return nil, err
	}
	cat.Own = cfg.Own
	cat.Notes = func(extension, dir string) sandboxer.Notes { return notes.New(dir, extension, seal) }
	secrets, err := manager.Secrets(b.store, seal)
	if err != nil {
		return nil, err
	}
	cat.Secret = secrets
	cat.Recorded = func(ctx context.Context, extension string) ([]sandboxer.Handle, error) {
		return manager.Recorded(ctx, b.store, extension)
	}
	opened, err := cat.Open(ctx, b.owner, filepath.Join(cfg.Dir, extDir), cfg.Log)
	if err != nil {
		return nil, err
	}
	var exts []manager.Extension
	for _, o := range opened {
		exts = append(exts, b.extension(o, cfg))
	}
	var place func(context.Context) (checkpoint.Blobs, error)
	if cfg.Bucket != nil {
		place = func(ctx context.Context) (checkpoint.Blobs, error) { return openBucket(ctx, *cfg.Bucket, b.owner) }
	}
	if b.snapshots, err = openSnapshotStore(filepath.Join(cfg.Dir, vaultDir), place); err != nil {
		return nil, err
	}
	var execs, streams access.AtOnce
	if cfg.MaxExecs > 0 {
		execs = access.Shares(cfg.MaxExecs)
	}
	if cfg.MaxStreams > 0 {
		streams = access.Shares(cfg.MaxStreams)
	}
	if b.manager, err = manager.New(b.store, profilesOf(cat), exts, manager.Options{Quotas: cat.Quotas, Sinks: cat.Sinks, UsageData: func(r sandboxer.UsageRow) any { return api.NewUsageRow(r) }, Execs: execs, Streams: streams, SnapshotStore: b.snapshots, Owner: b.owner, Key: seal, WentBack: b.store.WentBack(), Log: cfg.Log, History: cfg.History, OOMKilled: cfg.OOMKilled, Pooled: cfg.Pooled, Overrun: cfg.Overrun, Stop: stopTime}); err != nil {
		return nil, err
	}
	if err := b.manager.Start(ctx); err != nil {
		return nil, err
	}
	tidying, stop := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.snapshots.tidy(tidying, tidyAfter, tidyEvery, func(err error) { cfg.Log.Warn("housekeeping of snapshots", "err", err) })
	}()
	b.tidied = func() { stop(); <-done }
	return b, nil
}

// bind refuses a database that was used with another name of the installation, or another
// sealing key. renewed says that the former key is given up.
func (b *broker) bind(ctx context.Context, seal []byte, renewed bool) error {
	mac := hmac.New(sha256.New, seal)
	mac.Write([]byte("sandboxer key check"))
	check := hex.EncodeToString(mac.Sum(nil)[:16])
	owner, has, err := b.store.Bind(ctx, b.owner, check, renewed)
	if err != nil {
		return err
	}
	if file := filepath.Join(b.cfg.Dir, ownerFile); owner != b.owner {
		return sandboxer.E(sandboxer.Failed, nil, "%s is another installation's: the database was made by %s", file, owner).
			WithHint("put the database next to the files it was made with, or write the name that it knows: echo %s > %s", owner, file)
	}
	file := filepath.Join(b.cfg.Dir, keyFile)
	if has != check {
		return sandboxer.E(sandboxer.Failed, nil, "%s is not the key that the database was used with: another key seals the environments of sandboxes and snapshots", file).
			WithHint("put back a copy of it; only if there is none, give those environments up: (umask 077; echo \"new $(openssl rand -hex 32)\" > %s)", file)
	}
	if renewed {
		return writePrivate(file, []byte(hex.EncodeToString(seal)))
	}
	return nil
}

// extension is o for the manager, which opens it later if it could not be.
func (b *broker) extension(o catalog.Opened, cfg brokerConfig) manager.Extension {
	e := manager.Extension{Info: o.Info, Secrets: o.Secrets}
	if o.Ext == nil {
		again := o.Again
		e.Reopen = func(ctx context.Context) manager.Extension { return b.extension(again(ctx), cfg) }
		return e
	}
	e.Backend = backend.New(o.Info.ID, o.Ext, backend.Options{Observe: cfg.Observe, Abandoned: cfg.Abandoned, Inputs: o.Info.Inputs, Log: cfg.Log})
	e.Info.Capabilities = e.Backend.Capabilities()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.backends = append(b.backends, e.Backend)
	return e
}

func profilesOf(c *catalog.Catalog) (out []sandboxer.Profile) {
	for _, p := range c.Profiles {
		out = append(out, p.Profile)
	}
	return out
}

// reload reads the catalogue again and offers its profiles from now on: all of them, or,
// when anything is wrong, the former ones. Extensions stay as they were opened: the result names those whose
// file or program has changed since. Kind: Invalid with every fault.
func (b *broker) reload(ctx context.Context) (api.Reload, error) {
	b.loading.Lock()
	defer b.loading.Unlock()
	r := api.Reload{Added: []string{}, Changed: []string{}, Removed: []string{}, Restart: []string{}}
	cat, err := catalog.Load(b.cfg.Layers, b.cfg.Adapters)
	for _, e := range cat.Extensions {
		if old, err := b.cat.Extension(e.ID); err != nil || !old.Same(e) || old.Outdated(filepath.Join(b.cfg.Dir, extDir)) {
			r.Restart = append(r.Restart, e.ID)
		}
	}
	refused := func(err error) *sandboxer.Error {
		e := sandboxer.E(sandboxer.Invalid, err, "nothing was changed: %s", sandboxer.Message(err))
		if len(r.Restart) > 0 {
			e = e.WithHint("the changes of %s need a restart: sandboxer down; sandboxer up", strings.Join(r.Restart, ", "))
		}
		return e
	}
	said := cat.DescribeAs(b.cat)
	if err = catalog.Combine(err, said); err != nil {
		e := refused(err)
		if said == nil || len(r.Restart) == 0 { // else what is wrong may be that it has not
			e = e.WithHint("correct the files, then check them: sandboxer profile validate")
		}
		return r, e
	}
	for _, old := range b.cat.Extensions {
		if _, err := cat.Extension(old.ID); err != nil {
			r.Restart = append(r.Restart, old.ID)
		}
	}
	if err := b.manager.SetProfiles(profilesOf(cat)); err != nil {
		return r, refused(err)
	}
	for _, p := range cat.Profiles {
		switch old, err := b.cat.Profile(p.ID); {
		case err != nil:
			r.Added = append(r.Added, p.ID)
		case !reflect.DeepEqual(old.Profile, p.Profile):
			r.Changed = append(r.Changed, p.ID)
		default:
			r.Unchanged++
		}
	}
	for _, old := range b.cat.Profiles {
		if _, err := cat.Profile(old.ID); err != nil {
			r.Removed = append(r.Removed, old.ID)
		}
	}
	b.manager.SetQuotas(cat.Quotas)
	b.manager.SetSinks(cat.Sinks)
	r.Quotas = !reflect.DeepEqual(b.cat.Quotas, cat.Quotas)
	// For extensions, the open ones count, and not the files that were read last.
	b.cat = &catalog.Catalog{Extensions: b.cat.Extensions, Profiles: cat.Profiles, Quotas: cat.Quotas, Prices: b.cat.Prices, Sinks: cat.Sinks}
	b.cfg.Log.InfoContext(ctx, "profiles reloaded", "added", r.Added, "changed", r.Changed, "removed", r.Removed, "restart", r.Restart, "quotas", r.Quotas)
	return r, nil
}

// stopTime is how long work that a hung backend holds up may take to stop. Of the time that a
// server has to stop (stopsWithin), it leaves some for requests before and for closing afterwards.
const stopTime = 1500 * time.Millisecond

// Close stops all work and closes everything; sandboxes live on.
func (b *broker) Close() error {
	var errs []error
	if b.tidied != nil {
		b.tidied()
	}
	if b.manager != nil {
		errs = append(errs, b.manager.Close())
	}
	b.mu.Lock()
	backends := slices.Clone(b.backends)
	b.mu.Unlock()
	closed := make(chan error, len(backends))
	for _, be := range backends {
		go func() { closed <- be.Close() }()
	}
	for range backends {
		errs = append(errs, <-closed)
	}
	if b.snapshots != nil {
		errs = append(errs, b.snapshots.Close())
	}
	errs = append(errs, b.store.Close())
	return errors.Join(errs...)
}

// checkComplete refuses a database that was used and has lost one of the files that were
// made with it, or was put next to another installation's. New files would lose all
// sandboxes: their backend would not know them, and their environment would stay sealed for good.
func checkComplete(ctx context.Context, store *sqlstore.Store, dir string) error {
	events, err := store.Events(ctx, sandboxer.EventQuery{Limit: 1})
	if err != nil {
		return err
	}
	sandboxes, _, err := store.Sandboxes(ctx, sandboxer.Query{Limit: 100})
	if err != nil {
		return err
	}
	snapshots, _, err := store.Snapshots(ctx, sandboxer.SnapshotQuery{Limit: 1})
	if err != nil {
		return err
	}
	if len(events)+len(sandboxes)+len(snapshots) == 0 {
		return nil // nothing was ever made
	}
	name := ""
	for _, sb := range sandboxes {
		if sb.Damaged == "" && sb.Spec.Owner != "" {
			name = sb.Spec.Owner
			break
		}
	}
	file := filepath.Join(dir, ownerFile)
	switch have, err := os.ReadFile(file); {
	case errors.Is(err, fs.ErrNotExist) && name != "":
		return sandboxer.E(sandboxer.Failed, err, "%s is missing: backends identify this installation's sandboxes by its content; according to the database it was %s", file, name).
			WithHint("write it again: echo %s > %s", name, file)
	case errors.Is(err, fs.ErrNotExist):
		return sandboxer.E(sandboxer.Failed, err, "%s is missing: backends identify this installation's sandboxes by its content", file).
			WithHint("put back a copy of it; the backends show the name, 8 characters, on what it made: sbx-NAME-…")
	case err == nil && name != "" && strings.TrimSpace(string(have)) != name && sandboxer.CheckID(strings.TrimSpace(string(have))) == nil:
		return sandboxer.E(sandboxer.Failed, nil, "%s is another installation's: the sandboxes in the database were made by %s", file, name).
			WithHint("put the database next to the files it was made with, or write the name that it knows: echo %s > %s", name, file)
	}
	file = filepath.Join(dir, keyFile)
	if _, err := os.Lstat(file); errors.Is(err, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Failed, err, "%s is missing: this key seals the environments of sandboxes and snapshots in the database", file).
			WithHint("put back a copy of it; only if there is none, give those environments up with a new one: (umask 077; echo \"new $(openssl rand -hex 32)\" > %s)", file)
	}
	file = filepath.Join(dir, vaultDir, checkpoint.KeyFile)
	if _, err := os.Lstat(file); errors.Is(err, fs.ErrNotExist) && len(snapshots) > 0 {
		return sandboxer.E(sandboxer.Failed, err, "%s is missing: this key signs the portable snapshots of this installation", file).
			WithHint("put back a copy of it; only if there is none, give those snapshots up with a new one: (umask 077; openssl genpkey -algorithm ed25519 > %s)", file)
	}
	return nil
}

// keep returns the content of a private file, which is made on first use. After a crash
// the file is complete or missing.
func keep(name string, fresh func() []byte) ([]byte, error) {
	b, err := os.ReadFile(name)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		if err != nil {
			err = sandboxer.E(sandboxer.Unavailable, err, "%s cannot be read", name)
		}
		return b, err
	}
	b = fresh()
	if err := writePrivate(name, b); err != nil {
		return nil, err
	}
	return b, nil
}

// writePrivate replaces a private file by one line.
func writePrivate(name string, line []byte) error {
	if err := wholefile.Write(name, append(slices.Clone(line), '\n')); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "%s cannot be written", name)
	}
	return nil
}
