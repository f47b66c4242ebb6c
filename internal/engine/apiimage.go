package engine

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// An APIImage is an engine's description of an image.
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

// InspectImage describes one image, by name or ID.
func (a *API) InspectImage(ctx context.Context, name string) (i APIImage, err error) {
	err = a.request(ctx, "inspecting an image", http.MethodGet, "/images/"+escapeImage(name)+"/json", nil, nil, into(&i))
	return i, err
}

// escapeImage keeps the slashes in an image's name.
func escapeImage(name string) string { return strings.ReplaceAll(url.PathEscape(name), "%2F", "/") }

// An ImageSummary is an image as listings have it.
type ImageSummary struct {
	ID       string `json:"Id"`
	RepoTags []string
	Labels   map[string]string
	Size     int64
	Created  int64 // seconds since 1970
}

// ListImages lists the images of a name, tagged or not, if that is not empty, that have all of these labels.
func (a *API) ListImages(ctx context.Context, name string, labels map[string]string) (list []ImageSummary, err error) {
	f := map[string][]string{}
	if name != "" {
		f["reference"] = []string{name}
	}
	if len(labels) > 0 {
		f["label"] = labelFilter(labels)
	}
	for range 3 { // Podman fails if an image is removed while it lists them
		list = nil
		err = a.request(ctx, "listing images", http.MethodGet, "/images/json", filters(f), nil, into(&list))
		if sandboxer.KindOf(err) != sandboxer.Failed {
			break
		}
	}
	return list, err
}

// LoadImage reads an image in the form of docker save.
func (a *API) LoadImage(ctx context.Context, tar io.Reader) error {
	return a.request(ctx, "loading an image", http.MethodPost, "/images/load", url.Values{"quiet": {"1"}}, tar, a.progress("loading an image"))
}

// progress reads an answer line by line. The last line may be an error.
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

// RemoveImage removes a name of an image, and the image with its last one. Absence is
// success. Conflict: a container is made of it.
func (a *API) RemoveImage(ctx context.Context, name string) error {
	return a.remove(ctx, "removing an image", "/images/"+escapeImage(name), nil)
}

// TagImage gives an image a further name.
func (a *API) TagImage(ctx context.Context, name, repo, tag string) error {
	return a.request(ctx, "naming an image", http.MethodPost, "/images/"+escapeImage(name)+"/tag", url.Values{"repo": {repo}, "tag": {tag}}, nil, nil)
}

// SaveImage passes an image in the form of docker save to read.
func (a *API) SaveImage(ctx context.Context, name string, read func(io.Reader) error) error {
	return a.request(ctx, "reading an image", http.MethodGet, "/images/"+escapeImage(name)+"/get", nil, nil,
		func(res *http.Response) error { return read(res.Body) })
}

// Commit makes an image of a container's files, and returns its ID. The container is paused meanwhile. Labels must
// not contain quotes or backslashes.
func (a *API) Commit(ctx context.Context, id, repo, tag string, labels map[string]string) (string, error) {
	q := url.Values{"container": {id}, "repo": {repo}, "tag": {tag}, "pause": {"1"}}
	for k, v := range labels {
		q.Add("changes", "LABEL "+k+"="+strconv.Quote(v))
	}
	var made struct{ ID string }
	err := a.request(ctx, "saving a container", http.MethodPost, "/commit", q, struct{}{}, into(&made))
	return digestID(made.ID), err
}

// digestID is an image's ID in the form that all answers have, except Podman's to a commit.
func digestID(id string) string {
	if id == "" || strings.Contains(id, ":") {
		return id
	}
	return "sha256:" + id
}

// An APIVolume is an engine's description of a volume.
type APIVolume struct {
	Name      string
	Labels    map[string]string
	CreatedAt string

	Mountpoint string // where its files are on the engine's machine
}

// ListVolumes lists volumes whose names contain name.
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

// RemoveVolume removes a volume. Absence is success. Conflict: a container uses it.
func (a *API) RemoveVolume(ctx context.Context, name string) error {
	return a.remove(ctx, "removing a volume", "/volumes/"+url.PathEscape(name), nil)
}
