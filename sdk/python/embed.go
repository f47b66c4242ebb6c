// Package python carries the Python package sandboxer, with which extension classes are written and
// run. It is the directory sandboxer beside this file.
package python

import "embed"

// FS holds the package as the directory "sandboxer".
//
//go:embed sandboxer/*.py sandboxer/extensions/*.py
var FS embed.FS

// Host is the file of FS that runs a class as a process that speaks the extension protocol.
const Host = "sandboxer/host.py"
