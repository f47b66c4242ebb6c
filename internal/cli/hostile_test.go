package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer/api"
)

// hostile has one of every kind of what a terminal may act upon.
const hostile = "a\x1b[2Jb\u009bc\x7fd\u202ee\u2066f\u200eg\u061ch\u2028i\rj\x07k\u00a0l\U000E0041m\u200bn\x1b]0;title\x07o: '\"\\p"

// fill puts hostile text into every field of text.
func fill(v reflect.Value, depth int) {
	if depth > 8 {
		return
	}
	if v.CanAddr() && v.Kind() != reflect.String {
		if _, ok := v.Addr().Interface().(json.Unmarshaler); ok {
			return
		}
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(hostile)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), depth+1)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return
		}
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				fill(v.Field(i), depth+1)
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), depth+1)
	case reflect.Map:
		if v.Type().Key().Kind() != reflect.String {
			return
		}
		x := reflect.New(v.Type().Elem()).Elem()
		fill(x, depth+1)
		k := reflect.New(v.Type().Key()).Elem()
		k.SetString(hostile)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(k, x)
	}
}

func answer[T any](w http.ResponseWriter) {
	var x T
	fill(reflect.ValueOf(&x).Elem(), 0)
	if f, ok := any(&x).(*api.List[api.FileInfo]); ok {
		f.NextCursor = "" // the pages are followed
	}
	if s, ok := any(&x).(*api.List[api.Snapshot]); ok {
		s.NextCursor = ""
		s.Items[0].Parent = "" // not its own
	}
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(x)
}

// hostileServer answers every request, with hostile text in every field.
func hostileServer(w http.ResponseWriter, r *http.Request) {
	p := strings.TrimPrefix(r.URL.Path, "/v1/")
	switch last := p[strings.LastIndexByte(p, '/')+1:]; {
	case strings.Contains(p+"/", "/bad/") || r.Method == http.MethodDelete:
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusConflict)
		_ = json.NewEncoder(w).Encode(api.Problem{Type: hostile, Title: hostile, Status: 409, Code: "conflict", Detail: hostile, Hint: hostile, RequestID: hostile})
	case p == "sandboxes" && r.Method == http.MethodGet:
		answer[api.List[api.Sandbox]](w)
	case p == "snapshots":
		answer[api.List[api.Snapshot]](w)
	case strings.HasSuffix(p, "/diff"):
		answer[api.SnapshotDiff](w)
	case strings.HasPrefix(p, "snapshots/"):
		answer[api.Snapshot](w)
	case last == "fork":
		answer[api.Forked](w)
	case last == "events":
		answer[api.List[api.Event]](w)
	case last == "stats":
		answer[api.Stats](w)
	case last == "ports":
		answer[api.List[api.SandboxPort]](w)
	case last == "url":
		answer[api.PortURL](w)
	case strings.Contains(p, "/ports/"):
		answer[api.SandboxPort](w)
	case last == "list":
		answer[api.List[api.FileInfo]](w)
	case last == "stat":
		answer[api.FileInfo](w)
	case p == "profiles":
		answer[api.List[api.Profile]](w)
	case strings.HasPrefix(p, "profiles/"):
		answer[api.Profile](w)
	case p == "extensions":
		answer[api.List[api.Extension]](w)
	case last == "probe":
		answer[api.HostCapacity](w)
	case p == "pools":
		answer[api.List[api.Pool]](w)
	case p == "keys" && r.Method == http.MethodGet:
		answer[api.List[api.Key]](w)
	case p == "keys":
		answer[api.CreatedKey](w)
	case p == "credits" || p == "credits/grants":
		answer[api.Balance](w)
	case p == "credits/entries":
		answer[api.List[api.Entry]](w)
	case p == "credits/usage":
		answer[api.List[api.UsageRow]](w)
	case p == "credits/sinks":
		answer[api.List[api.Sink]](w)
	case strings.HasPrefix(p, "credits/sinks/"):
		answer[api.Sink](w)
	case p == "audit":
		answer[api.Audit](w)
	case p == "quarantine":
		answer[api.List[api.Quarantined]](w)
	case p == "status":
		answer[api.Status](w)
	case p == "plan":
		answer[api.Plan](w)
	case p == "sweep":
		answer[api.Sweep](w)
	case p == "reload":
		answer[api.Reload](w)
	default:
		answer[api.Sandbox](w)
	}
}

// TestHostileServer: whatever a server says, in any field of any answer, no terminal gets
// anything to act upon, and programs get exactly what was said.
func TestHostileServer(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(hostileServer))
	defer srv.Close()
	commands := []string{
		"ls", "ls --all", "ls --quarantined", "get x", "events", "events x", "stats x", "port ls x", "port open x 80", "port url x 80", "files ls x /", "files stat x /", "snapshot ls", "snapshot tree", "snapshot get x",
		"snapshot diff x y", "profile ls", "profile show x", "extension ls", "extension show x", "extension probe x", "pool ls", "key ls", "key create x", "credits balance", "credits grant x 1", "credits ledger",
		"audit", "status", "plan", "create --wait=none", "reconcile", "reload", "network get x", "extend x --ttl 1h", "pause x", "resume x", "restore x --detach", "fork x", "get bad", "events bad", "stats bad", "destroy x --yes", "snapshot rm x", "files ls bad /",
		"files cat bad /x", "exec bad -- true", "accept", "wait x --for running --timeout 1ms", "bench ls",
	}
	for _, format := range []string{"table", "wide", "json", "jsonl", "yaml", "name", "go-template={{.}}\t{{json .}}"} {
		for _, progress := range []string{"plain", "json"} {
			for _, line := range commands {
				if progress == "json" && format != "json" {
					continue
				}
				stdout, stderr := runWith(t, srv.URL, append(strings.Fields(line), "-o", format, "--progress", progress))
				for _, out := range [][]byte{stdout, stderr} {
					for rest := out; len(rest) > 0; {
						r, n := utf8.DecodeRune(rest)
						if r == utf8.RuneError && n == 1 || r != '\n' && r != '\t' && !unicode.IsPrint(r) {
							t.Errorf("%s -o %s: %q reaches the terminal: %.300q", line, format, r, out)
							break
						}
						rest = rest[n:]
					}
				}
				if len(stdout) == 0 || line == "stats x" || line == "reconcile" { // nothing but numbers
					continue
				}
				switch format {
				case "json":
					var v any
					if err := json.Unmarshal(stdout, &v); err != nil || !holds(v) {
						t.Errorf("%s -o json: %v: what was said is not there: %.300q", line, err, stdout)
					}
				case "yaml":
					var v any
					if err := yaml.Unmarshal(stdout, &v); err != nil || !holds(v) {
						t.Errorf("%s -o yaml: %v: what was said is not there: %.300q", line, err, stdout)
					}
				}
			}
		}
	}
}

