package docker

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// Labels of what is ours on an engine. They are not those of compose's (engine.LabelOwner): both may be
// on one engine, and neither lists the other's. An extension's are told apart by its ID, since one
// installation may have several of them on one engine.
const (
	labelOwner      = "dev.sandboxer.docker.owner"
	labelExtension  = "dev.sandboxer.docker.extension"
	labelID         = "dev.sandboxer.docker.id"
	labelGeneration = "dev.sandboxer.docker.generation"
	labelExpires    = "dev.sandboxer.docker.expires" // the fuse that it was made with, for people
	labelMade       = "dev.sandboxer.docker.made"    // made, as JSON in base64
	labelAgent      = "dev.sandboxer.docker.agent"   // of volumes: the digest of the agent in it
	labelSnapshot   = "dev.sandboxer.docker.snapshot"
)

// made is what a container was made as, in its labels; and as what it was saved, in those of an
// image. It holds no secret.
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
	Grants    []string  `json:"grants,omitempty"` // capabilities beyond guestCapabilities, sorted
	Mode      string    `json:"mode,omitempty"`   // of the network
	Fuse      time.Time `json:"fuse,omitzero"`
	Stamp     []byte    `json:"stamp,omitempty"`

	Mounts []sandboxer.Mount `json:"mounts,omitempty"` // which a teardown leaves, and says so
}

const madeVersion = 1

func (m made) label() string {
	data, err := json.Marshal(m)
	if err != nil {
		panic(err) // strings and numbers
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

// A record is what changes of a sandbox while it lives. It is written before anything is
// made, and removed when nothing is left.
type record struct {
	V     int       `json:"v"`
	Host  string    `json:"host,omitempty"`
	Ready bool      `json:"ready,omitempty"` // it was completed
	Claim string    `json:"claim,omitempty"` // the digest of its claim
	Done  bool      `json:"done,omitempty"`  // the claim was
	Fuse  time.Time `json:"fuse,omitzero"`   // where it was moved
	// FuseDue: it was moved while the sandbox stood still, whose agent learns of it when that goes on.
	FuseDue bool   `json:"fuse_due,omitempty"`
	Stamp   []byte `json:"stamp,omitempty"` // of the claim
	// Network is the policy of a filtered network, written before it is in force. A sandbox with the
	// engine's own has none.
	Network sandboxer.NetworkPolicy `json:"network,omitzero"`
}

// A box is one sandbox.
type box struct {
	id         string
	generation int
	host       *host
	container  string // ID
	labels     map[string]string
	state      string // as the engine calls it
	image      string // ID
}

func key(id string, generation int) string { return id + ".g" + strconv.Itoa(generation) }

func (b *box) key() string { return key(b.id, b.generation) }

func (e *extension) name(id string, generation int) string {
	return sandboxer.ExternalName(e.env.Owner, id, generation)
}

func (e *extension) handle(b *box) sandboxer.Handle {
	return sandboxer.Handle{SandboxID: b.id, Generation: b.generation, Host: b.host.name, Ref: e.name(b.id, b.generation), Data: json.RawMessage(`{"v":1}`)}
}

// recall reads the record of a sandbox. One that is not there was made by a process whose directory is
// lost: what is found then counts as completed.
func (e *extension) recall(key string) (r record, err error) {
	data, err := os.ReadFile(e.dir("box", key+".json"))
	if errors.Is(err, fs.ErrNotExist) {
		return record{V: 1, Ready: true}, nil
	}
	if err == nil {
		_, err = strictjson.DecodeStored(data, &r)
	}
	if err == nil && r.V > 1 {
		err = errors.New("a newer sandboxer wrote it")
	}
	if err != nil {
		return r, sandboxer.E(sandboxer.Unavailable, err, "the record of sandbox %s cannot be read", key).
			WithHint("look at %s", e.dir("box", key+".json"))
	}
	return r, nil
}

func (e *extension) remember(key string, r record) error {
	r.V = 1
	data, err := json.Marshal(r)
	if err == nil {
		err = wholefile.Write(e.dir("box", key+".json"), data)
	}
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the record of sandbox %s cannot be written", key)
	}
	return nil
}

func (e *extension) forget(key string) error {
	if err := os.Remove(e.dir("box", key+".json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Unavailable, err, "the record of sandbox %s cannot be removed", key)
	}
	return nil
}

// ours are the labels of this extension's.
func (e *extension) ours() map[string]string {
	return map[string]string{labelOwner: e.env.Owner, labelExtension: e.env.Extension}
}

// on lists what of an ID is on a host, of a generation or, with 0, of any; with no ID all.
func (e *extension) on(ctx context.Context, h *host, id string, generation int) ([]*box, error) {
	labels := e.ours()
	if id != "" {
		labels[labelID] = id
	}
	if generation != 0 {
		labels[labelGeneration] = strconv.Itoa(generation)
	}
	list, err := h.api.ListContainers(ctx, labels)
	if err != nil {
		return nil, err
	}
	var all []*box
	for _, c := range list {
		if b := e.box(h, c); b != nil {
			all = append(all, b)
		}
	}
	return all, nil
}

// box is a container of a listing, nil if it is none of ours.
func (e *extension) box(h *host, c engine.ContainerSummary) *box {
	g, err := strconv.Atoi(c.Labels[labelGeneration])
	id := c.Labels[labelID]
	if err != nil || sandboxer.CheckID(id) != nil || c.Labels[labelOwner] != e.env.Owner || c.Labels[labelExtension] != e.env.Extension {
		return nil
	}
	return &box{id: id, generation: g, host: h, container: c.ID, labels: c.Labels, state: c.State, image: c.ImageID}
}

// find returns the newest of what a handle may mean. NotFound: no engine has it. An engine that
// cannot be asked is an error only if nothing was found.
func (e *extension) find(ctx context.Context, h sandboxer.Handle) (*box, error) {
	hosts, err := e.where(h)
	if err != nil {
		return nil, err
	}
	found := make([][]*box, len(hosts))
	at := map[*host]int{}
	for i, ho := range hosts {
		at[ho] = i
	}
	err = each(hosts, func(ho *host) (err error) {
		found[at[ho]], err = e.on(ctx, ho, h.SandboxID, h.Generation)
		return err
	})
	var best *box
	for _, list := range found {
		for _, b := range list {
			if best == nil || b.generation > best.generation {
				best = b
			}
		}
	}
	switch {
	case best != nil:
		return best, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, err
	}
	return nil, sandboxer.E(sandboxer.NotFound, nil, "there is no sandbox %s", h.SandboxID)
}
