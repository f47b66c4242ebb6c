package composefile

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/compose-spec/compose-go/v2/dotenv"
	"github.com/compose-spec/compose-go/v2/types"

	"github.com/sand-boxer/sandboxer"
)

var (
	serviceName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$`)
	imageName   = regexp.MustCompile(`^[a-z0-9][A-Za-z0-9._/:@-]{0,400}$`)
	hexOnly     = regexp.MustCompile(`^[0-9a-f]+$`)
	variable    = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.-]*$`)
	word        = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,120}$`)
	userName    = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?$`)
	platform    = regexp.MustCompile(`^[a-z0-9]+(/[a-z0-9]+){0,2}$`)
	limitName   = regexp.MustCompile(`^[a-z]{2,20}$`)
)

// reserved are prefixes of labels by which engines, compose and this program know
// what is theirs.
var reserved = []string{"dev.sandboxer", "com.docker.", "io.podman.", "io.containers.", "org.mobyproject.", "desktop.docker."}

const hostRights = "gives the container rights of the host"

// never says why fields of a service are refused, whatever they say.
var never = map[string]string{
	"privileged":          hostRights,
	"cap_add":             hostRights,
	"devices":             "opens devices of the host",
	"device_cgroup_rules": "opens devices of the host",
	"gpus":                "opens devices of the host",
	"pid":                 "joins the processes of the host or of another container",
	"uts":                 "joins the host's name space",
	"userns_mode":         "leaves the user name space",
	"cgroup":              "joins the control groups of the host",
	"cgroup_parent":       "leaves the control group of the sandbox",
	"runtime":             "chooses another runtime on the host",
	"isolation":           "chooses another isolation",
	"sysctls":             "changes settings of the kernel",
	"credential_spec":     "uses credentials of the host",
	"provider":            "runs a program on the host",
	"models":              "uses models of the host",
	"use_api_socket":      "hands out the engine of the host",
	"label_file":          "labels are given with labels",
	"volumes_from":        "mounts what other containers have; use named volumes",
	"volume_driver":       "chooses a driver on the host",
	"external_links":      "reaches containers outside the sandbox",
	"net":                 "is not supported; use networks",
	"mac_address":         "sets an address in the host's network",
	"storage_opt":         "sets options of the host's storage",
	"blkio_config":        "sets how the host's disks are shared",
	"oom_kill_disable":    "keeps the host from taking memory back",
	"oom_score_adj":       "makes the host take memory from others first",
	"cpu_rt_period":       "takes real time from the host",
	"cpu_rt_runtime":      "takes real time from the host",
	"cpuset":              "takes processors of the host",
	"annotations":         "tells the host's runtime what to do",
	"log_driver":          "sends logs elsewhere from the host",
	"log_opt":             "sends logs elsewhere from the host",
	"pre_start":           "hooks of the life of a service are not supported",
	"post_start":          "hooks of the life of a service are not supported",
	"pre_stop":            "hooks of the life of a service are not supported",
	"cpu_count":           "limits are given with mem_limit, cpus and pids_limit",
	"cpu_percent":         "limits are given with mem_limit, cpus and pids_limit",
	"cpu_period":          "limits are given with mem_limit, cpus and pids_limit",
	"cpu_quota":           "limits are given with mem_limit, cpus and pids_limit",
}

// taken are the fields of a service that service looks at or that mean nothing here.
// What is in neither table is refused as unknown.
var taken = []string{
	"name", "profiles", "deploy", "develop", "restart", "scale", "attach", "container_name", "extends", "links",
	"build", "depends_on", "expose", "healthcheck", "ports", "stdin_open", "tty",
	"cap_drop", "cpus", "cpu_shares", "command", "configs", "dns", "dns_opt", "dns_search", "domainname", "entrypoint", "environment",
	"env_file", "extra_hosts", "group_add", "hostname", "image", "init", "ipc", "labels", "logging", "mem_limit",
	"memswap_limit", "mem_swappiness", "mem_reservation", "network_mode", "networks", "pids_limit", "platform", "pull_policy", "read_only", "secrets", "security_opt",
	"shm_size", "stop_grace_period", "stop_signal", "tmpfs", "ulimits", "user", "volumes", "working_dir",
}

