package process

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/protocol"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// A script is started for each call (mode: call): with the method as its last argument, the request as JSON on its
// standard input and the plain parts of it as variables. It answers on its standard output, as JSON or in lines
// key=value, and with its exit status. docs/extension-sdk.md says how.
type script struct{ s *supervisor }

const (
	defaultCalls = 16 // processes at once
	// exitUnsupported is the exit status of a script that does not know a method (EX_USAGE of sysexits).
	exitUnsupported = 64
)

// callable are the capabilities that a script can have: none with streams.
var callable = []sandboxer.Capability{
	sandboxer.CanExpose, sandboxer.CanProbe, sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanSnapshot, sandboxer.CanQuote, sandboxer.CanMeter,
	sandboxer.CanPause, sandboxer.CanRenew, sandboxer.CanCapacity, sandboxer.CanStats, sandboxer.CanNetwork,
	sandboxer.CanCheck, sandboxer.CanNotices, sandboxer.CanCaches, sandboxer.CanForget, sandboxer.CanPorts, sandboxer.CanAdmit, sandboxer.CanLimits, sandboxer.CanPlace,
}

// describeByCall asks a script what it is.
func (s *supervisor) describeByCall(ctx context.Context) (d sandboxer.Description, err error) {
	ctx, cancel := context.WithTimeout(ctx, protocol.HelloTime)
	defer cancel()
	d = sandboxer.Description{Isolation: sandboxer.Isolations(), Pricing: sandboxer.PricingModels(),
		Inputs: []sandboxer.Input{{Name: sandboxer.AnyInput, Help: "what the extension takes; it does not declare its inputs", Restricted: true}}}
	switch err = (script{s}).call(ctx, protocol.MethodDescribe, nil, &d, ""); {
	case sandboxer.KindOf(err) == sandboxer.Unsupported: // it has the three verbs and nothing to say of itself
	case err != nil:
		return d, err
	}
	for _, c := range d.Capabilities {
		if !slices.Contains(callable, c) {
			return d, sandboxer.E(sandboxer.Invalid, nil, "command: a script that is started for each call cannot have %.40q, which needs streams", c).
				WithHint("it can have: %s", joinWords(callable))
		}
	}
	return d, checkDescription(d, s.hidden.hide)
}

func joinWords[S ~string](words []S) string {
	var out []string
	for _, w := range words {
		out = append(out, string(w))
	}
	return strings.Join(out, ", ")
}

// expect implements link: there are no streams.
func (c script) expect(string) (<-chan arrival, func()) {
	a := make(chan arrival, 1)
	a <- arrival{err: sandboxer.E(sandboxer.Unsupported, nil, "a script that is started for each call has no streams")}
	return a, func() {}
}

// A callInput is what a script reads.
type callInput struct {
	Method    string          `json:"method"`
	Params    any             `json:"params"`
	TimeoutMS int64           `json:"timeout_ms,omitempty"`
	Extension string          `json:"extension"`
	Owner     string          `json:"owner"`
	Dir       string          `json:"dir"`
	Config    json.RawMessage `json:"config"` // with secrets
}

// call implements link.
func (c script) call(ctx context.Context, method string, params, result any, _ string) error {
	end, err := c.turn(ctx, method, params)
	if err != nil {
		return err
	}
	defer end()
	s := c.s
	select {
	case s.calls <- struct{}{}:
		defer func() { <-s.calls }()
	case <-ctx.Done():
		return ctx.Err()
	case <-s.base.Done():
		return sandboxer.E(sandboxer.Unavailable, nil, "%s is closed", s.env.Extension)
	}
	in, env, err := c.request(ctx, method, params)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err // a script that began might do it all before it is killed
	}
	p, err := s.spawn(nil, []string{method}, env)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { p.stop(context.Cause(ctx)) })
	defer stop()
	closed := context.AfterFunc(s.base, func() { p.stop(errors.New("the extension is closed")) })
	defer closed()
	go func() {
		_, _ = p.in.Write(in) // one that does not read it does not need it
		p.in.Close()
	}()
	read := make(chan []byte, 1)
	go func() {
		out, _ := io.ReadAll(io.LimitReader(p.out, protocol.MaxLine+1))
		if len(out) > protocol.MaxLine {
			p.stop(fmt.Errorf("it answers more than %d bytes", protocol.MaxLine))
		}
		read <- out
	}()
	<-p.ended
	var out []byte
	select {
	case out = <-read:
	case <-time.After(stopTime): // somebody else still holds its output
		p.out.Close()
		out = <-read
	}
	p.out.Close()
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(out) > protocol.MaxLine {
		return p.why()
	}
	return c.answered(p, method, params, out, result)
}

