package composefile

import (
	"cmp"
	"encoding/binary"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/compose-spec/compose-go/v2/types"
	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
)

// Rendering has the parameters of the file for a host.
type Rendering struct {
	Dir    string            // absolute; the workspace is Dir/repo, Files are in Dir/files, Copies in Dir/copies
	Labels map[string]string // of everything
	// ServiceLabel is the label that has the name of the service, "" for none.
	ServiceLabel string
	Env          map[string]string // in every service, over its own
	Subnets      map[string]string // CIDR of each network
	Sealed       bool              // networks lead nowhere but to the services on them
	Limits       sandboxer.Limits  // of all services together; zero fields set none
	ImageOf      func(service string) string
	StopAfter    time.Duration // longest time that a service is given to end
	// Restarts is how often in a row a failed service is started again, at most.
	Restarts int
	// NewPrivileges lets processes in containers gain rights by set-uid programs such as
	// sudo; without it every service has no-new-privileges.
	NewPrivileges bool
	// Podman writes the file for podman-compose: what that would drop is refused, and
	// what it would show in a list of processes is put into EnvFiles.
	Podman bool
	// Agent, if not nil, is mounted in a service, read-only.
	Agent *Agent
	// Egress, if not nil, connects services to the outside through a gateway; the networks
	// themselves are sealed then.
	Egress *Egress
}

// AgentDir is where sandboxer's own programs are in a service. A file mounts nothing there.
const AgentDir = "/.sandboxer"

// Agent is a directory of the host with a program that a service has at AgentDir, for callers that
// start it there. No process inside, not even root, can replace it.
type Agent struct {
	Service string
	Source  string // on the host, absolute
}

// podmanDrops are keys of a service that podman-compose 1.0 ignores.
var podmanDrops = []string{"cpu_shares", "dns", "dns_opt", "dns_search", "domainname", "group_add", "ipc", "links", "network_mode", "pids_limit", "platform", "scale"}

