package hosts

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

var errAway = sandboxer.E(sandboxer.Unavailable, nil, "it is away")

func self(g int) int { return g }

// TestAsk: all hosts are asked at once, and answers and errors have the order of their names.
func TestAsk(t *testing.T) {
	s := Named([]string{"c", "a", "b", "d"})
	var together sync.WaitGroup
	together.Add(len(s))
	found, silent := Ask(s, func(name string) ([]string, error) {
		together.Done()
		together.Wait() // for ever, unless all are asked at once
		switch name {
		case "d":
			return nil, errors.New("d is away")
		case "b":
			return []string{"b3"}, errAway
		}
		return []string{name + "1", name + "2"}, nil
	})
	if want := []string{"a1", "a2", "b3", "c1", "c2"}; !slices.Equal(found, want) {
		t.Errorf("the answers are %q; want %q", found, want)
	}
	if want := []string{"b", "d"}; !slices.Equal(silent.Names(), want) {
		t.Errorf("%q are silent; want %q", silent.Names(), want)
	}
	if err := silent.Err(); !errors.Is(err, errAway) || err.Error() != "it is away\nd is away" {
		t.Errorf("the error is %v", err)
	}
	if found, silent := Ask(Set[int]{"a": 7}, func(n int) ([]int, error) { return []int{n}, nil }); !slices.Equal(found, []int{7}) || silent.Err() != nil || silent.Names() != nil {
		t.Errorf("one host answers %v, %v", found, silent)
	}
}

func TestNewest(t *testing.T) {
	for _, c := range []struct {
		name    string
		found   []int
		unasked error
		want    int
		kind    sandboxer.Kind
	}{
		{"the newest", []int{2, 5, 3}, nil, 5, ""},
		{"found while another cannot be asked", []int{2}, errAway, 2, ""},
		{"not found while one cannot be asked", nil, errAway, 0, sandboxer.Unavailable},
		{"nowhere", nil, nil, 0, sandboxer.NotFound},
	} {
		got, err := Newest("x", c.found, self, c.unasked)
		if got != c.want || sandboxer.KindOf(err) != c.kind {
			t.Errorf("%s: %d, %v; want %d, %q", c.name, got, err, c.want, c.kind)
		}
	}
}

func TestUnknown(t *testing.T) {
	other := errors.New("a record cannot be read")
	err := Silent{{"a", errAway}, {"b", errors.New("/secret")}}.Unknown("x", other)
	if err.Kind != sandboxer.Unavailable || err.Msg != "sandbox x may be on a, b, which cannot be asked: it is away" || err.Public != "sandbox x may be on a, b, which cannot be asked now" ||
		err.Hint != "bring it back; if it is gone for good: sandboxer host rm --force a" || !errors.Is(err, errAway) || !errors.Is(err, other) {
		t.Errorf("%+v", err)
	}
	hint := sandboxer.E(sandboxer.Unavailable, nil, "no").WithHint("start it")
	if err := (Silent{{"a", hint}}).Unknown("x", nil); err.Hint != "start it" {
		t.Errorf("the hint is %q", err.Hint)
	}
}

// TestList: what was found comes first, and the error last and once.
func TestList(t *testing.T) {
	list := List(func() ([]int, error) { return []int{1, 2}, errAway })
	var got []int
	var errs []error
	for n, err := range list {
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if len(errs) > 0 {
			t.Errorf("%d comes after the error", n)
		}
		got = append(got, n)
	}
	if !slices.Equal(got, []int{1, 2}) || len(errs) != 1 || !errors.Is(errs[0], errAway) {
		t.Errorf("it lists %v, %v", got, errs)
	}
	for range list {
		break // it must not go on
	}
	for n, err := range List(func() ([]int, error) { return nil, nil }) {
		t.Errorf("nothing is listed as %d, %v", n, err)
	}
}

func TestRoom(t *testing.T) {
	if _, ok := Widest(nil); ok {
		t.Error("there is room without a host")
	}
	rooms := []Room{{"a", 1, "old"}, {"b", 4, "new"}, {"c", 4, "new"}}
	if r, ok := Widest(rooms); !ok || r.Host != "b" {
		t.Errorf("the widest is %+v", r)
	}
	c := Capacity(rooms)
	if c.Free != 9 || !slices.Equal(c.Hosts, []string{"a", "b", "c"}) || c.Attrs["c"] != "new" {
		t.Errorf("the capacity is %+v", c)
	}
}

func TestMark(t *testing.T) {
	m := Mark{"o", "ext.x", "box", 3}
	l := m.Labels("p.")
	if want := map[string]string{"p.owner": "o", "p.extension": "ext.x", "p.id": "box", "p.generation": "3"}; !maps.Equal(l, want) {
		t.Errorf("the labels are %v", l)
	}
	if got, ok := ReadMark("p.", l); !ok || got != m {
		t.Errorf("they are read as %+v, %t", got, ok)
	}
	if l := (Mark{Owner: "o", Extension: "e"}).Labels("p."); len(l) != 2 {
		t.Errorf("the labels of all are %v", l)
	}
	for label, bad := range map[string]string{"owner": "", "extension": "", "id": "../x", "generation": "0"} {
		l := m.Labels("p.")
		l["p."+label] = bad
		if got, ok := ReadMark("p.", l); ok {
			t.Errorf("%s %q is read as %+v", label, bad, got)
		}
	}
	if _, ok := ReadMark("q.", m.Labels("p.")); ok {
		t.Error("another adapter's labels are read")
	}
}
