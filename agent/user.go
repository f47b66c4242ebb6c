package agent

import (
	"cmp"
	"io"
	"net/http"
	"os"
	"strings"
	"syscall"

	"github.com/sand-boxer/sandboxer/internal/users"
)

// A user is the identity of a process or the owner of a file.
type user struct {
	name     string
	uid, gid uint32
	groups   []uint32 // supplementary
	home     string
}

// A userDB reads passwd and group files. They are read each time, because
// programs in the sandbox add users.
type userDB struct{ passwd, group string }

// lookup finds "name", "uid", "name:group" or "uid:gid". A number needs no entry.
// It reports false when there is no such user or group.
func (db userDB) lookup(spec string) (user, bool) {
	passwd, group := openUsers(db.passwd), openUsers(db.group)
	defer passwd.Close()
	defer group.Close()
	u, err := users.Find(spec, passwd, group)
	if err != nil {
		return user{}, false
	}
	who, _, _ := strings.Cut(spec, ":")
	return user{name: cmp.Or(u.Name, who), uid: u.UID, gid: u.GID, groups: u.Groups, home: u.Home}, true
}

// userName and groupName give the names of numbers, or the number as text if it is
// unknown.
func (db userDB) userName(uid uint32) string  { return nameOf(db.passwd, uid) }
func (db userDB) groupName(gid uint32) string { return nameOf(db.group, gid) }

func nameOf(file string, id uint32) string {
	r := openUsers(file)
	defer r.Close()
	return users.Name(r, id)
}

// openUsers opens the beginning of a file of users or groups. A missing file, or one that is not regular,
// is empty.
func openUsers(file string) io.ReadCloser {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0) // root inside may have made it a named pipe
	if err != nil {
		return http.NoBody
	}
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		f.Close()
		return http.NoBody
	}
	return struct {
		io.Reader
		io.Closer
	}{io.LimitReader(f, 16<<20), f}
}