// set calls f for every field of v that is set, with its name in YAML.
func set(v reflect.Value, f func(name string)) {
	for i := range v.NumField() {
		field := v.Type().Field(i)
		name, opts, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		switch {
		case name == "-" || strings.HasPrefix(name, "#") || !field.IsExported():
		case name == "" && strings.Contains(opts, "inline") && field.Type.Kind() == reflect.Struct:
			set(v.Field(i), f)
		case v.Field(i).IsZero():
		case (field.Type.Kind() == reflect.Slice || field.Type.Kind() == reflect.Map) && v.Field(i).Len() == 0:
		default:
			f(name)
		}
	}
}

// allow refuses every set field of v but those named.
func (l *load) allow(at []string, v any, names ...string) {
	rv := reflect.ValueOf(v)
	for rv.Kind() == reflect.Pointer {
		if rv.IsNil() {
			return
		}
		rv = rv.Elem()
	}
	set(rv, func(name string) {
		if !slices.Contains(names, name) {
			l.refuse(append(slices.Clip(at), name), "is not supported")
		}
	})
}

// accept judges the model and makes the project of it.
func (l *load) accept(m *types.Project) (*Project, error) {
	p := &Project{File: l.files[0], model: m, mounted: map[string][]mount{}, copied: map[string]string{}, internal: map[string]bool{}, addrs: map[string]map[netip.Addr]bool{}}
	l.allow(nil, m, "name", "services", "networks", "volumes", "secrets", "configs")
	if note := l.empty(); note != "" {
		p.Notes = append(p.Notes, note)
	}
	if len(m.Services) == 0 {
		var profiles []string
		for _, s := range m.DisabledServices {
			profiles = append(profiles, s.Profiles...)
		}
		if slices.Sort(profiles); len(profiles) > 0 {
			l.refuse([]string{"services"}, "every service belongs to a profile, and none is enabled; the input profiles, or COMPOSE_PROFILES in .env, names some of %s", strings.Join(slices.Compact(profiles), ", "))
		} else {
			l.refuse([]string{"services"}, "there is no service")
		}
	}
	l.networks(p)
	l.volumes(p)
	object := func(kind, name string, o types.FileObjectConfig) {
		l.allow([]string{kind, name}, o, "name", "file", "environment", "content", "labels")
		l.word([]string{kind, name}, name)
	}
	for name, o := range m.Secrets {
		object("secrets", name, types.FileObjectConfig(o))
	}
	for name, o := range m.Configs {
		object("configs", name, types.FileObjectConfig(o))
	}
	units := 0
	for _, name := range l.order(m) {
		s := m.Services[name]
		l.service(p, &s)
		m.Services[name] = s
		units += p.Services[len(p.Services)-1].Replicas
	}
	if units > maxUnits {
		l.refuse([]string{"services"}, "these are %d containers; %d are the most", units, maxUnits)
	}
	l.nested(p)
	if len(p.Files) > maxPinned || len(p.Copies) > maxPinned {
		l.refuse([]string{"services"}, "more than %d files are mounted from beside the workspace", maxPinned)
	}
	l.defaultNetwork(p)
	slices.Sort(p.Notes)
	p.Notes = slices.Compact(p.Notes)
	return p, l.failure()
}

// defaultNetwork gives services without networks the one of that name, as compose does.
func (l *load) defaultNetwork(p *Project) {
	for name, s := range p.model.Services {
		if s.NetworkMode == "" && len(s.Networks) == 0 {
			s.Networks = map[string]*types.ServiceNetworkConfig{"default": nil}
			p.model.Services[name] = s
		}
		for n := range s.Networks {
			if n == "default" && !slices.Contains(p.Networks, n) {
				p.Networks = append(p.Networks, n)
			} else if !slices.Contains(p.Networks, n) {
				l.refuse([]string{"services", name, "networks", n}, "the network is not declared")
			}
		}
	}
	slices.Sort(p.Networks)
}

// order is the services as the file has them, which decides which is the first.
func (l *load) order(m *types.Project) []string {
	names := slices.Sorted(maps.Keys(m.Services))
	slices.SortStableFunc(names, func(a, b string) int {
		return l.places["services\x00"+a].compare(l.places["services\x00"+b])
	})
	return names
}

func (l *load) word(at []string, s string) {
	if !word.MatchString(s) {
		l.refuse(at, "%q cannot be a name here", s)
	}
}

