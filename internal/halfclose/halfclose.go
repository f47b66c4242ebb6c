// Package halfclose ends one direction of a connection, whatever it is wrapped in.
package halfclose

import (
	"errors"

	"github.com/sand-boxer/sandboxer"
)

// CloseWrite ends sending over conn: the other side reads to its end, and data that it sends is still
// received, as with TCP's half-close. Wrappers of connections use it for their CloseWrite. Unsupported,
// and errors.ErrUnsupported: conn has no CloseWrite.
func CloseWrite(conn any) error {
	if w, ok := conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return sandboxer.E(sandboxer.Unsupported, errors.ErrUnsupported, "this connection cannot be closed by halves")
}
