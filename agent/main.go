package agent

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// EnvPrefix begins the names of the environment variables that are the agent's. None is handed to
// a process, and none is for a sandbox's image or its user to set.
const EnvPrefix = "SANDBOXER_AGENT_"

const usage = `usage: sandboxer-agent COMMAND

  init [FLAGS] [-- CMD ARGS…]   serve a sandbox, as its first process (see init -h)
  attach --socket @NAME|/PATH [FLAGS]
                                be a connection to the agent at a socket, which is started if there
                                is none, with flags of init
  connect --socket @NAME|/PATH [--pid PID]
                                be a connection to the agent at a socket, which is there, or about
                                to be
  hold-disk COMMAND [ARGS…]     be another command of these, such that what it starts cannot get
                                around a quota of its disk
  untar [--strip] [--replace] [--owner UID:GID] DIR
                                unpack the tar on standard input below DIR
  tar DIR                       pack DIR to standard output
  mount DIR SRC TARGET [SRC TARGET…]
                                move what is mounted at SRC to TARGET, which no link leads to, and
                                cover DIR
  kernel                        print what the kernel says it is (/proc/version)
  donate [--wake PID] PATH COUNT
                                hand open connections to the agent listening at donate:PATH
  kill-marked NAME=VALUE SESSION [TAG]
                                kill what carries this in its environment, the session, and what
                                has the tag; several are given as so many threes
`

// Main runs the agent with its arguments (without the program's name) and returns the
// exit code of the process. Signals and children of the process belong to it while it
// runs.
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
	case "hold-disk":
		return runHoldDisk(args[1:])
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
	fs.Func("owner", "whom the directory and what is made in it belong to", func(s string) error {
		uid, gid, ok := strings.Cut(s, ":")
		u, uerr := strconv.ParseUint(uid, 10, 31)
		g, gerr := strconv.ParseUint(gid, 10, 31)
		if !ok || uerr != nil || gerr != nil {
			return fmt.Errorf("want UID:GID")
		}
		o.Owner = &[2]int{int(u), int(g)}
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
	err := Tar(w, fs.Arg(0))
	if err == nil {
		err = w.Flush()
	}
	return report(err)
}

// parse reports whether to go on, and otherwise the exit code.
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
