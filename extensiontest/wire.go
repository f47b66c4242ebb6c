package extensiontest

import (
	"os"
	"testing"
)

// RunWire runs the behaviours that the transport to an extension can break, rather than the extension: each call in each
// direction, each stream with its end and its cancellation, each kind of error. It is for another transport to an
// extension that Run has tested already. With SANDBOXER_TEST_WHOLE=1 in the environment it is Run.
func RunWire(t *testing.T, h Harness) {
	s := newSuite(t, h)
	s.wire = os.Getenv("SANDBOXER_TEST_WHOLE") == ""
	for _, g := range s.groups() {
		s.run(t, g)
	}
}

// wire names the behaviours of each group that RunWire runs, besides hang, which is one.
var wire = map[string][]string{
	"core": {"capabilities", "what it says of itself", "restricted inputs", "provision is idempotent", "handle survives JSON and another process",
		"closing leaves sandboxes alone", "wait ready again", "wait ready of the unknown", "teardown by ID alone", "teardown of the unknown",
		"teardown during wait ready", "teardown during exec", "a stranger's sandbox of the same ID", "canceled context changes nothing",
		"killed behind our back", "env", "secrets stay inside", "missing image", "leaves no goroutine and no file descriptor"},
	"exec": {"out of memory", "streams are apart", "killed by a signal", "arguments arrive as given", "1 MiB of binary both ways", "stdin is interactive",
		"ends although stdin does not", "stdin is not read", "large output to a slow reader", "a failing writer ends the command",
		"missing working directory", "user", "cancel kills the command", "cancel kills what hides", "cancel while the output is not read", "a deadline is a timeout",
		"signals are delivered", "closed channels are no news", "tty", "tty resize", "16 in parallel", "unknown sandbox"},
	"files": {"5 MiB", "modes", "a broken source changes nothing", "a silent source does not hold a call that is over", "links are described, not followed",
		"list can be broken off", "list from a name", "odd names", "missing", "directory and file are not the same", "make directories", "move",
		"remove", "reading can be broken off"},
	"archive":    {"round trip", "what is no archive", "a reader that fails", "canceled"},
	"dial":       {"half close", "1 MiB both ways", "a read deadline holds", "listed", "closed port", "survives the context of the call", "teardown ends the stream"},
	"expose":     {"names a URL"},
	"probe":      {"alive then gone", "out of memory", "an unasked probe is unknown"},
	"discover":   {"by ID from another process", "unknown ID"},
	"list":       {"each sandbox once", "can be broken off"},
	"snapshot":   {"restore", "list", "drop"},
	"quote":      {"grows with time and makes nothing"},
	"meter":      {"cumulative"},
	"pause":      {"freezes and thaws", "exec on a paused sandbox"},
	"renew":      {"moves the fuse in"},
	"capacity":   {"an offer", "unknown host"},
	"stats":      {"plausible and growing"},
	"network":    {"from another process", "nonsense is refused"},
	"pool":       {"the basis is stable", "is given what it asked for", "is claimed by one"},
	"checkpoint": {"round trip", "unknown sandbox"},
	"agent":      {"several at a time", "survives the context of the call", "teardown ends the connection"},
	"processes":  {"start, and what was missed", "listed by pid and tag until it ends", "input, and its end", "who leaves leaves it running", "a terminal and its size", "signals of who follows", "what cannot be started"},
	"watch":      {"with what the file is", "ends with its context", "teardown ends it"},
	"notify":     {"tells of a death", "ends"},
	"mounts":     {"are refused", "are seen from both sides"},
	placeGroup:   {"place is where it is made", "a place that went away"},
}
