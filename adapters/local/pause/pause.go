// Package pause holds the first process of a gVisor sandbox: a few hundred bytes of
// machine code that wait.
//
//	pause SECONDS AGENT ARGS…
//
// It lets children nobody waits for vanish, ends at the time SECONDS (since 1970; 0
// means never) or on SIGTERM, and with it the sandbox, and becomes AGENT on SIGUSR1.
// Most sandboxes run commands that gVisor starts by itself and never need their agent,
// whose start would compete with the first command for the processor and whose heap
// would stay for as long as the sandbox does. A program of any runtime, Go's included,
// costs more to start than all that this one ever does, which is why it is written
// in assembly; the sources stand beside the linked programs.
package pause

//go:generate sh generate.sh
