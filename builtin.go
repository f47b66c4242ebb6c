package sandboxer

import "embed"

// Builtin holds the catalogue that every installation starts from:
// extensions/*.yaml and profiles/*.yaml of this repository. A file of the same id
// in the system's or the user's directory replaces the built-in one.
//
//go:embed extensions/*.yaml profiles/*.yaml
var Builtin embed.FS
