package docker

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/hosts"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// The labels of our objects on an engine: those of hosts.Mark, and these. Compose's have other names (engine.LabelOwner): both
// adapters may use one engine, and neither lists the other's objects. The extension is one of them, since one installation may have
// several extensions on one engine.
const (
	labelPrefix   = "dev.sandboxer.docker."
	labelID       = labelPrefix + hosts.LabelID
	labelExpires  = labelPrefix + "expires" // the fuse at its creation, for operators
	labelMade     = labelPrefix + "made"    // made, as JSON in base64
	labelAgent    = labelPrefix + "agent"   // of volumes: the digest of the agent in it
	labelSnapshot = labelPrefix + "snapshot"
)

// made describes how a container was made, in its labels; and the saved one, in those of an image. It
// holds no secret.
type made struct {
	V         int       `json:"v"`
	User      string    `json:"user,omitempty"` // of commands; a name, or uid[:gid]
	Workspace string    `json:"workspace"`
	Main      []string  `json:"main,omitempty"` // the main command
	MainDir   string    `json:"main_dir,omitempty"`
	Image     string    `json:"image,omitempty"` // for people, with its digest if it has one
	Ports     []int     `json:"ports,omitempty"`
	Memory    int64     `json:"memory,omitempty"`
	Disk      int64     `json:"disk,omitempty"`
	Changed   string    `json:"changed,omitempty"`
	Warm      bool      `json:"warm,omitempty"`
	Grants    []string  `json:"grants,omitempty"` // capabilities beyond inside.Capabilities, sorted
	Mode      string    `json:"mode,omitempty"`   // of the network
	Fuse      time.Time `json:"fuse,omitzero"`

	Mounts []sandboxer.Mount `json:"mounts,omitempty"` // which a teardown leaves, and says so
}

const madeVersion = 1

func (m made) label() string {
	data, err := json.Marshal(m)
	if err != nil {
		panic(err) // strings and numbers only
	}
	return base64.RawURLEncoding.EncodeToString(data)
}

// readMade reads the label of a container or of an image.
func readMade(labels map[string]string) (m made, err error) {
	data, err := base64.RawURLEncoding.DecodeString(labels[labelMade])
	if err == nil {
		_, err = strictjson.DecodeStored(data, &m)
	}
	if err == nil && m.V > madeVersion {
		return m, sandboxer.E(sandboxer.Unavailable, nil, "a sandbox was made by a newer sandboxer (version %d; this program knows %d)", m.V, madeVersion).
			WithHint("upgrade this program")
	}
	if err != nil {
		return m, sandboxer.E(sandboxer.Unavailable, err, "what a sandbox was made as cannot be read from its labels")
	}
	return m, nil
}

// A record is what changes during a sandbox's life. It is written before anything is made, and
// removed when nothing is left.
type record struct {
	V     int       `json:"v"`
	Host  string    `json:"host,omitempty"`
	Ready bool      `json:"ready,omitempty"` // it was completed
	Claim string    `json:"claim,omitempty"` // the digest of its claim
	Done  bool      `json:"done,omitempty"`  // the claim was
	Fuse  time.Time `json:"fuse,omitzero"`   // where it was moved
	// FuseDue: it was moved while the sandbox was paused; the agent gets it at the resume.
	FuseDue bool `json:"fuse_due,omitempty"`
	// Network is the policy of a filtered network, written before it is in force. It is empty for a
	// sandbox on the engine's own network.
	Network sandboxer.NetworkPolicy `json:"network,omitzero"`
}

// A box is one sandbox.
type box struct {
	id         string
	generation int
	host       *host
	container  string // ID
	labels     map[string]string
	state      string // in the engine's words
	image      string // ID

	made   made
	unread error // why made cannot be read; such a sandbox can only be torn down (runs, lives)
}

func key(id string, generation int) string { return id + ".g" + strconv.Itoa(generation) }

func (b *box) key() string { return key(b.id, b.generation) }

func (e *extension) name(id string, generation int) string {
	return sandboxer.ExternalName(e.env.Owner, id, generation)
}

func (e *extension) handle(b *box) sandboxer.Handle {
	data, err := json.Marshal(handleData{V: 1, Container: b.container})
	if err != nil {
		panic(err) // strings and numbers only
	}
	return sandboxer.Handle{SandboxID: b.id, Generation: b.generation, Host: b.host.name, Ref: e.name(b.id, b.generation), Data: data}
}

// handleData is this adapter's part of a handle.
type handleData struct {
	V         int    `json:"v"`
	Container string `json:"container,omitempty"` // ID; former versions did without
}

