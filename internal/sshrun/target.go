package sshrun

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/sand-boxer/sandboxer"
)

// Target says where a host is and how to log in. It holds no secret: an identity is
// named by its file.
type Target struct {
	// Name is the host's name in messages. Empty means Addr.
	Name string
	// Addr is an address as a user would type it after ssh: an alias of the user's configuration,
	// host, user@host or ssh://user@host:port.
	Addr string
	// Port; 0 leaves it to Addr and the configuration.
	Port int
	// IdentityFile is the absolute name of a private key; no other key is used.
	// Empty leaves it to the configuration and the agent.
	IdentityFile string
	// ProxyJump is what ssh -J takes; empty leaves it to the configuration. Its own
	// host keys are looked up in known_hosts.
	ProxyJump string
	// HostKeys are the host's public keys in the form of authorized_keys lines, and
	// no other is accepted. Empty means what the user's known_hosts files say.
	HostKeys []string
	// Sessions is how many commands run over one connection at once, at most; 0
	// means 8. The pool notices a server that admits fewer.
	Sessions int
	// Connections is how many connections are kept at most; 0 means 4.
	Connections int
	// Handshakes is how many connections are made at once, at most; 0 means 2.
	Handshakes int
	// Silence is how long a connection may show no sign of life before it counts as
	// lost; 0 means three times the pool's KeepAlive. Set it longer where silence proves
	// little: a machine next door has other means to detect its end, and a machine that runs
	// out of memory may not answer for half a minute.
	Silence time.Duration
}

// Paste is the target as ssh, scp and host add take it: Addr, or ssh://user@host:port.
func (t Target) Paste() string {
	if t.Port == 0 || strings.HasPrefix(t.Addr, "ssh://") {
		return t.Addr
	}
	user, host := t.split()
	if user != "" {
		user += "@"
	}
	if host = strings.Trim(host, "[]"); strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return fmt.Sprintf("ssh://%s%s:%d", user, host, t.Port)
}

// check completes t, or returns its faults.
func (t Target) check() (Target, error) {
	if strings.HasPrefix(t.Addr, "ssh://") {
		rest := strings.TrimSuffix(strings.TrimPrefix(t.Addr, "ssh://"), "/")
		if i := strings.LastIndexByte(rest, ':'); i >= 0 && !strings.HasSuffix(rest, "]") {
			n, err := strconv.Atoi(rest[i+1:])
			if err != nil || n < 1 || n > 65535 || t.Port != 0 && t.Port != n {
				return t, invalid("ssh target %q: %q is not a port", t.Addr, rest[i+1:])
			}
			rest, t.Port = rest[:i], n
		}
		t.Addr = rest
	}
	user, host := t.split()
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if user != "" {
		t.Addr = user + "@" + host
	} else {
		t.Addr = host
	}
	if t.Name == "" {
		t.Name = t.Addr
	}
	switch {
	case host == "":
		return t, invalid("host %q has no ssh target", t.Name).WithHint("give one as for the ssh command: user@host, or an alias of ~/.ssh/config")
	case strings.Contains(t.Addr, "@") && user == "", !word(user), !word(host):
		return t, invalid("%q is not an ssh target", t.Addr).WithHint("want host, user@host or an alias of ~/.ssh/config")
	case strings.Count(host, ":") == 1:
		name, port, _ := strings.Cut(host, ":")
		return t, invalid("%q is not an ssh target: ssh would look for a host of that name", t.Addr).
			WithHint("give the port separately (host add: --port %s), or write ssh://%s%s:%s", port, strings.TrimSuffix(t.Addr, host), name, port)
	case t.Port < 0 || t.Port > 65535:
		return t, invalid("host %s: %d is not a port", t.Name, t.Port)
	case t.Sessions < 0 || t.Connections < 0 || t.Handshakes < 0 || t.Silence < 0:
		return t, invalid("host %s: limits cannot be negative", t.Name)
	case t.IdentityFile != "" && !filepath.IsAbs(t.IdentityFile), strings.ContainsAny(t.IdentityFile, "\x00\n\""):
		return t, invalid("host %s: the path of the identity file %q is not absolute", t.Name, t.IdentityFile)
	case strings.ContainsFunc(t.Name, func(r rune) bool { return r <= ' ' || r == 0x7f }):
		return t, invalid("%q is not a valid name of a host", t.Name)
	}
	for hop := range strings.SplitSeq(t.ProxyJump, ",") {
		if t.ProxyJump != "" && !word(strings.NewReplacer("@", "", "[", "", "]", "").Replace(strings.TrimPrefix(hop, "ssh://"))) {
			return t, invalid("host %s: %q is not an ssh target for a jump host", t.Name, hop)
		}
	}
	for _, k := range t.HostKeys {
		if _, _, _, _, err := ssh.ParseAuthorizedKey([]byte(k)); err != nil || strings.Contains(k, "\n") {
			return t, invalid("host %s: %q is not a public key", t.Name, k)
		}
	}
	if len(t.HostKeys) == 0 {
		t.HostKeys = nil
	}
	for _, d := range []struct {
		n   *int
		def int
	}{{&t.Sessions, 8}, {&t.Connections, 4}, {&t.Handshakes, 2}} {
		if *d.n == 0 {
			*d.n = d.def
		}
	}
	return t, nil
}

// key distinguishes t from every other target, even from one of the same name and address with
// another account, key or jump host.
func (t Target) key() string { return fmt.Sprintf("%#v", t) }

// word reports whether ssh accepts s as a user or host: nothing there
// may look like an option or mean something to a shell that a configuration calls.
func word(s string) bool {
	return !strings.HasPrefix(s, "-") && !strings.ContainsFunc(s, func(r rune) bool {
		return r <= ' ' || r == 0x7f || strings.ContainsRune("\"'`$\\;&|<>(){}[]*?!#~@", r)
	})
}

func (t Target) split() (user, host string) {
	if i := strings.LastIndexByte(t.Addr, '@'); i >= 0 {
		return t.Addr[:i], t.Addr[i+1:]
	}
	return "", t.Addr
}

// sshWords is what a person types after ssh to connect.
func (t Target) sshWords() string {
	var w []string
	if t.Port != 0 {
		w = append(w, "-p", strconv.Itoa(t.Port))
	}
	if t.IdentityFile != "" {
		w = append(w, "-i", t.IdentityFile)
	}
	if t.ProxyJump != "" {
		w = append(w, "-J", t.ProxyJump)
	}
	return Quote(append(w, t.Addr)...)
}

func invalid(format string, args ...any) *sandboxer.Error {
	return sandboxer.E(sandboxer.Invalid, nil, format, args...)
}

// keyAlgorithms are those by which a host can prove to have one of keys.
func keyAlgorithms(keys []string) []string {
	var all []string
	for _, k := range keys {
		pub, _, _, _, err := ssh.ParseAuthorizedKey([]byte(k))
		if err != nil {
			continue
		}
		if pub.Type() == ssh.KeyAlgoRSA {
			all = append(all, ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256)
		} else {
			all = append(all, pub.Type())
		}
	}
	return all
}
