package inside

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// CheckRepo refuses an input repo that is not a directory of the server's machine. A missing input is accepted.
// Kind: Invalid.
func CheckRepo(spec sandboxer.Spec) error {
	repo := spec.Inputs["repo"]
	if repo == "" {
		return nil
	}
	if !filepath.IsAbs(repo) {
		return sandboxer.E(sandboxer.Invalid, nil, "input repo: %q is not an absolute directory", repo).
			WithHint("the command line makes a directory absolute; over HTTP give the full path on the server's machine")
	}
	if fi, err := os.Stat(repo); err != nil || !fi.IsDir() {
		return sandboxer.E(sandboxer.Invalid, err, "input repo: %s is not a directory that can be read on the server's machine", repo)
	}
	return nil
}

// Fill makes the directory of the workspace, with its parents, and copies dir into it, a directory of the server's machine.
// Without dir the workspace is empty. exec runs commands inside. New files belong to owner, a user of the sandbox as users.Find
// takes it; empty means root. skipped describes the files that the copy leaves out; empty if there are none. Kinds: those of
// Run; Invalid for a directory that cannot be read completely.
func Fill(ctx context.Context, exec Exec, workspace, owner, dir string) (skipped string, err error) {
	cmd := sandboxer.Cmd{Args: []string{AgentPath, "untar"}, Dir: "/", User: "0"}
	if owner != "" {
		cmd.Args = append(cmd.Args, "--owner", owner)
	}
	cmd.Args = append(cmd.Args, workspace)
	if dir == "" {
		return "", Run(ctx, exec, "making the workspace", cmd)
	}
	return Pack(dir, func(r io.Reader) error {
		cmd.Stdin = r
		return Run(ctx, exec, "copying "+dir+" into the workspace", cmd)
	})
}

// Pack calls take with an archive of dir, a directory of the server's machine. skipped describes the files that the archive
// leaves out; empty if there are none. Kinds: those of take; Invalid for a directory that cannot be read completely.
func Pack(dir string, take func(io.Reader) error) (skipped string, err error) {
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		left, err := agent.Tar(w, dir)
		if skipped = left.String(); skipped != "" {
			skipped = "of repo " + skipped
		}
		w.CloseWithError(err)
		packed <- err
	}()
	err = take(r)
	r.Close() // the packer does not wait for a reader that left early
	if perr := <-packed; perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
		err = sandboxer.E(sandboxer.Invalid, perr, "input repo: %s cannot be read whole: %v", dir, perr)
	}
	return skipped, err
}

// Exec runs a command inside a sandbox.
type Exec = func(context.Context, sandboxer.Cmd) (sandboxer.Exit, error)

// Run runs one of our commands inside a sandbox, by exec, and turns an exit code other than 0 into an error with the end of the
// output. Kinds: those of exec; Failed, or Exhausted for a full disk.
func Run(ctx context.Context, exec Exec, what string, cmd sandboxer.Cmd) error {
	out := &capture.Last{Max: 1 << 10}
	cmd.Stdout, cmd.Stderr = out, out
	x, err := exec(ctx, cmd)
	if err != nil || x.Code == 0 {
		return err
	}
	said, kind := strings.TrimSpace(capture.Text(out.String(), 1<<10)), sandboxer.Failed
	if low := strings.ToLower(said); strings.Contains(low, "no space left") || strings.Contains(low, "quota exceeded") {
		kind = sandboxer.Exhausted
	}
	return sandboxer.E(kind, nil, "%s failed inside the sandbox (exit %d): %s", what, x.Code, said)
}
