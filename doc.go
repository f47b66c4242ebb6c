// Package sandboxer says what a sandbox is: the domain types, the states of its
// life, the kinds of error, the contract an extension fulfils and the contract of
// the store that keeps the database.
//
// It is plain data and interfaces on the standard library, imported by every
// other package and importing none of them. The rules live elsewhere: package
// internal/manager owns the life of a sandbox, package internal/backend is the only
// caller of an extension, package extensiontest is the executable form of the
// contract written here.
//
// The vocabulary is fixed (docs/design.md lists it): an adapter is a Go package for
// a kind of backend, an extension is one configured use of it, a profile is a named
// kind of sandbox, a handle is what an extension must remember about one sandbox.
package sandboxer
