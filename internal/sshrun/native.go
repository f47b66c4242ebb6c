package sshrun

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/user"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
	"golang.org/x/crypto/ssh/knownhosts"

	"github.com/sand-boxer/sandboxer"
)

func unsupported(format string, args ...any) error {
	return sandboxer.E(sandboxer.Unsupported, nil, format, args...).WithHint("use the transport openssh, or set the option aside for this host")
}

// native is the driver that speaks SSH itself.
type native struct {
	program string // ssh, to be asked about the configuration; empty if there is none
	opts    Options
}

func newNative(program string, opts Options) (driver, error) {
	return &native{program: program, opts: opts}, nil
}

func (d *native) close() error { return nil }

// A nativeConn is one connection, with those it goes through.
type nativeConn struct {
	*ssh.Client
	through []io.Closer
	gone    chan struct{}
	err     error
	end     sync.Once
}

func (d *native) connect(ctx context.Context, t Target) (conn, error) {
	c, err := d.dial(ctx, t, 0, nil)
	if err != nil {
		return nil, err
	}
	go c.beat(d.opts.KeepAlive, cmp.Or(t.Silence, 3*d.opts.KeepAlive))
	return c, nil
}

func (d *native) scan(ctx context.Context, t Target) ([]string, error) {
	var keys []string
	c, err := d.dial(ctx, t, 0, func(_ string, _ net.Addr, key ssh.PublicKey) error {
		keys = append(keys, strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key))))
		return errScanned
	})
	if c != nil {
		c.close()
	}
	if len(keys) > 0 {
		return keys, nil
	}
	if errors.Is(err, errDropped) || err == nil {
		err = t.fault(ErrUnreachable, "it showed no key")
	}
	return nil, err
}

var errScanned = errors.New("only looking")

const maxJumps = 8

// dial connects to t, through whatever the configuration names, and logs in. look, if
// not nil, is asked about the host key instead.
func (d *native) dial(ctx context.Context, t Target, jumps int, look ssh.HostKeyCallback) (_ *nativeConn, err error) {
	s, err := resolve(ctx, d.program, d.opts, t)
	if err != nil {
		return nil, err
	}
	name, host := t.split()
	alias := host
	host = first(s.one("hostname"), host)
	host = strings.ReplaceAll(host, "%h", alias)
	port := portOr(s.one("port"), 22)
	if t.Port != 0 {
		port = fmt.Sprint(t.Port)
	}
	if name == "" {
		name = s.one("user")
	}
	if name == "" {
		u, err := user.Current()
		if err != nil {
			return nil, err
		}
		name = u.Username
	}
	addr := net.JoinHostPort(host, port)
	c := &nativeConn{gone: make(chan struct{})}
	defer func() {
		if err != nil {
			c.closeThrough()
		}
	}()
	check, algorithms, err := d.hostKeys(t, s, addr, port)
	if err != nil {
		return nil, err
	}
	if look != nil {
		check, algorithms = look, nil
	}
	methods, err := c.methods(t, s, host, port, name)
	if err != nil {
		return nil, err
	}

	var wire net.Conn
	if jump := first(t.ProxyJump, s.one("proxyjump")); jump != "" && jump != "none" {
		if jumps >= maxJumps {
			return nil, invalid("host %s is reached through more than %d others, or through itself", t.Name, maxJumps)
		}
		// The last hop is the nearest to the host; the rest is its way.
		hops := strings.Split(jump, ",")
		hop := hops[len(hops)-1]
		at := hop
		if i := strings.LastIndexByte(at, ':'); i >= 0 && !strings.HasPrefix(at, "ssh://") && !strings.HasSuffix(at, "]") {
			at = "ssh://" + at
		}
		j, err := Target{Name: hop, Addr: at, ProxyJump: strings.Join(hops[:len(hops)-1], ",")}.check()
		if err != nil {
			return nil, err
		}
		via, err := d.dial(ctx, j, jumps+1, nil)
		if err != nil {
			return nil, err
		}
		c.through = append(c.through, closer(via.close))
		if wire, err = via.DialContext(ctx, "tcp", addr); err != nil {
			return nil, t.fault(ErrUnreachable, tidy(err.Error()))
		}
	} else if wire, err = (&net.Dialer{}).DialContext(ctx, "tcp", addr); ctx.Err() != nil {
		return nil, ctx.Err()
	} else if err != nil {
		return nil, t.fault(ErrUnreachable, tidy(err.Error()))
	}
	// A stream through a jump has no deadlines; closing ends the handshake too.
	stop := context.AfterFunc(ctx, func() { wire.Close() })
	sc, chans, reqs, err := ssh.NewClientConn(wire, addr, &ssh.ClientConfig{
		User: name, Auth: methods, HostKeyCallback: check, HostKeyAlgorithms: algorithms, Timeout: d.opts.ConnectTimeout,
	})
	if !stop() && err == nil {
		err = ctx.Err()
		sc.Close()
	}
	if err != nil {
		wire.Close()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, nativeFault(t, err)
	}
	c.Client = ssh.NewClient(sc, chans, reqs)
	go func() {
		c.err = c.Wait()
		c.closeThrough()
		close(c.gone)
	}()
	return c, nil
}

