// Package hosts asks the hosts of an extension concurrently, and combines their answers. One rule holds
// everywhere: a host that cannot be asked makes the answer unknown, unless another host has what was looked for.
package hosts

import (
	"cmp"
	"errors"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// A Set has hosts by name.
type Set[H any] map[string]H

// Named returns a set of hosts that are looked up when they are asked: each is its name.
func Named(names []string) Set[string] {
	s := Set[string]{}
	for _, n := range names {
		s[n] = n
	}
	return s
}

// Names returns the names of the hosts, sorted.
func (s Set[H]) Names() []string { return slices.Sorted(maps.Keys(s)) }

// Ask calls ask for all hosts at once, and waits for all of them. It returns the answers in the order of the hosts' names,
// including answers that come with an error.
func Ask[H, T any](s Set[H], ask func(H) ([]T, error)) ([]T, Silent) {
	names := s.Names()
	answers, errs := make([][]T, len(names)), make([]error, len(names))
	var asking sync.WaitGroup
	for i, n := range names {
		asking.Go(func() { answers[i], errs[i] = ask(s[n]) })
	}
	asking.Wait()
	var silent Silent
	for i, err := range errs {
		if err != nil {
			silent = append(silent, failure{names[i], err})
		}
	}
	return slices.Concat(answers...), silent
}

// Silent has the hosts that could not be asked, in the order of their names.
type Silent []failure

type failure struct {
	host string
	err  error
}

// Names returns the names of the hosts.
func (s Silent) Names() (names []string) {
	for _, f := range s {
		names = append(names, f.host)
	}
	return names
}

// Err joins the errors of the hosts. It is nil if all could be asked.
func (s Silent) Err() error {
	var errs []error
	for _, f := range s {
		errs = append(errs, f.err)
	}
	return errors.Join(errs...)
}

// Unknown says that the sandbox id may be on these hosts; there must be at least one. more is joined to the cause.
func (s Silent) Unknown(id string, more error) *sandboxer.Error {
	names, first := strings.Join(s.Names(), ", "), s[0]
	return sandboxer.E(sandboxer.Unavailable, errors.Join(s.Err(), more), "sandbox %s may be on %s, which cannot be asked: %s", id, names, sandboxer.Message(first.err)).
		WithPublic("sandbox %s may be on %s, which cannot be asked now", id, names).
		WithHint("%s", cmp.Or(sandboxer.HintOf(first.err), "bring it back; if it is gone for good: sandboxer host rm --force "+first.host))
}

// Newest returns what was found of the sandbox id with the highest generation. If nothing was found, it returns the error
// unasked of the hosts that could not be asked, or else NotFound.
func Newest[T any](id string, found []T, generation func(T) int, unasked error) (T, error) {
	if len(found) == 0 {
		var none T
		return none, cmp.Or(unasked, Missing(id))
	}
	return slices.MaxFunc(found, func(a, b T) int { return cmp.Compare(generation(a), generation(b)) }), nil
}

// Missing says that a sandbox does not exist. Its kind is NotFound.
func Missing(id string) error {
	return sandboxer.E(sandboxer.NotFound, nil, "there is no sandbox %s", id)
}

// List yields what list found, and then its error, as the listings of extensions do.
func List[T any](list func() ([]T, error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		found, err := list()
		for _, f := range found {
			if !yield(f, nil) {
				return
			}
		}
		if err != nil {
			var none T
			yield(none, err)
		}
	}
}

// A Room says how many further sandboxes a host takes.
type Room struct {
	Host  string
	Free  int
	About string // for people
}

// Widest returns the host with the most room, the first of several. It is false if there is none.
func Widest(rooms []Room) (Room, bool) {
	if len(rooms) == 0 {
		return Room{}, false
	}
	return slices.MaxFunc(rooms, func(a, b Room) int { return cmp.Compare(a.Free, b.Free) }), true
}

// Capacity adds up rooms.
func Capacity(rooms []Room) sandboxer.HostCapacity {
	c := sandboxer.HostCapacity{Attrs: map[string]string{}}
	for _, r := range rooms {
		c.Free += r.Free
		c.Hosts = append(c.Hosts, r.Host)
		c.Attrs[r.Host] = r.About
	}
	return c
}

// A Mark is in the labels of what an extension made: its owner and its sandbox.
type Mark struct {
	Owner, Extension string
	ID               string // of the sandbox, empty for what several share
	Generation       int
}

// The names of the labels, after an adapter's prefix.
const (
	LabelOwner      = "owner"
	LabelExtension  = "extension"
	LabelID         = "id"
	LabelGeneration = "generation"
)

// Labels returns the labels of m, without those of empty fields: so they also select objects with these labels.
func (m Mark) Labels(prefix string) map[string]string {
	l := map[string]string{prefix + LabelOwner: m.Owner, prefix + LabelExtension: m.Extension}
	if m.ID != "" {
		l[prefix+LabelID] = m.ID
	}
	if m.Generation != 0 {
		l[prefix+LabelGeneration] = strconv.Itoa(m.Generation)
	}
	return l
}

// ReadMark reads the mark of a sandbox. It is false for labels that cannot be ours: a backend's answer is not trusted.
func ReadMark(prefix string, labels map[string]string) (m Mark, ok bool) {
	m = Mark{Owner: labels[prefix+LabelOwner], Extension: labels[prefix+LabelExtension], ID: labels[prefix+LabelID]}
	var err error
	m.Generation, err = strconv.Atoi(labels[prefix+LabelGeneration])
	if err != nil || m.Generation < 1 || m.Owner == "" || m.Extension == "" || sandboxer.CheckID(m.ID) != nil {
		return Mark{}, false
	}
	return m, true
}
