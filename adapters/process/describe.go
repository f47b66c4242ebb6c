package process

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/protocol"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// descriptionFile is where what an extension said of itself is kept.
const descriptionFile = "description.json"

// A kept description is that of what has the digest.
type kept struct {
	Digest      string                `json:"digest"`
	Description sandboxer.Description `json:"description"`
}

func readDescription(dir, digest string) (sandboxer.Description, bool) {
	f, err := os.Open(filepath.Join(dir, descriptionFile))
	if err != nil {
		return sandboxer.Description{}, false
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 2*protocol.MaxLine))
	var k kept
	if err == nil {
		_, err = strictjson.DecodeStored(data, &k)
	}
	if err != nil || k.Digest != digest || checkDescription(k.Description) != nil {
		return sandboxer.Description{}, false // it is asked for again
	}
	return k.Description, true
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
	maxInputs    = 200
	maxInputName = 128
	maxHelp      = 4 << 10
)

// checkDescription refuses what an extension cannot say of itself.
func checkDescription(d sandboxer.Description) error {
	wrong := func(format string, args ...any) error {
		return sandboxer.E(sandboxer.Invalid, nil, "what the extension says of itself cannot be: "+format, args...)
	}
	unknown := func(s string) string { return fmt.Sprintf("%.40q", s) }
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
	for _, c := range d.Capabilities {
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
		case in.Name == "" || len(in.Name) > maxInputName || strings.ContainsFunc(in.Name, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '=' }):
			return wrong("%s cannot be the name of an input", unknown(in.Name))
		case seen[in.Name]:
			return wrong("the input %s is there twice", unknown(in.Name))
		case len(in.Help) > maxHelp || len(in.Default) > maxHelp || len(in.OneOf) > maxInputName:
			return wrong("the input %s has too long a text", unknown(in.Name))
		}
		seen[in.Name] = true
	}
	for _, text := range []string{d.Title, d.Help, d.Runtime} {
		if len(text) > maxHelp || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' || r == 0x7f }) {
			return wrong("a text of it is longer than %d bytes, or has control characters", maxHelp)
		}
	}
	return nil
}

// Bounds of what a digest is made of.
const (
	maxDigestFiles = 10_000
	maxDigestBytes = 1 << 30
)

// digest identifies what decides over a description: the command line, the configuration and the files.
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
		return "", sandboxer.E(sandboxer.Internal, err, "what the file says of the extension cannot be written")
	}
	h.Write(shape)
	files, left := 0, int64(maxDigestBytes)
	add := func(name string, st fs.FileInfo) error {
		if files++; files > maxDigestFiles {
			return sandboxer.E(sandboxer.Invalid, nil, "path: more than %d Python files are in it", maxDigestFiles)
		}
		fmt.Fprintf(h, "\x00%s\x00%d\x00", name, st.Size())
		if st.Size() > left { // an interpreter of this size does not exist: its date must do
			fmt.Fprintf(h, "%d", st.ModTime().UnixNano())
			return nil
		}
		left -= st.Size()
		f, err := os.Open(name)
		if err != nil {
			return nil // whoever starts it tells
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
