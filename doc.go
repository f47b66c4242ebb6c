// Package sandboxer defines sandboxes: the domain types, the states, the kinds of error, and the
// contracts of extensions and of the store that keeps the database.
//
// It has only plain data and interfaces on top of the standard library. Every other package imports it,
// and it imports none of them. The rules are in other packages: package internal/manager controls the
// life of a sandbox, package internal/backend is the only caller of an extension, and package
// extensiontest tests an extension against the contract.
//
// docs/design/design.md lists the vocabulary: an adapter is a Go package for a kind of backend, an
// extension is one configured use of it, a profile is a named kind of sandbox, a handle is what an
// extension must remember about one sandbox.
package sandboxer
