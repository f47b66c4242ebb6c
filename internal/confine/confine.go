// Package confine takes from this process what a broker does not need, so that whoever
// gets hold of it, by way of a sandbox or a request, has less to work with.
package confine

import "errors"

// ErrLinked is the error where not all threads of the process can be reached.
var ErrLinked = errors.New("this program is linked with C libraries; build it with CGO_ENABLED=0")