// turnsDir has the locks of sandboxes.
const turnsDir = "turns"

// turn waits until no other call of a script changes the sandbox that method does, in any process, and
// returns what ends its own turn.
func (c script) turn(ctx context.Context, method string, params any) (end func(), err error) {
	var key string
	switch p := params.(type) {
	case protocol.SpecParams:
		key = p.Spec.ID
	case protocol.RestoreParams:
		key = p.Spec.ID
	case protocol.OfSandbox:
		key = p.Handle.SandboxID
	case protocol.SnapshotParams:
		key = p.Handle.SandboxID
	case protocol.RenewParams:
		key = p.Handle.SandboxID
	case protocol.NetworkParams:
		key = p.Handle.SandboxID
	case protocol.DropParams:
		key = "snapshot-" + p.Snapshot.SnapshotID
	}
	if key == "" || slices.Contains([]string{protocol.MethodIsAlive, protocol.MethodStats, protocol.MethodListPorts, protocol.MethodCheck, protocol.MethodDefaultLimits}, method) {
		return func() {}, nil
	}
	dir := filepath.Join(c.s.env.Dir, turnsDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	l, err := filelock.Take(ctx, filepath.Join(dir, url.PathEscape(key)), filelock.Exclusive)
	if err != nil {
		return nil, err
	}
	return l.Remove, nil // whoever waits makes the file anew
}

// request is what a script is told.
func (c script) request(ctx context.Context, method string, params any) (in []byte, env []string, err error) {
	s := c.s
	config, err := s.env.Config(true)
	if err != nil {
		return nil, nil, err
	}
	s.hidden.learn(s.p.config, config)
	if params == nil {
		params = struct{}{}
	}
	call := callInput{Method: method, Params: params, Extension: s.env.Extension, Owner: s.env.Owner, Dir: s.env.Dir, Config: config}
	if deadline, ok := ctx.Deadline(); ok {
		call.TimeoutMS = max(time.Until(deadline).Milliseconds(), 1)
	}
	if in, err = json.Marshal(call); err != nil {
		return nil, nil, sandboxer.E(sandboxer.Invalid, err, "what %s is told cannot be written as JSON", method)
	}
	v := variables{}
	v.set("METHOD", method)
	owner := s.env.Owner
	if p, ok := params.(protocol.OwnerParams); ok {
		owner = p.Owner
	}
	v.set("OWNER", owner)
	v.set("DIR", s.env.Dir)
	v.set("EXTENSION_ID", s.env.Extension)
	if call.TimeoutMS > 0 {
		v.set("TIMEOUT", strconv.FormatInt((call.TimeoutMS+999)/1000, 10))
	}
	var without, with map[string]any
	if json.Unmarshal(s.p.config, &without) == nil && json.Unmarshal(config, &with) == nil {
		for k, x := range with {
			if reflect.DeepEqual(x, without[k]) { // no secret
				v.scalars("CONFIG_", map[string]any{k: x})
			}
		}
	}
	if p, ok := params.(protocol.SpecParams); ok {
		v.set("ASKS", strings.Join(asks(p), " "))
	}
	var fields map[string]any
	if j, err := json.Marshal(params); err == nil && json.Unmarshal(j, &fields) == nil {
		v.params(fields)
	}
	return in, v.list, v.bad
}

// asks are what a request wants of a sandbox besides its inputs, so that a script can refuse what it does not keep.
func asks(p protocol.SpecParams) (names []string) {
	s := p.Spec
	for _, a := range []struct {
		name  string
		asked bool
	}{
		{"image", s.Image != ""}, {"command", len(s.Command) > 0}, {"env", len(p.Env) > 0}, {"network", s.Network.Mode != ""}, {"mounts", len(s.Mounts) > 0},
		{"ports", len(s.Ports) > 0}, {"workspace", s.Workspace != ""}, {"user", s.User != ""},
	} {
		if a.asked {
			names = append(names, a.name)
		}
	}
	for _, l := range s.Limits.Each() {
		if l.Value != 0 {
			names = append(names, "limits."+l.Name)
		}
	}
	return names
}

// variables are those of a script, all with the prefix SANDBOXER_.
type variables struct {
	list []string
	bad  error // what no variable can hold
}

// maxVariable bounds the value of one: the kernel takes no more, and a stamp has less.
const maxVariable = 120 << 10

func (v *variables) set(name, value string) {
	switch {
	case strings.ContainsRune(value, 0):
		v.bad = sandboxer.E(sandboxer.Invalid, nil, "the value of %.60s has a NUL byte, which no script can get", strings.ToLower(name))
	case len(value) > maxVariable:
		v.bad = sandboxer.E(sandboxer.Invalid, nil, "the value of %.60s has %d bytes; a script can get %d", strings.ToLower(name), len(value), maxVariable)
	case slices.ContainsFunc(v.list, func(s string) bool { return strings.HasPrefix(s, "SANDBOXER_"+name+"=") }):
		v.bad = sandboxer.E(sandboxer.Invalid, nil, "two names are the same to a script: SANDBOXER_%.60s", name)
	default:
		v.list = append(v.list, "SANDBOXER_"+name+"="+value)
	}
}

// upper is a name as that of a variable.
func upper(name string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return unicode.ToUpper(r)
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, name)
}