// labels takes from labels what programs of the host could obey, which is all but what
// describes an image, and says which that is.
func (l *load) labels(p *Project, at []string, labels types.Labels) {
	var left []string
	defer func() {
		if len(left) > 0 {
			p.Notes = append(p.Notes, fmt.Sprintf("%s: labels are left out, which programs of the host may obey: %s", strings.Join(at, "."), strings.Join(left, ", ")))
		}
	}()
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		if !strings.HasPrefix(k, "org.opencontainers.image.") {
			left = append(left, strconv.Quote(k))
			delete(labels, k)
		}
		for _, r := range reserved {
			if strings.HasPrefix(strings.ToLower(k), r) {
				l.refuse(append(slices.Clip(at), "labels", k), "labels of %s… are not for compose files", r)
			}
		}
	}
}

func (l *load) networks(p *Project) {
	for _, name := range slices.Sorted(maps.Keys(p.model.Networks)) {
		n := p.model.Networks[name]
		at := []string{"networks", name}
		l.word(at, name)
		if bool(n.External) {
			l.refuse(append(at, "external"), "joins a network outside the sandbox")
		}
		if n.Driver != "" && n.Driver != "bridge" {
			l.refuse(append(at, "driver"), "only the driver bridge is given, not %q", n.Driver)
		}
		if n.EnableIPv6 != nil && *n.EnableIPv6 {
			l.refuse(append(at, "enable_ipv6"), "networks of sandboxes have IPv4 only")
		}
		l.labels(p, at, n.Labels)
		l.allow(at, n, "name", "driver", "internal", "attachable", "labels", "external", "enable_ipv4", "enable_ipv6", "ipam")
		l.ipam(p, at, n)
		if n.Name != "" {
			p.Notes = append(p.Notes, "networks are named after the sandbox")
		}
		p.internal[name] = n.Internal
		p.Networks = append(p.Networks, name)
	}
}

// ipam judges what a network says of its addresses, which are the sandbox's own.
func (l *load) ipam(p *Project, at []string, n types.NetworkConfig) {
	at = append(slices.Clip(at), "ipam")
	l.allow(at, n.Ipam, "driver", "config")
	if d := n.Ipam.Driver; d != "" && d != "default" {
		l.refuse(append(slices.Clip(at), "driver"), "only the driver default is given, not %q", d)
	}
	for i, pool := range n.Ipam.Config {
		l.allow(append(slices.Clip(at), "config", strconv.Itoa(i)), pool, "subnet", "gateway", "ip_range", "aux_addresses")
	}
	if len(n.Ipam.Config) > 0 {
		p.Notes = append(p.Notes, strings.Join(at[:2], ".")+": subnet and gateway are the sandbox's own")
	}
}

// maxFixed is how many addresses of a network services may have chosen: half of it.
const maxFixed = 29

// fixed judges an address that a service has in a network.
func (l *load) fixed(p *Project, service, network, addr string) {
	at := []string{"services", service, "networks", network, "ipv4_address"}
	a, err := netip.ParseAddr(addr)
	if err != nil || !a.Is4() {
		l.refuse(at, "%q is no address", addr)
		return
	}
	if !slices.ContainsFunc(p.model.Networks[network].Ipam.Config, func(c *types.IPAMPool) bool {
		in, err := netip.ParsePrefix(c.Subnet)
		return err == nil && in.Contains(a)
	}) {
		l.refuse(at, "%s is in no subnet that the file gives the network", addr)
		return
	}
	if p.addrs[network] == nil {
		p.addrs[network] = map[netip.Addr]bool{}
	}
	p.addrs[network][a] = true
	if len(p.addrs[network]) > maxFixed {
		l.refuse(at, "more than %d addresses of one network are fixed", maxFixed)
	}
	p.Notes = append(p.Notes, fmt.Sprintf("%s: the address %s is another one of the sandbox's own, also where variables, commands and checks name it; files that name it are left as they are", service, a))
}

func (l *load) volumes(p *Project) {
	for _, name := range slices.Sorted(maps.Keys(p.model.Volumes)) {
		v := p.model.Volumes[name]
		at := []string{"volumes", name}
		l.word(at, name)
		if bool(v.External) {
			l.refuse(append(at, "external"), "mounts a volume from outside the sandbox")
		}
		if v.Driver != "" && v.Driver != "local" {
			l.refuse(append(at, "driver"), "only the driver local is given, not %q", v.Driver)
		}
		if len(v.DriverOpts) > 0 {
			l.refuse(append(at, "driver_opts"), "options can mount any place of the host")
		}
		l.labels(p, at, v.Labels)
		l.allow(at, v, "name", "driver", "driver_opts", "labels", "external")
		if v.Name != "" {
			p.Notes = append(p.Notes, "volumes are named after the sandbox")
		}
		p.Volumes = append(p.Volumes, name)
	}
}

