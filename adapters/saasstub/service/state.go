package service

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// The files of the service's directory.
const (
	stateFile    = "state.json"
	settingsFile = "settings.json"
	lockFile     = "lock"
	startFile    = "start"
	socketFile   = "socket"
	logFile      = "log"
)

const stateVersion = 1

// state is the content of stateFile.
type state struct {
	V         int                 `json:"v"`        // stateVersion
	Requests  int64               `json:"requests"` // by which the seed chooses faults and names
	Sandboxes map[string]Sandbox  `json:"sandboxes"`
	Snapshots map[string]Snapshot `json:"snapshots"`
	Ended     []Sandbox           `json:"ended,omitempty"` // the last maxEnded
}

func (s *state) empty() bool { return len(s.Sandboxes)+len(s.Snapshots) == 0 }

// maxFile bounds a file that is read: the bounds of the service make the state smaller.
const maxFile = 64 << 20

// readFile decodes a file of the directory into v, and leaves v as it is if there is no such file.
func readFile(dir, name string, v any) error {
	f, err := os.Open(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err == nil {
		_, err = strictjson.DecodeStored(data, v)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	return nil
}

func readState(dir string) (*state, error) {
	s := &state{V: stateVersion}
	if err := readFile(dir, stateFile, s); err != nil {
		return nil, err
	}
	if s.V != stateVersion {
		return nil, fmt.Errorf("%s was written by another version of this program (version %d; this one knows %d)", filepath.Join(dir, stateFile), s.V, stateVersion)
	}
	if s.Sandboxes == nil {
		s.Sandboxes = map[string]Sandbox{}
	}
	if s.Snapshots == nil {
		s.Snapshots = map[string]Snapshot{}
	}
	return s, nil
}

func (s *state) write(dir string) error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return wholefile.Write(filepath.Join(dir, stateFile), data)
}

// end ends a sandbox at a time, and keeps it for its usage.
func (s *state) end(sb Sandbox, at time.Time) {
	sb.Ended = at
	delete(s.Sandboxes, sb.Ref)
	s.Ended = append(s.Ended, sb)
	s.Ended = slices.Delete(s.Ended, 0, max(0, len(s.Ended)-maxEnded))
}

// expire ends the sandboxes whose lifetime is over, and reports whether there was one.
func (s *state) expire(now time.Time, f Faults) (any bool) {
	for _, sb := range s.Sandboxes {
		until := sb.Expires
		if early := sb.Created.Add(f.Expire); f.Expire > 0 && early.Before(until) {
			until = early
		}
		if !now.Before(until) {
			s.end(sb, until)
			any = true
		}
	}
	return any
}
