package composefile

import (
	"cmp"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/compose-spec/compose-go/v2/types"

	"github.com/sand-boxer/sandboxer"
)

// service checks one service, and leaves in s what Render writes.
func (l *load) service(p *Project, s *types.ServiceConfig) {
	top := []string{"services", s.Name}
	at := func(names ...string) []string { return append(slices.Clip(top), names...) }
	note := func(format string, args ...any) { p.Notes = append(p.Notes, s.Name+": "+fmt.Sprintf(format, args...)) }
	if !serviceName.MatchString(s.Name) {
		l.refuse(top, "%q is not a valid name of a service", s.Name)
	}
	set(reflect.ValueOf(*s), func(name string) {
		switch why, known := never[name]; {
		case known:
			l.refuse(at(name), "%s", why)
		case !slices.Contains(taken, name):
			l.refuse(at(name), "is not supported")
		}
	})
	out := Service{Name: s.Name, Replicas: 1, Volumes: map[string]string{}}

	l.image(p, s, at)
	l.environment(s, at)
	l.labels(p, top, s.Labels)
	l.isolation(p, s, at)
	l.peers(p, s, at, note)
	if h := s.HealthCheck; h != nil {
		l.allow(at("healthcheck"), h, "test", "timeout", "interval", "retries", "start_period", "start_interval", "disable")
		out.Healthy = !h.Disable && len(h.Test) > 0 && h.Test[0] != "NONE"
		if h.StartInterval != nil {
			note("healthcheck.start_interval is left out: older engines do not know it")
		}
	}
	if g := s.Logging; g != nil {
		note("logging is this program's: 10 MB for each container")
	}
	l.container(s, at)
	l.deploy(s, at, note, &out)
	if s.Scale != nil {
		out.Replicas = *s.Scale
	}
	if out.Replicas < 0 || out.Replicas > maxUnits {
		l.refuse(at("scale"), "%d containers: want 0 to %d", out.Replicas, maxUnits)
		out.Replicas = 1 // not to be added up
	}
	l.bounds(s, at)
	l.resources(s, at)
	if s.MemSwapLimit != 0 || s.MemSwappiness != 0 || s.MemReservation != 0 {
		note("memswap_limit, mem_swappiness and mem_reservation are left out: memory is limited with mem_limit, and swaps never")
	}
	if s.ContainerName != "" {
		note("container_name is left out: the engine has it for one sandbox only")
	}
	l.restart(s, at, note, &out)
	for i, port := range s.Ports {
		l.port(at("ports", strconv.Itoa(i)), port, &out)
	}
	if len(s.Ports) > maxPorts || len(out.Ports) > maxPorts {
		l.refuse(at("ports"), "%d ports are published: the maximum is %d; leave out ranges that only other services use", max(len(s.Ports), len(out.Ports)), maxPorts)
	}
	if len(s.Ports) > 0 {
		note("published ports are free ones on the host's loopback")
	}
	l.mounts(p, s, at, &out)
	for _, r := range s.Secrets {
		l.asset(p, s, at, "secrets", types.FileReferenceConfig(r))
	}
	for _, r := range s.Configs {
		l.asset(p, s, at, "configs", types.FileReferenceConfig(r))
	}
	out.OneShot = oneShot(p.model, s)
	p.Services = append(p.Services, out)
}

// isolation checks fields that join a service to the host, or to other containers.
func (l *load) isolation(p *Project, s *types.ServiceConfig, at func(...string) []string) {
	switch s.Ipc {
	case "", "private", "none", "shareable":
	default:
		l.refuse(at("ipc"), "joins the memory of the host or of another container")
	}
	switch mode, peer, _ := strings.Cut(s.NetworkMode, ":"); {
	case s.NetworkMode == "" || s.NetworkMode == "none":
	case mode == "service" && hasService(p.model, peer):
	default:
		l.refuse(at("network_mode"), "%q joins a network outside the sandbox", s.NetworkMode)
	}
	for i, o := range s.SecurityOpt {
		switch strings.ReplaceAll(o, "=", ":") {
		case "no-new-privileges", "no-new-privileges:true":
		case "no-new-privileges:false":
			l.refuse(at("security_opt", strconv.Itoa(i)), "only the profile can set %q, with its input new_privileges", o)
		default:
			l.refuse(at("security_opt", strconv.Itoa(i)), "%q weakens or replaces the confinement of the container", o)
		}
	}
}

