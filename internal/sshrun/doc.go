// Package sshrun runs commands, opens connections and moves trees of files on hosts
// that are reached over SSH. It is what adapters for such hosts are built on.
//
// A [Pool] keeps connections; a [Host] is one place, named by a [Target], and all
// calls go through it:
//
//	pool, err := sshrun.New(sshrun.Options{})
//	defer pool.Close()
//	h, err := pool.Host(sshrun.Target{Name: "build-1", Addr: "ci@build-1.example"})
//	exit, err := h.Run(ctx, sshrun.Cmd{Args: []string{"docker", "ps"}, Stdout: w})
//	out, err := h.Output(ctx, `mkdir -- "$1" && df -Pk -- "$1"`, dir)
//	conn, err := h.Dial(ctx, "tcp", "127.0.0.1:8080") // or "unix", "/run/docker.sock"
//	stats, err := h.Push(ctx, "/src/app", "/srv/sbx-1/repo", sshrun.SyncOptions{Delete: true})
//
// # Transports
//
// There are two, with one behaviour. "openssh" is the user's own ssh program, so
// that everything in ~/.ssh/config counts: aliases, ProxyJump, agents, certificates.
// One master process is kept for each connection, and commands are handed to it over
// its control socket by this package, in the protocol that ssh itself uses for that;
// no process is started for a command. "native" is golang.org/x/crypto/ssh in this
// process, for where there is no ssh program or where it is asked for. What of the
// user's configuration it cannot honour it refuses by name.
//
// Host keys are checked strictly, always: against [Target.HostKeys] if there are any,
// else against the user's known_hosts. Nothing is ever trusted on first use; [Pool.Scan]
// fetches the key that a host shows, for somebody to look at and to pin.
//
// # How a command travels
//
// The server hands one string to the user's login shell, whatever shell that is. That
// string is nearly constant: it starts /bin/sh with a loop that reads the real script
// from its standard input, up to a line that ends it, and then runs it. So neither
// scripts nor environment nor working directory are seen in any list of processes
// (the arguments of a command are, as everywhere), a script that arrives in part is
// not run in part, and what the shell's start-up files print is told from what the
// command prints by a random line, and dropped.
//
// A command that was begun makes the next one's shell ready, up to that loop, so that
// commands that follow each other are spared most of the round trips and of the waiting.
// What waits goes after three seconds, or when its session is wanted otherwise.
//
// Every command carries SANDBOXER_RUN in its environment, with a random value.
// When ctx ends, that is how the command and whatever it started are found and
// killed, also what left its process group. If the connection is gone by then, the
// kill is made up for as soon as the host is reached again. Processes that took the
// variable out of their environment, or that a daemon started for the command (a
// container), are not found; where there is no /proc only the process group is.
// [Host.Kill] does the same for any variable of the caller's choice.
//
// # Limits
//
// A server admits so many sessions for a connection (MaxSessions, ten by default) and
// so many connections that have not logged in yet (MaxStartups). The pool stays below
// what [Target] says of the first, learns of smaller limits by being refused, opens
// few connections at once and repeats what was dropped. Commands above all limits
// wait for their turn.
//
// # Errors
//
// A non-zero exit is a result of Run, not an error. What goes wrong with a host is
// sandboxer.Unavailable, since another host may do better, and says which of
// [ErrUnreachable], [ErrHostKey], [ErrAuth], [ErrLost] and [ErrShell] it is by way of
// errors.Is. After ErrLost the command may have run, wholly or in part: that is why
// nothing here is ever repeated by itself once a command was sent. A ctx that ended
// gives Timeout or Canceled; what cannot be sent (NUL bytes, names that are not
// variables) gives Invalid; what a transport cannot do gives Unsupported.
package sshrun
