package vmpacker

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/subprocess"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// Packer says how to build an image. It uses the installed Packer, from version 1.6 on.
type Packer struct {
	Template  string                      `yaml:"template" json:"template,omitempty" required:"true" format:"abspath" help:"The template: a file, or a directory of HCL files. It is built in an empty directory, so it names files of its own by path.root or template_dir."`
	Variables map[string]string           `yaml:"variables" json:"variables,omitempty" text:"any" help:"Variables of the template."`
	Secrets   map[string]sandboxer.Secret `yaml:"secrets" json:"secrets,omitempty" help:"Variables with secret values."`
	Base      string                      `yaml:"base" json:"base,omitempty" format:"abspath" help:"A file that the build starts from: when it changes, the image is built again."`
	Timeout   time.Duration               `yaml:"timeout" json:"timeout,omitempty" help:"Maximum duration of a build; 1h if left out."`
}

// builds are those in progress in this process, by key.
type builds struct {
	mu  sync.Mutex
	all map[string]*build
}

// A build is shared by all callers that wait for the same image. It ends with the last of
// them.
type build struct {
	done    chan struct{}
	cancel  context.CancelFunc
	waiters int
	disk    string
	err     error

	mu   sync.Mutex
	step sandboxer.Progress
}

func (b *build) report(p sandboxer.Progress) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.step = p
}

// buildMark is in the environment of all processes of a build.
const buildMark = "SANDBOXER_BUILD"

// An artefact is the record of an image that Packer built.
type artefact struct {
	Key      string    `json:"key"`
	Image    string    `json:"image"`
	Template string    `json:"template"`
	Packer   string    `json:"packer"` // its version
	BuiltAt  time.Time `json:"built_at"`
	Took     float64   `json:"took"` // seconds
	SHA256   string    `json:"sha256"`
	Bytes    int64     `json:"bytes"`
	Log      string    `json:"log"`
}

// image returns the disk image of that name, and builds it if it is missing.
func (e *extension) image(ctx context.Context, name string) (string, error) {
	img := e.cfg.Images[name]
	if img.Packer == nil {
		if _, err := os.Stat(img.File); err != nil {
			return "", sandboxer.E(sandboxer.Unavailable, err, "the file of image %s cannot be read", name).WithHint("put the image in place, or let Packer build it")
		}
		return img.File, nil
	}
	key, err := img.Packer.key()
	if err != nil {
		return "", sandboxer.E(sandboxer.Unavailable, err, "what image %s is built from cannot be read", name)
	}
	for {
		disk := e.dir("image", key+".qcow2")
		if _, err := os.Stat(e.dir("image", key+".json")); err == nil {
			return disk, nil
		}
		disk, err := e.shared(ctx, name, key, img.Packer)
		if sandboxer.KindOf(err) == sandboxer.Canceled && ctx.Err() == nil {
			continue // other callers cancelled it
		}
		return disk, err
	}
}

// key is computed from what an image is built from: template, variables and base.
func (p *Packer) key() (string, error) {
	h := sha256.New()
	add := func(label string, size int64, r io.Reader) error {
		fmt.Fprintf(h, "%q %d\n", label, size)
		_, err := io.Copy(h, r)
		return err
	}
	file := func(label, name string) error {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		fi, err := f.Stat()
		if err != nil {
			return err
		}
		return add(label, fi.Size(), f)
	}
	fi, err := os.Stat(p.Template)
	if err != nil {
		return "", err
	}
	if fi.IsDir() {
		err = filepath.WalkDir(p.Template, func(name string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			rel, err := filepath.Rel(p.Template, name)
			if err != nil {
				return err
			}
			return file(rel, name)
		})
	} else {
		err = file("template", p.Template)
	}
	if err == nil && p.Base != "" {
		err = file("base", p.Base)
	}
	if err != nil {
		return "", err
	}
	all := p.values()
	for _, k := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(h, "%q=%q\n", k, all[k])
	}
	return hex.EncodeToString(h.Sum(nil))[:32], nil
}

func (p *Packer) values() map[string]string {
	all := maps.Clone(p.Variables)
	if all == nil {
		all = map[string]string{}
	}
	for k, v := range p.Secrets {
		all[k] = v.Reveal()
	}
	return all
}

