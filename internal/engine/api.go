package engine

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/halfclose"
)

// An API is one engine by its HTTP API, Docker's or Podman's. It needs no program of the engine's, and a
// call takes a millisecond. Its methods may be called at once.
//
// Kinds of all methods: NotFound for what is not there, Conflict where the engine says so, Exhausted for
// a full disk, Unavailable for an engine that is not there (ErrAbsent) or does not answer
// (ErrHangs), Failed for what it refuses otherwise, with its words.
type API struct {
	o      APIOptions
	client *http.Client

	mu     sync.Mutex
	silent bool                  // it did not answer when it was last asked
	conns  map[net.Conn]struct{} // of requests; nil once the API is closed
}

// APIOptions say which engine.
type APIOptions struct {
	Name string // what messages call it
	// Dial opens a connection on which the engine speaks HTTP.
	Dial func(ctx context.Context) (net.Conn, error)
	// Every is how often an engine of which something is awaited is asked whether it is there,
	// and how long it may take to answer that; 0 means WatchEvery.
	Every time.Duration
}

// apiVersion is the oldest version of the API that has all that is asked here: that of Docker
// 19.03. Podman takes it, too.
const apiVersion = "/v1.40"

const (
	maxAPIAnswer = 64 << 20 // bytes of one plain answer
	maxAPISaid   = 64 << 10 // of an error
)

// NewAPI returns a client of an engine, and asks it nothing.
func NewAPI(o APIOptions) *API {
	if o.Every == 0 {
		o.Every = WatchEvery
	}
	a := &API{o: o, conns: map[net.Conn]struct{}{}}
	a.client = &http.Client{
		Transport: &http.Transport{
			DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return a.dial(ctx) },
			MaxIdleConnsPerHost: 4,
			IdleConnTimeout:     30 * time.Second,
			DisableCompression:  true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return a
}

// dial opens a connection that ends with the API: one whose caller has left may still come.
func (a *API) dial(ctx context.Context) (net.Conn, error) {
	c, err := a.o.Dial(ctx)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.conns == nil {
		c.Close()
		return nil, net.ErrClosed
	}
	t := &apiConn{Conn: c, a: a}
	a.conns[t] = struct{}{}
	return t, nil
}

// An apiConn is one that the API closes.
type apiConn struct {
	net.Conn
	a *API
}

func (c *apiConn) Close() error {
	c.a.mu.Lock()
	delete(c.a.conns, c)
	c.a.mu.Unlock()
	return c.Conn.Close()
}

// Name is what messages call the engine.
func (a *API) Name() string { return a.o.Name }

// Close ends the requests that are under way, and those to come. Attached commands go on.
func (a *API) Close() {
	a.client.CloseIdleConnections()
	a.mu.Lock()
	conns := a.conns
	a.conns = nil
	a.mu.Unlock()
	for c := range conns {
		c.Close()
	}
}

// hung is the error of calls that an engine does not answer.
func (a *API) hung() error {
	return sandboxer.E(sandboxer.Unavailable, ErrHangs, "the engine %s does not answer", a.o.Name).
		WithHint("it is tried again, and what runs there goes on; look at the engine there")
}

// Attend returns ctx that also ends when the engine has not answered three times in a row, for what
// is done by way of it. How
// long a call takes says nothing: an engine may have an image of gigabytes to unpack. done must
// be called, with the error of the call, and returns what the caller is told.
func (a *API) Attend(ctx context.Context) (context.Context, func(error) error, error) {
	a.mu.Lock()
	silent := a.silent
	a.mu.Unlock()
	if silent { // nobody waits long for one that did not answer
		if !a.answers(ctx, min(recheckTime, a.o.Every)) {
			if ctx.Err() != nil {
				return nil, nil, a.failed(ctx, ctx.Err())
			}
			return nil, nil, a.hung()
		}
	}
	within, cancel := context.WithCancelCause(ctx)
	hung := a.hung()
	watch := time.AfterFunc(a.o.Every, func() {
		for missed := 0; within.Err() == nil; {
			if a.answers(within, a.o.Every) {
				missed = 0
				select {
				case <-within.Done():
				case <-time.After(a.o.Every):
				}
				continue
			}
			if missed++; missed >= watchMisses && within.Err() == nil {
				cancel(hung)
			}
		}
	})
	return within, func(err error) error {
		watch.Stop()
		if err != nil && ctx.Err() == nil && context.Cause(within) == hung {
			err = hung
		}
		cancel(nil)
		return err
	}, nil
}

// answers asks the engine whether it is there.
func (a *API) answers(ctx context.Context, limit time.Duration) bool {
	short, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	r, err := http.NewRequestWithContext(short, http.MethodGet, "http://engine/_ping", nil)
	if err != nil {
		return false
	}
	res, err := a.client.Do(r)
	if err == nil {
		_, _ = io.CopyN(io.Discard, res.Body, 1<<10) // so that the connection is used again
		res.Body.Close()
	}
	// One that is not there has not hung: the call itself says so.
	ok := err == nil || short.Err() == nil
	if ctx.Err() == nil {
		a.mu.Lock()
		a.silent = !ok
		a.mu.Unlock()
	}
	return ok
}

// failed is the error of a request that got no answer.
func (a *API) failed(ctx context.Context, err error) error {
	var se *sandboxer.Error
	switch {
	case ctx.Err() != nil:
		return sandboxer.E(sandboxer.KindOf(ctx.Err()), ctx.Err(), "the engine %s was not waited for any longer", a.o.Name)
	case errors.As(err, &se):
		return se
	}
	return sandboxer.E(sandboxer.Unavailable, errors.Join(ErrAbsent, err), "the engine %s cannot be reached", a.o.Name).
		WithHint("see whether it runs, and whether this account may use it")
}

// said is the error that an answer is.
func (a *API) said(what string, res *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(res.Body, maxAPISaid))
	var m struct {
		Message string `json:"message"`
		Cause   string `json:"cause"` // of Podman
	}
	if json.Unmarshal(body, &m) != nil || m.Message == "" {
		m.Message = http.StatusText(res.StatusCode)
	}
	return a.refused(what, res.StatusCode, m.Message)
}

