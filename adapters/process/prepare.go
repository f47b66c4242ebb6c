package process

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/subprocess"
)

// A program is a Program that can be run here.
type program struct {
	sandboxer.Program
	command []string        // with what it is started; the first by an absolute path
	modules []string        // directories with the Python code that decides what it is
	config  json.RawMessage // without secrets
	user    *account        // whose rights it gets; nil for the broker's
	sdk     string          // directory with the Python package that the file names; "" for the program's own
}

// An account is a user of this machine.
type account struct {
	name, home string
	uid, gid   uint32
	groups     []uint32
}

// prepare checks whether the program of the file can be run here. Kinds: Invalid, at a place of the file, for
// faults in it; Unavailable for what this machine lacks.
func prepare(env sandboxer.Env) (*program, error) {
	p := &program{Program: env.Program, config: json.RawMessage("{}")}
	if env.Config != nil {
		config, err := env.Config(false)
		if err != nil {
			return nil, err
		}
		p.config = config
	}
	if p.RunAs != "" {
		if p.Connect != "" {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "run_as: the broker does not start the service, and cannot change its user")
		}
		var err error
		if p.user, err = accountOf(p.RunAs); err != nil {
			return nil, err
		}
	}
	if p.PIDs > 0 && p.user == nil {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "limits.pids: the kernel counts processes by user, so this limit needs run_as with a user that runs nothing else")
	}
	if (p.PIDs > 0 || p.MemoryBytes > 0) && p.Connect != "" {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "limits: the broker does not start the service, and cannot limit it")
	}
	switch {
	case p.Connect != "":
		return p, nil
	case len(p.Command) > 0:
		path, err := exec.LookPath(p.Command[0])
		if err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the program %s cannot be started: %s", p.Command[0], reason(err))
		}
		p.command = append([]string{path}, p.Command[1:]...)
		return p, nil
	case p.Handler != "":
		return p, p.python()
	}
	return nil, sandboxer.E(sandboxer.Invalid, nil, "handler: process needs command or connect, or a class as module:Class")
}

func reason(err error) string {
	var e *exec.Error
	if errors.As(err, &e) {
		err = e.Err
	}
	var pe *os.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	return err.Error()
}

// accountOf finds a user by name or number. The broker must be able to become it.
func accountOf(name string) (*account, error) {
	u, err := user.Lookup(name)
	if err != nil {
		if u, err = user.LookupId(name); err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "run_as: there is no user %.40q here", name)
		}
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	gid, gerr := strconv.ParseUint(u.Gid, 10, 32)
	if err = errors.Join(err, gerr); err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "run_as: the user %.40q has no numeric IDs", name)
	}
	if me := os.Geteuid(); me != 0 && uint64(me) != uid {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "run_as: this server runs as the user %d and cannot become %s: only root can", me, u.Username)
	}
	a := &account{name: u.Username, home: u.HomeDir, uid: uint32(uid), gid: uint32(gid)}
	ids, _ := u.GroupIds()
	for _, id := range ids {
		if g, err := strconv.ParseUint(id, 10, 32); err == nil {
			a.groups = append(a.groups, uint32(g))
		}
	}
	return a, nil
}

// environ is the environment of the process: of the broker's, what every extension gets and what the file names.
func (p *program) environ() []string {
	env := subprocess.Environ(subprocess.Extension)
	if own, err := os.Executable(); err == nil {
		env = append(env, "PATH="+searchPath(os.Getenv("PATH"), own))
	}
	for _, name := range p.Env {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	if p.user != nil {
		env = append(env, "HOME="+p.user.home, "USER="+p.user.name, "LOGNAME="+p.user.name)
	}
	return env
}

// searchPath is path and, at its end, the directory of the program own if that is sandboxer: scripts name it as their
// interpreter, and a server that was started by its path need not be in PATH.
func searchPath(path, own string) string {
	dir := filepath.Dir(own)
	switch {
	case filepath.Base(own) != "sandboxer" || slices.Contains(filepath.SplitList(path), dir):
		return path
	case path == "":
		return dir
	}
	return path + string(filepath.ListSeparator) + dir
}

// title names the program in messages.
func (p *program) title() string {
	switch {
	case p.Connect != "":
		return "the service at " + strings.TrimPrefix(p.Connect, "unix:")
	case p.Handler != "":
		return p.Handler
	}
	return p.command[0]
}
