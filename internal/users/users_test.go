package users

import (
	"reflect"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func TestFind(t *testing.T) {
	const (
		passwd = "# who is here\nroot:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n1001:x:2000:2000::/home/odd:/bin/sh\nbob:x:1001:1001::\nbad:x:minus:1:::\nsix:x:6:6::/six\n"
		group  = "root:x:0:\nstaff:x:50:ann,1234\n77:x:78:\n"
	)
	ann := User{Name: "ann", UID: 1000, GID: 1000, Home: "/home/ann", Groups: []uint32{50}}
	annStaff, annNumber := ann, ann
	annStaff.GID, annNumber.GID = 50, 9
	for user, want := range map[string]User{
		"root":       {Name: "root", Home: "/root"},
		"ann":        ann,
		"1000":       ann,
		"ann:staff":  annStaff,
		"ann:9":      annNumber,
		"1001":       {Name: "1001", UID: 2000, GID: 2000, Home: "/home/odd"}, // a name goes before a number
		"1234":       {UID: 1234, GID: 1234, Home: "/", Groups: []uint32{50}},
		"1234:staff": {UID: 1234, GID: 50, Home: "/", Groups: []uint32{50}},
		"1234:77":    {UID: 1234, GID: 78, Home: "/", Groups: []uint32{50}},
		"bob":        {Name: "bob", UID: 1001, GID: 1001, Home: "/"},
		"six":        {Name: "six", UID: 6, GID: 6, Home: "/six"},
	} {
		if got, err := Find(user, strings.NewReader(passwd), strings.NewReader(group)); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v, %v; want %+v", user, got, err, want)
		}
	}
	for _, user := range []string{"", "carl", "bad", "ann:nobody", "ann:", "4294967296"} {
		if got, err := Find(user, strings.NewReader(passwd), strings.NewReader(group)); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%q: %+v, %v; want an error of the kind Invalid", user, got, err)
		}
	}
	if got, err := Find("root", nil, nil); err != nil || got.UID != 0 || got.Home != "/root" {
		t.Errorf("root without files: %+v, %v", got, err)
	}
	if got, err := Find("ann:staff", strings.NewReader(passwd), nil); sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(sandboxer.Message(err), "in numbers") {
		t.Errorf("a group by name without the file of groups: %+v, %v", got, err)
	}
	for user, want := range map[string]bool{"ann": false, "ann:1": false, "1:1": false, "ann:staff": true, "1:": true} {
		if NamesGroup(user) != want {
			t.Errorf("NamesGroup(%q) is not %v", user, want)
		}
	}
	if a, b := Name(strings.NewReader(passwd), 1000), Name(strings.NewReader(passwd), 12); a != "ann" || b != "12" {
		t.Errorf("names: %q, %q", a, b)
	}
}