// scalars sets the values of m that are no lists and objects, in the order of names.
func (v *variables) scalars(prefix string, m map[string]any) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if text, ok := scalar(m[k]); ok {
			v.set(prefix+upper(k), text)
		}
	}
}

func scalar(x any) (string, bool) {
	switch x := x.(type) {
	case string:
		return x, true
	case bool:
		return strconv.FormatBool(x), true
	case float64:
		return strconv.FormatFloat(x, 'f', -1, 64), true
	}
	return "", false
}

// params sets what of a request's params is plain: the sandbox, its host, its inputs and its handle.
func (v *variables) params(p map[string]any) {
	if spec, ok := p["spec"].(map[string]any); ok {
		if prof, ok := spec["profile"].(map[string]any); ok {
			v.scalars("PROFILE_", map[string]any{"id": prof["id"]})
		}
		if inputs, ok := spec["inputs"].(map[string]any); ok {
			v.scalars("INPUT_", inputs)
		}
		v.scalars("", map[string]any{"id": spec["id"], "generation": spec["generation"], "image": spec["image"], "user": spec["user"]})
	}
	if h, ok := p["handle"].(map[string]any); ok {
		v.scalars("", map[string]any{"id": h["sandbox_id"], "generation": cmp.Or(h["generation"], any(float64(0))), "host": cmp.Or(h["host"], any("localhost"))})
		if data, ok := h["data"].(map[string]any); ok {
			v.scalars("HANDLE_", data)
		}
	}
	if s, ok := p["snapshot"].(map[string]any); ok {
		v.scalars("SNAPSHOT_", map[string]any{"id": s["snapshot_id"]})
		if meta, ok := s["meta"].(map[string]any); ok {
			v.scalars("SNAPSHOT_META_", meta)
		}
	}
	for _, name := range []string{"host", "port", "until", "duration_ms", "name", "stamp"} {
		if x, ok := p[name]; ok {
			v.scalars("", map[string]any{name: x})
		}
	}
	if id, ok := p["id"]; ok { // of discover a sandbox, of snapshot the snapshot
		name := "id"
		if _, ok := p["handle"]; ok {
			name = "snapshot_id"
		}
		v.scalars("", map[string]any{name: id})
	}
}

