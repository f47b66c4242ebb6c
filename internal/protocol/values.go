package protocol

import (
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"time"
	"unicode/utf8"

	"github.com/sand-boxer/sandboxer"
)

// Bytes are bytes that are mostly text: a JSON string if they are UTF-8, {"base64": "…"} if not.
type Bytes string

type encodedBytes struct {
	Base64 []byte `json:"base64"`
}

// MarshalJSON implements json.Marshaler.
func (b Bytes) MarshalJSON() ([]byte, error) {
	if utf8.ValidString(string(b)) {
		return json.Marshal(string(b))
	}
	return json.Marshal(encodedBytes{[]byte(b)})
}

// UnmarshalJSON implements json.Unmarshaler.
func (b *Bytes) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '{' {
		var e encodedBytes
		if err := json.Unmarshal(data, &e); err != nil {
			return err
		}
		if e.Base64 == nil {
			return errors.New("it has no base64")
		}
		*b = Bytes(e.Base64)
		return nil
	}
	return json.Unmarshal(data, (*string)(b))
}

// values returns m with its values as the other kind of text; nil for nil.
func values[To, From ~string](m map[string]From) map[string]To {
	if m == nil {
		return nil
	}
	out := make(map[string]To, len(m))
	for k, v := range m {
		out[k] = To(v)
	}
	return out
}

// each returns l as the other kind of text.
func each[To, From ~string](l []From) []To {
	out := make([]To, len(l))
	for i, s := range l {
		out[i] = To(s)
	}
	return out
}

// InputID is the input that always holds the sandbox's ID.
const InputID = "sandbox_id"

// SpecParams are the params of methods that make a sandbox; those with further params embed it.
type SpecParams struct {
	Spec  sandboxer.Spec   `json:"spec"`
	Env   map[string]Bytes `json:"env,omitempty"`
	Host  string           `json:"host"`
	Place string           `json:"place,omitempty"`
}

// SpecOf returns the params for spec.
func SpecOf(spec sandboxer.Spec) SpecParams {
	n := SpecParams{Spec: spec, Env: values[Bytes](spec.Env), Place: spec.Place, Host: cmp.Or(spec.Place, spec.Host, "localhost")}
	n.Spec.Inputs = make(map[string]string, len(spec.Inputs)+1)
	maps.Copy(n.Spec.Inputs, spec.Inputs)
	n.Spec.Inputs[InputID] = spec.ID
	return n
}

// Full returns the spec that n was made from.
func (n SpecParams) Full() sandboxer.Spec {
	s := n.Spec
	s.Env, s.Place = values[string](n.Env), n.Place
	if s.Inputs[InputID] == s.ID {
		delete(s.Inputs, InputID)
	}
	if len(s.Inputs) == 0 {
		s.Inputs = nil
	}
	return s
}

// Cmd is sandboxer.Cmd without its streams.
type Cmd struct {
	Args    []Bytes            `json:"args"`
	Env     map[string]Bytes   `json:"env,omitempty"`
	Dir     Bytes              `json:"dir,omitempty"`
	User    string             `json:"user,omitempty"`
	Service string             `json:"service,omitempty"`
	TTY     *sandboxer.WinSize `json:"tty,omitempty"`
	Stdin   bool               `json:"stdin,omitempty"`
}

// CmdOf returns c without its streams, for sending.
func CmdOf(c sandboxer.Cmd) Cmd {
	return Cmd{each[Bytes](c.Args), values[Bytes](c.Env), Bytes(c.Dir), c.User, c.Service, c.TTY, c.Stdin != nil}
}

// Cmd returns the command that c was made from, without streams.
func (c Cmd) Cmd() sandboxer.Cmd {
	return sandboxer.Cmd{Args: each[string](c.Args), Env: values[string](c.Env), Dir: string(c.Dir), User: c.User, Service: c.Service, TTY: c.TTY}
}

// Process is sandboxer.ProcessSpec, or a sandboxer.Process, which has a PID.
type Process struct {
	PID   int                `json:"pid,omitempty"`
	Args  []Bytes            `json:"args"`
	Env   map[string]Bytes   `json:"env,omitempty"`
	Dir   Bytes              `json:"dir,omitempty"`
	User  string             `json:"user,omitempty"`
	TTY   *sandboxer.WinSize `json:"tty,omitempty"`
	Input bool               `json:"input,omitempty"`
	Tag   Bytes              `json:"tag,omitempty"`
}

// ProcessOf returns a running process in the form in which it is sent.
func ProcessOf(p sandboxer.Process) Process {
	return Process{PID: p.PID, Args: each[Bytes](p.Args), Env: values[Bytes](p.Env), Dir: Bytes(p.Dir), Tag: Bytes(p.Tag)}
}

// ProcessSpecOf returns a process to start in the form in which it is sent.
func ProcessSpecOf(p sandboxer.ProcessSpec) Process {
	return Process{0, each[Bytes](p.Args), values[Bytes](p.Env), Bytes(p.Dir), p.User, p.TTY, p.Input, Bytes(p.Tag)}
}

// Process returns the running process that p was made from.
func (p Process) Process() sandboxer.Process {
	return sandboxer.Process{PID: p.PID, Tag: string(p.Tag), Args: each[string](p.Args), Dir: string(p.Dir), Env: values[string](p.Env)}
}

// ProcessSpec returns the process to start.
func (p Process) ProcessSpec() sandboxer.ProcessSpec {
	return sandboxer.ProcessSpec{Args: each[string](p.Args), Env: values[string](p.Env), Dir: string(p.Dir), User: p.User, TTY: p.TTY, Input: p.Input, Tag: string(p.Tag)}
}

// File is sandboxer.FileInfo.
type File struct {
	Path    Bytes     `json:"path"`
	Size    int64     `json:"size"`
	Mode    uint32    `json:"mode"`
	ModTime time.Time `json:"mod_time"`
	Owner   string    `json:"owner,omitempty"`
	Group   string    `json:"group,omitempty"`
	Target  Bytes     `json:"target,omitempty"`
}

// FileOf returns f in the form in which it is sent.
func FileOf(f sandboxer.FileInfo) File {
	return File{Bytes(f.Path), f.Size, uint32(f.Mode), f.ModTime, f.Owner, f.Group, Bytes(f.Target)}
}

// File returns the file that f was made from.
func (f File) File() sandboxer.FileInfo {
	return sandboxer.FileInfo{Path: string(f.Path), Size: f.Size, Mode: fs.FileMode(f.Mode), ModTime: f.ModTime, Owner: f.Owner, Group: f.Group, Target: string(f.Target)}
}

// Change is sandboxer.FileChange.
type Change struct {
	Path Bytes            `json:"path"`
	Op   sandboxer.FileOp `json:"op"`
	File *File            `json:"file,omitempty"`
}

// ChangeOf returns c in the form in which it is sent.
func ChangeOf(c sandboxer.FileChange) Change {
	out := Change{Path: Bytes(c.Path), Op: c.Op}
	if c.File != nil {
		f := FileOf(*c.File)
		out.File = &f
	}
	return out
}

// Change returns the change that c was made from.
func (c Change) Change() sandboxer.FileChange {
	out := sandboxer.FileChange{Path: string(c.Path), Op: c.Op}
	if c.File != nil {
		f := c.File.File()
		out.File = &f
	}
	return out
}
