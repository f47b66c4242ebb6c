// Package agent is the program inside a sandbox and its client. It is for backends that can only store
// a file, start it and connect to it.
//
// Main is the program. It runs commands with pipes or terminals, keeps their output for callers that
// return, serves files, watches directories, relays to ports and measures. Client is its counterpart.
// Its methods have the signatures of the capability interfaces of package sandboxer without the handle,
// so that an adapter implements a capability by passing a call on. The wire protocol is that of E2B's
// data plane; docs/reference/agent.md describes it with the additions.
package agent
