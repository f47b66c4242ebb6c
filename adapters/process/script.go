package process

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
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

// A script is an extension that starts a command for each call: the other side of the protocol, in a process of its own,
// which supervises its commands as the broker supervises that process. docs/reference/extension-sdk.md describes what
// commands get and how they answer.
type script struct {
	super  *supervisor
	hello  *protocol.Hello
	plain  map[string]json.RawMessage // the configuration without settings that have secrets in them
	places chan struct{}              // for calls at the same time
}

const (
	scriptPlaces    = 16
	maxVariable     = 120 << 10 // bytes; the kernel takes little more
	exitUnsupported = 64        // status of a script that does not have a method (EX_USAGE of sysexits)
	turnsDir        = "turns"   // has the locks of sandboxes, in the extension's directory
)

// streamed are the capabilities that no script can have.
var streamed = []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanDial, sandboxer.CanCheckpoint,
	sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch, sandboxer.CanNotify, sandboxer.CanPool}

// reading are methods that do not wait for other calls of their sandbox.
var reading = []string{protocol.MethodIsAlive, protocol.MethodStats, protocol.MethodListPorts, protocol.MethodExpose, protocol.MethodCheck, protocol.MethodPlace,
	protocol.MethodAdmit, protocol.MethodDefaultLimits, protocol.MethodEstimateCost, protocol.MethodMeterActual, protocol.MethodDiscover}

// ServeScript speaks the extension protocol on in and out until in ends. It starts command for each call, with the method
// as its last argument.
func ServeScript(ctx context.Context, command []string, in io.Reader, out io.Writer) error {
	r := protocol.NewReader(in)
	hello, err := protocol.ReadHello(r)
	if err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "no server is connected to the standard input of this program").
			WithHint("servers and `sandboxer extension test` start it")
	}
	env := sandboxer.Env{Extension: hello.Extension, Dir: ".", Log: slog.Default()} // this process is in its directory
	s := &script{super: newSupervisor(env, &program{command: command}), hello: hello, places: make(chan struct{}, scriptPlaces)}
	defer s.super.end()
	s.super.say = func(line string, _ bool) { fmt.Fprintln(os.Stderr, line) } // the broker logs it
	_ = json.Unmarshal(hello.Config, &s.plain)                                // none in a hello without one
	for _, name := range hello.Secrets {
		delete(s.plain, name)
	}
	without, err := json.Marshal(s.plain)
	if err == nil {
		s.super.hidden.learn(without, hello.Config)
		err = os.MkdirAll(turnsDir, 0o700)
	}
	ours := protocol.Hello{Protocols: protocol.Versions, Program: "sandboxer extension serve-script"}
	if err == nil {
		_, err = protocol.Agree(hello.Protocols)
	}
	if err == nil {
		ours.Description, err = s.describe(ctx)
	}
	ours.Error = protocol.Traced(err)
	if err := errors.Join(err, protocol.WriteHello(out, ours)); err != nil {
		return err
	}
	conn := protocol.New(r, out, protocol.Options{Serve: s.serve, Trace: true, MaxServed: maxAsked})
	defer conn.Wait()
	defer conn.Close()
	if err := conn.Run(ctx); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// describe asks the script for its description. Without this method it has the three verbs and takes any input.
func (s *script) describe(ctx context.Context) (*sandboxer.Description, error) {
	d := sandboxer.Description{Isolation: sandboxer.Isolations(), Pricing: sandboxer.PricingModels()}
	answer, err := s.call(ctx, protocol.MethodDescribe, nil)
	if err == nil {
		err = s.decode(protocol.MethodDescribe, answer, &d)
	}
	if err != nil && sandboxer.KindOf(err) != sandboxer.Unsupported {
		return nil, err
	}
	for _, c := range d.Capabilities {
		if slices.Contains(streamed, c) {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "command: a script cannot have the capability %q", c).WithHint("write a Python class or a Go adapter for it")
		}
	}
	if d.Inputs == nil {
		d.Inputs = []sandboxer.Input{{Name: sandboxer.AnyInput, Help: "the inputs of the extension, which does not declare them", Restricted: true}}
	}
	return &d, nil
}

// serve answers a request of the broker; one with a stream is for a list.
func (s *script) serve(ctx context.Context, r *protocol.Request) (any, error) {
	answer, err := s.call(ctx, r.Method, r.Params)
	if err != nil || r.Token == "" {
		return answer, err
	}
	var list struct {
		Values []json.RawMessage `json:"values"`
	}
	if err := s.decode(r.Method, answer, &list); err != nil {
		return nil, err
	}
	stream, err := protocol.OpenStream(s.hello.Streams, r.Token)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the broker's socket for streams cannot be reached")
	}
	go func() { // the broker reads it after the answer
		defer stream.Close()
		for _, v := range list.Values {
			if stream.SendJSON(protocol.ChannelOut, v) != nil {
				return
			}
		}
		_ = stream.Send(protocol.ChannelEnd, nil)
	}()
	return nil, nil
}

