package engine

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A ContainerConfig is what CreateContainer makes. Its fields are the API's.
type ContainerConfig struct {
	Image       string
	Hostname    string `json:",omitempty"`
	User        string `json:",omitempty"`
	Env         []string
	Entrypoint  []string
	Cmd         []string
	WorkingDir  string `json:",omitempty"`
	StopSignal  string `json:",omitempty"`
	Labels      map[string]string
	Healthcheck *Healthcheck `json:",omitempty"`
	HostConfig  HostConfig
}

// A Healthcheck is a container's. NONE means no check, not even the image's.
type Healthcheck struct{ Test []string }

// A HostConfig has a container's limits, rights and mounts.
type HostConfig struct {
	Runtime      string   `json:",omitempty"`
	NetworkMode  string   `json:",omitempty"`
	Dns          []string `json:",omitempty"` // servers that the resolver's configuration names
	Memory       int64    `json:",omitempty"`
	MemorySwap   int64    `json:",omitempty"`
	NanoCpus     int64    `json:",omitempty"`
	PidsLimit    int64    `json:",omitempty"`
	CapDrop      []string `json:",omitempty"`
	CapAdd       []string `json:",omitempty"`
	SecurityOpt  []string `json:",omitempty"`
	IpcMode      string   `json:",omitempty"`
	ShmSize      int64    `json:",omitempty"` // of /dev/shm, in bytes
	ExtraHosts   []string `json:",omitempty"` // name:address, in /etc/hosts
	CgroupnsMode string   `json:",omitempty"`
	LogConfig    *LogConfig
	Mounts       []MountConfig     `json:",omitempty"`
	StorageOpt   map[string]string `json:",omitempty"`
}

// A LogConfig says what happens to a container's output.
type LogConfig struct {
	Type   string
	Config map[string]string `json:",omitempty"`
}

// A MountConfig is a volume, or a path of the engine's machine (bind), that a container mounts.
type MountConfig struct {
	Type          string
	Source        string
	Target        string
	ReadOnly      bool
	VolumeOptions *VolumeOptions `json:",omitempty"`
	BindOptions   *BindOptions   `json:",omitempty"`
}

// BindOptions are the options of a bind mount.
type BindOptions struct {
	Propagation string // of mounts in it
}

// VolumeOptions are the options of a volume mount.
type VolumeOptions struct {
	NoCopy bool // of what the image has there
}

// CreateContainer makes a container, which does not run, and returns its ID. Conflict: there is one of
// that name. NotFound: its image does not exist.
func (a *API) CreateContainer(ctx context.Context, name string, c ContainerConfig) (string, error) {
	var made struct{ ID string }
	err := a.request(ctx, "making a container", http.MethodPost, "/containers/create", url.Values{"name": {name}}, c, into(&made))
	return made.ID, err
}

// ContainerCall makes a call that has no answer: start, pause, unpause. If the container is in that state
// already, only start succeeds.
func (a *API) ContainerCall(ctx context.Context, id, what string) error {
	return a.request(ctx, what+" of a container", http.MethodPost, "/containers/"+url.PathEscape(id)+"/"+what, nil, nil, nil)
}

// RemoveContainer ends a container at once and removes it, with its anonymous volumes.
// Absence is success. Conflict: another call is removing it.
func (a *API) RemoveContainer(ctx context.Context, id string) error {
	return a.remove(ctx, "removing a container", "/containers/"+url.PathEscape(id), url.Values{"force": {"1"}, "v": {"1"}})
}

// A ContainerSummary is a container as listings have it.
type ContainerSummary struct {
	ID      string `json:"Id"`
	Names   []string
	ImageID string
	Labels  map[string]string
	State   string
}

// Called reports whether a container has a name. A name belongs to one container of an engine. Labels do not: an image that
// was made of the container has them, and so does every container of that image.
func (c ContainerSummary) Called(name string) bool { return slices.Contains(c.Names, "/"+name) }

// ListContainers lists containers, in any state, that have all of these labels; an empty value
// matches any.
func (a *API) ListContainers(ctx context.Context, labels map[string]string) (list []ContainerSummary, err error) {
	q := filters(map[string][]string{"label": labelFilter(labels)})
	q.Set("all", "1")
	err = a.request(ctx, "listing containers", http.MethodGet, "/containers/json", q, nil, into(&list))
	return list, err
}

// A ContainerDetail is an engine's description of one container.
type ContainerDetail struct {
	ID     string `json:"Id"`
	Name   string // with a slash before it
	Image  string // ID
	Config struct {
		Labels map[string]string
		Env    []string
	}
	HostConfig struct {
		Memory      int64
		NetworkMode string
	}
	State struct {
		Status     string // created, running, paused, exited, dead, removing
		Running    bool
		Paused     bool
		OOMKilled  bool
		ExitCode   int
		Pid        int // of the first process, on the engine's machine
		Error      string
		StartedAt  time.Time
		FinishedAt time.Time
	}
	NetworkSettings struct {
		IPAddress string
		Networks  map[string]struct{ IPAddress, GlobalIPv6Address string }
	}
	Mounts []struct {
		Type        string
		Name        string
		Destination string
		RW          bool
	}
}