// answered reads what a script said.
func (c script) answered(p *child, method string, params any, out []byte, result any) error {
	p.mu.Lock()
	status, cause, last := p.status, p.cause, p.last
	p.mu.Unlock()
	if cause != nil {
		return p.why()
	}
	trimmed := bytes.TrimSpace(out)
	isJSON := bytes.HasPrefix(trimmed, []byte("{"))
	var exit *exec.ExitError
	if errors.As(status, &exit) {
		if exit.ExitCode() < 0 { // by a signal
			return p.why()
		}
		e := protocol.Error{Kind: sandboxer.Failed}
		if isJSON {
			if _, err := strictjson.DecodeStored(trimmed, &e); err != nil {
				return c.unreadable(method, err)
			}
		} else {
			fields, err := lines(out)
			if err != nil {
				return c.unreadable(method, err)
			}
			e.Kind = sandboxer.Kind(cmp.Or(fields.first("kind"), string(e.Kind)))
			e.Message, e.Hint = fields.first("message"), fields.first("hint")
			e.RetryAfterMS, _ = strconv.ParseInt(fields.first("retry_after_ms"), 10, 64)
		}
		if exit.ExitCode() == exitUnsupported {
			e.Kind, e.Message = sandboxer.Unsupported, cmp.Or(e.Message, fmt.Sprintf("%s does not support %s", c.s.env.Extension, method))
		}
		if e.Message == "" {
			e.Message = fmt.Sprintf("%s: %s failed (%s)", c.s.env.Extension, method, exit)
			if last != "" {
				e.Message += ": " + protocol.Line(last, maxLast)
			}
		}
		return e.Err(c.s.hidden.hide)
	}
	if status != nil {
		return sandboxer.E(sandboxer.Unavailable, status, "%s could not be watched to its end", c.s.p.title())
	}
	if result == nil {
		return nil
	}
	if !isJSON {
		fields, err := lines(out)
		if err != nil {
			return c.unreadable(method, err)
		}
		if trimmed, err = fields.result(method, params); err != nil {
			return c.unreadable(method, err)
		}
	}
	if _, err := strictjson.DecodeStored(trimmed, result); err != nil {
		return c.unreadable(method, err)
	}
	return nil
}

func (c script) unreadable(method string, err error) error {
	return sandboxer.E(sandboxer.Internal, nil, "what %s answers to %s cannot be read: %s", c.s.env.Extension, method, protocol.Line(c.s.hidden.hide(err.Error()), maxLast))
}

// fields are lines key=value, in order.
type fields [][2]string

