// Package cli is the command line and the composition root: it alone knows every
// part of the program and puts them together (broker.go). A command is two
// functions: newCmdX reads and checks flags into options, xRun does the work and
// knows nothing of flags. If the work is one call of the server, newCmdX makes it,
// with shown (one value) or listed (a list). Commands talk to a server through package
// api's client; run and doctor start a broker in their own process when no server
// runs.
//
// Results go to stdout; everything for people (progress, hints, errors) goes to
// stderr. Exit codes are in errors.go.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters"
	"github.com/sand-boxer/sandboxer/internal/confine"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// Main runs the command line of this process and returns its exit code.
func Main() int {
	return program{adapters: adapters.All(), builtin: sandboxer.Builtin, confine: confine.Process}.main()
}

// A program has the differences between the real one and the one under test.
type program struct {
	adapters []sandboxer.Adapter
	builtin  fs.FS                            // the catalogue that every installation starts from
	confine  func(noNewPrivileges bool) error // called before this process becomes a broker; may be nil
}

func (p program) main() int {
	// Before anything else: an extension may replace the globals os.Stdin, os.Stdout
	// and os.Stderr while it is open.
	f := &factory{program: p, io: systemStreams(), env: os.LookupEnv}
	root := newCmdRoot(f)
	root.SetArgs(os.Args[1:])
	cmd, err := root.ExecuteContextC(context.Background())
	return f.report(cmd, err)
}

// factory is the context of all commands: the streams, the environment, and what
// follows from the global flags, computed when first needed.
type factory struct {
	program
	io    *streams
	env   func(string) (string, bool)
	flags struct {
		url, dataDir, configDir, tlsCA string
		output, progress               string
		logLevel                       string
		json, quiet                    bool
	}
	root     *cobra.Command
	resolved *settings
	listen   string // of a server that is started in the background
}

// Annotations of commands.
const (
	guestCommand = "guest"   // exits with the code of a command inside a sandbox
	ownSignals   = "signals" // handles interrupts itself
)

