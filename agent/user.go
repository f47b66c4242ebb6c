package agent

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"
)

// A user is who a process runs as or a file belongs to.
type user struct {
	name     string
	uid, gid uint32
	groups   []uint32 // supplementary
	home     string
}

// A userDB reads passwd and group files. They are read anew each time, because
// programs in the sandbox add users.
type userDB struct{ passwd, group string }

// lookup finds "name", "uid", "name:group" or "uid:gid". A number needs no entry.
// It reports false when there is no such user or group.
func (db userDB) lookup(spec string) (user, bool) {
	who, group, hasGroup := strings.Cut(spec, ":")
	u := user{name: who, home: "/"}
	uid, numeric := number(who)
	found := false
	eachLine(db.passwd, func(f []string) bool {
		if len(f) < 6 || (f[0] != who && !(numeric && f[2] == who)) {
			return true
		}
		id, ok1 := number(f[2])
		gid, ok2 := number(f[3])
		if !ok1 || !ok2 {
			return true
		}
		found = true
		u.name, u.uid, u.gid, u.home = f[0], id, gid, f[5]
		return f[0] != who // a name goes before a number
	})
	switch {
	case found:
	case numeric:
		u.uid, u.gid = uid, uid
	case who == "root": // an image without a passwd file still has root
		u.home = "/root"
	default:
		return user{}, false
	}
	if u.home == "" {
		u.home = "/"
	}
	gid, groupNumeric := number(group)
	groupFound := false
	eachLine(db.group, func(f []string) bool {
		if len(f) < 4 {
			return true
		}
		id, ok := number(f[2])
		if !ok {
			return true
		}
		if hasGroup && f[0] == group {
			u.gid, groupFound = id, true
		}
		for m := range strings.SplitSeq(f[3], ",") {
			if m == u.name {
				u.groups = append(u.groups, id)
			}
		}
		return true
	})
	if hasGroup && !groupFound {
		if !groupNumeric {
			return user{}, false
		}
		u.gid = gid
	}
	return u, true
}

// userName and groupName give names for numbers, as text of the number when unknown.
func (db userDB) userName(uid uint32) string  { return nameOf(db.passwd, uid) }
func (db userDB) groupName(gid uint32) string { return nameOf(db.group, gid) }

func nameOf(file string, id uint32) string {
	name, want := strconv.FormatUint(uint64(id), 10), strconv.FormatUint(uint64(id), 10)
	eachLine(file, func(f []string) bool {
		if len(f) > 2 && f[2] == want {
			name = f[0]
			return false
		}
		return true
	})
	return name
}

func number(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil
}

func eachLine(file string, f func(fields []string) bool) {
	r, err := os.Open(file)
	if err != nil {
		return
	}
	defer r.Close()
	s := bufio.NewScanner(io.LimitReader(r, 16<<20))
	for s.Scan() {
		if line := s.Text(); line != "" && line[0] != '#' && !f(strings.Split(line, ":")) {
			return
		}
	}
}
