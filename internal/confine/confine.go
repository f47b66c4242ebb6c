// Package confine takes rights from this process that a broker does not need, so that an attacker who
// takes it over, by way of a sandbox or a request, can do less.
package confine

import "errors"

// ErrLinked is the error where not all threads of the process can be reached.
var ErrLinked = errors.New("this program is linked with C libraries; build it with CGO_ENABLED=0")
