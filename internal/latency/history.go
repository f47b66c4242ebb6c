package latency

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// NewID names a run that begins at t. IDs sort by time, to the millisecond.
func NewID(t time.Time) string {
	at := strings.Replace(t.UTC().Format("20060102-150405.000"), ".", "", 1)
	return at + "-" + strings.ToLower(rand.Text()[:4])
}

// History keeps results as files, one a run.
type History struct{ dir string }

// NewHistory returns the history in dir, which is made when there is something to keep.
func NewHistory(dir string) *History { return &History{dir} }

const suffix = ".json"

// Save keeps r; a crash leaves the whole file or none.
func (h *History) Save(r *Result) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = os.MkdirAll(h.dir, 0o700)
	}
	if err == nil {
		err = wholefile.Write(filepath.Join(h.dir, r.ID+suffix), append(data, '\n'))
	}
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the result cannot be kept in %s", h.dir)
	}
	return nil
}

var runID = regexp.MustCompile(`^\d{8}-\d{9}-[a-z0-9]{4}$`)

// ids returns the runs that are kept, newest first.
func (h *History) ids() ([]string, error) {
	entries, err := os.ReadDir(h.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the history in %s cannot be read", h.dir)
	}
	var out []string
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), suffix); ok && runID.MatchString(id) {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	slices.Reverse(out)
	return out, nil
}

// Results returns every run that is kept, newest first. An unreadable file is named in
// the error, and the others are returned all the same.
func (h *History) Results() ([]*Result, error) {
	ids, err := h.ids()
	if err != nil {
		return nil, err
	}
	var out []*Result
	var bad []string
	for _, id := range ids {
		r, err := h.load(id)
		if err != nil {
			bad = append(bad, id)
			continue
		}
		out = append(out, r)
	}
	if bad != nil {
		err = sandboxer.E(sandboxer.Failed, nil, "in %s these cannot be read: %s", h.dir, strings.Join(bad, ", ")).
			WithHint("remove the files")
	}
	return out, err
}

// Result returns the run that ref means: an ID, a unique beginning of one, or "latest".
// Kinds: NotFound; Conflict when several begin so.
func (h *History) Result(ref string) (*Result, error) {
	ids, err := h.ids()
	if err != nil {
		return nil, err
	}
	var found []string
	for _, id := range ids {
		if id == ref || ref == "latest" {
			found = []string{id}
			break
		}
		if ref != "" && strings.HasPrefix(id, ref) {
			found = append(found, id)
		}
	}
	switch len(found) {
	case 0:
		return nil, sandboxer.E(sandboxer.NotFound, nil, "there is no run %q", ref).WithHint("list the stored runs: sandboxer bench ls")
	case 1:
		return h.load(found[0])
	}
	return nil, sandboxer.E(sandboxer.Conflict, nil, "%q is the beginning of %d runs", ref, len(found)).
		WithHint("write more of it: %s, …", found[0])
}

func (h *History) load(id string) (*Result, error) {
	data, err := os.ReadFile(filepath.Join(h.dir, id+suffix))
	var r Result
	if err == nil {
		_, err = strictjson.DecodeStored(data, &r)
	}
	if err == nil && r.ID != id {
		err = fmt.Errorf("it is the run %q", r.ID)
	}
	if err != nil {
		return nil, sandboxer.E(sandboxer.Failed, err, "the run %s in %s cannot be read", id, h.dir).WithHint("remove the file")
	}
	return &r, nil
}
