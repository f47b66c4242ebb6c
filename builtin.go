package sandboxer

import "embed"

// Builtin holds the catalogue of every installation: extensions/*.yaml, profiles/*.yaml and prices.yaml of this
// repository. A file with the same ID in the system's or the user's directory replaces the built-in
// one, as a prices.yaml there does.
//
//go:embed extensions/*.yaml profiles/*.yaml prices.yaml
var Builtin embed.FS
