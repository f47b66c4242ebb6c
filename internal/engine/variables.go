package engine

import (
	"maps"
	"slices"
	"strings"
)

// Variables returns options that set vars, and puts their values into env where that
// is safe: values in an environment are not in the list of processes, but some names
// would tell the program itself what to do.
func Variables(option string, vars, env map[string]string) (args []string) {
	for _, k := range slices.Sorted(maps.Keys(vars)) {
		if meddles(k) {
			args = append(args, option, k+"="+vars[k])
			continue
		}
		env[k] = vars[k]
		args = append(args, option, k)
	}
	return args
}

// meddles reports whether a variable of that name could change what the engine's
// program, the loader or the shell on the host do.
func meddles(name string) bool {
	up := strings.ToUpper(name)
	for _, prefix := range []string{"LD_", "DOCKER", "COMPOSE", "BUILDX", "BUILDKIT", "PODMAN", "CONTAINER", "BUILDAH", "STORAGE_", "REGISTRY", "REGISTRIES", "XDG_", "GO", "SSL_", "OTEL_", "DBUS_",
		"PYTHON", "BASH", "SANDBOXER_", "LC_", "NETAVARK", "TMP", "CURL_", "SSH_", "SYSTEMD_", "NOTIFY_", "LISTEN_", "GLIBC_", "MALLOC_", "GCONV_", "NLS", "LOC", "RES", "HOST", "CNI", "CRUN", "OCI", "_"} {
		if strings.HasPrefix(up, prefix) {
			return true
		}
	}
	return slices.Contains([]string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "ENV", "IFS", "CDPATH", "PWD", "OLDPWD", "TERM", "LANG", "LANGUAGE", "TZ", "TZDIR", "PS1", "PS2", "PS4", "OPTIND",
		"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "FTP_PROXY", "NO_COLOR", "CLICOLOR", "CI", "DEBUG", "PPID", "UID", "EUID", "SHELLOPTS", "TRAPDIR", "GETCONF_DIR"}, up) || strings.Contains(up, "LIBRARY")
}
