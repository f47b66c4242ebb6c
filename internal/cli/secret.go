package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

func newCmdSecret(f *factory) *cobra.Command {
	return newGroup("secret", "Secrets: set, list and remove them", []string{"secrets"}, newCmdSecretSet(f), newCmdSecretLs(f), newCmdSecretRm(f))
}

const operatorUsage = "a secret of the operator, which files of extensions name; for administrators"

type secretSetOptions struct {
	f          *factory
	name, file string
	operators  bool
}

func newCmdSecretSet(f *factory) *cobra.Command {
	o := &secretSetOptions{f: f}
	c := &cobra.Command{
		Use: "set NAME", Short: "Set a secret, from stdin or a file",
		Args: func(cmd *cobra.Command, args []string) error {
			err := wants(1, -1, "the name of the secret; its value comes from stdin or --file")(cmd, args)
			if err == nil && len(args) > 1 { // which may be the value, so that it is not shown
				return invalid("%s takes the name of the secret alone; its value comes from stdin or --file", cmd.CommandPath()).
					WithHint("other users of this machine can see arguments: if one was the value, replace it at its issuer, too")
			}
			return err
		},
		Long: "Set a secret of your tenant. The value is read from stdin or from --file, without the line break at its end; it never is\n" +
			"an argument, which other users of this machine could see. It cannot be read again. Sandboxes keep the value that they\n" +
			"were created with; new ones get this one. A sandbox gets a secret by create --secret VARIABLE=NAME, if its profile lists it.",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.name = args[0]
			return secretSetRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.file, "file", "", "`FILE` with the value")
	c.Flags().BoolVar(&o.operators, "operator", false, operatorUsage)
	return c
}

func secretSetRun(ctx context.Context, o *secretSetOptions) error {
	if err := sandboxer.CheckSecretName(o.name); err != nil {
		return err
	}
	value, err := o.value()
	if err != nil {
		return err
	}
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	rec, err := s.SetSecret(ctx, o.name, o.operators, value)
	if err != nil {
		return err
	}
	o.f.progress().done("secret %s has version %d", rec.Name, rec.Version)
	if format := o.f.format(); format != "table" && format != "wide" {
		return printOne(o.f, rec, secretView())
	}
	return nil
}

// value reads the value, without the line break at its end.
func (o *secretSetOptions) value() (sandboxer.Secret, error) {
	in := io.Reader(o.f.io.in)
	if o.file != "" {
		f, err := os.Open(o.file)
		if err != nil {
			return "", fileError(err, "--file: %s cannot be read", o.file)
		}
		defer f.Close()
		in = f
	} else if o.f.io.inTTY {
		o.f.progress().note("type the value, then Enter and Ctrl-D")
	}
	b, err := io.ReadAll(io.LimitReader(in, sandboxer.MaxSecretBytes+3)) // one more byte than is kept, and a line break
	if err != nil {
		return "", fileError(err, "the value of secret %s cannot be read", o.name)
	}
	return sandboxer.Secret(strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r")), nil
}

func secretView() view[*api.Secret] {
	return view[*api.Secret]{
		cols: []string{"NAME", "VERSION", "SET"},
		wide: []string{"KEPT"},
		row: func(r *api.Secret) []string {
			return []string{r.Name, fmt.Sprint(r.Version), r.CreatedAt.Local().Format("2006-01-02 15:04"), fmt.Sprint(r.Versions)}
		},
		name: func(r *api.Secret) string { return r.Name },
	}
}

// secretsText says which version of which secret each variable has.
func secretsText(uses map[string]api.SecretUse) string {
	text := map[string]string{}
	for variable, use := range uses {
		text[variable] = fmt.Sprintf("%s (version %d)", use.Name, use.Version)
	}
	return pairs(text)
}

func newCmdSecretLs(f *factory) *cobra.Command {
	var operators bool
	c := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the secrets, without values", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return listed(cmd.Context(), f, secretView(), func(ctx context.Context, s *session) (*api.List[api.Secret], error) { return s.Secrets(ctx, operators) })
		},
	}
	c.Flags().BoolVar(&operators, "operator", false, "those of the operator, for administrators")
	return c
}

func newCmdSecretRm(f *factory) *cobra.Command {
	var operators, force bool
	c := &cobra.Command{
		Use: "rm NAME", Aliases: []string{"remove"}, Short: "Remove a secret that nothing needs", Args: wants(1, 1, "the name of one secret"),
		Long: "Remove all versions of a secret. It is refused while a sandbox, a snapshot or the file of an extension refers to the\n" +
			"secret, and says which. An administrator can remove it all the same (--force): what needs it then fails when it is\n" +
			"resumed, restored or opened.",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := f.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer s.close()
			if err := s.RemoveSecret(cmd.Context(), args[0], operators, force); err != nil {
				return err
			}
			f.progress().done("removed secret %s", args[0])
			return nil
		},
	}
	c.Flags().BoolVar(&operators, "operator", false, operatorUsage)
	c.Flags().BoolVar(&force, "force", false, "also if something needs it; for administrators")
	return c
}
