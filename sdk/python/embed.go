// Package python carries the Python package sandboxer, with which extensions are written in
// Python, so that the program has it wherever it runs.
package python

import "embed"

// FS has the package below the directory sandboxer, without tests.
//
//go:embed sandboxer/*.py sandboxer/extensions/*.py
var FS embed.FS

// Host is the file in FS that runs an extension class, written to a directory with all the
// others: python3 -I -u <directory>/sandboxer/host.py, with the extension's private directory as its
// working directory, standard input and output as the control connection, and the directory
// of the socket for streams as file descriptor 3.
const Host = "sandboxer/host.py"