// refused is the error of what the engine would not do, in its words.
func (a *API) refused(what string, status int, words string) error {
	text := OneLine(words)
	switch {
	case status == http.StatusNotFound:
		return sandboxer.E(sandboxer.NotFound, errors.New(text), "%s: the engine %s does not have it: %s", what, a.o.Name, text)
	case status == http.StatusConflict, strings.Contains(text, "is already in use"): // as Podman says it of names
		return sandboxer.E(sandboxer.Conflict, errors.New(text), "%s: the engine %s refuses: %s", what, a.o.Name, text)
	}
	e := Failure(a.o.Name, what, words, words)
	if e.Kind == sandboxer.Failed && status == http.StatusServiceUnavailable {
		e.Kind = sandboxer.Unavailable
	}
	return e
}

// request makes a request whose answer is given to read. body is sent as JSON, or, if it is an
// io.Reader, as it is.
func (a *API) request(ctx context.Context, what, method, path string, query url.Values, body any, read func(*http.Response) error) error {
	within, done, err := a.Attend(ctx)
	if err != nil {
		return err
	}
	return done(func() error {
		var send io.Reader
		kind := "application/json"
		switch b := body.(type) {
		case nil:
		case io.Reader:
			send, kind = b, "application/x-tar"
		default:
			data, err := json.Marshal(body)
			if err != nil {
				return sandboxer.E(sandboxer.Internal, err, "a request to the engine does not encode")
			}
			send = bytes.NewReader(data)
		}
		at := "http://engine" + apiVersion + path
		if len(query) > 0 {
			at += "?" + query.Encode()
		}
		r, err := http.NewRequestWithContext(within, method, at, send)
		if err != nil {
			return sandboxer.E(sandboxer.Internal, err, "a request to the engine cannot be made")
		}
		if send != nil {
			r.Header.Set("Content-Type", kind)
		}
		res, err := a.client.Do(r)
		if err != nil {
			return a.failed(within, err)
		}
		defer res.Body.Close()
		if res.StatusCode >= 300 && res.StatusCode != http.StatusNotModified {
			return a.said(what, res)
		}
		if read == nil {
			_, _ = io.CopyN(io.Discard, res.Body, maxAPISaid)
			return nil
		}
		if err := read(res); err != nil {
			if within.Err() != nil {
				return a.failed(within, err)
			}
			var se *sandboxer.Error
			if errors.As(err, &se) {
				return err
			}
			return sandboxer.E(sandboxer.Unavailable, err, "%s: what the engine %s answers cannot be read", what, a.o.Name)
		}
		return nil
	}())
}