type closer func()

func (c closer) Close() error { c(); return nil }

func first(s ...string) string {
	for _, s := range s {
		if s != "" {
			return s
		}
	}
	return ""
}

func nativeFault(t Target, err error) error {
	var key *knownhosts.KeyError
	var revoked *knownhosts.RevokedError
	said := err.Error()
	switch {
	case errors.As(err, &key) && len(key.Want) > 0:
		return t.fault(ErrHostKey, "HOST IDENTIFICATION HAS CHANGED")
	case errors.As(err, &key), errors.As(err, &revoked), errors.Is(err, ErrHostKey), errors.Is(err, errScanned):
		return t.fault(ErrHostKey, tidy(said))
	case strings.Contains(said, "unable to authenticate"):
		return t.fault(ErrAuth, tidy(said))
	case errors.Is(err, io.EOF), strings.Contains(said, "connection reset"), strings.Contains(said, "EOF"), strings.Contains(said, "overflow reading version string"), strings.Contains(said, "Exceeded MaxStartups"):
		return fmt.Errorf("%w: %s", errDropped, tidy(said))
	}
	return t.fault(ErrUnreachable, tidy(said))
}

// hostKeys returns how a key is judged, and the algorithms to ask for: only those of
// keys that would be accepted, or the server might show another one that it also has.
func (d *native) hostKeys(t Target, s settings, addr, port string) (ssh.HostKeyCallback, []string, error) {
	if len(t.HostKeys) > 0 {
		var pins []string
		for _, k := range t.HostKeys {
			pub, _, _, _, err := ssh.ParseAuthorizedKey([]byte(k))
			if err != nil {
				return nil, nil, err
			}
			pins = append(pins, string(pub.Marshal()))
		}
		return func(_ string, _ net.Addr, key ssh.PublicKey) error {
			if !slices.Contains(pins, string(key.Marshal())) {
				return fmt.Errorf("%w: HOST IDENTIFICATION HAS CHANGED", ErrHostKey)
			}
			return nil
		}, keyAlgorithms(t.HostKeys), nil
	}
	names := strings.Fields(s.one("userknownhostsfile") + " " + s.one("globalknownhostsfile"))
	if len(names) == 0 {
		names = []string{"~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"}
	}
	if d.opts.KnownHosts != "" {
		names = []string{d.opts.KnownHosts}
	}
	var files []string
	for _, f := range names {
		f = home(strings.Trim(f, `"`))
		if _, err := os.Stat(f); err == nil {
			files = append(files, f)
		}
	}
	known, err := knownhosts.New(files...)
	if err != nil {
		return nil, nil, sandboxer.E(sandboxer.Invalid, err, "the known_hosts files cannot be read")
	}
	if alias := s.one("hostkeyalias"); alias != "" && alias != "none" {
		addr = net.JoinHostPort(alias, "22")
	}
	// Asked about a key that nobody has, it tells which ones it wants.
	var want *knownhosts.KeyError
	var algorithms []string
	if errors.As(known(addr, noAddr{}, noKey{}), &want) {
		for _, k := range want.Want {
			algorithms = append(algorithms, keyAlgorithms([]string{string(ssh.MarshalAuthorizedKey(k.Key))})...)
		}
	}
	if len(algorithms) > 0 {
		// A certificate of an authority that is known does as well.
		algorithms = append(algorithms, ssh.CertAlgoED25519v01, ssh.CertAlgoECDSA256v01, ssh.CertAlgoECDSA384v01,
			ssh.CertAlgoECDSA521v01, ssh.CertAlgoRSASHA512v01, ssh.CertAlgoRSASHA256v01)
	}
	return func(_ string, remote net.Addr, key ssh.PublicKey) error { return known(addr, noAddr{}, key) }, algorithms, nil
}

