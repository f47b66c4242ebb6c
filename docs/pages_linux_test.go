package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var both = []string{"root", "dev"}

// yes is the answer to whether a host's key is right.
var yes = []typed{{when: `\[y/N\] `, text: "y\n"}}

// shell is a look at how a shell takes wide characters, and the way out of it.
var shell = []typed{{when: `[#$] `, text: "x=漢字; echo \"=${#x} $COLORTERM $LC_TIME=\"\n"}, {when: `=2 truecolor de_DE=`, text: "exit\n"}}

// cloud is another extension, and its profile.
const cloud = `mkdir -p $config/extensions $config/profiles
printf 'id: ext.cloud\nhandler: local\ncapabilities: {isolation_levels: [gvisor], pricing_model: self-hosted}\n' >$config/extensions/ext.cloud.yaml
printf 'id: profile.cloud\nextension: ext.cloud\n' >$config/profiles/profile.cloud.yaml`

// benchRun gives the first run of bench the ID that the page has.
const benchRun = `(cd $data/bench; first=$(ls | grep -v x7k2 | head -n1); id=${first%.*}; sed "s/$id/20261121-150405123-x7k2/" $first >${first/$id/20261121-150405123-x7k2})`

// pages are those with commands. What a reader has beforehand is in setup.
var pages = []page{
	{
		name: "README.md", users: both, dir: "checkout",
		typing:   map[string][]typed{"sandboxer shell": shell},
		rootOnly: []string{"make build", "/run/sandboxer/api.sock"},
	},
	{name: "docs/start/install.md", users: both, dir: "checkout", rootOnly: []string{"make build"}},
	{name: "docs/start/first-sandbox.md", users: both, dir: "project", typing: map[string][]typed{"sandboxer shell": shell}, after: "rm -rf result"},
	{
		name: "docs/reference/cli.md", users: both, dir: "project",
		typing:   map[string][]typed{"sandboxer shell": shell},
		before:   map[string]string{"sandboxer get build": "sandboxer down"},
		code:     map[string]int{"sandboxer get build": 8},
		rootOnly: []string{"sandboxer get build"},
	},
	{name: "docs/reference/local.md", users: both, dir: "project"},
	{name: "docs/reference/images.md", users: both, dir: "project"},
	{name: "docs/how-to/copy-files.md", users: both, dir: "project", after: "rm -rf result out"},
	{name: "docs/how-to/troubleshooting.md", users: both, dir: "project", setup: "sandboxer up"},
	{name: "docs/how-to/upgrade.md", users: both, dir: "project", setup: "sandboxer up"},
	{
		name: "docs/how-to/ports.md", users: both, dir: "project",
		setup:  "sandboxer create --name 7k2mq0xa; sandboxer exec 7k2mq0xa -- busybox httpd -p 8080 -h /workspace",
		before: map[string]string{"sandboxer serve": "sandboxer down"},
		typing: map[string][]typed{"sandboxer serve": {{when: `listening|serving`, text: interrupt}}},
	},
	{
		name: "docs/how-to/quotas.md", users: []string{"dev"}, dir: "project",
		setup: "mkdir -p $config; cp $PAGE/1.yaml $config/quotas.yaml; sandboxer up",
	},
	{name: "docs/how-to/bring-your-own-key.md", users: []string{"dev"}, dir: "project", setup: "sandboxer up"},
	{name: "docs/how-to/limit-egress.md", users: both, dir: "project", setup: "sandboxer create --profile local-public --name 7k2mq0xa"},
	{name: "docs/how-to/snapshot-and-fork.md", users: both, dir: "project", setup: "sandboxer create --name box"},
	{
		name: "docs/how-to/burst-to-a-cloud.md", users: []string{"dev"}, dir: "project",
		setup: "mkdir -p $config/extensions; cp $PAGE/1.yaml $config/extensions/ext.local.yaml",
	},
	{name: "docs/how-to/routing.md", users: both, dir: "project"},
	{
		name: "docs/how-to/payments.md", users: []string{"root"}, dir: "project",
		setup: "mkdir -p $config; sed -e '/fin-hub/,/keys/d' $PAGE/1.yaml >$config/sinks.yaml; sandboxer up; sandboxer destroy $(sandboxer create -q)",
		after: "sandboxer credits sink show books; rm $config/sinks.yaml; sandboxer reload",
	},
	{
		name: "docs/how-to/pool.md", users: both, dir: "project",
		setup: "mkdir -p $config/profiles; cp $PAGE/1.yaml $config/profiles/",
	},
	{
		name: "docs/how-to/write-a-profile.md", users: []string{"dev"}, dir: "project",
		setup: "mkdir -p profiles; cp $PAGE/1.yaml profiles/profile.web.yaml",
		code:  map[string]int{"profile validate profiles": 2},
		after: "rm -r profiles",
	},
	{
		name: "docs/how-to/back-up-and-restore.md", users: []string{"root"}, dir: "project",
		setup:  "sandboxer up",
		before: map[string]string{"sandboxer up": "sandboxer down; head -c 4096 /dev/zero >/var/lib/sandboxer/sandboxer.db"},
		code:   map[string]int{"sandboxer up": 8},
		after:  "rm -f sandboxer-copy.db; sandboxer backup restore; sandboxer up; sandboxer accept",
	},
	{
		name: "docs/reference/api.md", users: []string{"dev"}, dir: "project",
		setup:  "sandboxer create --name build",
		typing: map[string][]typed{"curl -N": {{when: `data: \{`, text: interrupt}}},
		code:   map[string]int{"curl -N": 130},
	},
	{
		name: "docs/design/bench-command.md", users: []string{"root"}, dir: "project",
		setup:  cloud,
		before: map[string]string{"bench compare": benchRun},
	},
	{
		name: "docs/how-to/ssh-hosts.md", users: both, dir: "project", engine: true,
		typing: map[string][]typed{"host add": yes},
	},
	{
		name: "docs/how-to/compose-on-ssh-hosts.md", users: []string{"dev"}, dir: "project", engine: true,
		typing: map[string][]typed{"host add": yes},
	},
	{name: "docs/how-to/deer-flow.md", users: []string{"root"}, dir: "project", setup: "sandboxer up"},
	{name: "docs/how-to/docker-and-podman.md", users: []string{"root"}, dir: "project", engine: true},
	{name: "docs/reference/docker.md", users: []string{"root"}, dir: "project", engine: true},
	{
		name: "docs/reference/remote.md", users: []string{"root"}, dir: "project",
		setup: "mkdir -p $config/extensions; cp $PAGE/1.yaml $config/extensions/ext.remote.yaml; busybox httpd -p 127.0.0.1:8090 -h .",
	},
	{name: "docs/reference/saas-stub.md", users: []string{"dev"}, dir: "project"},
	{name: "docs/how-to/write-an-extension.md", users: []string{"dev"}, dir: "project"},
	{
		name: "docs/how-to/migrate-from-python-sand-boxer.md", users: []string{"dev"}, dir: "project",
		setup: `(mkdir -p sand-boxer/src/sandboxer/extensions sand-boxer/extensions sand-boxer/profiles && cd sand-boxer && cp $PAGE/1.yaml extensions/ext.my-backend.yaml &&
printf 'id: profile.my-backend\nextension: ext.my-backend\n' >profiles/profile.my-backend.yaml && cat >src/sandboxer/extensions/my_backend.py) <<'end'
from sandboxer.extensions.base import SandboxExtension

class MyExtension(SandboxExtension):
    def provision(self, profile, inputs, host):
        return {"sandbox_id": self.new_sandbox_id(inputs), "host": host, "key": self.config["key"]}
    def wait_ready(self, handle):
        return {"host": handle["host"], "key": handle["key"]}
    def teardown(self, handle):
        return {}
end`,
	},
	{
		name: "docs/how-to/migrate-from-make-e2e.md", users: []string{"root"}, dir: "project", engine: true,
		setup:  "mkdir -p scripts; cp ~/sandboxer/scripts/make-e2e.sh scripts/; cat $PAGE/1.make >>Makefile",
		typing: map[string][]typed{"host add": yes},
	},
	{
		name: "docs/how-to/virtual-machines.md", users: both, dir: "project",
		setup: "sandboxer host add haskell-build build@vm.example --yes",
	},
	{
		name: "docs/how-to/vm-haskell-build.md", users: both, dir: "project",
		typing: map[string][]typed{"host add": yes},
		after:  "cat out/README",
	},
	{
		name: "help bench", users: []string{"root"}, dir: "project",
		setup:  cloud,
		before: map[string]string{"bench compare": benchRun},
	},
	{name: "help cp", users: both, dir: "project", setup: "sandboxer create --name 7k2m; sandboxer exec 7k2m -- sh -c 'mkdir -p /var/log; echo a line >/var/log/app.log'"},
	{name: "help create", users: both, dir: "project"},
	{name: "help extension new", users: []string{"dev"}, dir: "project", setup: "rm -rf my-backend"}, // which the guide made
	{name: "help extension test", users: []string{"dev"}, dir: "project", setup: "sandboxer extension new my-backend"},
	{name: "help exec", users: both, dir: "project", setup: "sandboxer create --input repo=. --name 7k2m"},
	{name: "help run", users: both, dir: "project"},
	{name: "help network set", users: both, dir: "project", setup: "sandboxer create --profile local-public --name 7k2mq0xa"},
	{name: "help extend", users: both, dir: "project", setup: "sandboxer create --name 7k2m"},
	{name: "help up", users: both, dir: "project", before: map[string]string{"--listen": "sandboxer down"}},
}

