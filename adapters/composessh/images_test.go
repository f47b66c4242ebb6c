package composessh

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/composessh/composefile"
)

// TestLayers: the layers of a build are identified by a label, serve the next build of the same
// tenant, outlive sandboxes within their bounds, and nothing else stays.
func TestLayers(t *testing.T) {
	for name, compose := range map[string]string{"docker": current(t), "podman": "podman-compose"} {
		t.Run(name, func(t *testing.T) {
			onlyLong(t, compose)
			t.Parallel()
			r := newRig(t, compose, 1)
			e := r.opened(t, "layers-"+name)
			dir := repo(t, "services:\n  main: {build: ., command: [sleep, \"86400\"]}\n  same: {build: ., command: [sleep, \"86400\"]}\n  other: {build: {context: ., target: one}, command: [sleep, \"86400\"]}\n", nil)
			change := func(two, three string) {
				t.Helper()
				if err := os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte("FROM "+image+" AS one\nRUN cat /proc/sys/kernel/random/uuid >/one\n"+
					"FROM "+image+" AS two\nRUN cat /proc/sys/kernel/random/uuid >/two # "+two+"\n"+
					"FROM "+image+"\nCOPY --from=one /one /\nCOPY --from=two /two /\nRUN "+three+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			n := 0
			// life is that of a sandbox; it returns what each stage made.
			life := func(tenant string) string {
				t.Helper()
				n++
				s := order(fmt.Sprintf("life-%d", n), dir)
				s.Tenant = tenant
				h, _ := provision(t, e, s)
				got := run(t, e, h, "cat /one /two /three 2>/dev/null || :")
				same := &strings.Builder{}
				if _, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"cat", "/one"}, Service: "same", Stdout: same}); err != nil || !strings.HasPrefix(got, same.String()) {
					t.Errorf("what two services say alike was built twice: %q and %q, %v", got, same, err)
				}
				if _, err := e.Teardown(t.Context(), h); err != nil {
					t.Fatal(err)
				}
				return got
			}
			kept := func() []string {
				t.Helper()
				var out []string
				filter := "label=dev.sandboxer.owner=layers-" + name
				for _, id := range strings.Fields(r.engine(t, r.engines[0], "images", "-q", "--no-trunc", "--filter", "dangling=true", "--filter", filter)) {
					out = append(out, r.engine(t, r.engines[0], "inspect", "--type", "image", "--format", `{{index .Config.Labels "dev.sandboxer.cache"}}`, id))
				}
				slices.Sort(out)
				return out
			}

			change("a", "cat /proc/sys/kernel/random/uuid >/three")
			first := life("")
			if again := life(""); again != first || strings.Count(first, "\n") != 2 {
				t.Errorf("it was built from nothing again: %q, then %q", first, again)
			}
			if theirs := life("another"); slices.ContainsFunc(strings.Fields(theirs), func(s string) bool { return strings.Contains(first, s) }) {
				t.Errorf("another tenant has what the first one built: %q and %q", first, theirs)
			}
			for i := range 2 {
				change(fmt.Sprint(i), "cat /proc/sys/kernel/random/uuid >/three")
				if got := life(""); got == first || !strings.HasPrefix(got, strings.Fields(first)[0]) {
					t.Errorf("once its second stage changed it has %q, after %q", got, first)
				}
			}
			change("a", "false")
			s := order("fails", dir)
			teardown(t, e, s.ID)
			_, err := e.put(t.Context(), s)
			kind(t, err, sandboxer.Failed, "building main")
			if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: s.ID}); err != nil {
				t.Fatal(err)
			}
			got := kept()
			for i := 2; i < len(got); i++ {
				if got[i] == got[i-2] {
					t.Errorf("there are more than two of %s: %q", got[i], got)
				}
			}
			if len(got) == 0 || slices.Contains(got, "") {
				t.Errorf("kept are %q", got)
			}
			if name == "docker" {
				// What another test builds at this moment has its label when it is done.
				unlabelled := func() string {
					labelled := strings.Fields(r.engine(t, r.engines[0], "images", "-q", "--no-trunc", "--filter", "dangling=true", "--filter", "label=dev.sandboxer.cache"))
					all := strings.Fields(r.engine(t, r.engines[0], "images", "-q", "--no-trunc", "--filter", "dangling=true"))
					return strings.Join(slices.DeleteFunc(all, func(id string) bool { return slices.Contains(labelled, id) }), " ")
				}
				eventually(t, "images that have no label", "", unlabelled)
			}
			caches, err := e.Caches(t.Context(), "")
			if err != nil || !slices.ContainsFunc(caches, func(c sandboxer.Cache) bool {
				return c.Host == "host-1" && c.Tenant == "another" && c.Name == filepath.Base(dir)+"/main" && c.Bytes > 0 && time.Since(c.UsedAt) < time.Hour && c.Problem == ""
			}) {
				t.Errorf("Caches = %+v, %v", caches, err)
			}
			if none, err := e.PruneCaches(t.Context(), "nowhere"); err != nil || len(none) > 0 {
				t.Errorf("PruneCaches of another host = %+v, %v", none, err)
			}
			if gone, err := e.PruneCaches(t.Context(), "host-1"); err != nil || !slices.Equal(gone, caches) || len(kept()) > 0 {
				t.Errorf("PruneCaches = %+v, %v; left are %q", gone, err, kept())
			}
			e.cfg.BuildCache = 0
			change("z", "true")
			life("")
			if got := kept(); len(got) > 0 {
				t.Errorf("nothing is to be kept, and there are %q", got)
			}
		})
	}
}