// shared waits for the build of an image, and starts it if no other call has.
func (e *extension) shared(ctx context.Context, name, key string, p *Packer) (string, error) {
	e.packs.mu.Lock()
	b := e.packs.all[key]
	if b == nil {
		c, cancel := context.WithTimeout(context.WithoutCancel(ctx), cmp.Or(p.Timeout, time.Hour))
		b = &build{done: make(chan struct{}), cancel: cancel}
		if e.packs.all == nil {
			e.packs.all = map[string]*build{}
		}
		e.packs.all[key] = b
		go func() {
			// Its context is not the callers': those that wait report its progress
			// themselves.
			b.disk, b.err = e.build(sandboxer.WithProgress(c, b.report), name, key, p)
			if b.err == nil {
				e.collect(c)
			}
			cancel()
			e.packs.mu.Lock()
			if e.packs.all[key] == b {
				delete(e.packs.all, key)
			}
			e.packs.mu.Unlock()
			close(b.done)
		}()
	}
	b.waiters++
	e.packs.mu.Unlock()
	for {
		select {
		case <-b.done:
			return b.disk, b.err
		case <-ctx.Done():
			e.packs.mu.Lock()
			b.waiters--
			last := b.waiters == 0
			if last && e.packs.all[key] == b {
				delete(e.packs.all, key) // the next call starts a new build
			}
			e.packs.mu.Unlock()
			if last {
				b.cancel()
				<-b.done // including Packer's own cleanup
			}
			return "", ctx.Err()
		case <-time.After(200 * time.Millisecond):
			b.mu.Lock()
			step := b.step
			b.mu.Unlock()
			if step.Step != "" {
				sandboxer.ReportProgress(ctx, step)
			}
		}
	}
}

