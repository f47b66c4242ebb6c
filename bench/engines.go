//go:build linux

package main

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// command runs a program of another engine; its output becomes part of the error.
// The processor time is that of the program and the children it waited for.
func command(ctx context.Context, env []string, args ...string) (took, cpu time.Duration, out string, err error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.WaitDelay = time.Second // a detached container may keep our pipe
	// An interrupt of the terminal is for us, who then end this program.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var buf bytes.Buffer
	cmd.Stdout, cmd.Stderr = &buf, &buf
	begin := time.Now()
	err = cmd.Run()
	took = time.Since(begin)
	if cmd.ProcessState != nil {
		cpu = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	}
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(buf.Bytes()))
	}
	return took, cpu, strings.TrimSpace(buf.String()), err
}

// runsc is gVisor's own command line, of the same version as is linked in.
type runsc struct {
	bin, dir string
	n        int
	running  string // a container that stays
}

// newRunsc makes the bundles; root is the root file system.
func newRunsc(bin, dir, root string) (*runsc, error) {
	r := &runsc{bin: bin, dir: dir}
	for name, args := range map[string][]string{"true": {"true"}, "sleep": {"sleep", "100000"}} {
		s := specs.Spec{
			Version: "1.0.0",
			Root:    &specs.Root{Path: root},
			Process: &specs.Process{Args: args, Cwd: "/", Env: []string{"PATH=/bin"}, NoNewPrivileges: true},
			Mounts:  []specs.Mount{{Destination: "/proc", Type: "proc", Source: "proc"}},
			Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace}, {Type: specs.NetworkNamespace},
			}},
		}
		data, err := json.Marshal(s)
		if err == nil {
			err = os.MkdirAll(filepath.Join(dir, name), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name, "config.json"), data, 0o644)
		}
		if err != nil {
			return nil, err
		}
	}
	return r, nil
}

func (r *runsc) state() string { return filepath.Join(r.dir, "state") }

func (r *runsc) args(rest ...string) []string {
	return append([]string{r.bin, "--root=" + r.state(), "--network=none", "--ignore-cgroups", "--platform=systrap"}, rest...)
}

// run is the whole life of a container that runs true.
func (r *runsc) run(ctx context.Context) (took, cpu time.Duration, err error) {
	r.n++
	took, cpu, _, err = command(ctx, nil, r.args("run", "--bundle="+filepath.Join(r.dir, "true"), fmt.Sprintf("true-%d", r.n))...)
	return took, cpu, err
}

func (r *runsc) start(ctx context.Context) error {
	r.running = "sleep"
	cmd := exec.CommandContext(ctx, r.bin, r.args("run", "--detach", "--bundle="+filepath.Join(r.dir, "sleep"), r.running)[1:]...)
	if err := cmd.Run(); err != nil { // without pipes of ours: the container would keep them
		return fmt.Errorf("runsc run --detach: %w", err)
	}
	return nil
}

func (r *runsc) exec(ctx context.Context) (took, cpu time.Duration, err error) {
	took, cpu, _, err = command(ctx, nil, r.args("exec", r.running, "true")...)
	return took, cpu, err
}

func (r *runsc) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var err error
	if r.running != "" {
		_, _, _, err = command(ctx, nil, r.args("delete", "--force", r.running)...)
	}
	return errors.Join(err, sweepUp(r.dir, ""))
}

// compile runs the go command in the directory of sandboxer's module. The module of bench requires less than the tests of
// that module, and than runsc.
func compile(ctx context.Context, args ...string) error {
	list := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module)
	dir, err := list.Output()
	if err != nil {
		return fmt.Errorf("%s: %w (run bench in the source of sandboxer)", list, err)
	}
	_, _, _, err = command(ctx, []string{"CGO_ENABLED=0"}, append([]string{"go", "-C", strings.TrimSpace(string(dir))}, args...)...)
	return err
}

// docker is a Docker engine, whichever the docker command finds.
type docker struct {
	name    string // of the image, the running container and a label of all
	started bool   // the running container
}

// findDocker says which engine answers.
func findDocker(ctx context.Context) (string, error) {
	if _, err := exec.LookPath("docker"); err != nil {
		return "", errors.New("there is no docker command")
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, _, out, err := command(ctx, nil, "docker", "version", "--format", "{{.Server.Version}}")
	if err != nil {
		return "", errors.New("no Docker engine answers (is DOCKER_HOST set?)")
	}
	return out, nil
}

func newDocker(ctx context.Context, archive string) (*docker, error) {
	d := &docker{name: fmt.Sprintf("sandboxer-bench-%d", os.Getpid())}
	_, _, _, err := command(ctx, nil, "docker", "import", archive, d.name)
	return d, err
}

func (d *docker) args(rest ...string) []string {
	return append([]string{"docker", "run", "--network=none", "--label=" + d.name}, append(rest, d.name)...)
}

func (d *docker) run(ctx context.Context) (time.Duration, error) {
	took, _, _, err := command(ctx, nil, append(d.args("--rm"), "true")...)
	return took, err
}

// start makes sure that the container that others enter runs.
func (d *docker) start(ctx context.Context) error {
	if d.started {
		return nil
	}
	_, _, _, err := command(ctx, nil, append(d.args("--detach", "--name="+d.name), "sleep", "100000")...)
	d.started = err == nil
	return err
}

func (d *docker) exec(ctx context.Context) (time.Duration, error) {
	took, _, _, err := command(ctx, nil, "docker", "exec", d.name, "true")
	return took, err
}

func (d *docker) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, _, ids, err := command(ctx, nil, "docker", "ps", "--all", "--quiet", "--filter=label="+d.name)
	for id := range strings.FieldsSeq(ids) {
		_, _, _, rerr := command(ctx, nil, "docker", "rm", "--force", id)
		err = errors.Join(err, rerr)
	}
	_, _, _, ierr := command(ctx, nil, "docker", "image", "rm", d.name)
	return errors.Join(err, ierr)
}

// findBusybox returns a statically linked busybox of this machine.
func findBusybox() (string, error) {
	p, err := exec.LookPath("busybox")
	if err != nil {
		return "", errors.New("there is no busybox (install busybox-static)")
	}
	f, err := elf.Open(p)
	if err != nil {
		return "", fmt.Errorf("%s: %w", p, err)
	}
	defer f.Close()
	for _, s := range f.Progs {
		if s.Type == elf.PT_INTERP {
			return "", fmt.Errorf("%s is linked dynamically (install busybox-static)", p)
		}
	}
	return p, nil
}