func newCmdRoot(f *factory) *cobra.Command {
	root := &cobra.Command{
		Use:   "sandboxer",
		Short: "Create, use and destroy sandboxes on any backend",
		Long: "sandboxer creates sandboxes on any configured backend, gives you access to them, and destroys them when they expire.\n\n" +
			"Try it:  sandboxer run --input repo=. -- ls -l",
		Args:          noCommand,
		SilenceErrors: true, SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !f.io.outTTY {
				return cmd.Help()
			}
			return welcomeRun(cmd.Context(), f)
		},
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Annotations[ownSignals] == "" {
				// The first interrupt lets the work end properly, the second ends it at once.
				ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
				context.AfterFunc(ctx, stop)
				cmd.SetContext(ctx)
			}
			return f.checkGlobals()
		},
	}
	f.root = root
	v := versionInfo{version(), runtime.Version(), runtime.GOOS, runtime.GOARCH}
	root.Version = v.String() // the library's -v and --version
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetOut(f.io.out)
	root.SetErr(f.io.err)
	root.SetIn(f.io.in)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		hint := "see: " + cmd.CommandPath() + " --help"
		if near := nearestFlag(cmd, err); near != "" {
			hint = fmt.Sprintf("did you mean %q? ", near) + hint
		}
		other := otherTools[strings.TrimPrefix(err.Error(), "unknown flag: --")]
		if other != "" {
			hint = other
		} else if strings.HasPrefix(err.Error(), "unknown") && cmd.Annotations[guestCommand] != "" {
			hint = "put -- before the command and its flags; see: " + cmd.CommandPath() + " --help"
		}
		return sandboxer.E(sandboxer.Invalid, nil, "%s", flagError(err)).WithHint("%s", hint)
	})
	fl := root.PersistentFlags()
	fl.StringVar(&f.flags.tlsCA, "tls-ca", "", "PEM `FILE` with further authorities to trust for an https URL (SANDBOXER_TLS_CA)")
	fl.StringVar(&f.flags.url, "url", "", "server `ADDRESS`: unix:///path, http://host:port or https://host (SANDBOXER_URL)")
	fl.StringVar(&f.flags.dataDir, "data-dir", "", "data `DIR` of the server on this machine (SANDBOXER_DATA_DIR)")
	fl.StringVar(&f.flags.configDir, "config-dir", "", "further `DIR` with config.yaml, extensions and profiles (SANDBOXER_CONFIG_DIR)")
	fl.StringVarP(&f.flags.output, "output", "o", "", "output `FORMAT`: "+strings.Join(formats, ", ")+" (SANDBOXER_OUTPUT)")
	fl.BoolVar(&f.flags.json, "json", false, "the same as -o json")
	fl.BoolVarP(&f.flags.quiet, "quiet", "q", false, "only IDs on stdout, no progress on stderr")
	fl.StringVar(&f.flags.progress, "progress", "", "`KIND` of progress on stderr: "+strings.Join(progressModes, ", ")+" (SANDBOXER_PROGRESS)")
	fl.StringVar(&f.flags.logLevel, "log-level", "", "`LEVEL` of the log of a broker in this process: debug, info, warn or error (SANDBOXER_LOG_LEVEL)")
	complete(root, "output", formats...)
	complete(root, "progress", progressModes...)
	complete(root, "log-level", logLevels...)

	root.AddGroup(
		&cobra.Group{ID: "sandbox", Title: "Sandboxes:"},
		&cobra.Group{ID: "offer", Title: "Catalogue:"},
		&cobra.Group{ID: "admin", Title: "Administration:"},
		&cobra.Group{ID: "server", Title: "Server and machine:"},
	)
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("sandbox", newCmdRun(f, runRun), newCmdCreate(f, createRun), newCmdPlan(f, planRun), newCmdLs(f), newCmdGet(f), newCmdWait(f),
		newCmdExec(f, execRun), newCmdShell(f), newCmdCp(f), newCmdFiles(f), newCmdPort(f), newCmdNetwork(f), newCmdStats(f),
		newCmdEvents(f), newCmdExtend(f, extendRun), newCmdPause(f, pauseRun), newCmdResume(f, resumeRun), newCmdSnapshot(f),
		newCmdRestore(f, restoreRun), newCmdFork(f, forkRun), newCmdDestroy(f))
	add("offer", newCmdProfile(f), newCmdExtension(f), newCmdPool(f), newCmdHost(f), newCmdCache(f))
	add("admin", newCmdKey(f), newCmdSecret(f), newCmdCredits(f), newCmdQuota(f), newCmdAudit(f), newCmdAccept(f), newCmdForget(f), newCmdReconcile(f), newCmdBackup(f))
	add("server", newCmdServe(f), newCmdUp(f), newCmdDown(f), newCmdReload(f), newCmdStatus(f), newCmdDoctor(f), newCmdBench(f),
		newCmdConfig(f), newCmdVersion(f))
	root.SetHelpCommand(newCmdHelp())
	root.SetHelpCommandGroupID("server")
	root.SetCompletionCommandGroupID("server")
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" { // the library's, which takes any word for success
			c.Args = noCommand
			c.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
	return root
}

// newGroup is a command that only has subcommands.
func newGroup(use, short string, aliases []string, subs ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Aliases: aliases, Args: noCommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	c.AddCommand(subs...)
	return c
}

// noCommand refuses a word where a subcommand is expected.
func noCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	e := sandboxer.E(sandboxer.Invalid, nil, "%s has no command %q", cmd.CommandPath(), args[0])
	if near := nearestCommand(cmd, args[0]); near != "" {
		return e.WithHint("did you mean %q?", near)
	}
	return e.WithHint("see: %s --help", cmd.CommandPath())
}

// nearestCommand is the subcommand that a user who typed word meant: the one that
// other tools call so, or else the one with the most similar name.
func nearestCommand(cmd *cobra.Command, word string) string {
	var names []string
	of := map[string]string{}
	for _, c := range cmd.Commands() {
		if !c.IsAvailableCommand() {
			continue
		}
		if slices.ContainsFunc(c.SuggestFor, func(s string) bool { return strings.EqualFold(s, word) }) {
			return c.Name()
		}
		for _, name := range append([]string{c.Name()}, c.Aliases...) {
			names = append(names, name)
			of[name] = c.Name()
		}
	}
	return of[suggest.Nearest(word, names)]
}