// noAddr keeps known_hosts from looking the host up by its address as well.
type noAddr struct{}

func (noAddr) Network() string { return "tcp" }
func (noAddr) String() string  { return "0.0.0.0:0" }

type noKey struct{}

func (noKey) Type() string                        { return "none" }
func (noKey) Marshal() []byte                     { return nil }
func (noKey) Verify([]byte, *ssh.Signature) error { return errors.New("not a key") }

// methods returns how to log in: with the agent's keys and those in files.
func (c *nativeConn) methods(t Target, s settings, host, port, user string) ([]ssh.AuthMethod, error) {
	files := s["identityfile"]
	only := s.one("identitiesonly") == "yes"
	if t.IdentityFile != "" {
		files, only = []string{t.IdentityFile}, true
	}
	if len(files) == 0 {
		files = []string{"~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa"}
	}
	var signers []ssh.Signer
	var wanted []string // public keys that IdentitiesOnly admits from the agent
	for _, f := range files {
		f = expand(f, host, port, user)
		pem, err := os.ReadFile(f)
		if pub, perr := os.ReadFile(f + ".pub"); perr == nil {
			if k, _, _, _, err := ssh.ParseAuthorizedKey(pub); err == nil {
				wanted = append(wanted, string(k.Marshal()))
			}
		}
		if err != nil {
			if t.IdentityFile != "" && !errors.Is(err, fs.ErrNotExist) {
				return nil, t.fault(ErrAuth, "the identity file cannot be read")
			}
			continue
		}
		signer, err := ssh.ParsePrivateKey(pem)
		if err != nil {
			continue // with a passphrase, perhaps: the agent may have it
		}
		for _, name := range append([]string{f + "-cert.pub"}, s["certificatefile"]...) {
			data, err := os.ReadFile(expand(name, host, port, user))
			if err != nil {
				continue
			}
			pub, _, _, _, err := ssh.ParseAuthorizedKey(data)
			if cert, ok := pub.(*ssh.Certificate); err == nil && ok {
				if with, err := ssh.NewCertSigner(cert, signer); err == nil {
					signers = append(signers, with)
				}
			}
		}
		signers = append(signers, signer)
	}
	socket := first(s.one("identityagent"), "SSH_AUTH_SOCK")
	if name, ok := strings.CutPrefix(socket, "$"); ok || socket == "SSH_AUTH_SOCK" {
		socket = os.Getenv(name)
	}
	if socket != "" && socket != "none" {
		if conn, err := net.Dial("unix", expand(socket, host, port, user)); err == nil {
			c.through = append(c.through, conn)
			keys, err := agent.NewClient(conn).Signers()
			for _, k := range keys {
				if err == nil && (!only || slices.Contains(wanted, string(plainKey(k.PublicKey())))) {
					signers = append([]ssh.Signer{k}, signers...)
				}
			}
		}
	}
	if len(signers) == 0 {
		return nil, nil
	}
	return []ssh.AuthMethod{ssh.PublicKeys(signers...)}, nil
}

func plainKey(k ssh.PublicKey) []byte {
	if cert, ok := k.(*ssh.Certificate); ok {
		k = cert.Key
	}
	return k.Marshal()
}

// beat asks a server for signs of life, and gives the connection up after the silence.
func (c *nativeConn) beat(every, silence time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-c.gone:
			return
		case <-tick.C:
		}
		answer := make(chan struct{})
		go func() {
			c.SendRequest("keepalive@openssh.com", true, nil)
			close(answer)
		}()
		select {
		case <-answer:
		case <-c.gone:
		case <-time.After(silence):
			c.Client.Close()
		}
		<-answer
	}
}

