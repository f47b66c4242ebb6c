package engine

import (
	"context"
	"encoding/json"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A Container is a container as the engine describes it (docker inspect).
type Container struct {
	ID     string `json:"Id"`
	Name   string
	Config struct {
		Labels      map[string]string
		Env         []string
		Healthcheck *struct{ Interval time.Duration }
	}
	RestartCount int
	State        struct {
		Status     string
		Running    bool
		Paused     bool
		OOMKilled  bool
		ExitCode   int
		Pid        int
		StartedAt  time.Time
		FinishedAt time.Time
		Health     *struct {
			Status        string
			FailingStreak int
			Log           []struct {
				End      time.Time
				ExitCode int
				Output   string
			}
		}
		// Podman before version 4.
		Healthcheck *struct{ Status string }
		Error       string
	}
	HostConfig struct {
		Memory   int64
		NanoCpus int64
	}
	NetworkSettings struct {
		IPAddress string
		Networks  map[string]struct{ IPAddress string }
		Ports     map[string][]struct{ HostIP, HostPort string }
	}
}

// Service is the service of the sandbox that the container is of, "" for none.
func (c *Container) Service() string { return c.Config.Labels[LabelService] }

// Redact takes the values of the container's environment out of what it said.
func (c *Container) Redact(said string) string {
	for _, kv := range c.Config.Env {
		if _, v, _ := strings.Cut(kv, "="); len(v) > 3 {
			said = strings.ReplaceAll(said, v, "…")
		}
	}
	return said
}

// Health is what the engine knows of the container's health: starting, healthy or
// unhealthy; nothing without a check.
func (c *Container) Health() string {
	switch h := c.State.Health; {
	case h != nil && h.Status == "unhealthy" && h.FailingStreak == 0:
		// No check has failed: Docker reports this for a container that was paused, until its
		// next check. Nothing happened in it since the last one.
		if n := len(h.Log); n > 0 && h.Log[n-1].ExitCode == 0 {
			return "healthy"
		}
		return "starting"
	case h != nil:
		return h.Status
	case c.State.Healthcheck != nil:
		return c.State.Healthcheck.Status
	}
	return ""
}

// NextCheck is how long it takes from at until the engine can know more of the
// container's health: it checks an interval after the start, or after its last check.
func (c *Container) NextCheck(at time.Time) time.Duration {
	every := 30 * time.Second // the engines' default
	if h := c.Config.Healthcheck; h != nil && h.Interval > 0 {
		every = h.Interval
	}
	last := c.State.StartedAt
	if c.State.Health != nil && len(c.State.Health.Log) > 0 {
		last = c.State.Health.Log[len(c.State.Health.Log)-1].End
	}
	due := last.Add(every)
	if !at.Before(due) {
		return 0 // it is at it
	}
	return due.Sub(at) + 50*time.Millisecond
}

// Addrs are the container's own addresses, and the host's addresses on which a port of it is published.
func (c *Container) Addrs(port int) (own, published []string) {
	for _, n := range c.NetworkSettings.Networks {
		if n.IPAddress != "" {
			own = append(own, n.IPAddress)
		}
	}
	slices.Sort(own)
	if len(own) == 0 && c.NetworkSettings.IPAddress != "" {
		own = append(own, c.NetworkSettings.IPAddress)
	}
	for _, p := range c.NetworkSettings.Ports[strconv.Itoa(port)+"/tcp"] {
		if p.HostPort != "" {
			published = append(published, net.JoinHostPort("127.0.0.1", p.HostPort))
		}
	}
	return own, published
}

// OwnNames is the filter of listings for a sandbox's own containers, in addition to the filter by label: their names begin with the sandbox's name.
// Labels alone do not prove it: an image that is made of a container has its labels, too. name is a shell variable, for use in double quotes.
func OwnNames(name string) string { return "name=^/?" + name + "[-_]" }

// Scripts that describe the containers of a sandbox, for use in a script that does more in the
// same round trip. $engine is the engine's program and $name the sandbox's name.
var (
	// ListScript sets $ids to the IDs of the containers, one on each line.
	ListScript = `ids=$("$engine" ps -aq --no-trunc --filter "label=` + LabelName + `=$name" --filter "` + OwnNames("$name") + `") || exit
`
	// InspectScript prints the time and the containers $ids, for ParseContainers.
	InspectScript = `date +%s.%N
[ -z "$ids" ] || { "$engine" inspect $ids || [ $? = 1 ]; }`
)

// ParseContainers reads what InspectScript printed: the host's time, and the containers,
// sorted by name.
func ParseContainers(said string) (at time.Time, list []Container, err error) {
	when, rest, _ := strings.Cut(said, "\n")
	whole, part, _ := strings.Cut(strings.TrimSpace(when), ".")
	sec, _ := strconv.ParseInt(whole, 10, 64)
	nsec, _ := strconv.ParseInt(part, 10, 64) // 0 where date knows none
	if strings.TrimSpace(rest) != "" {
		if err := json.Unmarshal([]byte(rest), &list); err != nil {
			return at, nil, err
		}
	}
	slices.SortFunc(list, func(a, b Container) int { return strings.Compare(a.Name, b.Name) })
	return time.Unix(sec, nsec), list, nil
}

// Containers describes the containers of a sandbox, and returns the host's time.
func (en *Engine) Containers(ctx context.Context, name string) (at time.Time, list []Container, err error) {
	out, err := en.Script(ctx, nil, nil, "engine=$1 name=$2\n"+ListScript+InspectScript, en.Program, name)
	if err != nil {
		return at, nil, err
	}
	if at, list, err = ParseContainers(out); err != nil {
		err = en.unreadable(err, "sandbox "+name)
	}
	return at, list, err
}

func (en *Engine) unreadable(cause error, what string) error {
	return sandboxer.E(sandboxer.Unavailable, cause, "host %s: the engine's description of %s cannot be read", en.Host.Name(), what)
}

// Logs returns the last lines of a container's output, 2000 bytes at most. They may hold its secrets.
func (en *Engine) Logs(ctx context.Context, id string, lines int) (string, error) {
	return en.Script(ctx, nil, nil, `"$1" logs --tail "$3" "$2" 2>&1 | tail -c 2000`, en.Program, id, strconv.Itoa(lines))
}

// found prints the containers of the sandbox $2 and its service $3, or all for none, and how a shell
// in the last of them ended: 126 or 127 if it has none.
var found = `
e=$1 s=$3
set -- --filter "label=` + LabelName + `=$2" --filter "` + OwnNames("$2") + `"
[ -z "$s" ] || set -- "$@" --filter "label=` + LabelService + `=$s"
ids=$("$e" ps -aq --no-trunc "$@") || exit
[ -n "$ids" ] || exit 0
echo "$ids"
"$e" exec "${ids##*
}" sh -c : >/dev/null 2>&1
echo "shell $?"`

// Find returns the ID of the oldest container of a service of a sandbox, or of the sandbox
// if service is empty; "" if there is none. It remembers the container, and whether it
// has a shell.
func (en *Engine) Find(ctx context.Context, name, service string) (string, error) {
	en.mu.Lock()
	id := en.containers[name][service]
	en.mu.Unlock()
	if id != "" {
		return id, nil
	}
	out, err := en.Script(ctx, nil, nil, found, en.Program, name, service)
	if err != nil {
		return "", err
	}
	list, shell, _ := strings.Cut(out, "shell ")
	ids := strings.Fields(list)
	if len(ids) == 0 {
		return "", nil
	}
	id = ids[len(ids)-1] // the oldest: the first replica
	en.mu.Lock()
	defer en.mu.Unlock()
	if en.containers == nil {
		en.containers, en.noShell = map[string]map[string]string{}, map[string]bool{}
	}
	if en.containers[name] == nil {
		en.containers[name] = map[string]string{}
	}
	en.containers[name][service] = id
	if shell = strings.TrimSpace(shell); shell == "126" || shell == "127" {
		en.noShell[id] = true
	}
	return id, nil
}

// hasShell reports whether there may be a shell in a container.
func (en *Engine) hasShell(id string) bool {
	en.mu.Lock()
	defer en.mu.Unlock()
	return !en.noShell[id]
}

// Forget drops what Find remembers of a sandbox.
func (en *Engine) Forget(name string) {
	en.mu.Lock()
	defer en.mu.Unlock()
	for _, id := range en.containers[name] {
		delete(en.noShell, id)
		delete(en.oomKills, id)
	}
	delete(en.containers, name)
}

// paused applies $4 to the containers of $2 that are in the state $3.
var paused = `
ids=$("$1" ps -q --no-trunc --filter "label=` + LabelName + `=$2" --filter "` + OwnNames("$2") + `" --filter "status=$3") || exit
[ -z "$ids" ] || "$1" "$4" $ids >/dev/null`

// Pause freezes every container of a sandbox that runs.
func (en *Engine) Pause(ctx context.Context, name string) error {
	_, err := en.Script(ctx, nil, nil, paused, en.Program, name, "running", "pause")
	return err
}

// Unpause lets every container of a sandbox that is frozen go on.
func (en *Engine) Unpause(ctx context.Context, name string) error {
	_, err := en.Script(ctx, nil, nil, paused, en.Program, name, "paused", "unpause")
	return err
}

// InventoryScript prints the sandbox name of every container, volume and network of an
// installation, with repetitions. $engine is the engine's program and
// $owner the installation.
const InventoryScript = `f="label=` + LabelOwner + `=$owner"
case $engine in podman) l='{{index .Labels "` + LabelName + `"}}';; *) l='{{.Label "` + LabelName + `"}}';; esac
all=$("$engine" ps -a --filter "$f" --format "$l {{.Names}}") || exit
while read -r n c; do case $c in "$n"[-_]*) echo "$n";; esac; done <<EOF
$all
EOF
for kind in volume network; do
	case $engine in
	podman)
		ids=$("$engine" $kind ls -q --filter "$f") || exit
		[ -z "$ids" ] || printf '%s\n' "$ids" | xargs "$engine" $kind inspect --format "$l" 2>/dev/null;;
	*) "$engine" $kind ls --filter "$f" --format "$l" || exit;;
	esac
done
`

// ParseInventory reads what InventoryScript printed, perhaps among other names, each once.
func ParseInventory(said string) []string {
	names := strings.Fields(said)
	slices.Sort(names)
	return slices.Compact(names)
}

// Inventory lists the names of the sandboxes of an installation that have something on the engine.
func (en *Engine) Inventory(ctx context.Context, owner string) ([]string, error) {
	out, err := en.Script(ctx, nil, nil, "engine=$1 owner=$2\n"+InventoryScript+"exit 0", en.Program, owner)
	if err != nil {
		return nil, err
	}
	return ParseInventory(out), nil
}
