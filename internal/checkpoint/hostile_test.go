package checkpoint

import (
	"archive/tar"
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// raw makes a header that archive/tar would not write.
func raw(e entry, change func(b []byte)) []byte {
	b := appendHeader(nil, &e)
	if change != nil {
		h := b[len(b)-blockSize:]
		change(h)
		copy(h[148:156], "        ")
		n := 0
		for _, c := range h {
			n += int(c)
		}
		copy(h[148:156], fmt.Sprintf("%06o\x00 ", n))
	}
	return b
}

var endMark = make([]byte, 2*blockSize)

// hostile are archives that must not get through, each with what the refusal says.
func hostile(t testing.TB) map[string]struct {
	data  []byte
	why   string
	rules Rules
} {
	dir, link, hard := byte(tar.TypeDir), byte(tar.TypeSymlink), byte(tar.TypeLink)
	type c = struct {
		data  []byte
		why   string
		rules Rules
	}
	many := func(n int) (items []item) {
		for i := range n {
			items = append(items, item{name: fmt.Sprintf("f%d", i)})
		}
		return items
	}
	good := archive(t, item{name: "a", body: strings.Repeat("x", 2000)}, item{name: "b", body: "y"})
	file := entry{name: "f", kind: tar.TypeReg, mode: 0o644}
	return map[string]c{
		"absolute name":                {data: archive(t, item{name: "/etc/passwd", body: "x"}), why: "absolute name"},
		"parent":                       {data: archive(t, item{name: "../x", body: "x"}), why: "leads out of the root"},
		"parent inside":                {data: archive(t, item{name: "a/../../x", body: "x"}), why: "leads out of the root"},
		"parent at the end":            {data: archive(t, item{name: "a/..", kind: dir}), why: "leads out of the root"},
		"parent that stays":            {data: archive(t, item{name: "a/../b", body: "x"}), why: "leads out of the root"},
		"no name":                      {data: append(raw(entry{name: "", kind: tar.TypeReg}, nil), endMark...), why: "no name"},
		"absolute link":                {data: archive(t, item{name: "l", kind: link, link: "/etc/passwd"}), why: "out of the root"},
		"link to the parent":           {data: archive(t, item{name: "l", kind: link, link: ".."}), why: "out of the root"},
		"link deep to the parent":      {data: archive(t, item{name: "a/b/l", kind: link, link: "../../../x"}), why: "out of the root"},
		"link by way of a link":        {data: archive(t, item{name: "s", kind: link, link: "."}, item{name: "t", kind: link, link: "s/../x"}), why: "out of the root"},
		"link without target":          {data: append(raw(entry{name: "l", kind: link}, nil), endMark...), why: "no target"},
		"long target":                  {data: archive(t, item{name: "l", kind: link, link: strings.Repeat("a/", 3000)}), why: "the target"},
		"file below an outside link":   {data: archive(t, item{name: "l", kind: link, link: "/etc"}, item{name: "l/passwd", body: "x"}), why: "no directory", rules: Rules{OutsideLinks: true}},
		"file below an inside link":    {data: archive(t, item{name: "d", kind: dir}, item{name: "l", kind: link, link: "d"}, item{name: "l/x", body: "x"}), why: "no directory"},
		"directory below a link":       {data: archive(t, item{name: "l", kind: link, link: "d"}, item{name: "l/x/", kind: dir}), why: "no directory"},
		"link below a link":            {data: archive(t, item{name: "l", kind: link, link: "d"}, item{name: "l/x", kind: link, link: "y"}), why: "no directory"},
		"file below a file":            {data: archive(t, item{name: "f", body: "x"}, item{name: "f/x", body: "x"}), why: "no directory"},
		"directory becomes a link":     {data: archive(t, item{name: "d/x", body: "x"}, item{name: "d", kind: link, link: "e"}), why: "twice"},
		"link becomes a directory":     {data: archive(t, item{name: "d", kind: link, link: "e"}, item{name: "d/", kind: dir}), why: "twice"},
		"link, then file through it":   {data: archive(t, item{name: "l", kind: link, link: "t"}, item{name: "l", body: "x"}), why: "twice"},
		"duplicate file":               {data: archive(t, item{name: "f", body: "x"}, item{name: "./f", body: "y"}), why: "twice"},
		"duplicate, otherwise spelled": {data: archive(t, item{name: "a/f", body: "x"}, item{name: "a//./f", body: "y"}), why: "twice"},
		"duplicate directory":          {data: archive(t, item{name: "d/", kind: dir}, item{name: "d/", kind: dir}), why: "twice"},
		"case only":                    {data: archive(t, item{name: "README", body: "x"}, item{name: "readme", body: "y"}), why: "case", rules: Rules{FoldCase: true}},
		"case of a directory":          {data: archive(t, item{name: ".git/config", body: "x"}, item{name: ".GIT/config", body: "y"}), why: "case", rules: Rules{FoldCase: true}},
		"hard link outside":            {data: archive(t, item{name: "h", kind: hard, link: "/etc/shadow"}), why: "hard link"},
		"hard link to the parent":      {data: archive(t, item{name: "h", kind: hard, link: "../x"}), why: "hard link"},
		"hard link to nothing":         {data: archive(t, item{name: "h", kind: hard, link: "x"}), why: "no earlier file"},
		"hard link to a later file":    {data: archive(t, item{name: "h", kind: hard, link: "x"}, item{name: "x", body: "x"}), why: "no earlier file"},
		"hard link to itself":          {data: archive(t, item{name: "h", kind: hard, link: "h"}), why: "no earlier file"},
		"hard link to a directory":     {data: archive(t, item{name: "d/", kind: dir}, item{name: "h", kind: hard, link: "d"}), why: "no earlier file"},
		"hard link to an outside link": {data: archive(t, item{name: "a/l", kind: link, link: "../x"}, item{name: "h", kind: hard, link: "a/l"}), why: "out of the root"},
		"hard link with contents":      {data: append(append(raw(file, nil), raw(entry{name: "h", kind: hard, link: "f", size: 5}, nil)...), endMark...), why: "not a file, but has"},
		"directory with contents":      {data: append(raw(entry{name: "d", kind: dir, size: 5}, nil), endMark...), why: "not a file, but has"},
		"character device":             {data: archive(t, item{name: "null", kind: tar.TypeChar}), why: "character device"},
		"block device":                 {data: archive(t, item{name: "sda", kind: tar.TypeBlock}), why: "block device"},
		"FIFO":                         {data: archive(t, item{name: "p", kind: tar.TypeFifo}), why: "FIFO"},
		"unknown type":                 {data: append(raw(entry{name: "x", kind: 'V'}, nil), endMark...), why: "unknown type"},
		"multi-volume":                 {data: append(raw(entry{name: "x", kind: 'M'}, nil), endMark...), why: "unknown type"},
		"old sparse":                   {data: append(raw(file, func(h []byte) { h[156] = 'S'; copy(h[257:], "ustar  \x00"); copy(h[483:], "77777777777\x00") }), endMark...), why: "parse"},
		"PAX sparse":                   {data: sparsePAX(), why: "sparse"},
		"sparse bomb":                  {data: sparseBomb(), why: "refused"},
		"file called like a directory": {data: append(raw(file, func(h []byte) { copy(h, "f/\x00") }), endMark...), why: "with the name of a directory"},
		"link called like a directory": {data: append(raw(entry{name: "l", kind: link, link: "x"}, func(h []byte) { copy(h, "l/\x00") }), endMark...), why: "with the name of a directory"},
		"global header with path":      {data: archive(t, item{name: "g", kind: tar.TypeXGlobalHeader, pax: map[string]string{"path": "../x"}}, item{name: "f"}), why: "global header"},
		"root is a link":               {data: archive(t, item{name: ".", kind: link, link: "x"}), why: "root is not a directory"},
		"root twice":                   {data: archive(t, item{name: "./", kind: dir}, item{name: "./", kind: dir}), why: "twice"},
		"too many entries":             {data: archive(t, many(50)...), why: "more than 20 entries", rules: Rules{Entries: 20}},
		"too many implied directories": {data: archive(t, item{name: strings.Repeat("d/", 30) + "f"}), why: "more than 20 entries", rules: Rules{Entries: 20}},
		"too deep":                     {data: archive(t, item{name: strings.Repeat("d/", 300) + "f"}), why: "deep"},
		"long name":                    {data: archive(t, item{name: strings.Repeat("dddddddd/", 600) + "f"}), why: "bytes"},
		"long component":               {data: archive(t, item{name: strings.Repeat("n", 256)}), why: "bytes"},
		"too much in one file":         {data: archive(t, item{name: "f", body: "12345"}), why: "limit for one file", rules: Rules{FileBytes: 4}},
		"too much together":            {data: archive(t, item{name: "f", body: "12345"}, item{name: "g", body: "12345"}), why: "more than 9 bytes", rules: Rules{Bytes: 9}},
		"size that is not there":       {data: append(raw(entry{name: "f", kind: tar.TypeReg, size: 1 << 40}, nil), make([]byte, 4096)...), why: "limit"},
		"size just not there":          {data: append(raw(entry{name: "f", kind: tar.TypeReg, size: 9000}, nil), make([]byte, 4096)...), why: "cut short"},
		"negative size":                {data: append(raw(file, func(h []byte) { copy(h[124:], "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff") }), endMark...), why: "not a proper tar"},
		"cut in the contents":          {data: good[:1000], why: "cut short"},
		"cut between entries":          {data: good[:512+2048], why: "end marker"},
		"without its end":              {data: good[:len(good)-1024], why: "end marker"},
		"half its end":                 {data: good[:len(good)-512], why: "end marker"},
		"empty":                        {data: nil, why: "end marker"},
		"another one behind it":        {data: append(bytes.Clone(good), good...), why: "follows its end"},
		"endless zeros":                {data: append(bytes.Clone(good), make([]byte, 5<<20)...), why: "follow its end"},
		"garbage":                      {data: bytes.Repeat([]byte("garbage!"), 200), why: "not a proper tar"},
		"wrong checksum":               {data: func() []byte { d := bytes.Clone(good); d[0] ^= 1; return d }(), why: "not a proper tar"},
		"endless headers":              {data: bytes.Repeat(archive(t, item{name: strings.Repeat("p", 200) + "/x"})[:1024], 6000), why: "headers"},
	}
}

// sparsePAX is what `tar --sparse --format=posix` makes.
func sparsePAX() []byte {
	rec := appendRecord(nil, "GNU.sparse.major", "1")
	rec = appendRecord(rec, "GNU.sparse.minor", "0")
	rec = appendRecord(rec, "GNU.sparse.name", "f")
	rec = appendRecord(rec, "GNU.sparse.realsize", "1048576")
	b := appendBlock(nil, block{name: "x", size: int64(len(rec)), kind: tar.TypeXHeader})
	b = append(append(b, rec...), make([]byte, padded(int64(len(rec)))-int64(len(rec)))...)
	body := make([]byte, 512)
	copy(body, "1\n0\n0\n")
	b = appendBlock(b, block{name: "GNUSparseFile.1/f", mode: 0o644, size: 512, kind: tar.TypeReg})
	return append(append(b, body...), endMark...)
}

// sparseBomb has a terabyte in a few bytes.
func sparseBomb() []byte {
	rec := appendRecord(nil, "GNU.sparse.size", "1099511627776")
	rec = appendRecord(rec, "GNU.sparse.numblocks", "1")
	rec = appendRecord(rec, "GNU.sparse.map", "1099511627776,0")
	b := appendBlock(nil, block{name: "x", size: int64(len(rec)), kind: tar.TypeXHeader})
	b = append(append(b, rec...), make([]byte, padded(int64(len(rec)))-int64(len(rec)))...)
	return append(appendBlock(b, block{name: "f", mode: 0o644, kind: tar.TypeReg}), endMark...)
}

func TestHostile(t *testing.T) {
	corpus := hostile(t)
	if len(corpus) < 30 {
		t.Errorf("%d archives; want 30", len(corpus))
	}
	s := newStore(t, newDir(t), Options{})
	n := 0
	for name, c := range corpus {
		t.Run(name, func(t *testing.T) {
			n++
			_, err := s.Save(t.Context(), fmt.Sprint("h", n), Meta{}, bytes.NewReader(c.data), SaveOptions{Rules: c.rules})
			wantKind(t, err, sandboxer.Invalid)
			if !strings.Contains(err.Error(), c.why) {
				t.Errorf("Save = %v; want %q", err, c.why)
			}
		})
	}
	if list, err := s.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("List = %v, %v; want nothing", list, err)
	}
}

