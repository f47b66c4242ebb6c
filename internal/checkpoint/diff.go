package checkpoint

// A Change is how one path differs between two checkpoints.
type Change struct {
	Path string // of File
	// Kind is "added", "removed", "content" (also another type or link target) or
	// "meta" (permissions or time only).
	Kind     string
	Old, New *File // nil where there is none
}

// The kinds of changes.
const (
	Added   = "added"
	Removed = "removed"
	Content = "content"
	Touched = "meta"
)

// Diff returns what differs between two checkpoints, in the order of the paths.
func Diff(a, b *Manifest) []Change {
	var out []Change
	i, j := 0, 0
	for i < len(a.Files) || j < len(b.Files) {
		c := 0
		switch {
		case i == len(a.Files):
			c = 1
		case j == len(b.Files):
			c = -1
		default:
			c = compareNames(a.Files[i].Name(), b.Files[j].Name())
		}
		switch {
		case c < 0:
			out = append(out, Change{Path: a.Files[i].Path, Kind: Removed, Old: &a.Files[i]})
			i++
		case c > 0:
			out = append(out, Change{Path: b.Files[j].Path, Kind: Added, New: &b.Files[j]})
			j++
		default:
			x, y := &a.Files[i], &b.Files[j]
			switch {
			case a.contents(x) != b.contents(y):
				out = append(out, Change{Path: y.Path, Kind: Content, Old: x, New: y})
			case x.Mode != y.Mode || x.Mtime != y.Mtime || x.Nsec != y.Nsec:
				out = append(out, Change{Path: y.Path, Kind: Touched, Old: x, New: y})
			}
			i, j = i+1, j+1
		}
	}
	return out
}

// contents is equal for entries that read alike. A hard link reads like its file.
func (m *Manifest) contents(f *File) string {
	if f.Type == TypeHardlink {
		if to, ok := m.find(f.Link); ok {
			f = to
		}
	}
	if f.Type == TypeFile {
		return f.Digest
	}
	return f.Type + "\x00" + f.Link
}