// into reads a plain answer.
func into(v any) func(*http.Response) error {
	return func(res *http.Response) error {
		return json.NewDecoder(io.LimitReader(res.Body, maxAPIAnswer)).Decode(v)
	}
}

// filters are what listings are narrowed by.
func filters(f map[string][]string) url.Values {
	data, err := json.Marshal(f)
	if err != nil {
		panic(err) // strings
	}
	return url.Values{"filters": {string(data)}}
}

// labelFilter is the filter for objects with all of these labels.
func labelFilter(labels map[string]string) []string {
	var all []string
	for k, v := range labels {
		if v != "" {
			k += "=" + v
		}
		all = append(all, k)
	}
	return all
}

// Info is what an engine says of itself.
type Info struct {
	ServerVersion   string
	Architecture    string // as uname -m has it, or amd64
	OSType          string
	NCPU            int
	MemTotal        int64
	MemoryLimit     bool
	SwapLimit       bool
	PidsLimit       bool
	CPUCfsQuota     bool       `json:"CpuCfsQuota"`
	Driver          string     // that keeps containers' files
	DriverStatus    [][]string // names and values of what it says of itself
	SecurityOptions []string
	Runtimes        map[string]json.RawMessage // by name
	Podman          bool                       `json:"-"`
	Rootless        bool                       // root in its containers is not its machine's; Podman says so here alone, Docker in SecurityOptions
}

// Arch is the architecture as Go calls it.
func (i Info) Arch() string {
	switch i.Architecture {
	case "x86_64":
		return "amd64"
	case "aarch64":
		return "arm64"
	}
	return i.Architecture
}

// Backing is the file system that containers' files are on, "" where the engine does not say it.
func (i Info) Backing() string {
	for _, s := range i.DriverStatus {
		if len(s) == 2 && s[0] == "Backing Filesystem" {
			return s[1]
		}
	}
	return ""
}

// Snapshotter reports whether containers' files are kept by one of containerd's, and not by a storage driver of the engine's.
func (i Info) Snapshotter() bool {
	return slices.ContainsFunc(i.DriverStatus, func(s []string) bool {
		return len(s) == 2 && s[0] == "driver-type" && strings.HasPrefix(s[1], "io.containerd.snapshotter.")
	})
}

// Info asks what the engine is.
func (a *API) Info(ctx context.Context) (i Info, err error) {
	err = a.request(ctx, "looking at it", http.MethodGet, "/info", nil, nil, func(res *http.Response) error {
		i.Podman = strings.HasPrefix(res.Header.Get("Server"), "Libpod/")
		return into(&i)(res)
	})
	i.Rootless = i.Rootless || i.secured("rootless")
	return i, err
}

// Remaps reports whether the engine maps the user IDs of all containers (userns-remap).
func (i Info) Remaps() bool { return i.secured("userns") }

func (i Info) secured(by string) bool {
	return slices.ContainsFunc(i.SecurityOptions, func(o string) bool { return slices.Contains(strings.Split(o, ","), "name="+by) })
}

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

// A Healthcheck is a container's. NONE is that there is none, also of the image's.
type Healthcheck struct{ Test []string }

// A HostConfig says how a container is held.
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
	CgroupnsMode string   `json:",omitempty"`
	LogConfig    *LogConfig
	Mounts       []MountConfig     `json:",omitempty"`
	StorageOpt   map[string]string `json:",omitempty"`
}

