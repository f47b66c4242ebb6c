// Package sshrun runs commands, opens connections and moves trees of files on hosts
// that are reached over SSH. Adapters for such hosts are built on it.
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
// # Connections
//
// The user's own ssh program makes them, so that everything in ~/.ssh/config counts:
// aliases, ProxyJump, agents, certificates. The pool keeps one master process for each
// connection. This package hands commands to it over its control socket, in the protocol that
// ssh itself uses for that; no process is started for a command. A machine without an ssh
// program reaches no hosts, and New says so.
//
// Host keys are checked strictly, always: against [Target.HostKeys] if there are any,
// else against the user's known_hosts. Nothing is ever trusted on first use; [Pool.Scan]
// fetches the key that a host shows, for a person to check and to pin.
//
// # How a command travels
//
// The server hands one string to the user's login shell, whatever shell that is. That
// string is nearly constant: it starts /bin/sh with a loop that reads the real script
// from its standard input, up to a line that ends it, and then runs it. So neither
// scripts nor environment nor working directory appear in any list of processes
// (the arguments of a command do, as everywhere), and a script that arrives in part is
// not run in part. A random line separates the output of the shell's start-up files,
// which is dropped, from the output of the command.
//
// A command makes a shell ready for the next one, up to that loop, so that
// commands that follow each other avoid most of the round trips and of the waiting.
// A waiting shell ends after three seconds, or when its session is needed for something else.
//
// Every command carries SANDBOXER_RUN in its environment, with a random value.
// When ctx ends, that is how the command and everything it started are found and
// killed, even processes that left its process group. If the connection is gone by then, the
// kill follows as soon as the host is reached again. Processes that took the
// variable out of their environment, or that a daemon started for the command (a
// container), are not found; where there is no /proc only the process group is.
// [Host.Kill] does the same for any variable of the caller's choice.
//
// # Limits
//
// A server limits the sessions of a connection (MaxSessions, ten by default) and
// the connections that have not logged in yet (MaxStartups). The pool stays below
// the first as [Target] has it, learns of smaller limits from refusals, opens
// few connections at once and repeats dropped ones. Commands above all limits
// wait for their turn.
//
// # Errors
//
// A non-zero exit is a result of Run, not an error. A fault of a host is
// sandboxer.Unavailable, since another host may work, and says by way of errors.Is
// which of [ErrUnreachable], [ErrHostKey], [ErrAuth], [ErrLost] and [ErrShell] it is.
// After ErrLost the command may have run, wholly or in part: that is why
// this package never repeats a command that was sent. A ctx that ended
// gives Timeout or Canceled; what cannot be sent (NUL bytes, names that are not
// variables) gives Invalid; what a host or ssh cannot do gives Unsupported.
package sshrun