// service judges one service, and leaves in s what Render writes.
func (l *load) service(p *Project, s *types.ServiceConfig) {
	top := []string{"services", s.Name}
	at := func(names ...string) []string { return append(slices.Clip(top), names...) }
	note := func(format string, args ...any) { p.Notes = append(p.Notes, s.Name+": "+fmt.Sprintf(format, args...)) }
	if !serviceName.MatchString(s.Name) {
		l.refuse(top, "%q cannot be the name of a service", s.Name)
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
			l.refuse(at("security_opt", strconv.Itoa(i)), "%q is for the profile to say, with its input new_privileges", o)
		default:
			l.refuse(at("security_opt", strconv.Itoa(i)), "%q loosens or replaces what holds the container", o)
		}
	}
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
					note("extra_hosts: %s is left out: the host is not reached from a sandbox, unless the operator lets it and the profile gives it a network", host)
				}
				return !l.gateway
			}
			if _, err := netip.ParseAddr(strings.Trim(a, "[]")); err != nil {
				l.refuse(at("extra_hosts"), "%s: %q is no address", host, a)
			}
			return false
		})
		if len(s.ExtraHosts[host]) == 0 {
			delete(s.ExtraHosts, host)
		}
	}
	for i, link := range s.Links {
		if name, _, _ := strings.Cut(link, ":"); !hasService(p.model, name) {
			l.refuse(at("links", strconv.Itoa(i)), "%q is no service of the file", name)
		}
	}
	for name, d := range s.DependsOn {
		l.allow(at("depends_on", name), d, "condition", "restart", "required")
		if !d.Required && hasService(p.model, name) {
			note("depends_on: %s is waited for, although required is false", name)
		}
		if d.Required && !hasService(p.model, name) {
			l.refuse(at("depends_on", name), "%q is no service of the file", name)
		}
	}
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
			l.refuse(at("ulimits", name), "is no limit")
		}
		l.allow(at("ulimits", name), u, "single", "soft", "hard")
	}
	if s.User == ":" {
		s.User = "" // as of variables that are not set; engines take it so
	}
	if s.User != "" && !userName.MatchString(s.User) {
		l.refuse(at("user"), "%q is no user", s.User)
	}
	if s.Platform != "" && !platform.MatchString(s.Platform) {
		l.refuse(at("platform"), "%q is no platform", s.Platform)
	}
	switch s.PullPolicy {
	case "", "always", "never", "missing", "if_not_present", "build":
	default:
		l.refuse(at("pull_policy"), "%q is not supported", s.PullPolicy)
	}
	l.deploy(s, at, note, &out)
	if s.Scale != nil {
		out.Replicas = *s.Scale
	}
	if out.Replicas < 0 || out.Replicas > maxUnits {
		l.refuse(at("scale"), "%d containers: 0 to %d are possible", out.Replicas, maxUnits)
		out.Replicas = 1 // not to be added up
	}
	// Within these bounds the limits of all containers can be added up.
	if s.CPUS < 0 || s.MemLimit < 0 || s.PidsLimit < 0 {
		l.refuse(top, "a limit cannot be negative, which would be none")
	}
	if !(s.CPUS <= sandboxer.MaxMilliCPU/1000) {
		l.refuse(at("cpus"), "%v is beyond every machine", s.CPUS)
	}
	if s.MemLimit > sandboxer.MaxMemoryBytes {
		l.refuse(at("mem_limit"), "%d bytes are beyond every machine", s.MemLimit)
	}
	if s.PidsLimit > sandboxer.MaxPIDs {
		l.refuse(at("pids_limit"), "%d is beyond every machine", s.PidsLimit)
	}
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
		l.refuse(at("ports"), "%d ports are published: %d are the most; leave ranges out that only other services use", max(len(s.Ports), len(out.Ports)), maxPorts)
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
		l.refuse(place, "%q is no way to restart: no, on-failure, always or unless-stopped", policy)
		return
	}
	out.Restarts = maxRestarts
	if bounded {
		n, err := strconv.Atoi(most)
		if err != nil || n < 1 {
			l.refuse(place, "%q is no number of times", most)
		}
		out.Restarts = min(n, maxRestarts)
	}
}