// call starts the command for a method, and returns its answer.
func (s *script) call(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	in, v, err := s.request(ctx, method, params)
	if err != nil {
		return nil, err
	}
	if key := cmp.Or(v["ID"], v["SNAPSHOT_ID"]); key != "" && !slices.Contains(reading, method) {
		turn, err := filelock.Take(ctx, filepath.Join(turnsDir, url.PathEscape(key)), filelock.Exclusive)
		if err != nil {
			return nil, err
		}
		defer turn.Remove()
	}
	select {
	case s.places <- struct{}{}:
		defer func() { <-s.places }()
	case <-ctx.Done():
	}
	if err := ctx.Err(); err != nil {
		return nil, err // a script that began might do all of it before it is killed
	}
	env := os.Environ() // the broker chose it
	for name, value := range v {
		env = append(env, "SANDBOXER_"+name+"="+value)
	}
	p, err := s.super.spawn(nil, []string{method}, env)
	if err != nil {
		return nil, err
	}
	defer p.out.Close()
	defer context.AfterFunc(ctx, func() { p.stop(context.Cause(ctx)) })()
	go func() {
		_, _ = p.in.Write(in) // a script that does not read it does not need it
		p.in.Close()
	}()
	read := make(chan []byte, 1)
	go func() {
		out, _ := io.ReadAll(io.LimitReader(p.out, protocol.MaxLine+1))
		if len(out) > protocol.MaxLine {
			p.stop(fmt.Errorf("its answer is longer than %d bytes", protocol.MaxLine))
		}
		read <- out
	}()
	<-p.ended
	defer time.AfterFunc(stopTime, func() { p.out.Close() }).Stop() // a process that lives on may hold it
	var out []byte
	select {
	case out = <-read:
	case <-ctx.Done():
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return s.answer(p, method, v, out)
}

// request returns the input of the command, and its variables without their prefix.
func (s *script) request(ctx context.Context, method string, params json.RawMessage) (in []byte, v map[string]string, err error) {
	if len(params) == 0 {
		params = json.RawMessage("{}")
	}
	r := map[string]any{"method": method, "params": params, "extension": s.hello.Extension, "owner": s.hello.Owner, "dir": s.hello.Dir, "config": s.hello.Config}
	v = map[string]string{"DIR": s.hello.Dir}
	if deadline, ok := ctx.Deadline(); ok {
		left := max(time.Until(deadline), time.Millisecond)
		r["timeout_ms"], v["TIMEOUT"] = left.Milliseconds(), fmt.Sprint(int64((left+time.Second-1)/time.Second))
	}
	var p struct {
		protocol.SpecParams
		Handle   sandboxer.Handle   `json:"handle"`
		Snapshot sandboxer.Snapshot `json:"snapshot"`
		ID       string             `json:"id"`
		Owner    string             `json:"owner"`
	}
	var keys struct {
		Spec map[string]json.RawMessage `json:"spec"`
	}
	var data map[string]json.RawMessage
	in, err = json.Marshal(r)
	if err = errors.Join(err, json.Unmarshal(params, &p), json.Unmarshal(params, &keys)); err != nil {
		return nil, nil, sandboxer.E(sandboxer.Invalid, nil, "the params of %.64q cannot be read: %s", method, err)
	}
	_ = json.Unmarshal(p.Handle.Data, &data) // other forms than a mapping have no fields
	set := func(name, text string) {
		name = strings.Map(func(r rune) rune {
			if r = unicode.ToUpper(r); r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
				return r
			}
			return '_'
		}, name)
		switch _, twice := v[name]; {
		case len(text) > maxVariable || strings.ContainsRune(text, 0):
			err = sandboxer.E(sandboxer.Invalid, nil, "the value of SANDBOXER_%.60s cannot be passed to a script: it has more than %d bytes or a NUL byte", name, maxVariable)
		case twice:
			err = sandboxer.E(sandboxer.Invalid, nil, "two names give a script the same variable: SANDBOXER_%.60s", name)
		default:
			v[name] = text
		}
	}
	if method == protocol.MethodSnapshot {
		p.Snapshot.SnapshotID, p.ID = p.ID, ""
	}
	set("ID", cmp.Or(p.Spec.ID, p.Handle.SandboxID, p.ID))
	set("GENERATION", strconv.Itoa(cmp.Or(p.Spec.Generation, p.Handle.Generation)))
	set("HOST", cmp.Or(p.Host, p.Handle.Host, "localhost"))
	set("OWNER", cmp.Or(p.Owner, s.hello.Owner))
	set("SNAPSHOT_ID", p.Snapshot.SnapshotID)
	var asks []string
	for _, name := range []string{"image", "command", "network", "mounts", "ports", "workspace", "user"} {
		if keys.Spec[name] != nil {
			asks = append(asks, name)
		}
	}
	if len(p.Env) > 0 {
		asks = append(asks, "env")
	}
	for _, l := range p.Spec.Limits.Each() {
		if l.Value != 0 {
			asks = append(asks, "limits."+l.Name)
		}
	}
	set("ASKS", strings.Join(asks, " "))
	for k, text := range p.Spec.Inputs {
		set("INPUT_"+k, text)
	}
	for k, text := range p.Snapshot.Meta {
		set("SNAPSHOT_META_"+k, text)
	}
	for prefix, m := range map[string]map[string]json.RawMessage{"CONFIG_": s.plain, "HANDLE_": data} {
		for k, raw := range m {
			if text := string(raw); !strings.ContainsAny(text[:1], "{[n") { // a text, number or boolean
				_ = json.Unmarshal(raw, &text) // which only a text is
				set(prefix+k, text)
			}
		}
	}
	return in, v, err
}