// onMachine is the test on the machine of its own.
func onMachine(t *testing.T) {
	makeMachine(t)
	checkout, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	users := map[string]user{}
	for _, u := range []user{{name: "root", home: "/root"}, {name: "dev", home: "/home/dev", runtime: "/run/user/7001"}} {
		u.env = []string{"HOME=" + u.home, "USER=" + u.name, "LOGNAME=" + u.name, "TERM=xterm", "LANG=C.UTF-8", "COLORTERM=truecolor", "LC_TIME=de_DE", "SHELL=/bin/bash",
			"PATH=" + u.home + "/sandboxer/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:" + os.Getenv("GOROOT") + "/bin",
			"GOCACHE=" + os.Getenv("GOCACHE"), "GOMODCACHE=" + os.Getenv("GOMODCACHE"), "GOPROXY=off", "GOTOOLCHAIN=local", "GOFLAGS=-mod=readonly"}
		if u.runtime != "" {
			u.env = append(u.env, "XDG_RUNTIME_DIR="+u.runtime, "config="+u.home+"/.config/sandboxer", "data="+u.home+"/.local/share/sandboxer")
		} else {
			u.env = append(u.env, "config=/etc/sandboxer", "data=/var/lib/sandboxer")
		}
		users[u.name] = u
	}
	sh(t, `
cd "$1"
for home in /root /home/dev; do
	rm -rf $home/sandboxer $home/project
	mkdir -p $home/sandboxer $home/project
	git -c safe.directory='*' ls-files -co --exclude-standard -z | tar c --null -T - --ignore-failed-read 2>/dev/null | tar x -C $home/sandboxer
	cp -r docs/testdata/project/. $home/project/
done
mkdir -p /src/app
cp -r docs/testdata/project/. /src/app/
`, checkout)
	build := newTerminal(t, users["root"], "/root/sandboxer")
	build.do(t, "make build")
	sh(t, "cp -r /root/sandboxer/bin /home/dev/sandboxer/; chown -R dev:dev /home/dev /src/app")

	only := os.Getenv("SANDBOXER_DOCS_PAGE")
	typed, left, engine := 0, 0, false
	seen := map[string]bool{}
	examples := map[string]string{}
	helpExamples(t, "", examples)
	for _, p := range pages {
		seen[p.name] = true
		if only != "" && !slices.Contains(strings.Split(only, ","), p.name) {
			continue
		}
		if p.engine && !engine {
			serveDocker(t)
			engine = true
		}
		var list []block
		if help, ok := strings.CutPrefix(p.name, "help "); ok {
			list = []block{{lang: "sh", text: examples[help]}}
		} else {
			list = blocks(read(t, filepath.Join("..", p.name)))
		}
		for _, name := range p.users {
			u := users[name]
			if !t.Run(p.name+" as "+name, func(t *testing.T) {
				typed += typePage(t, p, list, u, filepath.Join(u.home, map[string]string{"checkout": "sandboxer", "project": "project"}[p.dir]))
			}) {
				t.Logf("%s as %s failed", p.name, name)
			}
		}
	}
	// Whatever the table does not know was not typed.
	for name := range examples {
		if !seen["help "+name] {
			t.Errorf("nothing types the examples of sandboxer help %s: add it to the table", name)
		}
	}
	above, err := filepath.Glob("../*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append(above, markdown(t)...) {
		rel := filepath.Join("docs", name)
		for _, b := range blocks(read(t, name)) {
			switch {
			case b.reason != "":
				left++
				t.Logf("%s:%d is not typed: %s", rel, b.line, b.reason)
			case b.lang == "":
				t.Errorf("%s:%d: the block does not say its language", rel, b.line)
			case b.lang != "sh" && b.lang != "console":
				if promptLine.MatchString(b.text) && !slices.Contains([]string{"yaml", "json", "go"}, b.lang) {
					t.Errorf("%s:%d: there are commands in a block of %s", rel, b.line, b.lang)
				}
			case !seen[rel]:
				t.Errorf("%s:%d: nothing types the commands of this page: add it to the table, or say <!-- not typed: REASON -->", rel, b.line)
			}
		}
	}
	t.Logf("%d commands typed; %d blocks are not, for the reasons above", typed, left)
}

