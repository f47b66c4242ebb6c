package sshrun

import (
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// Quote returns words such that a POSIX shell reads them back unchanged. Values get into
// text that a shell reads by no other way. An argument cannot contain a NUL byte
// at all; callers must have refused it (see [Host.Run]).
func Quote(words ...string) string {
	var b strings.Builder
	for i, w := range words {
		if i > 0 {
			b.WriteByte(' ')
		}
		if w != "" && strings.Trim(w, plain) == "" {
			b.WriteString(w)
			continue
		}
		b.WriteByte('\'')
		b.WriteString(strings.ReplaceAll(w, "'", `'\''`))
		b.WriteByte('\'')
	}
	return b.String()
}

// plain are the characters that mean themselves to every shell in every place.
const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./"

func checkWords(what string, words ...string) error {
	for _, w := range words {
		if strings.IndexByte(w, 0) >= 0 {
			return sandboxer.E(sandboxer.Invalid, nil, "%s contains a NUL byte, which no command can have", what)
		}
	}
	return nil
}

func checkName(name string) error {
	ok := name != "" && (name[0] < '0' || name[0] > '9')
	for _, c := range []byte(name) {
		ok = ok && (c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9')
	}
	if !ok {
		return sandboxer.E(sandboxer.Invalid, nil, "%q is not a valid name of an environment variable on a host", name)
	}
	return nil
}
