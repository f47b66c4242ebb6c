package sshrun

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// A Registry is the directory that has the hosts of an installation,
// one file each. Several processes may call its methods: a file is
// replaced as a whole.
type Registry struct{ dir string }

// NewRegistry returns the registry in dir, which need not exist yet.
func NewRegistry(dir string) *Registry { return &Registry{dir: dir} }

// HostState says what a host may be used for.
type HostState string

// The states of a host.
const (
	Active   HostState = "active"
	Draining HostState = "draining" // takes no new sandbox; what is there goes on
)

// The roles to which a host may be limited.
const (
	OnlyCompose  = "compose"  // compose projects
	OnlyMachines = "machines" // workspaces of ext.vm-packer
)

// DrainingError is the error for putting a sandbox on a host that is being drained.
func DrainingError(name string) error {
	return sandboxer.E(sandboxer.Exhausted, nil, "host %s is being drained and takes no new sandbox", name).
		WithHint("to let it take sandboxes again: sandboxer host drain --undo %s", name)
}

// A Record describes a host that was added. It has no secret.
type Record struct {
	Name         string            `json:"name"`
	Addr         string            `json:"addr"`
	Port         int               `json:"port,omitempty"`
	IdentityFile string            `json:"identity_file,omitempty"`
	ProxyJump    string            `json:"proxy_jump,omitempty"`
	HostKeys     []string          `json:"host_keys"`
	Labels       map[string]string `json:"labels,omitempty"`
	Capacity     int               `json:"capacity,omitempty"` // sandboxes at once; 0 leaves it to the extension
	Only         string            `json:"only,omitempty"`     // OnlyCompose or OnlyMachines; "" is for both
	State        HostState         `json:"state"`
	AddedAt      time.Time         `json:"added_at"`
	LastProbe    *Facts            `json:"last_probe,omitempty"`
}

// Target returns how to connect to the host.
func (r Record) Target() Target {
	return Target{Name: r.Name, Addr: r.Addr, Port: r.Port, IdentityFile: r.IdentityFile, ProxyJump: r.ProxyJump, HostKeys: slices.Clone(r.HostKeys)}
}

var hostName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)

func (r Record) check() error {
	if !hostName.MatchString(r.Name) {
		return invalid("%q is not a valid name of a host", r.Name).WithHint("use lower-case letters, digits, dots and dashes, at most 63")
	}
	if len(r.HostKeys) == 0 {
		return invalid("host %s has no trusted key", r.Name)
	}
	if r.State != Active && r.State != Draining {
		return invalid("host %s: %q is not a state", r.Name, r.State)
	}
	if r.Only != "" && r.Only != OnlyCompose && r.Only != OnlyMachines {
		return invalid("host %s: want %s or %s, not %q", r.Name, OnlyCompose, OnlyMachines, r.Only)
	}
	if r.Capacity < 0 {
		return invalid("host %s: the capacity cannot be negative", r.Name)
	}
	_, err := r.Target().check()
	return err
}

func (r *Registry) file(name string) string { return filepath.Join(r.dir, name+".json") }

// Host returns one record. NotFound: there is none of that name.
func (r *Registry) Host(name string) (Record, error) {
	missing := sandboxer.E(sandboxer.NotFound, nil, "there is no host %q", name).WithHint("list them with: sandboxer host ls")
	if !hostName.MatchString(name) {
		return Record{}, missing
	}
	data, err := os.ReadFile(r.file(name))
	if errors.Is(err, fs.ErrNotExist) {
		return Record{}, missing
	}
	if err != nil {
		return Record{}, sandboxer.E(sandboxer.Unavailable, err, "the record of host %s cannot be read", name).
			WithHint("check that the account that runs sandboxer may read %s, or: sandboxer host rm --force %s", r.file(name), name)
	}
	var rec Record
	if err = strictjson.Decode(data, &rec); err == nil && rec.Name != name {
		err = errors.New("it belongs to host " + rec.Name)
	}
	if err == nil {
		err = rec.check()
	}
	if err != nil {
		return Record{}, sandboxer.E(sandboxer.Invalid, err, "the record of host %s is damaged: %v", name, err).
			WithHint("correct %s, or upgrade if a newer sandboxer wrote it, or: sandboxer host rm --force %s", r.file(name), name)
	}
	return rec, nil
}

// Hosts returns every record, by name. A record that cannot be read is named in the error
// and not in the list; the others are returned with it.
func (r *Registry) Hosts() ([]Record, error) {
	files, err := os.ReadDir(r.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "cannot read the hosts of this installation").
			WithHint("check that %s is a directory, and that the account that runs sandboxer may read it", r.dir)
	}
	var all []Record
	var errs []error
	for _, f := range files {
		name, ok := strings.CutSuffix(f.Name(), ".json")
		if !ok || !hostName.MatchString(name) {
			continue
		}
		rec, err := r.Host(name)
		switch {
		case sandboxer.KindOf(err) == sandboxer.NotFound: // removed meanwhile
		case err != nil:
			errs = append(errs, err)
		default:
			all = append(all, rec)
		}
	}
	return all, errors.Join(errs...)
}

// Put writes a record, in place of one of the same name if there is one.
func (r *Registry) Put(rec Record) error {
	if err := rec.check(); err != nil {
		return err
	}
	data, err := json.MarshalIndent(rec, "", "  ")
	if err == nil {
		err = os.MkdirAll(r.dir, 0o700)
	}
	if err == nil {
		err = wholefile.Sweep(r.dir)
	}
	if err == nil {
		err = wholefile.Write(r.file(rec.Name), append(data, '\n'))
	}
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the record of host %s cannot be written", rec.Name)
	}
	return nil
}

// Remove forgets a host; absence is success.
func (r *Registry) Remove(name string) error {
	if !hostName.MatchString(name) {
		return nil
	}
	if err := os.Remove(r.file(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Unavailable, err, "the record of host %s cannot be removed", name)
	}
	return nil
}
