package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/catalog"
)

type profileInitOptions struct {
	f               *factory
	name, extension string
	out             string
}

func newCmdProfileInit(f *factory) *cobra.Command {
	o := &profileInitOptions{f: f}
	c := &cobra.Command{
		Use: "init NAME", Short: "Write a starter profile, every line explained", Args: wants(1, 1, "the name of the new profile"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.name = args[0]
			return profileInitRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.extension, "extension", "ext.local", "`EXTENSION` that it runs on")
	c.Flags().StringVar(&o.out, "write", "", "write to this new `FILE` instead of stdout")
	_ = c.RegisterFlagCompletionFunc("extension", f.completeExtensions)
	return c
}

func profileInitRun(_ context.Context, o *profileInitOptions) error {
	// A fault elsewhere must not keep a user from beginning a new file.
	c, err := o.f.catalog()
	if err != nil && catalog.FaultsOf(err) == nil {
		return err
	}
	e, err := c.Extension(o.extension)
	if err != nil {
		return err
	}
	var b strings.Builder
	if err := catalog.Init(&b, o.name, e); err != nil {
		return err
	}
	if o.out == "" {
		_, err := fmt.Fprint(o.f.io.out, b.String())
		return err
	}
	w, err := os.OpenFile(o.out, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return sandboxer.E(sandboxer.Conflict, nil, "%s exists", o.out).WithHint("choose another name, or remove it first")
	}
	if err != nil {
		return fileError(err, "%s cannot be written", o.out)
	}
	_, err = w.WriteString(b.String())
	if err = errors.Join(err, w.Close()); err != nil {
		return fileError(err, "%s cannot be written", o.out)
	}
	o.f.progress().done("wrote %s; check it with: sandboxer profile validate %s", o.out, filepath.Clean(o.out))
	return nil
}
