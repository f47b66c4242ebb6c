package aioserver

import (
	"context"
	"io"
	"iter"
	"strconv"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// endless is a sandbox with more of everything than any answer holds.
type endless struct {
	Sandboxes
	files int
	line  string // of every file, again and again
}

func (e *endless) StatFile(_ context.Context, _, name string) (sandboxer.FileInfo, error) {
	if strings.HasPrefix(name, "/d/") {
		return sandboxer.FileInfo{Path: name, Size: maxGrepFile}, nil
	}
	return sandboxer.FileInfo{Path: name, Mode: 1<<31 | 0o755}, nil
}

func (e *endless) ListFiles(_ context.Context, _, dir, _ string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		for i := range e.files {
			if !yield(sandboxer.FileInfo{Path: dir + "/" + strconv.Itoa(i), Size: maxGrepFile}, nil) {
				return
			}
		}
	}
}

func (e *endless) ReadFile(context.Context, string, string) (io.ReadCloser, error) {
	return io.NopCloser(&repeated{s: e.line}), nil
}

// repeated is a text without end.
type repeated struct {
	s  string
	at int
}

func (r *repeated) Read(p []byte) (n int, _ error) {
	for n < len(p) {
		k := copy(p[n:], r.s[r.at:])
		n, r.at = n+k, (r.at+k)%len(r.s)
	}
	return n, nil
}

// Whatever a sandbox holds, answers have an end, and say that they are not all.
func TestBoundedAnswers(t *testing.T) {
	e := &endless{files: maxListed + 5, line: strings.Repeat("x", 10_000) + "\n"}
	a := &api{t: t, s: New(Options{Sandboxes: e}), sb: Sandbox{ID: "x"}, who: t.Context()}
	type found struct {
		Files     []any
		Truncated bool
	}
	for p, body := range map[string]string{"list": `{"path":"/d"}`, "find": `{"path":"/d","glob":"*"}`} {
		if r := data[found](t, a.post("/v1/file/"+p, body), 200); len(r.Files) != maxListed || !r.Truncated {
			t.Errorf("%s: %d entries, truncated: %v", p, len(r.Files), r.Truncated)
		}
	}
	e.files = maxVisited + 5
	if r := data[found](t, a.post("/v1/file/find", `{"path":"/d","glob":"none"}`), 200); len(r.Files) != 0 || !r.Truncated {
		t.Errorf("%+v", r)
	}
	for body, most := range map[string]int{
		`{"path":"/d","pattern":"x","max_results":10000,"max_file_size":"8M"}`: maxAnswer, `{"path":"/d/1","pattern":"x","max_results":7,"max_file_size":"8M"}`: 7 * 2 * maxLine,
	} {
		w := a.post("/v1/file/grep", body)
		if r := data[grepResult](t, w, 200); len(r.Matches) == 0 || !r.Truncated || w.Body.Len() > 2*most || len([]rune(r.Matches[0].LineContent)) > maxLine {
			t.Errorf("%s: %d matches, %d bytes", body, len(r.Matches), w.Body.Len())
		}
	}
	refused(t, a.post("/v1/file/read", `{"file":"/d/1"}`), 413)
	refused(t, a.post("/v1/file/read", `{"file":"/d/1","start_line":0,"end_line":1000000000}`), 413)
	if got := data[map[string]string](t, a.post("/v1/file/read", `{"file":"/d/1","start_line":900,"end_line":901}`), 200)["content"]; got != e.line[:10_000] {
		t.Errorf("%d bytes of a line far down", len(got))
	}
	refused(t, a.post("/v1/file/write", `{"file":"/d/1","content":"","x":"`+strings.Repeat("x", maxRest)+`"}`), 422)
	refused(t, a.post("/v1/bash/exec", `{"command":"`+strings.Repeat("x", maxJSON)+`"}`), 413)
	if a.s.memory.all.sum() != 0 {
		t.Errorf("%d bytes are still accounted for", a.s.memory.all.sum())
	}

	// What waits in files is bounded in size and number.
	c := &call{s: a.s, who: account{"t", "x"}}
	var begun []*spool
	for range maxSpoolsTenant {
		sp := &spool{c: c}
		if _, err := io.CopyN(sp, &repeated{s: "x"}, smallSpool+1); err != nil || sp.file == nil {
			t.Fatal(err)
		}
		begun = append(begun, sp)
	}
	more := &spool{c: c}
	if _, err := io.CopyN(more, &repeated{s: "x"}, smallSpool+1); sandboxer.KindOf(err) != sandboxer.Exhausted || sandboxer.RetryAfterOf(err) == 0 {
		t.Errorf("one more: %v", err)
	}
	more.close()
	begun[0].n = maxContent + maxContent/2
	if _, err := begun[0].Write([]byte("x")); sandboxer.KindOf(bodyError(err)) != sandboxer.Invalid {
		t.Errorf("a content that is too large: %v", err)
	}
	a.s.spooled["t/"] += maxSpooledTenant - a.s.spooled[""] - 5
	if _, err := begun[1].Write([]byte("12345")); err != nil {
		t.Error(err)
	}
	if _, err := begun[1].Write([]byte("x")); sandboxer.KindOf(err) != sandboxer.Exhausted || sandboxer.RetryAfterOf(err) == 0 {
		t.Errorf("more than may wait: %v", err)
	}
	if _, err := (&spool{n: maxContent + 1}).plain(); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("a plain content that is too large: %v", err)
	}
	a.s.spooled["t/"] = a.s.spooled[""]
	for _, sp := range begun {
		sp.close()
	}
	c.release()
	if len(a.s.spools) != 0 || len(a.s.spooled) != 0 || a.s.memory.all.sum() != 0 {
		t.Errorf("%v, %d bytes are left", a.s.spools, a.s.memory.all.sum())
	}
}
