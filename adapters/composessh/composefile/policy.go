package composefile

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/compose-spec/compose-go/v2/types"
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

// reserved are prefixes of labels by which engines, compose and this program recognize
// their own objects.
var reserved = []string{"dev.sandboxer", "com.docker.", "io.podman.", "io.containers.", "org.mobyproject.", "desktop.docker."}

const hostRights = "gives the container rights of the host"

// never says why fields of a service are refused, whatever their value.
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

// taken are the fields of a service that service checks or that mean nothing here.
// A field in neither table is refused as unknown.
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

// allow refuses every set field of v except those named.
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

// accept checks the model and makes the project from it.
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
		l.refuse([]string{"services"}, "these are %d containers; the maximum is %d", units, maxUnits)
	}
	l.nested(p)
	if len(p.Files) > maxPinned || len(p.Copies) > maxPinned {
		l.refuse([]string{"services"}, "more than %d files and directories are mounted from copies or one by one", maxPinned)
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

// order is the services in the order of the file, which decides which is the first.
func (l *load) order(m *types.Project) []string {
	names := slices.Sorted(maps.Keys(m.Services))
	slices.SortStableFunc(names, func(a, b string) int {
		return l.places["services\x00"+a].compare(l.places["services\x00"+b])
	})
	return names
}

func (l *load) word(at []string, s string) {
	if !word.MatchString(s) {
		l.refuse(at, "%q is not a valid name here", s)
	}
}

// labels removes labels that programs of the host could obey, which are all except those that
// describe an image, and notes which it removed.
func (l *load) labels(p *Project, at []string, labels types.Labels) {
	var left []string
	defer func() {
		if len(left) > 0 {
			p.Notes = append(p.Notes, fmt.Sprintf("%s: labels that programs of the host may obey are left out: %s", strings.Join(at, "."), strings.Join(left, ", ")))
		}
	}()
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		if !strings.HasPrefix(k, "org.opencontainers.image.") {
			left = append(left, strconv.Quote(k))
			delete(labels, k)
		}
		for _, r := range reserved {
			if strings.HasPrefix(strings.ToLower(k), r) {
				l.refuse(append(slices.Clip(at), "labels", k), "labels that begin with %s are not allowed in compose files", r)
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
			l.refuse(append(at, "driver"), "only the driver bridge is supported, not %q", n.Driver)
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

// ipam checks a network's addresses, which are the sandbox's own.
func (l *load) ipam(p *Project, at []string, n types.NetworkConfig) {
	at = append(slices.Clip(at), "ipam")
	l.allow(at, n.Ipam, "driver", "config")
	if d := n.Ipam.Driver; d != "" && d != "default" {
		l.refuse(append(slices.Clip(at), "driver"), "only the driver default is supported, not %q", d)
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

// fixed checks the address of a service in a network.
func (l *load) fixed(p *Project, service, network, addr string) {
	at := []string{"services", service, "networks", network, "ipv4_address"}
	a, err := netip.ParseAddr(addr)
	if err != nil || !a.Is4() {
		l.refuse(at, "%q is not an address", addr)
		return
	}
	if !slices.ContainsFunc(p.model.Networks[network].Ipam.Config, func(c *types.IPAMPool) bool {
		in, err := netip.ParsePrefix(c.Subnet)
		return err == nil && in.Contains(a)
	}) {
		l.refuse(at, "%s is not in a subnet of the network in this file", addr)
		return
	}
	if p.addrs[network] == nil {
		p.addrs[network] = map[netip.Addr]bool{}
	}
	p.addrs[network][a] = true
	if len(p.addrs[network]) > maxFixed {
		l.refuse(at, "more than %d fixed addresses in one network", maxFixed)
	}
	p.Notes = append(p.Notes, fmt.Sprintf("%s: the address %s is replaced by one of the sandbox's network, also in variables, commands and checks; files that contain it are not changed", service, a))
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
			l.refuse(append(at, "driver"), "only the driver local is supported, not %q", v.Driver)
		}
		if len(v.DriverOpts) > 0 {
			l.refuse(append(at, "driver_opts"), "options can mount any directory of the host")
		}
		l.labels(p, at, v.Labels)
		l.allow(at, v, "name", "driver", "driver_opts", "labels", "external")
		if v.Name != "" {
			p.Notes = append(p.Notes, "volumes are named after the sandbox")
		}
		p.Volumes = append(p.Volumes, name)
	}
}