// peers checks the fields of a service about networks, hosts and other services.
func (l *load) peers(p *Project, s *types.ServiceConfig, at func(...string) []string, note func(string, ...any)) {
	for name, n := range s.Networks {
		l.allow(at("networks", name), n, "aliases", "priority", "ipv4_address")
		if n == nil {
			continue
		}
		if n.Ipv4Address != "" {
			l.fixed(p, s.Name, name, n.Ipv4Address)
		}
		for _, a := range n.Aliases {
			l.word(at("networks", name, "aliases"), a)
		}
	}
	for host, addrs := range s.ExtraHosts {
		s.ExtraHosts[host] = slices.DeleteFunc(addrs, func(a string) bool {
			if a == "host-gateway" {
				if !l.gateway {
					note("extra_hosts: %s is left out: sandboxes reach the host only if the operator allows it and the profile gives them a network", host)
				}
				return !l.gateway
			}
			if _, err := netip.ParseAddr(strings.Trim(a, "[]")); err != nil {
				l.refuse(at("extra_hosts"), "%s: %q is not an address", host, a)
			}
			return false
		})
		if len(s.ExtraHosts[host]) == 0 {
			delete(s.ExtraHosts, host)
		}
	}
	for i, link := range s.Links {
		if name, _, _ := strings.Cut(link, ":"); !hasService(p.model, name) {
			l.refuse(at("links", strconv.Itoa(i)), "%q is not a service of the file", name)
		}
	}
	for name, d := range s.DependsOn {
		l.allow(at("depends_on", name), d, "condition", "restart", "required")
		if !d.Required && hasService(p.model, name) {
			note("depends_on: %s is waited for, although required is false", name)
		}
		if d.Required && !hasService(p.model, name) {
			l.refuse(at("depends_on", name), "%q is not a service of the file", name)
		}
	}
}

// container checks the fields of a service about its own processes and files.
func (l *load) container(s *types.ServiceConfig, at func(...string) []string) {
	for i, d := range s.Tmpfs {
		dir, opts, _ := strings.Cut(d, ":")
		l.target(at("tmpfs", strconv.Itoa(i)), dir)
		for o := range strings.SplitSeq(opts, ",") {
			switch k, _, _ := strings.Cut(o, "="); k {
			case "", "size", "mode", "uid", "gid", "noexec", "exec", "nosuid", "nodev", "ro", "rw":
			default:
				l.refuse(at("tmpfs", strconv.Itoa(i)), "the option %q is not supported", o)
			}
		}
	}
	for name, u := range s.Ulimits {
		if !limitName.MatchString(name) {
			l.refuse(at("ulimits", name), "is not a limit")
		}
		l.allow(at("ulimits", name), u, "single", "soft", "hard")
	}
	if s.User == ":" {
		s.User = "" // as of variables that are not set; engines take it so
	}
	if s.User != "" && !userName.MatchString(s.User) {
		l.refuse(at("user"), "%q is not a user", s.User)
	}
	if s.Platform != "" && !platform.MatchString(s.Platform) {
		l.refuse(at("platform"), "%q is not a platform", s.Platform)
	}
	switch s.PullPolicy {
	case "", "always", "never", "missing", "if_not_present", "build":
	default:
		l.refuse(at("pull_policy"), "%q is not supported", s.PullPolicy)
	}
}

