package cli

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/template"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/process"
)

//go:embed scaffold
var scaffold embed.FS

// scaffolds are the files of an extension by its language: their names and their templates.
var scaffolds = map[string][][2]string{
	"python": {{"ext.{{.Name}}.yaml", "extension.yaml"}, {"profile.{{.Name}}.yaml", "profile.yaml"}, {"{{.Module}}.py", "python"}, {"test_{{.Module}}.py", "python_test"}},
	"sh":     {{"ext.{{.Name}}.yaml", "extension.yaml"}, {"profile.{{.Name}}.yaml", "profile.yaml"}, {"{{.Name}}.sh", "sh"}, {"test_{{.Name}}.sh", "sh_test"}},
	"go":     {{"ext.{{.Name}}.yaml", "extension.yaml"}, {"profile.{{.Name}}.yaml", "profile.yaml"}, {"go.mod", "go.mod"}, {"main.go", "go"}, {"main_test.go", "go_test"}},
}

type extensionNewOptions struct {
	f               *factory
	name, lang, dir string
}

func newCmdExtensionNew(f *factory) *cobra.Command {
	o := &extensionNewOptions{f: f}
	c := &cobra.Command{
		Use: "new NAME", Short: "Write a starter extension", Args: wants(1, 1, "the name of the new extension"),
		Long: "Write a small working extension: its file, a profile, the code and a test, without replacing existing files. Its\n" +
			"sandboxes are directories. docs/how-to/write-an-extension.md explains how to continue.",
		Example:           "  sandboxer extension new my-backend --lang python --dir my-backend\n  sandboxer extension test my-backend/ext.my-backend.yaml",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.name = args[0]
			return extensionNewRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.lang, "lang", "python", "`LANGUAGE` of the code: go, python or sh")
	c.Flags().StringVar(&o.dir, "dir", ".", "`DIR` for the files; made if it is missing")
	_ = c.RegisterFlagCompletionFunc("lang", cobra.FixedCompletions([]string{"go", "python", "sh"}, cobra.ShellCompDirectiveNoFileComp))
	return c
}

func newCmdExtensionServeScript(f *factory) *cobra.Command {
	c := &cobra.Command{
		Use: "serve-script COMMAND [ARG…]", Short: "Serve a script as an extension; servers start this",
		Args:        wants(1, -1, "the command that runs the script"),
		Annotations: map[string]string{ownSignals: "none: a server or the terminal ends it"},
		Long: "Speak the extension protocol on the standard input and output, and start COMMAND for each call, with the method as\n" +
			"its last argument. Write this as the first line of a script, and name the script in command: of the extension's file:\n\n" +
			"  #!/usr/bin/env -S sandboxer extension serve-script /bin/sh\n\n" +
			"docs/reference/extension-sdk.md describes what a script gets and how it answers.",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			return process.ServeScript(cmd.Context(), args, f.io.in, f.io.stdout)
		},
	}
	c.Flags().SetInterspersed(false) // the flags after COMMAND are its own
	return c
}

// releaseVersion matches versions that Go's tools can download.
var releaseVersion = regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+$`)

var extensionName = regexp.MustCompile(`^[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?$`)

func extensionNewRun(_ context.Context, o *extensionNewOptions) error {
	files, ok := scaffolds[o.lang]
	if !ok {
		return sandboxer.E(sandboxer.Invalid, nil, "there is no starter in the language %q", o.lang).WithHint("the languages are go, python and sh")
	}
	o.name = strings.TrimPrefix(o.name, "ext.")
	if !extensionName.MatchString(o.name) {
		return sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the name of an extension: want 1 to 48 characters a-z, 0-9 and inner hyphens", o.name)
	}
	var words []string
	for w := range strings.SplitSeq(o.name, "-") {
		if w != "" {
			words = append(words, strings.ToUpper(w[:1])+w[1:])
		}
	}
	values := struct{ Version, Name, Title, Lang, Module, Type string }{
		"v0.0.0", o.name, strings.Join(words, " "), o.lang, strings.ReplaceAll(o.name, "-", "_"), strings.Join(words, "") + "Extension",
	}
	if o.name[0] <= '9' { // no name of Python's begins so
		values.Module, values.Type = "ext_"+values.Module, "Ext"+values.Type
	}
	released := releaseVersion.MatchString(version())
	if released {
		values.Version = version()
	}
	if o.lang == "go" {
		values.Module = o.name
	}
	type file struct {
		name string
		text string
		mode fs.FileMode
	}
	var out []file
	for _, f := range files {
		name, err := filled(f[0], values)
		if err != nil {
			return err
		}
		data, err := scaffold.ReadFile("scaffold/" + f[1] + ".tmpl")
		if err != nil {
			return err
		}
		text, err := filled(string(data), values)
		if err != nil {
			return err
		}
		mode := fs.FileMode(0o644)
		if strings.HasPrefix(text, "#!") {
			mode = 0o755
		}
		out = append(out, file{filepath.Join(o.dir, name), text, mode})
	}
	for _, f := range out {
		if _, err := os.Lstat(f.name); err == nil {
			return sandboxer.E(sandboxer.Conflict, nil, "%s exists; nothing was written", f.name).WithHint("choose another name or directory")
		}
	}
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return fileError(err, "the directory %s cannot be made", o.dir)
	}
	var written []string
	for _, f := range out {
		w, err := os.OpenFile(f.name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, f.mode)
		if err == nil {
			_, err = w.WriteString(f.text)
			err = errors.Join(err, w.Close())
		}
		if err != nil {
			for _, name := range written {
				_ = os.Remove(name)
			}
			return fileError(err, "%s cannot be written", f.name)
		}
		written = append(written, f.name)
	}
	for _, name := range written {
		fmt.Fprintln(o.f.io.out, name)
	}
	yaml := written[slices.IndexFunc(written, func(n string) bool { return strings.HasPrefix(filepath.Base(n), "ext.") })]
	if o.lang == "go" {
		replace := ""
		if !released { // there is nowhere to get it from
			replace = "go mod edit -replace github.com/sand-boxer/sandboxer=DIRECTORY-OF-ITS-SOURCE && "
		}
		o.f.progress().note("build it, then test it: (cd %s && %sgo mod tidy && go build); sandboxer extension test %s", o.dir, replace, yaml)
	} else {
		o.f.progress().note("test it: sandboxer extension test %s", yaml)
	}
	return nil
}

func filled(text string, values any) (string, error) {
	t, err := template.New("").Parse(text)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	err = t.Execute(&b, values)
	return b.String(), err
}
