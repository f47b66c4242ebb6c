package agent

// Headers and paths of the wire that the E2B data plane does not have. E2B clients
// need none of them.
const (
	tokenHeader      = "X-Access-Token"
	kindHeader       = "Sandboxer-Kind"       // with an error: its Kind
	hintHeader       = "Sandboxer-Hint"       // with an error: what to do about it, escaped as in a URL path
	exitHeader       = "Sandboxer-Exit"       // with an error of Start: the exit code that a shell would give
	replayHeader     = "Sandboxer-Replay"     // of Connect, "true": begin with the kept output
	ttyHeader        = "Sandboxer-Tty"        // of an answer to Connect, "true": the process has a terminal
	foregroundHeader = "Sandboxer-Foreground" // of Start, "true": the process is killed when the stream breaks
	lstatHeader      = "Sandboxer-Lstat"      // of Stat and ListDir, "true": describe links, not what they point to
	modeHeader       = "Sandboxer-Mode"       // of an upload: permission bits in octal
	escapeHeader     = "Sandboxer-Escape"     // of file calls and their answers: see escapeName
	limitHeader      = "Sandboxer-Limit"      // of ListDir: the most entries; a cut answer names the last one (moreHeader)
	afterHeader      = "Sandboxer-After"      // of ListDir with a limit, in base64url: begin after this name
	moreHeader       = "Sandboxer-More"       // in an answer to ListDir, in base64url: the name to continue after
	keepaliveHeader  = "Keepalive-Ping-Interval"

	statsPath   = "/stats"
	relayPath   = "/relay"   // ?port=N, with Upgrade: tcp
	archivePath = "/archive" // ?path=DIR: GET packs, DELETE empties or makes it, PUT unpacks
	relayName   = "tcp"

	errorTrailer = "Sandboxer-Error" // after an incomplete archive: why, escaped as in a URL path; kindHeader has its Kind
)
