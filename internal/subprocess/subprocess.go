// Package subprocess starts the programs that this one needs: ssh, Packer, docker's command line, extensions.
// Everything that a child gets is listed. Its variables are those of its kind's list and those that the caller adds; its
// descriptors are its three streams and ExtraFiles; its directory is / if the caller names no other; its umask is
// Umask; its groups are this process's, or those that the caller gives it with a user.
//
// A test (internal/deptest) makes all other code use this package. gVisor starts its own processes, which
// follow the same rules because of what adapters/local/runner does first.
package subprocess

import (
	"context"
	"os"
	"os/exec"
	"strings"
)

// A Kind is one sort of program that this one starts.
type Kind int

// The kinds.
const (
	Tool      Kind = iota // a program that computes something: qemu-img, a shell
	SSH                   // ssh
	Packer                // Packer, with its plugins
	Extension             // the program of an extension
	Self                  // this program again, as the same user's server or test
)

// Umask is the umask of every child.
const Umask = 0o022

// Every child gets tools. A star stands for the rest of a name.
var (
	tools   = []string{"PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_*", "TZ", "TMPDIR"}
	web     = []string{"SSL_CERT_FILE", "SSL_CERT_DIR"}
	proxies = []string{"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"}
	ssh     = []string{"SHELL", "SSH_AUTH_SOCK", "SSH_SK_PROVIDER", "KRB5CCNAME", "KRB5_CONFIG", "XDG_*"}
	packer  = []string{"PACKER_*", "PKR_VAR_*", "CHECKPOINT_DISABLE"}
)

// Variables are the names of the variables that each kind gets from this process's environment.
var Variables = map[Kind][]string{
	Tool:      tools,
	SSH:       join(tools, proxies, ssh),
	Packer:    join(tools, web, proxies, ssh, packer),
	Extension: join(tools, web),
	Self:      {"*"},
}

func join(lists ...[]string) (all []string) {
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}

// Environ is the part of this process's environment that a child of the kind gets.
func Environ(k Kind) []string {
	env := []string{} // not nil, which to os/exec is everything
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		for _, want := range Variables[k] {
			if start, open := strings.CutSuffix(want, "*"); name == want || open && strings.HasPrefix(name, start) {
				env = append(env, kv)
				break
			}
		}
	}
	return env
}

// A Cmd is a child, as in os/exec.
type Cmd struct {
	*exec.Cmd
}

// Command is exec.CommandContext for a child of the kind. The caller may add to Env.
func Command(ctx context.Context, k Kind, program string, args ...string) *Cmd {
	c := &Cmd{exec.CommandContext(ctx, program, args...)}
	c.Env, c.Dir = Environ(k), "/"
	return c
}