func (c *nativeConn) closeThrough() {
	for _, t := range c.through {
		t.Close()
	}
}

func (c *nativeConn) done() <-chan struct{} { return c.gone }

func (c *nativeConn) reason() string {
	select {
	case <-c.gone:
		if c.err != nil {
			return c.err.Error()
		}
	default:
	}
	return ""
}

func (c *nativeConn) close() {
	c.end.Do(func() { c.Client.Close() })
	<-c.gone
}

func (c *nativeConn) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := c.DialContext(ctx, network, addr)
	if open := (*ssh.OpenChannelError)(nil); errors.As(err, &open) {
		err = fmt.Errorf("%w: %s", errRefused, tidy(open.Message))
	}
	return conn, err
}

func (c *nativeConn) start(ctx context.Context, command string, tty *sandboxer.WinSize) (session, error) {
	type result struct {
		s   *nativeSession
		err error
	}
	// Nothing of this takes a context; a session that comes too late is closed.
	got := make(chan result, 1)
	go func() {
		s, err := c.session(command, tty)
		got <- result{s, err}
	}()
	select {
	case r := <-got:
		if r.err != nil {
			return nil, r.err
		}
		return r.s, nil
	case <-ctx.Done():
		go func() {
			if r := <-got; r.s != nil {
				r.s.close()
			}
		}()
		return nil, ctx.Err()
	}
}

func (c *nativeConn) session(command string, tty *sandboxer.WinSize) (_ *nativeSession, err error) {
	ch, reqs, err := c.OpenChannel("session", nil)
	if open := (*ssh.OpenChannelError)(nil); errors.As(err, &open) {
		return nil, fmt.Errorf("%w (%s)", errFull, tidy(open.Message))
	}
	if err != nil {
		return nil, err
	}
	s := &nativeSession{ch: ch, tty: tty != nil, ended: make(chan ended, 1)}
	go s.watch(reqs)
	if tty != nil {
		ok, err := ch.SendRequest("pty-req", true, ssh.Marshal(struct {
			Term                      string
			Cols, Rows, Width, Height uint32
			Modes                     string
		}{"xterm-256color", uint32(tty.Cols), uint32(tty.Rows), 0, 0, "\x00"}))
		if err == nil && !ok {
			err = sandboxer.E(sandboxer.Unsupported, nil, "the host gives no terminal")
		}
		if err != nil {
			s.close()
			return nil, err
		}
	}
	ok, err := ch.SendRequest("exec", true, ssh.Marshal(struct{ Command string }{command}))
	if err == nil && !ok {
		err = fmt.Errorf("%w (it starts no command)", errFull)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// A nativeSession is one command. x/crypto's own sessions tell of an exit only when
// the last holder of the outputs has gone as well.
type nativeSession struct {
	ch    ssh.Channel
	tty   bool
	ended chan ended
}

func (s *nativeSession) watch(reqs <-chan *ssh.Request) {
	said := false
	for r := range reqs {
		if r.Type == "exit-status" && len(r.Payload) == 4 && !said {
			said = true
			s.ended <- ended{code: int(binary.BigEndian.Uint32(r.Payload)), known: true}
		}
		if r.WantReply {
			r.Reply(false, nil)
		}
	}
	if !said {
		s.ended <- ended{}
	}
}

func (s *nativeSession) stdin() io.WriteCloser { return channelInput{s.ch} }
func (s *nativeSession) stdout() io.Reader     { return s.ch }
func (s *nativeSession) exit() <-chan ended    { return s.ended }
func (s *nativeSession) close()                { s.ch.Close() }

func (s *nativeSession) stderr() io.Reader {
	if s.tty {
		return nil
	}
	return s.ch.Stderr()
}

func (s *nativeSession) resize(size sandboxer.WinSize) {
	s.ch.SendRequest("window-change", false, ssh.Marshal(struct{ Cols, Rows, Width, Height uint32 }{uint32(size.Cols), uint32(size.Rows), 0, 0}))
}

type channelInput struct{ ssh.Channel }

func (c channelInput) Close() error { return c.CloseWrite() }