// bounds keeps the limits of a service within values that can be added up for all containers.
func (l *load) bounds(s *types.ServiceConfig, at func(...string) []string) {
	if s.CPUS < 0 || s.MemLimit < 0 || s.PidsLimit < 0 {
		l.refuse(at(), "a limit cannot be negative: engines would take it as no limit")
	}
	if !(s.CPUS <= sandboxer.MaxMilliCPU/1000) {
		l.refuse(at("cpus"), "%v is more than any machine has", s.CPUS)
	}
	if s.MemLimit > sandboxer.MaxMemoryBytes {
		l.refuse(at("mem_limit"), "%d bytes are more than any machine has", s.MemLimit)
	}
	if s.PidsLimit > sandboxer.MaxPIDs {
		l.refuse(at("pids_limit"), "%d is more than any machine has", s.PidsLimit)
	}
}

// maxRestarts stands for any number of times that a service is started again.
const maxRestarts = 1000

// restart decides how often a service is started again, from restart or, as compose does,
// from deploy.restart_policy.
func (l *load) restart(s *types.ServiceConfig, at func(...string) []string, note func(string, ...any), out *Service) {
	policy, most, bounded := strings.Cut(s.Restart, ":")
	place := at("restart")
	if policy == "" && s.Deploy != nil && s.Deploy.RestartPolicy != nil {
		place = at("deploy", "restart_policy")
		r := s.Deploy.RestartPolicy
		l.allow(place, r, "condition", "max_attempts", "delay", "window")
		if r.Delay != nil || r.Window != nil {
			note("deploy.restart_policy: delay and window are left out: they are for a swarm")
		}
		switch policy = r.Condition; policy {
		case "none":
			policy = "no"
		case "any", "":
			policy = "always"
		}
		if r.MaxAttempts != nil {
			most, bounded = strconv.FormatUint(*r.MaxAttempts, 10), *r.MaxAttempts > 0
		}
	}
	switch policy {
	case "", "no":
		out.MayEnd = true
		return
	case "on-failure":
		out.MayEnd = true
	case "always", "unless-stopped":
		note("restart: %s starts it again when it failed, a number of times in a row", policy)
	default:
		l.refuse(place, "%q is not a restart policy: want no, on-failure, always or unless-stopped", policy)
		return
	}
	out.Restarts = maxRestarts
	if bounded {
		n, err := strconv.Atoi(most)
		if err != nil || n < 1 {
			l.refuse(place, "%q is not a number of times", most)
		}
		out.Restarts = min(n, maxRestarts)
	}
}

// The most that a service may take of resources that no limit of the sandbox counts but that belong to
// the host.
const (
	maxPorts    = 256 // published ones of a service, each a program or rule on the host
	maxShm      = 2 << 30
	maxFiles    = 1 << 20
	maxLocked   = 64 << 20
	minInterval = types.Duration(100 * time.Millisecond) // of health checks, each a process of the engine's
)

// ulimits are those that may be set, with the largest value; -1 is any, for limits that count
// within the container or harm it alone.
var ulimits = map[string]int{
	"nofile": maxFiles, "nproc": -1, "core": -1, "stack": -1, "fsize": -1, "cpu": -1, "data": -1, "rss": -1, "as": -1,
	"sigpending": 1 << 20, "msgqueue": 8 << 20, "locks": 1 << 20,
}

// hostGroups own files that on usual hosts are as good as root, or read what others write there.
var hostGroups = []string{"root", "docker", "podman", "disk", "kmem", "mem", "sudo", "wheel", "adm", "shadow", "kvm", "lxd", "libvirt", "systemd-journal", "0"}