// TestSurplus: the newest of a stage stay, and of a tenant what was used last.
func TestSurplus(t *testing.T) {
	at := func(n int) time.Time { return time.Unix(int64(n), 0) }
	all := []layer{
		{"old", "t1.a.0", 10, at(1)}, {"new", "t1.a.0", 10, at(3)}, {"mid", "t1.a.0", 10, at(2)},
		{"big", "t1.b.0", 80, at(9)}, {"rare", "t1.c.0", 10, at(9)}, {"theirs", "t2.a.0", 100, at(1)}, {"unknown", "t2.x.0", 1, at(9)},
	}
	used := map[string]use{"t1.a": {at: at(100)}, "t1.b": {at: at(90)}, "t1.c": {at: at(80)}, "t2.a": {at: at(1)}}
	for limit, want := range map[int64]string{1000: "[old]", 100: "[old rare unknown]", 90: "[big old theirs]", 0: "[big mid new old rare theirs unknown]"} {
		var got []string
		for _, l := range surplus(all, used, limit) {
			got = append(got, l.id)
		}
		slices.Sort(got)
		if s := fmt.Sprint(got); s != want {
			t.Errorf("beyond %d: %s; want %s", limit, s, want)
		}
	}
}

// TestBuildNetwork: builds have a network where the profile gives one, or the operator does to
// builds alone; what they leave is apart then.
func TestBuildNetwork(t *testing.T) {
	r := newRig(t, "docker-compose", 0)
	dir := repo(t, "services: {main: {build: .}}\n", map[string]string{"Dockerfile": "FROM x\n"})
	caches := map[bool]string{}
	for _, c := range []struct {
		mode        sandboxer.NetworkMode
		leave, want bool
	}{{"", false, false}, {sandboxer.NetworkNone, false, false}, {"", true, true}, {sandboxer.NetworkPublic, false, true}} {
		r.cfg.UnfilteredEgress, r.cfg.BuildNetwork = true, c.leave
		e := r.opened(t, "build")
		s := order("build", dir)
		s.Network.Mode = c.mode
		p, err := e.plan(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		j := p.jobs()[0]
		args, _ := e.buildArgs(&host{known: &known{engine: "docker"}}, p, j)
		if got := !strings.Contains(strings.Join(args, " "), " --network none "); got != c.want {
			t.Errorf("mode %q, with the operator's leave %t: a network is %t; want %t", c.mode, c.leave, got, c.want)
		}
		if caches[c.want] == "" {
			caches[c.want] = p.cache(j)
		}
		if caches[true] == caches[false] || caches[c.want] != p.cache(j) {
			t.Errorf("mode %q: layers are kept as %s, of %v", c.mode, p.cache(j), caches)
		}
	}
}

// TestAsWritten: lines of a Dockerfile are those of the file that somebody wrote.
func TestAsWritten(t *testing.T) {
	e := &extension{}
	h := &host{known: &known{}}
	p := &plan{project: &composefile.Project{Builds: []composefile.Build{{Service: "main", Dockerfile: []byte("FROM a\nRUN x\nFROM b\nRUM y\n")}}}}
	for said, want := range map[string]string{
		"dockerfile parse error line 6: unknown instruction: RUM":           "dockerfile parse error line 4: unknown instruction: RUM",
		"Error response: Dockerfile parse error on line 1: no such":         "Error response: Dockerfile parse error on line 1: no such",
		"dockerfile parse error line 99999999999999999999: beyond anything": "dockerfile parse error line 9223372036854775805: beyond anything",
		"line 6 of something else":                                          "line 6 of something else",
	} {
		if got := e.asWritten(h, p, said); got != want {
			t.Errorf("%q; want %q", got, want)
		}
	}
}