// lines reads them. Empty ones are passed over.
func lines(out []byte) (f fields, err error) {
	for line := range strings.Lines(string(out)) {
		line = strings.TrimRight(line, "\r\n")
		if strings.TrimSpace(line) == "" {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if key = strings.TrimSpace(key); !ok || key == "" || strings.ContainsFunc(key, unicode.IsSpace) {
			return nil, errors.New("this line is no key=value: " + line)
		}
		f = append(f, [2]string{key, value})
	}
	return f, nil
}

func (f fields) all(key string) (out []string) {
	for _, kv := range f {
		if kv[0] == key {
			out = append(out, kv[1])
		}
	}
	return out
}

func (f fields) first(key string) string {
	if all := f.all(key); len(all) > 0 {
		return all[0]
	}
	return ""
}

// result makes of the lines what a method answers, as JSON.
func (f fields) result(method string, params any) ([]byte, error) {
	switch method {
	case protocol.MethodProvision, protocol.MethodRestore:
		var spec sandboxer.Spec
		var host string
		switch p := params.(type) {
		case protocol.SpecParams:
			spec, host = p.Spec, p.Host
		case protocol.RestoreParams:
			spec, host = p.Spec, p.Host
		}
		return json.Marshal(f.handle(spec.ID, spec.Generation, host))
	case protocol.MethodDiscover:
		id := params.(protocol.IDParams).ID
		generation, _ := strconv.Atoi(f.first("generation"))
		stamp, err := base64.StdEncoding.DecodeString(f.first("stamp"))
		if err != nil {
			return nil, errors.New("the stamp is not as it was given")
		}
		return json.Marshal(protocol.Found{Handle: f.handle(id, generation, "localhost"), Stamp: stamp})
	case protocol.MethodWaitReady:
		r := sandboxer.Reachability{Extra: map[string]string{}}
		for _, kv := range f {
			known := map[string]*string{"host": &r.Host, "ssh": &r.SSH, "remote_dir": &r.RemoteDir, "compose_project": &r.ComposeProject, "url": &r.URL}
			if at := known[kv[0]]; at != nil {
				*at = kv[1]
			} else if kv[0] != "sandbox_id" {
				r.Extra[kv[0]] = kv[1]
			}
		}
		return json.Marshal(r)
	case protocol.MethodTeardown:
		r := sandboxer.CleanupReport{}
		for _, kv := range f {
			switch kv[0] {
			case "removed":
				r.Removed = append(r.Removed, kv[1])
			case "kept":
				r.Kept = append(r.Kept, kv[1])
			case "warnings":
				r.Warnings = append(r.Warnings, kv[1])
			case "sandbox_id":
			default:
				r.Removed = append(r.Removed, kv[0]+": "+kv[1])
			}
		}
		return json.Marshal(r)
	case protocol.MethodListRunning:
		out := []sandboxer.Handle{}
		for _, text := range f.all("handle") {
			parts := strings.Fields(text)
			if len(parts) < 2 || len(parts) > 3 {
				return nil, errors.New("want handle=ID GENERATION [HOST], not handle=" + text)
			}
			generation, err := strconv.Atoi(parts[1])
			if err != nil {
				return nil, errors.New("the generation is no number: handle=" + text)
			}
			h := sandboxer.Handle{SandboxID: parts[0], Generation: generation}
			if len(parts) == 3 {
				h.Host = parts[2]
			}
			out = append(out, h)
		}
		return json.Marshal(map[string]any{"values": out})
	case protocol.MethodCaches, protocol.MethodPruneCaches:
		out := []protocol.Cache{}
		for _, text := range f.all("cache") {
			size, name, _ := strings.Cut(text, " ")
			n, err := strconv.ParseInt(size, 10, 64)
			if err != nil || n < 0 || name == "" {
				return nil, fmt.Errorf("cache=%s: want BYTES NAME", protocol.Line(text, 60))
			}
			out = append(out, protocol.Cache{Host: cmp.Or(params.(protocol.OnHost).Host, "localhost"), Name: name, Bytes: n})
		}
		return json.Marshal(map[string]any{"values": out})
	case protocol.MethodSnapshot:
		s := sandboxer.Snapshot{SnapshotID: params.(protocol.SnapshotParams).ID, Meta: map[string]string{}}
		for _, kv := range f {
			switch kv[0] {
			case "bytes":
				s.Bytes, _ = strconv.ParseInt(kv[1], 10, 64)
			default:
				s.Meta[kv[0]] = kv[1]
			}
		}
		return json.Marshal(s)
	case protocol.MethodDescribe:
		return f.description()
	}
	out := map[string]any{} // one name after the other; those of lists may be repeated
	for _, kv := range f {
		switch kv[0] {
		case "free", "port", "memory_bytes", "disk_bytes", "pids", "cpu_ns", "milli_cpu", "gpus", "amount", "setup", "per_hour", "cost":
			out[kv[0]] = json.Number(kv[1])
		case "hosts", "notices", "remains":
			list, _ := out[kv[0]].([]string)
			out[kv[0]] = append(list, kv[1])
		default:
			out[kv[0]] = kv[1]
		}
	}
	return json.Marshal(out)
}

func (f fields) handle(id string, generation int, host string) sandboxer.Handle {
	h := sandboxer.Handle{SandboxID: cmp.Or(f.first("sandbox_id"), id), Generation: generation, Host: cmp.Or(f.first("host"), host), Ref: f.first("ref")}
	data := map[string]string{}
	for _, kv := range f {
		if !slices.Contains([]string{"sandbox_id", "generation", "host", "ref", "stamp"}, kv[0]) {
			data[kv[0]] = kv[1]
		}
	}
	h.Data, _ = json.Marshal(data)
	return h
}

func (f fields) description() ([]byte, error) {
	d := map[string]any{}
	var inputs []sandboxer.Input
	for _, kv := range f {
		name, input := strings.CutPrefix(kv[0], "input.")
		switch {
		case input:
			inputs = append(inputs, sandboxer.Input{Name: name, Help: kv[1], Restricted: true})
		case kv[0] == "capabilities", kv[0] == "isolation_levels", kv[0] == "pricing_models":
			d[kv[0]] = strings.FieldsFunc(kv[1], func(r rune) bool { return r == ',' || unicode.IsSpace(r) })
		default:
			d[kv[0]] = kv[1]
		}
	}
	if inputs != nil {
		d["inputs"] = inputs
	}
	return json.Marshal(d)
}