// newCmdHelp is help as a command. The library's answers an unknown command with
// the help of everything, and with success.
func newCmdHelp() *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND…]", Short: "Show the help of a command",
		ValidArgsFunction: func(c *cobra.Command, args []string, _ string) (out []cobra.Completion, _ cobra.ShellCompDirective) {
			if at, rest, err := c.Root().Find(args); err == nil && len(rest) == 0 {
				for _, sub := range at.Commands() {
					if sub.IsAvailableCommand() {
						out = append(out, cobra.CompletionWithDesc(sub.Name(), sub.Short))
					}
				}
			}
			return out, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(c *cobra.Command, args []string) error {
			at, rest, err := c.Root().Find(args)
			if err != nil || len(rest) > 0 {
				if at == nil {
					at = c.Root()
				}
				if len(rest) == 0 {
					rest = args
				}
				return noCommand(at, rest)
			}
			at.InitDefaultHelpFlag()
			return at.Help()
		},
	}
}

// wants checks the number of arguments, naming them as the usage line does. most < 0
// means any number. An empty argument counts as missing: mostly it is an unset variable of
// a script.
func wants(least, most int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if slices.Contains(args, "") {
			return sandboxer.E(sandboxer.Invalid, nil, "%s takes %s, and an argument is empty", cmd.CommandPath(), what).
				WithHint("is a variable not set?")
		}
		if len(args) >= least && (most < 0 || len(args) <= most) {
			return nil
		}
		e := sandboxer.E(sandboxer.Invalid, nil, "%s takes %s", cmd.CommandPath(), what)
		if most >= 0 && len(args) > most {
			e.Msg += fmt.Sprintf("; %q is too much", args[most])
		}
		return e.WithHint("see: %s --help", cmd.CommandPath())
	}
}

// otherTools are flags of similar tools that no command here has, with the equivalent here.
var otherTools = map[string]string{
	"gpus":    "a profile asks for GPUs, with gpus in its limits; see: sandboxer profile ls",
	"rm":      "leave it out: a sandbox of run is destroyed at its end",
	"detach":  "create the sandbox: sandboxer create; then run the command in it: sandboxer exec ID -- CMD…",
	"volume":  "write --mount SRC:DST, or copy the files in: sandboxer cp",
	"publish": "forward a port of the sandbox: sandboxer port forward ID PORT",
	"timeout": "run the command under timeout: sandboxer run -- timeout 60 true",
}

// flagError says what is wrong with the value of a flag. The library quotes the function of Go that refused a number.
func flagError(err error) string {
	bad, ok := errors.AsType[*pflag.InvalidValueError](err)
	num, is := errors.AsType[*strconv.NumError](err)
	if !ok || !is {
		return err.Error()
	}
	what := "is not a whole number"
	switch {
	case num.Func == "ParseBool":
		what = "is neither true nor false"
	case num.Func == "ParseFloat":
		what = "is not a number"
	case errors.Is(err, strconv.ErrRange):
		what = "is out of range"
	}
	return fmt.Sprintf("--%s: %q %s", bad.GetFlag().Name, bad.GetValue(), what)
}

// nearestFlag is the flag that the user meant, if err says that a flag does not exist.
func nearestFlag(cmd *cobra.Command, err error) string {
	name, ok := strings.CutPrefix(err.Error(), "unknown flag: --")
	if !ok {
		return ""
	}
	var names []string
	cmd.Flags().VisitAll(func(fl *pflag.Flag) { names = append(names, fl.Name) })
	if near := suggest.Nearest(name, names); near != "" {
		return "--" + near
	}
	return ""
}

// invalid is a wrong flag or argument.
func invalid(format string, args ...any) *sandboxer.Error {
	return sandboxer.E(sandboxer.Invalid, nil, format, args...)
}

// complete offers fixed words for a flag.
func complete(cmd *cobra.Command, flag string, words ...string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

// version is the module's version, or the commit the program was built from.
func version() string {
	bi, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := bi.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	rev, dirty := "", ""
	for _, s := range bi.Settings {
		switch s.Key {
		case "vcs.revision":
			rev = s.Value[:min(12, len(s.Value))]
		case "vcs.modified":
			if s.Value == "true" {
				dirty = "+dirty"
			}
		}
	}
	if rev == "" {
		return "devel"
	}
	return "devel-" + rev + dirty
}