// build runs Packer, unless another process has done so meanwhile.
func (e *extension) build(ctx context.Context, name, key string, p *Packer) (string, error) {
	unlock, err := e.env.Notes.Lock(ctx, "image."+key)
	if err != nil {
		return "", err
	}
	defer unlock()
	disk, record := e.dir("image", key+".qcow2"), e.dir("image", key+".json")
	if _, err := os.Stat(record); err == nil {
		return disk, nil
	}
	// The process that built it before has died, or we would not have the lock.
	mark := buildMark + "=" + e.env.Owner + "/" + key
	find := func() ([]int, error) { return procs.WithEnv(mark) }
	if err := endAll(ctx, find); err != nil {
		return "", err
	}
	work := e.dir("image", key+".work")
	sum := sha256.Sum256([]byte(work))
	if err := errors.Join(os.RemoveAll(work), os.MkdirAll(filepath.Join(work, "out"), 0o700)); err != nil {
		return "", sandboxer.E(sandboxer.Unavailable, err, "the directory to build image %s in cannot be made", name)
	}
	defer os.RemoveAll(work)
	// Packer's plugins listen on sockets there, whose names must be short; a name that can
	// be computed again is cleared by the next build if this one dies.
	tmp := filepath.Join(os.TempDir(), "sandboxer-packer-"+hex.EncodeToString(sum[:6]))
	if err := errors.Join(os.RemoveAll(tmp), os.Mkdir(tmp, 0o700)); err != nil {
		return "", sandboxer.E(sandboxer.Unavailable, err, "the directory to build image %s in cannot be made", name)
	}
	defer os.RemoveAll(tmp)
	program := cmp.Or(os.Getenv("SANDBOXER_PACKER_CMD"), "packer")
	if _, err := exec.LookPath(program); err != nil {
		return "", sandboxer.E(sandboxer.Unavailable, err, "image %s has to be built, and there is no %s on this machine", name, program).
			WithHint("install Packer, or set SANDBOXER_PACKER_CMD to where it is")
	}
	values, err := json.Marshal(p.values())
	if err != nil {
		return "", err
	}
	vars := filepath.Join(work, "vars.json")
	if err := os.WriteFile(vars, values, 0o600); err != nil {
		return "", err
	}
	env := append(subprocess.Environ(subprocess.Packer), mark, "CHECKPOINT_DISABLE=1", "PACKER_NO_COLOR=1", "PACKER_CACHE_DIR="+filepath.Join(work, "cache"), "TMPDIR="+tmp)
	over, err := inherited(mark)
	if err != nil {
		return "", sandboxer.E(sandboxer.Unavailable, err, "the build of image %s cannot be watched over", name)
	}
	defer over()
	log := e.dir("image", key+".log")
	began := time.Now()
	run := func(hear func(line string), args ...string) error {
		return packer(ctx, filepath.Join(work, "out"), env, log, hear, find, program, args...)
	}
	if err := os.WriteFile(log, nil, 0o600); err != nil {
		return "", err
	}
	version := ""
	if err := run(func(l string) {
		if m := packerVersion.FindString(l); m != "" && version == "" {
			version = strings.TrimPrefix(m, "v")
		}
	}, "version"); err != nil {
		return "", e.buildFailed(ctx, name, log, "", err)
	}
	if old(version) {
		return "", sandboxer.E(sandboxer.Unavailable, nil, "image %s needs Packer 1.6 or newer, and %s is %s", name, program, cmp.Or(version, "of no version that it tells"))
	}
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "checking the template of image " + name})
	var wrong string
	note := func(l string) {
		if f := strings.SplitN(l, ",", 4); len(f) == 4 && f[2] == "ui" {
			if kind, text, _ := strings.Cut(f[3], ","); kind == "error" && wrong == "" {
				wrong = unescape(text)
			}
		}
	}
	if err := run(note, "validate", "-machine-readable", "-var-file="+vars, p.Template); err != nil {
		return "", e.buildFailed(ctx, name, log, wrong, err)
	}
	wrong = ""
	var files []string
	lines := int64(0)
	err = run(func(l string) {
		note(l)
		lines++
		// timestamp,target,type,data…
		f := strings.Split(l, ",")
		switch {
		case len(f) >= 5 && f[2] == "ui" && (f[3] == "say" || f[3] == "message"):
			if text := strings.TrimSpace(unescape(strings.Join(f[4:], ","))); text != "" {
				sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "packer: " + shorten(text), Done: lines})
			}
		case len(f) >= 7 && f[2] == "artifact" && f[4] == "file":
			files = append(files, unescape(strings.Join(f[6:], ",")))
		}
	}, "build", "-machine-readable", "-timestamp-ui", "-color=false", "-on-error=cleanup", "-var-file="+vars, p.Template)
	if err != nil {
		return "", e.buildFailed(ctx, name, log, wrong, err)
	}
	found, err := e.diskAmong(ctx, filepath.Join(work, "out"), files)
	if err != nil {
		return "", sandboxer.E(sandboxer.Failed, err, "the template of image %s built no disk that can be used: %v", name, err).WithHint("look at %s", log)
	}
	// A disk of its own, whatever it was based on, that is not written to again.
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "keeping image " + name, Done: lines + 1})
	made := disk + ".new"
	if err := e.tool(ctx, "qemu-img", "convert", "-O", "qcow2", found, made); err != nil {
		os.Remove(made)
		return "", sandboxer.E(sandboxer.Unavailable, err, "image %s cannot be kept", name)
	}
	a := artefact{Key: key, Image: name, Template: p.Template, Packer: version, BuiltAt: time.Now().UTC(),
		Took: time.Since(began).Seconds(), Log: log}
	if a.SHA256, a.Bytes, err = digest(made); err == nil {
		err = errors.Join(os.Chmod(made, 0o400), wholefile.Publish(made, disk))
	}
	data, jerr := json.MarshalIndent(a, "", "  ")
	if err = errors.Join(err, jerr); err == nil {
		err = wholefile.Write(record, append(data, '\n'))
	}
	if err != nil {
		return "", sandboxer.E(sandboxer.Unavailable, err, "image %s cannot be kept", name)
	}
	return disk, nil
}

var packerVersion = regexp.MustCompile(`v?[0-9]+\.[0-9]+\.[0-9]+`)

// old reports whether a version is before 1.6.
func old(version string) bool {
	f := strings.SplitN(version, ".", 3)
	if len(f) < 2 {
		return true
	}
	major, err1 := strconv.Atoi(f[0])
	minor, err2 := strconv.Atoi(f[1])
	return err1 != nil || err2 != nil || major < 1 || major == 1 && minor < 6
}

// unescape reverses the escapes of -machine-readable.
func unescape(s string) string {
	return strings.NewReplacer("%!(PACKER_COMMA)", ",", `\n`, "\n", `\r`, "").Replace(s)
}

func shorten(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	if r := []rune(s); len(r) > 120 {
		s = string(r[:120]) + "…"
	}
	return s
}

