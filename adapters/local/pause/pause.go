// Package pause holds the first process of a gVisor sandbox: a few hundred bytes of
// machine code that wait.
//
//	pause SECONDS AGENT ARGS…
//	pause fuse SECONDS
//	pause donate SOCKET COUNT [PROCESS]
//
// The first form lets children nobody waits for vanish, and becomes AGENT on SIGUSR1, with
// the fuse as it is then in the place of an argument "@", and with SIGUSR1 and SIGUSR2 ignored:
// until AGENT catches them, more of either would end it.
// On SIGTERM it ends, and with it the sandbox; also ten seconds after it sees the time
// SECONDS (since 1970; 0 means never) in the past: whoever thaws or restores a sandbox
// has that long to move its fuse. The second form moves the fuse of process 1, by a
// SIGUSR2 that carries the number, once that process waits: it would die of it before. The third form hands the COUNT descriptors from 3 on to
// who listens at SOCKET, the agent, in one message with a byte; its exit code is 0 or the
// number of an error, EPERM if whoever listens is not PROCESS.
//
// Most sandboxes run commands that gVisor starts by itself and never need their agent,
// whose start would compete with the first command for the processor and whose heap
// would stay for as long as the sandbox does. A program of any runtime, Go's included,
// costs more to start than all that this one ever does, which is why it is written
// in assembly; the sources stand beside the linked programs.
package pause

//go:generate sh generate.sh