// holds reports whether hostile text is somewhere in v, as it was.
func holds(v any) bool {
	switch v := v.(type) {
	case string:
		return v == hostile
	case []any:
		return len(v) == 0 || slices.ContainsFunc(v, holds)
	case map[string]any:
		for k, x := range v {
			if k == hostile || holds(x) {
				return true
			}
		}
	}
	return false
}

// runWith runs a command against a server, in this process.
func runWith(t *testing.T, url string, args []string) (stdout, stderr []byte) {
	t.Helper()
	dir := t.TempDir()
	open := func(name string) *os.File {
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	in, out, errs := open("in"), open("out"), open("err")
	f := testFactory(t)
	home := f.env
	f.env = func(name string) (string, bool) {
		if name == "SANDBOXER_API_KEY" {
			return "sbx_key_abcdefgh_" + strings.Repeat("a", 43), true
		}
		return home(name)
	}
	f.io = &streams{in: in, stdout: out, stderr: errs, out: printer{out}, err: printer{errs}}
	root := newCmdRoot(f)
	root.SetArgs(append(args, "--url", url))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd, err := root.ExecuteContextC(ctx)
	f.report(cmd, err)
	if ctx.Err() != nil {
		t.Errorf("%q does not end", args)
	}
	read := func(f *os.File) []byte {
		b, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	return read(out), read(errs)
}

// TestPrinter: what is shown, and what is not.
func TestPrinter(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	color := &streams{color: true}
	var want bytes.Buffer
	for _, c := range []struct{ in, out string }{
		{"plain\ttext\n", "plain\ttext\n"},
		{"ünï 漢字 😀", "ünï 漢字 😀"},
		{"\x1b[31mred", "\uFFFD[31mred"},
		{"\r\x1b[Kgone", "\uFFFD\uFFFD[Kgone"},
		{"\u009b2J \u202e \x7f \x9b", "\uFFFD2J \uFFFD \uFFFD \uFFFD"},
		{color.paint("31", "error:"), "\x1b[31merror:\x1b[0m"},
		{startOfLine + "x", "\r\x1b[Kx"},
		{control("\x1b[2J"), "\uFFFD\uFFFD[2J\uFFFD"},
		{string([]byte{controlBegin}), "\uFFFD"},
	} {
		if n, err := (printer{f}).Write([]byte(c.in)); n != len(c.in) || err != nil {
			t.Errorf("%q: %d, %v", c.in, n, err)
		}
		want.WriteString(c.out)
	}
	got, err := os.ReadFile(f.Name())
	if err != nil || string(got) != want.String() {
		t.Errorf("%v\n%q\n%q", err, got, want.String())
	}
}

// TestOneWayOut: only the streams of commands inside and the content of files are written
// as they are, and nothing but output.go makes JSON or YAML for people and programs.
func TestOneWayOut(t *testing.T) {
	raw := map[string]bool{"systemStreams": true, "size": true /* asks for it */, "execIn": true, "filesCatRun": true, "copyOut": true, "snapshotExportRun": true,
		"newCmdExtensionServeScript": true /* to the server, in its protocol */}
	encodes := map[string]bool{
		"encode": true, "printData": true, // of output.go
		"keep": true, "unreadNote": true, "digestOf": true, // not shown
		"focusColumns": true, // a cell
		"suiteRun":     true, // the process of the suite, in the form of test2json
	}
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			in := ""
			if fn, ok := d.(*ast.FuncDecl); ok {
				in = fn.Name.Name
			}
			ast.Inspect(d, func(n ast.Node) bool {
				sel, ok := n.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				of := ""
				if x, ok := sel.X.(*ast.Ident); ok {
					of = x.Name
				}
				switch what := of + "." + sel.Sel.Name; {
				case (sel.Sel.Name == "stdout" || sel.Sel.Name == "stderr" || of == "os" && (sel.Sel.Name == "Stdout" || sel.Sel.Name == "Stderr")) && !raw[in]:
					t.Errorf("%s: %s writes to a terminal as it is", fset.Position(n.Pos()), in)
				case slices.Contains([]string{"json.Marshal", "json.MarshalIndent", "json.NewEncoder", "yaml.Dump", "yaml.Marshal", "yaml.NewEncoder", "yaml.NewDumper", "fmt.Print", "fmt.Printf", "fmt.Println"}, what) && !encodes[in]:
					t.Errorf("%s: %s: output goes through printList, printOne and printData", fset.Position(n.Pos()), what)
				}
				return true
			})
		}
	}
}