func (e *extension) buildFailed(ctx context.Context, name, log, wrong string, err error) error {
	if ctx.Err() != nil {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return sandboxer.E(sandboxer.Timeout, err, "image %s was not built in time", name).WithHint("look at %s, or raise the timeout", log)
		}
		return sandboxer.E(sandboxer.Canceled, err, "the build of image %s was called off", name)
	}
	// Packer's output may contain variables: it stays in the log.
	if wrong != "" {
		err = errors.Join(err, errors.New("packer has words about it in the log"))
	}
	return sandboxer.E(sandboxer.Failed, err, "Packer could not build image %s", name).WithHint("look at %s", log)
}

// diskAmong picks the one disk image of an artefact.
func (e *extension) diskAmong(ctx context.Context, dir string, files []string) (string, error) {
	var disks []string
	for _, f := range files {
		if !filepath.IsAbs(f) {
			f = filepath.Join(dir, f)
		}
		if fi, err := os.Stat(f); err != nil || !fi.Mode().IsRegular() {
			continue
		}
		out, err := subprocess.Command(ctx, subprocess.Tool, "qemu-img", "info", "--output=json", f).Output()
		var info struct {
			Format string
			Size   int64 `json:"virtual-size"`
		}
		if err == nil && json.Unmarshal(out, &info) == nil && (info.Format != "raw" || info.Size >= 1<<20) {
			disks = append(disks, f)
		}
	}
	if len(disks) != 1 {
		return "", fmt.Errorf("its artefact has %d disk images among %d files", len(disks), len(files))
	}
	return disks[0], nil
}

func digest(name string) (sum string, size int64, err error) {
	f, err := os.Open(name)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	h := sha256.New()
	size, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), size, err
}

// grace is how long Packer may clean up after the request to end.
const grace = 20 * time.Second

// heir waits for a word on its input, or for the end of the process that should have
// written it. Then Packer, which the system asks to end, has ten seconds; after that heir
// kills all processes with $1 in their environment.
const heir = `
read -r word && exit 0
left() { grep -lsaF "$1" /proc/[0-9]*/environ; }
i=0; while [ $i -lt 10 ] && left "$1" >/dev/null; do i=$((i+1)); sleep 1; done
for i in 1 2 3 4 5 6 7 8 9 10; do
	for p in $(left "$1"); do p=${p#/proc/}; kill -KILL "${p%%/*}"; done
	left "$1" >/dev/null || exit 0
	sleep 0.1
done`

// inherited starts the heir of a build; the caller must call done when the build is over.
func inherited(mark string) (done func(), err error) {
	cmd := subprocess.Command(context.Background(), subprocess.Tool, "/bin/sh", "-c", heir, "sh", mark)
	cmd.SysProcAttr = apart()
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, err
	}
	return func() {
		_, _ = io.WriteString(in, "over\n")
		in.Close()
		_ = cmd.Wait()
	}, nil
}

// packer runs one command of Packer. The output goes to the log, not to a pipe: so the
// death of this process neither blocks nor kills it, and the system then asks it to end.
// If it is cancelled, it may clean up; then the remaining processes are killed.
func packer(ctx context.Context, dir string, env []string, log string, hear func(string), left func() ([]int, error), program string, args ...string) error {
	out, err := os.OpenFile(log, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer out.Close()
	in, err := os.Open(log)
	if err != nil {
		return err
	}
	defer in.Close()
	if _, err := in.Seek(0, io.SeekEnd); err != nil {
		return err
	}
	cmd := subprocess.Command(context.Background(), subprocess.Packer, program, args...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = dir, env, out, out, mortal()
	ended := make(chan error, 1)
	started := make(chan error, 1)
	go func() {
		// The thread that starts a mortal process must live as long as the process.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			ended <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return err
	}
	var rest []byte
	listen := func() {
		data, _ := io.ReadAll(in)
		rest = append(rest, data...)
		for {
			i := bytes.IndexByte(rest, '\n')
			if i < 0 {
				return
			}
			hear(strings.TrimRight(string(rest[:i]), "\r"))
			rest = rest[i+1:]
		}
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	asked := ctx.Done()
	var force <-chan time.Time
	for {
		select {
		case err := <-ended:
			listen()
			c, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
			defer cancel()
			return errors.Join(err, endAll(c, left))
		case <-tick.C:
			listen()
		case <-asked:
			asked = nil
			_ = cmd.Process.Signal(syscall.SIGTERM)
			force = time.After(grace)
		case <-force:
			_ = cmd.Process.Kill()
		}
	}
}
