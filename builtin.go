package sandboxer

import "embed"

// Builtin holds the catalogue of every installation: extensions/*.yaml and profiles/*.yaml of this
// repository. A file with the same ID in the system's or the user's directory replaces the built-in
// one.
//
//go:embed extensions/*.yaml profiles/*.yaml
var Builtin embed.FS