// forPodman changes or refuses what podman-compose would get wrong in a service.
func (p *Project) forPodman(out map[string]any, name string, r Rendering) error {
	for _, key := range podmanDrops {
		if _, there := out[key]; there {
			return sandboxer.E(sandboxer.Unsupported, nil, "%s: services.%s.%s: podman-compose ignores it", p.File, name, key).
				WithHint("leave it out (also limits of processes), or use a host with docker compose")
		}
	}
	nets, _ := out["networks"].(map[string]any)
	for n, one := range nets {
		if len(one.(map[string]any)) > 0 {
			return sandboxer.E(sandboxer.Unsupported, nil, "%s: services.%s.networks.%s: podman-compose ignores aliases and fixed addresses", p.File, name, n).
				WithHint("use the names of services, or use a host with docker compose")
		}
	}
	if len(nets) > 0 {
		out["networks"] = slices.Sorted(maps.Keys(nets)) // as a mapping it is misread
	}
	if env, ok := out["environment"].(map[string]string); ok {
		for k, v := range env {
			if strings.ContainsAny(v, "\r\n") {
				return sandboxer.E(sandboxer.Unsupported, nil, "%s: services.%s: podman-compose cannot pass on the variable %s, which has several lines", p.File, name, k).
					WithHint("write it to a file of the workspace, or use a host with docker compose")
			}
		}
		delete(out, "environment")
		out["env_file"] = path.Join(r.Dir, "files", EnvFile(name))
	}
	delete(out, "logging") // its options are others
	if check, ok := out["healthcheck"].(map[string]any); ok {
		if test, ok := check["test"].([]string); ok && len(test) > 1 && test[0] == "CMD" {
			words := make([]string, len(test)-1)
			for i, w := range test[1:] {
				words[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
			}
			check["test"] = []string{"CMD-SHELL", strings.Join(words, " ")}
		}
	}
	return nil
}

// EnvFile is the name of the file with the environment of a service.
func EnvFile(service string) string { return "env-" + service }

// EnvFiles are the environments that a file for podman-compose refers to.
func (p *Project) EnvFiles(r Rendering) (files []File) {
	for _, s := range p.Services {
		var b strings.Builder
		env := environment(p.model.Services[s.Name], r)
		readdress(env, p.readdressed(r))
		for _, k := range slices.Sorted(maps.Keys(env)) {
			b.WriteString(k + "=" + env[k] + "\n")
		}
		if b.Len() > 0 {
			files = append(files, File{Name: EnvFile(s.Name), Mode: 0o600, Content: []byte(b.String())})
		}
	}
	return files
}

// environment is the environment of a service.
func environment(s types.ServiceConfig, r Rendering) map[string]string {
	env := map[string]string{}
	for k, v := range s.Environment {
		if v != nil {
			env[k] = *v
		}
	}
	maps.Copy(env, r.Env)
	return env
}

// Render writes the file for the host. Invalid: the services' own limits exceed the
// sandbox's. Unsupported: podman-compose would drop something.
func (p *Project) Render(r Rendering) ([]byte, error) {
	share, err := p.share(r.Limits)
	if err != nil {
		return nil, err
	}
	if r.Egress != nil {
		if err := p.checkEgress(r); err != nil {
			return nil, err
		}
	}
	services := map[string]any{}
	for _, s := range p.Services {
		one := p.renderService(p.model.Services[s.Name], s, r, share[s.Name])
		if r.Podman {
			if err := p.forPodman(one, s.Name, r); err != nil {
				return nil, err
			}
		}
		services[s.Name] = one
	}
	networks := map[string]any{}
	for _, name := range p.Networks {
		n := map[string]any{"driver": "bridge", "labels": labels(p.model.Networks[name].Labels, r.Labels)}
		if r.Sealed || r.Egress != nil || p.internal[name] {
			n["internal"] = true
		}
		if cidr := r.Subnets[name]; cidr != "" {
			pool := map[string]any{"subnet": cidr}
			if in, err := netip.ParsePrefix(cidr); err == nil && len(p.addrs[name]) > 0 && in.Bits() < 31 {
				pool["ip_range"] = netip.PrefixFrom(nth(in, 1<<(31-in.Bits())), in.Bits()+1).String() // of the others: the upper half
			}
			n["ipam"] = map[string]any{"config": []any{pool}}
		}
		networks[name] = n
	}
	volumes := map[string]any{}
	for _, name := range p.Volumes {
		volumes[name] = map[string]any{"labels": labels(p.model.Volumes[name].Labels, r.Labels)}
	}
	by := p.readdressed(r)
	for _, s := range services {
		for _, key := range []string{"networks", "environment", "command", "entrypoint", "healthcheck", "extra_hosts", "dns"} {
			if v, ok := s.(map[string]any)[key]; ok {
				s.(map[string]any)[key] = readdress(v, by)
			}
		}
	}
	if r.Egress != nil {
		p.behindGateway(services, volumes, r)
	}
	out := map[string]any{"services": services}
	if len(networks) > 0 {
		out["networks"] = networks
	}
	if len(volumes) > 0 {
		out["volumes"] = volumes
	}
	return yaml.Marshal(escape(out))
}

// Places are the directories of the workspace that services mount and their parents, with
// false, and the files that they mount, with true. As long as a service may be started again
// each must keep its type: the engine follows a link that took its place.
func (p *Project) Places() map[string]bool {
	out := map[string]bool{}
	for _, b := range p.Binds {
		if b.Source == "." {
			continue
		}
		out[b.Source] = b.File
		for d := path.Dir(b.Source); d != "."; d = path.Dir(d) {
			out[d] = false
		}
	}
	return out
}

// nth is an address of an IPv4 range by its number.
func nth(in netip.Prefix, n uint32) netip.Addr {
	a := in.Masked().Addr().As4()
	binary.BigEndian.PutUint32(a[:], binary.BigEndian.Uint32(a[:])+n)
	return netip.AddrFrom4(a)
}

// readdressed maps the addresses that the file fixes, and their subnets,
// to those of the sandbox: its second address and the following, in order.
func (p *Project) readdressed(r Rendering) map[string]string {
	out := map[string]string{}
	for name, addrs := range p.addrs {
		in, err := netip.ParsePrefix(r.Subnets[name])
		if err != nil {
			continue
		}
		for _, c := range p.model.Networks[name].Ipam.Config {
			out[c.Subnet] = in.String()
		}
		for i, a := range slices.SortedFunc(maps.Keys(addrs), netip.Addr.Compare) {
			out[a.String()] = nth(in, uint32(i)+2).String()
		}
	}
	return out
}

// readdress replaces, in the strings of v, which it changes, each key of by that is not part
// of a longer address.
func readdress(v any, by map[string]string) any {
	if len(by) == 0 {
		return v
	}
	switch v := v.(type) {
	case string:
		// The longest first: an address may begin a subnet.
		keys := slices.SortedFunc(maps.Keys(by), func(a, b string) int { return cmp.Or(len(b)-len(a), strings.Compare(a, b)) })
		var b strings.Builder
		for i := 0; i < len(v); {
			k := slices.IndexFunc(keys, func(k string) bool { return strings.HasPrefix(v[i:], k) && alone(v, i, i+len(k)) })
			if k < 0 {
				b.WriteByte(v[i])
				i++
				continue
			}
			b.WriteString(by[keys[k]])
			i += len(keys[k])
		}
		return b.String()
	case []string:
		v = slices.Clone(v) // it may be the model's
		for i := range v {
			v[i] = readdress(v[i], by).(string)
		}
		return v
	case []any:
		for i := range v {
			v[i] = readdress(v[i], by)
		}
	case map[string]any:
		for k := range v {
			v[k] = readdress(v[k], by)
		}
	case map[string]string:
		for k := range v {
			v[k] = readdress(v[k], by).(string)
		}
	}
	return v
}

// alone reports whether the address s[i:j] is not part of a longer one.
func alone(s string, i, j int) bool {
	digit := func(i int) bool { return i >= 0 && i < len(s) && s[i] >= '0' && s[i] <= '9' }
	return !digit(i-1) && !(i > 0 && s[i-1] == '.' && digit(i-2)) && !digit(j) && !(j < len(s) && s[j] == '.' && digit(j+1))
}

// escape protects every value from being taken for a variable by the program that reads the file.
func escape(v any) any {
	switch v := v.(type) {
	case string:
		return strings.ReplaceAll(v, "$", "$$")
	case []string:
		out := make([]any, len(v))
		for i, s := range v {
			out[i] = escape(s)
		}
		return out
	case []any:
		for i := range v {
			v[i] = escape(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = escape(v[k])
		}
	case map[string]string:
		out := map[string]any{}
		for k, s := range v {
			out[k] = escape(s)
		}
		return out
	}
	return v
}

func labels(own types.Labels, ours map[string]string) map[string]string {
	out := map[string]string{}
	maps.Copy(out, own)
	maps.Copy(out, ours)
	return out
}

// A quota is the share of one container.
type quota struct {
	milliCPU, memory, pids int64
}

// share divides the limits among the containers: a service gets what it asks for, and the
// rest is divided evenly, so that all together stay within the limits.
func (p *Project) share(all sandboxer.Limits) (map[string]quota, error) {
	out := map[string]quota{}
	split := func(what string, total int64, unit int64, own func(types.ServiceConfig) int64, put func(*quota, int64)) error {
		left, open := total, int64(0)
		for _, s := range p.Services {
			if n := own(p.model.Services[s.Name]); n > 0 {
				left -= n * int64(s.Replicas)
			} else {
				open += int64(s.Replicas)
			}
		}
		if total > 0 && (left < 0 || open > 0 && left/open < unit) {
			return sandboxer.E(sandboxer.Invalid, nil, "%s: the services' own limits of %s add up to more than the %s of the sandbox", p.File, what, what).
				WithHint("lower the limits in the compose file, or ask for a larger sandbox with --%s", what)
		}
		for _, s := range p.Services {
			n := own(p.model.Services[s.Name])
			if n <= 0 && total > 0 && open > 0 {
				n = left / open
			}
			q := out[s.Name]
			put(&q, n)
			out[s.Name] = q
		}
		return nil
	}
	if err := split("cpus", all.MilliCPU, 10, func(s types.ServiceConfig) int64 { return int64(s.CPUS * 1000) }, func(q *quota, n int64) { q.milliCPU = n }); err != nil {
		return nil, err
	}
	if err := split("memory", all.MemoryBytes, 6<<20, func(s types.ServiceConfig) int64 { return int64(s.MemLimit) }, func(q *quota, n int64) { q.memory = n }); err != nil {
		return nil, err
	}
	err := split("pids", all.PIDs, 1, func(s types.ServiceConfig) int64 { return s.PidsLimit }, func(q *quota, n int64) { q.pids = n })
	return out, err
}

// fields are those of a service, as compose reads them.
type fields map[string]any

// text sets key to v unless it is empty.
func (f fields) text(key, v string) {
	if v != "" {
		f[key] = v
	}
}

func (f fields) list(key string, v []string) {
	if len(v) > 0 {
		f[key] = slices.Clone(v)
	}
}

func (f fields) yes(key string, v bool) {
	if v {
		f[key] = true
	}
}

func (p *Project) renderService(s types.ServiceConfig, info Service, r Rendering, q quota) map[string]any {
	out := fields{
		"image":   s.Image,
		"labels":  labels(s.Labels, r.Labels),
		"restart": "no",
		"logging": map[string]any{"driver": "json-file", "options": map[string]any{"max-size": "10m", "max-file": "1"}},
	}
	if n := min(info.Restarts, r.Restarts); n > 0 {
		out["restart"] = "on-failure:" + strconv.Itoa(n)
	}
	if r.ServiceLabel != "" {
		out["labels"].(map[string]string)[r.ServiceLabel] = s.Name
	}
	if s.Build != nil {
		out["image"] = r.ImageOf(s.Name)
	}
	// An empty list clears the image's value; a missing one does not.
	if s.Command != nil {
		out["command"] = []string(s.Command)
	}
	if s.Entrypoint != nil {
		out["entrypoint"] = []string(s.Entrypoint)
	}
	out.text("working_dir", s.WorkingDir)
	out.text("user", s.User)
	out.text("hostname", s.Hostname)
	out.text("domainname", s.DomainName)
	out.text("stop_signal", s.StopSignal)
	out.text("platform", s.Platform)
	out.text("ipc", s.Ipc)
	out.text("network_mode", s.NetworkMode)
	if s.Build == nil {
		out.text("pull_policy", s.PullPolicy)
	}
	out.list("cap_drop", s.CapDrop)
	out.list("dns", s.DNS)
	out.list("dns_opt", s.DNSOpts)
	out.list("dns_search", s.DNSSearch)
	out.list("group_add", s.GroupAdd)
	out.list("links", s.Links)
	out.list("tmpfs", s.Tmpfs)
	out.list("expose", s.Expose)
	// Without the colon every engine knows it.
	opts := slices.DeleteFunc(slices.Clone(s.SecurityOpt), func(o string) bool { return strings.HasPrefix(o, "no-new-privileges") })
	if !r.NewPrivileges || len(opts) < len(s.SecurityOpt) {
		opts = append(opts, "no-new-privileges")
	}
	out.list("security_opt", opts)
	out.yes("init", s.Init != nil && *s.Init)
	out.yes("tty", s.Tty)
	out.yes("stdin_open", s.StdinOpen)
	out.yes("read_only", s.ReadOnly)
	if s.ShmSize > 0 {
		out["shm_size"] = int64(s.ShmSize)
	}
	if s.CPUShares > 0 {
		out["cpu_shares"] = s.CPUShares
	}
	renderLimits(out, s, q)
	if info.Replicas != 1 {
		out["scale"] = info.Replicas
	}
	grace := r.StopAfter
	if s.StopGracePeriod != nil {
		grace = min(grace, time.Duration(*s.StopGracePeriod))
	}
	out["stop_grace_period"] = grace.String()
	if env := environment(s, r); len(env) > 0 {
		out["environment"] = env
	}
	out.list("extra_hosts", extraHosts(s))
	if len(s.DependsOn) > 0 {
		out["depends_on"] = p.renderDependencies(s)
	}
	if s.HealthCheck != nil {
		out["healthcheck"] = renderHealthCheck(s.HealthCheck)
	}
	if s.NetworkMode == "" {
		out["networks"] = renderNetworks(s)
		var ports []string
		for _, port := range info.Ports {
			ports = append(ports, "127.0.0.1::"+strconv.Itoa(port.Target)+"/"+port.Protocol)
		}
		out.list("ports", ports)
	}
	if mounts := p.renderMounts(s, r); len(mounts) > 0 {
		out["volumes"] = mounts
	}
	return out
}

// renderLimits sets the bounds of a service's use of the host.
func renderLimits(out fields, s types.ServiceConfig, q quota) {
	if q.milliCPU > 0 {
		out["cpus"] = float64(q.milliCPU) / 1000
	}
	if q.memory > 0 {
		out["mem_limit"] = q.memory
		out["memswap_limit"] = q.memory // no swap in addition
	}
	if q.pids > 0 {
		out["pids_limit"] = q.pids
	}
	if len(s.Ulimits) > 0 {
		limits := map[string]any{}
		for name, u := range s.Ulimits {
			if u.Single != 0 {
				limits[name] = u.Single
			} else {
				limits[name] = map[string]any{"soft": u.Soft, "hard": u.Hard}
			}
		}
		out["ulimits"] = limits
	}
}

// extraHosts are the lines that s adds to /etc/hosts.
func extraHosts(s types.ServiceConfig) (hosts []string) {
	for host, addrs := range s.ExtraHosts {
		for _, a := range addrs {
			hosts = append(hosts, host+":"+a)
		}
	}
	slices.Sort(hosts)
	return hosts
}

// renderDependencies names the services that s waits for. Those that are disabled are left out.
func (p *Project) renderDependencies(s types.ServiceConfig) map[string]any {
	deps := map[string]any{}
	for name, d := range s.DependsOn {
		if hasService(p.model, name) {
			deps[name] = map[string]any{"condition": cmp.Or(d.Condition, types.ServiceConditionStarted)}
		}
	}
	return deps
}

func renderHealthCheck(h *types.HealthCheckConfig) map[string]any {
	if h.Disable {
		return map[string]any{"disable": true}
	}
	check := map[string]any{}
	if len(h.Test) > 0 {
		check["test"] = []string(h.Test)
	}
	for key, d := range map[string]*types.Duration{"interval": h.Interval, "timeout": h.Timeout, "start_period": h.StartPeriod} {
		if d != nil {
			check[key] = time.Duration(*d).String()
		}
	}
	if h.Retries != nil {
		check["retries"] = int64(*h.Retries)
	}
	return check
}

func renderNetworks(s types.ServiceConfig) map[string]any {
	nets := map[string]any{}
	for name, n := range s.Networks {
		one := map[string]any{}
		if n != nil && len(n.Aliases) > 0 {
			one["aliases"] = slices.Clone(n.Aliases)
		}
		if n != nil && n.Priority != 0 {
			one["priority"] = n.Priority
		}
		if n != nil && n.Ipv4Address != "" {
			one["ipv4_address"] = n.Ipv4Address
		}
		nets[name] = one
	}
	return nets
}

func (p *Project) renderMounts(s types.ServiceConfig, r Rendering) (mounts []any) {
	for _, v := range s.Volumes {
		m := map[string]any{"type": v.Type, "target": path.Clean(v.Target)}
		if v.ReadOnly {
			m["read_only"] = true
		}
		switch v.Type {
		case types.VolumeTypeBind:
			m["source"] = path.Join(r.Dir, "repo", v.Source)
			if c := p.copied[v.Source]; c != "" && (v.ReadOnly || slices.ContainsFunc(p.Copies, func(b Bind) bool { return b.Copy == c && b.File })) {
				m["source"] = path.Join(r.Dir, "copies", c)
			}
		case types.VolumeTypeVolume:
			if v.Source != "" {
				m["source"] = v.Source
			}
			if v.Volume != nil && v.Volume.NoCopy {
				m["volume"] = map[string]any{"nocopy": true}
			}
		case types.VolumeTypeTmpfs:
			if v.Tmpfs != nil && v.Tmpfs.Size > 0 {
				m["tmpfs"] = map[string]any{"size": int64(v.Tmpfs.Size)}
			}
		}
		mounts = append(mounts, m)
	}
	for _, f := range p.mounted[s.Name] {
		mounts = append(mounts, map[string]any{"type": "bind", "source": path.Join(r.Dir, "files", f.file), "target": f.target, "read_only": true})
	}
	if r.Agent != nil && r.Agent.Service == s.Name {
		mounts = append(mounts, map[string]any{"type": "bind", "source": r.Agent.Source, "target": AgentDir, "read_only": true})
	}
	return mounts
}
