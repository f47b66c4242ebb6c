package provisioner

import (
	"context"
	"errors"
	"iter"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
)

// buggy is ext.fake with a bug in each command and each file.
type buggy struct{ *fake.Extension }

var errBug = errors.New("the index is 7 of 3")

func (*buggy) Exec(context.Context, sandboxer.Handle, sandboxer.Cmd) (sandboxer.Exit, error) {
	return sandboxer.Exit{}, errBug
}

func (*buggy) ListFiles(context.Context, sandboxer.Handle, string, string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) { yield(sandboxer.FileInfo{}, errBug) }
}

// TestInternalErrorsLeadToTheirCause: at both doors of deer-flow, the log has the cause in the line with the ID that the caller got.
func TestInternalErrorsLeadToTheirCause(t *testing.T) {
	r := newRig(t, Options{}, func(x *fake.Extension) sandboxer.Extension { return &buggy{x} })
	a := r.create(order1)
	for path, body := range map[string]string{
		"/v1/bash/exec": `{"command":"true"}`, "/v1/shell/exec": `{"command":"true"}`, "/v1/file/list": `{"path":"/workspace"}`,
	} {
		_, told := r.ask("", "POST", a.SandboxURL+path, body)
		r.log.HasCause(t, told, errBug.Error())
	}
	r.BreakDatabase(t)
	for _, c := range []struct{ method, path, body string }{
		{"POST", "/api/sandboxes", order1}, {"GET", "/api/sandboxes", ""}, {"GET", "/api/sandboxes/" + alice, ""},
		{"DELETE", "/api/sandboxes/" + alice, ""}, {"GET", "/api/reconciliation/sandboxes/" + alice, ""}, {"GET", a.SandboxURL + "/v1/sandbox", ""},
	} {
		_, told := r.ask(r.key, c.method, c.path, c.body)
		r.log.HasCause(t, told, edgetest.DatabaseCause)
	}
}