// A LogConfig says what becomes of a container's output.
type LogConfig struct {
	Type   string
	Config map[string]string `json:",omitempty"`
}

// A MountConfig is a volume that a container has, or what of its machine it has (bind).
type MountConfig struct {
	Type          string
	Source        string
	Target        string
	ReadOnly      bool
	VolumeOptions *VolumeOptions `json:",omitempty"`
	BindOptions   *BindOptions   `json:",omitempty"`
}

// BindOptions are those of a directory or file of the engine's machine in a container.
type BindOptions struct {
	Propagation string // of mounts in it
}

// VolumeOptions are those of a volume in a container.
type VolumeOptions struct {
	NoCopy bool // of what the image has there
}

// CreateContainer makes a container, which does not run, and returns its ID. Conflict: there is one of
// that name. NotFound: its image is not there.
func (a *API) CreateContainer(ctx context.Context, name string, c ContainerConfig) (string, error) {
	var made struct{ ID string }
	err := a.request(ctx, "making a container", http.MethodPost, "/containers/create", url.Values{"name": {name}}, c, into(&made))
	return made.ID, err
}

// ContainerCall does to a container what has no answer: start, pause, unpause. What is so already
// is success for start alone.
func (a *API) ContainerCall(ctx context.Context, id, what string) error {
	return a.request(ctx, what+" of a container", http.MethodPost, "/containers/"+url.PathEscape(id)+"/"+what, nil, nil, nil)
}

// RemoveContainer ends a container at once and removes it, with the volumes that have no name.
// NotFound: it is gone. Conflict: somebody else is removing it.
func (a *API) RemoveContainer(ctx context.Context, id string) error {
	return a.request(ctx, "removing a container", http.MethodDelete, "/containers/"+url.PathEscape(id), url.Values{"force": {"1"}, "v": {"1"}}, nil, nil)
}

// A ContainerSummary is a container as listings have it.
type ContainerSummary struct {
	ID      string `json:"Id"`
	Names   []string
	ImageID string
	Labels  map[string]string
	State   string
}

// ListContainers lists containers, in whatever condition, that have all of these labels; an empty value
// stands for any.
func (a *API) ListContainers(ctx context.Context, labels map[string]string) (list []ContainerSummary, err error) {
	q := filters(map[string][]string{"label": labelFilter(labels)})
	q.Set("all", "1")
	err = a.request(ctx, "listing containers", http.MethodGet, "/containers/json", q, nil, into(&list))
	return list, err
}

// A ContainerDetail is what an engine tells of one container.
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

// InspectContainer tells of one container, by ID or name.
func (a *API) InspectContainer(ctx context.Context, id string) (c ContainerDetail, err error) {
	err = a.request(ctx, "looking at a container", http.MethodGet, "/containers/"+url.PathEscape(id)+"/json", nil, nil, into(&c))
	return c, err
}

// WrittenBytes is how large what a container has written is, or -1 where the engine cannot tell: the sizes of its files as they are read, so
// that what a sparse file leaves out counts, too, as it does in an image. The engine looks at every one of them.
func (a *API) WrittenBytes(ctx context.Context, id string) (int64, error) {
	c := struct{ SizeRw *int64 }{}
	err := a.request(ctx, "measuring a container", http.MethodGet, "/containers/"+url.PathEscape(id)+"/json", url.Values{"size": {"1"}}, nil, into(&c))
	if err != nil || c.SizeRw == nil {
		return -1, err
	}
	return *c.SizeRw, nil
}

// An Event is what an engine tells of a container.
type Event struct {
	ID     string            // of the container
	Action string            // die, pause, unpause, destroy, …; Podman has died and remove
	Labels map[string]string // of the container, beside what else the engine says of it
}

// maxEvent bounds what an engine says of one event.
const maxEvent = 1 << 20

