// Package users reads the files of users and groups that a sandbox has, /etc/passwd and /etc/group. The code that opens them
// bounds what is read, and refuses what is not a file: root inside decides what is at these paths.
package users

import (
	"bufio"
	"cmp"
	"io"
	"iter"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// A User is the user that a process runs as, or that a file belongs to.
type User struct {
	Name     string // empty for a number without an entry
	UID, GID uint32
	Home     string
	Groups   []uint32 // supplementary
}

// Find finds "name", "uid", "name:group" or "uid:gid". A number needs no entry, nor does root, and a name goes before a
// number. Without group, which may be nil, a group is a number, and the user has no supplementary ones. Kind: Invalid for
// a user or a group that does not exist.
func Find(user string, passwd, group io.Reader) (User, error) {
	who, of, hasGroup := strings.Cut(user, ":")
	u := User{Home: "/"}
	uid, numeric := number(who)
	found := false
	for f := range Rows(passwd) {
		if len(f) < 6 || f[0] != who && (!numeric || f[2] != who) {
			continue
		}
		id, ok1 := number(f[2])
		gid, ok2 := number(f[3])
		if !ok1 || !ok2 {
			continue
		}
		found = true
		u.Name, u.UID, u.GID, u.Home = f[0], id, gid, cmp.Or(f[5], "/")
		if f[0] == who {
			break
		}
	}
	switch {
	case found:
	case numeric:
		u.UID, u.GID = uid, uid
	case who == "root": // an image without a passwd file still has root
		u.Name, u.Home = who, "/root"
	default:
		return User{}, sandboxer.E(sandboxer.Invalid, nil, "there is no user %q in the sandbox", user)
	}
	gid, gidNumeric := number(of)
	if group == nil && hasGroup && !gidNumeric {
		return User{}, sandboxer.E(sandboxer.Invalid, nil, "%q is not a user: want a name, or uid:gid in numbers", user)
	}
	named := false
	for f := range Rows(group) {
		id, ok := uint32(0), false
		if len(f) >= 4 {
			id, ok = number(f[2])
		}
		if !ok {
			continue
		}
		if hasGroup && f[0] == of {
			u.GID, named = id, true
		}
		for m := range strings.SplitSeq(f[3], ",") {
			if m == cmp.Or(u.Name, who) {
				u.Groups = append(u.Groups, id)
			}
		}
	}
	switch {
	case !hasGroup || named:
	case gidNumeric:
		u.GID = gid
	default:
		return User{}, sandboxer.E(sandboxer.Invalid, nil, "there is no group %q in the sandbox", of)
	}
	return u, nil
}

// NamesGroup reports whether Find needs the file of groups to find the group of a user.
func NamesGroup(user string) bool {
	_, group, both := strings.Cut(user, ":")
	_, numeric := number(group)
	return both && !numeric
}

// Name is the name that a file of users or groups has for a number, or the number as text.
func Name(file io.Reader, id uint32) string {
	want := strconv.FormatUint(uint64(id), 10)
	for f := range Rows(file) {
		if len(f) > 2 && f[2] == want {
			return f[0]
		}
	}
	return want
}

// Rows are the fields of the lines of a file, which may be nil, without comments and empty lines.
func Rows(file io.Reader) iter.Seq[[]string] {
	return func(yield func([]string) bool) {
		if file == nil {
			return
		}
		s := bufio.NewScanner(file)
		for s.Scan() {
			if line := s.Text(); line != "" && line[0] != '#' && !yield(strings.Split(line, ":")) {
				return
			}
		}
	}
}

func number(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil
}
