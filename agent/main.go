package agent

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"math"
	"os"

	"github.com/sand-boxer/sandboxer"
)

// EnvPrefix is the prefix of the agent's own environment variables. The agent passes none of them to a
// process, and no image and no user may set one.
const EnvPrefix = "SANDBOXER_AGENT_"

const usage = `usage: sandboxer-agent COMMAND

  init [FLAGS] [-- CMD ARGS…]   serve a sandbox, as its first process (see init -h)
  attach --socket @NAME|/PATH [FLAGS]
                                connect standard input and output to the agent at a socket; start the
                                agent with these flags of init if there is none
  connect --socket @NAME|/PATH [--pid PID]
                                connect standard input and output to the agent at a socket, which
                                must exist or appear soon
  hold [--disk] COMMAND [ARGS…] run another of these commands; the processes that it starts cannot
                                make sockets that bypass their network, and with --disk cannot
                                bypass a quota
  untar [--strip] [--replace] [--owner USER[:GROUP]] DIR
                                unpack the tar on standard input below DIR
  tar DIR                       pack DIR to standard output
  mount DIR SRC TARGET [SRC TARGET…]
                                move the mount at SRC to TARGET, without following links, and cover
                                DIR
  kernel                        print the kernel's version (/proc/version)
  donate [--wake PID] PATH COUNT
                                hand open connections to the agent listening at donate:PATH
  kill-marked NAME=VALUE SESSION [TAG]
                                kill the processes with this environment variable, with this
                                session, or with this tag; repeat all three for several commands
`

// Main runs the agent with its arguments (without the program's name) and returns the exit code of the
// process. It takes over signals and child processes of the process while it runs.
func Main(args []string) int {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return 2
	}
	switch args[0] {
	case "init":
		return runInit(args[1:])
	case "attach":
		return runAttach(args[1:])
	case "connect":
		return runConnect(args[1:])
	case "hold":
		return runHold(args[1:])
	case "untar":
		return runUntar(args[1:], os.Stdin)
	case "tar":
		return runTar(args[1:], os.Stdout)
	case "kill-marked":
		return runKillMarked(args[1:])
	case "mount":
		return runMount(args[1:])
	case "kernel":
		return runKernel(args[1:], os.Stdout)
	case "donate":
		return runDonate(args[1:])
	case "help", "-h", "--help":
		fmt.Print(usage)
		return 0
	}
	fmt.Fprintf(os.Stderr, "sandboxer-agent: unknown command %q\n%s", args[0], usage)
	return 2
}

func runKernel(args []string, out io.Writer) int {
	if len(args) > 0 {
		fmt.Fprintln(os.Stderr, "sandboxer-agent: kernel takes no arguments")
		return 2
	}
	version, err := os.ReadFile("/proc/version")
	if err == nil {
		_, err = out.Write(version)
	}
	return report(err)
}

func runUntar(args []string, in io.Reader) int {
	fs := flag.NewFlagSet("untar", flag.ContinueOnError)
	var o UntarOptions
	fs.BoolVar(&o.Strip, "strip", false, "drop the first element of every name")
	fs.BoolVar(&o.Replace, "replace", false, "let files replace existing ones")
	fs.IntVar(&o.Limits.Entries, "max-entries", 0, "refuse more entries (0 means a million)")
	fs.Int64Var(&o.Limits.Bytes, "max-bytes", 0, "refuse more content (0 means 64 GiB)")
	fs.Func("owner", "owner of the directory and of the new files in it", func(s string) error {
		u, ok := userDB{"/etc/passwd", "/etc/group"}.lookup(s)
		if !ok || max(u.uid, u.gid) > math.MaxInt32 {
			return fmt.Errorf("there is no such user")
		}
		o.Owner = &[2]int{int(u.uid), int(u.gid)}
		return nil
	})
	if code, ok := parse(fs, args); !ok {
		return code
	}
	if fs.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "sandboxer-agent: untar needs one directory")
		return 2
	}
	err := Untar(in, fs.Arg(0), o)
	if err == nil && o.Owner != nil {
		err = os.Chown(fs.Arg(0), o.Owner[0], o.Owner[1])
	}
	return report(err)
}

func runTar(args []string, out io.Writer) int {
	fs := flag.NewFlagSet("tar", flag.ContinueOnError)
	if code, ok := parse(fs, args); !ok {
		return code
	}
	if fs.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "sandboxer-agent: tar needs one directory")
		return 2
	}
	w := bufio.NewWriterSize(out, 256<<10)
	_, err := Tar(w, fs.Arg(0))
	if err == nil {
		err = w.Flush()
	}
	return report(err)
}

// parse reports whether to continue, and otherwise the exit code.
func parse(fs *flag.FlagSet, args []string) (int, bool) {
	switch err := fs.Parse(args); err {
	case nil:
		return 0, true
	case flag.ErrHelp:
		return 0, false
	}
	return 2, false
}

func report(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "sandboxer-agent:", err)
	if hint := sandboxer.HintOf(err); hint != "" {
		fmt.Fprintln(os.Stderr, hint)
	}
	if sandboxer.KindOf(err) == sandboxer.Invalid {
		return 2
	}
	return 1
}