// Events gives what the engine tells of containers with all of these labels to f, from when it calls opened
// on, until ctx ends or the engine does, and returns why. f is called by one goroutine, and what it does not take
// in time waits at the engine.
func (a *API) Events(ctx context.Context, labels map[string]string, opened func(), f func(Event)) error {
	q := filters(map[string][]string{"type": {"container"}, "label": labelFilter(labels)})
	return a.request(ctx, "listening to it", http.MethodGet, "/events", q, nil, func(res *http.Response) error {
		opened()
		lines := bufio.NewScanner(res.Body)
		lines.Buffer(nil, maxEvent)
		for lines.Scan() {
			var ev struct {
				Action string
				Actor  struct {
					ID         string
					Attributes map[string]string
				}
			}
			if err := json.Unmarshal(lines.Bytes(), &ev); err != nil {
				return err
			}
			f(Event{ID: ev.Actor.ID, Action: ev.Action, Labels: ev.Actor.Attributes})
		}
		if err := lines.Err(); err != nil {
			return err
		}
		return io.ErrUnexpectedEOF
	})
}

// PutArchive unpacks a tar into a directory of a container, which need not run.
func (a *API) PutArchive(ctx context.Context, id, dir string, tar io.Reader) error {
	return a.request(ctx, "bringing files into a container", http.MethodPut, "/containers/"+url.PathEscape(id)+"/archive", url.Values{"path": {dir}}, tar, nil)
}

// GetArchive gives a tar of a path of a container, which need not run, to read.
func (a *API) GetArchive(ctx context.Context, id, path string, read func(io.Reader) error) error {
	return a.request(ctx, "reading files of a container", http.MethodGet, "/containers/"+url.PathEscape(id)+"/archive", url.Values{"path": {path}}, nil,
		func(res *http.Response) error { return read(res.Body) })
}

