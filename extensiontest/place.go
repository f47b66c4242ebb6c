package extensiontest

import (
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// places is what an extension with several hosts must do: it says where a sandbox goes before it
// is made, makes it there, and finds it again by what the broker knows, which is at least
// its ID.
func (s *suite) places(t *testing.T) {
	if !s.opened.Places() {
		if len(s.Hosts) > 0 {
			t.Fatal("the harness names hosts, and the extension is no Placer")
		}
		t.Skip("the extension is no Placer")
	}
	if len(s.Hosts) == 0 {
		t.Skip("the harness names no hosts")
	}
	if len(s.Hosts) < 2 || s.Away == nil {
		t.Fatal("the group place needs two hosts, and Away")
	}
	bare := func(t *testing.T) *backend.Backend {
		t.Helper()
		if s.Bare == nil {
			return s.open(t)
		}
		return s.wrap(t, s.Bare(t))
	}
	on := func(host string) func(*sandboxer.Spec) {
		return func(sp *sandboxer.Spec) { sp.Host, sp.Place = host, host }
	}
	bones := func(sp sandboxer.Spec) sandboxer.Handle {
		return sandboxer.Handle{SandboxID: sp.ID, Generation: sp.Generation}
	}
	at := func(sp sandboxer.Spec) sandboxer.Handle {
		h := bones(sp)
		h.Host = sp.Place
		return h
	}
	// unknown reports an error if a probe answers what it cannot know.
	unknown := func(t *testing.T, b *backend.Backend, h sandboxer.Handle, what string) {
		t.Helper()
		if !b.Can(sandboxer.CanProbe) {
			return
		}
		if l, err := b.IsAlive(ctx(t), h); l != sandboxer.Unknown && l != "" {
			t.Errorf("IsAlive of %s = %s, %v; want unknown", what, l, err)
		}
	}
	lives := func(t *testing.T, b *backend.Backend, h sandboxer.Handle) {
		t.Helper()
		if !b.Can(sandboxer.CanProbe) {
			return
		}
		if l, err := b.IsAlive(ctx(t), h); l != sandboxer.Alive || err != nil {
			t.Errorf("IsAlive(%+v) = %s, %v; want alive", h, l, err)
		}
	}
	// unavailable reports an error unless a teardown says that this host could not be asked.
	unavailable := func(t *testing.T, b *backend.Backend, h sandboxer.Handle, host, what string) {
		t.Helper()
		_, err := b.Teardown(ctx(t), h)
		wantKind(t, err, "Teardown of "+what, sandboxer.Unavailable)
		if err != nil && !strings.Contains(sandboxer.Message(err), host) {
			t.Errorf("Teardown of %s: %s; want %s to be named", what, describe(err), host)
		}
	}

	s.alone(t, "asked-for host is kept", func(t *testing.T) {
		b := s.opened
		for _, host := range s.Hosts {
			sp := s.spec()
			sp.Host, sp.Place = host, ""
			if got, err := b.Place(ctx(t), sp, nil); err != nil || got != host {
				t.Errorf("Place of what is asked for on %s = %q, %v", host, got, err)
			}
			if got, err := b.Place(ctx(t), sp, []string{host}); err == nil {
				t.Errorf("Place of what is asked for on %s, where it failed, = %q", host, got)
			} else {
				wantKind(t, err, "Place without the host that is asked for", sandboxer.Unavailable, sandboxer.Exhausted)
			}
		}
		sp := s.spec()
		sp.Host = "no-such-host.invalid"
		if got, err := b.Place(ctx(t), sp, nil); err == nil && got != sp.Host {
			t.Errorf("Place of what is asked for elsewhere = %q", got)
		}
	})

	s.alone(t, "place is where it is made", func(t *testing.T) {
		for _, host := range s.Hosts {
			sb := s.up(t, on(host))
			if sb.h.Host != host {
				t.Errorf("placed on %s, the handle says %s", host, sb.h.Host)
			}
			sb.alive(t)
			other := s.Hosts[0]
			if other == host {
				other = s.Hosts[1]
			}
			// It is there and nowhere else, as a process confirms that looks there only.
			b := bare(t)
			elsewhere := at(sb.spec)
			elsewhere.Host = other
			lives(t, b, at(sb.spec))
			if b.Can(sandboxer.CanProbe) {
				if l, err := b.IsAlive(ctx(t), elsewhere); l != sandboxer.Gone || err != nil {
					t.Errorf("IsAlive on %s of what was placed on %s = %s, %v; want gone", other, host, l, err)
				}
			}
			if _, err := b.Teardown(ctx(t), elsewhere); err != nil {
				t.Errorf("Teardown on %s of what is on %s: %s", other, host, describe(err))
			}
			sb.alive(t)
		}
	})

	s.alone(t, "place is one that did not fail", func(t *testing.T) {
		b := s.opened
		sp := s.spec()
		sp.Place = ""
		var avoid []string
		for range len(s.Hosts) + 1 {
			host, err := b.Place(ctx(t), sp, avoid)
			if err != nil {
				wantKind(t, err, "Place once no host is left", sandboxer.Unavailable, sandboxer.Exhausted)
				return
			}
			if slices.Contains(avoid, host) {
				t.Fatalf("Place = %s, which was to be avoided", host)
			}
			avoid = append(avoid, host)
		}
		t.Errorf("Place still knows a host after %q", avoid)
	})

	s.alone(t, "place changes nothing", func(t *testing.T) {
		b := s.opened
		sp := s.spec()
		s.owe(t, b, sp)
		if _, err := b.Place(ctx(t), sp, nil); err != nil {
			t.Fatalf("Place: %s", describe(err))
		}
		s.gone(t, b, sp)
	})

	s.alone(t, "a place that went away", func(t *testing.T) {
		b := s.opened
		sp := s.spec()
		on(s.Hosts[1])(&sp)
		s.owe(t, b, sp)
		back := s.away(t, s.Hosts[1])
		_, err := bare(t).Provision(ctx(t), sp)
		wantKind(t, err, "Provision on a host that is away", sandboxer.Unavailable)
		if !sandboxer.IsUntouched(err) {
			t.Errorf("Provision on a host that is away: %s; want it to say that nothing was done there", describe(err))
		}
		back()
		b = s.open(t)
		s.gone(t, b, sp)
		// A sandbox that could not be made there before can be made there now.
		sb := s.upSpec(t, b, sp)
		sb.alive(t)
	})

	s.alone(t, "found by ID and host", func(t *testing.T) {
		for _, host := range s.Hosts {
			sb := s.up(t, on(host))
			b := bare(t)
			lives(t, b, at(sb.spec))
			if r, err := b.WaitReady(ctx(t), at(sb.spec)); err != nil || r.RemoteDir != sb.reach.RemoteDir || r.Host != sb.reach.Host {
				t.Errorf("WaitReady by ID and host = %+v, %v; with the whole handle it was %+v", r, err, sb.reach)
			}
			if _, err := b.Teardown(ctx(t), at(sb.spec)); err != nil {
				t.Fatalf("Teardown: %s", describe(err))
			}
			s.gone(t, bare(t), sb.spec)
			s.gone(t, s.open(t), sb.spec)
		}
	})

	s.alone(t, "found by ID alone", func(t *testing.T) {
		for _, host := range s.Hosts {
			sb := s.up(t, on(host))
			b := bare(t)
			lives(t, b, bones(sb.spec))
			if b.Can(sandboxer.CanDiscover) {
				if f, err := b.Discover(ctx(t), sb.spec.ID); err != nil || f.Handle.Host != host {
					t.Errorf("Discover = %+v, %v; want it on %s", f.Handle, err, host)
				}
			}
			if _, err := b.Teardown(ctx(t), bones(sb.spec)); err != nil {
				t.Fatalf("Teardown: %s", describe(err))
			}
			s.gone(t, bare(t), sb.spec)
			s.gone(t, s.open(t), sb.spec)
			_, err := s.open(t).WaitReady(ctx(t), sb.h)
			wantKind(t, err, "WaitReady after Teardown", sandboxer.NotFound)
		}
	})

	s.alone(t, "its host is away", func(t *testing.T) {
		sb := s.up(t, on(s.Hosts[1]))
		back := s.away(t, s.Hosts[1])
		b := bare(t)
		unknown(t, b, bones(sb.spec), "what is on a host that is away")
		unknown(t, b, at(sb.spec), "what its handle says is on a host that is away")
		unavailable(t, b, bones(sb.spec), s.Hosts[1], "what is on a host that is away")
		unavailable(t, b, at(sb.spec), s.Hosts[1], "what its handle says is on a host that is away")
		back()
		sb.b = s.open(t)
		sb.alive(t)
		if _, err := bare(t).Teardown(ctx(t), bones(sb.spec)); err != nil {
			t.Errorf("Teardown once its host is back: %s", describe(err))
		}
		s.gone(t, s.open(t), sb.spec)
	})

	s.alone(t, "another host is away", func(t *testing.T) {
		named, unnamed := s.up(t, on(s.Hosts[0])), s.up(t, on(s.Hosts[0]))
		never := s.spec()
		back := s.away(t, s.Hosts[1])
		b := bare(t)
		// A handle that names a host concerns that host alone.
		lives(t, b, at(named.spec))
		if _, err := b.Teardown(ctx(t), at(named.spec)); err != nil {
			t.Errorf("Teardown of what is on %s, while %s is away: %s", s.Hosts[0], s.Hosts[1], describe(err))
		}
		lives(t, b, bones(unnamed.spec))
		unavailable(t, b, bones(unnamed.spec), s.Hosts[1], "what may be on a host that is away, too")
		unknown(t, b, bones(unnamed.spec), "what was removed where it was, and may be on a host that is away")
		unknown(t, b, bones(never), "what may be on a host that is away")
		unavailable(t, b, bones(never), s.Hosts[1], "what may be on a host that is away")
		back()
		b = bare(t)
		for _, sp := range []sandboxer.Spec{named.spec, unnamed.spec, never} {
			if _, err := b.Teardown(ctx(t), bones(sp)); err != nil {
				t.Errorf("Teardown once all hosts are there: %s", describe(err))
			}
			s.gone(t, s.open(t), sp)
		}
	})
}

// away makes a host unreachable until back is called, or the test ends.
func (s *suite) away(t *testing.T, host string) (back func()) {
	t.Helper()
	f := s.Away(t, host)
	done := false
	back = func() {
		if !done {
			done = true
			f()
		}
	}
	t.Cleanup(back)
	return back
}