// container is the container ID of a handle, empty for any container with the sandbox's name and labels.
func container(h sandboxer.Handle) (string, error) {
	var d handleData
	if len(h.Data) == 0 {
		return "", nil
	}
	if _, err := strictjson.DecodeStored(h.Data, &d); err != nil {
		return "", sandboxer.E(sandboxer.Internal, err, "the handle of sandbox %s cannot be read", h.SandboxID)
	}
	return d.Container, nil
}

// recall reads the record of a sandbox. Without one, the sandbox was made by a process whose directory is
// lost: then it counts as completed.
func (e *extension) recall(ctx context.Context, key string) (r record, err error) {
	n, err := e.env.Notes.Get(ctx, key)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return record{V: 1, Ready: true}, nil
	}
	if err != nil {
		return r, err
	}
	if _, err := strictjson.DecodeStored(n.Value, &r); err != nil {
		return r, notes.Damaged(e.env.Notes, key, err)
	}
	if r.V > 1 {
		return r, sandboxer.E(sandboxer.Unavailable, nil, "the record of sandbox %s was written by a newer sandboxer (version %d; this program knows 1)", key, r.V).
			WithHint("upgrade this program")
	}
	return r, nil
}

func (e *extension) remember(ctx context.Context, key string, r record) error {
	r.V = 1
	data, err := json.Marshal(r)
	if err != nil {
		return sandboxer.E(sandboxer.Internal, err, "the record of sandbox %s does not encode", key)
	}
	return e.env.Notes.Put(ctx, key, data)
}

func (e *extension) forget(ctx context.Context, key string) error {
	return e.env.Notes.Delete(ctx, key)
}

// ours returns the labels of all objects of this extension.
func (e *extension) ours() map[string]string { return e.labels("", 0) }

// labels returns those of the objects of a sandbox, of a generation or, with 0, of any; without an ID of all sandboxes.
func (e *extension) labels(id string, generation int) map[string]string {
	return hosts.Mark{Owner: e.env.Owner, Extension: e.env.Extension, ID: id, Generation: generation}.Labels(labelPrefix)
}

// isOurs reports whether labels are those of a sandbox of this extension, and returns its mark.
func (e *extension) isOurs(labels map[string]string) (m hosts.Mark, ok bool) {
	m, ok = hosts.ReadMark(labelPrefix, labels)
	return m, ok && m.Owner == e.env.Owner && m.Extension == e.env.Extension
}

// on lists the sandboxes of an ID on a host, of a generation or, with 0, of any; without an ID all.
func (e *extension) on(ctx context.Context, h *host, id string, generation int) ([]*box, error) {
	all, _, err := e.sort(ctx, h, id, generation) // Teardown reports the others
	return all, err
}

// sort is on that also returns the containers that have the labels of sandboxes but are none: an image that a user makes of a sandbox's container has
// its labels, and not its name.
func (e *extension) sort(ctx context.Context, h *host, id string, generation int) (all []*box, strangers []engine.ContainerSummary, err error) {
	list, err := h.api.ListContainers(ctx, e.labels(id, generation))
	for _, c := range list {
		switch m, ok := e.isOurs(c.Labels); {
		case !ok:
		case c.Called(e.name(m.ID, m.Generation)):
			b := &box{id: m.ID, generation: m.Generation, host: h, container: c.ID, labels: c.Labels, state: c.State, image: c.ImageID}
			b.made, b.unread = readMade(c.Labels)
			all = append(all, b)
		default:
			strangers = append(strangers, c)
		}
	}
	return all, strangers, err
}

// alone finds a sandbox and takes its lock, so that no other call changes it meanwhile.
func (e *extension) alone(ctx context.Context, h sandboxer.Handle) (b *box, unlock func(), err error) {
	if b, err = e.find(ctx, h); err != nil {
		return nil, nil, err
	}
	if unlock, err = e.env.Notes.Lock(ctx, b.key()); err != nil {
		return nil, nil, err
	}
	if b, err = e.find(ctx, e.handle(b)); err != nil {
		unlock()
	}
	return b, unlock, err
}

// find returns the newest sandbox of a handle: its own container, if the handle names one. NotFound: no engine has it. An engine that cannot be asked is
// an error only if nothing was found.
func (e *extension) find(ctx context.Context, h sandboxer.Handle) (*box, error) {
	at, err := e.where(h.Host)
	if err != nil {
		return nil, err
	}
	made, err := container(h)
	if err != nil {
		return nil, err
	}
	found, silent := hosts.Ask(at, func(ho *host) ([]*box, error) { return e.on(ctx, ho, h.SandboxID, h.Generation) })
	found = slices.DeleteFunc(found, func(b *box) bool { return made != "" && b.container != made })
	return hosts.Newest(h.SandboxID, found, func(b *box) int { return b.generation }, cmp.Or(ctx.Err(), silent.Err()))
}
