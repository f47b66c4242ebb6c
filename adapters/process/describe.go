package process

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/protocol"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// descriptionFile is where an extension's description is kept.
const descriptionFile = "description.json"

// A kept description is that of the program with the digest.
type kept struct {
	Digest      string                `json:"digest"`
	Description sandboxer.Description `json:"description"`
}

func readDescription(dir, digest string) (sandboxer.Description, bool) {
	// The directory may be the extension's: its content must not block the broker.
	f, err := os.OpenFile(filepath.Join(dir, descriptionFile), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return sandboxer.Description{}, false
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return sandboxer.Description{}, false
	}
	data, err := io.ReadAll(io.LimitReader(f, 2*protocol.MaxLine))
	var k kept
	if err == nil {
		_, err = strictjson.DecodeStored(data, &k)
	}
	if err != nil || k.Digest != digest || checkDescription(k.Description, nil) != nil {
		return sandboxer.Description{}, false // it is asked for again
	}
	return k.Description, true
}

// forgetDescription has the description requested again when the extension is next opened.
func forgetDescription(dir string) error {
	err := os.Remove(filepath.Join(dir, descriptionFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// sameDescription compares two descriptions: the schema of a kept one is written differently.
func sameDescription(a, b sandboxer.Description) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

func writeDescription(dir, digest string, d sandboxer.Description) error {
	data, err := json.Marshal(kept{digest, d})
	if err != nil {
		return err
	}
	return wholefile.Replace(filepath.Join(dir, descriptionFile), data)
}

// Bounds of a description.
const (
	maxInputs = 200
	maxHelp   = 4 << 10
)

// checkDescription refuses an invalid description. Quotes from it go through hide, unless that is nil.
func checkDescription(d sandboxer.Description, hide func(string) string) error {
	wrong := func(format string, args ...any) error {
		return sandboxer.E(sandboxer.Invalid, nil, "the extension's description of itself is invalid: "+format, args...)
	}
	unknown := func(s string) string {
		if hide != nil {
			s = hide(s)
		}
		return fmt.Sprintf("%.40q", s)
	}
	if len(d.Isolation) == 0 {
		return wrong("it has no isolation level")
	}
	for _, l := range d.Isolation {
		if !slices.Contains(sandboxer.Isolations(), l) {
			return wrong("there is no isolation level %s", unknown(string(l)))
		}
	}
	if len(d.Pricing) == 0 {
		return wrong("it has no pricing model")
	}
	for _, m := range d.Pricing {
		if !slices.Contains(sandboxer.PricingModels(), m) {
			return wrong("there is no pricing model %s", unknown(string(m)))
		}
	}
	all := slices.Concat(sandboxer.Capabilities(), sandboxer.Besides())
	for i, c := range d.Capabilities {
		if slices.Contains(d.Capabilities[:i], c) {
			return wrong("it lists the capability %s twice", unknown(string(c)))
		}
		if !slices.Contains(all, c) {
			return wrong("there is no capability %s", unknown(string(c)))
		}
	}
	if len(d.Inputs) > maxInputs {
		return wrong("it has %d inputs; at most %d", len(d.Inputs), maxInputs)
	}
	seen := map[string]bool{}
	for _, in := range d.Inputs {
		switch {
		case in.Name != sandboxer.AnyInput && sandboxer.CheckInputName(in.Name) != nil:
			return wrong("%s is not a valid name of an input", unknown(in.Name))
		case seen[in.Name]:
			return wrong("it lists the input %s twice", unknown(in.Name))
		case len(in.Help) > maxHelp || len(in.Default) > maxHelp || len(in.OneOf) > sandboxer.MaxInputName:
			return wrong("a text of the input %s is too long", unknown(in.Name))
		case control(in.Help) || control(in.Default) || control(in.OneOf):
			return wrong("a text of the input %s has control characters", unknown(in.Name))
		}
		seen[in.Name] = true
	}
	for _, text := range []string{d.Title, d.Help, d.Runtime} {
		if len(text) > maxHelp || control(text) {
			return wrong("one of its texts is longer than %d bytes, or contains control characters", maxHelp)
		}
	}
	return nil
}

// control reports whether a text would do something to a terminal.
func control(text string) bool {
	return strings.ContainsFunc(text, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 })
}

// Bounds of the input of a digest.
const (
	maxDigestFiles = 10_000
	maxDigestBytes = 1 << 30
)

// digest identifies what a description depends on: the command line, the configuration and the files.
func (p *program) digest() (string, error) {
	h := sha256.New()
	shape, err := json.Marshal(struct {
		Versions []int
		Program  sandboxer.Program
		Command  []string
		Config   json.RawMessage
		SDK      string
	}{protocol.Versions, p.Program, p.command, p.config, sdkDigest()})
	if err != nil {
		return "", sandboxer.E(sandboxer.Internal, err, "the extension's configuration cannot be written")
	}
	h.Write(shape)
	files, left := 0, int64(maxDigestBytes)
	add := func(name string, st fs.FileInfo) error {
		if files++; files > maxDigestFiles {
			return sandboxer.E(sandboxer.Invalid, nil, "path: the directory has more than %d Python files", maxDigestFiles)
		}
		fmt.Fprintf(h, "\x00%s\x00%d\x00", name, st.Size())
		if st.Size() > left { // an interpreter of this size does not exist: its date must do
			fmt.Fprintf(h, "%d", st.ModTime().UnixNano())
			return nil
		}
		left -= st.Size()
		f, err := os.Open(name)
		if err != nil {
			return nil // starting it reports that
		}
		defer f.Close()
		_, err = io.Copy(h, io.LimitReader(f, st.Size()))
		return err
	}
	for _, name := range p.command {
		if st, err := os.Stat(name); err == nil && st.Mode().IsRegular() && filepath.IsAbs(name) {
			if err := add(name, st); err != nil {
				return "", err
			}
		}
	}
	for _, dir := range p.modules {
		err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return nil // the interpreter tells
			case d.IsDir() && name != dir && (strings.HasPrefix(d.Name(), ".") || d.Name() == "__pycache__"):
				return fs.SkipDir
			case !strings.HasSuffix(name, ".py"):
				return nil
			}
			st, err := os.Stat(name)
			if err != nil || !st.Mode().IsRegular() {
				return nil
			}
			return add(name, st)
		})
		if err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
