package manager

import (
	"context"
	"slices"
	"strings"
)

// Change is one difference between two snapshots.
type Change struct {
	Path   string `json:"path"`
	Change string `json:"change"` // "added", "removed", "changed"
	Before int64  `json:"before"` // size; 0 where it was added
	After  int64  `json:"after"`  // size; 0 where it was removed
}

// Diff compares the files of two portable snapshots, in the order of names.
func (m *Manager) Diff(ctx context.Context, before, after string) ([]Change, error) {
	var lists [2][]SnapshotFile
	for i, ref := range []string{before, after} {
		rec, err := m.portable(ctx, ref)
		if err != nil {
			return nil, err
		}
		if lists[i], err = m.opts.SnapshotStore.Files(ctx, rec.ID); err != nil {
			return nil, err
		}
	}
	return compare(lists[0], lists[1]), nil
}

// compare merges two lists that are in the order of paths.
func compare(a, b []SnapshotFile) []Change {
	out := []Change{}
	byPath := func(a, b SnapshotFile) int { return strings.Compare(a.Path, b.Path) }
	a, b = slices.SortedFunc(slices.Values(a), byPath), slices.SortedFunc(slices.Values(b), byPath)
	for len(a) > 0 || len(b) > 0 {
		switch {
		case len(b) == 0 || len(a) > 0 && a[0].Path < b[0].Path:
			out = append(out, Change{a[0].Path, "removed", a[0].Size, 0})
			a = a[1:]
		case len(a) == 0 || b[0].Path < a[0].Path:
			out = append(out, Change{b[0].Path, "added", 0, b[0].Size})
			b = b[1:]
		default:
			if a[0] != b[0] {
				out = append(out, Change{a[0].Path, "changed", a[0].Size, b[0].Size})
			}
			a, b = a[1:], b[1:]
		}
	}
	return out
}
