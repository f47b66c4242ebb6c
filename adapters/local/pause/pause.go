// Package pause holds the first process of a gVisor sandbox: a few hundred bytes of
// machine code that wait.
//
//	pause SECONDS AGENT ARGS…
//	pause fuse SECONDS
//	pause donate SOCKET COUNT [PROCESS]
//
// The first form reaps its children, and becomes AGENT on SIGUSR1, with the current fuse
// in place of an argument "@", and with SIGUSR1 and SIGUSR2 ignored: until AGENT catches
// them, another one of either would end it.
// On SIGTERM it ends, and with it the sandbox; also ten seconds after it sees the time
// SECONDS (since 1970; 0 means never) in the past: a broker that thaws or restores a
// sandbox has that long to move its fuse. The second form moves the fuse of process 1, by a
// SIGUSR2 that carries the number, once that process waits: before, the signal would end it.
// The third form hands the COUNT descriptors from 3 on to the agent that listens at SOCKET,
// in one message with a byte; its exit code is 0 or the number of an error, EPERM if
// another process than PROCESS listens.
//
// Most sandboxes run commands that gVisor itself starts and never need their agent,
// whose start would compete with the first command for the processor and whose heap
// would stay for as long as the sandbox does. The start of a program with a runtime, such
// as Go's, costs more than all that this one ever does. So it is written in assembly; the
// sources are next to the linked programs.
package pause

//go:generate sh generate.sh