// StatFile tells what is at a path of a container, which need not run; a symbolic link is not followed, but for those on the way.
// Where it leads in the end, as far as that is there, is target. NotFound: nothing is.
func (a *API) StatFile(ctx context.Context, id, path string) (mode fs.FileMode, target string, err error) {
	err = a.request(ctx, "looking into a container", http.MethodHead, "/containers/"+url.PathEscape(id)+"/archive", url.Values{"path": {path}}, nil,
		func(res *http.Response) error {
			data, err := base64.StdEncoding.DecodeString(res.Header.Get("X-Docker-Container-Path-Stat"))
			if err != nil {
				return err
			}
			var st struct {
				Mode       fs.FileMode
				LinkTarget string
			}
			err = json.Unmarshal(data, &st)
			mode, target = st.Mode, st.LinkTarget
			return err
		})
	return mode, target, err
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

// ContainerStats returns what a container uses. What the engine does not tell is negative, and the disk always is.
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

// An APIImage is what an engine tells of an image.
type APIImage struct {
	ID           string `json:"Id"`
	RepoTags     []string
	Os           string
	Architecture string
	Size         int64
	Created      time.Time
	Config       struct {
		User         string
		Env          []string
		Entrypoint   []string
		Cmd          []string
		WorkingDir   string
		StopSignal   string
		Labels       map[string]string
		Volumes      map[string]struct{}
		ExposedPorts map[string]struct{}
	}
}

// InspectImage tells of one image, by name or ID.
func (a *API) InspectImage(ctx context.Context, name string) (i APIImage, err error) {
	err = a.request(ctx, "looking at an image", http.MethodGet, "/images/"+escapeImage(name)+"/json", nil, nil, into(&i))
	return i, err
}

// escapeImage keeps slashes, which names of images have.
func escapeImage(name string) string { return strings.ReplaceAll(url.PathEscape(name), "%2F", "/") }

// An ImageSummary is an image as listings have it.
type ImageSummary struct {
	ID       string `json:"Id"`
	RepoTags []string
	Labels   map[string]string
	Size     int64
	Created  int64 // seconds since 1970
}

// ListImages lists the images of a name, tag or not, if that is not empty, that have all of these labels.
func (a *API) ListImages(ctx context.Context, name string, labels map[string]string) (list []ImageSummary, err error) {
	f := map[string][]string{}
	if name != "" {
		f["reference"] = []string{name}
	}
	if len(labels) > 0 {
		f["label"] = labelFilter(labels)
	}
	err = a.request(ctx, "listing images", http.MethodGet, "/images/json", filters(f), nil, into(&list))
	return list, err
}

// LoadImage reads an image in the form of docker save.
func (a *API) LoadImage(ctx context.Context, tar io.Reader) error {
	return a.request(ctx, "loading an image", http.MethodPost, "/images/load", url.Values{"quiet": {"1"}}, tar, a.progress("loading an image"))
}

// progress reads an answer in lines, the last of which may be an error.
func (a *API) progress(what string) func(*http.Response) error {
	return func(res *http.Response) error {
		d := json.NewDecoder(io.LimitReader(res.Body, maxAPIAnswer))
		for {
			var line struct {
				Error string `json:"error"`
			}
			err := d.Decode(&line)
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			if line.Error != "" {
				return a.refused(what, 0, line.Error)
			}
		}
	}
}

// RemoveImage removes a name of an image, and the image with its last one. NotFound: it is gone.
// Conflict: a container is made of it.
func (a *API) RemoveImage(ctx context.Context, name string) error {
	return a.request(ctx, "removing an image", http.MethodDelete, "/images/"+escapeImage(name), nil, nil, nil)
}

// TagImage gives an image a further name.
func (a *API) TagImage(ctx context.Context, name, repo, tag string) error {
	return a.request(ctx, "naming an image", http.MethodPost, "/images/"+escapeImage(name)+"/tag", url.Values{"repo": {repo}, "tag": {tag}}, nil, nil)
}

// SaveImage gives an image in the form of docker save to read.
func (a *API) SaveImage(ctx context.Context, name string, read func(io.Reader) error) error {
	return a.request(ctx, "reading an image", http.MethodGet, "/images/"+escapeImage(name)+"/get", nil, nil,
		func(res *http.Response) error { return read(res.Body) })
}

// Commit makes an image of a container's files, which stands still meanwhile, and returns its ID. Labels have
// neither quotes nor backslashes.
func (a *API) Commit(ctx context.Context, id, repo, tag string, labels map[string]string) (string, error) {
	q := url.Values{"container": {id}, "repo": {repo}, "tag": {tag}, "pause": {"1"}}
	for k, v := range labels {
		q.Add("changes", "LABEL "+k+"="+strconv.Quote(v))
	}
	var made struct{ ID string }
	err := a.request(ctx, "saving a container", http.MethodPost, "/commit", q, struct{}{}, into(&made))
	return digestID(made.ID), err
}

// digestID is an image's ID as all answers have it but Podman's about a commit.
func digestID(id string) string {
	if id == "" || strings.Contains(id, ":") {
		return id
	}
	return "sha256:" + id
}

// An APIVolume is what an engine tells of a volume.
type APIVolume struct {
	Name      string
	Labels    map[string]string
	CreatedAt string

	Mountpoint string // where its files are on the engine's machine
}

// ListVolumes lists volumes whose names have that in them.
func (a *API) ListVolumes(ctx context.Context, name string) ([]APIVolume, error) {
	var list struct{ Volumes []APIVolume }
	err := a.request(ctx, "listing volumes", http.MethodGet, "/volumes", filters(map[string][]string{"name": {name}}), nil, into(&list))
	return list.Volumes, err
}

// CreateVolume makes a volume, or finds the one of that name.
func (a *API) CreateVolume(ctx context.Context, name string, labels map[string]string) (v APIVolume, err error) {
	err = a.request(ctx, "making a volume", http.MethodPost, "/volumes/create", nil, map[string]any{"Name": name, "Labels": labels}, into(&v))
	return v, err
}

// RemoveVolume removes a volume. NotFound: it is gone. Conflict: a container has it.
func (a *API) RemoveVolume(ctx context.Context, name string) error {
	return a.request(ctx, "removing a volume", http.MethodDelete, "/volumes/"+url.PathEscape(name), nil, nil, nil)
}

// Exec runs a command in a running container, as user, with streams, and returns how it ended.
// Its parameters are those of agent.RunFunc. When ctx is done the connection is closed, and with it
// the command's input: engines have no way to end a command.
func (a *API) Exec(ctx context.Context, id, user string, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
	var made struct{ ID string }
	err := a.request(ctx, "a command", http.MethodPost, "/containers/"+url.PathEscape(id)+"/exec", nil, map[string]any{
		"AttachStdin": true, "AttachStdout": true, "AttachStderr": true, "Cmd": args, "User": user,
	}, into(&made))
	if err != nil {
		return sandboxer.Exit{}, err
	}
	conn, r, err := a.attach(ctx, made.ID)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	go func() { // which ends with conn, or when in does
		_, err := io.Copy(conn, in)
		if err == nil {
			_ = halfclose.CloseWrite(conn)
		}
	}()
	err = demux(r, out, errs)
	if ctx.Err() != nil {
		return sandboxer.Exit{}, ctx.Err()
	}
	if err != nil {
		return sandboxer.Exit{}, sandboxer.E(sandboxer.Unavailable, err, "the streams of a command in the engine %s broke", a.o.Name)
	}
	// The streams may end a moment before the command is known to have ended.
	var state struct {
		Running  bool
		ExitCode *int
	}
	for try := 0; ; try++ {
		err := a.request(ctx, "a command", http.MethodGet, "/exec/"+made.ID+"/json", nil, nil, into(&state))
		if err != nil {
			return sandboxer.Exit{}, err
		}
		if !state.Running && state.ExitCode != nil {
			return sandboxer.Exit{Code: *state.ExitCode}, nil
		}
		if try == 200 {
			return sandboxer.Exit{}, sandboxer.E(sandboxer.Unavailable, nil, "the engine %s does not say how a command ended", a.o.Name)
		}
		select {
		case <-ctx.Done():
			return sandboxer.Exit{}, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// attach starts a command, and returns the connection that is its streams from then on.
func (a *API) attach(ctx context.Context, exec string) (net.Conn, *bufio.Reader, error) {
	within, done, err := a.Attend(ctx)
	if err != nil {
		return nil, nil, err
	}
	conn, r, err := a.upgrade(within, exec)
	return conn, r, done(err)
}

func (a *API) upgrade(ctx context.Context, exec string) (_ net.Conn, _ *bufio.Reader, err error) {
	conn, err := a.o.Dial(ctx)
	if err != nil {
		return nil, nil, a.failed(ctx, err)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer func() {
		if !stop() && err == nil {
			err = a.failed(ctx, ctx.Err())
		}
		if err != nil {
			conn.Close()
		}
	}()
	body := []byte(`{"Detach":false,"Tty":false}`)
	r, err := http.NewRequest(http.MethodPost, "http://engine"+apiVersion+"/exec/"+url.PathEscape(exec)+"/start", bytes.NewReader(body))
	if err != nil {
		return nil, nil, sandboxer.E(sandboxer.Internal, err, "a request to the engine cannot be made")
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", "tcp")
	if err := r.Write(conn); err != nil {
		return nil, nil, a.failed(ctx, err)
	}
	br := bufio.NewReaderSize(conn, 32<<10)
	res, err := http.ReadResponse(br, r)
	if err != nil {
		return nil, nil, a.failed(ctx, err)
	}
	if res.StatusCode != http.StatusSwitchingProtocols && res.StatusCode != http.StatusOK {
		return nil, nil, a.said("a command", res)
	}
	return conn, br, nil
}

// demux separates the streams that an engine sends as one, until they end.
func demux(r io.Reader, out, errs io.Writer) error {
	var head [8]byte
	for {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		to := out
		switch head[0] {
		case 0, 1:
		case 2:
			to = errs
		default:
			return fmt.Errorf("a frame begins with %d", head[0])
		}
		if _, err := io.CopyN(to, r, int64(binary.BigEndian.Uint32(head[4:]))); err != nil {
			return err
		}
	}
}
