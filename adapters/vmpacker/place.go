package vmpacker

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

const placeVersion = 1

// A place says where one sandbox is. It is written down before anything is made there
// and removed when nothing is left, and it holds no secret.
type place struct {
	V          int           `json:"v"`
	ID         string        `json:"id"`
	Generation int           `json:"generation"`
	Owner      string        `json:"owner"`
	Kind       string        `json:"kind"`
	Host       string        `json:"host"` // what the caller calls the machine
	Target     sshrun.Target `json:"target"`
	Base       string        `json:"base"`
	User       string        `json:"user,omitempty"`
	Ports      []int         `json:"ports,omitempty"`

	// Untouched says that nothing was done for it on the machine to attach to: no session
	// was opened there, or one that did nothing. Former notes never say so.
	Untouched bool `json:"untouched,omitempty"`

	Shape *shape `json:"shape,omitempty"` // of a machine of its own
	State state  `json:"state,omitzero"`
	Stamp []byte `json:"stamp,omitempty"` // of notes, not of handles

	capacity int
	tools    []string
}

// The kinds of place.
const attached = "attached"

// key names the place among those of this installation.
func (p *place) key() string { return p.ID + ".g" + strconv.Itoa(p.Generation) }

// mark is what the sandbox's processes carry in their environment.
func (p *place) mark() string { return sandboxer.ExternalName(p.Owner, p.ID, p.Generation) }

func (p *place) handle() sandboxer.Handle {
	bare := *p
	bare.Stamp = nil
	data, err := json.Marshal(bare)
	if err != nil {
		panic(err) // strings and numbers
	}
	return sandboxer.Handle{SandboxID: p.ID, Generation: p.Generation, Host: p.Host, Ref: p.mark(), Data: data}
}

// remember writes the place down, to the disk.
func (e *extension) remember(p *place) error {
	data, err := json.MarshalIndent(p, "", "  ")
	if err == nil {
		err = wholefile.Write(e.dir("box", p.key()+".json"), append(data, '\n'))
	}
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "it cannot be written down where sandbox %s is placed", p.ID)
	}
	return nil
}

func (e *extension) forget(p *place) error {
	if err := os.Remove(e.dir("box", p.key()+".json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Unavailable, err, "the note on where sandbox %s was cannot be removed", p.ID)
	}
	return nil
}

// recall reads one note. NotFound: there is none.
func (e *extension) recall(id string, generation int) (*place, error) {
	return e.read((&place{ID: id, Generation: generation}).key())
}

func (e *extension) read(key string) (*place, error) {
	data, err := os.ReadFile(e.dir("box", key+".json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, missing(key)
	}
	var p place
	if err == nil {
		err = p.decode(data)
	}
	if err == nil && (p.key() != key || p.Owner != e.env.Owner) {
		err = errors.New("it is about another sandbox")
	}
	if sandboxer.KindOf(err) == sandboxer.Unavailable {
		return nil, err
	}
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the note on where sandbox %s is cannot be read", key).
			WithHint("look at %s", e.dir("box", key+".json"))
	}
	return &p, nil
}

func (p *place) decode(data []byte) error {
	var head struct {
		V int `json:"v"`
	}
	if _, err := strictjson.DecodeStored(data, &head); err == nil && head.V > placeVersion { // whatever else is in it
		// Not Unsupported: what has to be torn down waits for the upgrade.
		return sandboxer.E(sandboxer.Unavailable, nil, "the note on where a sandbox is was written by a newer sandboxer (version %d; this program knows %d)", head.V, placeVersion).
			WithHint("upgrade this program")
	}
	if _, err := strictjson.DecodeStored(data, p); err != nil {
		return err
	}
	if p.V != placeVersion {
		return errors.New("it is of version " + strconv.Itoa(p.V))
	}
	if p.Kind == managed && p.Shape == nil {
		p.Shape = &shape{} // found by its process alone
	}
	return errors.Join(sandboxer.CheckID(p.ID), checkBase(p.Base))
}

// noted returns every note.
func (e *extension) noted() (all []*place, err error) {
	files, err := os.ReadDir(e.dir("box"))
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the notes on where sandboxes are cannot be read")
	}
	var errs []error
	for _, f := range files {
		key, ok := strings.CutSuffix(f.Name(), ".json")
		if !ok {
			continue
		}
		p, err := e.read(key)
		switch {
		case sandboxer.KindOf(err) == sandboxer.NotFound: // removed meanwhile
		case err != nil:
			errs = append(errs, err)
		default:
			all = append(all, p)
		}
	}
	return all, errors.Join(errs...)
}

// places returns where the sandbox of h may be: what was noted, or else what the handle
// says. Without either nothing was ever made, since a note comes first.
func (e *extension) places(h sandboxer.Handle) ([]*place, error) {
	if h.Generation > 0 {
		p, err := e.recall(h.SandboxID, h.Generation)
		if err == nil {
			return []*place{p}, nil
		}
		if sandboxer.KindOf(err) != sandboxer.NotFound {
			return nil, err
		}
	} else {
		all, err := e.noted()
		if err != nil {
			return nil, err
		}
		var mine []*place
		for _, p := range all {
			if p.ID == h.SandboxID {
				mine = append(mine, p)
			}
		}
		if len(mine) > 0 {
			return mine, nil
		}
	}
	if len(h.Data) == 0 {
		return nil, nil
	}
	var p place
	if err := p.decode(h.Data); sandboxer.KindOf(err) == sandboxer.Unavailable {
		return nil, err
	} else if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "the handle of sandbox %s cannot be read", h.SandboxID)
	}
	if p.ID != h.SandboxID || p.Owner != e.env.Owner || h.Generation > 0 && p.Generation != h.Generation {
		return nil, nil
	}
	return []*place{&p}, nil
}

// one returns where h's sandbox was placed, without asking the machine.
func (e *extension) one(ctx context.Context, h sandboxer.Handle) (*place, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	all, err := e.places(h)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, missing(h.SandboxID)
	}
	newest := all[0]
	for _, p := range all {
		if p.Generation > newest.Generation {
			newest = p
		}
	}
	return newest, nil
}

// keyLock is a lock for one thing; the last one to leave removes it.
type keyLock struct {
	held chan struct{}
	refs int
}

// lock excludes everybody else, also other processes of this installation, from
// changing what key names.
func (e *extension) lock(ctx context.Context, key string) (unlock func(), err error) {
	e.mu.Lock()
	l := e.busy[key]
	if l == nil {
		l = &keyLock{held: make(chan struct{}, 1)}
		e.busy[key] = l
	}
	l.refs++
	e.mu.Unlock()
	leave := func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if l.refs--; l.refs == 0 {
			delete(e.busy, key)
		}
	}
	select {
	case l.held <- struct{}{}:
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
	for {
		release, err := tryLockFile(e.dir("lock", key))
		if err != nil {
			<-l.held
			leave()
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the lock of %s cannot be taken", key)
		}
		if release != nil {
			return func() {
				release()
				<-l.held
				leave()
			}, nil
		}
		select { // another process holds it
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			<-l.held
			leave()
			return nil, ctx.Err()
		}
	}
}