// answer reads a command's output, as JSON or in lines.
func (s *script) answer(p *child, method string, v map[string]string, out []byte) (json.RawMessage, error) {
	p.mu.Lock()
	status, cause, last := p.status, p.cause, p.last
	p.mu.Unlock()
	exit, failed := errors.AsType[*exec.ExitError](status)
	if cause != nil || status != nil && (!failed || exit.ExitCode() < 0) {
		return nil, p.why()
	}
	if out = bytes.TrimSpace(out); !bytes.HasPrefix(out, []byte("{")) {
		object, err := object(v, string(out))
		if method == protocol.MethodDiscover && !failed {
			object = map[string]any{"handle": object}
		}
		if err == nil {
			out, err = json.Marshal(object)
		}
		if err != nil {
			return nil, s.unreadable(method, err)
		}
	}
	if !failed {
		return out, s.decode(method, out, &map[string]any{}) // one that the broker cannot read would end the connection
	}
	e := protocol.Error{Kind: sandboxer.Failed}
	if err := s.decode(method, out, &e); err != nil {
		return nil, err
	}
	if exit.ExitCode() == exitUnsupported {
		e.Kind, e.Message = sandboxer.Unsupported, cmp.Or(e.Message, fmt.Sprintf("%s does not support %s", s.hello.Extension, method))
	}
	if e.Message == "" {
		e.Message = strings.TrimSuffix(fmt.Sprintf("%s: %s failed (%s): %s", s.hello.Extension, method, exit, protocol.Line(last, maxLast)), ": ")
	}
	return nil, e.Err(s.super.hidden.hide)
}

func (s *script) decode(method string, answer []byte, v any) error {
	if _, err := strictjson.DecodeStored(answer, v); err != nil {
		return s.unreadable(method, err)
	}
	return nil
}

func (s *script) unreadable(method string, err error) error {
	return sandboxer.E(sandboxer.Internal, nil, "the answer of %s to %s cannot be read: %s", s.hello.Extension, method, protocol.Line(s.super.hidden.hide(err.Error()), maxLast))
}

// object is the answer that lines key=value stand for. It has the names of every answer: the reader of one takes its own.
func object(v map[string]string, text string) (map[string]any, error) {
	data, extra := map[string]string{}, map[string]string{}
	out := map[string]any{"sandbox_id": v["ID"], "generation": json.RawMessage(v["GENERATION"]), "host": v["HOST"], "snapshot_id": v["SNAPSHOT_ID"], "data": data, "meta": data, "extra": extra}
	add := func(key string, item any) {
		list, _ := out[key].([]any)
		out[key] = append(list, item)
	}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		key, value, ok := strings.Cut(line, "=")
		key = strings.TrimSpace(key)
		words := strings.FieldsFunc(value, func(r rune) bool { return r == ',' || unicode.IsSpace(r) })
		input, isInput := strings.CutPrefix(key, "input.")
		switch {
		case line == "":
			continue
		case !ok || key == "" || strings.ContainsFunc(key, unicode.IsSpace):
			return nil, errors.New("this line is not key=value: " + line)
		case isInput:
			add("inputs", sandboxer.Input{Name: input, Help: value, Restricted: true})
		}
		switch key {
		case "handle":
			if words = append(words, v["HOST"]); len(words) < 3 {
				return nil, errors.New("want handle=ID GENERATION [HOST], not " + line)
			}
			add("values", map[string]any{"sandbox_id": words[0], "generation": json.RawMessage(words[1]), "host": words[2]})
		case "cache":
			size, name, ok := strings.Cut(value, " ")
			if !ok {
				return nil, errors.New("want cache=BYTES NAME, not " + line)
			}
			add("values", map[string]any{"host": v["HOST"], "bytes": json.RawMessage(size), "name": name})
		case "removed", "kept", "warnings":
			add(key, value)
		case "capabilities", "isolation_levels", "pricing_models":
			out[key] = words
		case "generation", "retry_after_ms":
			out[key] = json.RawMessage(value)
		default:
			out[key] = value
		}
		data[key], extra[key] = value, value
	}
	for _, own := range []string{"sandbox_id", "generation", "host", "ref"} {
		delete(data, own)
	}
	for _, own := range []string{"host", "ssh", "remote_dir", "compose_project", "url"} {
		delete(extra, own)
	}
	return out, nil
}
