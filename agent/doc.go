// Package agent is the program inside a sandbox and the client to it, for backends
// that offer no more than a place to put a file, a way to start it and a wire to it.
//
// Main is the program: it runs commands with pipes or terminals, keeps their output
// for those who come back, serves files, watches directories, relays to ports and
// measures. Client is the other end; its methods have the signatures of the capability
// interfaces of package sandboxer without the handle, so that an adapter fulfils a
// capability by handing a call on. The wire between them is that of E2B's data plane;
// docs/agent.md describes it and what is added.
package agent