// The most that a service may take of what is no limit of the sandbox's but the host's to
// give.
const (
	maxPorts    = 256 // published ones of a service, each a program or rule on the host
	maxShm      = 2 << 30
	maxFiles    = 1 << 20
	maxLocked   = 64 << 20
	minInterval = types.Duration(100 * time.Millisecond) // of health checks, each a process of the engine's
)

// ulimits are those that may be set, with the largest value; -1 is any, of what counts
// within the container or harms it alone.
var ulimits = map[string]int{
	"nofile": maxFiles, "nproc": -1, "core": -1, "stack": -1, "fsize": -1, "cpu": -1, "data": -1, "rss": -1, "as": -1,
	"sigpending": 1 << 20, "msgqueue": 8 << 20, "locks": 1 << 20,
}

// hostGroups own what on usual hosts is as good as root, or read what others write there.
var hostGroups = []string{"root", "docker", "podman", "disk", "kmem", "mem", "sudo", "wheel", "adm", "shadow", "kvm", "lxd", "libvirt", "systemd-journal", "0"}

// resources bounds what is the host's and counted by no limit of the sandbox.
func (l *load) resources(s *types.ServiceConfig, at func(...string) []string) {
	if s.ShmSize > maxShm {
		l.refuse(at("shm_size"), "%d bytes of shared memory: at most %d are given", s.ShmSize, int64(maxShm))
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
					hint = ", and any figure where the service has a mem_limit"
				}
				l.refuse(at("ulimits", name), "%d: 0 to %d are possible%s", n, most, hint)
				break
			}
		}
	}
	for i, g := range s.GroupAdd {
		if slices.Contains(hostGroups, strings.ToLower(g)) {
			l.refuse(at("group_add", strconv.Itoa(i)), "the group %q has rights on the host", g)
		} else if !word.MatchString(g) {
			l.refuse(at("group_add", strconv.Itoa(i)), "%q cannot be the name of a group", g)
		}
	}
	if h := s.HealthCheck; h != nil {
		for name, d := range map[string]*types.Duration{"interval": h.Interval, "timeout": h.Timeout} {
			if d != nil && *d != 0 && *d < minInterval {
				l.refuse(at("healthcheck", name), "%s: at least 100ms, since each check is a process on the host", d)
			}
		}
		if h.Retries != nil && *h.Retries > 1000 {
			l.refuse(at("healthcheck", "retries"), "%d: at most 1000", *h.Retries)
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

func (l *load) image(p *Project, s *types.ServiceConfig, at func(...string) []string) {
	if s.Image != "" {
		last := s.Image[strings.LastIndexByte(s.Image, '/')+1:]
		switch {
		case !imageName.MatchString(s.Image) || strings.HasPrefix(s.Image, "sha256:"):
			l.refuse(at("image"), "%q cannot be the name of an image", s.Image)
		case strings.HasPrefix(last, "sbx-"):
			l.refuse(at("image"), "%q may be an image of another sandbox", s.Image)
		case hexOnly.MatchString(s.Image) && s.Build == nil:
			l.refuse(at("image"), "%q may be the ID of any image of the host; add a tag", s.Image)
		}
	}
	if s.Build == nil {
		if s.Image == "" {
			l.refuse(at(), "the service has neither image nor build")
		}
		return
	}
	b := s.Build
	l.allow(at("build"), b, "context", "dockerfile", "dockerfile_inline", "args", "labels", "no_cache", "pull", "target", "platforms", "tags", "cache_from")
	if len(b.CacheFrom) > 0 {
		p.Notes = append(p.Notes, s.Name+": build.cache_from is left out: images are built from what the host has")
	}
	build := Build{Service: s.Name, Args: map[string]string{}, Labels: b.Labels, Target: b.Target, NoCache: b.NoCache, Pull: b.Pull, Platform: s.Platform}
	l.labels(p, at("build"), b.Labels)
	for k, v := range b.Labels {
		if strings.ContainsAny(k+v, "\r\n\x00") {
			l.refuse(at("build", "labels", k), "a label has one line")
		}
	}
	if b.Target != "" {
		l.word(at("build", "target"), b.Target)
	}
	if len(b.Platforms) > 1 || len(b.Platforms) == 1 && !platform.MatchString(b.Platforms[0]) {
		l.refuse(at("build", "platforms"), "one platform is built, the host's or one that is named")
	} else if len(b.Platforms) == 1 {
		build.Platform = b.Platforms[0]
	}
	var err error
	if build.Context, err = l.below(cmp.Or(b.Context, ".")); err != nil {
		l.refuse(at("build", "context"), "%q cannot be built from: %s", b.Context, err)
		return
	}
	if fi, err := l.stat(build.Context); err != nil || !fi.IsDir() {
		l.refuse(at("build", "context"), "%q is no directory of the workspace", b.Context)
		return
	}
	if b.DockerfileInline != "" {
		build.Dockerfile = []byte(b.DockerfileInline)
	} else {
		file := path.Join(cmp.Or(b.Context, "."), cmp.Or(b.Dockerfile, "Dockerfile"))
		if path.IsAbs(b.Dockerfile) {
			file = b.Dockerfile
		}
		if file, err = l.below(file); err != nil {
			l.refuse(at("build", "dockerfile"), "%q cannot be used: %s", b.Dockerfile, err)
		} else if fi, err := l.stat(file); err != nil || !fi.Mode().IsRegular() {
			l.refuse(at("build", "dockerfile"), "%q is no file of the workspace", file)
		} else if build.Dockerfile, err = l.read(file); err != nil {
			l.refuse(at("build", "dockerfile"), "%q cannot be read: %s", file, reason(err))
		} else if build.Ignore, err = l.read(file + ".dockerignore"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			l.refuse(at("build", "dockerfile"), "%q cannot be read: %s", file+".dockerignore", reason(err))
		}
	}
	for k, v := range b.Args {
		if !variable.MatchString(k) {
			l.refuse(at("build", "args", k), "%q cannot be the name of an argument", k)
		} else if v != nil {
			build.Args[k] = *v
		} else if v, ok := l.env[k]; ok {
			build.Args[k] = v
		}
	}
	p.Builds = append(p.Builds, build)
}

func (l *load) environment(s *types.ServiceConfig, at func(...string) []string) {
	env := types.MappingWithEquals{}
	for i, f := range s.EnvFiles {
		place := at("env_file", strconv.Itoa(i))
		if f.Format != "" {
			l.refuse(place, "the format %q is not supported", f.Format)
			continue
		}
		name, err := l.below(f.Path)
		if err != nil {
			l.refuse(place, "%q cannot be read: %s", f.Path, err)
			continue
		}
		data, err := l.read(name)
		if errors.Is(err, fs.ErrNotExist) && !bool(f.Required) {
			continue
		}
		if err != nil {
			l.refuse(place, "%q cannot be read: %s", f.Path, reason(err))
			continue
		}
		vars, err := dotenv.ParseWithLookup(bytes.NewReader(data), func(k string) (string, bool) { v, ok := l.env[k]; return v, ok })
		if err != nil {
			l.refuse(place, "%q is no file of variables", f.Path)
			continue
		}
		for k, v := range vars {
			env[k] = &v
		}
	}
	for k, v := range s.Environment {
		if v == nil {
			if got, ok := l.env[k]; ok {
				env[k] = &got
			}
			continue
		}
		env[k] = v
	}
	for k := range env {
		if !variable.MatchString(k) {
			l.refuse(at("environment", k), "%q cannot be the name of a variable", k)
		}
	}
	s.Environment, s.EnvFiles = env, nil
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
		note("of deploy only replicas, limits and restart_policy count here")
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
		l.refuse(at, "%d is no port", port.Target)
	}
	published := 0
	if port.Published != "" {
		first, _, _ := strings.Cut(port.Published, "-")
		n, err := strconv.Atoi(first)
		if err != nil || n < 0 || n > 65535 {
			l.refuse(at, "%q is no port", port.Published)
		}
		published = n
	}
	out.Ports = append(out.Ports, Port{Target: int(port.Target), Published: published, Protocol: cmp.Or(port.Protocol, "tcp")})
}

// target refuses places in a container where nothing is mounted.
func (l *load) target(at []string, dir string) {
	clean := path.Clean(dir)
	if !path.IsAbs(dir) || clean == "/" || strings.ContainsAny(dir, ":\x00\n") {
		l.refuse(at, "%q is no place in a container to mount at", dir)
		return
	}
	for _, no := range []string{"/proc", "/sys", "/dev"} {
		if clean == no || strings.HasPrefix(clean, no+"/") && clean != "/dev/shm" {
			l.refuse(at, "nothing is mounted at %s, which is the kernel's", clean)
		}
	}
	if clean == AgentDir || strings.HasPrefix(clean, AgentDir+"/") {
		l.refuse(at, "nothing is mounted at %s, where sandboxer's own programs are", clean)
	}
}

// ofEveryHost is what files mount of the host although a service can do without, and why it
// can.
var ofEveryHost = map[string]string{
	"/etc/localtime": "the variable TZ names a time zone",
	"/etc/timezone":  "the variable TZ names a time zone",
	"/dev/null":      "nothing of the host is mounted",
}

func (l *load) mounts(p *Project, s *types.ServiceConfig, at func(...string) []string, out *Service) {
	kept := s.Volumes[:0]
	defer func() { s.Volumes = kept }()
	for i := range s.Volumes {
		v := &s.Volumes[i]
		place := at("volumes", strconv.Itoa(i))
		if why := ofEveryHost[path.Clean(v.Source)]; v.Type == types.VolumeTypeBind && why != "" {
			p.Notes = append(p.Notes, fmt.Sprintf("%s: %s is not mounted at %s: %s", s.Name, v.Source, v.Target, why))
			continue
		}
		kept = append(kept, *v)
		v = &kept[len(kept)-1]
		l.target(place, v.Target)
		l.allow(place, *v, "type", "source", "target", "read_only", "consistency", "bind", "volume", "tmpfs")
		switch v.Type {
		case types.VolumeTypeBind:
			l.allow(place, v.Bind, "create_host_path", "propagation", "selinux", "recursive")
			if b := v.Bind; b != nil && b.SELinux != "" {
				p.Notes = append(p.Notes, fmt.Sprintf("%s: the option %s of the mount at %s is left out: it changes labels on the host", s.Name, b.SELinux, v.Target))
			}
			if b := v.Bind; b != nil && (b.Propagation != "" && b.Propagation != "rprivate" && b.Propagation != "private" || b.Recursive != "") {
				l.refuse(place, "options of a bind mount change the host's mounts or labels")
				continue
			}
			source, err := l.below(v.Source)
			if err != nil {
				l.refuse(place, "%q cannot be mounted: %s", v.Source, err)
				continue
			}
			v.Source = source
			fi, err := l.stat(source)
			b := Bind{Source: source}
			switch {
			case errors.Is(err, fs.ErrNotExist): // made as a directory, as compose does
			case err != nil:
				l.refuse(place, "%q cannot be mounted: %s", source, reason(err))
				continue
			case fi.Mode().IsRegular():
				b.File = true
			case !fi.IsDir():
				l.refuse(place, "%q is neither directory nor regular file", source)
				continue
			}
			if source == "." {
				out.Workspace = path.Clean(v.Target)
			}
			if !slices.Contains(p.Binds, b) {
				p.Binds = append(p.Binds, b)
			}
		case types.VolumeTypeVolume:
			l.allow(place, v.Volume, "nocopy")
			if v.Source != "" {
				if !slices.Contains(p.Volumes, v.Source) {
					l.refuse(place, "the volume %q is not declared", v.Source)
				}
				out.Volumes[v.Source] = path.Clean(v.Target)
			}
		case types.VolumeTypeTmpfs:
			l.allow(place, v.Tmpfs, "size", "mode")
			if v.Source != "" {
				l.refuse(place, "a tmpfs has no source")
			}
		default:
			l.refuse(place, "a mount of the type %q is not supported", v.Type)
		}
	}
}

// nested deals with mounts of what lies in a place that some service may write: a
// service could put a link there between the look and the mount. Read-only ones, and files,
// are mounted from a copy that was made before. Of directories that are mounted writable, each
// on the way is mounted in that service, too, at the place that it has there: the kernel
// lets nobody remove or rename what something is mounted on. (It would let another service
// that has it not mounted, and so does who puts files into the workspace from outside see
// to it that it stays; Mounts tells what.)
func (l *load) nested(p *Project) {
	var writable, pins []string
	for _, s := range p.model.Services {
		for _, v := range s.Volumes {
			if v.Type == types.VolumeTypeBind && !v.ReadOnly {
				writable = append(writable, v.Source)
			}
		}
	}
	within := func(source string) bool {
		return slices.ContainsFunc(writable, func(w string) bool {
			return w != source && (w == "." || strings.HasPrefix(source, w+"/"))
		})
	}
	for _, name := range l.order(p.model) {
		for _, v := range p.model.Services[name].Volumes {
			if v.Type != types.VolumeTypeBind || !within(v.Source) {
				continue
			}
			file := slices.Contains(p.Binds, Bind{Source: v.Source, File: true})
			if !v.ReadOnly && !file {
				pins = append(pins, v.Source)
				continue
			}
			what := "%s: %s is mounted as it was at the start"
			if !v.ReadOnly {
				what += ", and what is written there is not in the workspace"
			}
			p.Notes = append(p.Notes, fmt.Sprintf(what, name, v.Source))
			if p.copied[v.Source] != "" {
				continue
			}
			at2 := slices.IndexFunc(p.Binds, func(b Bind) bool { return b.Source == v.Source })
			if at2 < 0 {
				continue
			}
			b := p.Binds[at2]
			b.Copy = fmt.Sprintf("copy-%d", len(p.Copies))
			p.copied[v.Source] = b.Copy
			p.Copies = append(p.Copies, b)
		}
	}
	slices.SortFunc(p.Copies, func(a, b Bind) int { return cmp.Compare(a.Copy, b.Copy) })
	for _, source := range pins {
		l.pin(p, source)
	}
}

// pin mounts source, a directory, and those that it lies in, in every service that may write
// one of these, at the places that they have there.
func (l *load) pin(p *Project, source string) {
	for _, name := range l.order(p.model) {
		s := p.model.Services[name]
		for _, v := range s.Volumes {
			rest, in := strings.CutPrefix(source, v.Source+"/")
			if v.Source == "." {
				rest, in = source, true
			}
			if v.Type != types.VolumeTypeBind || v.ReadOnly || !in {
				continue
			}
			dir, target := v.Source, path.Clean(v.Target)
			for part := range strings.SplitSeq(rest, "/") {
				dir, target = path.Join(dir, part), path.Join(target, part)
				if slices.ContainsFunc(s.Volumes, func(o types.ServiceVolumeConfig) bool { return path.Clean(o.Target) == target && o.Source != dir }) ||
					slices.ContainsFunc(s.Tmpfs, func(o string) bool { at, _, _ := strings.Cut(o, ":"); return path.Clean(at) == target }) {
					break // something else is there, which the service cannot move, or look behind
				}
				if !slices.ContainsFunc(s.Volumes, func(o types.ServiceVolumeConfig) bool { return path.Clean(o.Target) == target }) {
					s.Volumes = append(s.Volumes, types.ServiceVolumeConfig{Type: types.VolumeTypeBind, Source: dir, Target: target})
				}
				if b := (Bind{Source: dir}); !slices.Contains(p.Binds, b) {
					p.Binds = append(p.Binds, b)
				}
			}
		}
		p.model.Services[name] = s
	}
}

// asset turns the use of a config or secret into a file beside the workspace.
func (l *load) asset(p *Project, s *types.ServiceConfig, at func(...string) []string, kind string, r types.FileReferenceConfig) {
	place := at(kind)
	l.allow(place, r, "source", "target", "uid", "gid", "mode")
	o, ok := object(p.model, kind, r.Source)
	if !ok {
		l.refuse(place, "%q is not declared", r.Source)
		return
	}
	target := cmp.Or(r.Target, r.Source)
	if !path.IsAbs(target) {
		if kind == "secrets" {
			target = path.Join("/run/secrets", target)
		} else {
			target = "/" + target
		}
	}
	l.target(place, target)
	where := []string{kind, r.Source}
	var content []byte
	switch {
	case o.File != "":
		name, err := l.below(o.File)
		if err == nil {
			content, err = l.read(name)
		}
		if err != nil {
			l.refuse(append(where, "file"), "%q cannot be read: %s", o.File, reason(err))
			return
		}
	case o.Environment != "":
		v, ok := l.env[o.Environment]
		if !ok {
			l.refuse(append(where, "environment"), "the variable %s is not set", o.Environment)
			return
		}
		content = []byte(v)
	default:
		content = []byte(o.Content)
	}
	mode := fs.FileMode(0o444)
	if r.Mode != nil {
		mode = fs.FileMode(*r.Mode) & 0o777
	}
	name := fmt.Sprintf("file-%d", len(p.Files))
	p.mounted[s.Name] = append(p.mounted[s.Name], mount{name, target})
	p.Files = append(p.Files, File{Name: name, Mode: mode, Content: content})
}

func object(m *types.Project, kind, name string) (types.FileObjectConfig, bool) {
	if kind == "secrets" {
		o, ok := m.Secrets[name]
		return types.FileObjectConfig(o), ok
	}
	o, ok := m.Configs[name]
	return types.FileObjectConfig(o), ok
}
