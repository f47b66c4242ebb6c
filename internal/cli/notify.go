package cli

import (
	"log/slog"
	"net"
	"os"
	"strings"
)

// supervisor returns a function that reports this process's state to the service manager that started
// it: one datagram to the socket in NOTIFY_SOCKET (sd_notify(3)). Without one it does
// nothing. Programs that this process starts do not inherit the socket: they are not the service.
func supervisor(getenv func(string) (string, bool)) func(log *slog.Logger, state string) {
	name, ok := getenv("NOTIFY_SOCKET")
	_ = os.Unsetenv("NOTIFY_SOCKET")
	if !ok || !strings.HasPrefix(name, "/") && !strings.HasPrefix(name, "@") { // @ is the abstract namespace, also to package net
		return func(*slog.Logger, string) {}
	}
	return func(log *slog.Logger, state string) {
		c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: name, Net: "unixgram"})
		if err == nil {
			_, err = c.Write([]byte(state))
			c.Close()
		}
		if err != nil {
			log.Warn("cannot notify the service manager", "state", state, "err", err)
		}
	}
}