// What is altered rather than refused is counted.
func TestChanges(t *testing.T) {
	in := archive(t,
		item{name: "su", body: "x", mode: 0o6755},
		item{name: "x", body: "x", pax: map[string]string{"SCHILY.xattr.security.capability": "all", "SCHILY.xattr.user.k": "v"}},
		item{name: "own", body: "x", hdr: func(h *tar.Header) { h.Uid, h.Gid, h.Uname = 1000, 1000, "me" }},
		item{name: "p", kind: tar.TypeFifo}, item{name: "p2", kind: tar.TypeLink, link: "p"},
		item{name: "out", kind: tar.TypeSymlink, link: "/usr/bin/python3"})
	s := newStore(t, newDir(t), Options{})
	rules := Rules{SkipSpecial: true, OutsideLinks: true}
	for _, keep := range []Keep{{}, {Owners: true, Xattrs: true}} {
		m, err := s.Save(t.Context(), fmt.Sprintf("c%t", keep.Owners), Meta{}, bytes.NewReader(in), SaveOptions{Rules: rules, Keep: keep})
		if err != nil {
			t.Fatal(err)
		}
		if want := (Changes{SetID: 1, Attributes: 1, Skipped: 2, OutsideLinks: 1}); m.Changed != want {
			t.Errorf("changed = %+v; want %+v", m.Changed, want)
		}
		tr := tar.NewReader(bytes.NewReader(readAll(t, s, m.ID)))
		for h, err := tr.Next(); err == nil; h, err = tr.Next() {
			if h.Mode&0o7000 != 0 {
				t.Errorf("%s has the mode %o", h.Name, h.Mode)
			}
			if kept := h.Uid == 1000; kept != (keep.Owners && h.Name == "own") || h.Uname != "" {
				t.Errorf("%s belongs to %d %q", h.Name, h.Uid, h.Uname)
			}
			if h.PAXRecords["SCHILY.xattr.security.capability"] != "" || (h.PAXRecords["SCHILY.xattr.user.k"] == "v") != (keep.Xattrs && h.Name == "x") {
				t.Errorf("%s has the records %v", h.Name, h.PAXRecords)
			}
		}
	}
}