// InspectContainer describes one container, by ID or name.
func (a *API) InspectContainer(ctx context.Context, id string) (c ContainerDetail, err error) {
	err = a.request(ctx, "inspecting a container", http.MethodGet, "/containers/"+url.PathEscape(id)+"/json", nil, nil, into(&c))
	return c, err
}

// WrittenBytes is the size of all that a container has written, or -1 where the engine does not know it. It is the sum of the sizes of the
// files as they are read, so that holes of sparse files count, too, as they do in an image. The engine looks at every file.
func (a *API) WrittenBytes(ctx context.Context, id string) (int64, error) {
	c := struct{ SizeRw *int64 }{}
	err := a.request(ctx, "measuring a container", http.MethodGet, "/containers/"+url.PathEscape(id)+"/json", url.Values{"size": {"1"}}, nil, into(&c))
	if err != nil || c.SizeRw == nil {
		return -1, err
	}
	return *c.SizeRw, nil
}

// PutArchive unpacks a tar into a directory of a container, which need not run.
func (a *API) PutArchive(ctx context.Context, id, dir string, tar io.Reader) error {
	return a.request(ctx, "copying files into a container", http.MethodPut, "/containers/"+url.PathEscape(id)+"/archive", url.Values{"path": {dir}}, tar, nil)
}

// GetArchive passes a tar of a path of a container, which need not run, to read.
func (a *API) GetArchive(ctx context.Context, id, path string, read func(io.Reader) error) error {
	return a.request(ctx, "reading files of a container", http.MethodGet, "/containers/"+url.PathEscape(id)+"/archive", url.Values{"path": {path}}, nil,
		func(res *http.Response) error { return read(res.Body) })
}

// A FileStat describes the file at a path of a container.
type FileStat struct {
	Mode   fs.FileMode
	Size   int64
	Target string `json:"linkTarget"` // where a symbolic link leads in the end, as far as that is there
}

// StatFile describes the file at a path of a container, which need not run. It follows symbolic links on the way, but not one at the end.
// NotFound: nothing is there.
func (a *API) StatFile(ctx context.Context, id, path string) (st FileStat, err error) {
	err = a.request(ctx, "looking up a file of a container", http.MethodHead, "/containers/"+url.PathEscape(id)+"/archive", url.Values{"path": {path}}, nil,
		func(res *http.Response) error {
			data, err := base64.StdEncoding.DecodeString(res.Header.Get("X-Docker-Container-Path-Stat"))
			if err != nil {
				return err
			}
			return json.Unmarshal(data, &st)
		})
	return st, err
}

// Logs returns the end of what a container has written, at most 64 KiB.
func (a *API) Logs(ctx context.Context, id string) (string, error) {
	var said strings.Builder
	err := a.request(ctx, "reading the output of a container", http.MethodGet, "/containers/"+url.PathEscape(id)+"/logs",
		url.Values{"stdout": {"1"}, "stderr": {"1"}, "tail": {"20"}}, nil, func(res *http.Response) error {
			return demux(io.LimitReader(res.Body, maxAPISaid), &said, &said)
		})
	return said.String(), err
}

// ContainerStats returns what a container uses. Values that the engine does not report are negative, and the disk always is.
func (a *API) ContainerStats(ctx context.Context, id string) (st sandboxer.Stats, err error) {
	var s struct {
		CPU struct {
			Usage struct {
				Total int64 `json:"total_usage"`
			} `json:"cpu_usage"`
		} `json:"cpu_stats"`
		Memory struct {
			Usage *int64 `json:"usage"`
			Limit int64  `json:"limit"`
			Stats struct {
				File1 int64 `json:"total_inactive_file"` // of the first version of control groups
				File2 int64 `json:"inactive_file"`
			} `json:"stats"`
		} `json:"memory_stats"`
		PIDs struct {
			Current *int64 `json:"current"`
		} `json:"pids_stats"`
		Networks map[string]struct {
			Rx int64 `json:"rx_bytes"`
			Tx int64 `json:"tx_bytes"`
		} `json:"networks"`
	}
	err = a.request(ctx, "measuring a container", http.MethodGet, "/containers/"+url.PathEscape(id)+"/stats",
		url.Values{"stream": {"0"}, "one-shot": {"1"}}, nil, into(&s))
	st = sandboxer.Stats{At: time.Now(), CPU: time.Duration(s.CPU.Usage.Total), MemoryBytes: -1, PIDs: -1, DiskBytes: -1}
	if s.Memory.Usage != nil {
		st.MemoryBytes = *s.Memory.Usage
		if file := max(s.Memory.Stats.File1, s.Memory.Stats.File2); file < st.MemoryBytes {
			st.MemoryBytes -= file // what the kernel can take back at any time
		}
	}
	if s.PIDs.Current != nil {
		st.PIDs = *s.PIDs.Current
	}
	for _, n := range s.Networks {
		st.RxBytes += n.Rx
		st.TxBytes += n.Tx
	}
	return st, err
}
