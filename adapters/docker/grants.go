package docker

import (
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/inside"
)

// capabilityNames are those of Linux (capabilities(7)) without CAP_, as engines accept them.
var capabilityNames = []string{
	"AUDIT_CONTROL", "AUDIT_READ", "AUDIT_WRITE", "BLOCK_SUSPEND", "BPF", "CHECKPOINT_RESTORE", "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID",
	"IPC_LOCK", "IPC_OWNER", "KILL", "LEASE", "LINUX_IMMUTABLE", "MAC_ADMIN", "MAC_OVERRIDE", "MKNOD", "NET_ADMIN", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_RAW",
	"PERFMON", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYSLOG", "SYS_ADMIN", "SYS_BOOT", "SYS_CHROOT", "SYS_MODULE", "SYS_NICE", "SYS_PACCT", "SYS_PTRACE",
	"SYS_RAWIO", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "WAKE_ALARM",
}

// capabilityList reads names of capabilities, with CAP_ before them or without, and returns them sorted,
// each once. Invalid: one is none.
func capabilityList(of string, names []string) ([]string, error) {
	var all []string
	for _, n := range names {
		n = strings.TrimPrefix(strings.TrimSpace(n), "CAP_")
		if !slices.Contains(capabilityNames, n) {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s: %.100q is not the name of a capability", of, n).
				WithHint("name capabilities of Linux, such as NET_RAW or SYS_PTRACE; man 7 capabilities lists them")
		}
		all = append(all, n)
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// grants are a sandbox's capabilities in addition to those that all have. Invalid: a name is no
// capability. Denied: the configuration lets no caller have it.
func (e *extension) grants(spec sandboxer.Spec) ([]string, error) {
	value := spec.Inputs["grants"]
	if value == "" {
		return nil, nil
	}
	all, err := capabilityList("input grants", strings.Split(value, ","))
	if err != nil {
		return nil, err
	}
	may, err := capabilityList("grants", e.cfg.Grants)
	if err != nil {
		return nil, err
	}
	usual := inside.Capabilities()
	all = slices.DeleteFunc(all, func(c string) bool { return slices.Contains(usual, c) })
	for _, c := range all {
		if !slices.Contains(may, c) {
			return nil, sandboxer.E(sandboxer.Denied, nil, "input grants: %s does not let the capability %s be granted", e.env.Extension, c).
				WithHint("have the operator add it to grants in the config of %s", e.env.Extension)
		}
	}
	return all, nil
}