var listed = regexp.MustCompile(`(?m)^  ([a-z]+)  +[A-Z]`)

// helpExamples collects the examples of a command's help text, and of those below it.
func helpExamples(t *testing.T, name string, all map[string]string) {
	t.Helper()
	text := sh(t, `/root/sandboxer/bin/sandboxer help $1`, name)
	if _, rest, ok := strings.Cut(text, "\nExamples:\n"); ok {
		rest, _, _ = strings.Cut(rest, "\n\n")
		all[name] = rest
	}
	text, _, _ = strings.Cut(text, "\nFlags:\n")
	for _, m := range listed.FindAllStringSubmatch(text, -1) {
		if below := strings.TrimSpace(name + " " + m[1]); m[1] != "help" && all[below] == "" {
			helpExamples(t, below, all)
		}
	}
}

var promptLine = regexp.MustCompile(`(?m)^(\$ |sandboxer )`)

// TestRules: what of a page is typed, and what is taken for the same.
func TestRules(t *testing.T) {
	page := "text\n\n```console\n$ echo a\na\n$ for x in 1; do\n  echo $x\ndone\n1\n```\n\n<!-- not typed: because -->\n```sh\nrm \\\n  -r /\n```\n"
	list := blocks(page)
	if len(list) != 2 || list[0].lang != "console" || list[0].line != 3 || list[0].reason != "" || list[1].reason != "because" {
		t.Fatalf("%+v", list)
	}
	var got []string
	for _, b := range list {
		for _, c := range commands(b) {
			shown := "-"
			if c.shown != nil {
				shown = *c.shown
			}
			got = append(got, c.text+" => "+shown)
		}
	}
	if want := []string{"echo a => a\n", "for x in 1; do\n  echo $x\ndone => 1\n", "rm \\\n  -r / => -"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	for _, c := range []struct {
		page, terminal string
		same           bool
	}{
		{"ready in 1.7s · expires 20:12", "\r  creating\r\x1b[Kready in 12.0s · expires 07:01\r\n", true},
		{"total 1.8s", "total 1.8", false},
		{"14", "15", false},
		{"a\nb", "a", false},
		{"a", "a\nb", false},
		{"a\n…\nd", "a\nb\nc\nd", true},
		{"a\n…", "a", true},
		{"the key SHA256:…. Right?", "the key SHA256:abc. Right?", true},
		{"id 7k2mq0xa", "id x9y8z7w6", true},
		{"8.0GiB (free)", "12GiB (free)", true},
		{"8.0GiB (free)", "12GiB free", false},
	} {
		if err := sameScreen(screen(c.terminal), c.page); (err == nil) != c.same {
			t.Errorf("%q and %q: %v", c.page, c.terminal, err)
		}
	}
}
