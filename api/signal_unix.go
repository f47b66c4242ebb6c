//go:build unix

package api

import (
	"os"
	"syscall"
)

var signals = map[string]os.Signal{
	"ABRT": syscall.SIGABRT, "ALRM": syscall.SIGALRM, "CHLD": syscall.SIGCHLD, "CONT": syscall.SIGCONT,
	"HUP": syscall.SIGHUP, "INT": syscall.SIGINT, "KILL": syscall.SIGKILL, "PIPE": syscall.SIGPIPE,
	"QUIT": syscall.SIGQUIT, "STOP": syscall.SIGSTOP, "TERM": syscall.SIGTERM, "TSTP": syscall.SIGTSTP,
	"TTIN": syscall.SIGTTIN, "TTOU": syscall.SIGTTOU, "USR1": syscall.SIGUSR1, "USR2": syscall.SIGUSR2,
	"WINCH": syscall.SIGWINCH,
}