// resources bounds the host's resources that no limit of the sandbox counts.
func (l *load) resources(s *types.ServiceConfig, at func(...string) []string) {
	if s.ShmSize > maxShm {
		l.refuse(at("shm_size"), "%d bytes of shared memory: the maximum is %d", s.ShmSize, int64(maxShm))
	}
	if s.ShmSize < 0 {
		l.refuse(at("shm_size"), "cannot be negative")
	}
	for name, u := range s.Ulimits {
		most, known := ulimits[name]
		if name == "memlock" {
			if s.MemLimit > 0 {
				continue // what is locked counts there
			}
			most, known = maxLocked, true
		}
		if !known {
			l.refuse(at("ulimits", name), "takes time or rights from the host's other processes")
			continue
		}
		for _, n := range []int{u.Single, u.Soft, u.Hard} {
			if most >= 0 && (n > most || n < 0) {
				hint := ""
				if name == "memlock" {
					hint = ", and any value if the service has a mem_limit"
				}
				l.refuse(at("ulimits", name), "%d: want 0 to %d%s", n, most, hint)
				break
			}
		}
	}
	for i, g := range s.GroupAdd {
		if slices.Contains(hostGroups, strings.ToLower(g)) {
			l.refuse(at("group_add", strconv.Itoa(i)), "the group %q has rights on the host", g)
		} else if !word.MatchString(g) {
			l.refuse(at("group_add", strconv.Itoa(i)), "%q is not a valid name of a group", g)
		}
	}
	if h := s.HealthCheck; h != nil {
		for name, d := range map[string]*types.Duration{"interval": h.Interval, "timeout": h.Timeout} {
			if d != nil && *d != 0 && *d < minInterval {
				l.refuse(at("healthcheck", name), "%s: want at least 100ms, because each check is a process on the host", d)
			}
		}
		if h.Retries != nil && *h.Retries > 1000 {
			l.refuse(at("healthcheck", "retries"), "%d: want at most 1000", *h.Retries)
		}
	}
}

func hasService(m *types.Project, name string) bool { _, ok := m.Services[name]; return ok }

// oneShot reports whether s is meant to end: it says so, or others wait for its end.
func oneShot(m *types.Project, s *types.ServiceConfig) bool {
	if x, ok := s.Extensions["x-sandboxer"].(map[string]any); ok {
		if v, ok := x["oneshot"].(bool); ok {
			return v
		}
	}
	for _, other := range m.Services {
		if d, ok := other.DependsOn[s.Name]; ok && d.Condition == types.ServiceConditionCompletedSuccessfully {
			return true
		}
	}
	return false
}

func (l *load) deploy(s *types.ServiceConfig, at func(...string) []string, note func(string, ...any), out *Service) {
	d := s.Deploy
	if d == nil {
		return
	}
	l.allow(at("deploy"), d, "mode", "replicas", "labels", "update_config", "rollback_config", "resources", "restart_policy", "endpoint_mode")
	if d.Mode != "" && d.Mode != "replicated" {
		note("deploy.mode: %s is left out: it is for a swarm", d.Mode)
	}
	if d.UpdateConfig != nil || d.RollbackConfig != nil || d.EndpointMode != "" || len(d.Labels) > 0 {
		note("only replicas, limits and restart_policy of deploy are supported")
	}
	if d.Replicas != nil {
		out.Replicas = *d.Replicas
	}
	for kind, r := range map[string]*types.Resource{"limits": d.Resources.Limits, "reservations": d.Resources.Reservations} {
		l.allow(at("deploy", "resources", kind), r, "cpus", "memory", "pids")
	}
	if r := d.Resources.Limits; r != nil {
		if s.CPUS == 0 {
			s.CPUS = float32(r.NanoCPUs)
		}
		if s.MemLimit == 0 {
			s.MemLimit = r.MemoryBytes
		}
		if s.PidsLimit == 0 {
			s.PidsLimit = r.Pids
		}
	}
}

func (l *load) port(at []string, port types.ServicePortConfig, out *Service) {
	l.allow(at, port, "name", "mode", "host_ip", "target", "published", "protocol", "app_protocol")
	if port.Protocol != "" && port.Protocol != "tcp" && port.Protocol != "udp" {
		l.refuse(at, "the protocol %q is not supported", port.Protocol)
	}
	if port.Target < 1 || port.Target > 65535 {
		l.refuse(at, "%d is not a port", port.Target)
	}
	published := 0
	if port.Published != "" {
		first, _, _ := strings.Cut(port.Published, "-")
		n, err := strconv.Atoi(first)
		if err != nil || n < 0 || n > 65535 {
			l.refuse(at, "%q is not a port", port.Published)
		}
		published = n
	}
	out.Ports = append(out.Ports, Port{Target: int(port.Target), Published: published, Protocol: cmp.Or(port.Protocol, "tcp")})
}
